"""Measure how well the daemon predicts when requests start and end, and how many deadlines it misjudges.

python benches/calibration.py --model /tmp/125m.gguf --threads 1 --requests 300

Parts with daemons, cores and seeds of their own may run at the same time; then all of them count together:

python benches/calibration.py --requests 250 --seed 1 --pin 0-2:3 --csv 1.csv &
python benches/calibration.py --requests 250 --seed 2 --pin 4-6:7 --csv 2.csv &
wait
python benches/calibration.py --join 1.csv --join 2.csv
"""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_type_hints

import attrs
import click
import numpy as np
import psutil
import trio
from command import FILE, Place, bench, carry_out, csv_option, places
from comparison import RunsFile
from pinning import pinned
from prompts import of_tokens
from report import cell, table
from rigs import ServerSettings, uma_trio_flags

from uma_trio.client import Forecast, ServerError, Token, open_client
from uma_trio.demo.recording import percentile
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

GOOD: Final = 0.2
"""A prediction is good that is off by at most this share of the true time."""

SAMPLE_S: Final = 0.1
BEFORE_S: Final = 5.0
"""Seconds before a forecast that tell how much CPU the engine gets."""
DEADLINES: Final = 60.0
"""The longest deadline divided by the shortest one."""
MIN_SHARE: Final = 0.05
"""Below this share the engine had little to do, which says nothing."""

RUNS, NEXT, FAR = "runs at once", "waits, place 1 to 4", "waits, place 5 and above"
PLACES: Final = (RUNS, NEXT, FAR)


@attrs.frozen(kw_only=True)
class Load:
    """The requests."""

    requests: int
    rate: float
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    ends_itself: bool
    deadline_s: float
    parallel: int
    seed: int

    def __str__(self) -> str:
        length = "up to" if self.ends_itself else "exactly"
        return (
            f"{self.requests} requests, {self.rate:g}/s; prompts of {self.prompt_tokens} tokens, answers of {length} "
            f"{self.tokens} tokens"
        )

    @property
    def ctx(self) -> int:
        return self.parallel * (-(-(max(self.prompt_tokens) + max(self.tokens) + 32) // 256) * 256)


@attrs.define
class EngineClock:
    """The CPU time of the engine over time.

    On a machine that has other work, a step takes longer than a moment before, which no forecast can know.  CPU time tells
    how much of an error that is.
    """

    samples: list[tuple[float, float]] = attrs.field(factory=list)
    """Time, and CPU seconds of the engine until then."""

    async def run(self, daemon: int) -> None:
        """Sample until cancelled."""
        engine = next(
            process for process in psutil.Process(daemon).children() if "engine" in " ".join(process.cmdline())
        )
        while True:
            times = engine.cpu_times()
            self.samples.append((trio.current_time(), times.user + times.system))
            await trio.sleep(SAMPLE_S)

    def steady_ms(self, at: float, ms: float) -> float:
        """How long what took ``ms`` from ``at`` on would have taken if the engine had got as much CPU as just before."""
        share = self._cpu_s(at - BEFORE_S, at) / BEFORE_S
        return 1e3 * self._cpu_s(at, at + ms / 1e3) / share if share > MIN_SHARE else ms

    def _cpu_s(self, since: float, until: float) -> float:
        times, used = zip(*self.samples, strict=True)
        return float(np.interp(until, times, used) - np.interp(since, times, used))


@attrs.frozen(kw_only=True)
class Outcome:
    """The first prediction for a request, and what was true.  Milliseconds from when the forecast came."""

    prompt_tokens: int
    tokens: int
    generated: int
    """Tokens that the answer had."""
    position: int
    start_ms: float
    end_ms: float
    true_start_ms: float
    true_end_ms: float
    steady_end_ms: float = 0.0
    """The true end if the engine had always got as much CPU as in the seconds before."""
    at: float
    """When the forecast came."""
    is_refused: bool
    """It had a deadline, was refused, and came again without one."""
    is_late: bool
    """It ended after its deadline."""

    @property
    def ratios(self) -> tuple[float, float]:
        """Predicted divided by true, of start and end."""
        return self.start_ms / max(self.true_start_ms, 1e-3), self.end_ms / max(self.true_end_ms, 1e-3)

    @property
    def classes(self) -> tuple[str, str]:
        """What it is counted under."""
        place = RUNS if not self.position else NEXT if self.position <= 4 else FAR
        return place, f"prompt {self.prompt_tokens}, answer {self.tokens}"


async def ask(
    path: Path, prompt: str, sizes: tuple[int, int], deadline_s: float, load: Load, outcomes: list[Outcome]
) -> None:
    """Send a request; keep its first forecast if it got one.  If its deadline is refused, send it again without."""
    fields = {"max_tokens": sizes[1], "ignore_eos": not load.ends_itself}
    fields |= {"forecast": True, "cache_prompt": False, "keep_alive": True}
    deadline = {} if math.isinf(deadline_s) else {"deadline_ms": max(1, round(1e3 * deadline_s))}
    forecast: Forecast | None = None
    at, first, n, is_refused, sent = 0.0, math.inf, 0, False, trio.current_time()
    async with open_client(path) as client:
        for given in (deadline, {}):
            try:
                async for event in client.generate(prompt=prompt, **fields, **given):
                    now = trio.current_time()
                    if isinstance(event, Forecast) and forecast is None:
                        forecast, at = event, now
                    elif isinstance(event, Token):
                        first, n = min(first, now), n + 1
                break
            except ServerError as error:
                if error.code != "E_LIMIT_DEADLINE":
                    raise
                if forecast is not None:  # it was let in, and had no token by its deadline
                    break
                is_refused = True
    ended = trio.current_time() if first < math.inf else math.inf
    if forecast is not None:
        outcome = Outcome(
            prompt_tokens=sizes[0],
            tokens=sizes[1],
            generated=n,
            position=forecast.queue_position,
            start_ms=forecast.start_ms,
            end_ms=forecast.end_ms,
            true_start_ms=1e3 * (first - at),
            true_end_ms=1e3 * (ended - at),
            at=at,
            is_refused=is_refused,
            is_late=ended - sent > deadline_s,
        )
        outcomes.append(outcome)


async def offer(path: Path, load: Load, tokenizer: Tokenizer) -> list[Outcome]:
    """Send the requests at random times."""
    rng = random.Random(load.seed)
    outcomes: list[Outcome] = []
    async with trio.open_nursery() as nursery:
        for _ in range(load.requests):
            sizes = rng.choice(load.prompt_tokens), rng.choice(load.tokens)
            prompt = of_tokens(tokenizer, rng, sizes[0])
            deadline_s = load.deadline_s * DEADLINES ** -rng.random() if load.deadline_s else math.inf
            nursery.start_soon(ask, path, prompt, sizes, deadline_s, load, outcomes)
            await trio.sleep(rng.expovariate(load.rate))
    return outcomes


def share(ratios: Sequence[float]) -> float:
    """Share of the predictions that are good."""
    return sum([abs(ratio - 1) <= GOOD for ratio in ratios]) / len(ratios)


def show(outcomes: Sequence[Outcome]) -> str:
    """A row for all, for each class, and the name of the worst one."""
    by_class: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for name in ("all", *outcome.classes):
            by_class[name].append(outcome)
    rows = []
    for name, of_class in sorted(by_class.items(), key=lambda item: (item[0] != "all", item[0] not in PLACES, item[0])):
        starts, ends = zip(*[outcome.ratios for outcome in of_class], strict=True)
        steady = [outcome.end_ms / max(outcome.steady_end_ms, 1e-3) for outcome in of_class]
        rows.append([
            name, str(len(of_class)), cell(100 * share(starts), 0), cell(percentile(starts, 50), 2),
            cell(100 * share(ends), 0), cell(percentile(ends, 10), 2), cell(percentile(ends, 50), 2),
            cell(percentile(ends, 90), 2), cell(100 * share(steady), 0), cell(percentile(steady, 50), 2),
        ])  # fmt: skip
    header = (
        "",
        "requests",
        "start good %",
        "ratio p50",
        "end good %",
        "ratio p10",
        "p50",
        "p90",
        "steady good %",
        "p50",
    )
    worst = min(by_class, key=lambda name: share([outcome.ratios[1] for outcome in by_class[name]]))
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    let_in = [outcome for outcome in outcomes if not outcome.is_refused]
    n_early, n_late = sum(not outcome.is_late for outcome in refused), sum(outcome.is_late for outcome in let_in)
    return (
        f"{table(header, rows)}\nworst by the end: {worst}\n"
        f"deadlines: {len(refused)} of {len(outcomes)} refused, of which {n_early} would have been met; {n_late} let in and missed"
    )


COLUMNS: Final = get_type_hints(Outcome)


def read(files: Sequence[Path]) -> list[Outcome]:
    """The outcomes of runs, as ``--csv`` has written them."""
    found = []
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = {
                    name: row[name] == "True" if kind is bool else kind(row[name]) for name, kind in COLUMNS.items()
                }
                found.append(Outcome(**values))
    return found


@bench()
@click.option("--requests", type=click.IntRange(1), default=300, help="How many requests to send.")
@click.option(
    "--rate", type=click.FloatRange(0.01), default=2.0, help="Requests a second; more than it serves: a queue."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), multiple=True, default=(30, 300, 1000), help="Sizes of prompts."
)
@click.option(
    "--tokens", type=click.IntRange(1), multiple=True, default=(20, 60, 200), help="The max_tokens of answers."
)
@click.option("--ends-itself", is_flag=True, help="Answers may end before max_tokens.")
@click.option(
    "--deadline-s", type=click.FloatRange(0), default=0.0, help="Longest deadline of a request; 0: requests have none."
)
@click.option("--parallel", type=click.IntRange(1), default=4, help="Sequences of the daemon.")
@click.option("--seed", type=int, default=0, help="Seed of sizes, words and times.")
@click.option("--join", type=FILE, multiple=True, help="Show what runs have written with --csv, and run nothing.")
@places()
@csv_option("a row for each request")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, join: Sequence[Path], serve_flags: Sequence[str], **options: Any) -> None:
    """Measure how well the daemon predicts when requests start and end.

    Requests of mixed sizes come at random times and ask for forecasts.  The first forecast of each counts.  SERVE_FLAGS
    after -- go to `uma-trio serve`.  With --deadline-s, deadlines are drawn from a 60th of it on; a request that is
    refused comes again at once without one, which tells whether it would have met it.

    \b
    good %   predictions that are off by at most 20 % of the true time
    ratio    predicted divided by true
    steady   the same if the engine had always got as much CPU as in the seconds before the forecast
    """
    if join:
        click.echo(show(read(join)))
        return
    place = Place.of(options)
    load = Load(**{field.name: options[field.name] for field in attrs.fields(Load)})
    place.show()
    clock = EngineClock()

    async def work() -> list[Outcome]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=load.parallel, ctx=load.ctx)
        click.echo(f"servers   {serving}\nload      {load}\n")
        with vocabulary(place.model) as tokenizer:
            flags = [*uma_trio_flags(serving), "--max-queue", str(load.requests), *serve_flags]
            async with temporary_daemon(flags) as daemon:
                with pinned(daemon.pid, place.pins):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(clock.run, daemon.pid)
                        await trio.sleep(SAMPLE_S)
                        outcomes = await offer(daemon.path, load, tokenizer)
                        nursery.cancel_scope.cancel()
        outcomes = [
            attrs.evolve(outcome, steady_end_ms=clock.steady_ms(outcome.at, outcome.true_end_ms))
            for outcome in outcomes
        ]
        file = RunsFile(csv_file, [*COLUMNS])
        for outcome in outcomes:
            file.add(*attrs.astuple(outcome))
        return outcomes

    outcomes = carry_out(work)
    click.echo(show(outcomes))
    click.echo(f"{len(outcomes)} of {load.requests} requests got a forecast before their first token")


if __name__ == "__main__":
    main()
