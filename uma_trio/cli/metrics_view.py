"""What ``uma-trio metrics`` shows.  Pure: snapshots in, lines out.

``table`` has every metric of one snapshot.  ``screen`` has the most important figures of several snapshots, with rates
between them, in as many lines as a terminal has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import attrs
from rich.filesize import decimal
from rich.text import Text

from uma_trio.telemetry.catalogue import GROUPS, METRICS, find

OTHER: Final = "Other"
"""Heading of metrics that a newer daemon has."""

ENDED: Final = ("stop", "length")
"""Reasons of complete answers; other keys of ``requests_total`` are ``cancelled`` and error codes."""

N_SAMPLES: Final = 400
"""Number of samples to keep: more than the widest terminal shows."""

LABEL_WIDTH: Final = 11
CELL_WIDTH: Final = 20
GAP: Final = 2
RATE_WIDTH: Final = 9
BARS: Final = " ▁▂▃▄▅▆▇█"
MAX_CHART_LINES: Final = 6


# -- one snapshot --------------------------------------------------------------------------------------


def table(snapshot: Mapping[str, Any]) -> list[str]:
    """Format every metric as a line below the heading of its group."""
    groups = {title: [metric.path for metric in group] for title, group in GROUPS.items()}
    groups[OTHER] = [name for name in snapshot if name not in METRICS]
    lines: list[str] = []
    for title, names in groups.items():
        pairs = [pair for name in names if name in snapshot for pair in _flat(name, snapshot[name])]
        if pairs:
            lines += ["", title, *(f"  {name:<34} {_value_text(name, value)}" for name, value in pairs)]
    return lines[1:]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Name the fields of nested objects as docs/METRICS.md does: ``kv.cells``."""
    if isinstance(value, Mapping) and value and "counts" not in value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == {}:
        return "-"
    if isinstance(value, Mapping):  # a histogram
        mean = f", mean {value['sum'] / value['count']:,.2f}" if value["count"] else ""
        return f"{value['count']:,} measured{mean}"
    is_figure = isinstance(value, int | float) and name.rpartition(".")[2] != "pid"
    return f"{value:,}" if is_figure else str(value)


# -- two snapshots -------------------------------------------------------------------------------------


@attrs.frozen
class Sample:
    """A snapshot, and when it was taken."""

    at_s: float
    """Seconds on the reader's monotonic clock."""
    snapshot: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """Return a metric by its name in docs/METRICS.md; ``None`` if the daemon has not measured it."""
        return find(self.snapshot, path)


def is_restart(before: Sample, now: Sample) -> bool:
    """Whether the daemon was restarted between the two samples."""
    return bool(before.get("pid") != now.get("pid"))


def per_second(before: Sample | None, now: Sample, path: str) -> float | None:
    """Return how fast a counter grew; ``None`` without a sample before, across a restart and without the counter."""
    if before is None or now.at_s <= before.at_s or is_restart(before, now):
        return None
    first, last = before.get(path), now.get(path)
    if first is None or last is None or last < first:  # engine.cpu_s begins again with each engine
        return None
    return float(last - first) / (now.at_s - before.at_s)


@attrs.frozen
class Cell:
    """A figure with its label."""

    label: str
    value: str
    is_alarm: bool = False
    """Whether somebody should look at it."""


@attrs.frozen
class Row:
    """A line of the screen."""

    title: str
    cells: tuple[Cell, ...]
    note: str = ""


def rows(before: Sample | None, now: Sample) -> list[Row]:
    """Return the figures below the rates of tokens, the most important first."""
    reasons: Mapping[str, int] = now.get("requests_total") or {}
    refused: Mapping[str, int] = now.get("rejected_total") or {}
    n_complete = sum(reasons.get(reason, 0) for reason in ENDED)
    n_cancelled = reasons.get("cancelled", 0)
    n_failed = sum(reasons.values()) - n_complete - n_cancelled
    n_refused = sum(refused.values())
    n_cached, n_computed = now.get("cached_tokens_total"), now.get("prompt_tokens_total")
    cpu = per_second(before, now, "engine.cpu_s")

    def cell(label: str, path: str, *, alarms: bool = False) -> Cell:
        value = now.get(path)
        show = SHOWN_AS.get(METRICS[path].unit, _count)
        return Cell(label, "-" if value is None else show(value), alarms and bool(value))

    def share(label: str, part: str, whole: str) -> Cell:
        return Cell(label, _share(now.get(part), now.get(whole)))

    return [
        Row(
            "streams",
            (
                cell("running", "running"),
                cell("waiting", "queue_depth", alarms=True),
                cell("connections", "connections"),
            ),
        ),
        Row("ITL", tuple(cell(level, f"inter_token_{level}_ms") for level in ("p50", "p95", "p99"))),
        Row("TTFT", tuple(cell(level, f"ttft_{level}_ms") for level in ("p50", "p95"))),
        Row(
            "KV cache",
            (
                share("used", "kv.cells_used", "kv.cells"),
                share("reserved", "kv.cells_reserved", "kv.cells"),
                share("cached", "kv.cached_cells", "kv.cells"),
            ),
        ),
        Row(
            "engine",
            (
                cell("memory", "engine.rss_bytes"),
                Cell("CPU", "-" if cpu is None else f"{cpu:.0%}"),
                cell("restarts", "engine.restarts_total", alarms=True),
            ),
        ),
        Row(
            "sessions",
            (
                cell("stored", "sessions.stored"),
                cell("active", "sessions.active"),
                cell("not durable", "sessions.not_durable", alarms=True),
            ),
        ),
        Row(
            "requests",
            (
                Cell("complete", _count(n_complete)),
                Cell("cancelled", _count(n_cancelled)),
                Cell("failed", _count(n_failed), is_alarm=n_failed > 0),
            ),
        ),
        Row(
            "overload",
            (Cell("refused", _count(n_refused), is_alarm=n_refused > 0), cell("preempted", "preemptions_total")),
            note=", ".join(f"{code} {n:,}" for code, n in sorted(refused.items(), key=lambda pair: -pair[1])),
        ),
        Row(
            "reuse",
            (
                cell("prefix hits", "prefix_cache_hits_total"),
                Cell("cached", _share(n_cached, (n_cached or 0) + (n_computed or 0))),
                share("drafts", "accepted_draft_tokens_total", "draft_tokens_total"),
            ),
        ),
        Row(
            "ticks",
            (
                Cell("per second", _rate(per_second(before, now, "ticks_total"))),
                cell("decode", "decode_ms_avg"),
                cell("host gap", "host_gap_share"),
            ),
        ),
        Row(
            "offload",
            (
                cell("saved", "kv_offload.saved_total"),
                cell("loaded", "kv_offload.loaded_total"),
                cell("on disk", "kv_offload.disk_bytes"),
            ),
        ),
    ]


def _count(value: int) -> str:
    return f"{value:,}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1e5 else f"{value:,.0f}"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.1%}"


SHOWN_AS: Final[Mapping[str, Callable[[Any], str]]] = {"ms": _ms, "bytes": decimal, "share": "{:.1%}".format}
"""How figures are shown, by unit; the others as ``_count`` does."""


# -- the screen ----------------------------------------------------------------------------------------


def screen(samples: Sequence[Sample], *, notice: str, interval_s: float, width: int, height: int) -> list[Text]:
    """Return at most ``height`` lines of at most ``width`` columns.

    Args:
        samples: the latest last; at least one.
        notice: what happened to the daemon, or nothing.
    """
    before, now = (samples[-2] if len(samples) > 1 else None), samples[-1]
    figures = rows(before, now)
    running = _running(now, height)
    fixed = 2 + 2 + 1 + len(figures) + len(running)  # headers, one line for each chart, a blank line
    chart_lines = max(1, min(MAX_CHART_LINES, 1 + (height - fixed) // 2))
    lines = [_header(now, interval_s, width), Text(notice, style="bold red")]
    for title, path, colour in (
        ("generated", "tokens_total", "green"),
        ("prefill", "prompt_tokens_total", "cyan"),
    ):
        rates = [per_second(*pair, path) for pair in pairwise(samples)]
        lines += _chart(title, rates, colour, width, chart_lines)
    lines.append(Text())
    lines += [_line(row) for row in figures]
    lines += running
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _header(now: Sample, interval_s: float, width: int) -> Text:
    left = Text(f"{now.get('model')}", style="bold")
    loaded = [model for model in (now.get("models") or {}).values() if model.get("state") == "ready"]
    if len(loaded) > 1:
        left.append(f"  one of {len(loaded)} models, see --model", style="dim")
    left.append(f"  up {_duration(now.get('uptime_s') or 0)}", style="dim")
    if now.get("draining"):
        left.append("  draining", style="bold yellow")
    right = f"every {interval_s:g} s, q quits"
    left.append(" " * max(GAP, width - left.cell_len - len(right)))
    return left.append(right, style="dim")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _chart(title: str, rates: Sequence[float | None], colour: str, width: int, n_lines: int) -> list[Text]:
    """Draw the rates of a counter: the latest as a number and as the rightmost bar."""
    latest = rates[-1] if rates else None
    heads = [Text(f"{title:<{LABEL_WIDTH}}{_rate(latest):>{RATE_WIDTH}} tokens/s", style="bold")]
    n_bars = max(0, width - len(heads[0]) - GAP)
    shown = [rate or 0.0 for rate in rates][-n_bars:] if n_bars else []
    heads.append(Text(f"{'  highest':<{LABEL_WIDTH}}{_rate(max(shown, default=None)):>{RATE_WIDTH}}", style="dim"))
    lines = []
    for at, bars in enumerate(_bars(shown, n_bars, n_lines)):
        line = heads[at].copy() if at < len(heads) else Text()
        line.pad_right(len(heads[0]) + GAP - len(line))
        lines.append(line.append(bars, style=colour))
    return lines


def _bars(values: Sequence[float], width: int, height: int) -> Iterator[str]:
    """Draw a bar for each value, from the top line to the bottom line; the highest bar fills all lines."""
    most = max(values, default=0.0) or 1.0
    steps = len(BARS) - 1
    eighths = [round(value / most * height * steps) for value in values]
    for line in reversed(range(height)):
        yield "".join(BARS[min(steps, max(0, n - line * steps))] for n in eighths).rjust(width)


def _line(row: Row) -> Text:
    line = Text(f"{row.title:<{LABEL_WIDTH}}", style="")
    for cell in row.cells:
        line.append(cell.label, style="dim")
        line.append(cell.value.rjust(CELL_WIDTH - len(cell.label)), style="bold yellow" if cell.is_alarm else "bold")
        line.append(" " * GAP)
    if row.note:
        line.append(row.note, style="yellow")
    return line


def _running(now: Sample, height: int) -> list[Text]:
    """List the running requests with the longest inter-token latency, on a terminal that is taller than usual."""
    latencies: Mapping[str, float] = now.get("requests_inter_token_ms") or {}
    room = height - 24
    if room < 4 or not latencies:
        return []
    slowest = sorted(latencies.items(), key=lambda pair: -pair[1])[: room - 2]
    return [Text(), Text("running requests, the slowest first", style="dim"), *_requests(slowest)]


def _requests(latencies: Iterable[tuple[str, float]]) -> Iterator[Text]:
    for name, ms in latencies:
        yield Text.assemble((f"{_ms(ms):>12}", "bold"), "  ", name)
