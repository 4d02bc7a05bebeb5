"""Measure two models under load at the same time, next to each of them alone with half the compute threads.

    python benches/two_models.py
    python benches/two_models.py --model /tmp/1b.gguf --other /tmp/3b.gguf --streams 4
    python benches/two_models.py --pin auto -- --engine thread

In the middle of each run with both, one model is reloaded.  Every answer must be complete.
"""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import click
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import RunsFile
from measure import WORDS
from report import cell, table
from rigs import ServerSettings, room, uma_trio_flags

from uma_trio.client import ClientError, Token, open_client
from uma_trio.demo.recording import percentile
from uma_trio.demo.temporary_daemon import temporary_daemon

PROMPT_WORDS: Final = 16
NAMES: Final = ("first", "second")


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one model in one run, or the medians of several."""

    inter_token_ms: float
    """Median time between two tokens of a stream."""
    p99_ms: float
    tokens_per_s: float


FIGURES: Final = [field.name for field in attrs.fields(Figures)]


@attrs.define
class Load:
    """The streams of one model."""

    model: str
    n_streams: int
    tokens: int
    seconds: float
    times: list[list[float]] = attrs.field(factory=list)
    lost: int = 0
    """Answers that ended early, or with an error."""

    async def run(self, path: Path) -> None:
        """Run the streams: each asks again when its answer has ended, until the time is over."""
        until = time.perf_counter() + self.seconds
        async with anyio.create_task_group() as group:
            for number in range(self.n_streams):
                group.start_soon(self._stream, path, random.Random(number), until)

    async def _stream(self, path: Path, rng: random.Random, until: float) -> None:
        fields = {"max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, "speculate": False}
        while time.perf_counter() < until:
            times: list[float] = []
            prompt = " ".join(rng.choices(WORDS, k=PROMPT_WORDS))
            try:
                async with open_client(path) as client:
                    async for event in client.generate(model=self.model, prompt=prompt, cache_prompt=False, **fields):
                        if isinstance(event, Token):
                            times.append(time.perf_counter())
            except ClientError as error:
                click.echo(f"lost an answer of {self.model}: {error}", err=True)
            self.lost += len(times) != self.tokens
            self.times.append(times)

    def figures(self) -> Figures:
        """What the streams have seen."""
        gaps = [
            1e3 * (after - before) for stream_times in self.times for before, after in itertools.pairwise(stream_times)
        ]
        n_tokens = sum(map(len, self.times))
        ends = [stream_times[-1] for stream_times in self.times if stream_times]
        began = min(stream_times[0] for stream_times in self.times if stream_times)
        return Figures(
            inter_token_ms=statistics.median(gaps),
            p99_ms=percentile(gaps, 99) or 0.0,
            tokens_per_s=n_tokens / (max(ends) - began),
        )


@bench()
@click.option(
    "--other", type=click.Path(exists=True, path_type=Path), help="Second model.  [default: a copy of --model]"
)
@click.option("--streams", type=click.IntRange(1, 128), default=4, help="Streams of each model.")
@click.option("--tokens", type=click.IntRange(16), default=100, help="Tokens of an answer.")
@click.option("--seconds", type=click.FloatRange(1), default=10.0, help="Duration of a run.")
@repeat_option(3)
@places()
@csv_option("a row for each model of each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(other: Path | None, csv_file: Path | None, **options: Any) -> None:
    """Measure two models under load at the same time, next to each of them alone with half the compute threads.

    SERVE_FLAGS after -- go to `uma-trio serve`.  Ratios are both / alone; p99 within 1.2 is the aim.
    """
    place = Place.of(options)
    n_streams, tokens, seconds = options["streams"], options["tokens"], options["seconds"]
    half = max(1, place.threads // 2)
    place.show()
    file = RunsFile(csv_file, ["round", "load", "model", *FIGURES])
    runs: dict[tuple[str, str], list[Figures]] = {}
    lost: list[int] = []

    async def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = {}
            for name, path in zip(NAMES, (place.model, other or place.model), strict=True):
                files[name] = Path(folder, f"{name}.gguf")
                shutil.copyfile(path, files[name])

            def flags(threads: int, *names: str) -> list[str]:
                all_flags = []
                for name in names:
                    serving = ServerSettings(
                        model=files[name],
                        threads=threads,
                        parallel=n_streams,
                        ctx=n_streams * room(PROMPT_WORDS, tokens),
                    )
                    all_flags += uma_trio_flags(serving)[: None if name == names[0] else 2]
                return [*all_flags, *options["serve_flags"]]

            def loads(*names: str, s: float = seconds) -> list[Load]:
                return [Load(name, n_streams, tokens, s) for name in names]

            for number in range(options["repeat"]):
                for name in NAMES:
                    async with temporary_daemon(flags(half, name)) as daemon:
                        await run(daemon.path, loads(name, s=seconds / 4))  # warms up
                        note(number, "alone", await run(daemon.path, loads(name)))
                async with temporary_daemon(flags(place.threads, *NAMES)) as daemon:
                    await run(daemon.path, loads(*NAMES, s=seconds / 4))
                    note(number, "both", await run(daemon.path, loads(*NAMES)))
                    reloaded = await run(daemon.path, loads(*NAMES), reloading=NAMES[1])
                    note(number, "both, one reloaded", reloaded)
                    lost.append(sum(load.lost for load in reloaded))

    def note(number: int, label: str, measured: list[Load]) -> None:
        for load in measured:
            figures = load.figures()
            runs.setdefault((label, load.model), []).append(figures)
            file.add(number + 1, label, load.model, *attrs.astuple(figures))

    carry_out(work)
    click.echo(show(runs, half, place.threads))
    click.echo(f"\nanswers lost in reloads: {sum(lost)}")


async def run(path: Path, loads: list[Load], reloading: str | None = None) -> list[Load]:
    """Run all loads together.

    Args:
        reloading: a model to reload in the middle.
    """
    async with anyio.create_task_group() as group:
        for load in loads:
            group.start_soon(load.run, path)
        if reloading is not None:
            await anyio.sleep(loads[0].seconds / 2)
            async with open_client(path) as client:
                await client.manage_model("reload", reloading)
    return loads


def show(runs: dict[tuple[str, str], list[Figures]], half: int, threads: int) -> str:
    """The medians of all runs, and the ratios of p99."""

    def median(key: tuple[str, str], name: str) -> float:
        return statistics.median([getattr(figures, name) for figures in runs[key]])

    rows = []
    for label, model in runs:
        key = (label, model)
        shown = f"{label}, {half} threads" if label == "alone" else f"{label}, {threads} threads"
        ratio = median(key, "p99_ms") / median(("alone", model), "p99_ms")
        rows.append([model, shown, *[cell(median(key, name), 3) for name in FIGURES], cell(ratio, 3)])
    return table(["model", "load", "token ms", "p99 ms", "tokens/s", "p99 ratio"], rows)


if __name__ == "__main__":
    main()
