"""Flags in shared memory that end a step while it computes.

An engine that computes on the CPU reads no messages.  The threads of llama.cpp read a byte after every operation of the
graph, though, and the daemon can write that byte.  Each step has a byte of its own, so one that is set too late ends no
other step.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Final

N_STEPS: Final = 64
"""Steps with a flag.  Two are in flight at most, so a flag is used again long after its step."""
FLAG_BYTES: Final = 2
"""A flag is a byte that is 0 or 1, and a 0 after it: see ``llama_abi.AbortFlag``."""


class Interrupts:
    """The flags, mapped.

    Args:
        fd: of their file, which stays the caller's to close.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        self.memory: mmap.mmap | bytearray = mmap.mmap(fd, N_STEPS * FLAG_BYTES)

    @staticmethod
    def offset(number: int) -> int:
        """Where in the memory the flag of step ``number`` begins."""
        return FLAG_BYTES * (number % N_STEPS)

    def clear(self, number: int) -> None:
        """Step ``number`` may run; call it before the step is sent."""
        self.memory[self.offset(number)] = 0

    def set(self, number: int) -> None:
        """End step ``number``."""
        self.memory[self.offset(number)] = 1

    def is_set(self, number: int) -> bool:
        """Whether step ``number`` is to end, or not to begin."""
        return self.memory[self.offset(number)] != 0

    def close(self) -> None:
        """Unmap the flags, once the engine has ended.  ``set`` and ``clear`` then have no effect."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()
            self.memory = bytearray(N_STEPS * FLAG_BYTES)


def new_file() -> int:
    """The descriptor of a new file without a name that has room for the flags.  Close it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("uma-trio-interrupts")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, N_STEPS * FLAG_BYTES)
    except BaseException:
        os.close(fd)
        raise
    return fd
