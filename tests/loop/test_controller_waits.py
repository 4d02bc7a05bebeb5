"""Controllers that wait, or for which others would wait: suspended answers, late masks, slow and hung exchanges."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from typing import Any

import pytest
import trio

from tests.support.controlling import START, Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.fake_runtime import FakeRuntime, ScriptedController
from tests.support.programs import Back, Fork, Gen, Insert, Program, Say, Set, Skip, Wait, by_path, expected
from uma_trio.aici_link.messages import PreResult
from uma_trio.daemon.serving.controllers import driver
from uma_trio.protocol.controllers import ControllerOutput

PROGRAMS = {"program": Program}


class Timed(Client):
    """Notes when its tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def send(self, *events: Any) -> None:
        self.times += [trio.current_time()] * len(events)
        super().send(*events)

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.times)]


def engine() -> FakeEngine:
    """A step takes 5 ms, whatever is in it."""
    return FakeEngine(cost_ms=lambda prompt, decodes: 5.0)


# -- suspended ----------------------------------------------------------------------------------


async def test_suspended_answers_keep_their_cells_and_take_no_tick(autojump_clock):
    script = [Say([*range(100, 150)]), Fork([[Gen(5), Wait("go"), Gen(2)], [Gen(30), Set("go"), Gen(1)]])]
    async with controlling(PROGRAMS, engine()) as harness:
        answers = await harness.control("program", client := Client(), 100, argument=script)
        while len(client.tokens.get(1, ())) < 60:
            await trio.sleep(0.001)
        n_steps, held = len(harness.engine.steps), harness.scheduler.cache.held()
        waiting, running = (each.allocation.seq_id for each in answers)
        assert held[waiting] == 1 + 50 + 4
        while len(client.tokens[1]) < 75:
            await trio.sleep(0.001)
        computed = [each.seq_id for step in harness.engine.steps[n_steps:] for call in step.calls for each in call]
        assert {*computed} == {running}
        assert harness.scheduler.cache.held()[waiting] == held[waiting]
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(script)
        await harness.clean()


@pytest.mark.parametrize("neighbours", ["none", "without a controller", "with a controller"])
@pytest.mark.parametrize("n", [1, 4])
async def test_answers_that_wait_for_nobody_end_soon(autojump_clock, neighbours, n):
    script = [Gen(3), *([Fork([[Gen(2), Wait(f"{i}")] for i in range(n)])] if n > 1 else [Wait("never")])]
    async with controlling(PROGRAMS, engine()) as harness:
        others: list[Any] = []
        if neighbours == "without a controller":
            others.append([harness.ask([5], Client(), 100)])
        elif neighbours == "with a controller":
            others.append(await harness.control("program", Client(), 100, argument=[Gen(90)]))
        answers = await harness.control("program", client := Client(), argument=script)
        with trio.fail_after(0.2):
            while len(client.ends) < n:
                await trio.sleep(0.001)
        assert {*client.reasons.values()} == {"deadlock"}
        assert sorted(client.tokens) == [*range(n)]
        await harness.done(answers, *others)
        await harness.clean()


async def test_suspended_answers_are_asked_now_and_then(autojump_clock):
    """Nothing spins: without neighbours there is an exchange each 10 ms."""
    script = [Gen(1), Fork([[Gen(1), Wait("go")], [Say([*range(100, 400)]), Gen(1), Set("go")]])]
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 200.0 if prompt else 5.0)
    async with controlling(PROGRAMS, slow) as harness:
        await harness.done(await harness.control("program", client := Client(), 400, argument=script))
        assert by_path(client, client.tokens) == expected(script)
        assert len(harness.runtime.calls) < 40
        await harness.clean()


async def test_suspended_answers_never_keep_others_from_going_on(autojump_clock):
    """Also where an exchange takes longer than the time after which suspended answers are asked again."""
    script = [Gen(2), Fork([[Gen(1), Wait("go"), Gen(2)], [Gen(10), Set("go"), Gen(1)]])]
    runtime = FakeRuntime(PROGRAMS, exchange_ms=13.0)
    async with controlling(PROGRAMS, engine(), runtime) as harness:
        answers = await harness.control("program", client := Client(), argument=script)
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(script)
        assert trio.current_time() < 1
        await harness.clean()


# -- late ---------------------------------------------------------------------------------------


async def together(script: Any, exchange_ms: Any, n_plain: int = 80) -> tuple[Timed, Client, Controlling]:
    """Run a program next to a stream without a controller."""
    runtime = FakeRuntime(PROGRAMS, exchange_ms=exchange_ms)
    async with controlling(PROGRAMS, engine(), runtime) as harness:
        plain = harness.ask([5], neighbour := Timed(), n_plain)
        await trio.sleep(0.02)
        await harness.done(await harness.control("program", client := Client(), argument=script), [plain])
        assert neighbour.tokens[0] == expected_continuation([5], n_plain)
        assert by_path(client, client.tokens) == expected(script)
        await harness.clean()
    return neighbour, client, harness


async def test_quick_exchanges_cost_their_own_time_between_steps(autojump_clock):
    neighbour, _, _ = await together([Gen(15)], 0.5)
    assert max(neighbour.gaps_ms) == pytest.approx(5.5)


async def alone(script: Any, exchange_ms: float, **options: Any) -> tuple[Timed, Controlling]:
    """Run a program with nobody next to it; a step takes 5 ms."""
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 5.0, **options)
    async with controlling(PROGRAMS, slow, FakeRuntime(PROGRAMS, exchange_ms=exchange_ms)) as harness:
        await harness.done(await harness.control("program", client := Timed(), 40, argument=script))
        assert client.tokens[0] == expected(script)[""]
        await harness.clean()
    return client, harness


async def test_exchanges_cost_no_time_while_the_model_chooses_the_tokens(autojump_clock):
    """From the third token on steps run ahead, and what the controller says is awaited while they are computed."""
    client, harness = await alone([Gen(30)], 1.5)
    assert client.gaps_ms == pytest.approx([*[6.5] * 2, *[5.0] * 27, 1.5])
    assert harness.scheduler.telemetry.run_ahead_steps_total >= 27
    assert harness.scheduler.telemetry.totals["late_masks"] == 0


@pytest.mark.parametrize(
    ("then", "gaps_ms"),
    [
        (Insert([3, 4]), [5.0, 0.0, 6.5]),
        (Back(2, [3]), [5.0, 0.0, 6.5]),
        (Say([3]), [1.5, 8.5]),
    ],
    ids=str,
)
async def test_a_controller_that_chooses_itself_costs_at_most_the_step_that_ran_ahead(autojump_clock, then, gaps_ms):
    client, harness = await alone([Gen(10), then, Gen(1)], 1.5)
    assert client.gaps_ms[9:-1] == pytest.approx(gaps_ms)
    assert harness.scheduler.telemetry.totals["late_masks"] == 0


@pytest.mark.parametrize(("exchange_ms", "options"), [(1.5, {"can_truncate": False}), (6.0, {})], ids=str)
async def test_no_step_runs_ahead_where_that_would_not_pay(autojump_clock, exchange_ms, options):
    """A memory that cannot be truncated would be computed again, and a slow controller would miss each step."""
    _, harness = await alone([Gen(20)], exchange_ms, **options)
    assert harness.scheduler.telemetry.run_ahead_steps_total <= 1


@pytest.mark.parametrize("slow", ["mid", "post_pre", "both"])
async def test_slow_exchanges_change_no_text_and_delay_a_neighbour_twice_at_most(autojump_clock, slow):
    """By 2 ms each: then plans no longer wait, and masks are asked for before their step."""
    neighbour, _, harness = await together([Gen(6)], lambda name: 30.0 if slow in (name, "both") else 0.5)
    gaps = sorted(neighbour.gaps_ms)
    assert gaps[-1] <= 5 + 2 + 2 + 0.5
    assert sum(gap > 5.6 for gap in gaps) <= 2
    assert harness.scheduler.telemetry.totals["late_masks"] == (slow != "post_pre")


async def test_a_mask_that_comes_right_after_the_step_gave_up_is_used(autojump_clock):
    """The splice of a late answer, too.  It is asked for once: ``Program`` checks that."""
    for late_ms in (6.9, 7.0, 7.01, 7.1, 11.9, 12.1):
        await together([Gen(2), Insert([3, 4]), Gen(2)], lambda name, ms=late_ms: ms if name == "mid" else 0.3, 40)


async def test_answers_whose_masks_are_late_delay_no_other_controlled_answer(autojump_clock):
    """A runtime that skips a slow controller answers for the others in time."""
    async with controlling(PROGRAMS, engine()) as harness:
        slow = await harness.control("program", late := Client(), argument=[Gen(2), *[Skip()] * 10, Gen(2)], id="slow")
        quick = await harness.control("program", timed := Timed(), argument=[Gen(18)], id="quick")
        await harness.done(slow, quick)
        assert late.tokens[0] == expected([Gen(4)])[""]
        assert timed.tokens[0] == expected([Gen(18)])[""]
        assert max(timed.gaps_ms) < 6.5
        assert harness.scheduler.telemetry.totals["late_masks"] == 10
        await harness.clean()


@pytest.mark.parametrize("name", ["mid", "post_pre"])
async def test_a_hung_exchange_delays_a_neighbour_once(autojump_clock, name):
    """Until the link kills the runtime, which takes seconds."""
    hangs = False
    runtime = FakeRuntime(PROGRAMS, exchange_ms=lambda which: math.inf if hangs and which == name else 0.5)
    async with controlling(PROGRAMS, engine(), runtime) as harness:
        answers = await harness.control("program", client := Client(), 100, argument=[Gen(90)])
        plain = harness.ask([5], neighbour := Timed(), 300)
        await trio.sleep(0.1)
        hangs, n = True, len(neighbour.times)
        await trio.sleep(1)
        gaps = neighbour.gaps_ms[n:]
        assert sum(gap > 5.01 for gap in gaps) <= 3, (
            "while it still works, at its last step, and at the plan after that"
        )
        assert max(gaps) < 9.6
        runtime.die("it hangs")
        await harness.done(answers, [plain])
        assert client.reasons == {0: "E_CONTROLLER_UNAVAILABLE"}
        assert "it hangs" in client.ends[0].message
        await harness.clean()


async def test_a_step_does_not_wait_for_masks_of_a_runtime_that_has_died(autojump_clock):
    async with controlling(PROGRAMS, engine(), FakeRuntime(PROGRAMS, exchange_ms=0.5)) as harness:
        plain = harness.ask([5], neighbour := Timed(), 60)
        answers = await harness.control("program", Client(), 100, argument=[Gen(90)])
        await trio.sleep(0.1)
        while not harness.runtime.calls[-1].mid or trio.current_time() > harness.runtime.calls[-1].at + 0.0003:
            await trio.sleep(0.0001)  # until masks were asked for and have not come
        n = len(neighbour.times)
        harness.runtime.die()
        await harness.done(answers, [plain])
        assert max(neighbour.gaps_ms[n - 1 :]) < 5.6, "the last exchange between two steps took half a millisecond"
        await harness.clean()


class Prints(Program):
    """Prints a lot whenever it is asked."""

    def pre(self) -> PreResult:
        self.log("x" * 10_000)
        self.write("v", "y" * 100)
        return super().pre()


async def test_what_is_printed_while_the_client_does_not_read_is_bounded(autojump_clock):
    """The runtime asks all controllers whenever it asks one."""
    async with controlling({"prints": Prints, **PROGRAMS}, engine()) as harness:
        answers = await harness.control("prints", client := Client(), argument=[Gen(10)])
        while len(client.tokens[0]) < 3:
            await trio.sleep(0.001)
        client.open, n = False, len(client.events)
        await harness.done(await harness.control("program", Client(), 400, argument=[Gen(350)]))
        assert len(client.events) - n <= 2, "one that was on its way"
        client.open = True
        harness.scheduler.wake()
        await harness.done(answers)
        late = [event for event in client.events[n:] if isinstance(event, ControllerOutput)]
        assert len(late[0].logs) == 1 << 16
        assert len(late[0].storage) == 256
        assert client.tokens[0] == expected_continuation([START], 10)
        await harness.clean()


# -- without a controller -----------------------------------------------------------------------


class Count(ScriptedController):
    def pre(self) -> PreResult:
        return PreResult(num_forks=0)


async def test_requests_without_a_controller_cost_nothing_more(autojump_clock):
    """A tick asks once or twice whether there is anything to do, and a wait for work when."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == driver.__file__:
            calls[frame.f_code.co_name] += 1

    async with controlling({"ends": Count}, engine()) as harness:
        await harness.done(await harness.control("ends", Client()))
        await harness.clean()
        n_exchanges, n_steps = len(harness.runtime.calls), len(harness.engine.steps)
        sys.setprofile(count)
        try:
            clients = [Client() for _ in range(4)]
            await harness.done([harness.ask([5 + i], client, 50) for i, client in enumerate(clients)])
        finally:
            sys.setprofile(None)
        n_steps = len(harness.engine.steps) - n_steps
        assert {*calls} <= {"__bool__", "ask_at", "in_phase"}
        assert calls["__bool__"] <= 5 * n_steps
        assert len(harness.runtime.calls) == n_exchanges
        assert harness.scheduler.telemetry.run_ahead_steps_total > 40
        assert clients[0].tokens[0] == expected_continuation([5], 50)
        await harness.clean()


async def test_a_stream_runs_ahead_while_all_controlled_answers_wait(autojump_clock):
    async with controlling(PROGRAMS, engine()) as harness:
        stalled = Client()
        answers = await harness.control("program", stalled, argument=[Gen(10)])
        while len(stalled.tokens[0]) < 3:
            await trio.sleep(0.001)
        stalled.open = False
        await trio.sleep(0.05)
        before = harness.scheduler.telemetry.run_ahead_steps_total
        await harness.done([harness.ask([5], Client(), 50)])
        assert harness.scheduler.telemetry.run_ahead_steps_total > before + 40
        stalled.open = True
        harness.scheduler.wake()
        await harness.done(answers)
        assert stalled.tokens[0] == expected_continuation([START], 10)
        await harness.clean()
