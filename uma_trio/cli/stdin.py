"""What is piped into a command, with a bound, and as text."""

from __future__ import annotations

import sys
from typing import Final

import click

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
