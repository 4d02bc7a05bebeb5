"""Measure goodput against arrival rate, overload, and fairness between two users.

python benches/goodput.py --model /tmp/125m.gguf --threads 1 --csv goodput.csv --plot goodput.png
python benches/goodput.py --model /tmp/125m.gguf --threads 1 --overload 2
sudo python benches/goodput.py --model /tmp/125m.gguf --threads 1 --tenants
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
import tenants
from command import (
    Place,
    bench,
    carry_out,
    csv_option,
    numbers,
    places,
    plot_option,
    repeat_option,
    rival_option,
    show_rival,
)
from comparison import Contender, RunsFile, interleaved, medians
from measure import warm_up
from open_load import Figures, Mix, Slo, capacity, offer
from report import cell, table
from rigs import ServerSettings, peers_option

from uma_trio.tokenizer.vocabulary import vocabulary

NAMES = [field.name for field in attrs.fields(Figures)]

Sweep = dict[Contender, dict[float, Figures]]


@attrs.frozen(kw_only=True)
class Test:
    """Settings that all runs have in common."""

    place: Place
    serving: ServerSettings
    mix: Mix
    slo: Slo
    seconds: float
    drain: float
    seed: int

    async def at(self, contender: Contender, rate: float, seconds: float) -> Figures:
        """Start the server and offer ``rate`` requests per second for ``seconds``."""
        async with contender.rig() as rig:
            await warm_up(rig)
            offered = await offer(
                rig, self.mix, rate=rate, seconds=seconds, drain_s=self.drain, seed=self.seed, pins=self.place.pins
            )
        return Figures.of(offered, self.slo)

    async def capacity(self, contender: Contender) -> float:
        """Measure how many requests per second the server completes with a client for each sequence."""
        async with contender.rig() as rig:
            await warm_up(rig)
            return await capacity(
                rig, self.mix, clients=self.serving.parallel, seconds=self.seconds, seed=self.seed, pins=self.place.pins
            )


# -- the sweep -------------------------------------------------------------------------------------


async def sweep(
    test: Test,
    ours: Sequence[Contender],
    rivals: Sequence[Contender],
    rates: Sequence[float],
    repeat: int,
    file: RunsFile,
) -> Sweep:
    """Measure all contenders at all rates, alternating."""
    runs: dict[Contender, dict[float, list[Figures]]] = {
        contender: {rate: [] for rate in rates} for contender in [*ours, *rivals]
    }
    for rate in rates:
        for contender in interleaved(ours, rivals, repeat):
            figures = await test.at(contender, rate, test.seconds)
            runs[contender][rate].append(figures)
            file.add(len(runs[contender][rate]), contender.server, contender.setting, rate, *attrs.astuple(figures))
            click.echo(
                f"run {len(runs[contender][rate])}  {rate:g}/s  {contender!s:<28} {figures.good:.0f} of {figures.arrived:.0f} good, "
                f"TTFT p50 {cell(figures.ttft_p50_ms)} ms, {figures.refused:.0f} refused"
            )
    return {
        contender: {rate: medians(of_rate) for rate, of_rate in by_rate.items()} for contender, by_rate in runs.items()
    }


async def some_rates(test: Test, contender: Contender) -> list[float]:
    """Six rates from 0.25 to 1.5 times the capacity of ``contender``, rounded to two digits."""
    capacity = await test.capacity(contender)
    click.echo(f"capacity of {contender}: {capacity:.2f} requests per second\n")
    return sorted({float(f"{share * max(capacity, 0.1):.2g}") for share in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)})


def show_sweep(measurements: Sweep) -> str:
    """A row for each contender and rate, and the best goodput of each contender."""
    header = (
        "", "arrivals / s", "good / s", "good", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "refused", "unfinished", "tok/s", "RSS MiB at start", "at end", "generator cpu", "others cpu",
    )  # fmt: skip
    lines = [
        [
            str(contender), f"{rate:g}", cell(f.goodput, 2), f"{f.good / f.arrived:.0%}" if f.arrived else "-",
            cell(f.ttft_p50_ms), cell(f.ttft_p99_ms), cell(f.itl_p50_ms), cell(f.itl_p99_ms), cell(f.refused, 0),
            cell(f.unfinished, 0), cell(f.tokens_per_s), cell(f.rss_start_mib), cell(f.rss_end_mib),
            f"{f.generator_cpu:.1%}", f"{f.others_cpu:.0%}",
        ]
        for contender, by_rate in measurements.items()
        for rate, f in by_rate.items()
    ]  # fmt: skip
    best = {contender: max(f.goodput for f in by_rate.values()) for contender, by_rate in measurements.items()}
    most = [f"most      {contender}: {goodput:.2f} good requests per second" for contender, goodput in best.items()]
    return "\n".join([table(header, lines), "", *most])


def plot(measurements: Sweep, path: Path, title: str) -> None:
    """Plot TTFT and goodput against the arrival rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    for at, (contender, by_rate) in enumerate(measurements.items()):
        rates, colour = list(by_rate), f"C{at}"
        above.plot(rates, [f.ttft_p50_ms for f in by_rate.values()], "o-", color=colour, label=f"{contender}, p50")
        above.plot(rates, [f.ttft_p99_ms for f in by_rate.values()], "o:", color=colour, label=f"{contender}, p99")
        below.plot(rates, [f.goodput for f in by_rate.values()], "o-", color=colour, label=str(contender))
    below.plot(
        rates, [f.arrived_per_s for f in by_rate.values()], "--", color="#7a7a7a", linewidth=1, label="all arrivals"
    )
    above.set(yscale="log", ylabel="TTFT, ms (log)")
    above.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    above.set_title(title, fontsize=9)
    below.set(xlabel="arrivals per second", ylabel="good requests per second", ylim=(0, None))
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# -- overload -------------------------------------------------------------------------------------


async def overload(
    test: Test,
    ours: Sequence[str],
    rivals: Sequence[Contender],
    factor: float,
    seconds: float,
    max_queue: int | None,
    file: RunsFile,
) -> str:
    """Offer each contender ``factor`` times its capacity.

    Args:
        max_queue: ``--max-queue`` of ours; ``None``: as many requests as can start within half of the TTFT limit.
    """
    lines = []
    for setting in ours:
        (contender,) = contenders.ours(test.serving, [setting])
        capacity = await test.capacity(contender)
        queue = max_queue if max_queue is not None else max(1, int(capacity * test.slo.ttft_ms / 2e3))
        (bounded,) = contenders.ours(test.serving, [f"{setting} --max-queue {queue}".strip()])
        lines.append(await _overload_one(test, bounded, capacity, factor, seconds, file))
    for contender in rivals:
        lines.append(await _overload_one(test, contender, await test.capacity(contender), factor, seconds, file))
    header = (
        "", "capacity / s", "arrivals / s", "arrived", "refused", "after p50 ms", "max", "retry after ms", "admitted", "TTFT kept", "ITL kept", "good / s", "TTFT p50 ms", "p99", "ITL p99 ms", "RSS MiB at start", "at end",
    )  # fmt: skip
    return table(header, lines)


async def _overload_one(
    test: Test, contender: Contender, capacity: float, factor: float, seconds: float, file: RunsFile
) -> list[str]:
    if not capacity:
        raise click.ClickException(f"{contender} completed no request in {test.seconds:g} s; increase --seconds")
    rate = factor * capacity
    click.echo(
        f"{contender!s:<40} capacity {capacity:.2f} requests per second; {rate:.2f} per second for {seconds:g} s"
    )
    f = await test.at(contender, rate, seconds)
    file.add(1, contender.server, contender.setting, rate, *attrs.astuple(f))
    return [
        str(contender), cell(capacity, 2), cell(rate, 2), cell(f.arrived, 0), cell(f.refused, 0), cell(f.refused_p50_ms),
        cell(f.refused_max_ms), cell(f.retry_after_p50_ms, 0), cell(f.arrived - f.refused, 0), _percent(f.ttft_met_share),
        _percent(f.itl_met_share), cell(f.goodput, 2), cell(f.ttft_p50_ms), cell(f.ttft_p99_ms), cell(f.itl_p99_ms),
        cell(f.rss_start_mib), cell(f.rss_end_mib),
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# -- two users -------------------------------------------------------------------------------------


async def two_users(test: Test, sizes: Sequence[int], seconds: float, setting: str) -> str:
    """Measure the service of two users with ``sizes`` clients."""
    (contender,) = contenders.ours(test.serving, [setting])
    with vocabulary(test.place.model) as tokenizer:
        async with contender.rig() as rig:
            await warm_up(rig)
            shares = await tenants.share(
                rig, test.mix, tokenizer, sizes, seconds=seconds, seed=test.seed, pins=test.place.pins
            )
    return tenants.show(shares, seconds)


@bench()
@click.option(
    "--rates",
    default="auto",
    help="Arrivals per second, separated by commas; auto: six rates up to 1.5 times the capacity of uma-trio.",
)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, help="Time for which requests arrive at each rate, and for which a capacity is measured.")  # fmt: skip
@click.option(
    "--drain", type=click.FloatRange(0), default=5.0, help="Seconds after that in which requests can complete."
)
@click.option("--short-words", type=click.IntRange(2), default=24, help="Mean words of a chat's prompt.  All sizes vary between 0.5 and 1.5 times the mean.")  # fmt: skip
@click.option("--short-tokens", type=click.IntRange(2), default=48, help="Mean generated tokens of a chat.")
@click.option("--long-share", type=click.FloatRange(0, 1), default=0.1, help="Share of requests with a long prompt.")
@click.option("--long-words", type=click.IntRange(2), default=500, help="Mean words of a long prompt.")
@click.option("--long-tokens", type=click.IntRange(2), default=24, help="Mean tokens generated for a long prompt.")
@click.option("--ttft-ms", type=click.FloatRange(1), default=1000.0, help="Longest TTFT of a good request.")
@click.option(
    "--itl-ms", type=click.FloatRange(1), default=100.0, help="Longest inter-token latency of a good request."
)
@click.option(
    "--itl-of",
    type=click.Choice(["p99", "mean"]),
    default="p99",
    help="Statistic of a request's inter-token latencies for --itl-ms.",
)
@click.option("--seed", type=int, default=0, help="Seed of arrivals and words.")
@click.option("--parallel", type=click.IntRange(1), default=4, help="Sequences of each server.")
@places()
@click.option("--ours", multiple=True, default=[""], show_default=False, help="Flags of `uma-trio serve` for one setting; repeatable.")  # fmt: skip
@rival_option()
@click.option("--rival-flags", multiple=True, default=[""], show_default=False, help="Flags of llama-server for one setting; repeatable.")  # fmt: skip
@peers_option()
@repeat_option(1)
@csv_option("a row for each run")
@plot_option("TTFT and goodput against the rate")
@click.option(
    "--overload",
    "factor",
    type=click.FloatRange(1),
    help="Offer so many times the capacity for --overload-s, instead of the rates.",
)
@click.option("--overload-s", type=click.FloatRange(1), default=60.0, help="Seconds of overload.")
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    help="With --overload: --max-queue of uma-trio.  [default: requests that can start in half of --ttft-ms]",
)
@click.option(
    "--tenants",
    "as_tenants",
    is_flag=True,
    help="Measure two users with different numbers of clients, instead of the rates; needs root.",
)
@click.option("--tenant-clients", default="18,6", help="With --tenants: clients of each user.")
def main(repeat: int, csv_file: Path | None, plot_file: Path | None, **options: Any) -> None:
    """Measure goodput: the requests per second with a TTFT of at most --ttft-ms and an ITL of at most --itl-ms.

    Requests arrive at random (Poisson, seeded), whether or not the server keeps up; most are short chats, some have a
    long prompt. uma-trio refuses requests with E_LIMIT_QUEUE if too many wait; a refused request is not sent again and
    not good. Chats have the priority interactive and long prompts normal, which llama-server does not know. Each run
    starts its server; the table has the medians of --repeat runs.

    \b
    --overload 2   measures the capacity of the server (a client for each sequence, without pauses), then offers twice
                   as much: do admitted requests meet the SLO, how soon are others refused, does memory grow?
    --tenants      one user with 18 clients and one with 6, all without pauses: the service of both (prompt tokens and
                   twice the generated tokens) should be equal within 10 %. llama-server knows no users.
    """
    place = Place.of(options)
    rates = [] if options["rates"] == "auto" else numbers(options["rates"], "--rates", float)
    sizes = numbers(options["tenant_clients"], "--tenant-clients")
    if options["as_tenants"]:
        if (reason := tenants.why_not()) is not None:
            click.echo(f"skipped   --tenants: {reason}")
            return
        if min(sizes) < options["parallel"] + 2:  # a client may be between two requests
            raise click.UsageError(
                "each of --tenant-clients must be at least --parallel plus 2, so that each user always has a waiting request"
            )
    mix = Mix(**{field.name: options[field.name] for field in attrs.fields(Mix)})
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=options["parallel"], ctx=options["parallel"] * mix.room
    )
    test = Test(
        place=place,
        serving=serving,
        mix=mix,
        slo=Slo(ttft_ms=options["ttft_ms"], itl_ms=options["itl_ms"], of=options["itl_of"]),
        seconds=options["seconds"],
        drain=options["drain"],
        seed=options["seed"],
    )
    place.show()
    with_rival = options["rival"] and not options["as_tenants"]
    ours = contenders.ours(serving, options["ours"])
    rivals = contenders.rivals(options["peers"], serving, options["rival_flags"] if with_rival else ())
    file = RunsFile(None if options["as_tenants"] else csv_file, ["run", "server", "setting", "rate", *NAMES])

    async def work() -> str:
        if with_rival:
            show_rival(options["peers"])
        click.echo(f"servers   {serving}\nload      {mix}, seed {test.seed}\ngood      {test.slo}\n")
        if options["as_tenants"]:
            return await two_users(test, sizes, test.seconds, options["ours"][0])
        if options["factor"] is not None:
            return await overload(
                test, options["ours"], rivals, options["factor"], options["overload_s"], options["max_queue"], file
            )
        measurements = await sweep(test, ours, rivals, rates or await some_rates(test, ours[0]), repeat, file)
        if plot_file is not None:
            plot(measurements, plot_file, f"{place.model.name}: {mix}")
        return show_sweep(measurements)

    click.echo(f"\n{carry_out(work)}")


if __name__ == "__main__":
    main()
