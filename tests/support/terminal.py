"""A command on a terminal: a pseudoterminal, and pyte, which draws what the command writes to it.

with terminal(["uma-trio", "metrics", "--watch"], columns=80, lines=24) as shown:
    shown.wait_for("generated")
    shown.type("q")
    assert shown.wait() == 0
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

from tests.support.forked import UMA_TRIO, Forked, can_fork

WAIT_S = 60.0
"""Maximum duration of a wait.  Nothing takes a second, except on a busy machine."""
PAUSE_S, BURST_S = 0.02, 0.2
"""The screen is looked at when a command has written nothing for some time, or has gone on for long: to look is slow."""


class Screen(pyte.Screen):
    """A screen that keeps the lines that scroll away: ``pyte.HistoryScreen`` is four times as slow.

    It is read as it is: pyte's ``display`` measures the width of each character.  The cell behind a wide one is empty.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.above: list[str] = []
        super().__init__(columns, lines)

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.above.append(self._text_of(0))
        super().index()

    @property
    def display(self) -> list[str]:
        return [self._text_of(y) for y in range(self.lines)]

    def _text_of(self, y: int) -> str:
        line = self.buffer[y]
        return "".join([line[x].data if x in line else " " for x in range(self.columns)]).rstrip()


class Terminal:
    """A running command and its screen."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, columns: int, lines: int) -> None:
        self.process = process
        self.screen = Screen(columns, lines)
        self.written = b""
        """All that the command has written."""
        self.screen.write_process_input = self.type  # pyte answers programs that ask where the cursor is
        self._stream = pyte.ByteStream(self.screen)
        self._master = master
        self._text: str | None = None

    @property
    def keyboard(self) -> int:
        """File of the terminal, for its settings."""
        return self._master

    @property
    def text(self) -> str:
        """What is on the screen."""
        if self._text is None:
            self._text = "\n".join(self.screen.display)
        return self._text

    @property
    def scrollback(self) -> str:
        """The lines that have scrolled away, and the screen."""
        return "\n".join([*self.screen.above, self.text]).rstrip()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal; the kernel notifies the command."""
        self.screen.resize(lines, columns)
        self._text = None
        _set_size(self._master, columns, lines)

    def draw(self, timeout_s: float) -> bool:
        """Draw what the command begins to write within a time; returns False when it has closed the terminal."""
        until = time.monotonic() + BURST_S
        while select.select([self._master], [], [], timeout_s)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # EIO: Linux says so when the last process has closed the terminal
                return False
            self.written += data
            self._stream.feed(data)
            self._text = None
            if time.monotonic() > until:
                break
            timeout_s = PAUSE_S
        return True

    def wait_for(self, found: str | Callable[[str], object]) -> str:
        """Wait until a text is on the screen, or until a function of the screen's text is true."""
        until, is_open = time.monotonic() + WAIT_S, True
        while not (found in self.text if isinstance(found, str) else found(self.text)):
            if is_open and time.monotonic() < until:
                is_open = self.draw(0.1)
            else:
                raise AssertionError(f"{found!r} is not on the screen:\n{self.text}")
        return self.text

    def wait(self) -> int:
        """Wait for the end of the command and return its exit code."""
        until = time.monotonic() + WAIT_S
        while self.draw(0.1):
            assert time.monotonic() < until, f"the command does not end:\n{self.text}"
        return self.process.wait(WAIT_S)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], *, columns: int, lines: int, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a command on a terminal of its own; killed at the end if it still runs."""
    master, slave = pty.openpty()
    _set_size(slave, columns, lines)
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    given = dict(environment or {})
    if given.get("TERM") == os.environ.get("TERM"):  # a test that wants another terminal names it
        given.pop("TERM", None)
    forks = tuple(command[: len(UMA_TRIO)]) == UMA_TRIO and can_fork(given)
    process = (Forked if forks else subprocess.Popen)(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=clean | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | given,
        start_new_session=True,
        preexec_fn=None if forks else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield Terminal(process, master, columns, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)


def _set_size(file: int, columns: int, lines: int) -> None:
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
