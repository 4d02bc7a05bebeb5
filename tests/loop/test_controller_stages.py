"""What ends or dies at each moment of a controlled answer: who notices, and what is left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.controlling import START, Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.fake_runtime import FakeRuntime
from tests.support.profile import amount, sampled, thorough
from tests.support.programs import Back, Fork, Gen, Insert, Program, Say, Set, Skip, Wait, by_path, expected
from uma_trio.daemon.serving.controllers.state import Phase
from uma_trio.engine_link.messages import EngineDied, EngineError

PROGRAMS = {"program": Program}

SCRIPT = [
    Say(list(range(100, 140))),
    Gen(2),
    Fork(
        [
            [Gen(2), Wait("go"), Gen(2)],
            [Insert([5, 6, 7]), Gen(1), Back(3, [8]), Skip(), Gen(3), Set("go")],
            [Gen(3), Back(2, []), Gen(2), Fork([[Gen(4)], [Say([3, 4]), Gen(2)]])],
        ]
    ),
    Gen(2),
]
"""Goes through all phases.  The first fork waits for the second one."""

LENGTH_S = 0.13
"""Longer than it takes."""

HELD_S = 0.05
"""So long there is no room for the forks, and for a request in the queue."""


OTHER_ENGINES = ({"unified": False, "n_ctx": 7000}, {"can_truncate": False})
N_MOMENTS = amount(quick=14, thorough=200)


def moments(n: int) -> list[float]:
    """Times within the life of the answer, at least one in each step and each exchange."""
    return [LENGTH_S * (i + 0.5) / n for i in range(n)]


class Neighbour(Client):
    """Notes when its tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def send(self, *events: Any) -> None:
        self.times += [trio.current_time()] * len(events)
        super().send(*events)

    @property
    def longest_gap_ms(self) -> float:
        return 1e3 * max(after - before for before, after in itertools.pairwise(self.times))


class Observed:
    """A controlled answer next to one without a controller, and one that waits in the queue."""

    def __init__(self, harness: Controlling) -> None:
        self.harness = harness
        self.client, self.neighbour, self.waiting = Client(), Neighbour(), Client()
        self.answers: Any = []
        self.hangs = False

    async def begin(self) -> None:
        self.plain = self.harness.ask([9], self.neighbour, 60)
        self.large = self.harness.ask([8], Client(), 700, id="large")
        self.answers = await self.harness.control("program", self.client, 150, argument=SCRIPT)
        self.queued = await self.harness.control("program", self.waiting, 450, argument=[Gen(3)], id="queued")

    async def make_room(self) -> None:
        await trio.sleep(HELD_S)
        self.harness.scheduler.cancel(self.large)

    @property
    def phases(self) -> set[Phase]:
        """The phases of the answers that have not ended."""
        return {each.control.phase for each in [*self.answers, *self.queued] if not each.done.is_set()}

    @property
    def texts(self) -> dict[str, list[int]]:
        """The tokens of the answers that have come to their end."""
        ended = {index: self.client.tokens[index] for index, why in self.client.reasons.items() if why == "stop"}
        return by_path(self.client, ended)

    async def ended(self) -> None:
        await self.harness.done(self.answers, self.queued, [self.plain])
        assert self.neighbour.tokens[0] == expected_continuation([9], 60)
        assert self.texts.items() <= expected(SCRIPT).items()
        assert self.waiting.reasons[0] != "stop" or self.waiting.tokens[0] == expected_continuation([START], 3)
        while self.hangs or not self.harness.runtime.is_usable:
            await trio.sleep(0.01)
        await self.harness.done(await self.harness.control("program", again := Client(), argument=[Gen(2)], id="again"))
        assert again.tokens[0] == expected_continuation([START], 2)
        await self.harness.clean()


async def at(moment: float, event: Callable[[Observed], None], **options: Any) -> tuple[Observed, set[Phase]]:
    """Have ``event`` happen at a moment; returns what has become of all, and the phases at that moment."""
    durations = itertools.cycle([1.7, 0.6, 0.9])
    settings = {"n_ctx": 1000, "n_seq_max": 7, "cost_ms": lambda prompt, decodes: 3 + 0.05 * prompt} | options
    engine = FakeEngine(**settings)
    runtime = FakeRuntime(PROGRAMS, exchange_ms=lambda name: math.inf if observed.hangs else next(durations))
    async with controlling(PROGRAMS, engine, runtime) as harness:
        observed = Observed(harness)
        await observed.begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observed.make_room)
            await trio.sleep(moment)
            phases = observed.phases
            event(observed)
            harness.scheduler.check_integrity()
        await observed.ended()
    return observed, phases


def nothing(observed: Observed) -> None:
    """Nobody ends and nothing dies."""


async def test_the_script_goes_through_all_phases(autojump_clock):
    found: set[Phase] = set()
    for moment in moments(N_MOMENTS):
        observed, phases = await at(moment, nothing)
        found |= phases
    assert found == {*Phase}
    assert {*observed.client.reasons.values()} == {"stop"}
    assert by_path(observed.client, observed.client.tokens) == expected(SCRIPT)


# -- cancels ------------------------------------------------------------------------------------


def cancel_all(observed: Observed) -> None:
    for answer in observed.answers:
        observed.harness.scheduler.cancel(answer)


def cancel_one(observed: Observed) -> None:
    observed.harness.scheduler.cancel(observed.answers[-1])


def cancel_the_queued_one(observed: Observed) -> None:
    observed.harness.scheduler.cancel(observed.queued[0])


@pytest.mark.parametrize(
    ("cancel", "options"),
    [
        *((cancel, {}) for cancel in (cancel_all, cancel_one, cancel_the_queued_one)),
        *(
            thorough(cancel, options)
            for cancel in (cancel_all, cancel_one, cancel_the_queued_one)
            for options in OTHER_ENGINES
        ),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
async def test_cancels_free_cells_and_controllers(autojump_clock, cancel, options):
    found: set[Phase] = set()
    for moment in moments(4 if options else N_MOMENTS):
        observed, phases = await at(moment, cancel, **options)
        found |= phases
        others = {*observed.client.reasons.values()} - {"cancelled"}
        assert others <= {"stop", "deadlock"}, "an answer may have been waiting for the one that was cancelled"
        assert options or observed.neighbour.longest_gap_ms < 8
    assert options or found == {*Phase}


# -- the runtime --------------------------------------------------------------------------------


def die(observed: Observed) -> None:
    observed.harness.runtime.die()


def hang(observed: Observed) -> None:
    """Answer nothing any more; the link kills a runtime that hangs."""
    observed.hangs = True
    trio.lowlevel.spawn_system_task(kill_later, observed)


async def kill_later(observed: Observed) -> None:
    await trio.sleep(0.5)
    observed.harness.runtime.die("it hangs")
    observed.hangs = False


@pytest.mark.parametrize("end", sampled([die, hang], 2))
async def test_a_runtime_that_ends_takes_its_answers_along_and_nobody_else(autojump_clock, end):
    found: set[Phase] = set()
    for moment in moments(N_MOMENTS):
        observed, phases = await at(moment, end)
        found |= phases
        assert {*observed.client.reasons.values()} <= {"stop", "E_CONTROLLER_UNAVAILABLE"}
        assert observed.neighbour.longest_gap_ms < 8, "no step waits for masks that never come, and no plan does twice"
    assert found == {*Phase}


# -- the engine ---------------------------------------------------------------------------------


def kill_the_engine(observed: Observed) -> None:
    observed.harness.scheduler._engine.link.kill()


def fail_a_step(observed: Observed) -> None:
    observed.harness.engine.fail_next = EngineError("no room")


def kill_the_next_step(observed: Observed) -> None:
    observed.harness.engine.fail_next = EngineDied("SIGKILL")


@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("fail", sampled([kill_the_engine, fail_a_step, kill_the_next_step], 3))
async def test_controlled_answers_go_on_exactly_after_the_engine_has_failed(autojump_clock, fail, can_truncate):
    found: set[Phase] = set()
    for moment in moments(N_MOMENTS if can_truncate else 4):
        observed, phases = await at(moment, fail, can_truncate=can_truncate)
        found |= phases
        assert observed.texts == expected(SCRIPT), f"at {moment}, in {phases}: {observed.client.reasons}"
    assert found == {*Phase} or not can_truncate


# -- the client ---------------------------------------------------------------------------------


def stop_reading(observed: Observed) -> None:
    observed.client.open = False
    trio.lowlevel.spawn_system_task(read_on, observed)


async def read_on(observed: Observed) -> None:
    await trio.sleep(0.08)
    observed.client.open = True
    observed.harness.scheduler.wake()


async def test_a_client_that_does_not_read_changes_no_text_and_stops_nobody(autojump_clock):
    for moment in moments(N_MOMENTS):
        observed, _ = await at(moment, stop_reading)
        assert observed.texts == expected(SCRIPT)
        assert observed.neighbour.longest_gap_ms < 8
