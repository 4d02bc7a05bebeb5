"""``uma-trio perf``: what a perf log tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from uma_trio.telemetry.perf_format import Run
    from uma_trio.telemetry.perf_records import TickRecord
    from uma_trio.telemetry.perf_summary import Load, Quantiles, Summary

NARROWEST = 100
"""Columns that the tables take where the output is no terminal."""


@click.group("perf", short_help="Make tables and pictures of a perf log.")
def command() -> None:
    """Make tables and pictures of a perf log: what each tick held, and what each request waited for.

    \b
      uma-trio serve --perf-log FILE      has the daemon write one
      uma-trio perf report FILE           also while it does

    docs/PERF_LOG.md describes the file, for programs of your own.
    """


@command.command("report", short_help="Latencies, where the time went, and how good the predictions were.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--run",
    "which",
    default="last",
    show_default=True,
    metavar="N|last|all",
    help="Which of the file's runs; a run is one start of the daemon.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also draw four plots into this PNG, SVG or PDF file (needs matplotlib).",
)
@click.option(
    "--at",
    "at_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="The moment of the run that the plot of ticks shows.  [default: the longest tick with a prompt]",
)
def report(files: tuple[Path, ...], which: str, as_json: bool, plot: Path | None, at_s: float | None) -> None:
    """Show what the last run in FILE came to.  Several files are parts of one log, the oldest first:

    \b
      uma-trio perf report perf.cborseq.1 perf.cborseq

    \b
    latency     times between tokens, to the first token (by how many other
                requests were there), in the queue, and of ticks
    time        for what share of the run the device computed or waited
    prediction  how far off the cost model was, which decides how much of
                a prompt a tick may hold
    longest     the ten longest ticks, and what they held

    --plot draws inter-token latencies, cumulated; ticks and what they held; time to first token against load;
    predicted against measured ticks.

    A log whose end is missing is reported as far as it goes.  Exit codes: 0, or 2 if there is nothing to report.
    """
    runs = _runs(files)
    chosen = _chosen(runs, which)
    if plot is not None:
        if len(chosen) != 1:
            _fail("--plot draws one run: say which with --run")
        _plot(chosen[0][1], plot, at_s)
    if as_json:
        _print_json(chosen, len(runs))
    else:
        _print(chosen, len(runs))


def _fail(message: str) -> NoReturn:
    click.echo(f"uma-trio perf: {message}", err=True)
    raise SystemExit(2)


def _runs(files: Sequence[Path]) -> list[Run]:
    from uma_trio.telemetry.perf_format import NotAPerfLog, decode

    names = ", ".join(str(file) for file in files)
    try:
        return decode(b"".join(file.read_bytes() for file in files))
    except FileNotFoundError as error:
        _fail(f"there is no {error.filename}; uma-trio serve --perf-log {error.filename} writes one")
    except OSError as error:
        _fail(f"cannot read {error.filename or names}: {error.strerror}")
    except NotAPerfLog as error:
        _fail(f"{names} is no perf log that can be read: {error}")


def _chosen(runs: list[Run], which: str) -> list[tuple[int, Run]]:
    numbered = list(enumerate(runs, 1))
    if which == "all":
        return numbered
    if which == "last":
        return numbered[-1:]
    if not (which.isdecimal() and 1 <= int(which) <= len(runs)):
        _fail(f"--run is last, all, or a number up to {len(runs)}, the runs in this log; not {which}")
    return [numbered[int(which) - 1]]


def _plot(run: Run, target: Path, at_s: float | None) -> None:
    try:
        from uma_trio.cli.perf_plots import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _fail("--plot needs matplotlib, which is not installed: pip install matplotlib")
    figure = draw(run, at_s=at_s)
    try:
        figure.savefig(target, dpi=110)
    except OSError as error:
        _fail(f"cannot write {target}: {error.strerror}")
    except ValueError as error:  # of a suffix that matplotlib does not know
        _fail(f"cannot write {target}: {error}")


def _print_json(chosen: list[tuple[int, Run]], n_runs: int) -> None:
    import attrs

    from uma_trio.telemetry.perf_summary import summarise

    found = [{"run": number, **attrs.asdict(summarise(run))} for number, run in chosen]
    click.echo(json.dumps({"runs_in_log": n_runs, "runs": found}, indent=2))


# -- for people --------------------------------------------------------------------------------------


def _print(chosen: list[tuple[int, Run]], n_runs: int) -> None:
    from rich.console import Console

    from uma_trio.telemetry.perf_summary import summarise

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NARROWEST)
    for number, run in chosen:
        _show(console, summarise(run), f"run {number} of {n_runs}" if n_runs > 1 else "one run")


def _show(console: Console, found: Summary, which: str) -> None:
    for line in (*_head(found, which), "", *_totals(found)):
        console.print(line, markup=False)
    idle = None if found.shares is None else found.shares.device_idle
    parts = {
        "Latency in ms": _latency(found),
        f"Time: the device was idle for {_percent(idle)} of it": _times(found),
        "Prediction of a tick's time: how far off": _predictions(found),
        "Longest ticks": _longest(found.longest),
    }
    for title, table in parts.items():
        console.print(f"\n{title}\n", style="bold", markup=False)
        console.print(table)
    console.print()


def _head(found: Summary, which: str) -> list[str]:
    header = found.header
    lines = [
        f"{header.model}  {header.description}".rstrip(),
        f"started {header.started.replace('T', ' ')}, {which}, {found.duration_s:,.1f} s",
        f"uma-trio {header.uma_trio}, {header.llama_cpp or 'llama.cpp of unknown origin'}; "
        f"ctx {header.n_ctx:,}, parallel {header.n_seq_max}, batch {header.n_batch:,} tokens",
    ]
    if found.cut is not None:
        lines.append(f"incomplete: {found.cut}")
    elif not found.closed:
        lines.append("not ended: the daemon still runs, was killed, or could not write any more")
    if found.dropped:
        lines.append(f"incomplete: {found.dropped:,} records were dropped, for the disk was too slow")
    return lines


def _totals(found: Summary) -> list[str]:
    ended = ", ".join(f"{n:,} {reason}" for reason, n in found.requests.items()) or "none has ended"
    lines = [
        f"requests   {ended}",
        f"tokens     {found.tokens:,} generated, {found.tokens_per_s:,.1f} a second; {found.prompt_tokens:,} of prompts computed",
        f"ticks      {found.ticks:,}, on average {_number(found.average_batch, 2)} sequences in each; "
        f"{found.decode_calls:,} llama_decode calls",
    ]
    if found.cached_tokens:
        lines.append(
            f"cache      {_part(found.cached_tokens, found.asked_tokens)} prompt tokens were in the KV cache already"
        )
    if found.drafted:
        lines.append(f"guesses    {_part(found.accepted, found.drafted)} drafted tokens were accepted")
    if found.bandwidth_share.p50 is not None:
        lines.append(
            f"bandwidth  {_percent(found.bandwidth_share.p50)} of what the device can read, in the median tick"
        )
    return lines


def _table(*columns: str) -> Table:
    """The first column has names, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", overflow="fold")
    return table


def _latency(found: Summary) -> Table:
    table = _table("", "n", "p50", "p95", "p99", "max")

    def row(name: str, values: Quantiles) -> None:
        digits = 1 if values.p50 is None or values.p50 >= 10 else 2
        quantiles = (values.p50, values.p95, values.p99, values.max)
        table.add_row(name, f"{values.n:,}", *[_number(value, digits) for value in quantiles])

    row("between tokens", found.itl_ms)
    row("to the first token", found.ttft_ms)
    for load in found.ttft_by_load:
        row(f"  with {_others(load)} there", load.ttft_ms)
    row("in the queue", found.queue_ms)
    row("tick", found.tick_ms)
    row("  llama_decode", found.decode_ms)
    row("  choosing tokens", found.sample_ms)
    row("between ticks", found.host_gap_ms)
    return table


def _others(load: Load) -> str:
    if load.most == 0:
        return "nobody else"
    return "1 other" if load.most == 1 else f"{load.least} to {load.most} others"


def _times(found: Summary) -> Table:
    table = _table("", "share")
    if found.shares is not None:
        table.add_row("llama_decode", _percent(found.shares.decode))
        table.add_row("choosing tokens", _percent(found.shares.sample))
        table.add_row("between ticks", _percent(found.shares.host_gap))
        table.add_row("nothing to do", _percent(found.shares.nothing_to_do))
    return table


def _predictions(found: Summary) -> Table:
    table = _table("", "ticks", "median", "p95", "bias")
    for name, kind in (("streams alone", found.alone), ("with prompts", found.mixed)):
        bias = "-" if kind.bias is None else f"{100 * kind.bias:+.1f} %"
        table.add_row(name, f"{kind.ticks:,}", _percent(kind.median_error), _percent(kind.p95_error), bias)
    return table


def _longest(ticks: Sequence[TickRecord]) -> Table:
    table = _table("at s", "ms", "predicted", "streams", "context", "waiting", "prompts, sequence: tokens")
    table.columns[0].justify, table.columns[-1].justify = "right", "left"
    for tick in ticks:
        table.add_row(
            f"{tick.t_s:,.3f}",
            _number(tick.ms),
            _number(tick.predicted_ms),
            str(tick.streams),
            f"{tick.context_tokens:,}",
            str(tick.waiting),
            "  ".join(f"{seq_id}: {n}" for seq_id, n in tick.prompts) or "-",
        )
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _part(some: int, all_: int) -> str:
    return f"{some:,} of {all_:,} ({_percent(some / all_ if all_ else None)})"
