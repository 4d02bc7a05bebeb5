"""Access to the memory of an instance."""

from __future__ import annotations

import ctypes
from typing import Final

import wasmtime

from uma_trio.aici.runtime.failures import Fatal

PAGE_BYTES: Final = 64 << 10


class GuestMemory:
    """The linear memory of one instance.  Every access is checked, and finds it anew: it moves when it grows."""

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._store = store
        self._memory = memory

    def read(self, start: int, size: int) -> bytes:
        """A copy of a part.

        Raises:
            Fatal: it is not in the memory.
        """
        return ctypes.string_at(self._address(start, size), size)

    def write(self, start: int, data: bytes) -> None:
        """Change a part.

        Raises:
            Fatal: as ``read``.
        """
        ctypes.memmove(self._address(start, len(data)), data, len(data))

    def copy_from(self, other: GuestMemory) -> None:
        """Become equal to the memory of another instance of the same module.

        Raises:
            wasmtime.WasmtimeError: there is no memory.
        """
        n_bytes = other.n_bytes
        n_more = (n_bytes - self.n_bytes) // PAGE_BYTES
        if n_more > 0:
            self._memory.grow(self._store, n_more)
        ctypes.memmove(self._address(0, n_bytes), other._address(0, n_bytes), n_bytes)

    @property
    def n_bytes(self) -> int:
        """Its size now."""
        return self._memory.data_len(self._store)

    def _address(self, start: int, size: int) -> int:
        n_bytes = self.n_bytes
        if start + size > n_bytes:
            raise Fatal(f"{size} bytes at {start} are not in the memory, which has {n_bytes}")
        return ctypes.addressof(self._memory.data_ptr(self._store).contents) + start
