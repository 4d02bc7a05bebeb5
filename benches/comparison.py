"""Compares settings of several servers under the same load: rows of runs, medians, ratios, a plot."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import attrs
from measure import Result
from report import cell, table
from rigs import Rig

from uma_trio.demo.recording import durations_ms, percentile

US = "uma-trio"

Record = TypeVar("Record", bound=attrs.AttrsInstance)


@attrs.frozen(kw_only=True)
class Contender:
    """A server with one setting."""

    server: str
    setting: str
    rig: Callable[[], AbstractAsyncContextManager[Rig]]

    @property
    def ours(self) -> bool:
        return self.server == US

    def __str__(self) -> str:
        return f"{self.server} {self.setting}".strip()


def interleaved(ours: Sequence[Contender], rivals: Sequence[Contender], repeat: int) -> Iterator[Contender]:
    """Alternate between ``ours`` and ``rivals``, ``repeat`` times, so that temporary noise affects both."""
    for _ in range(repeat):
        for pair in itertools.zip_longest(rivals, ours):
            yield from (contender for contender in pair if contender is not None)


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several; ``None`` without a measurement."""

    wall_s: float
    tokens_per_s: float
    itl_p50_ms: float | None
    """Interactive streams; likewise the next three."""
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    ttft_p50_ms: float | None
    """Long prompts; likewise the next."""
    ttft_max_ms: float | None
    generator_cpu: float
    """Share of one core; likewise the next two."""
    server_cpu: float | None
    others_cpu: float

    @classmethod
    def of(cls, result: Result) -> Figures:
        short = [track for track in result.tracks if track.stream.interactive]
        long = [track for track in result.tracks if not track.stream.interactive]
        itl = durations_ms(gap for track in short for gap in track.gaps)
        ttft = [answer.ttft_ms for track in long for answer in track.answers if answer.ttft_ms is not None]
        cpu, wall_s = result.cpu, result.wall_s
        return cls(
            wall_s=wall_s,
            tokens_per_s=result.tokens_per_s,
            itl_p50_ms=percentile(itl, 50),
            itl_p95_ms=percentile(itl, 95),
            itl_p99_ms=percentile(itl, 99),
            itl_max_ms=max(itl, default=None),
            ttft_p50_ms=percentile(ttft, 50),
            ttft_max_ms=max(ttft, default=None),
            generator_cpu=cpu.generator / wall_s,
            server_cpu=None if cpu.server is None else cpu.server / wall_s,
            others_cpu=cpu.others / wall_s,
        )


NAMES = [field.name for field in attrs.fields(Figures)]


def medians(runs: Sequence[Record]) -> Record:
    """The median of each figure over all runs; ``None`` if a run has no value."""
    columns = {name: [getattr(run, name) for run in runs] for name in attrs.asdict(runs[0])}
    return attrs.evolve(
        runs[0], **{name: None if None in values else statistics.median(values) for name, values in columns.items()}
    )


class RunsFile:
    """A CSV file with a row for each run.  A row is written as soon as its run ends."""

    def __init__(self, path: Path | None, columns: Sequence[str]) -> None:
        self._path = path
        if path is not None:
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(columns)

    def add(self, *values: object) -> None:
        """Append a row."""
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                csv.writer(file).writerow([round(value, 4) if isinstance(value, float) else value for value in values])


@attrs.frozen
class Comparison:
    """The medians of each contender, in the order of the table.  The ratios are relative to the first rival."""

    figures: dict[Contender, Figures]

    @property
    def ours(self) -> list[Contender]:
        return [contender for contender in self.figures if contender.ours]

    @property
    def rivals(self) -> list[Contender]:
        return [contender for contender in self.figures if not contender.ours]

    def show(self) -> str:
        """Tables of medians, of ratios, and of the nearest settings."""
        header = [
            "", "wall s", "tok/s", "ITL p50 ms", "p95", "p99", "max", "TTFT long p50 ms", "max", "generator cpu", "others cpu",
        ]  # fmt: skip
        lines = [
            [
                str(contender), cell(f.wall_s, 2), cell(f.tokens_per_s), cell(f.itl_p50_ms), cell(f.itl_p95_ms),
                cell(f.itl_p99_ms), cell(f.itl_max_ms), cell(f.ttft_p50_ms), cell(f.ttft_max_ms),
                f"{f.generator_cpu:.1%}", f"{f.others_cpu:.0%}",
            ]
            for contender, f in self.figures.items()
        ]  # fmt: skip
        return "\n\n".join([table(header, lines), self._ratios(), self._as_good()])

    def _ratios(self) -> str:
        """Ratios of each contender to the default of the rival."""
        base = self.figures[self.rivals[0]]
        names = [
            "wall_s",
            "tokens_per_s",
            "itl_p50_ms",
            "itl_p95_ms",
            "itl_p99_ms",
            "itl_max_ms",
            "ttft_p50_ms",
            "ttft_max_ms",
        ]
        lines = [
            [str(contender), *(ratio(getattr(figures, name), getattr(base, name)) for name in names)]
            for contender, figures in self.figures.items()
        ]
        header = [f"times {self.rivals[0]}", "wall", "tok/s", "ITL p50", "p95", "p99", "max", "TTFT long p50", "max"]
        return table(header, lines)

    def _as_good(self) -> str:
        """For each rival, the setting of ours that is at least as good in both wall time and p99, or the nearest one."""
        lines = []
        for rival in self.rivals:
            at = {ours: self._against(ours, rival) for ours in self.ours}
            best = min(at, key=lambda ours: (max(at[ours]), sum(at[ours])))
            wall, p99 = at[best]
            setting = str(best) if max(wall, p99) <= 1 else f"none; the nearest is {best}"
            lines.append([str(rival), setting, f"{wall:.2f}", f"{p99:.2f}"])
        return table(["", "at least as good in both", "wall ratio", "p99 ratio"], lines)

    def _against(self, ours: Contender, rival: Contender) -> tuple[float, float]:
        a, b = self.figures[ours], self.figures[rival]
        assert a.itl_p99_ms is not None
        assert b.itl_p99_ms is not None
        return a.wall_s / b.wall_s, a.itl_p99_ms / b.itl_p99_ms

    def plot(self, path: Path, title: str) -> None:
        """Plot wall time against p99.  A line connects the settings that no other setting of the server beats in both."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot, ticker

        figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
        for group, marker, colour in ((self.ours, "o", "C0"), (self.rivals, "s", "C1")):
            points = sorted(
                (self.figures[contender].itl_p99_ms, self.figures[contender].wall_s, contender.setting)
                for contender in group
            )
            axes.scatter(
                [p99 for p99, _, _ in points],
                [wall for _, wall, _ in points],
                marker=marker,
                color=colour,
                label=group[0].server,
            )
            best = [point for at, point in enumerate(points) if all(point[1] < other[1] for other in points[:at])]
            axes.plot([p99 for p99, _, _ in best], [wall for _, wall, _ in best], color=colour)
            for index, (p99, wall, setting) in enumerate(points):
                offset = (5, 6 if index % 2 else -12)  # alternating, since labels are long
                axes.annotate(setting, (p99, wall), xytext=offset, textcoords="offset points", fontsize=8, color=colour)
        axes.set_xscale("log")
        for axis_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(xlabel="ITL p99 of the interactive streams, ms (log)", ylabel="wall time, s")
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def ratio(value: float | None, base: float | None) -> str:
    """A cell with ``value / base``; a dash if one of them is missing."""
    return cell(value / base if value is not None and base else None, 2)
