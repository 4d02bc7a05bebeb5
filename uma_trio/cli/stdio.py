"""What is piped into a command, with a bound and as text; and notices on stderr, which are not part of an answer."""

from __future__ import annotations

import datetime
import shutil
import sys
import textwrap
from collections.abc import Container, Sequence
from typing import Final, NoReturn

import click

from uma_trio.cli.exits import FAILED

MAX_BYTES: Final = 64 << 20
"""The highest possible ``max_prompt_bytes``.  More, such as ``/dev/zero``, is refused."""


def read_stdin() -> bytes:
    """All that is piped in.  Blocks until the end of the input.

    Raises:
        click.UsageError: it is more than ``MAX_BYTES``.
    """
    return _checked(sys.stdin.buffer.read(MAX_BYTES + 1))


def read_line() -> bytes:
    """The next line that is piped in, with its line break; empty at the end.

    Raises:
        click.UsageError: as ``read_stdin``.
    """
    return _checked(sys.stdin.buffer.readline(MAX_BYTES + 1))


def to_text(data: bytes, source: str = "the text that is piped in") -> str:
    """Decode UTF-8.  Invalid bytes become U+FFFD, and a notice on stderr says how many: the input may be binary."""
    text = data.decode("utf-8", "replace")
    replaced = text.count("\ufffd") - data.count("\ufffd".encode())
    if replaced:
        click.echo(f"{source} is not UTF-8: {replaced:,} of {len(text):,} characters are unreadable", err=True)
    return text


def _checked(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise click.UsageError(f"more than {MAX_BYTES >> 20} MiB were piped in; send less")
    return data


MIN_COLUMNS: Final = 20
"""A terminal that reports fewer columns gets lines of this width."""


def note(text: str, colour: str | None = None) -> None:
    """Tell the user something.  On a terminal no word is divided at the end of a line."""
    click.echo(click.style(_fitted(text), fg=colour, dim=colour is None), err=True)


def report(text: str) -> None:
    """Tell the user of an error, in the same way but not dim."""
    click.echo(_fitted(text), err=True)


def fail(command: str, reason: str, code: int = FAILED) -> NoReturn:
    """End the program with one line that says which command failed, and why."""
    report(f"uma-trio {command}: {reason}")
    sys.exit(code)


def print_table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> None:
    """Print rows, the first with the headings, in columns.

    Args:
        right: numbers of the columns whose cells are aligned at the right.
    """
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = [(cell, " " * (width - cell_len(cell))) for cell, width in zip(row, widths, strict=True)]
        cells = [padding + cell if n in right else cell + padding for n, (cell, padding) in enumerate(padded)]
        click.echo("  ".join(cells).rstrip())


def when(seconds: float) -> str:
    """A moment, in the time of this machine."""
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return "unknown"


def _fitted(text: str) -> str:
    """``text`` in lines that fit a terminal."""
    if sys.stderr.isatty():
        width = max(MIN_COLUMNS, shutil.get_terminal_size().columns)
        lines = [line for paragraph in text.splitlines() for line in wrapped(paragraph, width) or [""]]
        return "\n".join(lines)
    return text


def wrapped(line: str, width: int) -> list[str]:
    """``line`` in lines of at most ``width`` characters; a longer word gets a line of its own."""
    return textwrap.wrap(
        line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True
    )
