"""The registry of models in virtual time: states, the queue of those who wait, reloads, eviction, idle models, failures."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio

from uma_trio import config
from uma_trio.daemon.registry import ModelRegistry, ModelSpec, Needs
from uma_trio.errors import (
    ErrorWithRemedy,
    ModelLoading,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    ShuttingDown,
    UmaError,
)
from uma_trio.protocol.answers import HealthCheck, ModelDescription

LOAD_S = 10.0


class FakeScheduler:
    n_threads = 4

    async def wait_idle(self) -> None:
        await trio.lowlevel.checkpoint()

    def set_threads(self, n_threads: int) -> None:
        self.n_threads = n_threads


class FakeService:
    """A service without an engine: it serves while ``run`` does."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.running = self.saved = False
        self.scheduler = FakeScheduler()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.running = True
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.running = False

    async def save_everything(self) -> None:
        await trio.lowlevel.checkpoint()
        assert self.running
        self.saved = True

    n_threads = 4

    def drain(self) -> None: ...
    def stop(self) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return {"model": self.name}

    def health(self) -> list[HealthCheck]:
        return [HealthCheck(name="engine", ok=True, reason="running", model=self.name)]

    def description(self) -> ModelDescription:
        return described(self.name)


def described(name: str) -> ModelDescription:
    numbers = dict.fromkeys(
        ("size_bytes", "n_parameters", "context", "context_per_request", "parallel", "embedding_length"), 1
    )
    return ModelDescription(name=name, description="", architecture="", capabilities=["completion"], **numbers)


class Opened:
    def __init__(self, opener: FakeOpener, spec: ModelSpec) -> None:
        self.opener = opener
        self.service: Any = FakeService(spec.name, opener.n_loads)
        self.memory_bytes = opener.sizes.get(spec.name, 100)
        self.storage_name = opener.storage.get(spec.name, spec.name)

    async def open_storage(self) -> None:
        await trio.sleep(self.opener.opening_s)
        if self.opener.storage_error is not None:
            raise self.opener.storage_error
        assert self.storage_name not in self.opener.open_storages, "two copies have the same sessions open"
        self.opener.open_storages[self.storage_name] = self


class FakeOpener:
    """Loads in ``LOAD_S``, and knows what is loaded at each time."""

    def __init__(self, budget: int = 0, **sizes: int) -> None:
        self.budget_bytes = budget
        self.budget_is_set = budget > 0
        self.least: dict[str, int] = {}
        """What a model takes with the least context."""
        self.rooms: dict[str, int] = {}
        self.n_threads = 5
        self.on_demand = True
        self.sizes = sizes
        self.storage: dict[str, str] = {}
        self.failures: dict[str, Exception] = {}
        self.fails: Callable[[], bool] = lambda: True
        self.opening_s = 0.0
        self.storage_error: OSError | None = None
        self.specs: dict[str, ModelSpec] = {}
        self.others: dict[str, ModelSpec] = {}
        self.loaded: list[Opened] = []
        self.open_storages: dict[str, Opened] = {}
        self.n_loads = 0
        self.most_loaded = 0

    @contextlib.asynccontextmanager
    async def open(
        self,
        spec: ModelSpec,
        room_bytes: int,
        on_progress: Callable[[float], None],
        should_continue: Callable[[], bool],
    ) -> AsyncIterator[Opened | None]:
        self.rooms[spec.name] = room_bytes
        for step in range(1, 5):
            await trio.sleep(LOAD_S / 4)
            if not should_continue():
                yield None
                return
            on_progress(step / 4)
        if spec.name in self.failures and self.fails():
            raise self.failures[spec.name]
        self.n_loads += 1
        self.specs[spec.name] = spec
        opened = Opened(self, spec)
        if room_bytes:
            opened.memory_bytes = min(opened.memory_bytes, room_bytes)
        self.loaded.append(opened)
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        try:
            yield opened
        finally:
            self.loaded.remove(opened)
            if self.open_storages.get(opened.storage_name) is opened:
                del self.open_storages[opened.storage_name]

    async def needs(self, spec: ModelSpec) -> Needs:
        whole = self.sizes.get(spec.name, 100)
        return Needs(whole=whole, least=self.least.get(spec.name, whole))

    async def describe(self, spec: ModelSpec) -> ModelDescription:
        return described(spec.name)

    async def find(self, name: str) -> ModelSpec | None:
        return self.others.get(name)

    async def installed(self) -> list[ModelSpec]:
        return [*self.others.values()]

    @property
    def names(self) -> list[str]:
        return [opened.service.name for opened in self.loaded]


def spec_of(name: str, **fields: Any) -> ModelSpec:
    settings = attrs.evolve(config.Config(), model=config.Model(model=f"/models/{name}.gguf"))
    return ModelSpec(name=name, config=settings, **{"at_start": False, **fields})


@contextlib.asynccontextmanager
async def registry(
    *specs: ModelSpec, opener: FakeOpener, owner: str = "", loads_default: bool = True, **limits: Any
) -> AsyncIterator[ModelRegistry]:
    default, *others = specs
    specs = (attrs.evolve(default, at_start=loads_default), *others)
    models = ModelRegistry(specs, opener, config.load(flags=limits), owner)
    async with models.running():
        assert await models.start(None, lambda: True)
        yield models
    assert opener.loaded == []
    assert opener.open_storages == {}


def states(models: ModelRegistry) -> dict[str, str]:
    return {name: found["state"] for name, found in models.snapshot()["models"].items()}


async def hold(models: ModelRegistry, name: str | None, seconds: float, principal: str = "uid1", **options: Any) -> int:
    """Use a model for a time; returns which load it was."""
    async with models.use(name, principal, **options) as service:
        await trio.sleep(seconds)
        assert service.running, "the model was unloaded while a request used it"  # type: ignore[attr-defined]
        return service.number  # type: ignore[attr-defined,no-any-return]


async def test_the_first_model_and_those_of_the_start_are_loaded_before_anything_is_served(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b", at_start=True), spec_of("c"), opener=opener) as models:
        assert states(models) == {"a": "ready", "b": "ready", "c": "unloaded"}
        assert models.loaded() is models.loaded("a") is not None
        assert models.loaded("c") is None


async def test_a_daemon_can_serve_before_any_model_is_loaded(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener, loads_default=False) as models:
        assert states(models) == {"a": "unloaded", "b": "unloaded"}
        assert models.loaded() is models.watched(None) is None
        assert [check.ok for check in models.health()] == [True, True]
        assert await hold(models, None, 0) == 1


async def test_all_who_wait_share_one_load(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:
        began = trio.current_time()
        for _ in range(20):
            nursery.start_soon(hold, models, "b", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert states(models)["b"] == "loading"
        assert models.snapshot()["models"]["b"]["waiting"] == 20
        nursery.cancel_scope.deadline = trio.current_time() + 100
    assert trio.current_time() - began == pytest.approx(LOAD_S + 1)
    assert opener.n_loads == 2


async def test_who_waits_hears_of_the_progress(autojump_clock) -> None:
    heard: list[tuple[str, str, float]] = []
    async with registry(spec_of("a"), spec_of("b"), opener=FakeOpener()) as models:
        await hold(models, "b", 0, on_wait=lambda *found: heard.append(found))
        await hold(models, "b", 0, on_wait=lambda *found: heard.append(found))
    assert heard == [("b", "loading", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]


async def test_names_aliases_and_endings(autojump_clock) -> None:
    async with registry(spec_of("a"), spec_of("b", aliases=("gpt",)), opener=FakeOpener()) as models:
        assert await hold(models, "gpt", 0) == await hold(models, "b.gguf", 0) == 2
        assert await hold(models, "a.gguf", 0) == 1
        async with models.use(None, "uid1") as default:
            assert default.name == "a"
        with pytest.raises(ModelNotFound, match="no model 'x'; this daemon serves a, b"):
            await hold(models, "x", 0)


async def test_the_queue_of_a_model_that_loads_is_bounded(autojump_clock) -> None:
    async with (
        registry(spec_of("a"), spec_of("b"), opener=FakeOpener(), max_queue=2) as models,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(hold, models, "b", 0)
        nursery.start_soon(hold, models, "b", 0)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match="2 requests wait for the model b") as caught:
            await hold(models, "b", 0)
        assert caught.value.retry_after_ms
        await hold(models, "a", 0)  # others are not concerned


async def test_a_request_waits_for_a_bounded_time_and_the_load_goes_on(autojump_clock) -> None:
    async with registry(spec_of("a"), spec_of("b"), opener=FakeOpener(), load_wait_s=6) as models:
        with pytest.raises(ModelLoading, match="not ready within 6 s: 50% of it are loaded") as caught:
            await hold(models, "b", 0)
        assert caught.value.retry_after_ms
        await trio.sleep(LOAD_S)
        assert states(models)["b"] == "ready"
        assert models.snapshot()["models"]["b"]["waiting"] == 0


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_load_alone(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models:
        with trio.move_on_after(3):
            await hold(models, "b", 0)
        await hold(models, "b", 0)
    assert opener.n_loads == 2


async def test_a_failed_load_is_reported_to_all_who_wait_and_tried_again_later(autojump_clock) -> None:
    opener = FakeOpener()
    opener.failures["b"] = ErrorWithRemedy("cannot load b.gguf: it is damaged", "get it again")
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models:
        failures: list[UmaError] = []

        async def fail() -> None:
            with pytest.raises(ModelUnavailable, match=r"b cannot be loaded: .* it is damaged; get it again") as caught:
                await hold(models, "b", 0)
            failures.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(fail)
        assert len({id(each) for each in failures}) == 3  # each has the id of its own request
        assert states(models)["b"] == "failed"
        [problem] = [check for check in models.health() if not check.ok]
        assert "it is damaged" in problem.reason
        before = trio.current_time()
        await fail()
        assert trio.current_time() == before  # at once
        [_, b] = await models.descriptions()
        assert b.reason == "cannot load b.gguf: it is damaged; get it again"
        del opener.failures["b"]
        await trio.sleep(5)
        await hold(models, "b", 0)
        assert states(models)["b"] == "ready"


async def test_a_reload_drops_no_request(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models, trio.open_nursery() as nursery:
        served: list[tuple[float, int]] = []

        async def ask(seconds: float) -> None:
            served.append((trio.current_time(), await hold(models, "a", seconds)))

        async def ask_forever() -> None:
            while True:
                nursery.start_soon(ask, 7)
                await trio.sleep(0.5)

        nursery.start_soon(ask, 60)  # a long answer, which the old copy finishes
        asking = trio.CancelScope()

        async def load() -> None:
            with asking:
                await ask_forever()

        nursery.start_soon(load)
        await trio.sleep(3)
        reloaded_at = trio.current_time()
        await models.reload("a")
        assert trio.current_time() - reloaded_at == pytest.approx(LOAD_S)  # the old copy served meanwhile
        assert opener.names == ["a", "a"]
        await trio.sleep(60)
        asking.cancel()
        assert opener.names == ["a"]
        assert {number for at, number in served if at < reloaded_at + LOAD_S - 0.1} == {1}
        assert {number for at, number in served if at > reloaded_at + LOAD_S + 0.1} == {2}
        assert models.snapshot()["models"]["a"]["unloads_total"] == 1


async def test_sessions_wait_for_the_copy_that_has_them(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 30)
        await trio.testing.wait_all_tasks_blocked()
        await models.reload("a")
        assert await hold(models, "a", 0) == 2
        before = trio.current_time()
        assert await hold(models, "a", 0, session=True) == 2
        assert trio.current_time() - before == pytest.approx(30 - LOAD_S)


async def test_without_memory_for_two_copies_a_reload_drains_first_and_requests_wait(autojump_clock) -> None:
    opener = FakeOpener(budget=150)
    async with registry(spec_of("a"), opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 20)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(models.reload, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert states(models) == {"a": "loading"}
        began = trio.current_time()
        assert await hold(models, "a", 0) == 2
        assert trio.current_time() - began == pytest.approx(20 + LOAD_S)
    assert opener.most_loaded == 1


async def test_a_reload_that_fails_leaves_the_old_copy(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models:
        opener.failures["a"] = ErrorWithRemedy("it is damaged")
        with pytest.raises(ModelUnavailable, match="it is damaged"):
            await models.reload("a")
        assert await hold(models, "a", 0) == 1
        assert states(models) == {"a": "ready"}
        assert models.snapshot()["models"]["a"]["load_failures_total"] == 1


async def test_the_idle_model_that_was_used_least_recently_makes_room(autojump_clock) -> None:
    opener = FakeOpener(budget=250)
    specs = [spec_of("a", pinned=True), *[spec_of(name) for name in "bcd"]]
    async with registry(*specs, opener=opener, max_loaded_models=3) as models:
        opener.budget_bytes = 350
        await hold(models, "b", 0)
        await trio.sleep(1)
        await hold(models, "c", 0)
        await trio.sleep(1)
        await hold(models, "b", 0)
        await hold(models, "d", 0)
        assert opener.names == ["a", "b", "d"]
        assert states(models) == {"a": "ready", "b": "ready", "c": "unloaded", "d": "ready"}
        assert models.snapshot()["models"]["c"]["evictions_total"] == 1
    assert opener.most_loaded == 3


async def test_a_model_with_requests_is_not_evicted(autojump_clock) -> None:
    opener = FakeOpener(budget=250)
    async with (
        registry(spec_of("a"), spec_of("b"), spec_of("c"), opener=opener) as models,
        trio.open_nursery() as nursery,
    ):
        for name in "ab":
            nursery.start_soon(hold, models, name, 40)
        await trio.sleep(LOAD_S + 1)
        began = trio.current_time()
        assert await hold(models, "c", 0) == 3  # when a, the first of the two, has no request any more
        assert trio.current_time() - began == pytest.approx(40 - LOAD_S - 1 + LOAD_S)
        assert opener.names == ["b", "c"]
    assert opener.most_loaded == 2


async def test_pinned_models_leave_no_room_and_the_error_has_the_numbers(autojump_clock) -> None:
    opener = FakeOpener(budget=150_000_000, a=100_000_000, b=100_000_000)
    async with registry(spec_of("a", pinned=True), spec_of("b"), opener=opener) as models:
        with pytest.raises(ModelUnavailable, match=r"about 100 MB, and 100 of 150 MB are taken .*by a, which stay"):
            await hold(models, "b", 0)


async def test_nothing_is_evicted_for_a_load_that_nobody_waits_for(autojump_clock) -> None:
    opener = FakeOpener(budget=150)
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 30)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await hold(models, "b", 0)
        await trio.sleep(60)
        assert states(models) == {"a": "ready", "b": "unloaded"}


async def test_an_idle_model_is_unloaded_and_comes_back(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b", idle_unload_s=60.0), opener=opener) as models:
        await hold(models, "b", 0)
        await trio.sleep(50)
        await hold(models, "b", 30)
        await trio.sleep(59)
        assert states(models) == {"a": "ready", "b": "ready"}
        [_, b] = await models.descriptions()
        assert b.unloads_in_s == pytest.approx(1)
        await trio.sleep(2)
        assert states(models) == {"a": "ready", "b": "unloaded"}
        await hold(models, "b", 0)
        assert states(models) == {"a": "ready", "b": "ready"}


async def test_a_pinned_model_stays_however_long_it_is_idle(autojump_clock) -> None:
    async with registry(spec_of("a", pinned=True, idle_unload_s=60.0), opener=FakeOpener()) as models:
        await trio.sleep(1000)
        assert states(models) == {"a": "ready"}


async def test_release_unloads_what_nobody_else_has_used(autojump_clock) -> None:
    async with registry(spec_of("a"), spec_of("p", pinned=True, at_start=True), opener=FakeOpener()) as models:
        assert (await models.release("p", "uid1")).state == "ready", "pinned"
        await hold(models, "a", 0)
        async with models.use("a", "uid1"):
            assert (await models.release("a", "uid1")).state == "ready", "in use"
        assert (await models.release("a", "uid2")).state == "ready", "somebody else uses it"
        assert (await models.release("a", "uid1")).state == "unloaded"
        assert (await models.release("a", "uid1")).state == "unloaded", "again"
        assert await hold(models, "a", 0, "uid2") == 3
        await hold(models, "a", 0, "uid1")
        assert (await models.release("a", "uid1")).state == "ready"
        await models.unload("a")
        await hold(models, "a", 0, "uid1")
        assert (await models.release("a", "uid1")).state == "unloaded", "another copy, that uid2 has not used"


async def test_release_after_a_reload_waits_until_the_copy_before_has_ended(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models:
        [old] = [opened.service for opened in opener.loaded]

        async def save_for_long() -> None:
            await trio.sleep(20)

        old.save_everything = save_for_long
        assert (await models.reload("a")).state == "ready"
        assert old.running
        assert (await models.release("a", "uid1")).state == "unloaded"
        assert opener.loaded == []


async def test_release_leaves_a_model_alone_whose_copy_before_still_serves(autojump_clock) -> None:
    async with registry(spec_of("a"), opener=FakeOpener()) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 100)
        await models.reload("a")
        assert (await models.release("a", "uid1")).state == "ready"


async def test_unload_waits_for_requests_and_the_next_one_loads_again(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 20)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.start_soon(models.unload, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert states(models) == {"a": "draining"}
        [service] = [opened.service for opened in opener.loaded]
        await trio.sleep(21)
        assert states(models) == {"a": "unloaded"}
        assert service.saved
        assert trio.current_time() - began == pytest.approx(21)
        assert await hold(models, "a", 0) == 2


async def test_models_of_this_machine_are_found_on_demand_and_forgotten(autojump_clock) -> None:
    opener = FakeOpener()
    opener.others["owner/x:Q8_0"] = spec_of("owner/x:Q8_0", is_configured=False, idle_unload_s=60.0)
    async with registry(spec_of("a"), opener=opener) as models:
        assert [found.name for found in await models.descriptions()] == ["a", "owner/x:Q8_0"]
        await hold(models, "owner/x:Q8_0", 0)
        assert [found.name for found in await models.descriptions()] == ["a", "owner/x:Q8_0"]
        await trio.sleep(100)
        assert list(models.snapshot()["models"]) == ["a"]


async def test_a_name_of_a_configured_file_is_that_model(autojump_clock) -> None:
    opener = FakeOpener()
    opener.others["other"] = attrs.evolve(spec_of("a"), name="other", is_configured=False)
    async with registry(spec_of("a"), opener=opener) as models:
        assert await hold(models, "other", 0) == 1


async def test_without_on_demand_another_name_of_a_configured_file_counts_and_no_other_model(autojump_clock) -> None:
    opener = FakeOpener()
    opener.on_demand = False
    opener.others["alias"] = attrs.evolve(spec_of("a"), name="alias", is_configured=False)
    opener.others["x:Q8_0"] = spec_of("x:Q8_0", is_configured=False)
    async with registry(spec_of("a"), opener=opener) as models:
        assert await hold(models, "alias", 0) == 1
        with pytest.raises(ModelNotFound, match=r"this daemon serves a; x:Q8_0 is on this machine.*--model x:Q8_0$"):
            await hold(models, "x:Q8_0", 0)
        with pytest.raises(ModelNotFound, match=r"this daemon serves a; choose one of these$"):
            await hold(models, "y", 0)


async def test_without_a_setting_only_the_owner_has_models_loaded_on_demand(autojump_clock) -> None:
    """A tenant may not even use one that the owner has had loaded."""
    opener = FakeOpener()
    opener.on_demand = None
    opener.others["x:Q8_0"] = spec_of("x:Q8_0", is_configured=False)
    async with registry(spec_of("a"), opener=opener, owner="me") as models:
        assert await hold(models, "x:Q8_0", 0, principal="me") == 2
        assert [found.name for found in await models.descriptions("me")] == ["a", "x:Q8_0"]
        assert [found.name for found in await models.descriptions("tenant:b")] == ["a"]
        for refused in (
            lambda: hold(models, "x:Q8_0", 0, principal="tenant:b"),
            lambda: models.describe("x:Q8_0", "tenant:b"),
            lambda: models.release("x:Q8_0", "tenant:b"),
        ):
            with pytest.raises(ModelNotFound, match=r"serves a; x:Q8_0 is .*to others than the user who.*--on-demand"):
                await refused()
        with pytest.raises(ModelNotFound, match=r"serves a, x:Q8_0; choose .*uma-trio pull downloads others$"):
            await hold(models, "y", 0, principal="me")


async def test_what_is_configured_now(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b", at_start=True), opener=opener) as models:
        changed = spec_of("b", at_start=True)
        settings = attrs.evolve(changed.config, model=attrs.evolve(changed.config.model, ctx=4096))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, models, "a", 30)
            await trio.testing.wait_all_tasks_blocked()
            models.update([attrs.evolve(changed, config=settings), spec_of("c", at_start=True)])
            assert models.names == ["b", "c"]
            with pytest.raises(ModelNotFound):
                await hold(models, "a", 0)
            await trio.sleep(2.5 * LOAD_S)
            assert sorted(opener.names) == ["a", "b", "c"]
        await trio.sleep(1)
        assert sorted(opener.names) == ["b", "c"]
        assert models.snapshot()["models"]["b"]["loads_total"] == 2


async def test_a_setting_of_the_daemon_reloads_nothing(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models:
        new = attrs.evolve(spec_of("a").config, operations=config.Operations(log_level="debug"))
        models.update([attrs.evolve(spec_of("a"), config=new)])
        await trio.sleep(2 * LOAD_S)
        assert models.snapshot()["models"]["a"]["loads_total"] == 1


async def test_who_waits_learns_that_the_daemon_stops(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:

        async def refused() -> None:
            with pytest.raises(ShuttingDown):
                await hold(models, "b", 0)

        nursery.start_soon(refused)
        await trio.sleep(3)
        models.drain()


async def test_models_with_the_same_sessions_open_them_one_after_the_other(autojump_clock) -> None:
    opener = FakeOpener()
    opener.storage = {"a": "same", "b": "same"}
    async with registry(spec_of("a"), spec_of("b"), opener=opener, load_wait_s=20) as models:
        assert await hold(models, "b", 0) == 2
        with pytest.raises(ModelLoading):
            await hold(models, "b", 0, session=True)
        await models.unload("a")
        assert await hold(models, "b", 0, session=True) == 2


async def test_models_with_requests_share_the_threads(autojump_clock) -> None:
    opener = FakeOpener()
    specs = [spec_of("a"), *[spec_of(name, at_start=True) for name in "bcd"]]

    def threads() -> dict[str, int]:
        return {opened.service.name: opened.service.scheduler.n_threads for opened in opener.loaded}

    async with registry(*specs, opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "a", 10)
        await trio.sleep(1)
        assert threads()["a"] == 4  # alone, it has all of its own
        nursery.start_soon(hold, models, "b", 5)
        await trio.sleep(0.01)
        assert (threads()["a"], threads()["b"]) == (2, 2)  # at once
        for name in "cd":
            nursery.start_soon(hold, models, name, 1)
        await trio.sleep(0.01)
        assert threads() == dict.fromkeys("abcd", 1)
        await trio.sleep(2)
        assert (threads()["a"], threads()["b"]) == (2, 2)
        await trio.sleep(3.1)
        assert threads()["a"] == 2  # not yet: b may get another request soon
        await trio.sleep(0.5)
        assert threads()["a"] == 4


async def test_models_whose_threads_fit_next_to_each_other_keep_them(autojump_clock) -> None:
    opener = FakeOpener()
    opener.n_threads = 8
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(hold, models, name, 20)
        await trio.sleep(15)
        assert [opened.service.scheduler.n_threads for opened in opener.loaded] == [4, 4]


async def test_steady_requests_of_others_keep_no_model_out(autojump_clock) -> None:
    opener = FakeOpener(budget=250)
    async with (
        registry(spec_of("a"), spec_of("b", at_start=True), spec_of("c"), opener=opener, load_wait_s=200) as models,
        trio.open_nursery() as nursery,
    ):
        served = dict.fromkeys("abc", 0)

        async def ask(name: str, offset: float) -> None:
            await trio.sleep(offset)
            while True:
                await hold(models, name, 3)
                served[name] += 1

        for name in "ab":
            nursery.start_soon(ask, name, 0)
            nursery.start_soon(ask, name, 1)  # so that it always has a request
        began = trio.current_time()
        await hold(models, "c", 0)
        assert trio.current_time() - began < 60
        await trio.sleep(100)
        assert min(served["a"], served["b"]) > 20
        assert opener.most_loaded == 2
        nursery.cancel_scope.cancel()


async def test_a_load_that_finds_too_little_memory_evicts_and_tries_again(autojump_clock) -> None:
    opener = FakeOpener()
    too_little = ErrorWithRemedy("the weights do not fit")
    too_little.is_about_memory = True
    async with registry(spec_of("a"), spec_of("b", at_start=True), spec_of("c"), opener=opener) as models:
        opener.failures["c"] = too_little
        opener.fails = lambda: len(opener.loaded) > 1
        async with models.use("a", "uid1"):
            assert await hold(models, "c", 0) == 3
            assert opener.names == ["a", "c"]
            with pytest.raises(ModelUnavailable, match="do not fit"):
                opener.fails = lambda: True
                await models.unload("c")
                await hold(models, "c", 0)


async def test_a_reload_that_finds_too_little_memory_for_two_drains_first(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models:
        opener.failures["a"] = ErrorWithRemedy("the weights do not fit")
        opener.failures["a"].is_about_memory = True
        opener.fails = lambda: len(opener.loaded) > 0
        await models.reload("a")
        assert await hold(models, "a", 0) == 2
    assert opener.most_loaded == 1


async def test_a_snapshot_is_that_of_one_model_and_has_the_others(autojump_clock) -> None:
    async with registry(spec_of("a"), spec_of("b", at_start=True), spec_of("c"), opener=FakeOpener()) as models:
        of_default, of_b = models.snapshot(), models.snapshot("b")
        assert (of_default["model"], of_default["models"]["b"]["metrics"]) == ("a", {"model": "b"})
        assert (of_b["model"], of_b["models"]["a"]["metrics"]) == ("b", {"model": "a"})
        assert "metrics" not in of_default["models"]["a"]
        assert "metrics" not in of_b["models"]["b"]
        assert (models.snapshot("c")["model"], models.snapshot("c")["running"]) == ("c", 0)
        await models.unload("a")
        assert models.snapshot()["model"] == "b"  # there is always something to see
        with pytest.raises(ModelNotFound):
            models.snapshot("d")


async def test_the_end_of_the_daemon_does_not_wait_for_sessions_that_are_being_opened(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:
        opener.opening_s = 1000.0
        nursery.start_soon(hold, models, "b", 0)
        await trio.sleep(LOAD_S + 1)
        assert opener.names == ["a", "b"]
        assert states(models)["b"] == "loading"
        nursery.cancel_scope.cancel()


async def test_a_copy_whose_sessions_cannot_be_opened_is_closed(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models:
        opener.storage_error = OSError("too many open files")
        with pytest.raises(ModelUnavailable, match="too many open files"):
            await hold(models, "b", 0)
        await trio.sleep(1)
        assert opener.names == ["a"]


async def test_settings_that_change_during_a_load_are_taken_over(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:
        nursery.start_soon(hold, models, "b", 0)
        await trio.sleep(1)
        settings = attrs.evolve(spec_of("b").config, model=config.Model(model="/models/b.gguf", ctx=4096))
        models.update([spec_of("a"), attrs.evolve(spec_of("b"), config=settings)])
        await trio.sleep(3 * LOAD_S)
        assert opener.specs["b"].config.model.ctx == 4096
        assert models.snapshot()["models"]["b"]["loads_total"] == 2


async def test_changed_settings_that_do_not_work_are_tried_once_and_the_old_copy_goes_on(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), opener=opener) as models:
        opener.failures["a"] = ErrorWithRemedy("no such chat template")
        settings = attrs.evolve(spec_of("a").config, model=config.Model(model="/models/a.gguf", ctx=4096))
        models.update([attrs.evolve(spec_of("a"), config=settings)])
        await trio.sleep(10 * LOAD_S)
        assert models.snapshot()["models"]["a"]["load_failures_total"] == 1
        assert await hold(models, "a", 0) == 1


async def test_a_model_that_is_removed_while_it_is_loaded_does_not_stay(autojump_clock) -> None:
    opener = FakeOpener()
    async with registry(spec_of("a"), spec_of("b"), opener=opener) as models, trio.open_nursery() as nursery:

        async def refused() -> None:
            with pytest.raises(ModelNotFound):
                await hold(models, "b", 0)

        nursery.start_soon(refused)
        await trio.sleep(1)
        models.update([spec_of("a")])
        await trio.sleep(2 * LOAD_S)
        assert opener.names == ["a"]


async def test_next_to_a_pinned_model_another_one_takes_what_is_left(autojump_clock) -> None:
    opener = FakeOpener(budget=150)
    opener.least["b"] = 30
    async with registry(spec_of("a", pinned=True), spec_of("b"), opener=opener) as models:
        assert await hold(models, "b", 0) == 2
        assert opener.rooms == {"a": 0, "b": 50}
        assert models.snapshot()["models"]["b"]["memory_bytes"] == 50
        await models.unload("b")
        opener.budget_bytes = 200
        await hold(models, "b", 0)
        assert opener.rooms["b"] == 0, "now there is room for the whole context"
