"""A 32-bit word in shared memory that processes can wait for.  Linux only: there is no other way to its futexes.

Python has no atomic operations on shared memory.  None are needed: each word has one writer at a time.  What is needed
is order, which system calls give on processors that reorder stores and loads.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import signal
import sys
from typing import Final

FUTEX_WAIT: Final = 0
FUTEX_WAKE: Final = 1
ALL: Final = 2**31 - 1
PR_SET_PDEATHSIG: Final = 1

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call ``futex``."""

_STRONGLY_ORDERED: Final = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


def is_supported() -> bool:
    """Whether this system has futexes, and this module their number."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS


def continue_when_parent_ends() -> None:
    """Have the kernel continue this process, if a signal has stopped it, when its parent ends.  Linux only."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


class Word:
    """The word at ``offset`` of ``memory``.  ``release`` must be called before ``memory`` is closed."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._number = ctypes.c_long(_NUMBERS[platform.machine()])

    def load(self) -> int:
        """The value; what is read from the memory afterwards is at least as new."""
        value = self._word.value
        self._barrier()
        return value

    def store(self, value: int) -> None:
        """Set the value, after all that was written to the memory before, and wake who waits for it."""
        self._barrier()
        self._word.value = value
        self.wake()

    def wait_while(self, value: int, seconds: float) -> None:
        """Return when the value may have changed, or after ``seconds``.  Blocks without the GIL."""
        fraction, whole = math.modf(max(seconds, 0.0))
        timeout = _Timespec(int(whole), int(fraction * 1e9))
        self._call(FUTEX_WAIT, value, ctypes.byref(timeout))

    def wake(self) -> None:
        self._call(FUTEX_WAKE, ALL, None)

    def release(self) -> None:
        del self._word

    def _barrier(self) -> None:
        if not _STRONGLY_ORDERED:
            self.wake()  # the kernel has a full barrier in it

    def _call(self, operation: int, value: int, timeout: object) -> None:
        result = _libc.syscall(
            self._number, self._address, ctypes.c_int(operation), ctypes.c_uint32(value), timeout, None, ctypes.c_int(0)
        )
        if result < 0 and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))
