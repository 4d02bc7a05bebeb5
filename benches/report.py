"""Markdown tables, and token times as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from uma_trio.demo.recording import Track, percentile

COLUMNS = ("session_id", "token_idx", "ts_ms", "is_interactive")


def rows(tracks: Iterable[Track]) -> list[tuple[str, int, float, int]]:
    """A row for each token, in the order of arrival.

    ``ts_ms`` counts from the request with the first long prompt, or from the first request if there is none.  The
    prefill of that prompt thus lasts from 0 to its first token, and earlier tokens have negative times.
    """
    tracks = list(tracks)
    zero = origin_s(tracks)
    token_rows = [
        (track.stream.name, index, round(1e3 * (at - zero), 3), int(track.stream.interactive))
        for track in tracks
        for index, at in enumerate(at for answer in track.answers for at in answer.token_s)
    ]
    return sorted(token_rows, key=lambda row: row[2])


def origin_s(tracks: Sequence[Track]) -> float:
    """The time from which ``ts_ms`` counts."""
    sent = [(track.stream.interactive, answer.sent_s) for track in tracks for answer in track.answers]
    return min(sent, default=(True, 0.0))[1]  # False sorts before True: a long prompt, if there is one


def write_csv(path: Path, tracks: Iterable[Track]) -> None:
    """Write the ``rows`` of ``tracks``."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows(tracks))


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first one is left-aligned, the others are right-aligned."""
    cells = [list(header), *(list(line) for line in lines)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]) + " |"
        for line in [cells[0], rule, *cells[1:]]
    )  # fmt: skip


def quantiles(values: Sequence[float]) -> list[str]:
    """Cells with p50, p95, p99 and the maximum."""
    return [cell(percentile(values, at)) for at in (50, 95, 99, 100)]


def cell(value: float | None, digits: int = 1) -> str:
    """A number with ``digits`` decimals; a dash for ``None``."""
    return "-" if value is None else f"{value:,.{digits}f}"
