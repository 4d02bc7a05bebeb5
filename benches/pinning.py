"""Separate cores for the server and the load generator, so that they do not compete.

--pin auto      the load generator on the last core, the server on all before it
--pin 0-2:3     server : load generator
--pin none      no pinning
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs
from processes import tree

Cores = frozenset[int]


@attrs.frozen
class Pins:
    """Cores of the server and of the load generator."""

    server: Cores
    client: Cores

    def __str__(self) -> str:
        return f"server on {_text(self.server)}, load generator on {_text(self.client)}"


def parse_pins(text: str, threads: int) -> Pins | None:
    """Parse ``--pin``; ``None`` means no pinning.

    ``auto`` pins only if the server keeps at least as many cores as it has compute ``threads``.  On fewer cores, the
    threads would wait for each other at every barrier.

    Raises:
        ValueError: the text is invalid, or this system cannot do it; the message has the reason.
    """
    if text == "none":
        return None
    able = hasattr(os, "sched_setaffinity")
    if text == "auto":
        *rest, last = sorted(os.sched_getaffinity(0)) if able else [0]
        return Pins(frozenset(rest), frozenset({last})) if len(rest) >= threads else None
    if not able:
        raise ValueError("processes can be pinned to cores on Linux only: use --pin none")
    server, colon, client = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is not auto, none, or two lists of cores such as 0-2:3 (server:load generator)")
    pins = Pins(_cores(server), _cores(client))
    missing = (pins.server | pins.client) - os.sched_getaffinity(0)
    if missing:
        raise ValueError(f"this process may not use cores {_text(missing)}")
    return pins


def _cores(text: str) -> Cores:
    """Parse a list of cores such as ``0,2-4``, in the syntax of ``taskset -c``."""
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
        cores = frozenset(core for ends in ranges for core in range(ends[0], ends[-1] + 1))
    except ValueError:
        cores = frozenset()
    if not cores:
        raise ValueError(f"{text!r} is not a list of cores such as 0,2-4")
    return cores


def _text(cores: Cores) -> str:
    return ",".join(map(str, sorted(cores)))


@contextlib.contextmanager
def pinned(server: int | None, pins: Pins | None) -> Iterator[None]:
    """Pin the process ``server`` with its children, and this process, until the block ends.

    This process must be free again before it starts another server, which would inherit its cores.  The server may be
    a daemon that was running before.
    """
    if pins is None:
        yield
        return
    processes = tree(server) if server is not None else []
    wanted = {os.getpid(): pins.client} | {process.pid: pins.server for process in processes}
    before = {pid: frozenset(os.sched_getaffinity(pid)) for pid in wanted}
    try:
        for pid, cores in wanted.items():
            pin(pid, cores)
        yield
    finally:
        for pid, cores in before.items():
            with contextlib.suppress(OSError):  # the process has ended
                pin(pid, cores)


def pin(pid: int, cores: Cores) -> None:
    """Pin all threads of a process, as ``taskset -a`` does.  Later threads inherit the cores of their parent."""
    done: set[int] = set()
    while todo := {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()} - done:
        for thread in todo:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, cores)
        done |= todo
