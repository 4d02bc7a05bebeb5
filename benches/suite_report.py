"""The report of ``uma-trio bench``: one self-contained HTML file."""

from __future__ import annotations

import base64
import datetime
import html
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from suite_runs import PERF_LOG, Outcome, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --faint: #888; --wrong: #c0392b; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
p { margin: .4rem 0; } .faint { color: var(--faint); } .wrong { color: var(--wrong); font-weight: 600; }
.scrolls { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; } th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: white; border-radius: 4px; margin: .5rem 0; display: block; }
pre { overflow-x: auto; font-size: 12px; line-height: 1.4; } code { font-size: 13px; }
summary { cursor: pointer; color: var(--faint); }
"""


def write(settings: Settings, outcomes: Sequence[Outcome], command: str) -> Path:
    """Write ``report.html`` into ``settings.out``, and return its path."""
    path = settings.out / "report.html"
    path.write_text(_page(settings, outcomes, command))
    return path


def _page(settings: Settings, outcomes: Sequence[Outcome], command: str) -> str:
    today = datetime.date.today().isoformat()
    model = settings.model.name if settings.model is not None else "the embedded model"
    contents = "".join(
        f'<tr><td><a href="#{outcome.bench.name}">{html.escape(outcome.bench.title)}</a></td>'
        f'<td class="{"wrong" if outcome.code else "faint"}">{outcome.state}</td>'
        f"<td>{outcome.duration_s:.0f} s</td></tr>"
        for outcome in outcomes
    )
    quick = " The figures are rough: the runs were short (--quick)." if settings.quick else ""
    no_plots = "" if settings.has_matplotlib else "<p>There are no plots, since matplotlib is not installed.</p>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>uma-trio bench, {today}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n'
        f"<h1>uma-trio bench</h1><p>{today}, {html.escape(model)}. <code>{html.escape(command)}</code></p>"
        f"<pre>{html.escape(_machine(outcomes))}</pre>"
        f'<p class="faint">Read the figures as ratios: any other load on the machine is part of them.{quick} '
        "docs/BENCHMARKS.md explains the columns. The CSV files and the output of each benchmark are in the folder of "
        "this page.</p>"
        f'{no_plots}<div class="scrolls"><table>{contents}</table></div>\n'
        f"{''.join(_section(settings, outcome) for outcome in outcomes)}</body></html>\n"
    )


def _machine(outcomes: Sequence[Outcome]) -> str:
    """Return the description of the machine that each benchmark prints first."""
    for outcome in outcomes:
        if lines := re.search(r"^cpu .*?^date[^\n]*", outcome.stdout, re.MULTILINE | re.DOTALL):
            return lines[0]
    return "no benchmark got far enough to describe the machine"


def _section(settings: Settings, outcome: Outcome) -> str:
    bench = outcome.bench
    parts = [
        f'<h2 id="{bench.name}">{html.escape(bench.title)}</h2>',
        f"<p>{html.escape(bench.about)}</p>",
    ]
    if outcome.skipped:
        parts.append(f'<p class="faint">Skipped: {html.escape(outcome.skipped)}</p>')
    if outcome.code:
        parts.append(f'<p class="wrong">{outcome.state}</p><pre>{html.escape(outcome.stderr[-2000:])}</pre>')
    parts += [_image(png, bench.title) for png in _plots(settings, outcome)]
    parts += [_table(block) for block in re.findall(r"(?:^\|.*\n?)+", outcome.stdout, re.MULTILINE)]
    shown = shlex.join([Path(outcome.command[1]).name, *outcome.command[2:]])
    parts.append(
        f"<details><summary>full output</summary><p><code>{html.escape(shown)}</code></p>"
        f"<pre>{html.escape(outcome.stdout + outcome.stderr)}</pre></details>\n"
    )
    return "".join(parts)


def _table(block: str) -> str:
    """Convert a Markdown table to HTML."""
    head, _, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().splitlines()
    )
    lines = [_row(head, "th"), *(_row(row, "td") for row in rows)]
    return f'<div class="scrolls"><table>{"".join(lines)}</table></div>'


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


# -- plots -----------------------------------------------------------------------------------------


def _plots(settings: Settings, outcome: Outcome) -> Iterator[bytes]:
    """Yield the PNGs of a successful benchmark: its own plot, and plots of its perf log."""
    if outcome.code or not settings.has_matplotlib:
        return
    drawn = settings.out / f"{outcome.bench.name}.png"
    if outcome.bench.has_plot and drawn.exists():
        yield drawn.read_bytes()
    log = settings.out / PERF_LOG
    if outcome.bench.perf_log and log.exists():
        yield from _of_perf_log(log.read_bytes())


def _of_perf_log(data: bytes) -> Iterator[bytes]:
    from matplotlib.figure import Figure

    from uma_trio.cli.perf_plots import inter_token_cdf, tick_timeline
    from uma_trio.telemetry.perf_records import decode

    run = decode(data)[-1]
    for draw, size in ((inter_token_cdf, (9, 4.5)), (tick_timeline, (12, 3.5))):
        figure = Figure(figsize=size, layout="constrained")
        draw(run, figure.subplots())
        yield _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _image(png: bytes, title: str) -> str:
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
