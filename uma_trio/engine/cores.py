"""How many compute threads a machine is good for."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """Compute threads of a decode if nobody says otherwise: all physical cores but one, at least one.

    The spare core is for the event loop and for whoever else wants to work.  A team of compute threads
    meets at a barrier several times a layer; where one of them has to share its core, all wait for it at
    each, and a token that took 1 ms takes hundreds.
    """
    return max(1, physical_cores() - 1)


def spare_cores(threads: int, *, on_gpu: bool) -> int:
    """Cores, at least one, that a step on so many compute threads leaves to others: where a GPU computes, all but one."""
    return max(1, physical_cores() - (1 if on_gpu else threads))


def physical_cores() -> int:
    """Cores that this process may use, two hardware threads of one core counted once.

    Matrix work keeps a core's arithmetic units busy by itself; a second thread on it only adds noise.
    Where the system does not tell (anything but Linux), logical cores are counted.
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
