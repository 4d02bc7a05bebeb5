"""``uma-trio perf``: reports from a perf log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.exits import SERVER_ERROR
from uma_trio.cli.stdio import fail
from uma_trio.files import read_bytes

MAX_LOG_BYTES: Final = 2 << 30
"""A log of this size takes as much memory several times over."""

if TYPE_CHECKING:
    from uma_trio.telemetry.perf_records import Run


_files = click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
_number = click.option("--run", "number", type=int, metavar="N", help="The N-th start of the daemon.  [default: last]")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("perf", cls=SuggestingGroup)
def command() -> None:
    """Report on a perf log: what each tick computed, and how long each request waited.

    The daemon writes the log with --perf-log.  It holds times, counts and ids, and neither prompts nor answers.

    \b
      uma-trio serve --perf-log perf.jsonl             a daemon that writes the log
      uma-trio perf report perf.jsonl                  works while the daemon runs, too
      uma-trio perf explain perf.jsonl                 where the time went, and what would make it less

    The log is JSON Lines; docs/PERF_LOG.md describes its fields for your own programs.
    """


@command.command("report", short_help="Latencies, where the time went, and how good the predictions were.")
@_files
@_number
@_as_json
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw plots (needs matplotlib).")
def report(files: tuple[Path, ...], number: int | None, as_json: bool, plot: Path | None) -> None:
    """Summarise the last run in FILE: tables on stdout, and plots with --plot.

    A run is one start of the daemon.  A log that was rotated is in two files: give the older one first.

    \b
      uma-trio perf report perf.jsonl
      uma-trio perf report perf.jsonl --plot perf.png
      uma-trio perf report perf.jsonl.1 perf.jsonl --json

    \b
    time_share        where the time went: in llama_decode, in sampling, between
                      ticks, or idle
    latency_ms        inter-token latency, time to first token (also by load), time
                      in the queue, duration of ticks
    prediction_error  relative error of the cost model, which decides how many
                      prompt tokens fit into a tick
    longest_ticks     the ten longest ticks, and what they computed

    --plot writes a PNG, SVG or PDF file with the distribution of inter-token latencies, a timeline of ticks, time to
    first token against load, and predicted against measured ticks.

    Exit codes: 0, or 2 if there is nothing to report.
    """
    run, which = _run(files, number)
    if plot is not None:
        _plot(run, plot)
    from uma_trio.telemetry.perf_summary import summarise

    summary = {**which, **summarise(run)}
    click.echo(json.dumps(summary, indent=2) if as_json else "\n".join(_lines(summary)))


@command.command("explain", short_help="Where the time went, by cause, and what would make it less.")
@_files
@_number
@_as_json
def explain(files: tuple[Path, ...], number: int | None, as_json: bool) -> None:
    """Say where the time of the last run in FILE went, and what would make it less.

    Each moment from the first tick to the end of the last one has one cause, so the causes add up to the whole time.

    \b
      uma-trio perf explain perf.jsonl
      uma-trio perf explain perf.jsonl.1 perf.jsonl --json

    \b
    work      computing at the best speed that the device showed in this run
    lost      above that: short chunks, narrow batches, recomputation, the host, ...
    no work   time without requests, and time that the log does not have

    docs/PERF_LOG.md explains each cause.  Times are of one machine and one load: compare runs, not machines.

    Exit codes: 0, or 2 if there is nothing to explain.
    """
    run, which = _run(files, number)
    if not run.ticks:
        fail(
            "perf",
            f"run {which['run']} has no ticks: the daemon has computed nothing yet, or nothing is written yet",
            SERVER_ERROR,
        )
    from uma_trio.telemetry.perf_causes import explain as explained

    explanation = {**which, "model": run.header.model, **explained(run)}
    click.echo(json.dumps(explanation, indent=2) if as_json else "\n".join(_causes(explanation)))


def _run(files: Sequence[Path], number: int | None) -> tuple[Run, dict[str, int]]:
    """A run of the log, the last one by default, and which one it is."""
    runs = read_logs(files)
    number = len(runs) if number is None else number
    if not 1 <= number <= len(runs):
        fail(
            "perf",
            f"--run must be a number from 1 to {len(runs)}, the number of runs in the log; not {number}",
            SERVER_ERROR,
        )
    return runs[number - 1], {"run": number, "runs_in_log": len(runs)}


def read_logs(files: Sequence[Path]) -> list[Run]:
    """The runs of one or several files, oldest first; ends the command if they are no perf logs."""
    from uma_trio.telemetry.perf_records import NotAPerfLog, decode

    names = ", ".join(str(file) for file in files)
    try:
        return decode(*[_content(file) for file in files])
    except FileNotFoundError as error:
        fail(
            "perf",
            f"{error.filename} does not exist; uma-trio serve --perf-log {error.filename} writes it",
            SERVER_ERROR,
        )
    except OSError as error:
        fail("perf", f"cannot read {error.filename or names}: {error.strerror}", SERVER_ERROR)
    except NotAPerfLog as error:
        fail("perf", f"cannot read {names} as a perf log: {error}", SERVER_ERROR)


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, MAX_LOG_BYTES, pipes=True)
    except OSError as error:
        error.filename = str(file)
        raise


def _plot(run: Run, target: Path) -> None:
    try:
        from uma_trio.cli.perf_plots import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fail("perf", "--plot needs matplotlib, which is not installed: pip install matplotlib", SERVER_ERROR)
    try:
        draw(run).savefig(target, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        fail("perf", f"cannot write {target}: {getattr(error, 'strerror', None) or error}", SERVER_ERROR)


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    """Numbers as lines. Objects and lists of objects as tables."""
    for name, value in figures.items():
        if not isinstance(value, dict | list):
            yield f"{name:<24} {_text(value)}"
        elif not value:
            yield f"\n{name}\n  none"
        elif isinstance(value, list):
            yield from _table(name, [list(value[0]), *[list(row.values()) for row in value]])
        elif isinstance(next(iter(value.values())), dict):
            columns = next(iter(value.values()))
            yield from _table("", [[name, *columns], *[[row, *cells.values()] for row, cells in value.items()]])
        else:
            yield f"\n{name}"
            yield from (f"  {key:<22} {_text(figure)}" for key, figure in value.items() if not isinstance(figure, dict))


def _causes(explanation: dict[str, Any]) -> Iterator[str]:
    """The causes of each kind as a table, those with the most time first."""
    yield from _lines({name: value for name, value in explanation.items() if name not in ("best", "causes")})
    best = explanation["best"]
    if best["prefill_tokens"] is not None:
        yield f"best_prefill             {best['prefill_tokens_per_s']:,} tokens/s, {best['prefill_tokens']} a tick"
    if best["decode_streams"] is not None:
        yield f"best_decode              {best['decode_tokens_per_s']:,} tokens/s, {best['decode_streams']} streams"
    for kind, title in (("work", "work at the best speed"), ("lost", "lost"), ("none", "no work")):
        causes = [cause for cause in explanation["causes"] if cause["kind"] == kind and cause["seconds"] > 0]
        seconds, share = (sum(cause[field] for cause in causes) for field in ("seconds", "share"))
        yield f"\n{title:<22} {seconds:>9,.3f} s {share:>6.1%}"
        for cause in sorted(causes, key=lambda cause: -cause["seconds"]):
            yield f"  {cause['cause']:<20} {cause['seconds']:>9,.3f} s {cause['share']:>6.1%}  {cause['remedy']}"


def _table(title: str, rows: list[list[Any]]) -> Iterator[str]:
    """A table whose first row has the names of the columns."""
    yield f"\n{title}" if title else ""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*texts, strict=True)]
    for row in texts:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  " + "  ".join([row[0].ljust(widths[0]), *cells])


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, list):
        return ", ".join(f"{n} of seq {seq_id}" for seq_id, n in value) or "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value}"
