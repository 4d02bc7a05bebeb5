"""Notices a child process that a signal has stopped (``SIGSTOP``): nobody continues it, and others wait for it."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import psutil

LOOK_S: Final = 0.25
"""Between two looks at a child process."""


class StopDetector:
    """Looks at the process ``pid``."""

    def __init__(self, pid: int) -> None:
        self._process: psutil.Process | None = None
        self._stopped_at: float | None = None
        """When it was first seen stopped; ``None`` if it was not at the last look."""
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            self._process = psutil.Process(pid)

    def look(self) -> bool:
        """Whether it is stopped, and was at a look ``LOOK_S`` before: one that is continued at once goes on."""
        is_stopped, now = False, time.monotonic()
        with contextlib.suppress(psutil.Error, OSError):
            is_stopped = self._process is not None and self._process.status() == psutil.STATUS_STOPPED
        if not is_stopped:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        return self._stopped_at is not None and now - self._stopped_at >= LOOK_S
