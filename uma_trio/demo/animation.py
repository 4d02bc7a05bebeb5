"""Writes what a terminal showed as an animated SVG file.

The file needs nothing from elsewhere: no script, no font.  Where nothing moves, it shows the last frame.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

import attrs
from rich.cells import cell_len
from rich.color import blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME

FONT: Final = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
FONT_PX: Final = 14
COLUMN_PX: Final = 8.4
LINE_PX: Final = 16
"""A little less than the height of the usual fonts, so that bars and frames have no gaps between lines."""
MARGIN_PX: Final = 12
TITLE_PX: Final = 34

Line = Sequence[Segment]


@attrs.frozen
class Frame:
    """What the terminal showed from a moment on."""

    at_s: float
    """Seconds since the first frame."""
    lines: Sequence[Line]


def lines_of(renderable: RenderableType, width: int) -> list[Line]:
    """Render for a terminal of ``width`` columns."""
    console = Console(width=width, force_terminal=True, color_system="truecolor", highlight=False)
    return list(console.render_lines(renderable, console.options, pad=False))


def svg(frames: Sequence[Frame], *, title: str, width: int, hold_s: float = 0.0) -> str:
    """Return the text of an SVG file that repeats ``frames`` for ever; a single frame stands still.

    A line that does not change is in the file once, however many frames show it.

    Args:
        width: columns of the terminal.
        hold_s: how long to show the last frame.
    """
    classes = _Classes()
    duration_s = frames[-1].at_s + hold_s
    height = max(len(frame.lines) for frame in frames)
    keyframes: dict[tuple[int, int], str] = {}
    body = []
    for row in range(height):
        drawn = [_draw(frame.lines[row], row, classes) if row < len(frame.lines) else "" for frame in frames]
        at = 0
        for markup, same in itertools.groupby(drawn):
            first, at = at, at + len(list(same))
            if not markup:
                continue
            if (first, at) == (0, len(frames)):
                body.append(markup)
                continue
            name = keyframes.setdefault((first, at), f"k{len(keyframes)}")
            last = "" if at == len(frames) else " h"
            body.append(f'<g class="a{last}" style="animation-name:{name}">{markup}</g>')
    starts = [100 * frame.at_s / duration_s if duration_s else 0.0 for frame in frames]
    style = [
        f"text{{font:{FONT_PX}px {FONT};white-space:pre}}",
        f".a{{animation:{duration_s:.2f}s step-end infinite}}.h{{visibility:hidden}}",
        *(f"@keyframes {name}{{{_visible(*span, starts)}}}" for span, name in keyframes.items()),
        "@media (prefers-reduced-motion:reduce){.a{animation:none}}",
        *classes.rules,
    ]
    size = (2 * MARGIN_PX + width * COLUMN_PX, TITLE_PX + MARGIN_PX + height * LINE_PX)
    background = SVG_EXPORT_THEME.background_color.hex
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" width="{size[0]:.0f}">',
            f"<title>{escape(title)}</title>",
            f"<style>{''.join(style)}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{background}"/>',
            f'<text x="50%" y="22" text-anchor="middle" fill="#9a9b99">{escape(title)}</text>',
            f'<g transform="translate({MARGIN_PX},{TITLE_PX})">',
            *body,
            "</g></svg>\n",
        ]
    )


def _visible(first: int, end: int, starts: Sequence[float]) -> str:
    """Keyframes of a line that is shown by the frames from ``first`` to before ``end``."""
    before = "0%{visibility:hidden}" if first else ""
    after = f"{starts[end]:.2f}%{{visibility:hidden}}" if end < len(starts) else "to{visibility:visible}"
    return f"{before}{starts[first]:.2f}%{{visibility:visible}}{after}"


class _Classes:
    """CSS classes of text styles, made when they are first used."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: Style) -> str:
        return self._names.setdefault(_css(style), f"s{len(self._names)}")

    @property
    def rules(self) -> Iterator[str]:
        return (f".{name}{{{css}}}" for css, name in self._names.items())


def _draw(line: Line, row: int, classes: _Classes) -> str:
    """Return the markup of a line.

    Words that are further than a space from each other are elements of their own, each at its column, so that a font
    with glyphs of other widths moves nothing far.
    """
    markup, words, column = [], list[str](), 0
    begins = ends = 0
    y = row * LINE_PX + FONT_PX - 1

    def close() -> None:
        if words:
            length = (ends - begins) * COLUMN_PX
            markup.append(
                f'<text x="{begins * COLUMN_PX:.1f}" y="{y}" textLength="{length:.1f}">{"".join(words)}</text>'
            )
            words.clear()

    for style, segments in itertools.groupby(line, lambda segment: segment.style or Style.null()):
        text = "".join(segment.text for segment in segments if not segment.control)
        if (behind := _background(style)) is not None:
            close()
            place = f'x="{column * COLUMN_PX:.1f}" y="{row * LINE_PX}" width="{cell_len(text) * COLUMN_PX:.1f}"'
            markup.append(f'<rect {place} height="{LINE_PX}" fill="{behind.hex}"/>')
        for word in re.findall(r"(?:\S| (?! ))+| {2,}| +$", text):
            if word.strip():
                if not words:
                    begins = column
                words.append(f'<tspan class="{classes.name(style)}">{escape(word, quote=False)}</tspan>')
                ends = column + cell_len(word)
            else:
                close()
            column += cell_len(word)
    close()
    return "".join(markup)


@functools.lru_cache(maxsize=1024)
def _css(style: Style) -> str:
    colour = _colour(style)
    if style.dim:
        colour = blend_rgb(colour, _background(style) or SVG_EXPORT_THEME.background_color, 0.4)
    rules = [f"fill:{colour.hex}"]
    if style.bold:
        rules.append("font-weight:bold")
    if style.italic:
        rules.append("font-style:italic")
    if style.underline:
        rules.append("text-decoration:underline")
    return ";".join(rules)


def _colour(style: Style) -> ColorTriplet:
    chosen = style.bgcolor if style.reverse else style.color
    if chosen is None or chosen.is_default:
        return SVG_EXPORT_THEME.background_color if style.reverse else SVG_EXPORT_THEME.foreground_color
    return chosen.get_truecolor(SVG_EXPORT_THEME, foreground=not style.reverse)


def _background(style: Style) -> ColorTriplet | None:
    """Return the colour behind the text; ``None`` if it is the terminal's."""
    chosen = style.color if style.reverse else style.bgcolor
    if chosen is None or chosen.is_default:
        return SVG_EXPORT_THEME.foreground_color if style.reverse else None
    return chosen.get_truecolor(SVG_EXPORT_THEME, foreground=bool(style.reverse))
