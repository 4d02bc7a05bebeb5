"""KV offload: states of sequences are saved before their cells are reused, and loaded for later requests.

The tests run over a fake engine in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import STATE_BYTES, FakeEngine, expected_continuation
from tests.support.profile import amount
from tests.support.state_files import MemoryFiles
from uma_trio.engine.state_check import FRONT_PAGES
from uma_trio.engine_link.kv_ops import LoadState, SaveState
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.state_pages import PAGE_BYTES
from uma_trio.protocol.requests import Slo

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
NEVER = 1e8


def tokens_of(seed: int, n: int = 300) -> list[int]:
    return random.Random(seed).choices(range(1, 800), k=n)


def small(unified: bool = True, n_seq_max: int = 3) -> FakeEngine:
    """An engine with room for a few sequences."""
    return FakeEngine(n_ctx=1024 * n_seq_max, n_seq_max=n_seq_max, unified=unified)


def is_right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


def ops_of(harness: Harness, kind: type) -> list[Any]:
    """All operations of one kind that the engine got."""
    return [op for step in harness.engine.steps for op in step.ops if isinstance(op, kind)]


async def answered(harness: Harness, seed: int, n_tokens: int = 8, **fields: object) -> list[int]:
    """Serve a durable request; returns its prompt and answer."""
    client = await harness.answer(tokens_of(seed), n_tokens, session_id="s", **fields)
    assert is_right(client)
    return [*client.prompt, *client.tokens]


async def all_saved(harness: Harness) -> None:
    """Wait until nothing is left to save."""
    kv = harness.scheduler.cache.offload
    with trio.fail_after(100):
        while kv.to_save(float("inf")) is not None or kv.is_saving:
            await trio.sleep(0.1)
    await trio.testing.wait_all_tasks_blocked()


@LAYOUTS
async def test_an_evicted_sequence_is_loaded_again(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(12)]
        await all_saved(harness)
        assert len(files.states) >= 9
        for n, tokens in enumerate(said):
            before = harness.computed
            client = await harness.answer([*tokens, 900 + n], 8, session_id="s")
            assert is_right(client)
            assert client.cached == len(tokens) - 1
            assert harness.computed - before == 2
        assert harness.scheduler.snapshot()["kv_offload"]["loaded_total"] >= 9
        await harness.clean()
        assert files.open_files == 0


@LAYOUTS
async def test_a_request_that_needs_cells_waits_until_their_sequence_is_saved(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        for n in range(2):
            await answered(harness, n)
        big = harness.ask(tokens_of(7, 1000 if not unified else 2500), 8)
        await harness.ended(big)
        assert is_right(big)
        saved = {tuple(saved.tokens.tolist()) for saved in files.scan()}
        for n in range(2):
            tokens = [*tokens_of(n), *expected_continuation(tokens_of(n), 7)]
            assert tuple(tokens) in saved or tokens in held_tokens(harness)
        await harness.clean()


def held_tokens(harness: Harness) -> list[list[int]]:
    """The sequences in the engine's KV cache."""
    return [harness.engine._cache[seq_id].tokens for seq_id in harness.engine.used_cells()]


async def test_only_durable_sequences_are_saved(autojump_clock):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=0) as harness:
        for n in range(12):
            assert is_right(await harness.answer(tokens_of(n), 8))
        await trio.sleep(10)
        assert not files.states
        await harness.clean()


async def test_a_sequence_that_is_idle_for_long_enough_is_saved_without_need(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=16), files, offload_after_s=20) as harness:
        tokens = await answered(harness, 1)
        await trio.sleep(19)
        assert not files.states
        await trio.sleep(3)
        assert [saved.tokens.tolist() for saved in files.scan()] == [tokens[:-1]]
        client = await harness.answer([*tokens, 900], 8, session_id="s")
        assert is_right(client)
        assert not ops_of(harness, LoadState), "the sequence is still in the cache"
        await trio.sleep(30)
        held = [*tokens, 900, *client.tokens][:-1]
        assert [saved.tokens.tolist() for saved in files.scan()] == [held], "the longer state replaces the shorter one"
        await harness.clean()


async def test_states_survive_a_restart(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=16), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(5)]
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
        assert len(files.states) == 5
    async with asking(small(n_seq_max=16), files, offload_after_s=NEVER) as harness:
        for n, tokens in enumerate(said):
            client = await harness.answer([*tokens, 900 + n], 8)
            assert is_right(client)
            assert client.cached == len(tokens) - 1
        await harness.clean()


@pytest.mark.parametrize("fault", ["full", "fails_late"])
async def test_a_sequence_that_cannot_be_saved_is_computed_again(autojump_clock, fault):
    files = MemoryFiles()
    setattr(files, fault, True)
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(8)]
        for n, tokens in enumerate(said):
            assert is_right(await harness.answer([*tokens, 900 + n], 8, session_id="s"))
        assert not files.states
        found = harness.scheduler.snapshot()["kv_offload"]
        assert found["save_failed_total"] >= 5
        assert found["loaded_total"] == 0
        await harness.clean()
        assert files.open_files == 0


@pytest.mark.parametrize("fault", ["broken", "garbled"])
async def test_a_state_that_cannot_be_loaded_is_computed_again(autojump_clock, fault):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(8)]
        await all_saved(harness)
        setattr(files, fault, True)
        for n, tokens in enumerate(said):
            client = await harness.answer([*tokens, 900 + n], 8)
            assert is_right(client)
        assert harness.scheduler.snapshot()["kv_offload"]["load_failed_total"] >= 5
        await harness.clean()
        assert files.open_files == 0


@pytest.mark.parametrize("n", [300, 600], ids=["before the copy", "after the copy"])
async def test_an_altered_state_is_found_once(autojump_clock, monkeypatch, n):
    """Found after the copy, it takes the KV cache with it; all other answers stay right."""
    monkeypatch.setattr("tests.support.fake_engine.STATE_BYTES", FRONT_PAGES * PAGE_BYTES // 500)
    files = MemoryFiles()
    async with asking(small(n_seq_max=6), files, offload_after_s=NEVER) as harness:
        said = [[*tokens_of(seed, n), *expected_continuation(tokens_of(seed, n), 8)] for seed in range(3)]
        for tokens in said:
            await harness.answer(tokens[:n], 8, session_id="s")
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
        assert len(files.states) == 3
    files.altered = True
    async with asking(small(n_seq_max=6), files, offload_after_s=NEVER) as harness:
        neighbour = harness.ask(tokens_of(9), 200)
        for found, tokens in enumerate(said, 1):
            clients = [harness.ask([*tokens, 900 + again], 8) for again in range(2)]
            await harness.ended(*clients)
            assert all(is_right(client) and client.reason == "length" for client in clients)
            assert len(files.states) == 3 - found, "it is not left for the next start"
        await harness.ended(neighbour)
        assert is_right(neighbour)
        assert neighbour.reason == "length"
        assert harness.engine.resets == (0 if n == 300 else 3)
        counted = harness.scheduler.snapshot()["kv_offload"]
        assert counted["loaded_total"] == 0
        assert counted["load_failed_total"] >= 3
        assert len(harness.scheduler.cache.offload.index) == 0
        await harness.clean()
        assert files.open_files == 0


async def test_requests_are_cancelled_while_their_altered_states_are_loaded(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=6), files, offload_after_s=NEVER) as harness:
        said = [[*tokens_of(seed, 600), *expected_continuation(tokens_of(seed, 600), 8)] for seed in range(6)]
        for tokens in said:
            await harness.answer(tokens[:600], 8, session_id="s")
        with trio.fail_after(100):
            await harness.scheduler.offloader.save_everything()
    files.altered = True
    async with asking(small(n_seq_max=6), files, offload_after_s=NEVER) as harness:
        for n, tokens in enumerate(said):
            client = harness.ask([*tokens, 999], 50)
            for _ in range(2 * n):
                await trio.lowlevel.checkpoint()
            harness.scheduler.cancel(client.answer)
            await harness.ended(client)
        for tokens in said:
            assert is_right(await harness.answer([*tokens, 900], 8))
        await harness.clean()
        assert files.open_files == 0


class DyingEngine(FakeEngine):
    """Dies of the first state that it loads."""

    n_loads = 0

    def _load(self, op: LoadState) -> None:
        self.n_loads += 1
        if self.n_loads == 1:
            raise EngineDied("killed")
        super()._load(op)


@pytest.mark.parametrize("altered", [False, True])
async def test_the_engine_dies_while_it_loads_a_state(autojump_clock, altered):
    """The state is verified before it is loaded again."""
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = await answered(harness, 1)
        await harness.scheduler.offloader.save_everything()
    files.altered = altered
    engine = DyingEngine(n_ctx=3072, n_seq_max=3)
    async with asking(engine, files, offload_after_s=NEVER) as harness:
        neighbour = harness.ask(tokens_of(2), 60)
        client = harness.ask([*said, 900], 8)
        await harness.ended(client, neighbour)
        assert is_right(client)
        assert is_right(neighbour)
        assert (client.reason, neighbour.reason) == ("length", "length")
        assert engine.resets == 1
        assert len(files.states) == (0 if altered else 1)
        again = await harness.answer(tokens_of(5, 1000))
        assert is_right(again)
        assert all(not op.hashes for op in ops_of(harness, LoadState)[1:])
        await harness.clean()
        assert files.open_files == 0


async def test_nothing_is_saved_where_prefill_is_faster_than_loading(autojump_clock):
    quick = FakeEngine(n_ctx=3072, n_seq_max=3, cost_ms=lambda prompt, decodes: 0.1 + 1e-4 * (prompt + decodes))
    files = MemoryFiles()
    async with asking(quick, files, offload_after_s=0) as harness:
        for n in range(12):
            await answered(harness, n)
        await trio.sleep(10)
        assert not files.states
        await harness.clean()


async def test_a_request_is_cancelled_while_its_state_is_loaded(autojump_clock):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(8)]
        await all_saved(harness)
        for n_checkpoints in range(12):
            client = harness.ask([*said[n_checkpoints % 4], 999], 50)
            for _ in range(n_checkpoints):
                await trio.lowlevel.checkpoint()
            harness.scheduler.cancel(client.answer)
            await harness.ended(client)
        assert is_right(await harness.answer([*said[0], 900], 8))
        await harness.clean()
        assert files.open_files == 0


async def test_copies_do_not_make_streams_late(autojump_clock):
    """A copy is predicted to take 200 ms, a step 5.  It waits for a step without streams, or is given up."""
    files = MemoryFiles()
    engine = FakeEngine(n_ctx=65_536, n_seq_max=3)
    async with asking(engine, files, offload_after_s=NEVER) as harness:
        first = await harness.answer(tokens_of(1, 20_000), 8, session_id="s")
        n_bytes = 20_000 * STATE_BYTES
        for _ in range(50):
            harness.scheduler.timings.record_copy("save", n_bytes, 200.0)
        stream = harness.ask(tokens_of(2), 400, slo=Slo(target_itl_ms=50))
        other = harness.ask(tokens_of(3, 60_000), 8)  # needs the cells of the first one
        await harness.ended(stream)
        await harness.ended(other)
        assert is_right(first)
        assert is_right(stream)
        assert is_right(other)
        await harness.clean()


@LAYOUTS
async def test_a_step_with_a_copy_fails(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        said = [await answered(harness, n) for n in range(8)]
        await all_saved(harness)
        for failure in (EngineError("it failed"), EngineDied("killed")):
            clients = [harness.ask([*said[n], 950], 30) for n in range(3)]
            await trio.sleep(0.02)
            harness.engine.fail_next = failure
            await harness.ended(*clients)
            assert all(is_right(client) and client.reason == "length" for client in clients)
        again = await harness.answer([*said[5], 900], 8)
        assert is_right(again)
        await harness.clean()
        assert files.open_files == 0


async def test_a_state_that_was_loaded_before_a_reset_is_lost(autojump_clock):
    """The request that it was loaded for is in no step yet, and its file is still open."""

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(1)
        return call(*arguments)

    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = await answered(harness, 1)
        await harness.scheduler.offloader.save_everything()
    async with asking(small(), files, in_thread=slowly, offload_after_s=NEVER) as harness:
        stream = harness.ask(tokens_of(2), 600)
        client = harness.ask([*said, 900], 8)
        client.has_room = False
        while not ops_of(harness, LoadState):
            await trio.sleep(0.001)
        harness.engine.fail_next = EngineError("it failed")
        await harness.ended(stream)
        await trio.sleep(5)
        assert harness.engine.resets == 1
        harness.read_on(client)
        await harness.ended(client)
        assert is_right(client)
        assert len(client.tokens) == 8
        assert harness.engine.resets == 1
        await harness.clean()


async def test_a_step_makes_one_copy_at_most(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=6), files, offload_after_s=0) as harness:
        said = [await answered(harness, n) for n in range(20)]
        clients = [harness.ask([*said[n], 900], 20) for n in range(6)]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        for step in harness.engine.steps:
            assert sum(isinstance(op, SaveState | LoadState) for op in step.ops) <= 1
        await harness.clean()


async def test_many_conversations_with_cells_for_a_few(autojump_clock):
    """25 times as many conversations as sequences, each with three turns.

    The thorough profile plays an hour of 500 conversations.
    """
    n_conversations, duration_s = amount(quick=50, thorough=500), amount(quick=360, thorough=3600)
    n_sequences = n_conversations // 25
    files, rng = MemoryFiles(), random.Random(5)
    engine = FakeEngine(n_ctx=n_sequences * 256, n_seq_max=n_sequences, unified=False)
    async with asking(engine, files, offload_after_s=30, max_queue=1000) as harness:
        n_checks = 0

        async def watch() -> None:
            nonlocal n_checks
            while True:
                harness.scheduler.check_integrity()
                kv = harness.scheduler.cache.statistics()
                assert kv.cells_reserved + kv.cached_cells <= kv.cells
                assert kv.saved_states <= n_conversations
                n_checks += 1
                await trio.sleep(5)

        async def converse(n: int) -> None:
            said: list[int] = []
            for at in sorted(rng.uniform(0, duration_s) for _ in range(3)):
                await trio.sleep_until(began + at)
                prompt = [*said, *tokens_of(1000 + n, rng.randint(16, 30))]
                client = await harness.answer(prompt, 6, session_id="s")
                assert is_right(client)
                assert client.reason == "length"
                said = [*prompt, *client.tokens]

        began = trio.current_time()
        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for n in range(n_conversations):
                    nursery.start_soon(converse, n)
            watching.cancel_scope.cancel()
        assert n_checks > duration_s / 6
        found = harness.scheduler.snapshot()["kv_offload"]
        assert (found["save_failed_total"], found["load_failed_total"]) == (0, 0)
        assert found["loaded_total"] > n_conversations  # short sequences are computed, since that is faster
        await all_saved(harness)
        await harness.clean()
        assert files.open_files == 0
