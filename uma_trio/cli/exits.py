"""How any command ends when its output, its arguments or the person at the keyboard stop it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import click

OK: Final = 0
FAILED: Final = 1
SERVER_ERROR: Final = 2
PROTOCOL_ERROR: Final = 3
INCOMPLETE: Final = 4
"""The answer is not complete by its constraint: a script must not take it for JSON."""
INTERRUPTED: Final = 130
"""The exit code that shells use for a program killed by SIGINT."""
OUTPUT_CLOSED: Final = 141
"""The exit code that shells use for a program killed by SIGPIPE."""

OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Reasons for which the output cannot be written, other than that its reader has gone."""


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """End the program with one line or none, and the usual exit code, where a traceback would help nobody.

    Ctrl-C ends it with 130, a closed pipe quietly with 141, a full disk under the output with 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is not None:
            raise  # not the output, but a file that the command opened
        if error.errno == errno.EPIPE:
            _discard_output()
            sys.exit(OUTPUT_CLOSED)
        if error.errno not in OUTPUT_ERRORS:
            raise
        _discard_output()
        click.echo(f"uma-trio: cannot write the output: {error.strerror}", err=True)
        sys.exit(FAILED)


def _discard_output() -> None:
    """Connect stdout with /dev/null: Python writes what is buffered when it exits, and would fail again."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: stdout is not a file, as in a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def open_closed_streams() -> None:
    """Replace standard streams that the caller has closed: they then behave like /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the program ends


class Text(click.types.StringParamType):
    """Text of an argument, which must be UTF-8.

    Python replaces bytes that are not by surrogates, which no message, file or terminal can hold.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            data = os.fsencode(text)
            try:
                return data.decode()  # the locale says another encoding than UTF-8
            except UnicodeDecodeError as error:
                shown = data.decode(errors="replace")
                self.fail(f"{shown!r} is not UTF-8 (byte {error.start}); convert it, or pipe it in", param, ctx)
        return text


class Number(click.FloatRange):
    """A number in a range.  Refuses ``nan``, which no comparison with a bound rejects."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


def check_arguments(command: click.Command) -> None:
    """Make all parameters of ``command`` and its subcommands refuse text that is not UTF-8, and ``nan``.

    Paths may contain any bytes.  So may parameters with ``type=click.UNPROCESSED``, whose commands convert them.
    """
    for parameter in command.params:
        kind = parameter.type
        if kind is click.STRING:
            parameter.type = Text()
        elif isinstance(kind, click.FloatRange):
            parameter.type = Number(kind.min, kind.max, kind.min_open, kind.max_open, kind.clamp)
    for subcommand in getattr(command, "commands", {}).values():
        check_arguments(subcommand)
