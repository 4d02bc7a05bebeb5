"""Measure what a constraint costs: the time between tokens with a JSON schema and without, and the first token of new schemas.

python benches/constrained.py --no-rival
python benches/constrained.py --model /tmp/125m.gguf --threads 1 --streams 8,32
python benches/constrained.py --model /tmp/7b.gguf --streams 32 -- --gpu-layers -1 --kv-unified off
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
from command import (
    SERVER,
    Place,
    bench,
    carry_out,
    csv_option,
    numbers,
    places,
    repeat_option,
    rival_option,
    show_rival,
)
from comparison import US, RunsFile, medians
from measure import WORDS, measure, warm_up
from pinning import Pins
from report import cell, table
from rigs import (
    Rig,
    ServerSettings,
    llama_server_rig,
    peers_option,
    room,
    uma_trio_flags,
    uma_trio_rig,
    without_speculation,
)
from throughput import decode_rate

from uma_trio.demo.load import Daemon, Transport, one_by_one
from uma_trio.demo.recording import Question, Stream, durations_ms, percentile

SCHEMAS: Final = {
    "strings": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "bounded": {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 1000},
}
"""They force few tokens, so that ticks with and without them compute the same.  Bounds of strings make masks expensive:
0.95 ms on average for 152,000 tokens, and 0.01 ms without them."""

PROMPT_WORDS: Final = 32


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    server_us: float | None = None
    """Processor time of all our processes for each token, in microseconds; for a machine that also does other things."""
    mask_wait_ms: float | None = None
    """Mean time that sampling waited for masks."""


NAMES: Final = [field.name for field in attrs.fields(Figures)]


async def run(rig: Rig, n_streams: int, tokens: int, schema: dict[str, Any] | None, pins: Pins | None) -> Figures:
    """One run: all streams together."""
    rng = random.Random(0)
    streams = [
        Stream(
            name=f"s{n}",
            questions=(
                Question(
                    text=" ".join(rng.choices(WORDS, k=PROMPT_WORDS)),
                    raw=True,
                    max_tokens=tokens,
                    ignore_eos=schema is None,
                    temperature=1.0,
                    seed=1,
                    json_schema=schema,
                ),
            ),
        )
        for n in range(n_streams)
    ]
    result = await measure(rig, streams, pins=pins)
    for line in result.unfinished():
        click.echo(f"WARNING: {line}", err=True)
    rate = decode_rate(result.tracks)
    if rate is None:
        raise click.ClickException("the streams never all decoded at the same time: use more --tokens")
    gaps = [gap for track in result.tracks for gap in track.gaps]
    ms = durations_ms(gaps)
    transport = rig.transport
    wait = (await transport.snapshot()).get("mask_wait_ms_avg") if isinstance(transport, Daemon) else None
    return Figures(
        tokens_per_s=rate,
        itl_p50_ms=statistics.median(ms),
        itl_p99_ms=percentile(ms, 99) or 0.0,
        server_us=None if result.cpu.server is None else 1e6 * result.cpu.server / result.n_tokens,
        mask_wait_ms=None if schema is None else wait,
    )


async def first_tokens(transport: Transport, sizes: Sequence[int]) -> list[list[str]]:
    """Time to first token with a schema that is new, with the same again, and without, by number of properties."""
    rows = []
    for size in sizes:
        names = [f"property_{size}_{n}" for n in range(size)]
        schema = {
            "type": "object",
            "properties": {name: {"type": ["string", "integer", "null"]} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        rows.append(
            [str(size), *[cell(await _ttft_ms(transport, properties), 1) for properties in (schema, schema, None)]]
        )
    return rows


async def _ttft_ms(transport: Transport, schema: dict[str, Any] | None) -> float | None:
    """From sending the request to its first token, compiling included."""
    question = Question(text="A record:", raw=True, max_tokens=4, json_schema=schema)
    [track] = await one_by_one([Stream(name="first token", questions=(question,))], transport)
    return track.answers[0].ttft_ms


@bench()
@click.option("--streams", "counts", default="1,8", help="Numbers of streams, separated by commas.")
@click.option("--tokens", type=click.IntRange(2), default=150, help="Tokens that each stream generates.")
@click.option("--schema", type=click.Choice([*SCHEMAS]), default="strings", help="What the streams generate.")
@click.option("--properties", default="5,50,200", help="Numbers of properties of new schemas.")
@repeat_option(3)
@places()
@rival_option()
@click.option("--rival-flags", default="", help="Flags of llama-server, such as -fa off.")
@peers_option()
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(counts: str, properties: str, csv_file: Path | None, **options: Any) -> None:
    """Measure the time between tokens with a JSON schema and without, next to llama-server.

    Both servers run at the same time, and one of them works.  SERVE_FLAGS after -- go to `uma-trio serve`.  Ratios are
    with / without.
    """
    place = Place.of(options)
    sizes = numbers(properties, "--properties")
    n_streams = numbers(counts, "--streams")
    tokens, repeat, schema = options["tokens"], options["repeat"], SCHEMAS[options["schema"]]
    serving = ServerSettings(
        model=place.model,
        threads=place.threads,
        parallel=max(n_streams),
        ctx=max(n_streams) * room(PROMPT_WORDS, tokens),
    )
    place.show()
    if options["rival"]:
        show_rival(options["peers"])
    click.echo(f"servers   {serving}\n")
    file = RunsFile(csv_file, ["server", "round", "streams", "constrained", *NAMES])

    async def work() -> None:
        async with contextlib.AsyncExitStack() as started:
            ours = await started.enter_async_context(uma_trio_rig([*uma_trio_flags(serving), *options["serve_flags"]]))
            rigs = {US: without_speculation(ours)}
            if options["rival"]:
                flags = shlex.split(options["rival_flags"])
                rigs[SERVER] = await started.enter_async_context(llama_server_rig(options["peers"], serving, flags))
            for rig in rigs.values():
                await warm_up(rig)
            rows = []
            for count in n_streams:
                runs: dict[tuple[str, bool], list[Figures]] = {}
                for number in range(repeat):
                    for server, constrained in itertools.product(rigs, (False, True) if number % 2 else (True, False)):
                        figures = await run(rigs[server], count, tokens, schema if constrained else None, place.pins)
                        runs.setdefault((server, constrained), []).append(figures)
                        file.add(server, number + 1, count, constrained, *attrs.astuple(figures))
                for server in rigs:
                    rows += rows_of(f"{count}, {server}", medians(runs[server, False]), medians(runs[server, True]))
            click.echo(table(["streams", "tok/s", "ITL p50 ms", "p99", "server us", "mask wait ms"], rows))
            for server, rig in rigs.items():
                click.echo(f"\ntime to first token of {server}, ms")
                click.echo(
                    table(["properties", "new schema", "again", "without"], await first_tokens(rig.transport, sizes))
                )
            assert isinstance(ours.transport, Daemon)
            click.echo(f"\nmasks that were late: {(await ours.transport.snapshot())['late_masks_total']}")

    carry_out(work)


def rows_of(name: str, without: Figures, with_schema: Figures) -> list[list[str]]:
    """Rows of both and of their ratio."""
    rows = [
        [f"{name}, {label}", *[cell(getattr(figures, field), 3) for field in NAMES]]
        for label, figures in (("without", without), ("with", with_schema))
    ]
    ratios = [getattr(with_schema, field) / getattr(without, field) for field in NAMES[:4]]
    return [*rows, [f"{name}, ratio", *[cell(ratio, 3) for ratio in ratios], ""]]


if __name__ == "__main__":
    main()
