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
"""Error lines that one ``complaints()`` block keeps: the first are the ones that say why."""


class LogRouter:
    """Puts pieces together to lines and hands the lines to ``logging``."""

    def __init__(self) -> None:
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._collecting: list[list[str]] = []
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
        if logged >= logging.ERROR:
            for kept in self._collecting:
                if len(kept) < MAX_KEPT:
                    kept.append(line)
        log.log(logged, "%s", line)

    @contextlib.contextmanager
    def complaints(self) -> Iterator[list[str]]:
        """The error lines that arrive inside the block, from any thread, for an exception's message."""
        kept: list[str] = []
        self._collecting.append(kept)
        try:
            yield kept
        finally:
            # by identity: two blocks with the same lines are equal
            self._collecting = [other for other in self._collecting if other is not kept]
