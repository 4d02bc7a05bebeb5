"""A server's processes: uma-trio's daemon with its engines, or llama-server alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process ``pid`` and its descendants.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
    process = psutil.Process(pid)
    processes = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += process.children(recursive=True)
    return processes


def cpu_s(pid: int) -> float:
    """Processor time of the tree so far, in seconds; children that have ended are included."""
    total = 0.0
    for process in _alive(pid):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory of the tree.  Pages that processes share, such as weights, count once for each."""
    return sum(process.memory_info().rss for process in _alive(pid))


def _alive(pid: int) -> Iterator[psutil.Process]:
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            yield process
