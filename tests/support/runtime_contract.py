"""What every runtime of controllers must do, as tests: imported by files that run them on the fake and on the real one.

Each importing file has an async fixture ``runtime`` (usable, of at least 8 rows), with a module for each name in
``SCRIPTS``, and a fixture ``kill`` (ends the runtime at once).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from tests.support.fake_runtime import ScriptedController, Trap
from uma_trio.aici.runtime.interface import PREVIOUS_ERROR, Splice, StopSequence
from uma_trio.aici_link.messages import Auth, MidOp, MidResult, PostOp, PostResult, PreOp, PreResult
from uma_trio.daemon.aici.exchange import ControllerRuntime, Exchange
from uma_trio.engine_link.masks import Masks
from uma_trio.errors import ControllerNotFound, ControllerUnavailable

ALICE = Auth("alice", is_admin=True)
EVERYTHING = ScriptedController


class OnlySeven(ScriptedController):
    def mid(self, fork_group):
        return [7]


class Suspends(ScriptedController):
    def pre(self):
        return PreResult(suspend=True)


class Forks(ScriptedController):
    """Into three, in its first step and in all later ones."""

    def pre(self):
        return PreResult(num_forks=3)


class Ends(ScriptedController):
    def pre(self):
        return PreResult(num_forks=0)


class Stops(ScriptedController):
    def post(self, tokens, backtrack):
        return True


class Appends(ScriptedController):
    def mid(self, fork_group):
        return Splice(0, [7, 8, 9])


class Backtracks(ScriptedController):
    def mid(self, fork_group):
        return Splice(2, [7, 8])


class AllowsTheEnd(ScriptedController):
    def mid(self, fork_group):
        return StopSequence()


class Fails(ScriptedController):
    def mid(self, fork_group):
        raise Trap("wanted to fail")


class AsksForTooMuch(ScriptedController):
    """A token that no vocabulary has."""

    def mid(self, fork_group):
        return Splice(0, [4_000_000_000])


SCRIPTS: dict[str, type[ScriptedController]] = {
    "everything": EVERYTHING,
    "only-seven": OnlySeven,
    "suspends": Suspends,
    "forks": Forks,
    "ends": Ends,
    "stops": Stops,
    "appends": Appends,
    "backtracks": Backtracks,
    "allows-the-end": AllowsTheEnd,
    "fails": Fails,
    "asks-for-too-much": AsksForTooMuch,
}

ids = itertools.count(1)


async def answer_of(exchange: Exchange[Any]) -> Any:
    assert await exchange.wait(60)
    assert exchange.failure == ""
    assert exchange.answer is not None
    return exchange.answer


async def start(runtime: ControllerRuntime, *modules: str) -> list[int]:
    """A new sequence for each module, after its first ``pre``."""
    new = []
    for module in modules:
        id = next(ids)
        assert await runtime.instantiate(f"request-{id}", module, {"n": id}, [1], ALICE) == runtime.generation
        new.append(id)
    await answer_of(runtime.post_pre([], [PreOp(id, f"request-{id}") for id in new], []))
    return new


def row(runtime: ControllerRuntime, n: int) -> np.ndarray:
    assert runtime.masks is not None
    return Masks(runtime.masks).rows[n].copy()


def allowed(runtime: ControllerRuntime, n: int) -> list[int]:
    """The tokens that a row allows.  It forbids the others by -100."""
    found = row(runtime, n)
    assert set(found.tolist()) <= {0.0, -100.0}
    return np.flatnonzero(found == 0).tolist()


async def test_a_controller_from_its_first_step_to_its_last(runtime):
    id = next(ids)
    await runtime.instantiate("one", "everything", "text", [1, 2, 3])
    first = await answer_of(runtime.post_pre([], [PreOp(id, "one")], []))
    assert first.pre[id].result == PreResult()
    middle = await answer_of(runtime.mid([MidOp(id)]))
    assert middle[id].error == ""
    assert middle[id].result is None
    assert not row(runtime, 0).any()
    second = await answer_of(runtime.post_pre([PostOp(id, [5])], [], []))
    assert second.post[id].result == PostResult(stop=False)
    assert second.pre[id].result == PreResult()
    await answer_of(runtime.post_pre([], [], [id]))
    assert id not in (await answer_of(runtime.post_pre([], [], []))).pre


async def test_each_row_is_that_of_its_op(runtime):
    free, seven, end = await start(runtime, "everything", "only-seven", "allows-the-end")
    found = await answer_of(runtime.mid([MidOp(seven), MidOp(free), MidOp(end)]))
    assert {id: (each.error, each.result) for id, each in found.items()} == dict.fromkeys(
        [free, seven, end], ("", None)
    )
    assert allowed(runtime, 0) == [7]
    assert not row(runtime, 1).any()
    assert len(allowed(runtime, 2)) == 1
    await answer_of(runtime.mid([MidOp(free), MidOp(seven)]))
    assert not row(runtime, 0).any()
    assert allowed(runtime, 1) == [7]


async def test_splices(runtime):
    appends, backtracks = await start(runtime, "appends", "backtracks")
    found = await answer_of(runtime.mid([MidOp(appends), MidOp(backtracks)]))
    assert found[appends].result == MidResult([7, 8, 9], 0)
    assert allowed(runtime, 0) == [7]
    assert found[backtracks].result == MidResult([7, 8], 3), "counts the token that would be sampled"
    assert not row(runtime, 1).any()
    done = await answer_of(runtime.post_pre([PostOp(appends, [7, 8, 9]), PostOp(backtracks, [7, 8], 3)], [], []))
    assert [done.post[id].error for id in (appends, backtracks)] == ["", ""]


async def test_forks_are_named_by_the_engine_and_live_on(runtime):
    [parent] = await start(runtime, "forks")
    first, second = next(ids), next(ids)
    ops = [MidOp(parent), MidOp(first, parent), MidOp(second, parent)]
    found = await answer_of(runtime.mid(ops))
    assert [found[id].error for id in (parent, first, second)] == ["", "", ""]
    posted = [PostOp(parent, [5]), PostOp(first, [6]), PostOp(second, [7])]
    after = await answer_of(runtime.post_pre(posted, [], []))
    assert {*after.post} == {parent, first, second} <= {*after.pre}
    assert [after.pre[id].result.num_forks for id in (parent, first, second)] == [3, 3, 3]


async def test_endings_and_suspensions(runtime):
    ends, suspends, stops = await start(runtime, "ends", "suspends", "stops")
    found = await answer_of(runtime.post_pre([PostOp(stops, [5])], [], []))
    assert found.pre[ends].result == PreResult(num_forks=0)
    assert found.pre[suspends].result == PreResult(suspend=True)
    assert found.post[stops].result == PostResult(stop=True)


async def test_the_failure_of_a_controller_is_its_own(runtime):
    fails, free = await start(runtime, "fails", "everything")
    found = await answer_of(runtime.mid([MidOp(fails), MidOp(free)]))
    assert "Error (mid)" in found[fails].error
    assert found[fails].result is None
    assert (found[free].error, found[free].result) == ("", None)
    again = await answer_of(runtime.mid([MidOp(fails), MidOp(free)]))
    assert PREVIOUS_ERROR in again[fails].error
    assert again[free].error == ""


async def test_what_is_impossible_is_an_error_of_its_own_sequence(runtime):
    greedy, free = await start(runtime, "asks-for-too-much", "everything")
    found = await answer_of(runtime.mid([MidOp(greedy), MidOp(free)]))
    assert found[greedy].error
    assert found[greedy].result is None
    assert found[free].error == ""


async def test_one_bad_op_does_not_fail_the_others(runtime):
    [free] = await start(runtime, "everything")
    nobody = next(ids)
    found = await answer_of(
        runtime.post_pre([PostOp(nobody, [5]), PostOp(free, [5])], [PreOp(next(ids), "nobody")], [])
    )
    assert found.post[nobody].error
    assert found.post[free].result == PostResult(stop=False)
    middle = await answer_of(runtime.mid([MidOp(nobody), MidOp(free), MidOp(next(ids), nobody)]))
    assert middle[nobody].error
    assert middle[free].error == ""
    assert not row(runtime, 1).any()


async def test_one_exchange_at_a_time(runtime):
    exchange = runtime.post_pre([], [], [])
    with pytest.raises(RuntimeError):
        runtime.mid([])
    await answer_of(exchange)
    called: list[bool] = []
    exchange = runtime.post_pre([], [], [])
    exchange.when_done(lambda: called.append(exchange.is_done))
    await answer_of(exchange)
    exchange.when_done(lambda: called.append(True))
    assert called == [True, True]


async def test_modules_that_do_not_exist(runtime):
    with pytest.raises(ControllerNotFound, match="nothing-of-this-name"):
        await runtime.instantiate("one", "nothing-of-this-name", None, [1], ALICE)


async def test_tags(runtime, module_id):
    [info] = await runtime.set_tags(module_id, ["first"], ALICE)
    assert (info.tag, info.updated_by) == ("first", "alice")
    assert "first" in [each.tag for each in await runtime.get_tags(ALICE)]
    await runtime.instantiate("one", "first", None, [1], ALICE)


async def wait_for(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def test_death_fails_what_is_pending_and_the_next_runtime_is_new(runtime, kill):
    [old] = await start(runtime, "everything")
    generation, masks, restarts = runtime.generation, runtime.masks, runtime.snapshot()["restarts_total"]
    changes: list[bool] = []
    runtime.on_change = lambda: changes.append(runtime.is_usable)
    exchange = runtime.mid([MidOp(old)])
    kill()
    assert await exchange.wait(60)
    assert exchange.failure or exchange.answer  # the answer may have been faster
    await wait_for(lambda: False in changes)
    if not runtime.is_usable:
        assert runtime.reason
        lost = runtime.mid([MidOp(old)])
        assert lost.is_done
        assert lost.failure
    await wait_for(lambda: runtime.is_usable)
    assert runtime.generation > generation
    assert runtime.snapshot()["restarts_total"] == restarts + 1
    assert runtime.masks is not masks
    assert changes[-1]
    found = await answer_of(runtime.mid([MidOp(old)]))
    assert found[old].error, "sequences of the old one are lost"
    [new] = await start(runtime, "only-seven")
    await answer_of(runtime.mid([MidOp(new)]))
    assert allowed(runtime, 0) == [7]


async def test_calls_on_the_side_channel_fail_with_a_death(runtime, kill, nursery):
    outcomes: list[str] = []

    async def instantiate(n: int) -> None:
        with contextlib.suppress(ControllerUnavailable):
            await runtime.instantiate(f"request-{n}", "everything", None, [1], ALICE)
            outcomes.append("done")
            return
        outcomes.append("unavailable")

    for n in range(3):
        nursery.start_soon(instantiate, n)
    await trio.sleep(0.0001)
    kill()
    await wait_for(lambda: len(outcomes) == 3)


__all__: Sequence[str] = [name for name in dir() if name.startswith("test_")]
