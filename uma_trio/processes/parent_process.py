"""What a child process of the daemon does about its parent: end with it, and log through it.

``child_process.py`` is the other side.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from typing import Final, NoReturn

import msgspec

LOG_MARK: Final = "\x1e"
"""Begins a line of the child's stderr that is a log record as JSON: ``[level, logger, message, fields]``."""

LOG_VARIABLE: Final = "UMA_LOG_TO_PARENT"
"""Set in the environment of a child that is a command of its own as well: the daemon reads its log."""


LAST_WORDS: Final = "\x1eend "
"""Begins a line of the child's stderr: why it cannot start."""
READY: Final = "\x1eready"
"""A line of the child's stderr: it can do its work now."""

CANNOT_START: Final = 78
"""Exit code of a child that cannot start."""


def report_ready() -> None:
    """Tell the parent that this process can do its work now."""
    os.write(sys.stderr.fileno(), f"{READY}\n".encode())


def fail_to_start(reason: str) -> NoReturn:
    """End this process, for a reason that the parent can pass on as one sentence."""
    os.write(sys.stderr.fileno(), f"{LAST_WORDS}{' '.join(reason.split())}\n".encode())
    sys.exit(CANNOT_START)


def wait_for_turn() -> None:
    """Wait until the parent needs this process (``ChildProcess.begin``); ends this process if the parent ends before."""
    if not os.read(0, 1):
        os._exit(1)


def end_with_it() -> None:
    """Start a thread that ends this process when the parent ends, however that happens and whatever this process does."""

    def watch() -> None:
        while os.read(0, 1):
            """The parent writes nothing more to standard input; the read ends when the parent does."""
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def send_log_to_it(level: int) -> None:
    """Send log records of ``level`` and above to the parent, which adds them to its own log.

    If a signal such as SIGSEGV ends this process, the parent gets a traceback too.

    wasmtime's handlers come later, and pass on what is no trap.

    The attribute ``fields`` of a record, if there is one, is a dictionary that JSON can hold.
    """
    faulthandler.enable()
    handler = _ToParent()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _ToParent(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            fields = getattr(record, "fields", {})
            line = LOG_MARK + msgspec.json.encode((record.levelno, record.name, text, fields)).decode() + "\n"
            os.write(sys.stderr.fileno(), line.encode())
        except OSError:  # the parent has gone
            self.handleError(record)
