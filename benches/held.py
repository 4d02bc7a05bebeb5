"""What an idle server holds: processes, descriptors, shared memory, sequences, cells, sessions and files."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Final

import psutil
import trio
from processes import tree

from uma_trio.demo.load import Daemon

POLL_S: Final = 0.05
IDLE_LIMIT_S: Final = 30.0
"""How long a server may take to give everything back."""

SHARED_MEMORY: Final = Path("/dev/shm")
MAPPED: Final = ("/dev/shm/", "/memfd:")
"""Where shared memory is mapped from."""

ZERO_WHEN_IDLE: Final = ("requests", "connections", "bytes to send", "sequences", "cells", "sessions", "saved states", "bytes on disk")  # fmt: skip

Held = dict[str, int]


async def idle(daemon: Daemon, pid: int, before: Held | None = None) -> Held:
    """Wait until the server holds nothing for clients, and no more than ``before``; at most ``IDLE_LIMIT_S``.

    Returns:
        What it holds then.
    """
    with trio.move_on_after(IDLE_LIMIT_S):
        while True:
            now = _held(await daemon.snapshot(), pid)
            if not any(now[name] for name in ZERO_WHEN_IDLE) and not leaks(before or now, now):
                return now
            await trio.sleep(POLL_S)
    return _held(await daemon.snapshot(), pid)


def leaks(before: Held, after: Held) -> list[str]:
    """Names of what has become more."""
    return [name for name, n in after.items() if n > before[name]]


def _held(snapshot: dict[str, Any], pid: int) -> Held:
    kv, sessions = snapshot["kv"], snapshot["sessions"]
    daemon, *children = tree(pid)
    return {
        "processes": 1 + len(children),
        "descriptors of the daemon": daemon.num_fds(),
        "descriptors of its children": sum(_number(child, "num_fds") for child in children),
        "shared memory, mapped": sum(_mappings(process) for process in (daemon, *children)),
        "shared memory, files": _files_of(daemon, *children),
        "requests": snapshot["running"] + snapshot["queue_depth"],
        "connections": snapshot["connections"] - 1,  # the one that asks
        "bytes to send": snapshot["send_queue_bytes"],
        "sequences": kv["sequences"],
        "cells": kv["cells_reserved"] + kv["cells_used"],
        "sessions": sessions["stored"] + sessions["active"] + sessions["not_durable"],
        "saved states": kv["saved_states"],
        "bytes on disk": snapshot["kv_offload"]["disk_bytes"],
    }


def _files_of(*processes: psutil.Process) -> int:
    """Files in shared memory that these processes have made: their names have the process id of their maker."""
    if not SHARED_MEMORY.exists():
        return 0
    made = re.compile(rf"(?<!\d)({'|'.join(str(process.pid) for process in processes)})(?!\d)")
    return sum(made.search(file.name) is not None for file in SHARED_MEMORY.iterdir())


def _number(process: psutil.Process, of: str) -> int:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return int(getattr(process, of)())
    return 0


def _mappings(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, AttributeError):  # macOS has no memory_maps
        return sum(mapping.path.startswith(MAPPED) for mapping in process.memory_maps(grouped=False))
    return 0
