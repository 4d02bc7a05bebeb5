"""llama.cpp's log lines, as Python logging: logger ``llama_abi``, level by level.

The callback is called from C, on any thread, in pieces that need not end with a newline.  It is
global to the library and must not be called any more once the interpreter ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import attrs

from llama_abi.types import LOG_LEVEL, ggml_log_callback

log = logging.getLogger("llama_abi")

LEVELS = {
    LOG_LEVEL["GGML_LOG_LEVEL_NONE"]: logging.DEBUG,
    LOG_LEVEL["GGML_LOG_LEVEL_DEBUG"]: logging.DEBUG,
    LOG_LEVEL["GGML_LOG_LEVEL_INFO"]: logging.INFO,
    LOG_LEVEL["GGML_LOG_LEVEL_WARN"]: logging.WARNING,
    LOG_LEVEL["GGML_LOG_LEVEL_ERROR"]: logging.ERROR,
}
CONT = LOG_LEVEL["GGML_LOG_LEVEL_CONT"]
MAX_KEPT = 20
"""Error lines that go into one exception: the first are the ones that say why."""


class LogRouter:
    """Puts pieces together to lines and hands the lines to ``logging``."""

    def __init__(self) -> None:
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._complaints: dict[int, Complaints] = {}
        self._callback = ggml_log_callback(self._called)

    @property
    def callback(self) -> Any:
        """For ``llama_log_set``; lives as long as this router."""
        return self._callback

    def feed(self, level: int, text: str) -> None:
        """One piece from C.  ``level`` is a ``GGML_LOG_LEVEL``; CONT goes on with the line before."""
        thread = threading.get_ident()
        before, start = self._unfinished.pop(thread, (LOG_LEVEL["GGML_LOG_LEVEL_INFO"], ""))
        if level == CONT:
            level, text = before, start + text
        elif start:
            self._line(before, start)
        *lines, rest = text.split("\n")
        for line in lines:
            self._line(level, line)
        if rest:
            self._unfinished[thread] = level, rest

    def _called(self, level: int, text: bytes, _: object) -> None:
        try:
            self.feed(level, text.decode("utf-8", "replace"))
        except Exception:  # it must not travel into C
            log.exception("a log line of llama.cpp was lost")

    def _line(self, level: int, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        logged = LEVELS.get(level, logging.INFO)
        complaints = self._complaints.get(threading.get_ident())
        if complaints is not None and logged >= logging.WARNING:
            complaints.lines.append((logged, line))
        else:
            log.log(logged, "%s", line)

    @contextlib.contextmanager
    def complaints(self) -> Iterator[Complaints]:
        """Keep this thread's warnings and errors back while a call into C may fail.

        Who raises an exception puts them into it (``str(complaints)``), and they are logged as
        DEBUG only; the same when ``expected`` is set.  When the block just ends, they are logged
        as what they are.  Blocks do not nest.
        """
        thread = threading.get_ident()
        complaints = self._complaints[thread] = Complaints()
        try:
            yield complaints
        except BaseException:
            complaints.expected = True
            raise
        finally:
            del self._complaints[thread]
            for level, line in complaints.lines:
                log.log(logging.DEBUG if complaints.expected else level, "%s", line)


@attrs.define
class Complaints:
    """What llama.cpp said during one call."""

    expected: bool = False
    """The call failed, or ended as somebody had wished: nothing to alarm an operator."""
    lines: list[tuple[int, str]] = attrs.Factory(list)

    def __str__(self) -> str:
        errors = [line for level, line in self.lines if level >= logging.ERROR]
        return "; ".join(errors[:MAX_KEPT])
