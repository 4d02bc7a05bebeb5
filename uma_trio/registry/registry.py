"""Which models are loaded, who waits for which, and what makes room for the next one.

A request that names a model which is not loaded has it loaded, and waits; all requests for a model share one load.
Models are loaded one after the other, so that each one finds the memory that the one before has left.

What a model is in use for is counted in leases: a model is unloaded when its last lease has ended, so unloading never
ends a request.  A reload loads the new copy next to the old one if there is room, and the old one serves until the new one
is ready; without room, requests wait while the old one drains.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final

import attrs
import structlog
import trio

from uma_trio.config import MB, Http, Listen, Loading, Operations
from uma_trio.errors import (
    ErrorWithRemedy,
    ModelLoading,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    ShuttingDown,
    UmaError,
)
from uma_trio.protocol.answers import HealthCheck, ModelDescription, ModelState
from uma_trio.registry import sharing
from uma_trio.registry.model import Attempt, Instance, Model, ModelOpener, ModelSpec
from uma_trio.service import ModelService

log = structlog.get_logger("uma_trio.registry")

FAILURE_KEPT_S: Final = 5.0
"""Requests that come within this time after a failed load get its error, and do not load again."""
PROGRESS_STEP: Final = 0.05
"""Clients that wait get the progress in steps of this share."""
PATIENCE_S: Final = 10.0
"""How long a load waits for a model without requests, before one with requests drains to make room."""
LEAST_LOADED_S: Final = 30.0
"""A model that has been loaded for less than this time does not drain to make room: two would take turns all the time."""
RETRY_MS: Final = 5000
"""When a request that waited in vain may be sent again."""

OnWait = Callable[[str, ModelState, float], None]
"""Gets the name and the state of a model that a request waits for, and the loaded share in [0, 1]."""


@attrs.frozen(kw_only=True)
class RegistryLimits:
    """What all models may have together."""

    max_loaded: int = 0
    """0: any number."""
    max_waiting: int = 256
    """Requests that wait for one model."""
    wait_s: float = 600.0
    """How long a request waits."""
    save_s: float = 30.0
    """How long a model that is unloaded may take to save its sessions' states."""


class _GivenUp(Exception):
    """``Attempt.go_on`` has ended a load."""


class ModelRegistry:
    """The models by name.  The first one is the default.

    Args:
        specs: those that are configured.
        opener: loads them, and finds others.
    """

    def __init__(self, specs: Iterable[ModelSpec], opener: ModelOpener, limits: RegistryLimits | None = None) -> None:
        self._limits = limits or RegistryLimits()
        self._opener = opener
        self._models = {spec.name: Model(spec) for spec in specs}
        self._removed: list[Model] = []
        """Models without a name, whose last requests are still served."""
        self._nursery: trio.Nursery | None = None
        self._shielded: set[trio.CancelScope] = set()
        """The tasks of loaded models, which end only by themselves."""
        self._loading = trio.Lock()
        self._changed = trio.Event()
        self._draining = False

    # -- running ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Models can be loaded until the end of the context, which ends all engines at once."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._share_threads)
            try:
                yield
            finally:
                self._draining = True
                for scope in self._shielded:
                    scope.cancel()
                self._nursery.cancel_scope.cancel()

    async def start(self, on_progress: Callable[[float], None] | None, go_on: Callable[[], bool]) -> bool:
        """Load the models that are to be loaded at the start, while there is room for them.

        Args:
            on_progress: called with the loaded share of the first one, in [0, 1].
            go_on: asked now and then; False gives up.

        Returns:
            Whether it was not given up.

        Raises:
            ErrorWithRemedy, UmaError: a model cannot be loaded.
        """
        for index, model in enumerate([*self._models.values()]):
            if index and not (model.spec.at_start or model.spec.pinned):
                continue
            if index and not await self._has_room(model):
                log.warning("a model is not loaded at the start: there is no room for it", model=model.name)
                continue
            attempt = self._begin(
                model,
                Attempt(is_wanted=True, is_start=True, on_progress=on_progress if index == 0 else None, go_on=go_on),
            )
            await attempt.done.wait()
            if not go_on():
                return False
            if attempt.cause is not None:
                raise attempt.cause
        return True

    def drain(self) -> None:
        """Accept no more requests; those that were accepted go on, and those that wait for a model are refused."""
        self._draining = True
        for instance in self._instances():
            instance.service.drain()
        self._announce()

    def stop(self) -> None:
        """End all requests and engines at once."""
        self.drain()
        for instance in self._instances():
            instance.service.stop()

    async def wait_idle(self) -> None:
        """Wait until no model has a request."""
        for instance in self._instances():
            await instance.service.wait_idle()

    async def save_everything(self) -> None:
        """Bring the sessions and their KV states to disk."""
        for instance in self._instances():
            await instance.service.save_everything()

    # -- requests ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(
        self, name: str | None, *, session: bool = False, on_wait: OnWait | None = None
    ) -> AsyncIterator[ModelService]:
        """Have a model loaded, and keep it loaded until the end of the context.

        Args:
            name: as requests spell it; ``None`` is the default model.
            session: it must have its sessions, which a copy that replaces another one gets last.
            on_wait: called at the start of a wait, and with its progress.

        Raises:
            ModelNotFound: there is none; the message names those that there are.
            QueueFull, ModelLoading: too many wait for it, or it takes too long.
            ModelUnavailable: it cannot be loaded.
            ShuttingDown: the daemon is draining.
        """
        model = self._named(name) or await self._find(str(name))
        instance = model.instance
        if instance is None or (session and not instance.has_storage):
            instance = await self._wait_for(model, session=session, on_wait=on_wait)
        with instance.lease() as service:
            yield service

    def loaded(self, name: str | None = None) -> ModelService | None:
        """A model's service, if it is loaded.

        Raises:
            ModelNotFound: there is no such model.
        """
        model = self._named(name)
        if model is None:
            raise self._not_found(str(name))
        return None if model.instance is None else model.instance.service

    def _named(self, name: str | None) -> Model | None:
        if name is None:
            return next(iter(self._models.values()))
        found = self._models.get(name.removesuffix(".gguf")) or self._models.get(name)
        if found is None:
            found = next((model for model in self._models.values() if name in model.spec.aliases), None)
        if found is None and ":" in name:  # MODEL:ADAPTER
            model, _, adapter = name.rpartition(":")
            found = self._named(model)
            if found is not None and adapter not in [each.name for each in found.spec.config.model.adapters]:
                return None
        return found

    async def _find(self, name: str) -> Model:
        """A model of this machine that is not configured."""
        spec = await self._opener.find(name)
        if spec is None:
            raise self._not_found(name)
        same = [model for model in self._models.values() if model.spec.config.model.model == spec.config.model.model]
        if same:
            return same[0]
        return self._models.setdefault(spec.name, Model(spec))

    def _not_found(self, name: str) -> ModelNotFound:
        return ModelNotFound(f"no model {name!r}; this daemon serves {', '.join(self._models)}", field="model")

    async def _wait_for(self, model: Model, *, session: bool, on_wait: OnWait | None) -> Instance:
        if model.n_waiting >= self._limits.max_waiting:
            error = QueueFull(f"{model.n_waiting} requests wait for the model {model.name} to be loaded")
            error.retry_after_ms = RETRY_MS
            raise error
        reported: tuple[ModelState, float] | None = None
        model.n_waiting += 1
        try:
            with trio.move_on_after(self._limits.wait_s):
                while True:
                    instance = model.instance
                    if self._draining:
                        raise ShuttingDown("the server is shutting down")
                    if instance is not None and (instance.has_storage or not session):
                        return instance
                    if model.is_removed:
                        raise self._not_found(model.name)
                    attempt = None if instance is not None else self._attempt(model)
                    progress = 1.0 if attempt is None else attempt.progress
                    state: ModelState = "draining" if model.draining else "loading"
                    if on_wait is not None and reported != (state, progress):
                        reported = state, progress
                        on_wait(model.name, *reported)
                    await self._changed.wait()
                    if attempt is not None and attempt.done.is_set() and attempt.cause is not None:
                        raise _unavailable(model, attempt.cause)
        finally:
            model.n_waiting -= 1
        late = ModelLoading(
            f"the model {model.name} was not ready within {self._limits.wait_s:g} s: {self._why(model)}"
        )
        late.retry_after_ms = RETRY_MS
        raise late

    def _why(self, model: Model) -> str:
        """Why a request still waits."""
        if model.attempt is not None and model.attempt.progress > 0:
            return f"{model.attempt.progress:.0%} of it are loaded"
        busy = [each.name for each in self._all() for instance in each.instances if instance.n_leases]
        return f"requests of {', '.join(busy)} keep the memory" if busy else "other models are loaded before it"

    def _attempt(self, model: Model) -> Attempt:
        """The load that is under way, or a new one, unless one has just failed."""
        if model.attempt is not None:
            return model.attempt
        if model.failure is not None and trio.current_time() < model.failed_at + FAILURE_KEPT_S:
            raise _unavailable(model, model.failure)
        return self._begin(model, Attempt())

    # -- loading ----------------------------------------------------------------------------------

    def _begin(self, model: Model, attempt: Attempt) -> Attempt:
        assert self._nursery is not None
        model.attempt = attempt
        self._nursery.start_soon(self._load, model, attempt)
        return attempt

    async def _load(self, model: Model, attempt: Attempt) -> None:
        """Load a model, or load it again next to the copy that serves now."""
        old = model.instance
        try:
            async with self._loading:
                if old is not None and not await self._has_room(model):
                    await self._unload(model, old)
                    old = None
                await self._make_room(model, attempt, next_to=old)
                new = await self._open(model, attempt, next_to=old)
                try:
                    if not self._shares_storage(new):
                        await self._open_storage(new)
                except BaseException:
                    new.scope.cancel()
                    raise
        except _GivenUp as error:
            attempt.cause = error
        except (ErrorWithRemedy, UmaError, OSError) as error:
            attempt.cause = error
            model.failures += 1
            if model.instance is None:
                model.failure, model.failed_at = error, trio.current_time()
            if not attempt.is_start:
                log.error("a model cannot be loaded", model=model.name, reason=str(error))
        else:
            if model.instance is not None:  # it could also have been unloaded to make room for the new copy
                self._drain(model, model.instance)
            model.instance, model.failure = new, None
            model.loads += 1
            if not new.has_storage:
                new.nursery.start_soon(self._take_storage, new)
        finally:
            model.attempt = None
            attempt.done.set()
            self._announce()
        if model.is_removed and model.instance is not None:
            self._drain(model, model.instance)
        elif attempt.cause is None and _relevant(new.spec) != _relevant(model.spec):
            self._begin(model, Attempt(is_wanted=True))  # the settings have changed meanwhile

    async def _open(self, model: Model, attempt: Attempt, *, next_to: Instance | None) -> Instance:
        """Load a model; if that takes more memory than was thought, unload others and try again.

        Args:
            next_to: the copy that it replaces, which is the last one to go.
        """
        assert self._nursery is not None
        if not attempt.is_start:
            log.info("loading a model", model=model.name)
        while True:
            try:
                instance: Instance = await self._nursery.start(self._serve, model, attempt)
                break
            except ErrorWithRemedy as error:
                if not error.is_about_memory:
                    raise
                if unused := self._unused(except_for=next_to):
                    await self._evict(*unused, room_for=model, reason=str(error))
                elif next_to is not None and next_to is model.instance:
                    await self._unload(model, next_to)
                else:
                    raise
        model.memory_bytes = instance.opened.memory_bytes
        model.description = instance.service.description()
        return instance

    async def _serve(self, model: Model, attempt: Attempt, task_status: trio.TaskStatus[Instance]) -> None:
        """Load a model and serve it until its scope is cancelled."""
        spec, instance = model.spec, None

        def on_progress(share: float) -> None:
            if attempt.on_progress is not None:
                attempt.on_progress(share)
            if share >= min(1.0, attempt.progress + PROGRESS_STEP):
                attempt.progress = share
                self._announce()

        def go_on() -> bool:
            return attempt.go_on() and not self._draining

        scope = trio.CancelScope()
        try:
            with scope:
                async with self._opener.open(spec, on_progress, go_on) as opened:
                    if opened is None:
                        raise _GivenUp("loading was given up")
                    async with trio.open_nursery() as nursery:
                        with trio.CancelScope(shield=True):  # a cancelled start would wait for the task forever
                            await nursery.start(opened.service.run)
                        instance = Instance(spec, opened, scope, nursery, self._announce)
                        scope.shield = True
                        self._shielded.add(scope)
                        nursery.start_soon(self._unload_when_idle, model, instance)
                        task_status.started(instance)
        finally:
            self._shielded.discard(scope)
            if instance is not None:
                instance.closed.set()

    async def _open_storage(self, instance: Instance) -> None:
        await instance.opened.open_storage()
        instance.has_storage = True

    def _shares_storage(self, new: Instance) -> bool:
        """Whether another copy has the sessions of this one open."""
        others = [instance for instance in self._instances() if instance is not new]
        return any(instance.opened.storage_name == new.opened.storage_name for instance in others)

    async def _take_storage(self, new: Instance) -> None:
        """Open the sessions of ``new`` when the copy that has them is closed."""
        while self._shares_storage(new):
            await self._changed.wait()
        await self._open_storage(new)
        self._announce()

    # -- room -------------------------------------------------------------------------------------

    async def _needed(self, model: Model) -> int:
        return model.memory_bytes or await self._opener.needed_bytes(model.spec)

    async def _has_room(self, model: Model) -> bool:
        return self._missing(await self._needed(model)) is None

    def _missing(self, needed: int) -> str | None:
        """Why there is no room for another model; ``None`` if there is."""
        instances = [*self._instances()]
        most, budget = self._limits.max_loaded, self._opener.budget_bytes
        if not instances:
            return None
        if most and len(instances) >= most:
            return f"{len(instances)} models are loaded (max_loaded_models)"
        used = sum([instance.opened.memory_bytes for instance in instances])
        if budget and used + needed > budget:
            return (
                f"it needs about {needed / MB:,.0f} MB, and {used / MB:,.0f} of {budget / MB:,.0f} MB are taken "
                "(models_memory_mb)"
            )
        return None

    async def _make_room(self, model: Model, attempt: Attempt, *, next_to: Instance | None) -> None:
        """Unload models that nobody uses, the one that was used least recently first, until there is room.

        If all are in use for long, the one that was loaded first gets no more requests until there is room for both.

        Raises:
            ModelUnavailable: what is loaded is pinned, or nobody waits any more.
        """
        needed, began = await self._needed(model), trio.current_time()
        while (missing := self._missing(needed)) is not None:
            normal = self._normal(except_for=next_to)
            leaving = any(each.draining for each in self._all())
            if self._draining or not (attempt.is_wanted or model.n_waiting):
                raise _GivenUp("nobody waits for it any more")
            if leaving:
                await self._changed.wait()
            elif unused := self._unused(except_for=next_to):
                await self._evict(*unused, room_for=model, reason=missing)
            elif normal:
                other, oldest = min(normal, key=lambda pair: pair[1].loaded_at)
                with trio.move_on_at(max(began + PATIENCE_S, oldest.loaded_at + LEAST_LOADED_S)):
                    await self._changed.wait()
                    continue
                if attempt.is_wanted or model.n_waiting:
                    await self._evict(other, oldest, room_for=model, reason=missing)
            else:
                names = ", ".join([each.name for each in self._all() if each.instance not in (None, next_to)])
                raise ModelUnavailable(
                    f"there is no room for the model {model.name}: {missing}, by {names}, which stay loaded"
                )

    def _normal(self, *, except_for: Instance | None) -> list[tuple[Model, Instance]]:
        """The loaded models that are not pinned."""
        return [
            (each, each.instance)
            for each in self._all()
            if each.instance is not None and each.instance is not except_for and not each.spec.pinned
        ]

    def _unused(self, *, except_for: Instance | None) -> tuple[Model, Instance] | None:
        """The model that nobody uses, and was used least recently; ``None`` if all are in use or pinned."""
        # requests that wait for a model have no lease in the moment in which it is ready
        unused = [
            pair for pair in self._normal(except_for=except_for) if not pair[1].n_leases and not pair[0].n_waiting
        ]
        return min(unused, key=lambda pair: pair[1].used_at, default=None)

    async def _evict(self, model: Model, instance: Instance, *, room_for: Model, reason: str) -> None:
        log.info("unloading a model to make room", model=model.name, room_for=room_for.name, reason=reason)
        model.evictions += 1
        await self._unload(model, instance)

    def _drain(self, model: Model, instance: Instance) -> None:
        """Give ``instance`` no more requests, and end it when it has none.  Does not wait."""
        if instance in model.draining:
            return
        model.draining.add(instance)
        if model.instance is instance:
            model.instance = None
        self._announce()
        assert self._nursery is not None
        self._nursery.start_soon(self._close_when_unused, model, instance)

    async def _unload(self, model: Model, instance: Instance) -> None:
        """Wait until ``instance`` has no requests, and has ended.  It ends as well if this is cancelled."""
        self._drain(model, instance)
        while instance in model.draining:
            await self._changed.wait()

    async def _close_when_unused(self, model: Model, instance: Instance) -> None:
        await instance.wait_unused()
        await instance.service.wait_idle()
        with trio.move_on_after(self._limits.save_s):
            await instance.service.save_everything()
        instance.scope.cancel()
        await instance.closed.wait()
        model.draining.discard(instance)
        model.unloads += 1
        log.info("unloaded a model", model=model.name)
        if not model.instances and model in self._removed:
            self._removed.remove(model)
        elif not model.spec.is_configured and model.state == "unloaded" and not model.n_waiting:
            self._models.pop(model.name, None)
        self._announce()

    async def _share_threads(self) -> None:
        while True:
            with trio.move_on_after(sharing.adjust([*self._instances()], self._opener.n_threads)):
                await self._changed.wait()
                continue
            sharing.raise_shares([*self._instances()], self._opener.n_threads)

    async def _unload_when_idle(self, model: Model, instance: Instance) -> None:
        spec = instance.spec
        while spec.idle_unload_s and not spec.pinned:
            await instance.wait_unused()
            with trio.move_on_at(instance.used_at + spec.idle_unload_s):
                await instance.changed.wait()
                continue
            if model.instance is instance and model.attempt is None:
                log.info("unloading a model that nobody uses", model=model.name, idle_s=spec.idle_unload_s)
                self._drain(model, instance)
            return

    # -- administration ---------------------------------------------------------------------------

    async def load(self, name: str) -> ModelDescription:
        """Load a model, if it is not loaded.

        Raises:
            UmaError: it cannot be loaded.
        """
        model = self._named(name) or await self._find(name)
        if model.instance is None:
            await self._loaded(model, model.attempt or self._begin(model, Attempt(is_wanted=True)))
        return await self._description(model)

    async def unload(self, name: str) -> ModelDescription:
        """Unload a model when its requests have ended; its next request loads it again.

        Raises:
            UmaError: there is no such model.
        """
        model = self._named(name) or await self._find(name)
        if model.attempt is not None:
            await model.attempt.done.wait()
        if model.instance is not None:
            await self._unload(model, model.instance)
        while model.draining:
            await self._changed.wait()
        return await self._description(model)

    async def reload(self, name: str) -> ModelDescription:
        """Load a model again, with its file and its settings as they are now.  No request is dropped.

        Raises:
            UmaError: it cannot be loaded.  The copy that was loaded goes on, if there was room for both.
        """
        model = self._named(name) or await self._find(name)
        if model.attempt is not None:
            await model.attempt.done.wait()
        await self._loaded(model, model.attempt or self._begin(model, Attempt(is_wanted=True)))
        return await self._description(model)

    def update(self, specs: Iterable[ModelSpec]) -> None:
        """Take over what is configured now: add, remove and reload models.  Does not wait; failures are logged."""
        wanted = {spec.name: spec for spec in specs}
        before = self._models
        found = {name: model for name, model in before.items() if not model.spec.is_configured and name not in wanted}
        changed, added = [], []
        for name, spec in wanted.items():
            model = before.get(name)
            if model is None:
                model = Model(spec)
                added += [model] if spec.at_start else []
            elif _relevant(model.spec) != _relevant(spec):
                model.spec, model.memory_bytes, model.description, model.failure = spec, None, None, None
                changed.append(model)
            found[name] = model
        self._models = {name: found[name] for name in [*wanted, *found]}
        for name, model in before.items():
            if name not in found:
                log.info("a model is no longer configured", model=name)
                model.is_removed = True
                if model.instances or model.attempt is not None:
                    self._removed.append(model)
                for instance in model.instances:
                    self._drain(model, instance)
        self._announce()
        for model in [*(model for model in changed if model.instance is not None), *added]:
            if model.attempt is None:
                self._begin(model, Attempt(is_wanted=True))

    async def _loaded(self, model: Model, attempt: Attempt) -> None:
        attempt.is_wanted = True
        await attempt.done.wait()
        if attempt.cause is not None:
            raise _unavailable(model, attempt.cause)

    # -- how they are -----------------------------------------------------------------------------

    def _all(self) -> Iterator[Model]:
        yield from [*self._models.values(), *self._removed]

    def _instances(self) -> Iterator[Instance]:
        for model in self._all():
            yield from model.instances

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def descriptions(self) -> list[ModelDescription]:
        """All models, those of this machine included that a request could load; the default one first."""
        known = [await self._description(model) for model in [*self._models.values()]]
        paths = {model.spec.config.model.model for model in self._models.values()}
        others = [spec for spec in await self._opener.installed() if spec.config.model.model not in paths]
        return [*known, *[await self._opener.describe(spec) for spec in others if spec.name not in self._models]]

    async def _description(self, model: Model) -> ModelDescription:
        if model.description is None:
            model.description = await self._opener.describe(model.spec)
        instance, unloads_in_s = model.instance, None
        if instance is not None and instance.spec.idle_unload_s and not instance.spec.pinned:
            idle_s = 0.0 if instance.n_leases else trio.current_time() - instance.used_at
            unloads_in_s = round(max(0.0, instance.spec.idle_unload_s - idle_s), 1)
        return attrs.evolve(
            model.description,
            state=model.state,
            reason=None if model.state != "failed" else str(model.failure),
            aliases=[*model.spec.aliases],
            pinned=model.spec.pinned,
            memory_bytes=None if instance is None else instance.opened.memory_bytes,
            unloads_in_s=unloads_in_s,
        )

    @property
    def names(self) -> list[str]:
        """All names, the default one first."""
        return [*self._models]

    @property
    def has_chat_template(self) -> bool:
        """Whether the default model can have chats; also while it is not loaded."""
        default = next(iter(self._models.values()))
        return default.description is None or "chat" in default.description.capabilities

    def watched(self, name: str | None) -> ModelService | None:
        """The service of a model, if it is loaded; ``None`` is the default model, or the first one that is loaded.

        Raises:
            ModelNotFound: there is no such model.
        """
        if name is not None:
            return self.loaded(name)
        loaded = [model.instance for model in self._models.values() if model.instance is not None]
        return loaded[0].service if loaded else None

    def health(self) -> list[HealthCheck]:
        """Whether the models can serve another request now.  One that is loaded when it is needed is no problem."""
        checks = []
        for model in self._models.values():
            if model.instance is not None:
                checks += model.instance.service.health()
                continue
            reason = {
                "loading": "it is being loaded",
                "draining": "it is being unloaded",
                "failed": f"it cannot be loaded: {model.failure}",
            }.get(model.state, "not loaded; the next request loads it")
            is_missed = model.spec.pinned or (model.state == "failed" and model.spec.is_configured)
            checks.append(HealthCheck(name="model", ok=not is_missed, reason=reason, model=model.name))
        return checks

    def snapshot(self, name: str | None = None) -> dict[str, Any]:
        """Numbers for the metrics: those of one model, and ``models`` with those of all.

        Args:
            name: which one; see ``watched``.

        Raises:
            ModelNotFound: there is no such model.
        """
        watched = self.watched(name)
        nothing = {
            "model": name or self.names[0],
            "running": 0,
            "queue_depth": 0,
            "requests_total": {},
            "tokens_total": 0,
        }
        models = {}
        for each, model in self._models.items():
            models[each] = model.snapshot()
            if model.instance is not None and model.instance.service is not watched:
                models[each]["metrics"] = model.instance.service.snapshot()
        return {**(nothing if watched is None else watched.snapshot()), "models": models}


def _relevant(spec: ModelSpec) -> ModelSpec:
    """A model without the settings that are read once, at the start of the daemon."""
    config = attrs.evolve(spec.config, listen=Listen(), http=Http(), operations=Operations(), loading=Loading())
    return attrs.evolve(spec, config=config)


def _unavailable(model: Model, cause: Exception) -> UmaError:
    """The error of a request whose model cannot be loaded."""
    error = cause if isinstance(cause, ModelUnavailable) else None
    text = str(error) if error is not None else f"the model {model.name} cannot be loaded: {cause}"
    found = ModelUnavailable(text)
    found.retry_after_ms = RETRY_MS
    return found
