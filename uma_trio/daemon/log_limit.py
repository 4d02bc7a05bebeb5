"""Keeps strangers from filling the log: of records that are alike, some pass each minute, and the others are counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import attrs

MAX_ALIKE: Final = 20
"""Records that are alike and pass, in each window."""
WINDOW_S: Final = 60.0
MAX_KINDS: Final = 1000
"""Kinds of records that are counted, the most recent ones."""
MAX_TEXT_CHARS: Final = 200

SERVED: Final = frozenset({"request", "embedded", "ranked", "http"})
"""Records of served requests.  They always pass."""

Kind = tuple[str, int, str]
"""Logger, level, and what the record says, without its fields."""


@attrs.define
class _Window:
    began: float
    n_passed: int = 0
    n_held: int = 0


class LogLimit(logging.Filter):
    """Passes ``MAX_ALIKE`` records of each kind in ``WINDOW_S``, and then says how many more there were.

    For a handler.  Records are alike that have the same logger, level, text and code; their other fields do not count.

    Args:
        now: a clock that never goes backwards, in seconds.
        later: calls a function after some seconds, in any thread.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__()
        self._now = now
        self._later = _in_a_thread if later is None else later
        self._lock = threading.Lock()
        self._windows: OrderedDict[Kind, _Window] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` passes."""
        text, code = _text_and_code(record)
        if text in SERVED or hasattr(record, "is_count"):
            return True
        kind = (record.name, record.levelno, f"{text} ({code})" if code else text)
        now = self._now()
        with self._lock:
            window = self._windows.get(kind)
            if window is None or (now - window.began >= WINDOW_S and not window.n_held):
                self._windows[kind] = window = _Window(now)
                if len(self._windows) > MAX_KINDS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(kind)
            if window.n_passed < MAX_ALIKE:
                window.n_passed += 1
                return True
            window.n_held += 1
            is_first = window.n_held == 1
        if is_first:
            self._later(max(0.0, window.began + WINDOW_S - now), lambda: self._count(kind, window))
        return False

    def _count(self, kind: Kind, window: _Window) -> None:
        """Say how many records were held back, and begin a new window."""
        with self._lock:
            n, window.n_held, window.n_passed, window.began = window.n_held, 0, 0, self._now()
        name, level, text = kind
        logging.getLogger(name).log(level, "%d more lines in %.0f s: %s", n, WINDOW_S, text, extra={"is_count": True})


def _text_and_code(record: logging.LogRecord) -> tuple[str, str]:
    """What a record of ``logging``, of structlog or of a child process says, and its error code."""
    fields = record.msg if isinstance(record.msg, dict) else getattr(record, "fields", {})
    text = record.msg
    if isinstance(text, dict):
        text = text.get("event", "")
    elif text == "%s" and record.args:
        text = record.getMessage()
    return str(text).partition("\n")[0][:MAX_TEXT_CHARS], str(fields.get("code") or "")


def _in_a_thread(delay_s: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, call)
    timer.daemon = True
    timer.start()
