"""Functions of the import module ``wasi_snapshot_preview1``: output, and answers that say that there is nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from uma_trio.aici.runtime import logs
from uma_trio.aici.runtime.failures import Fatal, Stopped
from uma_trio.aici.runtime.guest import Guest
from uma_trio.aici.runtime.signatures import IMPORTS, WASI

SUCCESS: Final = 0
BADF: Final = 8
"""The answer to everything about files, the clock and the environment."""

STDOUT, STDERR = 1, 2
CHARACTER_DEVICE: Final = 2
MAX_BUFFERS: Final = 1024
"""Parts of one ``fd_write``; libraries use two."""


def _fd_write(guest: Guest, fd: int, buffers: int, n_buffers: int, n_written: int) -> int:
    if fd not in (STDOUT, STDERR):
        return BADF
    if n_buffers > MAX_BUFFERS:
        raise Fatal(f"fd_write of {n_buffers} buffers; at most {MAX_BUFFERS}")
    total = 0
    for start, size in struct.iter_unpack("<II", guest.memory.read(buffers, 8 * n_buffers)):
        kept = min(size, logs.MAX_BYTES)
        first = start if guest.logs.keeps_first else start + size - kept
        guest.memory.read(start, 0)  # the part that is left out must be in the memory, too
        guest.logs.write(guest.memory.read(first, kept), size - kept)
        total += size
    guest.memory.write(n_written, (total & 0xFFFFFFFF).to_bytes(4, "little"))
    return SUCCESS


def _fd_fdstat_get(guest: Guest, fd: int, found: int) -> int:
    if fd > STDERR:
        return BADF
    guest.memory.write(found, bytes([CHARACTER_DEVICE]) + bytes(23))
    return SUCCESS


def _proc_exit(guest: Guest, code: int) -> None:
    raise Stopped(f"proc_exit: {code}")


def _sizes_get(guest: Guest, count: int, n_bytes: int) -> int:
    guest.memory.write(count, (0).to_bytes(4, "little"))
    guest.memory.write(n_bytes, (0).to_bytes(4, "little"))
    return SUCCESS


def _answer(code: int, guest: Guest, *_: int) -> int:
    return code


FUNCTIONS: Final[Mapping[str, Callable[..., int | None]]] = {
    **{name: partial(_answer, BADF) for name in IMPORTS[WASI]},
    "fd_write": _fd_write,
    "fd_fdstat_get": _fd_fdstat_get,
    "proc_exit": _proc_exit,
    "args_sizes_get": _sizes_get,
    "environ_sizes_get": _sizes_get,
    "args_get": partial(_answer, SUCCESS),
    "sched_yield": partial(_answer, SUCCESS),
    "fd_sync": partial(_answer, SUCCESS),
    "random_get": partial(_answer, SUCCESS),
}
"""As ``env.FUNCTIONS``.  ``random_get`` leaves the buffer as it is, so a controller does the same every time."""
