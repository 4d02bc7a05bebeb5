"""The keyboard of a terminal while nobody reads it."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def hidden_keys() -> Iterator[None]:
    """Have what the user types wait for the next prompt, instead of appearing in what is shown now.

    Without effect if stdin is no terminal, or a shell runs the command in the background, where the kernel would stop it.
    """
    if not sys.stdin.isatty() or _is_in_background(fd := sys.stdin.fileno()):
        yield
        return
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL  # so Enter and Ctrl-D reach the next prompt as the keys that they are
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        if not _is_in_background(fd):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _is_in_background(fd: int) -> bool:
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # it is not the terminal that controls this process
        return False
