"""Which cores the server may use and which the load generator, so that neither takes from the other.

--pin auto      the load generator on the last core, the server on all before it
--pin 0-2:3     server : load generator
--pin none      wherever the system puts them
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

Cores = frozenset[int]


@attrs.frozen
class Pins:
    """Cores of the server and of the load generator."""

    server: Cores
    client: Cores

    def __str__(self) -> str:
        return f"server on {_text(self.server)}, load generator on {_text(self.client)}"


def parse_pins(text: str, threads: int) -> Pins | None:
    """What ``--pin`` says; ``None`` leaves everything where the system puts it.

    ``auto`` pins only where the server keeps at least as many cores as it has compute ``threads``: on fewer,
    they would wait for each other at every barrier.

    Raises:
        ValueError: it says nothing that this system can do; the message says why.
    """
    if text == "none":
        return None
    able = hasattr(os, "sched_setaffinity")
    if text == "auto":
        *rest, last = sorted(os.sched_getaffinity(0)) if able else [0]
        return Pins(frozenset(rest), frozenset({last})) if len(rest) >= threads else None
    if not able:
        raise ValueError("only Linux can pin processes to cores: leave --pin out, or say --pin none")
    server, colon, client = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is neither auto nor none nor like 0-2:3, the server's cores before the colon")
    pins = Pins(_cores(server), _cores(client))
    missing = (pins.server | pins.client) - os.sched_getaffinity(0)
    if missing:
        raise ValueError(f"this process may not use core {_text(missing)}")
    return pins


def _cores(text: str) -> Cores:
    """``0,2-4`` as ``taskset -c`` reads it."""
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
        found = frozenset(core for ends in ranges for core in range(ends[0], ends[-1] + 1))
    except ValueError:
        found = frozenset()
    if not found:
        raise ValueError(f"{text!r} is no list of cores like 0,2-4")
    return found


def _text(cores: Cores) -> str:
    return ",".join(map(str, sorted(cores)))


@contextlib.contextmanager
def pinned(server: int | None, pins: Pins | None) -> Iterator[None]:
    """Pin the process ``server`` and this one for as long as the block lasts.

    This one has to be free again before it starts another server, which would inherit its cores and count
    them for all that there are; and the server may be somebody's daemon.
    """
    if pins is None:
        yield
        return
    wanted = {os.getpid(): pins.client} | ({server: pins.server} if server is not None else {})
    before = {pid: frozenset(os.sched_getaffinity(pid)) for pid in wanted}
    try:
        for pid, cores in wanted.items():
            pin(pid, cores)
        yield
    finally:
        for pid, cores in before.items():
            with contextlib.suppress(OSError):  # a server that has died meanwhile is reported by who asked it
                pin(pid, cores)


def pin(pid: int, cores: Cores) -> None:
    """``taskset -a``: all threads that the process has, from which later ones inherit."""
    done: set[int] = set()
    while todo := {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()} - done:
        for thread in todo:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cores)
        done |= todo
