"""Measure what a controller costs: the time between tokens with a mask of a controller at every token, and without.

python benches/controllers.py
python benches/controllers.py --model /tmp/125m.gguf --threads 1 --streams 8,64
python benches/controllers.py --model /tmp/7b.gguf --streams 32 -- --gpu-layers -1
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, numbers, places, repeat_option
from comparison import RunsFile, medians
from measure import warm_up
from report import cell, table
from rigs import ServerSettings, room, uma_trio_flags, uma_trio_rig, without_speculation

from uma_trio.client import ServerError, Token, open_client
from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import percentile

CONTROLLERS: Final = {
    "uppercase": {"controller": "uppercase"},
    "jsctrl": {"controller": "jsctrl", "controller_arg": "start(async () => { await gen({ maxTokens: 100000 }) })"},
}
"""``uppercase`` returns the same mask each time, from C.  ``jsctrl`` runs JavaScript at each token."""


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    mid_p50_ms: float | None
    """Until the masks of a step were there, from asking the runtime; the engine computes meanwhile.  ``None`` without a
    controller, like the next."""
    mid_p50_ms_each: float | None
    """The same for each sequence."""


NAMES: Final = [field.name for field in attrs.fields(Figures)]


async def run(path: str, n_streams: int, tokens: int, fields: dict[str, Any]) -> Figures:
    """One run: all streams together, each on a connection of its own."""
    tracks: list[list[float]] = [[] for _ in range(n_streams)]

    async def one(track: list[float]) -> None:
        async with open_client(path) as client:
            async for event in client.generate(max_tokens=tokens, temperature=1.0, seed=1, keep_alive=True, **fields):
                if isinstance(event, Token):
                    track.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for track in tracks:
            nursery.start_soon(one, track)
    start, end = max(track[0] for track in tracks), min(track[-1] for track in tracks)  # while all of them decode
    if start >= end:
        raise click.ClickException("the streams never all decoded at the same time: use more --tokens")
    gaps = [1e3 * (b - a) for track in tracks for a, b in itertools.pairwise(track) if start <= a and b <= end]
    mid_ms = None
    if "controller" in fields:
        async with open_client(path) as client:
            mid_ms = (await client.metrics())["controllers"]["mid_p50_ms"]
    return Figures(
        tokens_per_s=sum(start < at <= end for track in tracks for at in track) / (end - start),
        itl_p50_ms=statistics.median(gaps),
        itl_p99_ms=percentile(gaps, 99) or 0.0,
        mid_p50_ms=mid_ms,
        mid_p50_ms_each=None if mid_ms is None else mid_ms / n_streams,
    )


@bench()
@click.option("--streams", "counts", default="1,8", help="Numbers of streams, separated by commas.")
@click.option("--tokens", type=click.IntRange(2), default=150, help="Tokens that each stream generates.")
@click.option("--controller", type=click.Choice([*CONTROLLERS]), default="uppercase", help="What steers the streams.")
@repeat_option(5)
@places()
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(counts: str, csv_file: Path | None, **options: Any) -> None:
    """Measure the time between tokens with a controller and without, alternating on one daemon.

    All prompts have one token, since a controller begins with an empty text.  SERVE_FLAGS after -- go to `uma-trio
    serve`.  Ratios are with / without.
    """
    place = Place.of(options)
    n_streams = numbers(counts, "--streams")
    tokens, repeat = options["tokens"], options["repeat"]
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=max(n_streams), ctx=max(n_streams) * room(8, tokens)
    )
    place.show()
    click.echo(f"server    {serving}, {' '.join(options['serve_flags'])}\n")
    file = RunsFile(csv_file, ["round", "streams", "controller", *NAMES])
    controlled = CONTROLLERS[options["controller"]]
    plain = {"prompt": "a", "ignore_eos": True, "speculate": False, "cache_prompt": False}

    async def work() -> None:
        async with uma_trio_rig([*uma_trio_flags(serving), *options["serve_flags"]]) as rig:
            await warm_up(without_speculation(rig))
            assert isinstance(rig.transport, Daemon)
            path = str(rig.transport.path)
            await run(path, 1, 8, controlled)  # starts the runtime
            rows = []
            for count in n_streams:
                runs: dict[bool, list[Figures]] = {False: [], True: []}
                for number in range(repeat):
                    for with_controller in (False, True) if number % 2 else (True, False):
                        figures = await run(path, count, tokens, controlled if with_controller else plain)
                        runs[with_controller].append(figures)
                        file.add(number + 1, count, with_controller, *attrs.astuple(figures))
                without, with_it = medians(runs[False]), medians(runs[True])
                for name, figures in (("without", without), (options["controller"], with_it)):
                    rows.append([f"{count}, {name}", *[cell(getattr(figures, field), 3) for field in NAMES]])
                ratios = [getattr(with_it, field) / getattr(without, field) for field in NAMES[:3]]
                rows.append([f"{count}, ratio", *[cell(ratio, 3) for ratio in ratios], "", ""])
            click.echo(table(["streams", "tok/s", "ITL p50 ms", "p99", "masks ms", "each"], rows))
            skipped = (await rig.transport.snapshot())["controllers"]["skipped_total"]
            click.echo(f"\nmasks that were not there in time: {skipped}")

    try:
        carry_out(work)
    except* ServerError as errors:
        raise click.ClickException(str(errors.exceptions[0])) from None


if __name__ == "__main__":
    main()
