"""``uma-trio perf``: reports from a perf log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from uma_trio.telemetry.perf_records import Run


@click.group("perf", short_help="Report on a perf log, as tables and plots.")
def command() -> None:
    """Report on a perf log: what each tick computed, and how long each request waited.

    \b
      uma-trio serve --perf-log FILE      writes the log
      uma-trio perf report FILE           works while the daemon runs, too

    The log is JSON Lines; docs/PERF_LOG.md describes its fields for your own programs.
    """


@command.command("report", short_help="Latencies, where the time went, and how good the predictions were.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--run", "number", type=int, metavar="N", help="Report on the N-th start of the daemon.  [default: last]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw plots (needs matplotlib).")
def report(files: tuple[Path, ...], number: int | None, as_json: bool, plot: Path | None) -> None:
    """Summarise the last run in FILE. Give the files of a rotated log oldest first:

    \b
      uma-trio perf report perf.jsonl.1 perf.jsonl

    \b
    latency     inter-token latency, time to first token (also by load), time in
                the queue, duration of ticks
    time        for what share of the run the device computed, waited or idled
    prediction  error of the cost model, which decides how many prompt tokens
                fit into a tick
    longest     the ten longest ticks, and what they computed

    --plot writes a PNG, SVG or PDF file with the distribution of inter-token latencies, a timeline of ticks, time to
    first token against load, and predicted against measured ticks.

    Exit codes: 0, or 2 if there is nothing to report.
    """
    runs = _read(files)
    number = len(runs) if number is None else number
    if not 1 <= number <= len(runs):
        _fail(f"--run must be a number from 1 to {len(runs)}, the number of runs in the log; not {number}")
    run = runs[number - 1]
    if plot is not None:
        _plot(run, plot)
    from uma_trio.telemetry.perf_summary import summarise

    found = {"run": number, "runs_in_log": len(runs), **summarise(run)}
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _fail(message: str) -> NoReturn:
    click.echo(f"uma-trio perf: {message}", err=True)
    raise SystemExit(2)


def _read(files: Sequence[Path]) -> list[Run]:
    from uma_trio.telemetry.perf_records import NotAPerfLog, decode

    names = ", ".join(str(file) for file in files)
    try:
        return decode(*[file.read_bytes() for file in files])
    except FileNotFoundError as error:
        _fail(f"{error.filename} does not exist; uma-trio serve --perf-log {error.filename} writes it")
    except OSError as error:
        _fail(f"cannot read {error.filename or names}: {error.strerror}")
    except NotAPerfLog as error:
        _fail(f"cannot read {names} as a perf log: {error}")


def _plot(run: Run, target: Path) -> None:
    try:
        from uma_trio.cli.perf_plots import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _fail("--plot needs matplotlib, which is not installed: pip install matplotlib")
    try:
        draw(run).savefig(target, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        _fail(f"cannot write {target}: {getattr(error, 'strerror', None) or error}")


# -- text --------------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    header, shares = found["header"], found["time_share"] or {}
    yield f"{header['model']}  {header['description']}".rstrip()
    started = header["started"].replace("T", " ")
    yield f"started {started}, run {found['run']} of {found['runs_in_log']}, {found['duration_s']:,.1f} s"
    llama_cpp = header["llama_cpp"] or "llama.cpp of unknown origin"
    sizes = f"ctx {header['n_ctx']:,}, parallel {header['n_seq_max']}, batch {header['n_batch']:,} tokens"
    yield f"uma-trio {header['uma_trio']}, {llama_cpp}; {sizes}"
    if not found["closed"]:
        yield "no end: the daemon still runs, was killed, or could not write"
    if found["unreadable_lines"]:
        yield f"incomplete: {found['unreadable_lines']:,} lines are damaged"
    if found["dropped_records"]:
        yield f"incomplete: {found['dropped_records']:,} records were dropped because the disk was too slow"

    finished = ", ".join(f"{n:,} {reason}" for reason, n in found["requests"].items()) or "none finished"
    yield f"\nrequests   {finished}"
    speed = f"{found['tokens_per_s']:,.1f} a second"
    yield f"tokens     {found['tokens']:,} generated, {speed}; {found['prompt_tokens']:,} prompt tokens computed"
    batch = f"{_number(found['avg_batch'], 2)} sequences on average"
    yield f"ticks      {found['ticks']:,} with {batch}; {found['decode_calls']:,} llama_decode calls"
    if found["cached_tokens"]:
        yield f"cache      {_ratio(found['cached_tokens'], found['requested_prompt_tokens'])} prompt tokens hit"
    if found["draft_tokens"]:
        yield f"drafts     {_ratio(found['accepted_draft_tokens'], found['draft_tokens'])} tokens accepted"
    if found["memory_bandwidth_share"]["p50"] is not None:
        yield f"bandwidth  {_percent(found['memory_bandwidth_share']['p50'])} of the device's, in the median tick"

    latencies = {
        "inter-token": found["inter_token_ms"],
        "time to first token": found["ttft_ms"],
        **{f"  {_others(load)}": load["ttft_ms"] for load in found["ttft_by_load"]},
        "in the queue": found["queue_ms"],
        "tick": found["tick_ms"],
        "  llama_decode": found["decode_ms"],
        "  sampling": found["sample_ms"],
        "between ticks": found["host_gap_ms"],
    }
    quantiles = ("p50", "p95", "p99", "max")
    rows = [[name, f"{row['n']:,}", *[_number(row[q]) for q in quantiles]] for name, row in latencies.items()]
    yield from _table("Latency in ms", ["", "n", *quantiles], rows)
    idle = _percent(1 - shares["decode"] if shares else None)
    names = {"decode": "llama_decode", "sample": "sampling", "host_gap": "between ticks", "idle": "no work"}
    rows = [[names[key], _percent(share)] for key, share in shares.items()]
    yield from _table(f"Time: the device was idle for {idle} of the run", ["", "share"], rows)
    errors = ("median_error", "p95_error", "bias")
    rows = [
        [name.replace("_", " "), f"{row['ticks']:,}", *[_percent(row[error]) for error in errors]]
        for name, row in found["prediction"].items()
    ]
    yield from _table("Error of predicted tick durations", ["", "ticks", "median", "p95", "bias"], rows)
    rows = [
        [
            f"{tick['start_s']:,.3f}",
            _number(tick["duration_ms"]),
            _number(tick["predicted_ms"]),
            str(tick["decodes"]),
            f"{tick['context_tokens']:,}",
            str(tick["queue_depth"]),
            ", ".join(f"{n} of seq {seq_id}" for seq_id, n in tick["prefill_chunks"]) or "-",
        ]
        for tick in found["longest_ticks"]
    ]
    yield from _table("Longest ticks", ["at s", "ms", "predicted", "decodes", "context", "queued", "prefill"], rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    """The first column is aligned to the left, the others to the right."""
    yield f"\n{title}\n"
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "   ".join([row[0].ljust(widths[0]), *cells])


def _others(load: dict[str, Any]) -> str:
    low, high = load["min"], load["max"]
    return "with no other request" if not high else "with 1 other" if high == 1 else f"with {low} to {high} others"


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits or (1 if value >= 10 else 2)}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(part: int, total: int) -> str:
    return f"{part:,} of {total:,} ({_percent(part / total if total else None)})"
