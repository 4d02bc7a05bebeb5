"""Plots of a perf log's run, for ``uma-trio perf report --plot`` and notebooks/perf.ipynb. Needs matplotlib.

Each function draws into the axes that it is given, or says there that the run has no such data.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogFormatter, MaxNLocator

from uma_trio.telemetry.perf_records import Run
from uma_trio.telemetry.perf_summary import column, inter_token_ms, load_at

DECODE, PREFILL, OTHER = "#0072b2", "#e66100", "#7a7a7a"

TIMELINE_TICKS: Final = 60
MAX_POINTS: Final = 20_000
"""More points are thinned out evenly, which keeps the file small."""

MIN_MS: Final = 0.1
"""Lower end of logarithmic axes."""


def draw(run: Run, *, at_s: float | None = None) -> Figure:
    """Draw all four plots on one page. ``at_s`` as in ``tick_timeline``."""
    figure = Figure(figsize=(15, 10), layout="constrained")
    axes = figure.subplot_mosaic([["ticks"] * 3, ["itl", "ttft", "predicted"]], height_ratios=[1, 1.1])
    tick_timeline(run, axes["ticks"], at_s=at_s)
    inter_token_cdf(run, axes["itl"])
    ttft_by_load(run, axes["ttft"])
    predicted_vs_measured(run, axes["predicted"])
    header = run.header
    figure.suptitle(f"{header.model} ({header.description}), started {header.started[:19].replace('T', ' ')}")
    return figure


def inter_token_cdf(run: Run, axes: Axes) -> None:
    """The cumulative distribution of inter-token latencies, with p50, p95, p99 and the target."""
    _frame(axes, "Inter-token latency", "ms", "share of gaps")
    values = np.maximum(np.sort(inter_token_ms(run.requests)), MIN_MS)
    if not len(values):
        _no_data(axes, "no finished request with two tokens")
        return
    kept = _thinned(len(values))
    axes.step(values[kept], (kept + 1) / len(values), where="post", color=DECODE)
    for level in (0.5, 0.95, 0.99):
        at = float(np.quantile(values, level))
        axes.plot(at, level, "o", color=DECODE, markersize=4)
        text = f"p{level * 100:.0f}  {at:.1f} ms"
        axes.annotate(text, (at, level), xytext=(-7, 4), textcoords="offset points", ha="right", fontsize=8)
    target = run.header.scheduling.get("target_itl_ms")
    if isinstance(target, int | float):
        axes.axvline(target, color=PREFILL, linestyle="--", linewidth=1, label="target_itl_ms")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set(xscale="log", ylim=(0, 1.03), xlim=(values[0] / 3, None))
    _plain_log(axes, "x")


def tick_timeline(run: Run, axes: Axes, *, at_s: float | None = None, n_ticks: int = TIMELINE_TICKS) -> None:
    """One bar for each tick, and below it one bar for each sequence that the tick computed.

    Args:
        at_s: time in the middle, in seconds since the start of the run. Default: the longest tick with a prefill.
        n_ticks: number of ticks to show.
    """
    _frame(axes, "Ticks and their sequences", "seconds since the start of the run", "")
    if not run.ticks:
        _no_data(axes, "no ticks")
        return
    if at_s is None:
        middle = max(range(len(run.ticks)), key=lambda i: (run.ticks[i].n_prefills > 0, run.ticks[i].duration_ms))
    else:
        middle = int(np.searchsorted(column(run.ticks, "start_s"), at_s))
    first = max(0, min(middle - n_ticks // 3, len(run.ticks) - n_ticks))
    ticks = run.ticks[first : first + n_ticks]
    prefilled = [{seq_id for seq_id, _ in tick.prefill_chunks} for tick in ticks]
    seq_ids = sorted(set().union(*prefilled, *[tick.decode_seq_ids for tick in ticks]))
    row = {seq_id: n + 1 for n, seq_id in enumerate(seq_ids)}
    bars, colours = [], []
    for tick, prefills in zip(ticks, prefilled, strict=True):
        rows = {0: OTHER} | {row[s]: DECODE for s in tick.decode_seq_ids} | {row[s]: PREFILL for s in prefills}
        for at, colour in rows.items():
            bars.append(Rectangle((tick.start_s, at - 0.4), tick.duration_ms / 1e3, 0.8))
            colours.append(colour)
    edge = 0.4 if len(seq_ids) < 64 else 0.0
    axes.add_collection(PatchCollection(bars, facecolors=colours, edgecolors="white", linewidths=edge))
    axes.set_xlim(ticks[0].start_s, max(max(tick.end_s, tick.start_s + 1e-3) for tick in ticks))
    axes.set_ylim(len(seq_ids) + 0.7, -0.7)
    labels = {0: "tick"} | {row[seq_id]: f"seq {seq_id}" for seq_id in seq_ids[:: len(seq_ids) // 24 + 1]}
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8)
    axes.grid(visible=False, axis="y")
    legend = [Patch(color=DECODE, label="decode"), Patch(color=PREFILL, label="prefill")]
    axes.legend(handles=legend, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)


def ttft_by_load(run: Run, axes: Axes) -> None:
    """One point for each request: time to first token against the number of other requests on its arrival."""
    _frame(axes, "Time to first token by load", "other requests on arrival", "ms")
    answered = [request for request in run.requests if request.ttft_ms is not None]
    if not answered:
        _no_data(axes, "no finished request with a token")
        return
    loads = load_at(run.ticks, column(answered, "arrived_s"))
    ttft_ms = np.maximum(column(answered, "ttft_ms"), MIN_MS)
    computed = np.maximum(column(answered, "prompt_tokens") - column(answered, "cached_tokens"), 1)
    kept = _thinned(len(answered))
    x = loads[kept] + np.random.default_rng(0).uniform(-0.25, 0.25, len(kept))
    points = axes.scatter(x, ttft_ms[kept], c=computed[kept], cmap="viridis_r", norm="log", s=20, linewidths=0)
    axes.figure.colorbar(points, ax=axes, label="computed prompt tokens", format=LogFormatter())
    for n, load in enumerate(np.unique(loads)):
        median = np.median(ttft_ms[loads == load])
        axes.hlines(median, load - 0.35, load + 0.35, color=PREFILL, linewidth=2, label="" if n else "median")
    axes.legend(frameon=False, fontsize=8)
    axes.set(yscale="log", xlim=(loads.min() - 0.7, loads.max() + 0.7))
    _plain_log(axes, "y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def predicted_vs_measured(run: Run, axes: Axes) -> None:
    """One point for each tick. On the diagonal the cost model was right."""
    _frame(axes, "Predicted and measured ticks", "measured ms", "predicted ms")
    measured, predicted = column(run.ticks, "duration_ms"), column(run.ticks, "predicted_ms")
    usable = (predicted > 0) & (measured > 0)
    if not usable.any():
        _no_data(axes, "no predicted ticks")
        return
    both = np.concatenate([measured[usable], predicted[usable]])
    line = np.array([both.min() / 1.3, both.max() * 1.3])
    axes.fill_between(line, line / 1.2, line * 1.2, color=OTHER, alpha=0.15, linewidth=0, label="within 20 %")
    axes.plot(line, line, color=OTHER, linewidth=1)
    has_prefill = column(run.ticks, "n_prefills") > 0
    for selected, colour, name in ((~has_prefill, DECODE, "decode only"), (has_prefill, PREFILL, "with prefill")):
        at = np.flatnonzero(selected & usable)
        kept = at[_thinned(len(at))]
        axes.scatter(measured[kept], predicted[kept], s=6, color=colour, linewidths=0, label=f"{name} ({len(at):,})")
    axes.set(xscale="log", yscale="log", xlim=tuple(line), ylim=tuple(line), aspect="equal")
    _plain_log(axes, "x")
    _plain_log(axes, "y")
    axes.legend(frameon=False, fontsize=8, loc="upper left", markerscale=2)


def _thinned(n: int) -> npt.NDArray[np.intp]:
    return np.unique(np.linspace(0, n - 1, min(n, MAX_POINTS)).astype(np.intp))


def _frame(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.5)


def _plain_log(axes: Axes, which: str) -> None:
    """Label a logarithmic axis with plain numbers, between the decades too if it spans few of them."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axis.set_tick_params(which="minor", labelsize=7)


def _no_data(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=OTHER)
