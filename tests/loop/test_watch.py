"""The watch: what it sends, that it costs nothing while nobody watches, and that a slow watcher slows nobody down."""

from __future__ import annotations

import contextlib

import pytest
import trio

from tests.support.fake_engine import FakeEngine
from tests.support.profile import amount
from tests.support.serving import serving
from uma_trio.client import ServerError
from uma_trio.daemon.doors import connection
from uma_trio.telemetry.perf_records import MAX_RECENT, RecentRecords, TickRecord

N_TOKENS = amount(quick=3000, thorough=20_000)


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_every_tick_and_every_request_is_sent_once(autojump_clock, encoding):
    async with serving() as harness, harness.client(encoding=encoding) as watcher, harness.client() as client:
        records, seen = [], []
        async with contextlib.aclosing(watcher.watch(id="w")) as events:
            await anext(events)
            await client.send({"id": "r", "prompt": "hello", "max_tokens": 100, "session_id": "s"})
            async for event in events:
                assert event.id == "w"
                records += event.records
                seen.append(event)
                if any(record["kind"] == "request" for record in event.records):
                    break
        ticks = [record for record in records if record["kind"] == "tick"]
        assert sum(tick["tokens"] for tick in ticks) == 100
        assert sum(n for tick in ticks for _, n in tick.get("prefill_chunks", [])) == 5
        assert len(ticks) == seen[-1].metrics["ticks_total"]
        assert [tick["start_s"] for tick in ticks] == sorted(tick["start_s"] for tick in ticks)
        [request] = [record for record in records if record["kind"] == "request"]
        assert (request["id"], request["completion_tokens"], request["finish_reason"]) == ("r", 100, "length")
        assert "inter_token_ms" not in request
        running = next(event for event in seen if any(each.state == "decode" for each in event.sequences))
        [sequence] = running.sequences
        assert (sequence.request_id, sequence.session_id, sequence.prompt_tokens) == ("r", "s", 5)
        assert 0 < sequence.cells_used < sequence.cells_reserved == 104
        [cached] = seen[-1].sequences
        assert (cached.state, cached.request_id) == ("cached", None)
        assert [session.session_id for session in seen[-1].sessions] == ["s"]
        assert {check.name for check in seen[-1].checks} >= {"engine", "queue"}
        assert seen[-1].metrics["tokens_total"] == 100
        assert [event.dropped_records for event in seen] == [0] * len(seen)


async def test_events_come_at_the_interval(autojump_clock):
    async with serving() as harness, harness.client() as client:
        async with contextlib.aclosing(client.watch(interval_ms=2000)) as events:
            times = [(await anext(events)).at_s for _ in range(4)]
        assert times == [0, 2, 4, 6]


async def test_nobody_watches_after_the_client_has_left(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client, contextlib.aclosing(client.watch()) as events:
            await anext(events)
            assert len(harness.scheduler.sinks) == 1
        await harness.settled()
        assert harness.scheduler.sinks == []


async def test_a_cancel_ends_it_and_the_connection_serves_on(autojump_clock):
    async with serving() as harness, harness.client() as client:
        async with contextlib.aclosing(client.watch(id="w", keep_alive=True)) as events:
            await anext(events)
        await client.cancel("w")
        assert (await client.complete(prompt="hello", max_tokens=3)).usage.completion_tokens == 3
        assert harness.scheduler.sinks == []


async def test_a_request_on_the_connection_of_a_watch_is_refused(autojump_clock):
    async with serving() as harness, harness.client() as client, contextlib.aclosing(client.watch()) as events:
        await anext(events)
        await client.send({"id": "r", "prompt": "hello"})
        with pytest.raises(ServerError, match="another request"):
            while True:
                await anext(events)


async def test_a_drain_ends_it(autojump_clock):
    async with serving() as harness, harness.client() as client:
        events = client.watch(interval_ms=60_000)
        await anext(events)
        harness.server.drain()
        assert [event async for event in events] == []


async def test_only_the_user_who_runs_the_daemon_may_watch(autojump_clock, monkeypatch):
    monkeypatch.setattr(connection, "OWN_PRINCIPAL", "uid:somebody else")
    async with serving() as harness, harness.client() as client:
        with pytest.raises(ServerError, match="only the user who runs the daemon"):
            await anext(client.watch())
        assert harness.scheduler.sinks == []


async def test_an_unknown_model(autojump_clock):
    async with serving() as harness, harness.client() as client:
        with pytest.raises(ServerError, match="no model 'x'"):
            await anext(client.watch(model="x"))


async def test_a_watcher_that_does_not_read_misses_records_and_slows_nobody(autojump_clock):
    engine = FakeEngine(n_ctx=100_000, n_seq_max=8)
    async with (
        serving(engine, write_timeout_s=100_000) as harness,
        harness.client() as slow,
        harness.client() as client,
    ):
        await slow.send({"type": "watch", "interval_ms": 50, "id": "w"})
        await slow.receive()
        eos = await client.complete(prompt="hello", max_tokens=N_TOKENS, ignore_eos=True, speculate=False)
        assert eos.usage.completion_tokens == N_TOKENS
        waiting = harness.server.snapshot()["send_queue_bytes"]
        assert 0 < waiting < 2_000_000, "one event waits, and no more"
        records, dropped = [], 0
        with trio.fail_after(1000):
            while not any(record["kind"] == "request" for record in records):
                event = await slow.receive()
                records += event.records
                dropped += event.dropped_records
        assert dropped > 0
        assert len(records) + dropped == harness.server.snapshot()["ticks_total"] + 1, "each record is sent or counted"


def test_the_ring_keeps_the_latest_records_and_counts_the_others():
    ring = RecentRecords(origin_s=100.0)
    first = TickRecord(start_s=101.0, tokens=0)
    ring.write(first)
    for n in range(MAX_RECENT):
        ring.write(TickRecord(start_s=102.0 + n, tokens=n))
    records, dropped = ring.take()
    assert dropped == 1
    assert len(records) == MAX_RECENT
    assert records[0]["start_s"] == 2.0
    assert first.start_s == 101.0, "a record belongs to other sinks too"
    assert ring.take() == ([], 0)


async def test_a_prompt_that_moves_is_recorded_where_it_is_computed(autojump_clock):
    """A request gets the lowest free sequence id, and moves next to others when its prefill begins."""
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(serving(FakeEngine(n_seq_max=8, n_ctx=16_000, unified=False)))
        clients = [await stack.enter_async_context(harness.client()) for _ in range(7)]
        for i, client in enumerate(clients):
            await client.send({"id": f"r{i}", "prompt": f"{i}", "max_tokens": 1900, "cache_prompt": False})
            await client.receive()
        for i in (0, 1, 2, 4):
            await clients[i].cancel(f"r{i}")
        await trio.sleep(1)
        watcher = await stack.enter_async_context(harness.client())
        client = await stack.enter_async_context(harness.client())
        events = await stack.enter_async_context(contextlib.aclosing(watcher.watch()))
        await anext(events)
        await client.complete(prompt="hello", max_tokens=5, cache_prompt=False)
        records = (await anext(events)).records
        prefilled = {seq_id for record in records for seq_id, _ in record.get("prefill_chunks", ())}
        decoded = {seq_id for record in records for seq_id in record.get("decode_seq_ids", ())}
        assert decoded == {3, 4, 5, 6}
        assert prefilled == {4}
