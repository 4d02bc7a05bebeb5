"""The fake runtime of controllers keeps the contract, and what the contract leaves to it."""

from __future__ import annotations

import pytest
import trio

from tests.support.fake_runtime import SKIPPED, FakeRuntime, ScriptedController
from tests.support.runtime_contract import *  # noqa: F403  (the tests)
from tests.support.runtime_contract import SCRIPTS, answer_of, start
from uma_trio.aici_link.messages import MidOp, PostOp, PreOp, PreResult


class SlowOnce(ScriptedController):
    n = 0

    def mid(self, fork_group):
        self.n += 1
        return SKIPPED if self.n == 1 else [7]


class SpeaksFirst(ScriptedController):
    """Appends two tokens before anything is sampled, one at a time, and keeps what it sees."""

    def pre(self):
        self.log(f"{len(self.tokens)} ")
        return PreResult(ff_tokens=[40 + len(self.tokens)] if len(self.tokens) < 3 else [])

    def post(self, tokens, backtrack):
        self.write("seen", str(self.tokens))
        return False


@pytest.fixture
async def runtime(nursery):
    runtime = FakeRuntime({**SCRIPTS, "slow": SlowOnce, "speaks": SpeaksFirst}, restart_ms=20)
    await nursery.start(runtime.run)
    return runtime


@pytest.fixture
def kill(runtime):
    return runtime.die


@pytest.fixture
def module_id():
    return "everything"


async def test_an_exchange_takes_its_time(autojump_clock, runtime):
    runtime.exchange_ms = lambda name: 3.0 if name == "mid" else 1.0
    began = trio.current_time()
    [id] = await start(runtime, "everything")
    exchange = runtime.mid([MidOp(id)])
    assert not await exchange.wait(0.002)
    assert await exchange.wait(0.002)
    assert trio.current_time() - began == pytest.approx(0.001 + 0.001 + 0.003)


async def test_a_slow_controller_is_skipped_and_asked_again(runtime):
    slow, free = await start(runtime, "slow", "everything")
    found = await answer_of(runtime.mid([MidOp(slow), MidOp(free)]))
    assert (found[slow].skipped, found[slow].error, found[slow].result) == (True, "", None)
    assert found[free].skipped is not True
    found = await answer_of(runtime.mid([MidOp(slow), MidOp(free)]))
    assert found[slow].skipped is not True


async def test_tokens_of_pre_have_been_seen_by_the_controller(runtime):
    await runtime.instantiate("one", "speaks", None, [1])
    found = (await answer_of(runtime.post_pre([], [PreOp(900, "one")], []))).pre[900]
    assert found.result == PreResult(ff_tokens=[41, 42])
    assert found.logs == "1 2 3 "
    assert [bytes.fromhex(each["WriteVar"]["value"]).decode() for each in found.storage] == ["[1, 41]", "[1, 41, 42]"]
    await answer_of(runtime.post_pre([PostOp(900, [43], 2)], [], []))
    assert runtime.live[900].tokens == [1, 41, 43], "the wire counts the token that would be sampled"
