"""One thread for work that takes long.  Owners that have used little time go first."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

Future: TypeAlias = concurrent.futures.Future

T = TypeVar("T")

NICE: Final = 10
"""Priority of the thread, below that of the computation."""

_Work: TypeAlias = tuple[float, int, Future[Any], Callable[[], object]]


class SlowThread:
    """Runs one function at a time, at a lower priority.

    The next function is that of the owner that has used the least time.  So a grammar that takes long in every step delays
    a small one by one step at most.

    Args:
        name: of the thread.  Its stack has the size that ``threading.stack_size`` says now.
    """

    def __init__(self, name: str) -> None:
        self._waiting: queue.PriorityQueue[_Work] = queue.PriorityQueue()
        self._order = itertools.count()
        self._is_closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, used_s: float, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` soon.  Does not block.

        Args:
            used_s: how much time the owner of this work has used before.  Equal ones run in the order of arrival.
        """
        future: Future[T] = Future()
        self._waiting.put((used_s, next(self._order), future, function))
        return future

    def close(self) -> None:
        """End the thread after the current function.  Cancel those that wait."""
        self._is_closed = True
        self.submit(0.0, lambda: None)

    def _run(self) -> None:
        _lower_priority()
        while True:
            *_, future, function = self._waiting.get()
            if self._is_closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 who waits for it gets it
                    future.set_exception(error)
            del future, function  # not kept while the thread waits
            if self._is_closed and self._waiting.empty():
                return


def _lower_priority() -> None:
    """Let the computation go first.  Linux has a priority for each thread; elsewhere this does nothing."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
