"""Simulates up to hundreds of daemons behind a router: what is prefilled again, and what clients wait for.

    python benches/router_sim.py
    python benches/router_sim.py --workers 100 --load shared --policy round-robin,cache-aware
    python benches/router_sim.py --device gpu --workers 4,16 --minutes 1

Each daemon plans its ticks with the daemon's own ``plan()``, and ticks take what the formula of a measured device says
(``policy_sim.py``).  Its KV cache is simplified: it keeps whole pieces of prompts, such as a system prompt or a turn, and
evicts the piece that was used least recently; a piece that another request computes counts as computed.  The rules of the
routers are those that their help texts describe.  There is no network, and no clock of this machine: the same seed gives
the same figures.

``turns`` has conversations of six turns, which begin with one of some system prompts, the popular ones more often.
``shared`` has single questions about one of some long texts.

The *ideal* is one daemon that forgets nothing: it computes each piece once.  The affinity is its share of what all daemons
computed.  A request is *good* if its first token comes within ``--ttft-ms``.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Final, Protocol

import attrs
import click
from command import choices
from machine import machine
from policy_sim import DEVICES, HOST_MS, Device, Request, UmaTrio
from report import cell, table

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.plan import Plan
from uma_trio.daemon.policy.view import Priority
from uma_trio.demo.recording import percentile
from uma_trio.engine_link.attention import Attention, AttentionScan

CELLS: Final = {"cpu": 16_384, "gpu": 131_072}
"""Cells of a daemon's KV cache, by device."""
POLL_S: Final = 1.0
"""How often a router reads ``/v1/loads``."""
PREFIX_TOKENS: Final = 256
"""What ``prefix-hash`` looks at."""
POINTS: Final = 160
"""Points of each daemon on the ring."""
ATTENTION: Final = Attention(AttentionScan.SEQUENCE, 0)


# -- loads -------------------------------------------------------------------------------------


@attrs.frozen
class Piece:
    """A part of prompts, in the place where it stands: what is before it is part of its name."""

    name: str
    tokens: int
    is_answer: bool = False


@attrs.define(eq=False)
class Turn:
    """A request, and the one that follows when it has been answered."""

    session: str
    prompt: Sequence[Piece]
    answer: Piece
    then: Turn | None = None
    think_s: float = 0.0
    arrived_s: float = 0.0
    ttft_s: float = math.nan
    ended_s: float = math.nan
    prefilled: int = 0

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)


@attrs.frozen
class Load:
    """Conversations."""

    systems: int
    system: int
    """Tokens of each system prompt."""
    turns: int
    text: int
    """Mean tokens of what a user says."""
    answer: int
    think_s: float = 8.0

    def conversation(self, number: int, rng: random.Random) -> Turn:
        """A conversation, as its first request."""
        [system] = rng.choices(range(self.systems), [1 / (rank + 1) for rank in range(self.systems)])
        prompt, turns = [Piece(f"system {system}", self.system)], []
        for n in range(self.turns):
            name = f"{number}.{n}"
            prompt = [*prompt, Piece(name, _size(rng, self.text))]
            answer = Piece(f"{name} answer", _size(rng, self.answer), is_answer=True)
            turns.append(Turn(str(number), prompt, answer, think_s=rng.expovariate(1 / self.think_s)))
            prompt = [*prompt, answer]
        for turn, then in itertools.pairwise(turns):
            turn.then = then
        return turns[0]

    def arrivals(self, device: Device, n_workers: int, use: float, seconds: float, seed: int) -> list[Turn]:
        """First requests of conversations, at a rate that keeps all daemons busy for the share ``use`` of the time."""
        rng = random.Random(seed)
        mean_ms = self.turns * device.request_ms(self.text, self.answer)
        now = 0.0
        turns: list[Turn] = []
        while (now := now + rng.expovariate(use * n_workers / mean_ms) / 1e3) < seconds:
            turns.append(self.conversation(len(turns), rng))
            turns[-1].arrived_s = now
        return turns


LOADS: Final = {
    "turns": Load(systems=20, system=400, turns=6, text=120, answer=80),
    "shared": Load(systems=40, system=800, turns=1, text=60, answer=60),
}


def _size(rng: random.Random, mean: int) -> int:
    return max(2, round(mean * rng.lognormvariate(-0.125, 0.5)))


# -- a daemon ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Cache:
    """Pieces that a daemon has, the least recently used first."""

    room: int
    reserved: int = 0
    """Cells for answers that run."""
    _pieces: OrderedDict[str, int] = attrs.field(factory=OrderedDict)
    _used_by: Counter[str] = attrs.field(factory=Counter)
    _tokens: int = 0

    def cached(self, prompt: Sequence[Piece]) -> int:
        """Tokens at the beginning of a prompt that are there."""
        there = itertools.takewhile(lambda piece: piece.name in self._pieces, prompt)
        return sum(piece.tokens for piece in there)

    def admit(self, turn: Turn) -> int | None:
        """Reserve cells for a request; returns the tokens that were there, or ``None`` without room."""
        n_cached = self.cached(turn.prompt)
        self._used_by.update(piece.name for piece in turn.prompt)
        idle = (name for name in [*self._pieces] if not self._used_by[name])
        while self._tokens + self.reserved + turn.tokens - n_cached + turn.answer.tokens > self.room:
            if (name := next(idle, None)) is None:
                self._leave(turn)
                return None
            self._tokens -= self._pieces.pop(name)
        self.reserved += turn.answer.tokens
        self._have(turn.prompt)
        return n_cached

    def finish(self, turn: Turn) -> None:
        """The request has ended; its answer stays."""
        self.reserved -= turn.answer.tokens
        self._leave(turn)
        self._have([*turn.prompt, turn.answer])

    def _leave(self, turn: Turn) -> None:
        self._used_by.subtract(piece.name for piece in turn.prompt)

    def _have(self, path: Sequence[Piece]) -> None:
        for piece in reversed(path):  # what is before a piece is as recent as the piece
            if piece.name not in self._pieces:
                self._pieces[piece.name] = piece.tokens
                self._tokens += piece.tokens
            self._pieces.move_to_end(piece.name)


@attrs.define(eq=False)
class Worker:
    """A simulated daemon."""

    number: int
    device: Device
    cache: Cache
    policy: UmaTrio
    rng: random.Random
    prefilled: int = 0
    busy_s: float = 0.0
    _turns: dict[Request, Turn] = attrs.field(factory=dict)
    _running: dict[int, Request] = attrs.field(factory=dict)
    _decoding: set[int] = attrs.field(factory=set)
    _free: list[int] = attrs.field(factory=list)
    _n_waiting: int = 0
    _blocked: Request | None = None
    _plan: Plan | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were sent here and are not answered, as a router counts them."""
        return len(self._turns)

    def backlog(self) -> int:
        """``num_waiting_uncached_tokens`` of ``/v1/loads``."""
        return sum(
            request.n_pending for request in self._turns if request.seq_id < 0 or request.seq_id not in self._decoding
        )

    def queue(self, turn: Turn, target_s: float) -> None:
        """A request arrives."""
        request = Request(turn.tokens, turn.answer.tokens, turn.arrived_s, target_s, Priority.NORMAL, "0")
        self._turns[request] = turn
        self._n_waiting += 1
        self.policy.queue(request)

    def begin(self, now: float) -> float | None:
        """Begin a tick; returns its end, or ``None`` if one runs or there is nothing to do."""
        if self._plan is not None:
            return None
        self._admit()
        if not self._running:
            return None
        decodes = [running.view() for seq_id, running in self._running.items() if seq_id in self._decoding]
        prefills = [running.view() for seq_id, running in self._running.items() if seq_id not in self._decoding]
        self._plan = chosen = self.policy.plan(decodes, prefills, now, ATTENTION)
        ms = self.device.ms(chosen.work) * max(0.2, 1 + self.rng.gauss(0, 0.03))
        self.policy.observe(chosen.work, ms)
        self.prefilled += chosen.work.prefill_tokens
        self.busy_s += (ms + HOST_MS) / 1e3
        return now + (ms + HOST_MS) / 1e3

    def end(self, now: float) -> Iterator[Turn]:
        """The tick ends; yields the requests that are answered with it."""
        assert self._plan is not None
        chosen, self._plan = self._plan, None
        for chunk in chosen.chunks:
            request = self._running[chunk.seq_id]
            request.n_context += chunk.n_tokens
            request.n_pending -= chunk.n_tokens
            if chunk.is_last:
                self._turns[request].ttft_s = now - request.arrived_s
                request.n_pending = 1
                self._decoding.add(chunk.seq_id)
                yield from self._count(request, now)
        for view in chosen.decodes:
            request = self._running[view.seq_id]
            request.n_context += 1
            yield from self._count(request, now)

    def _count(self, request: Request, now: float) -> Iterator[Turn]:
        request.n_to_generate -= 1
        request.due_s = now + request.target_s
        if request.n_to_generate:
            return
        turn = self._turns.pop(request)
        turn.ended_s = now
        self.cache.finish(turn)
        self.policy.finish(request)
        self._decoding.discard(request.seq_id)
        del self._running[request.seq_id]
        self._free.append(request.seq_id)
        yield turn

    def _admit(self) -> None:
        while self._free and self._n_waiting:
            request = self._blocked or self.policy.next()
            assert request is not None
            turn = self._turns[request]
            n_cached = self.cache.admit(turn)
            self._blocked = request if n_cached is None else None
            if n_cached is None:
                return
            n_cached = min(n_cached, turn.tokens - 1)  # the last token is always computed
            self._n_waiting -= 1
            request.n_context, request.n_pending, turn.prefilled = (
                n_cached,
                turn.tokens - n_cached,
                turn.tokens - n_cached,
            )
            request.seq_id = self._free.pop()
            request.due_s = request.arrived_s + Scheduling().target_ttft_ms / 1e3
            self._running[request.seq_id] = request


# -- routers -----------------------------------------------------------------------------------


class Router(Protocol):
    """Chooses a daemon for each request."""

    def choose(self, turn: Turn, now: float) -> Worker:
        """The daemon for a request that has arrived."""


@attrs.define(eq=False)
class RoundRobin:
    """One daemon after the other."""

    workers: Sequence[Worker]
    _next: Iterator[Worker] = attrs.field(
        default=attrs.Factory(lambda self: itertools.cycle(self.workers), takes_self=True)
    )

    def choose(self, turn: Turn, now: float) -> Worker:
        return next(self._next)


@attrs.define(eq=False)
class Ring:
    """Consistent hashing: by the session, blind to load, as the recipe for Envoy; or by the first tokens with bounded load,
    as smg's ``prefix_hash``."""

    workers: Sequence[Worker]
    by_prefix: bool
    _points: list[tuple[int, Worker]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        points = [(_hash(f"{worker.number}/{n}"), worker.number) for worker in self.workers for n in range(POINTS)]
        self._points = [(point, self.workers[number]) for point, number in sorted(points)]

    def choose(self, turn: Turn, now: float) -> Worker:
        key = _beginning(turn.prompt) if self.by_prefix else turn.session
        first, n = bisect.bisect(self._points, _hash(key), key=lambda point: point[0]), len(self._points)
        walk = (self._points[at % n][1] for at in range(first, first + n))
        if not self.by_prefix:
            return next(walk)
        mean = fmean(worker.in_flight for worker in self.workers)
        return next((worker for worker in walk if worker.in_flight <= max(1.25 * mean, mean + 10)), self.workers[0])


@attrs.define(eq=False)
class CacheAware:
    """smg's ``cache_aware``: where most of the prompt was sent before, unless that daemon has far more requests than
    others; the daemon with fewest requests if less than 0.3 of the prompt is known."""

    workers: Sequence[Worker]
    _sent: dict[str, set[int]] = attrs.field(factory=lambda: defaultdict(set))
    """Daemons that have got a piece."""

    def choose(self, turn: Turn, now: float) -> Worker:
        best, matched = {*range(len(self.workers))}, 0
        for piece in turn.prompt:
            if not (there := best & self._sent.get(piece.name, set())):
                break
            best, matched = there, matched + piece.tokens
        least = min(self.workers, key=lambda worker: (worker.in_flight, worker.number))
        chosen: Worker = min((self.workers[n] for n in best), key=lambda worker: (worker.in_flight, worker.number))
        mean = fmean(worker.in_flight for worker in self.workers)
        margin = min(64.0, max(4.0, 2 * math.sqrt(mean)))
        if matched < 0.3 * turn.tokens or chosen.in_flight > max(mean + margin, 1.5 * mean):
            chosen = least
        for piece in (*turn.prompt, turn.answer):
            self._sent[piece.name].add(chosen.number)
        return chosen


@attrs.define(eq=False)
class KvAware:
    """Where the prompt is computed first: what the KV events say is missing there, and what ``/v1/loads`` said last is
    waiting there, with what was sent since."""

    workers: Sequence[Worker]
    _waiting: list[int] = attrs.field(factory=list)
    _read_at: float = -math.inf

    def choose(self, turn: Turn, now: float) -> Worker:
        if now >= self._read_at + POLL_S:
            self._waiting, self._read_at = [worker.backlog() for worker in self.workers], now
        missing = [turn.tokens - worker.cache.cached(turn.prompt) for worker in self.workers]
        costs = [(missing[n] + self._waiting[n], worker.in_flight, n) for n, worker in enumerate(self.workers)]
        _, _, n = min(costs)
        self._waiting[n] += missing[n]
        return self.workers[n]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) * 2654435761 % (1 << 32)


def _beginning(prompt: Sequence[Piece]) -> str:
    """The pieces of the first tokens."""
    ends = itertools.accumulate([piece.tokens for piece in prompt], initial=0)
    return "/".join(piece.name for piece, begin in zip(prompt, ends, strict=False) if begin < PREFIX_TOKENS)


POLICIES: Final[dict[str, Callable[[Sequence[Worker]], Router]]] = {
    "round-robin": RoundRobin,
    "session-header": lambda workers: Ring(workers, by_prefix=False),
    "prefix-hash": lambda workers: Ring(workers, by_prefix=True),
    "cache-aware": CacheAware,
    "kv-aware": KvAware,
}


# -- the simulation ----------------------------------------------------------------------------


def simulate(workers: Sequence[Worker], router: Router, first: Sequence[Turn], settings: Scheduling) -> list[Turn]:
    """Serve all conversations; returns their requests in the order of their arrival."""
    order, served = itertools.count(), []
    events: list[tuple[float, int, Turn | Worker]] = [(turn.arrived_s, next(order), turn) for turn in first]
    heapq.heapify(events)
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Turn):
            served.append(what)
            worker = router.choose(what, now)
            worker.queue(what, settings.target_itl_ms / 1e3)
        else:
            worker = what
            for turn in worker.end(now):
                if turn.then is not None:
                    turn.then.arrived_s = now + turn.think_s
                    heapq.heappush(events, (turn.then.arrived_s, next(order), turn.then))
        if (ends := worker.begin(now)) is not None:
            heapq.heappush(events, (ends, next(order), worker))
    return served


def workers_of(device: Device, n: int, settings: Scheduling, seed: int) -> list[Worker]:
    """Daemons that have served nothing."""
    return [
        Worker(
            number, device, Cache(CELLS[device.name]), UmaTrio(device, settings), random.Random(f"{seed} {number}"),
            free=[*range(device.parallel)],
        )
        for number in range(n)
    ]  # fmt: skip


def ideal(served: Sequence[Turn]) -> int:
    """Prompt tokens that one daemon computes which forgets nothing."""
    pieces = {piece.name: piece.tokens for turn in served for piece in turn.prompt if not piece.is_answer}
    return sum(pieces.values())


def row(name: str, workers: Sequence[Worker], served: Sequence[Turn], ttft_ms: float) -> list[str]:
    """Figures of a run."""
    ttft = [1e3 * turn.ttft_s for turn in served]
    latency = [turn.ended_s - turn.arrived_s for turn in served]
    prefilled, wall_s = sum(worker.prefilled for worker in workers), max(turn.ended_s for turn in served)
    busy = [worker.busy_s for worker in workers]
    return [
        f"{len(workers)} {name}", f"{len(served):,}", f"{prefilled:,}", cell(min(1.0, ideal(served) / prefilled), 3),
        cell(sum(ms <= ttft_ms for ms in ttft) / wall_s, 1), cell(100 * sum(ms <= ttft_ms for ms in ttft) / len(ttft), 1),
        cell(percentile(ttft, 50), 0), cell(percentile(ttft, 99), 0), cell(percentile(latency, 99), 1),
        cell(max(busy) / fmean(busy), 2),
    ]  # fmt: skip


HEADER: Final = (
    "daemons, policy", "requests", "prefilled", "affinity", "good/s", "good %", "TTFT p50 ms", "p99", "latency p99 s",
    "busiest",
)  # fmt: skip


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--workers", "counts", default="1,4,16,100", help="Numbers of daemons, with commas.")
@click.option("--policy", "names", default=",".join(POLICIES), help="Routers, with commas.")
@click.option("--load", "load_name", type=click.Choice([*LOADS]), default="turns")
@click.option("--device", "device_name", type=click.Choice([*CELLS]), default="cpu", help="As in policy_sim.py.")
@click.option("--use", type=click.FloatRange(0, 2, min_open=True), default=0.6, help="Share of the time that daemons are busy if nothing is computed twice.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=5.0, help="Simulated time in which conversations begin.")  # fmt: skip
@click.option(
    "--ttft-ms", type=click.FloatRange(0, min_open=True), default=1000.0, help="Objective for the first token."
)
@click.option("--seed", type=int, default=1)
def main(
    counts: str, names: str, load_name: str, device_name: str, use: float, minutes: float, ttft_ms: float, seed: int
) -> None:
    """Simulate daemons behind routers."""
    load, device, settings = LOADS[load_name], DEVICES[device_name], Scheduling()
    click.echo("\n".join(machine()))
    click.echo(
        f"daemons   simulated: {device_name}, {CELLS[device_name]:,} cells; {load_name}: {load}; use {use:g}, seed {seed}\n"
    )
    rows = []
    for n in [int(count) for count in counts.split(",")]:
        for name in choices(names, "--policy", [*POLICIES])[: None if n > 1 else 1]:
            workers = workers_of(device, n, settings, seed)
            first = load.arrivals(device, n, use, 60 * minutes, seed)
            served = simulate(workers, POLICIES[name](workers), first, settings)
            rows.append(row(name if n > 1 else "alone", workers, served, ttft_ms))
            click.echo(f"  {rows[-1]}", err=True)
    click.echo(table(HEADER, rows))


if __name__ == "__main__":
    main()
