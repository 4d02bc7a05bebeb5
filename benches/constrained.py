"""Measure what a constraint costs: the time between tokens with a JSON schema and without, and the first token of new schemas.

python benches/constrained.py
python benches/constrained.py --model /tmp/125m.gguf --threads 1 --streams 8,32
python benches/constrained.py --model /tmp/7b.gguf --streams 32 -- --gpu-layers -1 --kv-unified off
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, numbers, places, repeat_option
from comparison import RunsFile, medians
from measure import WORDS, warm_up
from report import cell, table
from rigs import ServerSettings, room, uma_trio_flags, uma_trio_rig, without_speculation

from uma_trio.client import Client, Eos, Token, open_client
from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import percentile

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
    mask_wait_ms: float | None = None
    """Mean time that sampling waited for masks."""


NAMES: Final = [field.name for field in attrs.fields(Figures)]


async def generate(path: str, text: str, tokens: int, constraint: dict[str, Any] | None) -> list[float]:
    """When the tokens of one stream came, in seconds."""
    came: list[float] = []
    async with open_client(path) as client:
        fields: dict[str, Any] = {"ignore_eos": True} if constraint is None else {"constraint": constraint}
        events = client.generate(
            prompt=text, max_tokens=tokens, temperature=1.0, seed=1, speculate=False, cache_prompt=False, **fields
        )
        async for event in events:
            if isinstance(event, Token):
                came.append(trio.current_time())
    return came


async def run(path: str, n_streams: int, tokens: int, constraint: dict[str, Any] | None) -> Figures:
    """One run: all streams together."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(n_streams)]
    tracks: list[list[float]] = []

    async def one(text: str) -> None:
        tracks.append(await generate(path, text, tokens, constraint))

    async with trio.open_nursery() as nursery:
        for text in texts:
            nursery.start_soon(one, text)
    after = await snapshot(path)
    start, end = max(track[0] for track in tracks), min(track[-1] for track in tracks)  # while all of them decode
    gaps = [1e3 * (b - a) for track in tracks for a, b in itertools.pairwise(track) if start <= a and b <= end]
    n = sum(start < at <= end for track in tracks for at in track)
    return Figures(
        tokens_per_s=n / (end - start),
        itl_p50_ms=statistics.median(gaps),
        itl_p99_ms=percentile([gap / 1e3 for gap in gaps], 99) * 1e3 if gaps else 0.0,
        mask_wait_ms=after.get("mask_wait_ms_avg") if constraint is not None else None,
    )


async def snapshot(path: str) -> dict[str, Any]:
    async with open_client(path) as client:
        return await client.metrics()


async def first_tokens(path: str, sizes: Sequence[int]) -> list[list[str]]:
    """Time to first token with a schema that is new, with the same again, and without, by number of properties."""
    rows = []
    async with open_client(path) as client:
        for size in sizes:
            names = [f"property_{size}_{n}" for n in range(size)]
            schema = {
                "type": "object",
                "properties": {name: {"type": ["string", "integer", "null"]} for name in names},
                "required": names,
                "additionalProperties": False,
            }
            ms = [await _ttft_ms(client, each) for each in ({"json_schema": schema}, {"json_schema": schema}, None)]
            rows.append([str(size), *[cell(value, 1) for value in ms]])
    return rows


async def _ttft_ms(client: Client, constraint: dict[str, Any] | None) -> float:
    """From sending the request to its first token, compiling included."""
    began = trio.current_time()
    first = None
    events = client.generate(
        prompt="A record:", max_tokens=4, keep_alive=True, cache_prompt=False, constraint=constraint
    )
    async for event in events:
        if first is None and isinstance(event, Token | Eos):
            first = trio.current_time()
    assert first is not None
    return 1e3 * (first - began)


@bench()
@click.option("--streams", "counts", default="1,8", help="Numbers of streams, separated by commas.")
@click.option("--tokens", type=click.IntRange(2), default=150, help="Tokens that each stream generates.")
@click.option("--schema", type=click.Choice([*SCHEMAS]), default="strings", help="What the streams generate.")
@click.option("--properties", default="5,50,200", help="Numbers of properties of new schemas.")
@repeat_option(3)
@places()
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    counts: str, tokens: int, schema: str, properties: str, repeat: int, csv_file: Path | None, **options: Any
) -> None:
    """Measure the time between tokens with a JSON schema and without, alternating on one daemon.

    SERVE_FLAGS after -- go to `uma-trio serve`.  Ratios are with / without.
    """
    place = Place.of(options)
    sizes = numbers(properties, "--properties")
    n_streams = numbers(counts, "--streams")
    place.show()
    click.echo(
        f"model     {place.model.name}, {place.threads} compute threads {' '.join(options['serve_flags'])}".rstrip()
    )
    file = RunsFile(csv_file, ["round", "streams", "constrained", *NAMES])

    async def work() -> None:
        most = max(n_streams)
        serving = ServerSettings(
            model=place.model, threads=place.threads, parallel=most, ctx=most * room(PROMPT_WORDS, tokens)
        )
        async with uma_trio_rig([*uma_trio_flags(serving), *options["serve_flags"]]) as rig:
            await warm_up(without_speculation(rig))
            assert isinstance(rig.transport, Daemon)
            path = str(rig.transport.path)
            rows = []
            for count in n_streams:
                runs: dict[bool, list[Figures]] = {False: [], True: []}
                for number in range(1, repeat + 1):
                    for constrained in (False, True) if number % 2 else (True, False):
                        figures = await run(
                            path, count, tokens, {"json_schema": SCHEMAS[schema]} if constrained else None
                        )
                        runs[constrained].append(figures)
                        file.add(number, count, constrained, *attrs.astuple(figures))
                without, with_schema = medians(runs[False]), medians(runs[True])
                for name, found in (("without", without), ("with", with_schema)):
                    rows.append([f"{count}, {name}", *[cell(getattr(found, each), 3) for each in NAMES]])
                ratios = [getattr(with_schema, each) / getattr(without, each) for each in NAMES[:3]]
                rows.append([f"{count}, ratio", *[cell(ratio, 3) for ratio in ratios], ""])
            click.echo(table(["streams", "tok/s", "ITL p50 ms", "p99", "mask wait ms"], rows))
            click.echo("\ntime to first token, ms")
            click.echo(table(["properties", "new schema", "again", "without"], await first_tokens(path, sizes)))
            late = (await snapshot(path))["late_masks_total"]
            click.echo(f"\nmasks that were late: {late}")

    carry_out(work)


if __name__ == "__main__":
    main()
