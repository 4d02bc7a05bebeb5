"""Routes llama.cpp's log to Python's ``logging``, as the logger ``llama_abi``.

C calls the callback from any thread, with text that need not end at the end of a line. The callback is global to the
library, and C must not call it after the interpreter has ended.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any, Self

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
BUFFER = re.compile(r"\w+: +(\S+) +(\w+) buffer size = +([\d.]+) MiB")
"""How llama.cpp reports a buffer. Its C API has no other way to ask."""
NO_WARNING = re.compile("find_slot: non-consecutive token position")
"""What a recurrent memory says at each picture whose rows have positions in two dimensions. It goes on as it should."""
MAX_ERROR_LINES = 20
"""Error lines in one exception message. The first ones give the reason."""


class LogRouter:
    """Joins fragments of log text into lines, and passes the lines to ``logging``."""

    def __init__(self) -> None:
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._captured: dict[int, CapturedWarnings] = {}
        self._callback = ggml_log_callback(self._called)

    @property
    def callback(self) -> Any:
        """The argument of ``llama_log_set``. Valid for as long as this router."""
        return self._callback

    def feed(self, level: int, text: str) -> None:
        """Take a fragment from C. ``level`` is a ``GGML_LOG_LEVEL``; CONT continues the line before."""
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
        except Exception:  # an exception must not pass through C
            log.exception("a log line of llama.cpp was lost")

    def _line(self, level: int, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        logged = logging.DEBUG if NO_WARNING.match(line) else LEVELS.get(level, logging.INFO)
        captured = self._captured.get(threading.get_ident())
        if captured is not None and (buffer := BUFFER.match(line)):
            captured.buffers.append(Buffer(buffer[1], buffer[2], round(float(buffer[3]) * 2**20)))
        if captured is not None and logged >= logging.WARNING:
            captured.lines.append((logged, line))
        elif captured is None or not captured.is_quiet:
            log.log(logged, "%s", line)

    def capture_warnings(self, *, is_quiet: bool = False) -> CapturedWarnings:
        """Hold this thread's warnings and errors back during a call into C that may fail.

        The lines are logged when the block ends: with their own level if it succeeded, as DEBUG if it raised an
        exception or set ``expected``. An exception carries them in its message (``str(captured)``). Blocks do not nest.

        Args:
            is_quiet: drop all other lines.
        """
        return CapturedWarnings(self._captured, is_quiet)


@attrs.frozen
class Buffer:
    """Memory that llama.cpp allocates for a model or a context, or would allocate."""

    place: str
    """Its type, which begins with the name of its device, such as ``CPU_Mapped`` or ``CUDA0``."""
    kind: str
    """``model``, ``KV``, ``RS`` (recurrent states), ``output`` or ``compute``."""
    n_bytes: int
    """To a hundredth of a MiB."""


@attrs.define
class CapturedWarnings:
    """Warnings and errors that llama.cpp logged during one call, in a ``with`` block. ``str()`` joins the errors."""

    _captured: dict[int, CapturedWarnings]
    """Those of all threads that are in a block."""
    is_quiet: bool
    expected: bool = False
    """The caller reports the outcome, so the lines need no operator's attention."""
    lines: list[tuple[int, str]] = attrs.Factory(list)
    buffers: list[Buffer] = attrs.Factory(list)
    """What the call allocated."""

    def __enter__(self) -> Self:
        self._captured[threading.get_ident()] = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        del self._captured[threading.get_ident()]
        for level, line in self.lines:
            log.log(logging.DEBUG if self.expected or kind is not None else level, "%s", line)

    def __str__(self) -> str:
        errors = [line for level, line in self.lines if level >= logging.ERROR]
        return "; ".join(errors[:MAX_ERROR_LINES])
