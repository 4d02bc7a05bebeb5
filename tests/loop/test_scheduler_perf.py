"""The scheduler's perf records: each tick and each request has one, and idle time is not a gap."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine
from tests.support.perf_runs import HEADER
from tests.support.serving import settings, token_to_bytes
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.embedding import PendingEmbeddings
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.principal import ANONYMOUS, Principal
from uma_trio.protocol.requests import Embed, Generate
from uma_trio.telemetry.metrics import Telemetry
from uma_trio.telemetry.perf_causes import explain
from uma_trio.telemetry.perf_records import RequestRecord, Run, TickRecord


@attrs.define
class Records:
    """A sink that keeps all records."""

    ticks: list[TickRecord] = attrs.field(factory=list)
    requests: list[RequestRecord] = attrs.field(factory=list)

    def write(self, record: TickRecord | RequestRecord) -> None:
        if isinstance(record, TickRecord):
            self.ticks.append(record)
        else:
            self.requests.append(record)


class NullClient:
    """A client that discards all events."""

    has_room = True

    def send(self, *events: Any) -> None:
        pass


@contextlib.asynccontextmanager
async def recorded(engine: FakeEngine | None = None, **values: Any) -> AsyncIterator[tuple[Scheduler, Records]]:
    engine, records = engine or FakeEngine(), Records()
    scheduler = Scheduler(VirtualEngine(engine), token_to_bytes, settings(**values))
    scheduler.sinks.append(records)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        yield scheduler, records
        nursery.cancel_scope.cancel()


def ask(
    scheduler: Scheduler, name: str, n_prompt: int, n_tokens: int, *, principal: str = "uid:0", **fields: Any
) -> Answer:
    tokens = np.arange(n_prompt, dtype=np.int32) + 100 * len(name)
    request = Generate(id=name, prompt="", max_tokens=n_tokens, **fields)
    [answer] = scheduler.submit(PreparedRequest(request, Prompt(tokens, ""), NullClient(), Principal(principal)))
    return answer


async def test_ticks_and_requests_add_up(autojump_clock):
    async with recorded(speculation=False) as (scheduler, records):
        answers = [ask(scheduler, "r" * n, 40 * n, 5 * n, principal=f"uid:{n}") for n in (1, 2, 3)]
        for answer in answers:
            await answer.done.wait()
        await scheduler.wait_idle()
    assert len(records.ticks) == scheduler.telemetry.totals["decode_calls"]
    assert sum(tick.tokens for tick in records.ticks) == 30
    assert sum(tick.prompt_tokens for tick in records.ticks) == 240
    assert sum(tick.n_decodes for tick in records.ticks) == 30 - 3
    assert all(tick.decode_ms > 0 and tick.predicted_ms is not None for tick in records.ticks)
    assert sorted(records.ticks, key=lambda tick: tick.start_s) == records.ticks
    for n, found in enumerate(sorted(records.requests, key=lambda request: request.id), 1):
        assert (found.id, found.principal, found.priority, found.finish_reason) == (
            "r" * n,
            f"uid:{n}",
            "normal",
            "length",
        )
        assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (40 * n, 0, 5 * n)
        assert len(found.inter_token_ms) == 5 * n - 1
        assert found.admitted_s is not None
        assert found.first_token_s is not None
        assert found.arrived_s <= found.admitted_s < found.first_token_s <= found.finished_s
        assert abs(found.first_token_s + sum(found.inter_token_ms) / 1e3 - found.finished_s) < 0.01


@pytest.mark.parametrize("speculation", [False, True])
async def test_the_metrics_are_the_sum_of_the_records(autojump_clock, speculation):
    """Nothing is counted that no record has, and nothing twice."""
    async with recorded(FakeEngine(n_seq_max=3, eog_after=60), parallel=3, speculation=speculation) as (
        scheduler,
        records,
    ):
        for n in range(1, 8):
            ask(scheduler, "r" * n, 90 * n, 9 * n, principal=f"uid:{n % 2}")
        scheduler.embed(PendingEmbeddings(Embed(id="e", input=["text"]), [np.arange(40)], NullClient(), ANONYMOUS))
        scheduler.cancel(ask(scheduler, "cancelled", 20, 100))
        await trio.sleep(0.05)
        await scheduler.wait_idle()
    counted = Telemetry(bytes_per_s=scheduler.info.memory_bytes_per_s)
    for tick in records.ticks:
        counted.count_tick(tick)
    for request in records.requests:
        counted.count_request(request)
    found, expected = scheduler.telemetry.snapshot(), counted.snapshot()
    elsewhere = {
        *("prefix_cache_hits_total", "cached_tokens_total", "preemptions_total", "interrupted_steps_total"),
        *(name for name in found if name.startswith(("inter_token_", "ttft_", "cancel_to_free_"))),
    }
    at_once = {"inter_token_ms", "ttft_ms", "request_queue_ms", "request_prefill_ms"}
    for each in (found, expected):
        each["histograms"] = {name: value for name, value in each["histograms"].items() if name not in at_once}
    assert {name: found[name] for name in found.keys() - elsewhere} == {
        name: expected[name] for name in expected.keys() - elsewhere
    }
    assert found["mixed_ticks_total"] > 0
    assert found["run_ahead_steps_total"] > 0
    principals = scheduler.telemetry.principals
    for name in ("uid:0", "uid:1"):
        tokens = sum(request.completion_tokens for request in records.requests if request.principal == name)
        assert principals.of(name).tokens_total == tokens


async def test_a_tick_starts_when_its_step_begins(autojump_clock):
    async with recorded(speculation=False) as (scheduler, records):
        await trio.sleep(1)
        asked = trio.current_time()
        await ask(scheduler, "a", 700, 20).done.wait()
        await scheduler.wait_idle()
    assert [tick.prompt_tokens > 0 for tick in records.ticks] == [True, True] + [False] * 19
    assert records.ticks[0].start_s == pytest.approx(asked)
    for before, after in pairwise(records.ticks):
        assert after.start_s == pytest.approx(before.start_s + before.duration_ms / 1e3), "the engine is never idle"


async def test_each_request_has_one_record_however_it_ends(autojump_clock):
    async with recorded(FakeEngine(n_seq_max=1, eog_after=60), parallel=1) as (scheduler, records):
        stopped = ask(scheduler, "a", 50, 100)
        waiting = ask(scheduler, "b", 50, 100)
        scheduler.cancel(waiting)
        await stopped.done.wait()
        running = ask(scheduler, "c", 20, 100)
        await trio.sleep(0.1)
        scheduler.cancel(running)
        await scheduler.wait_idle()
    found = {request.id: request for request in records.requests}
    assert len(records.requests) == len(found) == 3
    assert {name: request.finish_reason for name, request in found.items()} == {
        "a": "stop",
        "b": "cancelled",
        "c": "cancelled",
    }
    assert (found["b"].admitted_s, found["b"].first_token_s, found["b"].completion_tokens) == (None, None, 0)
    assert found["c"].completion_tokens > 0


async def test_idle_time_is_not_a_gap(autojump_clock):
    async with recorded() as (scheduler, records):
        for name in ("a", "b", "c"):
            await ask(scheduler, name, 10, 5).done.wait()
            await scheduler.wait_idle()
            await trio.sleep(60)
    without = [n for n, tick in enumerate(records.ticks) if tick.host_gap_ms is None]
    begins = [n for n, tick in enumerate(records.ticks) if tick.prefill_chunks]
    assert without == begins
    assert len(begins) == 3


async def test_time_while_the_client_does_not_read_is_not_a_gap(autojump_clock):
    async with recorded(speculation=False) as (scheduler, records):
        sink = NullClient()
        tokens = np.arange(10, dtype=np.int32)
        request = Generate(id="a", prompt="", max_tokens=20)
        [answer] = scheduler.submit(PreparedRequest(request, Prompt(tokens, ""), sink, ANONYMOUS))
        await trio.sleep(0.04)
        sink.has_room = False
        await trio.sleep(60)
        n_before = len(records.ticks)
        sink.has_room = True
        scheduler.wake()
        await answer.done.wait()
    assert 0 < n_before < 20
    assert [n for n, tick in enumerate(records.ticks) if tick.host_gap_ms is None] == [0, n_before]


async def test_idle_time_is_recorded_by_the_next_tick(autojump_clock):
    async with recorded() as (scheduler, records):
        for _ in range(2):
            await trio.sleep(60)
            await ask(scheduler, "a", 10, 5).done.wait()
            await scheduler.wait_idle()
    began = [tick for tick in records.ticks if tick.prefill_chunks]
    assert [tick.idle_ms for tick in began] == [pytest.approx(60_000, rel=0.01)] * 2
    assert all(tick.idle_ms is None for tick in records.ticks if tick not in began)


async def test_time_without_a_reader_is_not_idle(autojump_clock):
    async with recorded(speculation=False) as (scheduler, records):
        sink = NullClient()
        request = Generate(id="a", prompt="", max_tokens=20)
        tokens = Prompt(np.arange(10, dtype=np.int32), "")
        [answer] = scheduler.submit(PreparedRequest(request, tokens, sink, ANONYMOUS))
        await trio.sleep(0.04)
        sink.has_room = False
        await trio.sleep(60)
        sink.has_room = True
        scheduler.wake()
        await answer.done.wait()
    assert sum(tick.idle_ms or 0 for tick in records.ticks[1:]) == 0
    causes = {each["cause"]: each["seconds"] for each in explain(Run(header=HEADER, ticks=records.ticks))["causes"]}
    assert causes["waiting"] == pytest.approx(60, rel=0.01)
    assert causes["idle"] == causes["not_recorded"] == 0


async def test_a_tick_that_only_embeds_is_no_gap(autojump_clock):
    async with recorded() as (scheduler, records):
        pending = PendingEmbeddings(Embed(id="e", input=["text"]), [np.arange(40)], NullClient(), ANONYMOUS)
        scheduler.embed(pending)
        await pending.done.wait()
        await ask(scheduler, "a", 10, 5).done.wait()
        await scheduler.wait_idle()
    embedded = [tick for tick in records.ticks if tick.embedding_ms]
    assert embedded
    assert all((tick.decode_calls, tick.n_decodes, tick.prompt_tokens) == (0, 0, 0) for tick in embedded)
    assert all((tick.host_gap_ms or 0) < 1 for tick in records.ticks)


async def test_what_a_crash_loses_is_computed_again(autojump_clock):
    engine = VirtualEngine(FakeEngine())
    records = Records()
    scheduler = Scheduler(engine, token_to_bytes, settings(speculation=False))
    scheduler.sinks.append(records)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        answer = ask(scheduler, "a", 300, 20)
        await trio.sleep(0.08)
        assert 0 < len(answer.tokens) < 20
        computed = answer.n_computed
        engine.link.kill()
        await answer.done.wait()
        nursery.cancel_scope.cancel()
    recomputed = sum(tick.recomputed_tokens for tick in records.ticks)
    assert computed <= recomputed <= computed + 2
    assert sum(tick.prompt_tokens for tick in records.ticks) == 300 + recomputed + 1
