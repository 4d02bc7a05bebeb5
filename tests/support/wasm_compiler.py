"""The process of a runtime that compiles modules, which a test kills."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil

PATIENCE_S = 60


@contextlib.contextmanager
def killing_the_compiler(pid: int) -> Iterator[None]:
    """Kill the next process that compiles for the process ``pid``, while it does so.  It must have begun at the end."""
    killed, is_over = threading.Event(), threading.Event()

    def kill() -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_over.is_set() and time.monotonic() < until:
            if (process := _compiler_of(pid)) is not None:
                process.kill()
                killed.set()
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert killed.is_set()


def _compiler_of(pid: int) -> psutil.Process | None:
    """The process that compiles, when it does so: it has threads then."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "uma_trio.aici.runtime.compiler" in child.cmdline() and child.num_threads() > 1:
                    return child
    return None
