"""Shows an answer while it streams: as plain text, or as Markdown on a terminal."""

from __future__ import annotations

import math
import os
import sys
from typing import ClassVar, Final, Protocol, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table

from uma_trio.cli.answer import printable

FRAME_S: Final = 1 / 15
"""Interval between two frames."""

BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronized output (mode 2026): a terminal that knows it shows a frame at once.  Others ignore it."""


class AnswerView(Protocol):
    """Where an answer is shown."""

    def feed(self, text: str) -> None:
        """Append ``text`` to the answer."""

    def refresh(self) -> None:
        """Show what was fed.  Called once a frame."""

    def finish(self) -> None:
        """Show everything; the cursor is then at the beginning of a line."""


class PlainView:
    """Writes the text as it comes.  Control characters are replaced on a terminal only."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._clean = printable if file.isatty() else str
        self._last = "\n"

    def feed(self, text: str) -> None:
        if text:
            self._file.write(self._clean(text))
            self._file.flush()
            self._last = text[-1]

    def refresh(self) -> None:
        pass

    def finish(self) -> None:
        if self._last != "\n":
            self._file.write("\n")
            self._file.flush()
            self._last = "\n"


class MarkdownView:
    """Renders Markdown on a terminal.

    Lines that can no longer change are printed once and scroll away like any output.  Only the last block (a paragraph,
    a list, a piece of code) can still change, so only its lines are drawn again with each frame.  If the last block is
    taller than the terminal, its upper lines are printed as well.
    """

    def __init__(self, file: TextIO = sys.stdout) -> None:
        self._file = file
        self._last_block = ""
        """Markdown from the beginning of the last block."""
        self._n_printed = 0
        """Lines of the last block that are printed already, with the empty line in front of it."""
        self._drawn: list[int] = []
        """Widths of the lines that the next frame draws again."""
        self._has_printed_blocks = False
        """Whether there are blocks before the last one; an empty line separates it from them."""
        self._dirty = False

    def feed(self, text: str) -> None:
        self._last_block += printable(text)
        self._dirty = True

    def refresh(self) -> None:
        if self._dirty:
            self._draw(final=False)

    def finish(self) -> None:
        self._draw(final=True)

    def _draw(self, *, final: bool) -> None:
        self._dirty = False
        width, height = os.get_terminal_size(self._file.fileno())
        console = Console(file=self._file, width=width, height=height)
        rows = self._rows_on_screen(width, height)
        lines: list[list[Segment]] = []
        size = len(self._last_block) if final else closed_size(self._last_block)
        if size:
            lines += self._new_lines(console, self._last_block[:size])
            self._last_block, self._n_printed = self._last_block[size:], 0
            self._has_printed_blocks = self._has_printed_blocks or bool(lines)
        tail = self._new_lines(console, self._last_block)
        n_scrolled = max(0, len(tail) - max(1, height - 2))
        self._n_printed += n_scrolled
        lines += tail[:n_scrolled]
        self._write(console, lines, tail[n_scrolled:], rows)

    def _rows_on_screen(self, width: int, height: int) -> int:
        """Rows that the last frame now occupies; more than its lines if the terminal became narrower.

        If the terminal became lower, it has scrolled some rows away.  Nothing can draw over them: they count as printed.
        """
        rows = [max(1, math.ceil(line_width / width)) for line_width in self._drawn]
        while sum(rows) >= height > 1:
            del rows[0]
            self._n_printed += 1
        return sum(rows)

    def _new_lines(self, console: Console, text: str) -> list[list[Segment]]:
        """The lines of ``text`` that are not printed yet, after an empty one if ``text`` follows other blocks."""
        lines = render_lines(console, text)
        if lines and self._has_printed_blocks:
            lines.insert(0, [])
        return lines[self._n_printed :]

    def _write(self, console: Console, above: list[list[Segment]], tail: list[list[Segment]], rows: int) -> None:
        out = [f"\x1b[{rows}A" if rows else "", "\r\x1b[J"]
        out += [self._encoded(console, line) + "\n" for line in (*above, *tail)]
        self._drawn = [sum(segment.cell_length for segment in line) for line in tail]
        self._file.write(BEGIN_FRAME + "".join(out) + END_FRAME)
        self._file.flush()

    def _encoded(self, console: Console, line: list[Segment]) -> str:
        with console.capture() as capture:
            console.print(_Line(line), end="")
        return capture.get()


def closed_size(text: str) -> int:
    """Length of the part of ``text`` that later text cannot change: all Markdown blocks but the last.

    An incomplete last line does not count: it may turn out to be anything.
    """
    complete = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _PARSER.parse(complete) if token.level == 0 and token.map]
    if not starts or not starts[-1]:
        return 0
    return sum(len(line) + 1 for line in complete.split("\n")[: starts[-1]])


def render_lines(console: Console, text: str) -> list[list[Segment]]:
    """The lines of a Markdown text, without empty ones at the ends.

    HTML is shown as text, links with their addresses, and the line breaks of the text are kept: a model means them.
    """
    markdown = _Markdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = _PARSER.parse(text)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    lines = [_without_padding(line) for line in console.render_lines(markdown, pad=False)]
    while lines and not lines[-1]:
        lines.pop()
    n_empty = next((n for n, line in enumerate(lines) if line), 0)  # rich begins a list with an empty line
    return lines[n_empty:]


def _without_padding(line: list[Segment]) -> list[Segment]:
    """``line`` without spaces at its end, which a narrower terminal would wrap."""
    line = line.copy()
    while line:
        text = line[-1].text.rstrip()
        if text:
            return [*line[:-1], Segment(text, line[-1].style)]
        line.pop()
    return line


_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _Code(CodeBlock):
    """A code block without empty lines around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class _Heading(Heading):
    """A heading at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Table(TableElement):
    """A table without empty lines around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            table.show_edge = False
            yield table


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
        "table_open": _Table,
    }


class _Line:
    """One rendered line."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments
