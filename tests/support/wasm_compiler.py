"""The process of a runtime that compiles modules, which a test kills."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil

PATIENCE_S = 60


@contextlib.contextmanager
def killing_the_compiler(pid: int, times: int = 2) -> Iterator[None]:
    """Kill the next processes that compile for the process ``pid``, while they do so.  All must have begun at the end.

    Args:
        times: how many.  A compilation whose process was killed once is tried again.
    """
    killed: set[int] = set()
    is_over = threading.Event()

    def kill() -> None:
        until = time.monotonic() + PATIENCE_S
        while len(killed) < times and not is_over.is_set() and time.monotonic() < until:
            process = _compiler_of(pid)
            if process is not None and process.pid not in killed:
                process.kill()
                killed.add(process.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert len(killed) == times


def _compiler_of(pid: int) -> psutil.Process | None:
    """The process that compiles, when it does so: it has threads then."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "uma_trio.aici.runtime.compiler" in " ".join(child.cmdline()) and child.num_threads() > 1:
                    return child
    return None
