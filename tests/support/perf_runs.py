"""Runs for tests of the perf log: a small simulation of a device, its queue and its ticks, from a seed."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import attrs

from uma_trio.telemetry.perf_records import Header, RequestRecord, Run, TickRecord, Trailer, encode

HEADER = Header(
    uma_trio="0.1.0",
    llama_cpp="llama-cpp-python==0.3.36",
    started="2026-11-21T05:00:00.000+00:00",
    clock_s=0.0,
    model="some-model.gguf",
    description="llama 1B Q8_0",
    size_bytes=1_300_000_000,
    n_ctx=65536,
    n_seq_max=8,
    n_batch=512,
    scheduling={"target_itl_ms": 100.0, "prefill_burst_tokens": 64},
)


@attrs.define
class _Request:
    id: str
    arrived_s: float
    prompt_tokens: int
    cached_tokens: int
    n_tokens: int
    seq_id: int = -1
    n_prefilled: int = 0
    admitted_s: float | None = None
    token_s: list[float] = attrs.field(factory=list)


def simulated(
    seed: int = 1, *, requests: int = 60, per_s: float = 1.5, base_ms: float = 18.0, prompt_ms: float = 0.35
) -> Run:
    """Simulate one device that serves ``requests`` requests, ``per_s`` of which arrive in a second."""
    rng = random.Random(seed)
    run = Run(header=HEADER)
    arriving, clock_s = [], 0.5
    for n in range(requests):
        clock_s += rng.expovariate(per_s) if rng.random() < 0.7 else 0.0
        prompt = min(int(rng.lognormvariate(4.5, 1.2)) + 5, 3000)
        cached = prompt // 64 * 64 if rng.random() < 0.3 and prompt > 64 else 0
        arriving.append(_Request(f"r{n}", clock_s, prompt, cached, rng.randint(20, 160)))
    queue: deque[_Request] = deque(arriving)
    running: list[_Request] = []
    free = list(range(HEADER.n_seq_max))
    now_s, ended_s, idle_s = 0.0, None, 0.0
    while queue or running:
        while queue and queue[0].arrived_s <= now_s and free:
            request = queue.popleft()
            request.seq_id, request.admitted_s, request.n_prefilled = free.pop(0), now_s, request.cached_tokens
            running.append(request)
        if not running:
            now_s, ended_s, idle_s = queue[0].arrived_s, None, queue[0].arrived_s - now_s
            continue
        streams = [request for request in running if request.token_s]
        budget = int((100 - base_ms) / prompt_ms) if streams else 500
        chunks = []
        for request in running:
            if not request.token_s and budget > 0:
                n = min(budget, max(1, request.prompt_tokens - request.n_prefilled))
                chunks.append((request, n))
                budget -= n
        gap_ms = rng.gammavariate(4, 0.05)
        context = sum(request.prompt_tokens + len(request.token_s) for request in streams)
        n_prompt = sum(n for _, n in chunks)
        true_ms = base_ms + 0.6 * len(streams) + 0.0008 * context + prompt_ms * n_prompt
        decode_ms = true_ms * rng.lognormvariate(0, 0.03) + (rng.expovariate(1 / 80) if rng.random() < 0.01 else 0)
        drafted = rng.randint(1, 4) * len(streams) if streams and not chunks and rng.random() < 0.2 else 0
        accepted = sum(rng.random() < 0.6 for _ in range(drafted))
        began_s, sample_ms = now_s + (gap_ms / 1e3 if ended_s is not None else 0.0), rng.gammavariate(9, 0.03)
        now_s = began_s + (decode_ms + sample_ms) / 1e3
        ends = [request for request, n in chunks if request.n_prefilled + n >= request.prompt_tokens]
        run.ticks.append(
            TickRecord(
                start_s=began_s,
                decode_seq_ids=tuple(request.seq_id for request in streams),
                prefill_chunks=tuple((request.seq_id, n) for request, n in chunks),
                tokens=len(streams) + len(ends) + accepted,
                context_tokens=context,
                prefill_context=sum(request.n_prefilled * n for request, n in chunks) / max(1, n_prompt),
                draft_tokens=drafted,
                accepted_draft_tokens=accepted,
                predicted_ms=true_ms * rng.lognormvariate(0.02, 0.04 if chunks else 0.02),
                decode_ms=decode_ms,
                sample_ms=sample_ms,
                host_gap_ms=gap_ms if ended_s is not None else None,
                idle_ms=1e3 * idle_s if ended_s is None else None,
                running=len(running),
                queue_depth=sum(request.arrived_s <= began_s for request in queue),
                bytes_moved=1_300_000_000,
                memory_bandwidth_share=min(1.0, 15.0 / decode_ms),
            )
        )
        ended_s = now_s
        for request, n in chunks:
            request.n_prefilled += n
        for request in (*streams, *ends):
            request.token_s.append(now_s)
        for request in [request for request in running if len(request.token_s) >= request.n_tokens]:
            running.remove(request)
            free.append(request.seq_id)
            run.requests.append(_record(request, now_s, rng))
    run.trailer = Trailer()
    return run


def _record(request: _Request, ended_s: float, rng: random.Random) -> RequestRecord:
    times = request.token_s
    return RequestRecord(
        id=request.id,
        principal=f"uid:{1000 + len(request.id) % 2}",
        priority="normal",
        arrived_s=request.arrived_s,
        admitted_s=request.admitted_s,
        first_token_s=times[0],
        finished_s=ended_s,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=len(times),
        finish_reason=rng.choice(["stop", "stop", "length", "cancelled"]),
        inter_token_ms=[1e3 * (b - a) for a, b in pairwise(times)],
    )


def encode_run(run: Run) -> bytes:
    """The bytes that the daemon would have written for ``run``, whose clock begins at 0."""
    records = sorted(
        [*run.ticks, *run.requests],
        key=lambda record: record.start_s if isinstance(record, TickRecord) else record.finished_s,
    )
    lines = [encode(run.header), *map(encode, records)]
    return b"".join(lines if run.trailer is None else [*lines, encode(run.trailer)])
