"""Streams that lose their places are copied to memory, and go on from there: over a fake engine in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount, sampled, thorough
from uma_trio.protocol.requests import Slo

SLOW = 0.5
"""Milliseconds for each token of a prompt, so that a prefill of some thousand tokens takes seconds."""

LAYOUTS = [{}, {"unified": False}, {"can_truncate": False}]


def slow(n_seq_max: int = 1, n_ctx: int = 8000, **options: object) -> FakeEngine:
    def cost_ms(prompt: int, decodes: int) -> float:
        return 1 + SLOW * prompt + decodes

    return FakeEngine(n_seq_max=n_seq_max, n_ctx=n_ctx, cost_ms=cost_ms, **options)


def right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


def long_prompt(n: int, start: int = 0) -> list[int]:
    return [(start + each) % 7 for each in range(n)]


async def visit(harness: Harness) -> float:
    """Seconds until a principal that holds nothing has its first token."""
    client = harness.ask([9], 3, principal="visitor")
    waited = await client.reached()
    await harness.ended(client)
    assert right(client)
    return waited


@pytest.mark.parametrize("options", sampled(LAYOUTS, 3), ids=str)
@pytest.mark.parametrize("private", [False, thorough(True)])
async def test_a_visitor_never_waits_for_a_whole_prefill(autojump_clock, options, private) -> None:
    """One place, a prompt that takes 2.5 s, and visits without a pause."""
    async with asking(slow(**options)) as harness:
        long = harness.ask(long_prompt(5000), 40, principal="greedy", cache_prompt=not private)
        await trio.sleep(0.1)
        waits = []
        while not long.answer.done.is_set():
            waits.append(await visit(harness))
        assert max(waits) < 1.2
        assert harness.scheduler.telemetry.preemptions_total >= 3
        assert harness.scheduler.telemetry.cached_tokens_total == long.cached == 0, "its own cells are no reuse"
        assert right(long)
        assert harness.computed < 5500, "it is computed once"
        assert harness.scheduler.offloader.parked_bytes == 0
        await harness.clean()


@pytest.mark.parametrize("unified", sampled([True, False], 2))
async def test_two_that_fill_the_cache_make_room_as_fast(autojump_clock, unified) -> None:
    async with asking(slow(2, 8000, unified=unified)) as harness:
        long = [harness.ask(long_prompt(3900, n), 90, principal=f"greedy {n}") for n in range(2)]
        await trio.sleep(0.1)
        waits = []
        while not all(each.answer.done.is_set() for each in long):
            waits.append(await visit(harness))
        assert max(waits) < 1.5
        assert all(right(each) for each in long)
        await harness.clean()


async def test_background_that_waits_for_others_is_copied_at_once(autojump_clock) -> None:
    """Tokens of the other background request have been due for seconds, which is no reason to put off the copy."""
    engine = FakeEngine(n_seq_max=3, n_ctx=20_000, cost_ms=lambda prompt, decodes: 1 + prompt + 20 * decodes)
    async with asking(engine) as harness:
        rows = [harness.ask(long_prompt(300, n), 40, slo=Slo(priority="background")) for n in range(2)]
        with trio.fail_after(100):
            while not all(row.tokens for row in rows):
                await trio.sleep(0.01)
        stream = harness.ask([5], 400, principal="visitor")
        await trio.sleep(3)
        assert all(len(row.tokens) < 30 for row in rows)
        assert await visit(harness) < 0.2
        assert harness.scheduler.telemetry.preemptions_total == 1
        await harness.ended(stream, *rows)
        assert all(right(row) for row in rows)
        await harness.clean()


async def test_a_copy_that_a_request_waits_for_has_no_background_next_to_it(autojump_clock) -> None:
    engine = FakeEngine(n_seq_max=2, n_ctx=20_000, cost_ms=lambda prompt, decodes: 1 + prompt + 50 * decodes)
    async with asking(engine) as harness:
        rows = [harness.ask(long_prompt(300, n), 40, slo=Slo(priority="background")) for n in range(2)]
        with trio.fail_after(100):
            while not all(len(row.tokens) > 2 for row in rows):
                await trio.sleep(0.01)
        before = sum(len(row.tokens) for row in rows)
        stream = harness.ask([5], 2)
        with trio.fail_after(100):
            while not stream.tokens:
                await trio.sleep(0.001)
        assert sum(len(row.tokens) for row in rows) - before <= 2, "of the step that computed when the request came"
        await harness.ended(stream, *rows)
        assert all(right(row) for row in rows)
        await harness.clean()


async def test_without_memory_a_turn_begins_where_the_last_one_ended(autojump_clock) -> None:
    """A visitor waits then, but both go on."""
    async with asking(slow(), preempted_max_mb=0) as harness:
        long = harness.ask(long_prompt(5000), 40, principal="greedy", cache_prompt=False)
        await trio.sleep(0.1)
        n = 0
        while not long.answer.done.is_set():
            await visit(harness)
            n += 1
        assert n < 10
        assert right(long)
        await harness.clean()


async def test_memory_is_for_as_many_as_it_has_room_for(autojump_clock) -> None:
    async with asking(slow(2, 8000, unified=False), preempted_max_mb=40) as harness:  # a state has up to 48 MB
        long = [harness.ask(long_prompt(3900, n), 90, principal=f"greedy {n}", cache_prompt=False) for n in range(2)]
        await trio.sleep(1)
        while not all(each.answer.done.is_set() for each in long):
            await visit(harness)
            assert harness.scheduler.offloader.parked_bytes <= 40e6
        assert all(right(each) for each in long)
        assert harness.scheduler.offloader.parked_bytes == 0
        await harness.clean()


@pytest.mark.parametrize("after_s", sampled([0.0, 0.001, 0.01, 0.05, 0.3], 3))
@pytest.mark.parametrize("who", ["greedy", "visitor", "both"])
async def test_a_cancel_next_to_a_copy_leaves_nothing_behind(autojump_clock, who, after_s) -> None:
    async with asking(slow()) as harness:
        long = harness.ask(long_prompt(5000), 40, principal="greedy", cache_prompt=False)
        await trio.sleep(1)
        visitor = harness.ask([9], 300, principal="visitor")
        await trio.sleep(after_s)
        if who != "visitor":
            harness.scheduler.cancel(long.answer)
        if who != "greedy":
            harness.scheduler.cancel(visitor.answer)
        await harness.ended(long, visitor)
        assert right(long)
        assert right(visitor)
        await harness.clean()
        assert harness.scheduler.offloader.parked_bytes == 0


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.3, 0.5, 0.9])
async def test_a_crash_next_to_a_copy_changes_no_text(autojump_clock, after_s) -> None:
    async with asking(slow()) as harness:
        long = harness.ask(long_prompt(4000), 40, principal="greedy")
        await trio.sleep(1)
        visitor = harness.ask([9], 3, principal="visitor")
        await trio.sleep(after_s)
        harness.scheduler._engine.link.kill()
        await harness.ended(long, visitor)
        assert right(long)
        assert right(visitor)
        await harness.clean()
        assert harness.scheduler.offloader.parked_bytes == 0


async def test_those_that_lost_their_places_go_before_later_requests_of_their_principal(autojump_clock) -> None:
    """So a principal has no more copies than it had places."""
    async with asking(slow(2, 100_000)) as harness:
        greedy = [harness.ask(long_prompt(2000, n), 60, principal="greedy", cache_prompt=False) for n in range(5)]
        await trio.sleep(0.5)
        while not all(each.answer.done.is_set() for each in greedy):
            await visit(harness)
            assert sum(each.answer.place.parked is not None for each in greedy) <= 2
        assert all(right(each) for each in greedy)
        await harness.clean()


@settings(max_examples=amount(quick=8, thorough=200), deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 1200), st.integers(1, 60), st.booleans()),
        min_size=2,
        max_size=6,
    ),
    n_places=st.integers(1, 2),
    memory_mb=st.sampled_from([0, 10, 2000]),
    unified=st.booleans(),
)
def test_principals_that_push_each_other_out_all_come_to_an_end(
    requests: list[tuple[str, int, int, bool]], n_places: int, memory_mb: int, unified: bool
) -> None:
    """Nobody is pushed out for ever without a token, whatever there is room for."""

    async def serve() -> None:
        n_ctx = 1300 if unified else 1300 * n_places
        async with asking(slow(n_places, n_ctx, unified=unified), preempted_max_mb=memory_mb) as harness:
            clients = [
                harness.ask(long_prompt(n_prompt, n), n_tokens, principal=name, cache_prompt=cached)
                for n, (name, n_prompt, n_tokens, cached) in enumerate(requests)
            ]
            with trio.fail_after(300):
                await harness.ended(*clients)
            assert all(len(each.tokens) and right(each) for each in clients)
            assert harness.scheduler.offloader.parked_bytes == 0
            await harness.clean()

    trio.run(serve, clock=trio.testing.MockClock(autojump_threshold=0))
