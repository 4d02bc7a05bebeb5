"""A memory that cannot be cut, over a fake engine in virtual time: what it goes back to, and that it is right.

The fake engine refuses to cut what has no checkpoint, and to go back to one of other tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import trio
from uma_trio.scheduler.state_files import saved_state

from tests.support.asking import Client, asking
from tests.support.checkpoint_contract import *  # noqa: F403  (the tests)
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.state_files import MemoryFiles
from uma_trio.engine.messages import EngineError, Mark
from uma_trio.kv.checkpoints import BEFORE_END

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
TELLS = 150
"""Tokens of an answer."""


@pytest.fixture
def make() -> Callable[..., FakeEngine]:
    """As the contract of engines wants it."""
    return functools.partial(FakeEngine, can_truncate=False)


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[5, 6, 7, 8, 9], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [90, 91]]


def story(n: int, length: int = 300) -> list[int]:
    return random.Random(n).choices(range(1, 800), k=length)


def engine_of(unified: bool, checkpoints: int = 64) -> FakeEngine:
    return FakeEngine(n_ctx=16_384, unified=unified, can_truncate=False, checkpoints=checkpoints)


def is_right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


@LAYOUTS
async def test_a_chat_with_everything_that_happens_to_one(autojump_clock, unified):
    async with asking(engine_of(unified)) as harness:
        first = await harness.answer(story(1), TELLS)
        again = await harness.answer(story(1), TELLS)
        turn = [*story(1), *first.tokens, *story(2, 100)]
        second = await harness.answer(turn, TELLS)
        rewritten = await harness.answer([*story(1), *first.tokens, *story(3, 90)], TELLS)
        without_thoughts = await harness.answer([*story(1), *first.tokens[-20:], *story(4, 50)], TELLS)
        clients = [first, again, second, rewritten, without_thoughts]
        assert all(is_right(client) for client in clients)
        ended = 300 + TELLS - 1
        assert [client.cached for client in clients] == [0, 300 - BEFORE_END, ended, ended, 300 - BEFORE_END]
        await harness.clean()


def computed(engine: FakeEngine) -> int:
    """Tokens that were fed."""
    return sum(len(feed.tokens) for step in engine.steps for batch in step.calls for feed in batch)


@LAYOUTS
@pytest.mark.parametrize("early", [False, True])
async def test_what_many_begin_with_is_computed_once(autojump_clock, unified, early):
    """Whether they come together or while the first is being read."""
    async with asking(engine_of(unified)) as harness:
        shared = story(1, 700)
        prompts = [[*shared, *story(n, 90)] for n in range(2, 10)]
        clients = [harness.ask(prompts[0], TELLS)]
        if early:
            while len(harness.engine.steps) < 1:
                await trio.sleep(0.001)
        clients += [harness.ask(prompt, TELLS) for prompt in prompts[1:]]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients] == [0, *([700] * 7)]
        assert computed(harness.engine) == 700 + 8 * (90 + TELLS - 1)
        await harness.clean()


@LAYOUTS
async def test_if_the_one_that_is_waited_for_goes_the_others_compute_it_once(autojump_clock, unified):
    async with asking(engine_of(unified)) as harness:
        shared = story(1, 1500)
        clients = [harness.ask([*shared, *story(n, 90)], TELLS) for n in range(2, 6)]
        while len(harness.engine.steps) < 2:
            await trio.sleep(0.001)
        harness.scheduler.cancel(clients[0].sequence)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients[1:]] == [0, 1500, 1500]
        await harness.clean()


@LAYOUTS
async def test_one_after_another_with_one_beginning(autojump_clock, unified):
    """The second goes back to a place inside; where it leaves the first one the others begin."""
    async with asking(engine_of(unified)) as harness:
        shared = story(1, 700)
        clients = [await harness.answer([*shared, *story(n, 90)], TELLS) for n in range(2, 6)]
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients] == [0, 384, 700, 700]
        await harness.clean()


async def test_a_memory_that_can_be_cut_has_no_checkpoints(autojump_clock):
    async with asking(FakeEngine()) as harness:
        for n in (1, 2, 1):
            await harness.answer(story(n), TELLS)
        assert not [edit for step in harness.engine.steps for edit in step.ops if isinstance(edit, Mark)]
        assert len(harness.engine.steps) == 3 * TELLS, "and no prompt pauses"
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("checkpoints", [2, 64])
async def test_many_at_once(autojump_clock, unified, checkpoints):
    """The fake engine refuses one checkpoint more than there may be."""
    chance = random.Random(5)
    async with asking(engine_of(unified, checkpoints)) as harness:
        told = [story(n, 120) for n in range(4)]
        for turn in range(12):
            clients = []
            for _ in range(6):
                old = chance.choice(told)
                prompt = [*old[: chance.choice([len(old), 130, 90])], *story(turn, chance.choice([3, 80]))]
                clients.append(harness.ask(prompt[:1500], chance.choice([5, 90])))
            await trio.sleep(chance.choice([0.0, 0.05]))
            harness.scheduler.cancel(clients[0].sequence)
            if turn % 5 == 4:
                harness.engine.fail_next = EngineError("it failed", fatal=turn > 6)
            await harness.ended(*clients)
            assert all(is_right(client) for client in clients)
            told = [[*client.prompt, *client.tokens] for client in clients if client.tokens] or told
        await harness.clean()
        assert harness.engine.resets == 1
        assert harness.scheduler.telemetry.prefix_cache_hits_total > 12
        assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoints) <= checkpoints


@LAYOUTS
async def test_saved_and_loaded_again(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(engine_of(unified), files, offload_after_s=1e8) as harness:
        first = await harness.answer(story(1), TELLS, durable=True)
        turn = [*story(1), *first.tokens, *story(2, 100)]
        await harness.answer(turn, TELLS, durable=True)
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
        assert len(files.states) == 1
    for prompt, cached in (
        (story(1) + story(3, 5), 300 - BEFORE_END),
        (turn, len(turn) - BEFORE_END),
        ([*story(1), *first.tokens, 5], 300 + TELLS - 1),
    ):
        async with asking(engine_of(unified), files, offload_after_s=1e8) as harness:
            client = await harness.answer(prompt, 2 * TELLS + 100)
            assert is_right(client)
            assert client.cached == cached
            await harness.clean()
            assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoints)
            assert files.open_files == 0


async def test_cancelled_while_it_is_loaded_nothing_is_left(autojump_clock):
    files = MemoryFiles()
    async with asking(engine_of(True), files, offload_after_s=1e8) as harness:
        first = await harness.answer(story(1), TELLS, durable=True)
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
    prompt = [*story(1), *first.tokens, 5]
    async with asking(engine_of(True), files, offload_after_s=1e8) as harness:
        for patience in range(8):
            client = harness.ask(prompt, 50)
            for _ in range(patience):
                await trio.lowlevel.checkpoint()
            harness.scheduler.cancel(client.sequence)
            await harness.clean()
            assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoints)
        client = await harness.answer(prompt, 8)
        assert is_right(client)
        await harness.clean()


@pytest.mark.parametrize(
    "told", [7, [7], [[1, 2, 3]], [["1", 2]], [[20, 5], [10, 5]], [[0, 5]], [[31, 5]], [[5, 0]], [[5, 100]], {"5": 6}]
)
def test_what_a_file_says_of_its_checkpoints_is_looked_at(told):
    tokens = np.arange(30, dtype=np.int32)
    assert saved_state("a", 0, tokens, 100, {"checkpoints": [[10, 5], [30, 5]]}).checkpoints == ((10, 5), (30, 5))
    with pytest.raises(ValueError, match="checkpoints"):
        saved_state("a", 0, tokens, 100, {"checkpoints": told})
