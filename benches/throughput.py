"""Measure the tokens per second of plain streams, next to llama-server and llama-batched-bench.

python benches/throughput.py
python benches/throughput.py --model /tmp/125m.gguf --threads 1 --streams 1,8,32 --repeat 3 --csv throughput.csv
python benches/throughput.py --no-rivals -- --flash-attn on
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
from command import PIN_HELP, carry_out
from comparison import US, RunsFile, medians
from machine import machine
from measure import Result, measure, stream, warm_up
from pinning import Pins, parse_pins
from report import cell, table
from rigs import (
    Protocol,
    RivalError,
    ServerSettings,
    llama_flags,
    llama_server_rig,
    peer,
    peers_option,
    room,
    run_peer,
    same_library,
    uma_trio_flags,
    uma_trio_rig,
)

from uma_trio.demo.recording import Track, durations_ms, percentile
from uma_trio.models.packaged import EMBEDDED
from uma_trio.processes.machine import default_threads

SERVER, BENCH = "llama-server", "llama-batched-bench"


@attrs.frozen(kw_only=True)
class Shape:
    """Streams that start together: their number, and words and tokens of each."""

    streams: int
    words: int
    tokens: int
    room: int | None = None
    """Tokens of context for each stream; ``None``: what any tokenizer needs."""

    def serving(self, model: Path, threads: int) -> ServerSettings:
        n_cells = self.room or room(self.words, self.tokens)
        return ServerSettings(model=model, threads=threads, parallel=self.streams, ctx=self.streams * n_cells)


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several; ``None`` if a program does not report it."""

    prompt_tokens: float
    """Mean of all streams."""
    wall_s: float
    tokens_per_s: float
    """Generated tokens, from the first request to the last token; includes prefill."""
    decode_tokens_per_s: float | None
    """While all streams decode."""
    ttft_p50_ms: float | None = None
    ttft_max_ms: float | None = None
    itl_p99_ms: float | None = None
    """All inter-token latencies; likewise ``itl_max_ms``."""
    itl_max_ms: float | None = None
    generator_us: float | None = None
    """Processor time of the load generator for each token."""
    server_us: float | None = None
    """Processor time of the server and its child processes for each token."""
    others_cpu: float | None = None
    """Share of one core."""

    @classmethod
    def of(cls, result: Result) -> Figures:
        answers = [answer for track in result.tracks for answer in track.answers]
        cpu = result.cpu
        ttft = [answer.ttft_ms for answer in answers if answer.ttft_ms is not None]
        gaps = durations_ms(gap for answer in answers for gap in answer.gaps)
        return cls(
            prompt_tokens=statistics.fmean(answer.prompt_tokens for answer in answers),
            wall_s=result.wall_s,
            tokens_per_s=result.tokens_per_s,
            decode_tokens_per_s=decode_rate(result.tracks),
            ttft_p50_ms=percentile(ttft, 50),
            ttft_max_ms=max(ttft, default=None),
            itl_p99_ms=percentile(gaps, 99),
            itl_max_ms=max(gaps, default=None),
            generator_us=1e6 * cpu.generator / result.n_tokens,
            server_us=None if cpu.server is None else 1e6 * cpu.server / result.n_tokens,
            others_cpu=cpu.others / result.wall_s,
        )


NAMES = [field.name for field in attrs.fields(Figures)]


def decode_rate(tracks: Sequence[Track]) -> float | None:
    """Tokens per second while all of ``tracks`` decode: after the first token of all, before the last token of any.

    Several tokens may arrive in one event; they count at its time.

    Returns:
        ``None`` if the tracks never decode together.
    """
    answers = [answer for track in tracks for answer in track.answers]
    if not all(answer.token_s for answer in answers):
        return None
    start, end = max(answer.token_s[0] for answer in answers), min(answer.token_s[-1] for answer in answers)
    if start >= end:
        return None
    tokens = sum(
        sum(start < at <= end for at in answer.token_s) * answer.completion_tokens / len(answer.token_s)
        for answer in answers
    )
    return tokens / (end - start)


@attrs.frozen(kw_only=True)
class Bench:
    """Settings that all shapes and models have in common."""

    threads: int
    pins: Pins | None
    peers: Path | None
    """Folder of the rivals' programs; ``None``: no rivals."""
    rival_flags: Sequence[str]
    """Each is one more setting of llama-server and llama-batched-bench."""
    serve_flags: Sequence[str]
    protocols: Sequence[Protocol]
    """Each is one more row of uma-trio."""
    seed: int

    async def runs(self, model: Path, shape: Shape) -> AsyncIterator[tuple[str, Figures]]:
        """Run each program once."""
        serving = shape.serving(model, self.threads)
        flags = [*uma_trio_flags(serving), *self.serve_flags]
        first, *others = self.protocols
        ours = await self._serve(partial(uma_trio_rig, flags, protocol=first), shape)
        yield US, ours
        for protocol in others:
            yield f"{US}, {protocol}", await self._serve(partial(uma_trio_rig, flags, protocol=protocol), shape)
        if self.peers is None:
            return
        for text in self.rival_flags:
            flags = shlex.split(text)
            yield (
                f"{SERVER} {text}".strip(),
                await self._serve(partial(llama_server_rig, self.peers, serving, flags), shape),
            )
            figures = await self._batched_bench(self.peers, serving, shape, round(ours.prompt_tokens), flags)
            yield f"{BENCH} {text}".strip(), figures

    async def _serve(self, rig: Any, shape: Shape) -> Figures:
        rng = random.Random(self.seed)
        streams = [stream(rng, f"s{n}", shape.words, shape.tokens) for n in range(1, shape.streams + 1)]
        async with rig() as started:
            await warm_up(started)
            result = await measure(started, streams, pins=self.pins)
        for line in result.unfinished():
            click.echo(f"WARNING: {line}", err=True)
        return Figures.of(result)

    async def _batched_bench(
        self, peers: Path, serving: ServerSettings, shape: Shape, prompt_tokens: int, flags: Sequence[str]
    ) -> Figures:
        """Run llama-batched-bench, which has no server and no sampling: the limit of the library for this shape."""
        arguments = [
            *llama_flags(serving), "-npp", str(prompt_tokens), "-ntg", str(shape.tokens), "-npl", str(shape.streams),
            "--output-format", "jsonl", *flags,
        ]  # fmt: skip
        output = await run_peer(peer(peers, BENCH), arguments, None if self.pins is None else self.pins.server)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise RivalError(
                f"{BENCH} {' '.join(arguments)} measured nothing: {output[-1000:] or 'it printed nothing'}"
            )
        line = lines[0]
        return Figures(
            prompt_tokens=line["pp"],
            wall_s=line["t"],
            tokens_per_s=line["pl"] * line["tg"] / line["t"],
            decode_tokens_per_s=line["speed_tg"],
        )


def show(measured: dict[Shape, dict[str, Figures]]) -> str:
    """A row for each program at each number of streams."""
    header = (
        "program", "streams", "prompt tok", "decode tok/s", "ours / theirs", "tok/s", "ours / theirs", "TTFT p50 ms", "max",
        "ITL p99 ms", "max", "us a token", "server us", "others cpu",
    )  # fmt: skip
    lines = []
    for shape, by_program in measured.items():
        ours = by_program[US]
        for program, f in by_program.items():
            lines.append([
                program, str(shape.streams), cell(f.prompt_tokens, 0),
                cell(f.decode_tokens_per_s), _times(ours.decode_tokens_per_s, f.decode_tokens_per_s),
                cell(f.tokens_per_s), _times(ours.tokens_per_s, f.tokens_per_s),
                cell(f.ttft_p50_ms), cell(f.ttft_max_ms), cell(f.itl_p99_ms), cell(f.itl_max_ms),
                cell(f.generator_us, 0), cell(f.server_us, 0), "-" if f.others_cpu is None else f"{f.others_cpu:.0%}",
            ])  # fmt: skip
    return table(header, lines)


def _times(ours: float | None, theirs: float | None) -> str:
    return cell(ours / theirs if ours and theirs else None, 2)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--streams", "counts", default="1,8,32", help="Numbers of streams, separated by commas.")
@click.option("--tokens", type=click.IntRange(2), default=200, help="Tokens that each stream generates.")
@click.option("--prompt-words", type=click.IntRange(1), default=64, help="Words of each prompt.")
@click.option("--room", type=click.IntRange(64), help="Tokens of context for each stream.  [default: what its words need with any tokenizer]")  # fmt: skip
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@click.option("--model", "models", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), default=[EMBEDDED], show_default=False, help="GGUF file to serve; repeatable.  [default: the embedded model]")  # fmt: skip
@click.option("--threads", envvar="UMA_THREADS", type=click.IntRange(1), help="Compute threads of every program.  [default: all physical cores but one]")  # fmt: skip
@click.option("--pin", "pin_text", default="auto", help=PIN_HELP)  # fmt: skip
@click.option(
    "--protocol", "protocols", multiple=True, type=click.Choice(["json", "cbor", "http"]), default=["json"],
    help="How uma-trio is asked: over its socket, in one of two encodings, or over HTTP; repeatable.",
)  # fmt: skip
@click.option("--rivals/--no-rivals", default=True, help="Compare with llama-server and llama-batched-bench.")
@click.option(
    "--rival-flags", multiple=True, default=[""], help="Flags of both rivals; repeatable, for one more setting each."
)
@peers_option()
@click.option("--repeat", type=click.IntRange(1), default=1, help="Runs of each, alternating.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a row for each run.")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(counts: str, models: Sequence[Path], repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Measure the throughput of plain streams.

    All streams start together, with different prompts, and generate exactly --tokens each, greedily. SERVE_FLAGS after
    -- go to `uma-trio serve`. All programs get the same model, threads, sequences and context, and are started for
    each run. llama-batched-bench runs the same shape without a server. The table has the medians of --repeat runs and
    the ratios of ours to theirs; docs/BENCHMARKS.md explains it.
    """
    try:
        shapes = [
            Shape(streams=int(n), words=options["prompt_words"], tokens=options["tokens"], room=options["room"])
            for n in counts.split(",")
        ]
        if min(shape.streams for shape in shapes) < 1:
            raise ValueError
    except ValueError:
        raise click.BadParameter("expected numbers above 0, separated by commas", param_hint="--streams") from None
    threads = options["threads"] or default_threads()
    try:
        pins = parse_pins(options["pin_text"], threads)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--pin") from None
    bench = Bench(
        threads=threads,
        pins=pins,
        peers=options["peers"] if options["rivals"] else None,
        rival_flags=options["rival_flags"],
        serve_flags=options["serve_flags"],
        protocols=options["protocols"],
        seed=options["seed"],
    )
    for line in [*machine(), f"pin       {pins or 'none'}"]:
        click.echo(line)
    file = RunsFile(csv_file, ["run", "model", "streams", "tokens", "program", *NAMES])

    async def work() -> None:
        if bench.peers is not None:
            alike = (
                "with the library files of uma-trio"
                if same_library(bench.peers)
                else "with ANOTHER BUILD of the library than uma-trio"
            )
            for name in (SERVER, BENCH):
                peer(bench.peers, name)
            click.echo(f"rivals    {SERVER}, {BENCH} in {bench.peers}, {alike}")
        for model in models:
            measured = {shape: await repeated(model, shape) for shape in shapes}
            click.echo(
                f"\n## {model.name}, {model.stat().st_size / 2**20:.0f} MiB, threads {threads}, {options['tokens']} tokens in each stream"
                f"\n\n{show(measured)}"
            )

    async def repeated(model: Path, shape: Shape) -> dict[str, Figures]:
        runs: dict[str, list[Figures]] = {}
        for turn in range(1, repeat + 1):
            async for program, figures in bench.runs(model, shape):
                runs.setdefault(program, []).append(figures)
                file.add(turn, model.name, shape.streams, shape.tokens, program, *attrs.astuple(figures))
                click.echo(
                    f"run {turn}  {model.name}, {shape.streams:>3} streams, {program:<28} "
                    f"decode {cell(figures.decode_tokens_per_s)}, in all {cell(figures.tokens_per_s)} tok/s"
                )
        return {program: medians(of_program) for program, of_program in runs.items()}

    carry_out(work)


if __name__ == "__main__":
    main()
