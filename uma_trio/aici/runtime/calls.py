"""Threads that run calls into controllers, so that one that never returns holds up nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

BASE_THREADS: Final = min(max(os.cpu_count() or 1, 2), 8)
"""Threads that are kept.  Controllers compute, so more threads than cores are of use only behind slow controllers."""

STALL_S: Final = 0.002
"""If no call has started or ended for so long, while calls wait, more threads start."""


class Call:
    """A call into a controller.

    Args:
        function: runs in some thread.  Must not raise.
        clean_up: runs when nothing uses the controller any more, if the call was abandoned: once.
    """

    def __init__(self, function: Callable[[], None], clean_up: Callable[[], None]) -> None:
        self.function = function
        self.clean_up = clean_up
        self.is_finished = False
        self.is_abandoned = False


class CallThreads:
    """A pool that grows while its threads are held up, and shrinks again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._awaited: set[Call] = set()
        self._n_threads = 0
        self._n_idle = 0
        self._n_events = 0

    def start(self, calls: Iterable[Call]) -> None:
        """Have ``calls`` run, except those that were abandoned by now."""
        gone = []
        with self._lock:
            for call in calls:
                if call.is_abandoned:
                    gone.append(call)
                else:
                    self._queue.append(call)
            self._work.notify(len(self._queue))
            self._start_threads(min(BASE_THREADS - self._n_threads, len(self._queue) - self._n_idle))
        for call in gone:
            call.clean_up()

    def skip(self, call: Call) -> None:
        """Let ``call`` be finished without having run."""
        with self._lock:
            self._finish(call)
        if call.is_abandoned:
            call.clean_up()

    def wait(self, calls: Iterable[Call], until: float) -> None:
        """Return when all ``calls`` have finished, or at ``until``, a time of ``time.monotonic()``.

        One thread at a time may wait.
        """
        with self._lock:
            self._awaited = {call for call in calls if not call.is_finished}
            extra = 1
            while self._awaited and (left := until - time.monotonic()) > 0:
                n_events = self._n_events
                self._finished.wait(min(left, STALL_S) if self._queue else left)
                if self._queue and self._n_events == n_events:
                    self._start_threads(min(extra, len(self._queue)))
                    extra *= 2
            self._awaited = set()

    def abandon(self, call: Call) -> None:
        """Clean up after ``call``: now if it has finished or waits for a thread, otherwise when it finishes.

        A call that was not started yet is cleaned up after when it is started.
        """
        with self._lock:
            if call in self._queue:
                self._queue.remove(call)
            elif not call.is_finished:
                call.is_abandoned = True
                return
        call.clean_up()

    def _start_threads(self, number: int) -> None:
        for _ in range(number):
            self._n_threads += 1
            threading.Thread(target=self._run, name="controllers", daemon=True).start()

    def _run(self) -> None:
        self._lock.acquire()
        try:
            while True:
                while not self._queue:
                    if self._n_threads > BASE_THREADS:
                        return
                    self._n_idle += 1
                    self._work.wait()
                    self._n_idle -= 1
                call = self._queue.popleft()
                self._n_events += 1
                self._lock.release()
                try:
                    call.function()
                finally:
                    self._lock.acquire()
                self._finish(call)
                if call.is_abandoned:
                    self._lock.release()
                    try:
                        call.clean_up()
                    finally:
                        self._lock.acquire()
        finally:
            self._n_threads -= 1
            self._lock.release()

    def _finish(self, call: Call) -> None:
        self._n_events += 1
        call.is_finished = True
        if call in self._awaited:
            self._awaited.discard(call)
            if not self._awaited:
                self._finished.notify()
