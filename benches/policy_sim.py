"""Runs the scheduler with thousands of streams on simulated devices.

    python benches/policy_sim.py
    python benches/policy_sim.py --device gpu --requests 2000 --load 0.7 --target-itl-ms 50
    python benches/policy_sim.py --device wide --load 20 --csv policy.csv
    python benches/policy_sim.py --device h100 --mixed-load --target-itl-ms 18
    python benches/policy_sim.py --device h200 --mixed-load --noise 0.01
    python benches/policy_sim.py --device h200 --agents 4 --no-rival
    python benches/policy_sim.py --device cpu --burst 32

The plans come from the daemon's own ``plan()`` with a cost model that learns online.  Only the device and the clock are
simulated: the time of a tick follows the formula of the device, with noise.  Requests arrive at random (Poisson).

For comparison, the same arrivals run under the policy of most servers: a token for each stream, then prompts in the
order of their sequence ids until the batch is full.

``--mixed-load`` has 8 streams of 400 tokens and six prompts of 4,040 tokens instead, one every 0.3 s.  ``--burst`` has
short prompts that all arrive at once, on a device with a sequence for each.

``--agents`` has clients that come back with what they asked before, the answer and more, next to streams and prompts
that come once.

On a device whose attention scans all cells, the daemon's own ``KvCache`` says which cells these are, which prompts wait
for cells and which tokens they find there.  ``--idle-limit off`` lets idle sequences keep a quarter of the cells, as on
other devices.

The exit code is 1 if anything starved under the daemon's policy: a stream was left out of a tick, an admitted prompt did
not advance within the bound in docs/design/scheduler.md (one of class ``background`` within as many turns), or a request
never finished.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import click
import numpy as np
from machine import machine
from report import cell, quantiles, table

from uma_trio.config import Scheduling
from uma_trio.daemon.engines.calibrate import CURVE_ROUNDS, CURVE_ROWS, MAX_CURVE_DECODES, PROMPT_CURVE_ROWS
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.fairness import MAX_SKIPPED_TICKS, ROTATION_PERIOD
from uma_trio.daemon.policy.plan import MAX_BACKGROUND_STRETCH, Plan, PrefillChunk, plan
from uma_trio.daemon.policy.row_curve import PrefillCurves, RowCurve
from uma_trio.daemon.policy.tick import PolicyState, Tick
from uma_trio.daemon.policy.view import Priority, SequenceView
from uma_trio.demo.recording import percentile
from uma_trio.engine_link.attention import Attention, AttentionScan
from uma_trio.engine_link.tokens import TokenIds

HOST_MS = 0.3
"""Time between two ticks that the daemon spends on the CPU."""

PRINCIPALS = 8

N_CELLS = 114_688
"""Cells of the cache, on devices whose attention scans all of them."""

TARGET_TTFT_S = Scheduling().target_ttft_ms / 1e3


@attrs.frozen
class Device:
    """Milliseconds of a tick by its work.  The coefficients are fitted to measurements on real devices."""

    name: str
    a: float
    b: float
    c: float
    d: float
    e: float
    step: float
    """Added if the tick has prefill, which runs other kernels."""
    parallel: int
    n_batch: int
    stairs: tuple[tuple[int, float], ...] = ()
    """Rows and milliseconds of ticks with prefill, where they are no line.  Between them the time rises with each tile."""
    scan_ms: tuple[float, ...] = ()
    """For 1,000 cells of the cache, by ``SCAN_ROWS`` rows of a tick with prefill, if attention scans all of them."""

    @property
    def scan(self) -> AttentionScan:
        return AttentionScan.CACHE if self.scan_ms else AttentionScan.SEQUENCE

    def ms(self, work: Work) -> float:
        if self.scan_ms and work.prefill_tokens:
            rows = work.prefill_tokens + work.decode_rows
            tiles = min(len(self.scan_ms), -(-rows // SCAN_ROWS))
            return self.stair_ms(rows) + self.scan_ms[tiles - 1] * work.mean_prefill_context / 1000
        if self.stairs and work.prefill_tokens:
            context = self.d * work.context_tokens + self.e * work.prefill_tokens * work.mean_prefill_context
            return self.stair_ms(work.prefill_tokens + work.decode_rows) + context
        linear = self.a + self.b * work.prefill_tokens + self.c * work.decode_rows + self.d * work.context_tokens
        attention = work.prefill_tokens * (work.mean_prefill_context + work.prefill_tokens / 2)
        return linear + self.e * attention + (self.step if work.prefill_tokens else 0.0)

    def stair_ms(self, rows: int) -> float:
        """Milliseconds of a call with prefill.  ``TILE_ROWS`` rows or fewer are one row of tiles, of multiples of 8."""
        tile = 8 * -(-rows // TILE_ROWS)
        rows = -(-rows // tile) * tile
        n = next((n for n, (top, _) in enumerate(self.stairs) if rows <= top), len(self.stairs) - 1)
        (low, low_ms), (top, top_ms) = self.stairs[max(0, n - 1)], self.stairs[max(1, n)]
        return low_ms + (rows - low) * (top_ms - low_ms) / (top - low)

    def request_ms(self, prompt: float, tokens: float) -> float:
        """Approximate share of a request in full ticks, in ms.  Its inverse is the capacity in requests per ms."""
        full = self.ms(Work(0, self.parallel, int(self.parallel * (prompt + tokens / 2)))) + HOST_MS
        chunks = prompt / self.n_batch
        return tokens * full / self.parallel + self.b * prompt + self.e * prompt * prompt / 2 + chunks * self.step


TILE_ROWS = 128

H100_STAIRS = (
    (0, 6.7), (8, 7.5), (24, 9.5), (40, 11.0), (72, 14.0), (104, 16.7), (128, 18.8), (129, 22.6), (200, 26.0),
    (256, 28.6), (257, 32.2), (384, 40.6), (385, 42.4), (512, 48.4),
)  # fmt: skip
"""Rows and milliseconds of ticks with 8 decodes and one chunk, unified KV; the steps at multiples of ``TILE_ROWS`` are
what the measured times (docs/benchmarks/speed.md) leave room for."""

H200_STAIRS = (
    (0, 6.7), (8, 8.7), (16, 9.72), (32, 10.93), (48, 11.93), (64, 13.22), (80, 14.76), (96, 16.25), (112, 17.46),
    (128, 19.10), (160, 22.51), (192, 24.86), (224, 27.00), (256, 29.36), (320, 35.85), (384, 39.58), (512, 46.91),
)  # fmt: skip
"""The same on an H200, as a start measured it."""

SCAN_ROWS = 64

H200_SCAN_MS = (0.10, 0.18, 0.30, 0.45, 0.72, 0.87, 1.0, 1.15)
"""What ticks of up to 320 rows took longer there with 5,000 to 25,000 cells in use.  More rows are an estimate."""

TILES = tuple((64 * n + row, 11.0 + 5 * n) for n in range(8) for row in (1, 64))

DEVICES = {
    "cpu": Device("cpu", 1.0, 1.05, 4.5, 0.0015, 0.00015, 0.0, 16, 2048),
    "gpu": Device("gpu", 4.6, 0.087, 0.17, 0.00004, 0.0000021, 9.0, 256, 2048),
    "wide": Device("wide", 5.0, 0.004, 0.005, 0.000001, 0.0000001, 2.0, 10_000, 16_384),
    "h100": Device("h100", 5.9, 0.084, 0.195, 0.00001, 0.000003, 0.0, 256, 512, H100_STAIRS),
    "h200": Device("h200", 5.55, 0.084, 0.195, 0.000007, 0.0, 0.0, 256, 512, H200_STAIRS, H200_SCAN_MS),
    "tiles": Device("tiles", 5.9, 0.084, 0.195, 0.00001, 0.000003, 0.0, 256, 512, TILES),
}
"""cpu: one thread, 125M parameters at 8 bits.  gpu: an H200, 7B at 8 bits, with llama.cpp's limit of 256 sequences.
wide: a device that does not exist, with ten thousand sequences at once.  h100: the same model there, with the steps in
the cost of a call that were measured.  h200: the same, and attention scans all cells in use.  tiles: a device that does not exist, with tiles of 64 rows and nothing between."""

REQUESTS = {"cpu": 400, "gpu": 10_000, "wide": 10_000, "h100": 3_000, "h200": 3_000, "tiles": 3_000}

SIZES = {
    Priority.INTERACTIVE: (0.5, 80, 120),
    Priority.NORMAL: (0.4, 600, 150),
    Priority.BACKGROUND: (0.1, 3000, 100),
}
"""Share of all requests, mean prompt tokens, mean generated tokens."""


@attrs.define(eq=False)
class Request:
    """One request, and its course."""

    n_pending: int
    """Prompt tokens that are left; 1 while decoding."""
    n_to_generate: int
    arrived_s: float
    target_s: float
    """Target for the time between tokens."""
    priority: Priority
    principal: str
    seq_id: int = -1
    n_context: int = 0
    due_s: float = math.inf
    advanced_tick: int = 0
    last_token_s: float = math.nan
    ttft_ms: float = math.nan
    is_done: bool = False
    tokens: TokenIds = attrs.field(factory=lambda: np.zeros(0, dtype=np.int32))
    """Prompt and answer, on devices whose attention scans all cells."""
    thinking_s: float = 0.0
    then: Request | None = None
    """Continues it, ``thinking_s`` after its end."""
    n_cached: int = 0
    allocation: Allocation | None = None

    def view(self) -> SequenceView:
        return SequenceView(self.seq_id, self.n_pending, self.n_context, self.due_s, self.priority, self.principal)


def arrivals(device: Device, n: int, load: float, settings: Scheduling, seed: int) -> list[Request]:
    """``n`` requests at ``load`` times the rate that the device can serve."""
    rng = random.Random(seed)
    mean_ms = sum(share * device.request_ms(prompt, tokens) for share, prompt, tokens in SIZES.values())
    classes, shares = list(SIZES), [share for share, _, _ in SIZES.values()]
    activity = [1 / (rank + 1) for rank in range(PRINCIPALS)]
    now, requests = 0.0, []
    for _ in range(n):
        now += rng.expovariate(load / mean_ms) / 1e3
        [priority] = rng.choices(classes, shares)
        [principal] = rng.choices(range(PRINCIPALS), activity)
        _, prompt, tokens = SIZES[priority]
        target_ms = settings.background_itl_ms if priority is Priority.BACKGROUND else settings.target_itl_ms
        n_prompt, n_tokens = _random_size(rng, prompt), _random_size(rng, tokens)
        requests.append(Request(n_prompt, n_tokens, now, target_ms / 1e3, priority, str(principal)))
    return requests


def mixed_load(settings: Scheduling) -> list[Request]:
    """Streams, and long prompts after a while."""
    target_s = settings.target_itl_ms / 1e3
    streams = [Request(20, 400, 0.0, target_s, Priority.INTERACTIVE, "0") for _ in range(8)]
    prompts = [Request(4040, 64, 0.5 + 0.3 * n, target_s, Priority.NORMAL, "0") for n in range(6)]
    return [*streams, *prompts]


def burst(n: int, settings: Scheduling, seed: int) -> list[Request]:
    """``n`` requests of 50 to 200 prompt tokens that arrive at once, each for 100 tokens."""
    rng, target_s = random.Random(seed), settings.target_itl_ms / 1e3
    return [Request(rng.randint(50, 200), 100, 0.0, target_s, Priority.NORMAL, "0") for _ in range(n)]


AGENT_TURNS, AGENT_PROMPT, AGENT_STEP, AGENT_ANSWER, AGENT_THINKING_S = 8, 6000, 500, 100, 1.0
"""Requests of an agent; tokens of its first prompt, what it adds to the answer in each turn, and of each answer."""

TOKENS_OF_REQUEST = 100_000


def agents(settings: Scheduling, n: int) -> list[Request]:
    """``n`` agents, next to four streams and prompts that come once, one every 0.8 s."""
    target_s = settings.target_itl_ms / 1e3
    requests = [Request(20, 1200, 0.0, target_s, Priority.INTERACTIVE, "0") for _ in range(4)]
    requests += [Request(4040, 64, 0.5 + 0.8 * n, target_s, Priority.NORMAL, "1") for n in range(20)]
    for number in range(n):
        turns = [
            Request(
                AGENT_PROMPT + turn * (AGENT_STEP + AGENT_ANSWER),
                AGENT_ANSWER,
                math.inf,
                target_s,
                Priority.NORMAL,
                "2",
            )
            for turn in range(AGENT_TURNS)
        ]
        known = np.arange(turns[-1].n_pending + AGENT_ANSWER, dtype=np.int32) + TOKENS_OF_REQUEST * (number + 1)
        for turn, request in enumerate(turns):
            request.tokens = known[: request.n_pending + AGENT_ANSWER]
            request.thinking_s, request.then = AGENT_THINKING_S, turns[turn + 1] if turn + 1 < AGENT_TURNS else None
        turns[0].arrived_s = 0.4 * number
        requests.append(turns[0])
    return sorted(requests, key=lambda request: request.arrived_s)


class Cells:
    """The cells of a cache that attention scans as a whole."""

    def __init__(self, device: Device, *, idle_limit: bool) -> None:
        self.cache = KvCache(
            KvMemory(n_sequences=device.parallel, n_cells=N_CELLS, cells_per_sequence=N_CELLS),
            idle_limit=IdleLimit(N_CELLS) if idle_limit else None,
        )
        self._next_token = 100 * TOKENS_OF_REQUEST

    def admit(self, request: Request) -> bool:
        """Reserve the cells of ``request``, and find what is computed already; returns whether there was room."""
        n_prompt = request.n_pending
        if not len(request.tokens):
            n = n_prompt + request.n_to_generate
            request.tokens = np.arange(self._next_token, self._next_token + n, dtype=np.int32)
            self._next_token += n
        placement = self.cache.allocate(Allocation(request.tokens[:n_prompt], len(request.tokens)))
        if placement is None:
            return False
        assert not placement.waits, "requests that run together share nothing"
        request.allocation = placement.allocation
        request.n_cached = request.n_context = placement.n_cached
        request.n_pending -= placement.n_cached
        return True

    def advance(self, request: Request) -> None:
        assert request.allocation is not None
        self.cache.advance(request.allocation, request.n_context)

    def finish(self, request: Request) -> None:
        assert request.allocation is not None
        self.cache.release(request.allocation, request.tokens[: request.n_context])

    def scanned(self) -> int:
        """Cells that the next tick scans."""
        scanned = self.cache.cells_scanned()
        self.cache.take_ops()
        return scanned


def curves(device: Device, noise: float) -> PrefillCurves | None:
    """What the daemon measures when it loads the model, with unified KV; ``None`` for devices without stairs."""
    if not device.stairs:
        return None
    rng = random.Random(2)

    def measured(n_decodes: int, row_counts: Sequence[int]) -> RowCurve | None:
        times = {
            rows: [
                device.ms(Work(rows - n_decodes, n_decodes, 0)) * max(0.2, 1 + rng.gauss(0, noise))
                for _ in range(CURVE_ROUNDS)
            ]
            for rows in row_counts
            if n_decodes < rows <= device.n_batch
        }
        return RowCurve.measured(times)

    mixed, prompt = measured(MAX_CURVE_DECODES, CURVE_ROWS), measured(0, PROMPT_CURVE_ROWS)
    return None if mixed is None or prompt is None else PrefillCurves(prompt, mixed, MAX_CURVE_DECODES)


def _random_size(rng: random.Random, mean: float) -> int:
    return max(2, round(mean * rng.lognormvariate(-0.32, 0.8)))


class UmaTrio:
    """The daemon's policy."""

    name = "uma-trio"
    runs_ahead = True
    """A request that arrives while a step computes is in the step after the next one."""

    def __init__(self, device: Device, settings: Scheduling, measured: PrefillCurves | None = None) -> None:
        self._device, self._settings, self._state = device, settings, PolicyState()
        self._queues: dict[tuple[Priority, str], deque[Request]] = {}
        self._active: Counter[str] = Counter()
        self.cost = CostModel() if measured is None else CostModel().with_curves(measured)
        for work in (
            Work(64, 0, 0),
            Work(32, 3, 200, 16),
            Work(0, 1, 20),
            Work(0, 4, 200),
            Work(128, 0, 0),
            Work(0, 2, 80),
        ):
            self.cost = self.cost.observed(work, device.ms(work))

    def queue(self, request: Request) -> None:
        self._active[request.principal] += 1
        self._queues.setdefault((request.priority, request.principal), deque()).append(request)

    def next(self) -> Request | None:
        """The next request to admit: by priority, then by least-served principal, then by arrival."""
        waiting = [key for key, queue in self._queues.items() if queue]
        if not waiting:
            return None
        counter = self._state.service.counter
        key = min(waiting, key=lambda key: (key[0], counter(key[1]), self._queues[key][0].arrived_s))
        return self._queues[key].popleft()

    def plan(
        self, decodes: list[SequenceView], prefills: list[SequenceView], now_s: float, attention: Attention
    ) -> Plan:
        chosen = plan(
            Tick(
                decodes,
                prefills,
                self._state,
                now_s=now_s,
                cost=self.cost,
                max_tokens=self._device.n_batch,
                settings=self._settings,
                attention=attention,
            )
        )
        self._state = chosen.state
        return chosen

    def observe(self, work: Work, ms: float) -> None:
        self.cost = self.cost.observed(work, ms)

    def finish(self, request: Request) -> None:
        self._active[request.principal] -= 1
        if not self._active[request.principal]:
            self._state = self._state.without(request.principal)


class FillBatch:
    """A token for each stream, then prompts in the order of their sequence ids until the batch is full."""

    name = "fill the batch"
    runs_ahead = False

    def __init__(self, device: Device, settings: Scheduling) -> None:
        self._n_batch = device.n_batch
        self._queue: deque[Request] = deque()

    def queue(self, request: Request) -> None:
        self._queue.append(request)

    def next(self) -> Request | None:
        return self._queue.popleft() if self._queue else None

    def plan(
        self, decodes: list[SequenceView], prefills: list[SequenceView], now_s: float, attention: Attention
    ) -> Plan:
        left = self._n_batch - len(decodes)
        chunks, before = [], 0
        for view in sorted(prefills, key=lambda view: view.seq_id):
            n = min(left, view.n_pending)
            if n <= 0:
                break
            chunks.append(PrefillChunk(view.seq_id, n, n == view.n_pending))
            before += n * view.n_context
            left -= n
        n_prefill = sum(chunk.n_tokens for chunk in chunks)
        contexts = [view.n_context for view in decodes]
        context = attention.decode_context(len(contexts), sum(contexts), max(contexts, default=0))
        work = Work(n_prefill, len(decodes), context, attention.prefill_context(before / max(1, n_prefill)))
        return Plan(decodes, tuple(chunks), PolicyState(), work, 0.0, (len(decodes),))

    def observe(self, work: Work, ms: float) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass


@attrs.define
class Outcome:
    """Results of one simulation."""

    policy: str
    requests: list[Request]
    itl_ms: dict[Priority, list[float]] = attrs.field(factory=lambda: {priority: [] for priority in Priority})
    plan_ms: list[float] = attrs.field(factory=list)
    """Processor time of ``plan()``, since this machine can be busy with other things."""
    tick_ms: list[float] = attrs.field(factory=list)
    errors: list[float] = attrs.field(factory=list)
    """Relative errors of the predictions of ticks with prefill."""
    ticks: int = 0
    wall_s: float = 0.0
    tokens: int = 0
    prefill_tokens: int = 0
    most_streams: int = 0
    most_waiting: int = 0
    prefill_waited: int = 0
    """Most ticks until an admitted prompt advanced."""
    stream_waited: int = 0
    background_waited: int = 0
    sequences: dict[tuple[Priority, str], set[int]] = attrs.field(factory=lambda: defaultdict(set))
    """Sequence ids on which each group had prompts."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    scanned_cells: int = 0
    """Cells that attention scanned, summed over the ticks."""
    most_groups: int = 0
    """Most groups with prompts at the same time."""

    def bound(self) -> int:
        """Ticks within which an admitted prompt advances; see docs/design/scheduler.md."""
        divisions = MAX_SKIPPED_TICKS + self.most_groups if self.most_groups > 1 else 1
        return 2 * ROTATION_PERIOD * max(map(len, self.sequences.values()), default=1) * divisions

    def starved(self) -> list[str]:
        """What starved, in words; empty if nothing did."""
        complaints = []
        if not all(request.is_done for request in self.requests):
            complaints.append(f"{sum(not request.is_done for request in self.requests)} requests never finished")
        if self.prefill_waited > self.bound():
            complaints.append(f"a prompt waited for {self.prefill_waited} ticks")
        if self.stream_waited > 1:
            complaints.append(f"a stream waited for {self.stream_waited} ticks")
        turn = max(MAX_BACKGROUND_STRETCH, self.most_streams) / Scheduling().background_share
        if self.background_waited > turn * self.bound():
            complaints.append(f"a background request waited for {self.background_waited} ticks")
        return complaints


def simulate(
    device: Device,
    policy: UmaTrio | FillBatch,
    requests: list[Request],
    *,
    noise: float,
    seed: int,
    on_finished: Callable[[int], None],
    idle_limit: bool = True,
    host_ms: float = HOST_MS,
) -> Outcome:
    """Serve ``requests`` until all have finished."""
    rng = random.Random(seed)
    outcome = Outcome(policy.name, requests)
    coming = deque(requests)
    n_waiting, n_finished, now, free = 0, 0, 0.0, list(range(device.parallel - 1, -1, -1))
    began_s = 0.0
    cells = Cells(device, idle_limit=idle_limit) if device.scan is AttentionScan.CACHE else None
    blocked: Request | None = None
    running: dict[int, Request] = {}
    decoding: set[int] = set()
    while coming or n_waiting or running:
        if not running and not n_waiting:
            now = max(now, coming[0].arrived_s)
        # a step that runs ahead is planned when the step before it begins
        known_s = began_s if policy.runs_ahead and running else now
        while coming and coming[0].arrived_s <= known_s:
            policy.queue(coming.popleft())
            n_waiting += 1
        outcome.most_waiting = max(outcome.most_waiting, n_waiting)
        while free and n_waiting:
            request = policy.next() if blocked is None else blocked
            assert request is not None
            blocked = request if cells is not None and not cells.admit(request) else None
            if blocked is not None:
                break
            n_waiting -= 1
            request.seq_id = free.pop()
            running[request.seq_id] = request
            request.advanced_tick = outcome.ticks
            request.due_s = request.arrived_s + TARGET_TTFT_S
        decodes = [request.view() for seq_id, request in running.items() if seq_id in decoding]
        prefills = [request.view() for seq_id, request in running.items() if seq_id not in decoding]
        outcome.most_groups = max(outcome.most_groups, len({(view.priority, view.principal) for view in prefills}))
        for view in prefills:
            outcome.sequences[view.priority, view.principal].add(view.seq_id)
        outcome.most_streams = max(outcome.most_streams, len(decodes))
        scanned = 0 if cells is None else cells.scanned()
        outcome.scanned_cells += scanned
        began = time.thread_time()
        chosen = policy.plan(decodes, prefills, now, Attention(device.scan, scanned))
        outcome.plan_ms.append(1e3 * (time.thread_time() - began))
        if not chosen.decodes and not chosen.chunks:
            raise AssertionError("an empty plan although sequences are ready")
        tick_ms = device.ms(chosen.work) * max(0.2, 1 + rng.gauss(0, noise))
        policy.observe(chosen.work, tick_ms)
        if chosen.work.prefill_tokens and chosen.predicted_ms:
            outcome.errors.append(abs(chosen.predicted_ms - tick_ms) / tick_ms)
        began_s = now
        now += (tick_ms + host_ms) / 1e3
        outcome.ticks += 1
        outcome.tick_ms.append(tick_ms)
        outcome.prefill_tokens += chosen.work.prefill_tokens
        for seq_id, n, is_sampled in _rows(chosen):
            request = running[seq_id]
            waited = outcome.ticks - request.advanced_tick
            request.advanced_tick = outcome.ticks
            request.n_context += n
            if cells is not None:
                cells.advance(request)
            if request.priority is Priority.BACKGROUND:
                outcome.background_waited = max(outcome.background_waited, waited)
            elif seq_id not in decoding:
                outcome.prefill_waited = max(outcome.prefill_waited, waited)
            else:
                outcome.stream_waited = max(outcome.stream_waited, waited)
            if not is_sampled:
                request.n_pending -= n
                continue
            outcome.tokens += 1
            if seq_id in decoding:
                outcome.itl_ms[request.priority].append(1e3 * (now - request.last_token_s))
            else:
                decoding.add(seq_id)
                request.n_pending = 1
                request.ttft_ms = 1e3 * (now - request.arrived_s)
            request.last_token_s, request.due_s = now, now + request.target_s
            request.n_to_generate -= 1
            if not request.n_to_generate:
                request.is_done = True
                outcome.cached_tokens += request.n_cached
                if cells is not None:
                    cells.finish(request)
                if request.then is not None:
                    request.then.arrived_s = now + request.thinking_s
                    requests.append(request.then)
                    coming = deque(sorted([*coming, request.then], key=lambda later: later.arrived_s))
                del running[seq_id]
                decoding.discard(seq_id)
                free.append(seq_id)
                policy.finish(request)
        n_before, n_finished = n_finished, len(requests) - len(coming) - n_waiting - len(running)
        on_finished(n_finished - n_before)
    outcome.wall_s = now
    return outcome


def _rows(chosen: Plan) -> Iterator[tuple[int, int, bool]]:
    """Sequence, tokens, and whether a token is sampled."""
    return itertools.chain(
        ((view.seq_id, 1, True) for view in chosen.decodes),
        ((chunk.seq_id, chunk.n_tokens, chunk.is_last) for chunk in chosen.chunks),
    )


COLUMNS = (
    "device", "policy", "class", "requests", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "ttft_max_ms",
    "itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "itl_max_ms", "wall_s", "tokens_per_s", "prompt_tokens_per_s",
    "plan_p50_ms", "plan_p99_ms", "longest_prompt_wait_ticks",
)  # fmt: skip


def by_class(outcome: Outcome) -> Iterator[tuple[Priority, list[float], list[float]]]:
    for priority in Priority:
        ttft = [request.ttft_ms for request in outcome.requests if request.priority is priority]
        yield priority, ttft, outcome.itl_ms[priority]


def report(device: Device, outcomes: Sequence[Outcome]) -> str:
    header = ["", "class", "TTFT p50 ms", "p95", "p99", "max", "ITL p50 ms", "p95", "p99", "max"]
    rows = [
        [outcome.policy, priority.name.lower(), *quantiles(ttft), *quantiles(itl)]
        for outcome in outcomes
        for priority, ttft, itl in by_class(outcome)
    ]
    whole = [
        [
            outcome.policy, f"{outcome.ticks:,}", cell(outcome.wall_s, 2), cell(outcome.tokens / outcome.wall_s, 0),
            cell(outcome.prefill_tokens / outcome.wall_s, 0), f"{outcome.cached_tokens:,}",
            cell(outcome.scanned_cells / outcome.ticks, 0), f"{outcome.most_streams:,}", f"{outcome.most_waiting:,}",
            f"{outcome.prefill_waited:,}", f"{outcome.stream_waited} / {outcome.background_waited}",
            *(cell(percentile(outcome.plan_ms, at), 3) for at in (50, 99)),
            *(cell(100 * at) if (at := percentile(outcome.errors, share)) is not None else "-" for share in (50, 90)),
        ]
        for outcome in outcomes
    ]  # fmt: skip
    names = [
        "", "ticks", "wall s", "tok/s", "prompt tok/s", "prompt tokens cached", "cells scanned", "streams at once", "waiting at once",
        "longest wait of a prefill, ticks",
        "of a stream / background", "plan() p50 ms", "p99", "tick error p50 %", "p90",
    ]  # fmt: skip
    ours = next((outcome for outcome in outcomes if outcome.policy == UmaTrio.name), None)
    bound = "" if ours is None else f"; bound of a prefill's wait: {ours.bound():,} ticks"
    title = f"## {device.name}: {device.parallel:,} sequences, batches of {device.n_batch:,}{bound}"
    return "\n\n".join([title, table(header, rows), table(names, whole)])


def csv_rows(device: Device, outcome: Outcome) -> Iterable[tuple[object, ...]]:
    for priority, ttft, itl in by_class(outcome):
        yield (
            device.name, outcome.policy, priority.name.lower(), len(ttft),
            *(_rounded(percentile(ttft, at)) for at in (50, 95, 99, 100)),
            *(_rounded(percentile(itl, at)) for at in (50, 95, 99, 100)),
            round(outcome.wall_s, 3), round(outcome.tokens / outcome.wall_s, 1),
            round(outcome.prefill_tokens / outcome.wall_s, 1),
            *(_rounded(percentile(outcome.plan_ms, at), 4) for at in (50, 99)), outcome.prefill_waited,
        )  # fmt: skip


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def plan_time_ms(n_decodes: int, n_prefills: int, *, calls: int = 500) -> list[float]:
    """Milliseconds of each ``plan()`` call with so many ready sequences, on a known device."""
    settings, cost, state = Scheduling(), CostModel(), PolicyState()
    decodes = [
        SequenceView(i, n_context=500, due_s=0.1, principal=str(i % 4), priority=Priority(i % 2))
        for i in range(n_decodes)
    ]
    prefills = [
        SequenceView(n_decodes + i, 2000, n_context=100, principal=str(i % 4), priority=Priority(i % 2))
        for i in range(n_prefills)
    ]
    times = []
    for _ in range(calls):
        began = time.thread_time()
        chosen = plan(Tick(decodes, prefills, state, now_s=0.0, cost=cost, max_tokens=2048, settings=settings))
        times.append(1e3 * (time.thread_time() - began))
        state = chosen.state
    return times


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--device",
    "names",
    multiple=True,
    type=click.Choice(list(DEVICES)),
    default=list(DEVICES),
    help="Simulated device; repeatable.",
)
@click.option(
    "--requests", type=click.IntRange(1), help="Requests for each device.  [default: 400 on cpu, 10000 on the others]"
)
@click.option(
    "--load",
    type=click.FloatRange(0, min_open=True),
    default=1.2,
    help="Arrival rate, relative to what the device can serve.",
)
@click.option(
    "--noise", type=click.FloatRange(0, 1), default=0.03, help="Relative standard deviation of a tick's time."
)
@click.option(
    "--target-itl-ms",
    type=click.FloatRange(0, min_open=True),
    default=Scheduling().target_itl_ms,
    help="Target for the time between tokens of a stream.",
)
@click.option("--mixed-load", "mixed", is_flag=True, help="8 streams and six long prompts, in place of many requests.")
@click.option("--agents", "n_agents", type=click.IntRange(0), default=0, help="Agents that come back, next to others.")
@click.option(
    "--idle-limit",
    type=click.Choice(["on", "off"]),
    default="on",
    help="Idle sequences stay only if they are used again, where attention scans all cells.",
)
@click.option("--burst", "at_once", type=click.IntRange(0), default=0, help="So many short prompts, all at once.")
@click.option(
    "--curve/--no-curve", default=True, help="Measure the cost of calls by their rows first, where it has stairs."
)
@click.option("--rival/--no-rival", default=True, help="Compare with the policy that fills the batch.")
@click.option("--seed", type=int, default=1, help="Seed of arrivals, sizes and noise.")
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path), help="Write a row for each device, policy and class."
)
def main(
    names: Sequence[str],
    requests: int | None,
    load: float,
    noise: float,
    target_itl_ms: float,
    mixed: bool,
    n_agents: int,
    idle_limit: str,
    at_once: int,
    curve: bool,
    rival: bool,
    seed: int,
    csv_file: Path | None,
) -> None:
    """Simulate the scheduler with thousands of streams, and compare it with filling each batch."""
    click.echo("\n".join(machine()))
    click.echo(f"devices   simulated; load {load:g}, noise {noise:g}, target_itl_ms {target_itl_ms:g}, seed {seed}\n")
    settings = Scheduling(target_itl_ms=target_itl_ms)
    starved: list[str] = []
    rows: list[tuple[object, ...]] = []
    for name in names:
        device, outcomes = DEVICES[name], []
        device = attrs.evolve(device, parallel=max(device.parallel, at_once))
        for make in (UmaTrio, FillBatch) if rival else (UmaTrio,):
            if n_agents:
                these = agents(settings, n_agents)
            elif at_once:
                these = burst(at_once, settings, seed)
            elif mixed:
                these = mixed_load(settings)
            else:
                these = arrivals(device, requests or REQUESTS[name], load, settings, seed)
            policy = (
                UmaTrio(device, settings, curves(device, noise) if curve else None)
                if make is UmaTrio
                else make(device, settings)
            )
            with click.progressbar(length=len(these), label=f"{name}, {make.name}", file=sys.stderr) as bar:
                outcome = simulate(
                    device, policy, these, noise=noise, seed=seed, on_finished=bar.update, idle_limit=idle_limit == "on"
                )
            outcomes.append(outcome)
            rows += csv_rows(device, outcome)
        click.echo(report(device, outcomes) + "\n")
        starved += [f"{name}: {why}" for why in outcomes[0].starved()]
    click.echo("plan() only: " + "; ".join(
        f"{n} streams and {m} prompts: p50 {cell(percentile(times, 50), 3)}, p99 {cell(percentile(times, 99), 3)} ms"
        for n, m in ((256, 0), (224, 32), (16, 2))
        for times in [plan_time_ms(n, m)]
    ))  # fmt: skip
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    click.echo("\n".join(f"STARVED: {why}" for why in starved) or "Nobody starved.")
    sys.exit(bool(starved))


if __name__ == "__main__":
    main()
