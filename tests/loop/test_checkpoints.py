"""Checkpoints for a memory that cannot be truncated: what is reused, and that answers do not change.

The tests run over a fake engine in virtual time.  The engine refuses to truncate without a checkpoint, and it refuses a
checkpoint of other tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import trio

from tests.support.asking import Client, asking
from tests.support.checkpoint_contract import *  # noqa: F403  (the tests)
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import thorough
from tests.support.state_files import MemoryFiles
from uma_trio.daemon.kv.checkpoints import TOKENS_AFTER_LAST
from uma_trio.engine_link.kv_ops import SaveCheckpoint
from uma_trio.engine_link.messages import EngineDied, EngineError

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
N_TOKENS = 150
"""Length of an answer."""


@pytest.fixture
def make() -> Callable[..., FakeEngine]:
    """See ``engine_contract``."""
    return functools.partial(FakeEngine, can_truncate=False)


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[5, 6, 7, 8, 9], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [90, 91]]


def tokens_of(seed: int, n: int = 300) -> list[int]:
    return random.Random(seed).choices(range(1, 800), k=n)


def engine_of(unified: bool, checkpoints: int = 64) -> FakeEngine:
    return FakeEngine(n_ctx=16_384, unified=unified, can_truncate=False, checkpoints=checkpoints)


def is_right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


@LAYOUTS
async def test_a_chat_is_repeated_continued_edited_and_shortened(autojump_clock, unified):
    async with asking(engine_of(unified)) as harness:
        first = await harness.answer(tokens_of(1), N_TOKENS)
        again = await harness.answer(tokens_of(1), N_TOKENS)
        turn = [*tokens_of(1), *first.tokens, *tokens_of(2, 100)]
        second = await harness.answer(turn, N_TOKENS)
        edited = await harness.answer([*tokens_of(1), *first.tokens, *tokens_of(3, 90)], N_TOKENS)
        shortened = await harness.answer([*tokens_of(1), *first.tokens[-20:], *tokens_of(4, 50)], N_TOKENS)
        clients = [first, again, second, edited, shortened]
        assert all(is_right(client) for client in clients)
        n_first = 300 + N_TOKENS - 1
        assert [client.cached for client in clients] == [
            0,
            300 - TOKENS_AFTER_LAST,
            n_first,
            n_first,
            300 - TOKENS_AFTER_LAST,
        ]
        await harness.clean()


def n_computed(engine: FakeEngine) -> int:
    """Tokens of all inputs."""
    return sum(len(each.tokens) for step in engine.steps for call in step.calls for each in call)


@LAYOUTS
@pytest.mark.parametrize("early", [False, True])
async def test_a_shared_prefix_is_computed_once(autojump_clock, unified, early):
    """Whether the requests arrive together, or during the prefill of the first one."""
    async with asking(engine_of(unified)) as harness:
        shared = tokens_of(1, 700)
        prompts = [[*shared, *tokens_of(n, 90)] for n in range(2, 10)]
        clients = [harness.ask(prompts[0], N_TOKENS)]
        if early:
            while len(harness.engine.steps) < 1:
                await trio.sleep(0.001)
        clients += [harness.ask(prompt, N_TOKENS) for prompt in prompts[1:]]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients] == [0, *([700] * 7)]
        assert n_computed(harness.engine) == 700 + 8 * (90 + N_TOKENS - 1)
        await harness.clean()


@LAYOUTS
async def test_when_the_leader_is_cancelled_its_followers_compute_the_prefix_once(autojump_clock, unified):
    async with asking(engine_of(unified)) as harness:
        shared = tokens_of(1, 1500)
        clients = [harness.ask([*shared, *tokens_of(n, 90)], N_TOKENS) for n in range(2, 6)]
        while len(harness.engine.steps) < 2:
            await trio.sleep(0.001)
        harness.scheduler.cancel(clients[0].answer)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients[1:]] == [0, 1500, 1500]
        await harness.clean()


@LAYOUTS
async def test_requests_with_the_same_prefix_one_after_another(autojump_clock, unified):
    """The second one restores a checkpoint inside the prefix.  Its prefill makes one where both prompts part."""
    async with asking(engine_of(unified)) as harness:
        shared = tokens_of(1, 700)
        clients = [await harness.answer([*shared, *tokens_of(n, 90)], N_TOKENS) for n in range(2, 6)]
        assert all(is_right(client) for client in clients)
        assert [client.cached for client in clients] == [0, 384, 700, 700]
        await harness.clean()


async def test_a_memory_that_can_be_truncated_has_no_checkpoints(autojump_clock):
    async with asking(FakeEngine()) as harness:
        for n in (1, 2, 1):
            await harness.answer(tokens_of(n), N_TOKENS)
        assert not [op for step in harness.engine.steps for op in step.ops if isinstance(op, SaveCheckpoint)]
        assert len(harness.engine.steps) == 3 * N_TOKENS, "no prefill pauses for a checkpoint"
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("checkpoints", [2, thorough(64)])
async def test_many_requests_with_cancellations_and_failures(autojump_clock, unified, checkpoints):
    """The fake engine refuses a checkpoint beyond ``max_checkpoints``."""
    rng = random.Random(5)
    async with asking(engine_of(unified, checkpoints)) as harness:
        known = [tokens_of(n, 120) for n in range(4)]
        for turn in range(12):
            clients = []
            for _ in range(6):
                old = rng.choice(known)
                prompt = [*old[: rng.choice([len(old), 130, 90])], *tokens_of(turn, rng.choice([3, 80]))]
                clients.append(harness.ask(prompt[:1500], rng.choice([5, 90])))
            await trio.sleep(rng.choice([0.0, 0.05]))
            harness.scheduler.cancel(clients[0].answer)
            if turn % 5 == 4:
                harness.engine.fail_next = EngineDied("killed") if turn > 6 else EngineError("it failed")
            await harness.ended(*clients)
            assert all(is_right(client) for client in clients)
            assert all(client.reason == "length" for client in clients[1:])
            known = [[*client.prompt, *client.tokens] for client in clients if client.tokens] or known
        await harness.clean()
        assert harness.engine.resets == 2
        assert harness.scheduler.telemetry.prefix_cache_hits_total > 12
        assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoint_ids) <= checkpoints


@LAYOUTS
async def test_checkpoints_are_saved_and_loaded_with_a_state(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(engine_of(unified), files, offload_after_s=1e8) as harness:
        first = await harness.answer(tokens_of(1), N_TOKENS, session_id="s")
        turn = [*tokens_of(1), *first.tokens, *tokens_of(2, 100)]
        await harness.answer(turn, N_TOKENS, session_id="s")
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
        assert len(files.states) == 1
    for prompt, cached in (
        (tokens_of(1) + tokens_of(3, 5), 300 - TOKENS_AFTER_LAST),
        (turn, len(turn) - TOKENS_AFTER_LAST),
        ([*tokens_of(1), *first.tokens, 5], 300 + N_TOKENS - 1),
    ):
        async with asking(engine_of(unified), files, offload_after_s=1e8) as harness:
            client = await harness.answer(prompt, 2 * N_TOKENS + 100)
            assert is_right(client)
            assert client.cached == cached
            await harness.clean()
            assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoint_ids)
            assert files.open_files == 0


async def test_a_request_that_is_cancelled_while_its_state_is_loaded_leaves_no_checkpoints(autojump_clock):
    files = MemoryFiles()
    async with asking(engine_of(True), files, offload_after_s=1e8) as harness:
        first = await harness.answer(tokens_of(1), N_TOKENS, session_id="s")
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
    prompt = [*tokens_of(1), *first.tokens, 5]
    async with asking(engine_of(True), files, offload_after_s=1e8) as harness:
        for n_checkpoints in range(8):
            client = harness.ask(prompt, 50)
            for _ in range(n_checkpoints):
                await trio.lowlevel.checkpoint()
            harness.scheduler.cancel(client.answer)
            await harness.clean()
            assert len(harness.engine.checkpoints) == len(harness.scheduler.cache._pool.checkpoint_ids)
        client = await harness.answer(prompt, 8)
        assert is_right(client)
        await harness.clean()
