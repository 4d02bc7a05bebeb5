"""Turns of controllers that call the host, in counted time: the expensive ones wait, and nobody waits for ever."""

from __future__ import annotations

import itertools
import math

import attrs

from uma_trio.aici.runtime.turns import ALL_SHARES_S, MIN_SHARE_S, PROTECTED_S, HostTurns

MS = 1e-3


class Clock:
    """Seconds that the test counts."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Work:
    """A call into a controller: its host calls, one after the other."""

    name: str
    costs_s: list[float]
    arrives_s: float = 0.0
    ended_s: float = math.inf


def simulate(works: list[Work], *, fair: bool) -> dict[str, float]:
    """When each call has ended.  One host call runs at a time; those that may run take turns."""
    clock = Clock()
    turns = HostTurns(clock, clock)
    if not fair:
        turns.wait_s = lambda turn: 0.0  # type: ignore[method-assign]
    calls = {work.name: turns.call(math.inf) for work in works}
    open_turns, left = {}, {work.name: [*work.costs_s] for work in works}
    arrivals = {work.name: work.arrives_s for work in works}
    ended: dict[str, float] = {}
    order = itertools.cycle(left)
    while len(ended) < len(works):
        for name, at in [*arrivals.items()]:
            if at <= clock.now:
                open_turns[name] = calls[name].__enter__()
                del arrivals[name]
        ready = {name: turn for name, turn in open_turns.items() if turns._has_share(turn) or turns.wait_s(turn) == 0}
        if not ready:
            clock.now += 0.1 * MS
            continue
        name = next(each for each in order if each in ready)
        cost_s = left[name].pop(0)
        clock.now += cost_s
        turns.leave(ready[name], cost_s)
        if not left[name]:
            ended[name] = clock.now
            calls[name].__exit__(None, None, None)
            del open_turns[name]
    return ended


def works() -> list[Work]:
    """Twelve that call the host all the time, and one with a few short calls in the middle of that."""
    expensive = [Work(f"expensive {n}", [2 * MS] * 100) for n in range(12)]
    return [*expensive, Work("quick", [0.05 * MS] * 8, arrives_s=40 * MS)]


def test_a_quick_controller_does_not_wait_for_expensive_ones() -> None:
    quick = simulate(works(), fair=True)["quick"] - 40 * MS
    assert quick < 2 * MS + 8 * 0.05 * MS + MS, "the host call that was running, and its own"
    unfair = simulate(works(), fair=False)["quick"] - 40 * MS
    assert unfair > 150 * MS, "otherwise it waits behind all of them each time"


def test_the_expensive_ones_take_turns_and_lose_little() -> None:
    fair = simulate(works(), fair=True)
    whole = sum(sum(work.costs_s) for work in works())
    assert max(fair.values()) < whole + PROTECTED_S + 5 * MS
    ends = [at for name, at in fair.items() if name != "quick"]
    assert max(ends) - min(ends) < 2 * 12 * 2 * MS, "none of them is two rounds ahead"


def test_a_controller_that_computes_without_the_host_holds_up_others_for_a_bounded_time() -> None:
    clock = Clock()
    turns = HostTurns(clock, clock)
    with turns.call(math.inf) as expensive, turns.call(math.inf):
        turns.leave(expensive, 1.0)
        assert turns.wait_s(expensive) == PROTECTED_S
        clock.now = PROTECTED_S
        assert turns.wait_s(expensive) == 0


def test_alone_a_controller_has_the_whole_host() -> None:
    clock = Clock()
    turns = HostTurns(clock, clock)
    with turns.call(math.inf) as only:
        turns.leave(only, 100.0)
        turns.enter(only)  # does not block


def test_many_at_once_have_smaller_shares_and_each_has_one() -> None:
    turns = HostTurns(Clock(), Clock())
    calls = [turns.call(math.inf) for _ in range(64)]
    found = [call.__enter__() for call in calls]
    turns.leave(found[0], 0.9 * MIN_SHARE_S)
    turns.leave(found[1], 1.1 * MIN_SHARE_S)
    assert 1.1 * MIN_SHARE_S < ALL_SHARES_S
    assert (turns._has_share(found[0]), turns._has_share(found[1])) == (True, False)
    for call in calls:
        call.__exit__(None, None, None)
