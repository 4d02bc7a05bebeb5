"""Pictures of a perf log's run, for ``uma-trio perf report --plot`` and notebooks/perf.ipynb.

The one module that needs matplotlib.  Each function draws into the axes it is given, and says so there if
the run has nothing to draw.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from uma_trio.telemetry.perf_format import Run
from uma_trio.telemetry.perf_records import TickRecord
from uma_trio.telemetry.perf_summary import Columns, itl_ms, load_at

DECODE, PROMPT, OTHER = "#0072b2", "#e66100", "#7a7a7a"
BY_SHARE: Final = LinearSegmentedColormap.from_list("share of prompt tokens", [DECODE, "#c9b8c4", PROMPT])

GANTT_TICKS: Final = 60
MOST_DOTS: Final = 20_000
"""More are thinned out evenly: the eye sees no difference, and the file stays small."""

PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,g}")

SHORTEST_MS: Final = 0.1
"""Of logarithmic axes: tokens that a guess brought along come at the same moment."""


def draw(run: Run, *, at_s: float | None = None) -> Figure:
    """All four on one page; ``at_s`` as for ``tick_gantt``."""
    figure = Figure(figsize=(15, 10), layout="constrained")
    axes = figure.subplot_mosaic([["ticks"] * 3, ["itl", "ttft", "predicted"]], height_ratios=[1, 1.1])
    tick_gantt(run, axes["ticks"], at_s=at_s)
    itl_cdf(run, axes["itl"])
    ttft_against_load(run, axes["ttft"])
    predicted_against_measured(run, axes["predicted"])
    header = run.header
    figure.suptitle(
        f"{header.model} ({header.description}), run of {header.started[:19].replace('T', ' ')}", fontsize=12
    )
    return figure


def itl_cdf(run: Run, axes: Axes) -> None:
    """The inter-token latencies, cumulated: at which share of the tokens did a reader wait at most so long?"""
    _frame(axes, "Inter-token latency", "ms", "share of tokens that took at most so long")
    values = np.sort(itl_ms(run.requests))
    if not len(values):
        _nothing(axes, "no request with two tokens has ended")
        return
    shown = np.maximum(values, SHORTEST_MS)
    kept = _thinned(len(values))
    axes.step(shown[kept], (kept + 1) / len(values), where="post", color=DECODE, linewidth=1.6)
    axes.set_xscale("log")
    for level in (0.5, 0.95, 0.99):
        at = float(np.quantile(values, level))
        axes.plot(max(at, SHORTEST_MS), level, "o", color=DECODE, markersize=4)
        axes.annotate(
            f"p{level * 100:.0f}  {at:.1f} ms",
            (max(at, SHORTEST_MS), level),
            xytext=(-7, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    target = run.header.scheduling.get("target_tbt_ms")
    if isinstance(target, int | float):
        axes.axvline(target, color=PROMPT, linestyle="--", linewidth=1)
        axes.annotate(
            "target_tbt_ms",
            (target, 0.02),
            xytext=(3, 0),
            textcoords="offset points",
            color=PROMPT,
            fontsize=8,
            rotation=90,
        )
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=float(shown[0]) / 3)
    _plain_log(axes, "x")


def tick_gantt(run: Run, axes: Axes, *, at_s: float | None = None, n_ticks: int = GANTT_TICKS) -> None:
    """A bar for each tick as wide as it took, and below it what each sequence had in it.

    Args:
        at_s: the moment in the middle, in seconds since the run's beginning; the longest tick that held
            a prompt if not given.
        n_ticks: how many to show.
    """
    _frame(axes, "Ticks and what they held", "seconds since the beginning of the run", "")
    if not run.ticks:
        _nothing(axes, "no tick was recorded")
        return
    ticks = _around(run.ticks, at_s, n_ticks)
    lanes = sorted({seq_id for tick in ticks for seq_id in (*tick.seq_ids, *(seq_id for seq_id, _ in tick.prompts))})
    strip = max(0.9, len(lanes) / 12)
    row = {seq_id: at + strip / 2 + 0.9 for at, seq_id in enumerate(lanes)}
    bars, colours = [], []
    for tick in ticks:
        width, all_tokens = tick.ms / 1e3, tick.prompt_tokens + tick.streams + tick.drafted
        bars.append(Rectangle((tick.t_s, -strip / 2), width, strip))
        colours.append(BY_SHARE(tick.prompt_tokens / all_tokens if all_tokens else 0.0))
        for seq_id in tick.seq_ids:
            bars.append(Rectangle((tick.t_s, row[seq_id] - 0.34), width, 0.68))
            colours.append(to_rgba(DECODE))
        for seq_id, _ in tick.prompts:
            bars.append(Rectangle((tick.t_s, row[seq_id] - 0.34), width, 0.68))
            colours.append(to_rgba(PROMPT))
    axes.add_collection(
        PatchCollection(bars, facecolors=colours, edgecolors="white", linewidths=0.4 if len(lanes) < 64 else 0)
    )
    begin, end = ticks[0].t_s, max(tick.t_s + max(tick.ms, 1.0) / 1e3 for tick in ticks)
    axes.set_xlim(begin, end)
    axes.set_ylim(max(row.values(), default=0.0) + 0.8, -strip / 2 - 0.25)
    step = math.ceil(len(lanes) / 24) or 1
    labels = {0.0: "tick", **{row[seq_id]: f"seq {seq_id}" for seq_id in lanes[::step]}}
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for tick in ticks:  # sizes of chunks, where there is room for them
        for seq_id, n in tick.prompts:
            if tick.ms / 1e3 > 0.012 * len(str(n)) / 2 * (end - begin) and len(lanes) <= 32:
                middle = tick.t_s + tick.ms / 2e3
                axes.text(middle, row[seq_id], str(n), color="white", ha="center", va="center", fontsize=6.5)
    axes.legend(
        handles=[
            Patch(color=DECODE, label="decodes a token"),
            Patch(color=PROMPT, label="reads so many tokens of a prompt"),
        ],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=8,
    )


def ttft_against_load(run: Run, axes: Axes) -> None:
    """A dot for each request: how long until its first token, with so many others there when it came."""
    _frame(axes, "Time to first token against load", "requests that were there when it came", "ms")
    answered = [request for request in run.requests if request.ttft_ms is not None]
    if not answered:
        _nothing(axes, "no request with a token has ended")
        return
    loads = load_at(Columns.of(run.ticks), np.array([request.arrived_s for request in answered]))
    ttft_ms = np.maximum([request.ttft_ms or 0.0 for request in answered], SHORTEST_MS)
    computed = np.array([request.prompt_tokens - request.cached_tokens for request in answered])
    kept = _thinned(len(answered))
    jitter = np.random.default_rng(0).uniform(-0.25, 0.25, len(kept))
    dots = axes.scatter(
        loads[kept] + jitter,
        ttft_ms[kept],
        c=np.maximum(computed[kept], 1),
        cmap="viridis_r",
        norm="log",
        s=20,
        zorder=3,
        linewidths=0,
    )
    bar = axes.figure.colorbar(dots, ax=axes, label="tokens of its prompt that were computed", format=PLAIN)
    bar.ax.minorticks_off()
    for load in np.unique(loads):
        median = np.median(ttft_ms[loads == load])
        axes.plot(
            [load - 0.35, load + 0.35],
            [median, median],
            color=PROMPT,
            linewidth=2,
            label="median" if load == loads.min() else None,
        )
    axes.legend(frameon=False, fontsize=8, loc="best")
    axes.set_yscale("log")
    _plain_log(axes, "y")
    axes.set_xlim(loads.min() - 0.7, loads.max() + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def predicted_against_measured(run: Run, axes: Axes) -> None:
    """A dot for each tick; on the diagonal the cost model was right."""
    _frame(axes, "Predicted and measured ticks", "measured ms", "predicted ms")
    columns = Columns.of(run.ticks)
    usable = (columns.predicted_ms > 0) & (columns.ms > 0)
    if not usable.any():
        _nothing(axes, "no tick was predicted")
        return
    measured, predicted, with_prompts = (
        columns.ms[usable],
        columns.predicted_ms[usable],
        columns.prompts[usable] > 0,
    )
    low = float(min(measured.min(), predicted.min())) / 1.3
    high = float(max(measured.max(), predicted.max())) * 1.3
    line = np.array([low, high])
    axes.fill_between(line, line / 1.2, line * 1.2, color=OTHER, alpha=0.15, linewidth=0, label="within 20 %")
    axes.plot(line, line, color=OTHER, linewidth=1)
    for which, colour, label in (
        (~with_prompts, DECODE, "streams alone"),
        (with_prompts, PROMPT, "with prompts"),
    ):
        n = int(which.sum())
        kept = _thinned(n)
        axes.plot(
            measured[which][kept],
            predicted[which][kept],
            ".",
            color=colour,
            markersize=4,
            alpha=0.5,
            markeredgewidth=0,
            label=f"{label} ({n:,})",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    _plain_log(axes, "x")
    _plain_log(axes, "y")
    legend = axes.legend(frameon=False, fontsize=8, loc="upper left", markerscale=2)
    for handle in legend.legend_handles:
        if handle is not None and handle.get_alpha() == 0.5:
            handle.set_alpha(1)


def _around(ticks: list[TickRecord], at_s: float | None, n: int) -> list[TickRecord]:
    """Some ``n`` ticks with the one at ``at_s`` among them."""
    if at_s is None:
        middle = max(range(len(ticks)), key=lambda i: (bool(ticks[i].prompts), ticks[i].ms))
    else:
        middle = int(np.searchsorted([tick.t_s for tick in ticks], at_s))
    first = max(0, min(middle - n // 3, len(ticks) - n))
    return ticks[first : first + n]


def _thinned(n: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.unique(np.linspace(0, n - 1, min(n, MOST_DOTS)).astype(np.intp))


def _frame(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.5)


def _plain_log(axes: Axes, which: str) -> None:
    """Ticks at 1, 2, 5 and the like within the limits, written as plain numbers."""
    axis, (low, high) = (axes.xaxis, axes.get_xlim()) if which == "x" else (axes.yaxis, axes.get_ylim())
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    places = [s * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for s in steps]
    axis.set_major_locator(FixedLocator([place for place in places if low <= place <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(PLAIN)


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=OTHER)
