"""The memory and the cores of this machine that this process may use."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
OF_THIS_PROCESS: Final = Path("/proc/self/cgroup")
NO_LIMIT: Final = 1 << 60
"""Numbers from here on stand for no limit in cgroups of version 1."""


@attrs.frozen
class _Version:
    """Where a version of cgroups has its numbers."""

    folder: str
    limits: tuple[str, ...]
    used: str
    droppable: str


VERSION_1: Final = _Version("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
VERSION_2: Final = _Version("", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def machine_memory_bytes() -> int:
    """Physical memory of this machine, in bytes; less where the limit of a cgroup is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_limits())])


def free_memory_bytes(*, swap: bool = True) -> int:
    """Memory that this process can use without taking it from another program, in bytes.

    It is the least of what the machine has left, what the limits of the cgroups leave, and what ``ulimit`` leaves.

    Args:
        swap: count the machine's swap as well.
    """
    free = psutil.virtual_memory().available + (psutil.swap_memory().free if swap else 0)
    for limit, used in _cgroup_limits():
        free = min(free, limit - used)
    return max(0, min(free, _ulimit_bytes()))


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, in bytes; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _ulimit_bytes() -> int:
    """What the limits of this process leave of address space and of data."""
    left = sys.maxsize
    memory = psutil.Process().memory_info()
    for limit, used in (
        (resource.RLIMIT_AS, memory.vms),
        (resource.RLIMIT_DATA, getattr(memory, "data", 0)),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left = min(left, most - used)
    return left


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each cgroup with a limit that this process is in.

    Pages of files that the kernel can drop do not count as used.  What cannot be read is left out.
    """
    try:
        lines = OF_THIS_PROCESS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            version = VERSION_2
        elif "memory" in controllers.split(","):
            version = VERSION_1
        else:
            continue
        root = CGROUPS / version.folder
        group = root / name.lstrip("/")
        for cgroup in (group, *(folder for folder in group.parents if folder.is_relative_to(root))):
            limits = [limit for file in version.limits if (limit := _number(cgroup / file)) is not None]
            used = _number(cgroup / version.used)
            if limits and used is not None and min(limits) < NO_LIMIT:
                yield min(limits), max(0, used - _statistic(cgroup / "memory.stat", version.droppable))


def _number(file: Path) -> int | None:
    """A number in a file; ``None`` where there is none, as in ``max``."""
    try:
        return int(file.read_text("ascii", "replace"))
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    """A number of ``memory.stat``."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text("ascii", "replace").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def default_threads() -> int:
    """Compute threads for a decode: all physical cores except one, at least one.

    The spare core serves the event loop and other processes.  Compute threads meet at a barrier several times per
    layer.  If one thread has to share its core, all others wait for it at each barrier, and a token that took 1 ms
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
