"""How many compute threads suit this machine."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """Compute threads for a decode: all physical cores except one, at least one.

    The spare core serves the event loop and other processes.  Compute threads meet at a barrier several times per
    layer.  If one of them has to share its core, all others wait for it at each barrier, and a token that took 1 ms
    takes hundreds.
    """
    return max(1, physical_cores() - 1)


def spare_cores(threads: int, *, on_gpu: bool) -> int:
    """Cores that a step leaves free, at least one.  A step on a GPU occupies one core."""
    return max(1, physical_cores() - (1 if on_gpu else threads))


def physical_cores() -> int:
    """Cores that this process may use.  Two hardware threads of one core count once.

    Matrix multiplication keeps a core's arithmetic units busy; a second thread on the core only adds noise.  Counts
    logical cores where the system does not report the topology (anything but Linux).
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    return len({_siblings(cpu) for cpu in allowed}) or 1


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
