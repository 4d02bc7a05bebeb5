"""Files in memory that nobody can change any more: what a client passes to the daemon as a descriptor.

A descriptor could be of anything: a pipe without a writer, a device without an end, a file of a network that does not
answer, or one that shrinks while it is read.  Sealed memory is none of these.  Its size stays the same, a read of it never
blocks, and every process that has the descriptor may read it.

Source: memfd_create(2), fcntl(2), "File Sealing".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from uma_trio.errors import BadRequest
from uma_trio.protocol.passed_files import take_out
from uma_trio.protocol.peer import user_id_of_peer

EXISTS: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system has such memory."""


def can_pass(sock: socket.socket) -> bool:
    """Whether the other end takes descriptors from this process: it runs as the same user."""
    return EXISTS and user_id_of_peer(sock) == os.geteuid()


@contextlib.contextmanager
def passed(fields: Mapping[str, Any], *, taken: bool) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
    """A message without its large files, and descriptors of these, open until the context ends.

    Without such memory, the message as it is and no descriptors.

    Args:
        taken: see ``can_pass``.
    """
    smaller, files = take_out(fields) if taken else (fields, [])
    descriptors: list[int] = []
    try:
        try:
            for data in files:
                descriptors.append(_new())
                _fill(descriptors[-1], data)
        except OSError:  # the system forbids it, or too many files are open: the message can have the bytes itself
            yield fields, []
        else:
            yield smaller, descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def size_of(descriptor: int) -> int:
    """Size of sealed memory.

    Raises:
        BadRequest: it is something else.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # it is no memory
        seals = 0
    if seals & _SEALS != _SEALS:
        raise BadRequest(
            "a descriptor has to be of memory that is sealed against writing, growing and shrinking (memfd_create): copy "
            "the file into such memory, or send it as data"
        )
    return os.fstat(descriptor).st_size


if EXISTS:
    _SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

    def _new() -> int:
        return os.memfd_create("uma-trio-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def _fill(descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
