"""Measure ticks of streams with different LoRA adapters next to ticks of as many plain streams, on the same server.

    python benches/adapters.py
    python benches/adapters.py --model /tmp/125m.gguf --rank 16 --sets 1,2,4
    python benches/adapters.py --model /tmp/7b.gguf -- --gpu-layers -1

The adapters are written before, with random matrices (make_adapter.py).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import click
from command import Place, bench, carry_out, csv_option, numbers, places, repeat_option
from comparison import RunsFile
from make_adapter import TARGETS, make_adapter
from measure import WORDS
from report import cell, table
from rigs import ServerSettings, room, uma_trio_flags

from uma_trio.client import Client, Token, open_client
from uma_trio.demo.recording import percentile
from uma_trio.demo.temporary_daemon import temporary_daemon

PROMPT_WORDS: Final = 16
PLAIN: Final = 0
"""Sets of adapters of the streams that have none."""


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    tick_ms: float
    """Median time between two tokens of a stream while all streams decode."""
    p99_ms: float
    calls_per_tick: float


NAMES: Final = [field.name for field in attrs.fields(Figures)]


async def run(path: Path, n_streams: int, n_sets: int, tokens: int) -> Figures:
    """One run: all streams together, evenly divided between ``n_sets`` adapters; 0: none has any."""
    rng = random.Random(0)
    times: list[list[float]] = [[] for _ in range(n_streams)]

    async def stream(number: int, prompt: str) -> None:
        adapters = [{"name": f"a{number % n_sets}"}] if n_sets else []
        fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "speculate": False, "cache_prompt": False}
        async with open_client(path) as client:
            async for event in client.generate(prompt=prompt, adapters=adapters, **fields):
                if isinstance(event, Token):
                    times[number].append(time.perf_counter())

    async with snapshots(path) as counted, anyio.create_task_group() as group:
        for number in range(n_streams):
            group.start_soon(stream, number, " ".join(rng.choices(WORDS, k=PROMPT_WORDS)))
    began, ended = max(stream_times[0] for stream_times in times), min(stream_times[-1] for stream_times in times)
    gaps = [
        1e3 * (after - before)
        for stream_times in times
        for before, after in itertools.pairwise(stream_times)
        if before >= began and after <= ended
    ]
    if len(gaps) < 10 * n_streams:
        raise click.ClickException("the streams hardly ever all decoded at the same time: use more --tokens")
    before, after = counted
    ticks = after["ticks_total"] - before["ticks_total"]
    return Figures(
        tick_ms=statistics.median(gaps),
        p99_ms=percentile(gaps, 99) or 0.0,
        calls_per_tick=(after["decode_calls_total"] - before["decode_calls_total"]) / ticks,
    )


@contextlib.asynccontextmanager
async def snapshots(path: Path) -> AsyncIterator[list[Any]]:
    """The metrics before and after the block."""
    snapshots_taken: list[Any] = []

    async def add() -> None:
        async with open_client(path) as client:
            assert isinstance(client, Client)
            snapshots_taken.append(await client.metrics())

    await add()
    yield snapshots_taken
    await add()


@bench()
@click.option("--streams", type=click.IntRange(2, 256), default=16, help="Streams in all.")
@click.option("--sets", "sets_text", default="1,2,4", help="Numbers of adapters, separated by commas.")
@click.option("--tokens", type=click.IntRange(16), default=100, help="Tokens that each stream generates.")
@click.option("--rank", type=click.IntRange(1, 4096), default=8, help="Rank of the adapters.")
@click.option("--targets", default=",".join(TARGETS), help="Matrices that the adapters change, separated by commas.")
@repeat_option(3)
@places()
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(sets_text: str, targets: str, csv_file: Path | None, **options: Any) -> None:
    """Measure ticks of streams with several LoRA adapters, next to ticks of as many plain streams.

    SERVE_FLAGS after -- go to `uma-trio serve`.  Ratios are with adapters / plain.
    """
    place = Place.of(options)
    n_streams, tokens, sets = options["streams"], options["tokens"], [PLAIN, *numbers(sets_text, "--sets")]
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=n_streams, ctx=n_streams * room(PROMPT_WORDS, tokens)
    )
    place.show()
    click.echo(f"server    {serving}")
    click.echo(f"adapters  rank {options['rank']}, {targets}\n")
    file = RunsFile(csv_file, ["round", "sets", *NAMES])

    async def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            flags = []
            for number in range(max(sets)):
                path = Path(folder, f"a{number}.gguf")
                make_adapter(path, place.model, rank=options["rank"], seed=number, targets=targets.split(","))
                flags.append(f"--adapter=a{number}={path}")
            async with temporary_daemon([*uma_trio_flags(serving), *flags, *options["serve_flags"]]) as daemon:
                for n_sets in sets:
                    await run(daemon.path, n_streams, n_sets, tokens)  # warms up: caches, and what ticks cost
                runs: dict[int, list[Figures]] = {n_sets: [] for n_sets in sets}
                for number in range(options["repeat"]):
                    for n_sets in sets if number % 2 else reversed(sets):
                        runs[n_sets].append(figures := await run(daemon.path, n_streams, n_sets, tokens))
                        file.add(number + 1, n_sets, *attrs.astuple(figures))
        click.echo(show(runs, n_streams))

    carry_out(work)


def show(runs: dict[int, list[Figures]], n_streams: int) -> str:
    """The medians of all runs, and their ratios."""

    def median(n_sets: int, name: str) -> float:
        return statistics.median([getattr(figures, name) for figures in runs[n_sets]])

    def row(n_sets: int) -> Sequence[str]:
        label = f"{n_streams} plain" if n_sets == PLAIN else f"{n_sets} adapters x {n_streams / n_sets:g}"
        ratio = median(n_sets, "tick_ms") / median(PLAIN, "tick_ms")
        return [label, *[cell(median(n_sets, name), 3) for name in NAMES], cell(ratio, 3)]

    columns = ["streams", "tick ms", "p99 ms", "calls", "ratio"]
    return table(columns, [row(n_sets) for n_sets in runs])


if __name__ == "__main__":
    main()
