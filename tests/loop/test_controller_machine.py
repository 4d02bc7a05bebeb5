"""Random controlled answers, cancels, crashes and stalls: all texts are as each answer alone, and nothing is left.

Programs are random too: see ``scripts``.  The events of an example are played at their times over a fake engine and a fake
runtime in virtual time, so it is reproducible.  After each event the bookkeeping is checked.
"""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.controlling import Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.fake_runtime import FakeRuntime
from tests.support.profile import amount
from tests.support.programs import (
    Back,
    Fail,
    Fork,
    Gen,
    Insert,
    Operation,
    Program,
    Say,
    Script,
    Set,
    Skip,
    Wait,
    by_path,
    expected,
)
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.principal import Principal

N_EXAMPLES = amount(quick=25, thorough=1000)

TOKENS = st.lists(st.integers(1, 900), min_size=1, max_size=40)
NAMES = st.sampled_from(["a", "b"])


@st.composite
def blocks(draw: st.DrawFn, depth: int) -> list[Operation]:
    """Operations that begin with one that a mask or a splice can carry out, as after a fork."""
    found: list[Operation] = [draw(st.builds(Gen, st.integers(1, 5)) | st.builds(Insert, TOKENS))]
    n_sampled = 1
    for kind in draw(st.lists(st.sampled_from("gggisbwVkf"), max_size=4)):
        match kind:
            case "g":
                found.append(Gen(draw(st.integers(1, 6)), draw(st.sampled_from([(), (5, 6, 7, 8)]))))
            case "i":
                found.append(Insert(draw(TOKENS)))
            case "s":
                found.append(Say(draw(TOKENS)))
            case "b":
                found.append(Back(draw(st.integers(1, n_sampled)), draw(TOKENS)))
                n_sampled = 0
            case "w":
                found.append(Wait(draw(NAMES)))
            case "V":
                found.append(Set(draw(NAMES)))
            case "k":
                found += [Skip(), Gen(1)]
            case "f" if draw(st.integers(0, 5)) == 0:
                found.append(Fail(in_mid=draw(st.booleans())))
        n_sampled += 1
    if depth and draw(st.booleans()):
        found.append(Fork(draw(st.lists(blocks(depth - 1), min_size=2, max_size=3))))
        found += draw(blocks(0))
    return found


COMMON = list(range(300, 360))
"""Texts of several answers begin with it, so they share its cells."""


def scripts() -> st.SearchStrategy[list[Operation]]:
    """Programs; the first tokens may be a long text, of which others may have the beginning."""
    common = st.builds(lambda n, rest: Say([*COMMON[:n], *rest]), st.integers(10, len(COMMON)), TOKENS)
    text = st.lists(common | st.builds(Say, TOKENS), max_size=1)
    return st.builds(lambda text, rest: [*text, *rest], text, blocks(2))


EVENTS = st.tuples(
    st.integers(0, 60),
    st.sampled_from(["cancel", "cancel all", "crash", "fail", "stall", "read", "die", "slow", "quick"]),
    st.integers(0, 5),
)
"""Milliseconds since the event before, what happens, and the number of the program that it happens to."""


class World:
    """Answers in progress."""

    def __init__(self, harness: Controlling) -> None:
        self.harness = harness
        self.programs: list[tuple[Script, Client, Any]] = []
        self.plain: list[tuple[int, Client, Any]] = []
        self.killed = False
        self.has_crashed = False
        self.exchange_ms = 0.7

    def happen(self, what: str, number: int) -> None:
        scheduler = self.harness.scheduler
        _, client, answers = self.programs[number % len(self.programs)]
        match what:
            case "cancel":
                scheduler.cancel(answers[number % len(answers)])
            case "cancel all":
                for answer in answers:
                    scheduler.cancel(answer)
            case "crash" | "fail" if not self.has_crashed:  # an answer that is alone in two fatal steps is to blame
                self.has_crashed = True
                self.harness.engine.fail_next = EngineDied("SIGKILL") if what == "crash" else EngineError("no room")
            case "stall":
                client.open = False
            case "read":
                self.read()
            case "die":
                self.killed = True
                self.harness.runtime.die()
            case "slow":
                self.exchange_ms = 13.0
            case "quick":
                self.exchange_ms = 0.7

    def read(self) -> None:
        for _, client, _ in self.programs:
            client.open = True
        self.harness.scheduler.wake()

    def check(self) -> None:
        """All that has ended is right."""
        for first, client, _ in self.plain:
            assert client.reasons == {0: "length"}
            assert client.tokens[0] == expected_continuation([first], 25)
        for script, client, _ in self.programs:
            texts, whole = by_path(client, client.tokens), expected(script)
            for path, reason in by_path(client, client.reasons).items():
                if reason == "stop":
                    assert texts[path] == whole[path]
            allowed = {"stop", "deadlock", "cancelled", "E_CONTROLLER_FAILED", "E_LIMIT_KV"}
            assert {*client.reasons.values()} <= (allowed | {"E_CONTROLLER_UNAVAILABLE"} if self.killed else allowed)


async def play(
    programs: list[Script],
    n_plain: int,
    events: list[tuple[int, str, int]],
    engine: FakeEngine,
    max_tokens: int,
    n_principals: int,
) -> World:
    """Run ``programs`` next to plain streams, while ``events`` happen.  Principals take places from each other."""
    runtime = FakeRuntime({"program": Program}, exchange_ms=lambda name: world.exchange_ms)
    async with controlling({}, engine, runtime) as harness:
        world = World(harness)
        for i, script in enumerate(programs):
            client = Client()
            principal = Principal(f"uid:{i % n_principals}")
            answers = await harness.control("program", client, max_tokens, script, principal, id=f"{i}")
            world.programs.append((script, client, answers))
        for i in range(n_plain):
            client = Client()
            world.plain.append((50 + i, client, harness.ask([50 + i], client, 25, id=f"plain {i}")))
        for pause_ms, what, number in events:
            await trio.sleep(pause_ms / 1e3)
            world.happen(what, number)
            harness.scheduler.check_integrity()
        await trio.sleep(0.5)
        world.read()
        engine.fail_next = None
        await harness.done(*[answers for _, _, answers in world.programs], [each for _, _, each in world.plain])
        world.check()
        await harness.clean()
    return world


def run(*arguments: Any) -> World:
    return trio.run(play, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=N_EXAMPLES)
@given(
    programs=st.lists(scripts(), min_size=1, max_size=3),
    n_plain=st.integers(0, 2),
    events=st.lists(EVENTS, max_size=6),
    n_principals=st.integers(1, 3),
    options=st.sampled_from(
        [
            {},
            {"n_seq_max": 2},
            {"n_ctx": 500},
            {"n_ctx": 1000, "n_seq_max": 3},
            {"unified": False, "n_ctx": 8 * 400},
            {"can_truncate": False},
            {"draft_errors": 5},
        ]
    ),
)
@example([[Gen(9)]], 0, [], 1, {"draft_errors": 5})  # has a draft model
@example([[Gen(5)]] * 2, 0, [(20, "stall", 1)], 1, {"n_ctx": 500})  # the second gets room when nothing else runs
def test_random_programs_and_events(
    programs: list[Script], n_plain: int, events: list[tuple[int, str, int]], n_principals: int, options: dict[str, Any]
) -> None:
    run(programs, n_plain, events, FakeEngine(**options), 300, n_principals)
