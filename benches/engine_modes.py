"""Compare an engine in a process of its own with an engine in a thread of the daemon, or some flags with none.

python benches/engine_modes.py
python benches/engine_modes.py --price-of --reproducible --streams 1,8,32 --rounds 5
python benches/engine_modes.py --model /tmp/125m.gguf --streams 1,8,32 --rounds 5 --csv modes.csv
python benches/engine_modes.py --model /tmp/7b.gguf --gpu-layers -1 --streams 64 -- --ctx 65536
python benches/engine_modes.py --requests 12 --prompt-words 12 --tokens 100
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, numbers, places
from comparison import RunsFile, medians
from measure import Result, measure, stream, warm_up
from report import cell, table
from rigs import ServerSettings, room, uma_trio_flags, uma_trio_rig, without_speculation
from throughput import decode_rate

from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Stream, durations_ms, percentile

Mode = str
"""The name of one of two ways to serve."""

ENGINES: Final = {"process": ["--engine", "process"], "thread": ["--engine", "thread"]}
"""Flags of each mode."""


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several; ``None`` where the daemon reports none."""

    ready_s: float
    """From the start of the daemon until it accepts connections."""
    tokens_per_s: float
    """From the first request to the last token, prefill included."""
    decode_tokens_per_s: float | None
    """While all streams decode."""
    ttft_p50_ms: float | None
    ttft_max_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    host_gap_p50_ms: float | None
    """Time between two steps in which the device waits for the host, by the daemon's own clock."""
    host_gap_p95_ms: float | None
    server_cpu: float | None
    """Processor time of the daemon and its engine, as a share of one core."""
    others_cpu: float

    @classmethod
    def of(cls, ready_s: float, result: Result, snapshot: dict[str, Any]) -> Figures:
        answers = [answer for track in result.tracks for answer in track.answers]
        ttft_ms = [answer.ttft_ms for answer in answers if answer.ttft_ms is not None]
        itl_ms = durations_ms(gap for track in result.tracks for gap in track.gaps)
        cpu = result.cpu
        return cls(
            ready_s=ready_s,
            tokens_per_s=result.tokens_per_s,
            decode_tokens_per_s=decode_rate(result.tracks),
            ttft_p50_ms=percentile(ttft_ms, 50),
            ttft_max_ms=max(ttft_ms, default=None),
            itl_p50_ms=percentile(itl_ms, 50),
            itl_p99_ms=percentile(itl_ms, 99),
            itl_max_ms=max(itl_ms, default=None),
            host_gap_p50_ms=snapshot.get("host_gap_p50_ms"),
            host_gap_p95_ms=snapshot.get("host_gap_p95_ms"),
            server_cpu=None if cpu.server is None else cpu.server / result.wall_s,
            others_cpu=cpu.others / result.wall_s,
        )


NAMES: Final = [field.name for field in attrs.fields(Figures)]

Measured = dict[int, dict[Mode, Figures]]
"""Number of streams -> mode -> figures."""


@attrs.frozen(kw_only=True)
class Test:
    """The load, and how each daemon is started."""

    place: Place
    words: int
    tokens: int
    requests: int
    seed: int
    flags: Sequence[str]
    modes: dict[Mode, list[str]]
    """Flags of each, the second one being the base of ratios."""

    def streams(self, count: int) -> list[Stream]:
        """With several requests each, their lengths vary, so that some begin and end all the time."""
        rng = random.Random(self.seed)
        if self.requests == 1:
            return [stream(rng, f"s{n}", self.words, self.tokens) for n in range(1, count + 1)]
        made = []
        for n in range(1, count + 1):
            singles = [stream(rng, "", varied(rng, self.words), varied(rng, self.tokens)) for _ in range(self.requests)]
            made.append(Stream(name=f"s{n}", questions=tuple(one.questions[0] for one in singles)))
        return made

    async def run(self, mode: Mode, n_streams: int) -> Figures:
        """Start a daemon and measure it once."""
        n_cells = room(self.words, self.tokens) * (1 if self.requests == 1 else 2)
        serving = ServerSettings(
            model=self.place.model, threads=self.place.threads, parallel=n_streams, ctx=n_streams * n_cells
        )
        streams = self.streams(n_streams)
        began = trio.current_time()
        async with uma_trio_rig([*uma_trio_flags(serving), *self.flags, *self.modes[mode]]) as started:
            ready_s = trio.current_time() - began
            rig = without_speculation(started)
            await warm_up(rig)
            result = await measure(rig, streams, pins=self.place.pins)
            assert isinstance(rig.transport, Daemon)
            snapshot = await rig.transport.snapshot()
        for line in result.unfinished():
            click.echo(f"WARNING: {line}", err=True)
        return Figures.of(ready_s, result, snapshot)


def varied(rng: random.Random, mean: int) -> int:
    """A number from half of ``mean`` to one and a half of it."""
    return rng.randint(-(-mean // 2), 3 * mean // 2)


async def compare(test: Test, counts: Sequence[int], rounds: int, file: RunsFile) -> Measured:
    """Measure each mode ``rounds`` times for each number of streams, alternating."""
    for mode in test.modes:
        await test.run(mode, max(counts))  # not counted: measures and stores the layout and the costs of this model
    measured: Measured = {}
    for n_streams in counts:
        runs: dict[Mode, list[Figures]] = {mode: [] for mode in test.modes}
        for number in range(1, rounds + 1):
            for mode in test.modes if number % 2 else reversed(test.modes):
                figures = await test.run(mode, n_streams)
                runs[mode].append(figures)
                file.add(number, mode, n_streams, *attrs.astuple(figures))
                click.echo(
                    f"round {number}  {name_of(n_streams)}, {mode}: {figures.tokens_per_s:.1f} tok/s, "
                    f"ITL p99 {cell(figures.itl_p99_ms)} ms, host gap p50 {cell(figures.host_gap_p50_ms, 3)} ms"
                )
        measured[n_streams] = {mode: medians(figures) for mode, figures in runs.items()}
    return measured


def show(measured: Measured) -> str:
    """A row for each mode and a row of ratios, for each number of streams."""
    columns = {
        "ready_s": ("ready s", 2),
        "tokens_per_s": ("tok/s", 1),
        "decode_tokens_per_s": ("decode tok/s", 1),
        "ttft_p50_ms": ("TTFT p50 ms", 1),
        "ttft_max_ms": ("max", 1),
        "itl_p50_ms": ("ITL p50 ms", 2),
        "itl_p99_ms": ("p99", 2),
        "itl_max_ms": ("max", 1),
        "host_gap_p50_ms": ("host gap p50 ms", 3),
        "host_gap_p95_ms": ("p95", 3),
        "server_cpu": ("server cpu", 2),
        "others_cpu": ("others cpu", 2),
    }
    lines = []
    for n_streams, by_mode in measured.items():
        for mode, figures in by_mode.items():
            values = [cell(getattr(figures, name), digits) for name, (_, digits) in columns.items()]
            lines.append([f"{name_of(n_streams)}, {mode}", *values])
        (mode, ours), (other, base) = by_mode.items()
        ratios = [_ratio(getattr(ours, name), getattr(base, name)) for name in columns if name != "others_cpu"]
        lines.append([f"{name_of(n_streams)}, {mode} / {other}", *ratios, ""])
    return table(["", *[title for title, _ in columns.values()]], lines)


def name_of(n_streams: int) -> str:
    return f"{n_streams} stream{'s' * (n_streams > 1)}"


def _ratio(value: float | None, base: float | None) -> str:
    return cell(value / base if value is not None and base else None, 3)


@bench()
@click.option("--streams", "counts", default="1,8", help="Numbers of streams, separated by commas.")
@click.option("--tokens", type=click.IntRange(2), default=200, help="Tokens that each stream generates.")
@click.option("--prompt-words", type=click.IntRange(1), default=64, help="Words of each prompt.")
@click.option("--requests", type=click.IntRange(1), default=1, help="Requests of each stream, one after another; several vary in length.")  # fmt: skip
@click.option("--price-of", help="Compare a daemon with these flags of `uma-trio serve` with one without.  [default: compare engines]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3, help="Runs of each mode.")
@click.option("--seed", type=int, default=0, help="Seed of the prompts.")
@click.option("--gpu-layers", type=click.IntRange(-1), help="Layers on the GPU; -1 for all.  [default: as serve]")
@places()
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(counts: str, price_of: str | None, rounds: int, csv_file: Path | None, **options: Any) -> None:
    """Compare --engine process with --engine thread, or with --price-of some flags with none.

    Each run starts a daemon in one of the two modes, alternating; the streams start together, with different prompts,
    and generate exactly --tokens each, without speculation.  SERVE_FLAGS after -- go to `uma-trio serve`.  The table has
    the medians of --rounds runs, and for each number of streams the ratio of the first mode to the second.
    """
    place = Place.of(options)
    n_streams = numbers(counts, "--streams")
    flags = list(options["serve_flags"])
    if options["gpu_layers"] is not None:
        flags += ["--gpu-layers", str(options["gpu_layers"])]
    test = Test(
        place=place,
        words=options["prompt_words"],
        tokens=options["tokens"],
        requests=options["requests"],
        seed=options["seed"],
        flags=flags,
        modes=ENGINES if price_of is None else {price_of: shlex.split(price_of), "without": []},
    )
    place.show()
    click.echo(f"model     {place.model.name}, {place.threads} compute threads {' '.join(flags)}".rstrip())
    click.echo(
        f"load      {test.words} words + {test.tokens} tokens in each of {test.requests} requests of a stream, seed {test.seed}\n"
    )
    file = RunsFile(csv_file, ["round", "mode", "streams", *NAMES])

    async def work() -> Measured:
        return await compare(test, n_streams, rounds, file)

    click.echo(f"\n{show(carry_out(work))}")


if __name__ == "__main__":
    main()
