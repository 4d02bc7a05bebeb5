"""Sequences that are saved before their cells go, and loaded when they are wanted: over a fake engine in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.state_files import MemoryFiles
from uma_trio.engine.messages import EngineError, Load, Save

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
NEVER = 1e8


def story(n: int, length: int = 300) -> list[int]:
    return random.Random(n).choices(range(1, 800), k=length)


def small(unified: bool = True, n_seq_max: int = 3) -> FakeEngine:
    """With room for a few stories."""
    return FakeEngine(n_ctx=1024 * n_seq_max, n_seq_max=n_seq_max, unified=unified)


def is_right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


def copies(harness: Harness, kind: type) -> list[float]:
    return [edit for step in harness.engine.steps for edit in step.ops if isinstance(edit, kind)]


async def told(harness: Harness, n: int, n_tokens: int = 8, **fields: object) -> list[int]:
    """A story told to the end; what the next part begins with."""
    client = await harness.answer(story(n), n_tokens, durable=True, **fields)
    assert is_right(client)
    return [*client.prompt, *client.tokens]


async def settled(harness: Harness) -> None:
    """What is being saved is."""
    kv = harness.scheduler.cache.offload
    with trio.fail_after(100):
        while kv.to_save(float("inf")) is not None or kv.is_saving:
            await trio.sleep(0.1)
    await trio.testing.wait_all_tasks_blocked()


@LAYOUTS
async def test_what_had_to_go_comes_back(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(12)]
        await settled(harness)
        assert len(files.states) >= 9
        for n, tokens in enumerate(said):
            before = harness.computed
            client = await harness.answer([*tokens, 900 + n], 8, durable=True)
            assert is_right(client)
            assert client.cached == len(tokens) - 1
            assert harness.computed - before == 2
        assert harness.scheduler.snapshot()["kv_offload"]["loaded_total"] >= 9
        await harness.clean()
        assert files.open_files == 0


@LAYOUTS
async def test_who_needs_the_room_waits_until_it_is_saved(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        for n in range(2):
            await told(harness, n)
        big = harness.ask(story(7, 1000 if not unified else 2500), 8)
        await harness.ended(big)
        assert is_right(big)
        saved = {tuple(saved.tokens.tolist()) for saved in files.scan()}
        for n in range(2):
            tokens = [*story(n), *expected_continuation(story(n), 7)]
            assert tuple(tokens) in saved or tokens in held_stories(harness)
        await harness.clean()


def held_stories(harness: Harness) -> list[list[int]]:
    return [harness.engine._cache[seq_id].tokens for seq_id in harness.engine.used_cells()]


async def test_only_what_is_to_last_is_saved(autojump_clock):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=0) as harness:
        for n in range(12):
            assert is_right(await harness.answer(story(n), 8))
        await trio.sleep(10)
        assert not files.states
        await harness.clean()


async def test_idle_for_long_enough_it_is_saved_although_its_room_is_not_needed(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=16), files, offload_after_s=20) as harness:
        tokens = await told(harness, 1)
        await trio.sleep(19)
        assert not files.states
        await trio.sleep(3)
        assert [saved.tokens.tolist() for saved in files.scan()] == [tokens[:-1]]
        client = await harness.answer([*tokens, 900], 8, durable=True)
        assert is_right(client)
        assert not copies(harness, Load), "it is still there"
        await trio.sleep(30)
        held = [*tokens, 900, *client.tokens][:-1]
        assert [saved.tokens.tolist() for saved in files.scan()] == [held], "the longer one replaces the shorter"
        await harness.clean()


async def test_a_new_server_finds_what_the_old_one_saved(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=16), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(5)]
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
async def test_what_cannot_be_saved_goes_and_is_computed_again(autojump_clock, fault):
    files = MemoryFiles()
    setattr(files, fault, True)
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(8)]
        for n, tokens in enumerate(said):
            assert is_right(await harness.answer([*tokens, 900 + n], 8, durable=True))
        assert not files.states
        found = harness.scheduler.snapshot()["kv_offload"]
        assert found["save_failed_total"] >= 5
        assert found["loaded_total"] == 0
        await harness.clean()
        assert files.open_files == 0


@pytest.mark.parametrize("fault", ["broken", "garbled"])
async def test_what_cannot_be_loaded_is_computed_again(autojump_clock, fault):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(8)]
        await settled(harness)
        setattr(files, fault, True)
        for n, tokens in enumerate(said):
            client = await harness.answer([*tokens, 900 + n], 8)
            assert is_right(client)
        assert harness.scheduler.snapshot()["kv_offload"]["load_failed_total"] >= 5
        await harness.clean()
        assert files.open_files == 0


async def test_where_computing_is_quicker_nothing_is_saved(autojump_clock):
    quick = FakeEngine(n_ctx=3072, n_seq_max=3, cost_ms=lambda prompt, decodes: 0.1 + 1e-4 * (prompt + decodes))
    files = MemoryFiles()
    async with asking(quick, files, offload_after_s=0) as harness:
        for n in range(12):
            await told(harness, n)
        await trio.sleep(10)
        assert not files.states
        await harness.clean()


async def test_a_cancel_while_it_is_being_loaded(autojump_clock):
    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(8)]
        await settled(harness)
        for patience in range(12):
            client = harness.ask([*said[patience % 4], 999], 50)
            for _ in range(patience):
                await trio.lowlevel.checkpoint()
            harness.scheduler.cancel(client.sequence)
            await harness.ended(client)
        assert is_right(await harness.answer([*said[0], 900], 8))
        await harness.clean()
        assert files.open_files == 0


async def test_streams_are_not_made_late_by_copies(autojump_clock):
    """A copy takes 200 ms here, a step 5: it waits for a moment with nobody to wait for it, or is given up."""
    files = MemoryFiles()
    engine = FakeEngine(n_ctx=65_536, n_seq_max=3)
    async with asking(engine, files, offload_after_s=NEVER) as harness:
        first = await harness.answer(story(1, 20_000), 8, durable=True)
        harness.scheduler.pace.bytes_a_ms["save"] = 20_000 * 12_288 / 200
        talker = harness.ask(story(2), 400, slo={"target_tbt_ms": 50} and talks())
        other = harness.ask(story(3, 60_000), 8)  # needs the room
        await harness.ended(talker)
        await harness.ended(other)
        assert is_right(first)
        assert is_right(talker)
        assert is_right(other)
        await harness.clean()


def talks():
    from uma_trio.protocol.messages import Slo

    return Slo(target_tbt_ms=50)


@LAYOUTS
async def test_a_failing_step_with_a_copy_in_it(autojump_clock, unified):
    files = MemoryFiles()
    async with asking(small(unified), files, offload_after_s=NEVER) as harness:
        said = [await told(harness, n) for n in range(8)]
        await settled(harness)
        for fatal in (False, True):
            clients = [harness.ask([*said[n], 950], 30) for n in range(3)]
            await trio.sleep(0.02)
            harness.engine.fail_next = EngineError("it failed", fatal=fatal)
            await harness.ended(*clients)
        again = await harness.answer([*said[5], 900], 8)
        assert is_right(again)
        await harness.clean()
        assert files.open_files == 0


async def test_a_context_made_anew_holds_no_state_that_was_loaded_before(autojump_clock):
    """The request that it was loaded for is in no step yet, and its file not even closed."""

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(1)
        return call(*arguments)

    files = MemoryFiles()
    async with asking(small(), files, offload_after_s=NEVER) as harness:
        said = await told(harness, 1)
        await harness.scheduler.offloader.save_everything()
    async with asking(small(), files, in_thread=slowly, offload_after_s=NEVER) as harness:
        talker = harness.ask(story(2), 600)
        client = harness.ask([*said, 900], 8)
        client.has_room = False
        while not copies(harness, Load):
            await trio.sleep(0.001)
        harness.engine.fail_next = EngineError("it failed", fatal=True)
        await harness.ended(talker)
        await trio.sleep(5)
        assert harness.engine.resets == 1
        harness.read_on(client)
        await harness.ended(client)
        assert is_right(client)
        assert len(client.tokens) == 8
        assert harness.engine.resets == 1
        await harness.clean()


async def test_at_most_one_copy_a_step(autojump_clock):
    files = MemoryFiles()
    async with asking(small(n_seq_max=6), files, offload_after_s=0) as harness:
        said = [await told(harness, n) for n in range(20)]
        clients = [harness.ask([*said[n], 900], 20) for n in range(6)]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        for step in harness.engine.steps:
            assert sum(isinstance(edit, Save | Load) for edit in step.ops) <= 1
        await harness.clean()


@pytest.mark.slow
async def test_an_hour_of_500_conversations_in_room_for_20(autojump_clock):
    files, rng = MemoryFiles(), random.Random(5)
    engine = FakeEngine(n_ctx=20 * 256, n_seq_max=20, unified=False)
    async with asking(engine, files, offload_after_s=30, max_queue=1000) as harness:
        seen = 0

        async def watch() -> None:
            nonlocal seen
            while True:
                harness.scheduler.check_integrity()
                kv = harness.scheduler.cache.statistics()
                assert kv.cells_reserved + kv.cached_cells <= kv.cells
                assert kv.saved_states <= 500
                seen += 1
                await trio.sleep(5)

        async def talk(n: int) -> None:
            said: list[int] = []
            for at in sorted(rng.uniform(0, 3600) for _ in range(3)):
                await trio.sleep_until(began + at)
                prompt = [*said, *story(1000 + n, rng.randint(16, 30))]
                client = await harness.answer(prompt, 6, durable=True)
                assert is_right(client)
                assert client.reason == "length"
                said = [*prompt, *client.tokens]

        began = trio.current_time()
        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for n in range(500):
                    nursery.start_soon(talk, n)
            watching.cancel_scope.cancel()
        assert seen > 600
        found = harness.scheduler.snapshot()["kv_offload"]
        assert (found["save_failed_total"], found["load_failed_total"]) == (0, 0)
        assert found["loaded_total"] > 500  # short ones are quicker to compute
        await settled(harness)
        await harness.clean()
        assert files.open_files == 0
