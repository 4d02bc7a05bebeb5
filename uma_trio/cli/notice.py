"""Notices on stderr: what the user should know and is not part of an answer."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Final

import click

MIN_COLUMNS: Final = 20
"""A terminal that reports fewer columns gets lines of this width."""


def note(text: str, colour: str | None = None) -> None:
    """Tell the user something.  On a terminal no word is divided at the end of a line."""
    if sys.stderr.isatty():
        width = max(MIN_COLUMNS, shutil.get_terminal_size().columns)
        lines = [line for each in text.splitlines() for line in wrapped(each, width) or [""]]
        text = "\n".join(lines)
    click.echo(click.style(text, fg=colour, dim=colour is None), err=True)


def wrapped(line: str, width: int) -> list[str]:
    """``line`` in lines of at most ``width`` characters; a longer word gets a line of its own."""
    return textwrap.wrap(
        line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True
    )
