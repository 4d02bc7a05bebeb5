"""What the policy does beyond what one machine can run: thousands of streams on simulated devices.

    python benches/policy_sim.py
    python benches/policy_sim.py --device gpu --requests 2000 --load 0.7 --target-tbt-ms 50
    python benches/policy_sim.py --device wide --load 20 --csv policy.csv

The plans are made by the daemon's own ``plan()``, from a cost model that learns as it does there; only the
device is simulated, and so is the clock: a tick takes what the device's formula says, give or take some noise.
Requests arrive at random (Poisson).  Beside it, on the same arrivals, the policy that most servers have: a
token for each stream, then prompts in the order of their slots until the batch is full.

Exit code 1: with our policy somebody starved.  That is: a stream was left out of a tick (a background one out
of more than four in a row), an admitted prompt did not advance within the ticks that docs/ARCHITECTURE.md
states, or a request never ended.
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
from machine import machine
from report import cell, quantiles, table

from uma_trio.config import Scheduling
from uma_trio.demo.recording import percentile
from uma_trio.scheduling.cost import CostModel, Work
from uma_trio.scheduling.fairness import LOWER_CLASS_WAITS, ROUND
from uma_trio.scheduling.policy import BACKGROUND_SITS_OUT, Memory, Plan, Priority, Share, Slot, plan

HOST_MS = 0.3
"""Between two ticks: what a daemon on the CPU needs around one."""

TENANTS = 8


@attrs.frozen
class Device:
    """What a tick takes, in ms.  The figures are fitted to what was measured on the devices that they are named after."""

    name: str
    a: float
    b: float
    c: float
    d: float
    e: float
    step: float
    """More with any prompt token: other kernels."""
    parallel: int
    n_batch: int

    def ms(self, work: Work) -> float:
        linear = self.a + self.b * work.prompt_tokens + self.c * work.decodes + self.d * work.context_tokens
        read = work.prompt_tokens * (work.prompt_context + work.prompt_tokens / 2)
        return linear + self.e * read + (self.step if work.prompt_tokens else 0.0)

    def request_ms(self, prompt: float, tokens: float) -> float:
        """Of a request's share in full ticks, about: one over it is the capacity in requests per ms."""
        full = self.ms(Work(0, self.parallel, int(self.parallel * (prompt + tokens / 2)))) + HOST_MS
        chunks = prompt / self.n_batch
        return tokens * full / self.parallel + self.b * prompt + self.e * prompt * prompt / 2 + chunks * self.step


DEVICES = {
    "cpu": Device("cpu", 1.0, 1.05, 4.5, 0.0015, 0.00015, 0.0, 16, 2048),
    "gpu": Device("gpu", 4.6, 0.087, 0.17, 0.00004, 0.0000021, 9.0, 256, 2048),
    "wide": Device("wide", 5.0, 0.004, 0.005, 0.000001, 0.0000001, 2.0, 10_000, 16_384),
}
"""cpu: one thread, 125M parameters at 8 bits.  gpu: an H200, 7B at 8 bits, as many sequences as llama.cpp has.
wide: what does not exist: ten thousand sequences at once."""

REQUESTS = {"cpu": 400, "gpu": 10_000, "wide": 10_000}

SIZES = {
    Priority.INTERACTIVE: (0.5, 80, 120),
    Priority.NORMAL: (0.4, 600, 150),
    Priority.BACKGROUND: (0.1, 3000, 100),
}
"""Share of the requests, mean prompt, mean tokens to generate."""


@attrs.define(eq=False)
class Request:
    """One, and what became of it."""

    slot: Slot
    to_generate: int
    arrived_s: float
    target_s: float
    admitted_tick: int = 0
    advanced_tick: int = 0
    admitted_s: float = math.nan
    last_token_s: float = math.nan
    ttft_ms: float = math.nan
    done: bool = False


def arrivals(device: Device, n: int, load: float, limits: Scheduling, seed: int) -> list[Request]:
    """``n`` requests at ``load`` times what the device can serve."""
    chance = random.Random(seed)
    apiece = sum(share * device.request_ms(prompt, tokens) for share, prompt, tokens in SIZES.values())
    classes, weights = list(SIZES), [share for share, _, _ in SIZES.values()]
    tenants = [1 / (rank + 1) for rank in range(TENANTS)]
    now, found = 0.0, []
    for _ in range(n):
        now += chance.expovariate(load / apiece) / 1e3
        [priority] = chance.choices(classes, weights)
        [tenant] = chance.choices(range(TENANTS), tenants)
        _, prompt, tokens = SIZES[priority]
        target = limits.background_tbt_ms if priority is Priority.BACKGROUND else limits.target_tbt_ms
        slot = Slot(-1, _about(chance, prompt), priority=priority, tenant=tenant)
        found.append(Request(slot, _about(chance, tokens), now, target / 1e3))
    return found


def _about(chance: random.Random, mean: float) -> int:
    return max(2, round(mean * chance.lognormvariate(-0.32, 0.8)))


class Ours:
    """The daemon's policy."""

    name = "uma-trio"

    def __init__(self, device: Device, limits: Scheduling) -> None:
        self._device, self._limits, self._memory = device, limits, Memory()
        self._queues: dict[tuple[Priority, int], deque[Request]] = {}
        self._here: Counter[int] = Counter()
        self.cost = CostModel()
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
        self._here[request.slot.tenant] += 1
        self._queues.setdefault((request.slot.priority, request.slot.tenant), deque()).append(request)

    def next(self) -> Request | None:
        """By class, then by least-served tenant, then by arrival."""
        waiting = [key for key, queue in self._queues.items() if queue]
        if not waiting:
            return None
        key = min(waiting, key=lambda key: (key[0], self._memory.service.of(key[1]), self._queues[key][0].arrived_s))
        return self._queues[key].popleft()

    def plan(self, streams: list[Slot], prompts: list[Slot], now_s: float) -> Plan:
        chosen = plan(
            streams,
            prompts,
            self._memory,
            now_s=now_s,
            cost=self.cost,
            capacity=self._device.n_batch,
            limits=self._limits,
        )
        self._memory = chosen.memory
        return chosen

    def took(self, work: Work, ms: float) -> None:
        self.cost = self.cost.observed(work, ms)

    def ended(self, request: Request) -> None:
        tenant = request.slot.tenant
        self._here[tenant] -= 1
        if not self._here[tenant]:
            self._memory = self._memory.without(tenant)


class Filling:
    """A token for each stream, then prompts in the order of their slots until the batch is full."""

    name = "fill the batch"

    def __init__(self, device: Device, limits: Scheduling) -> None:
        self._n_batch = device.n_batch
        self._queue: deque[Request] = deque()

    def queue(self, request: Request) -> None:
        self._queue.append(request)

    def next(self) -> Request | None:
        return self._queue.popleft() if self._queue else None

    def plan(self, streams: list[Slot], prompts: list[Slot], now_s: float) -> Plan:
        left = self._n_batch - len(streams)
        shares, read = [], 0
        for slot in sorted(prompts, key=lambda slot: slot.seq_id):
            n = min(left, slot.pending)
            if n <= 0:
                break
            shares.append(Share(slot.seq_id, n, n == slot.pending))
            read += n * slot.context
            left -= n
        n_prompt = sum(share.n_tokens for share in shares)
        context = sum(slot.context for slot in streams)
        work = Work(n_prompt, len(streams), context, read / max(1, n_prompt))
        return Plan(streams, tuple(shares), Memory(), work, 0.0, (len(streams),))

    def took(self, work: Work, ms: float) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


@attrs.define
class Outcome:
    """What was measured."""

    policy: str
    requests: list[Request]
    itl_ms: dict[Priority, list[float]] = attrs.field(factory=lambda: {priority: [] for priority in Priority})
    plan_ms: list[float] = attrs.field(factory=list)
    """Processor time, as this machine may do other things meanwhile."""
    tick_ms: list[float] = attrs.field(factory=list)
    errors: list[float] = attrs.field(factory=list)
    ticks: int = 0
    wall_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    most_streams: int = 0
    most_waiting: int = 0
    prompt_waited: int = 0
    """Ticks until an admitted prompt advanced, the longest."""
    stream_waited: int = 0
    background_waited: int = 0
    sequences: dict[tuple[Priority, int], set[int]] = attrs.field(factory=lambda: defaultdict(set))
    """On which each class of each tenant had prompts."""
    most_groups: int = 0
    """Classes of tenants with prompts at once."""

    def bound(self) -> int:
        """Ticks within which an admitted prompt advances, as docs/ARCHITECTURE.md states."""
        served = LOWER_CLASS_WAITS + self.most_groups if self.most_groups > 1 else 1
        return 2 * ROUND * max(map(len, self.sequences.values()), default=1) * served

    def starved(self) -> list[str]:
        """Why somebody did, if so."""
        found = []
        if not all(request.done for request in self.requests):
            found.append(f"{sum(not request.done for request in self.requests)} requests never ended")
        if self.prompt_waited > self.bound():
            found.append(f"a prompt waited for {self.prompt_waited} ticks")
        if self.stream_waited > 1:
            found.append(f"a stream waited for {self.stream_waited} ticks")
        if self.background_waited > BACKGROUND_SITS_OUT + 1:
            found.append(f"a background stream waited for {self.background_waited} ticks")
        return found


def simulate(
    device: Device,
    policy: Ours | Filling,
    requests: list[Request],
    *,
    noise: float,
    seed: int,
    watch: Callable[[int], None],
) -> Outcome:
    """Serve ``requests`` to their ends."""
    chance = random.Random(seed)
    outcome = Outcome(policy.name, requests)
    coming = deque(requests)
    waiting, ended, now, free = 0, 0, 0.0, list(range(device.parallel - 1, -1, -1))
    held: dict[int, Request] = {}
    decoding: set[int] = set()
    while coming or waiting or held:
        if not held and not waiting:
            now = max(now, coming[0].arrived_s)
        while coming and coming[0].arrived_s <= now:
            policy.queue(coming.popleft())
            waiting += 1
        outcome.most_waiting = max(outcome.most_waiting, waiting)
        while free and waiting:
            request = policy.next()
            assert request is not None
            waiting -= 1
            seq_id = request.slot.seq_id = free.pop()
            held[seq_id] = request
            request.admitted_s, request.advanced_tick = now, outcome.ticks
            request.slot.due_s = request.arrived_s  # and as much later as the target, which is the same for all
        streams = [held[seq_id].slot for seq_id in held if seq_id in decoding]
        prompts = [request.slot for seq_id, request in held.items() if seq_id not in decoding]
        outcome.most_groups = max(outcome.most_groups, len({(slot.priority, slot.tenant) for slot in prompts}))
        for slot in prompts:
            outcome.sequences[slot.priority, slot.tenant].add(slot.seq_id)
        outcome.most_streams = max(outcome.most_streams, len(streams))
        began = time.thread_time()
        chosen = policy.plan(streams, prompts, now)
        outcome.plan_ms.append(1e3 * (time.thread_time() - began))
        exact_ms = device.ms(chosen.work)
        took_ms = exact_ms * max(0.2, 1 + chance.gauss(0, noise))
        policy.took(chosen.work, took_ms)
        if chosen.work.prompt_tokens and chosen.predicted_ms:
            outcome.errors.append(abs(chosen.predicted_ms - took_ms) / took_ms)
        now += (took_ms + HOST_MS) / 1e3
        outcome.ticks += 1
        outcome.tick_ms.append(took_ms)
        outcome.prompt_tokens += chosen.work.prompt_tokens
        for seq_id, n, sampled in _fed(chosen):
            request = held[seq_id]
            slot = request.slot
            waited = outcome.ticks - request.advanced_tick
            request.advanced_tick = outcome.ticks
            slot.context += n
            if seq_id not in decoding:
                outcome.prompt_waited = max(outcome.prompt_waited, waited)
            elif slot.priority is Priority.BACKGROUND:
                outcome.background_waited = max(outcome.background_waited, waited)
            else:
                outcome.stream_waited = max(outcome.stream_waited, waited)
            if not sampled:
                slot.pending -= n
                continue
            outcome.tokens += 1
            if seq_id in decoding:
                outcome.itl_ms[slot.priority].append(1e3 * (now - request.last_token_s))
            else:
                decoding.add(seq_id)
                slot.pending = 1
                request.ttft_ms = 1e3 * (now - request.arrived_s)
            request.last_token_s, slot.due_s = now, now + request.target_s
            request.to_generate -= 1
            if not request.to_generate:
                request.done = True
                del held[seq_id]
                decoding.discard(seq_id)
                free.append(seq_id)
                policy.ended(request)
        if not chosen.streams and not chosen.shares:
            raise AssertionError("an empty tick, with something to do")
        ended, before = len(requests) - len(coming) - waiting - len(held), ended
        watch(ended - before)
    outcome.wall_s = now
    return outcome


def _fed(chosen: Plan) -> Iterator[tuple[int, int, bool]]:
    return itertools.chain(
        ((slot.seq_id, 1, True) for slot in chosen.streams),
        ((share.seq_id, share.n_tokens, share.ends) for share in chosen.shares),
    )


COLUMNS = (
    "device", "policy", "class", "requests", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "ttft_max_ms",
    "itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "itl_max_ms", "wall_s", "tokens_per_s", "prompt_tokens_per_s",
    "plan_p50_ms", "plan_p99_ms", "longest_prompt_wait_ticks",
)  # fmt: skip


def by_class(outcome: Outcome) -> Iterator[tuple[Priority, list[float], list[float]]]:
    for priority in Priority:
        ttft = [request.ttft_ms for request in outcome.requests if request.slot.priority is priority]
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
            outcome.policy, f"{outcome.ticks:,}", cell(outcome.wall_s), cell(outcome.tokens / outcome.wall_s, 0),
            cell(outcome.prompt_tokens / outcome.wall_s, 0), f"{outcome.most_streams:,}", f"{outcome.most_waiting:,}",
            f"{outcome.prompt_waited:,}", f"{outcome.stream_waited} / {outcome.background_waited}",
            *(cell(percentile(outcome.plan_ms, at), 3) for at in (50, 99)),
            cell(100 * sum(outcome.errors) / len(outcome.errors)) if outcome.errors else "-",
        ]
        for outcome in outcomes
    ]  # fmt: skip
    names = [
        "", "ticks", "wall s", "tok/s", "prompt tok/s", "streams at once", "waiting at once", "longest wait of a prompt, ticks",
        "of a stream / background", "plan() p50 ms", "p99", "tick error %",
    ]  # fmt: skip
    ours = next((outcome for outcome in outcomes if outcome.policy == Ours.name), None)
    bound = "" if ours is None else f"; bound of a prompt's wait: {ours.bound():,} ticks"
    title = f"## {device.name}: {device.parallel:,} sequences, batches of {device.n_batch:,}{bound}"
    return "\n\n".join([title, table(header, rows), table(names, whole)])


def csv_rows(device: Device, outcome: Outcome) -> Iterable[tuple[object, ...]]:
    for priority, ttft, itl in by_class(outcome):
        yield (
            device.name, outcome.policy, priority.name.lower(), len(ttft),
            *(_rounded(percentile(ttft, at)) for at in (50, 95, 99, 100)),
            *(_rounded(percentile(itl, at)) for at in (50, 95, 99, 100)),
            round(outcome.wall_s, 3), round(outcome.tokens / outcome.wall_s, 1),
            round(outcome.prompt_tokens / outcome.wall_s, 1),
            *(_rounded(percentile(outcome.plan_ms, at), 4) for at in (50, 99)), outcome.prompt_waited,
        )  # fmt: skip


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def plan_time_ms(n_streams: int, n_prompts: int, *, calls: int = 500) -> list[float]:
    """Of plan(), with so many ready, on a device that is known."""
    limits, cost, memory = Scheduling(), CostModel(), Memory()
    streams = [Slot(i, context=500, due_s=0.1, tenant=i % 4, priority=Priority(i % 2)) for i in range(n_streams)]
    prompts = [Slot(n_streams + i, 2000, context=100, tenant=i % 4, priority=Priority(i % 2)) for i in range(n_prompts)]
    took = []
    for _ in range(calls):
        began = time.thread_time()
        chosen = plan(streams, prompts, memory, now_s=0.0, cost=cost, capacity=2048, limits=limits)
        took.append(1e3 * (time.thread_time() - began))
        memory = chosen.memory
    return took


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--device",
    "names",
    multiple=True,
    type=click.Choice(list(DEVICES)),
    default=list(DEVICES),
    help="Simulated device; can be given again.",
)
@click.option("--requests", type=click.IntRange(1), help="Of each device.  [default: 400 on cpu, else 10000]")
@click.option(
    "--load",
    type=click.FloatRange(0, min_open=True),
    default=1.2,
    help="Arrivals, as a share of what the device can serve.",
)
@click.option(
    "--noise", type=click.FloatRange(0, 1), default=0.03, help="Standard deviation of a tick's time, as a share of it."
)
@click.option(
    "--target-tbt-ms",
    type=click.FloatRange(0, min_open=True),
    default=Scheduling().target_tbt_ms,
    help="Between tokens of a stream.",
)
@click.option("--rival/--no-rival", default=True, help="Also the policy that fills the batch.")
@click.option("--seed", type=int, default=1, help="Of arrivals, sizes and noise.")
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path), help="Write a row for each device, policy and class."
)
def main(
    names: Sequence[str],
    requests: int | None,
    load: float,
    noise: float,
    target_tbt_ms: float,
    rival: bool,
    seed: int,
    csv_file: Path | None,
) -> None:
    """Simulate the scheduler with thousands of streams, beside the policy that fills each batch."""
    click.echo("\n".join(machine()))
    click.echo(f"devices   simulated; load {load:g}, noise {noise:g}, target_tbt_ms {target_tbt_ms:g}, seed {seed}\n")
    limits = Scheduling(target_tbt_ms=target_tbt_ms)
    starved: list[str] = []
    rows: list[tuple[object, ...]] = []
    for name in names:
        device, outcomes = DEVICES[name], []
        for make in (Ours, Filling) if rival else (Ours,):
            these = arrivals(device, requests or REQUESTS[name], load, limits, seed)
            with click.progressbar(length=len(these), label=f"{name}, {make.name}", file=sys.stderr) as bar:
                outcome = simulate(device, make(device, limits), these, noise=noise, seed=seed, watch=bar.update)
            outcomes.append(outcome)
            rows += csv_rows(device, outcome)
        click.echo(report(device, outcomes) + "\n")
        starved += [f"{name}: {why}" for why in outcomes[0].starved()]
    click.echo("plan() alone, " + "; ".join(
        f"{n} streams and {m} prompts: p50 {cell(percentile(took, 50), 3)}, p99 {cell(percentile(took, 99), 3)} ms"
        for n, m in ((256, 0), (224, 32), (16, 2))
        for took in [plan_time_ms(n, m)]
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
