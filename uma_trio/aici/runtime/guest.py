"""One instance of a controller's module, as the host functions see it: its memory, logs, blobs and result."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import wasmtime

from uma_trio.aici.runtime.binary import PAGE_BYTES
from uma_trio.aici.runtime.interface import ALLOWED, DISALLOWED, UNASSIGNED, Row, StorageCommand
from uma_trio.aici.runtime.variables import Variables

MAX_RESULT_BYTES: Final = 1 << 20
"""Size of what a controller returns from one call, and of a storage command."""
MAX_STORAGE_BYTES: Final = 4 << 20
"""Storage commands of one call together."""

MAX_LOG_BYTES: Final = 64 << 10
"""Text of a controller that is kept."""
DROPPED_BYTES: Final = 16 << 10
"""How much is dropped at once when there is too much."""

BLOB_ARGUMENT, BLOB_TOKENIZED, BLOB_TOKENS, BLOB_CALL, BLOB_STORAGE, BLOB_CONSTRAINT = range(1, 7)
"""Numbers under which a controller reads what the host has for it: the last of each kind."""
N_PLAIN_BLOBS: Final = 20
"""Smaller numbers are of such a kind, known or not.  Where the host has nothing, it is empty."""
BLOB_TRIE: Final = 100
"""Number of the vocabulary, which is the same for all controllers."""

_BYTE_TO_BIASES: Final[npt.NDArray[np.float32]] = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little") == 1, ALLOWED, DISALLOWED
).astype(np.float32)
"""``[256, 8]``: the biases of eight tokens by a byte of a mask."""


class Fatal(Exception):
    """The controller broke the host's contract.  Ends the call."""


class Stopped(Exception):
    """The controller asked to stop.  Ends the call."""


class GuestMemory:
    """The linear memory of one instance.

    Every access checks the bounds, and asks for the address again: the memory moves when it grows.
    """

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
            wasmtime.WasmtimeError: the memory cannot grow.
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


class LogBuffer:
    """The last ``MAX_LOG_BYTES`` of what was written; after an error the first ones, so that the error stays readable."""

    def __init__(self) -> None:
        self._text = bytearray()
        self.keeps_first = False
        """Whether new text is dropped when there is too much, instead of the oldest."""

    def write(self, text: bytes, n_before: int = 0) -> None:
        """Append ``text``.

        Args:
            n_before: bytes dropped by the caller before ``text``, which alone fills the buffer.
        """
        excess = len(self._text) + n_before + len(text) - MAX_LOG_BYTES
        if excess <= 0:
            self._text += text
        elif self.keeps_first:
            self._text += text[: max(0, MAX_LOG_BYTES - len(self._text))]
        else:
            dropped = -(-excess // DROPPED_BYTES) * DROPPED_BYTES
            n_old = min(dropped, len(self._text))
            del self._text[:n_old]
            self._text += text[max(0, dropped - n_old - n_before) :]

    def take(self) -> str:
        """What was written since the last time.  Bytes that are not UTF-8 become U+FFFD."""
        text, self._text = self._text, bytearray()
        return text.decode("utf-8", "replace")


@attrs.define(eq=False)
class Guest:
    """One instance, as the host's functions see it.  Used by one thread at a time."""

    store: wasmtime.Store
    n_vocab: int
    eos: int
    trie: bytes
    tokenize: Callable[[bytes], Sequence[int] | npt.NDArray[np.int32]]
    variables: Variables
    deadline: float = 0.0
    """When the call in flight has to end."""
    instance_memory: GuestMemory | None = None
    """Set when the module is instantiated, before it runs."""
    panic: wasmtime.Func | None = None
    """The controller's function that is called after a fatal error."""
    sequence_id: int = UNASSIGNED
    row: Row | None = None
    """Biases of the call in flight; ``None`` outside ``mid_process``."""
    row_is_written: bool = False
    result: bytes | None = None
    failure: BaseException | None = None
    """Why a function of the host has stopped the call."""
    blobs: dict[int, bytes] = attrs.field(factory=dict)
    logs: LogBuffer = attrs.field(factory=LogBuffer)
    storage: list[StorageCommand] = attrs.field(factory=list)
    n_storage_bytes: int = 0
    constraints: dict[int, Any] = attrs.field(factory=dict)
    n_constraints_made: int = 0

    @property
    def memory(self) -> GuestMemory:
        """The memory of the instance."""
        assert self.instance_memory is not None
        return self.instance_memory

    def allow(self, mask: bytes) -> None:
        """Allow the tokens whose bits are set, next to those that are allowed already.

        Args:
            mask: ``n_vocab`` bits or more; token ``t`` is bit ``t % 8`` of byte ``t // 8``.

        Raises:
            Fatal: no ``mid_process`` is in flight.
        """
        row = self.row
        if row is None:
            raise Fatal("logit_ptr is empty: a mask can be returned in mid_process only")
        bits = np.frombuffer(mask, np.uint8)
        n_whole = self.n_vocab // 8
        whole, rest = row[: 8 * n_whole].reshape(-1, 8), row[8 * n_whole :]
        if self.row_is_written:
            np.maximum(whole, _BYTE_TO_BIASES[bits[:n_whole]], out=whole)
            np.maximum(rest, _BYTE_TO_BIASES[bits[n_whole : n_whole + 1]].ravel()[: len(rest)], out=rest)
        else:
            np.take(_BYTE_TO_BIASES, bits[:n_whole], axis=0, out=whole, mode="clip")
            rest[:] = _BYTE_TO_BIASES[bits[n_whole : n_whole + 1]].ravel()[: len(rest)]
            self.row_is_written = True

    def fail(self, error: BaseException) -> None:
        """Note why a function of the host stops the call.  Logs a fatal error, and lets ``panic`` log more."""
        if self.failure is not None:  # inside ``panic``
            return
        self.failure = error
        self.logs.keeps_first = True
        if isinstance(error, Fatal):
            self.logs.write(f"FATAL ERROR: {error}\n".encode("utf-8", "replace"))
            if self.panic is not None:
                with contextlib.suppress(wasmtime.Trap, wasmtime.WasmtimeError):
                    self.panic(self.store)
