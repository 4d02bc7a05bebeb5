"""What the functions that a module imports work on: the memory of one instance, and what it was given and returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import wasmtime

from uma_trio.aici.runtime.failures import Fatal
from uma_trio.aici.runtime.interface import ALLOWED, DISALLOWED, UNASSIGNED, Row, StorageCommand
from uma_trio.aici.runtime.logs import LogBuffer
from uma_trio.aici.runtime.memory import GuestMemory
from uma_trio.aici.runtime.variables import Variables

MAX_RESULT_BYTES: Final = 1 << 20
"""Size of what a controller returns from one call, and of a storage command."""
MAX_STORAGE_BYTES: Final = 4 << 20
"""Storage commands of one call together."""

BLOB_ARGUMENT, BLOB_TOKENIZED, BLOB_TOKENS, BLOB_CALL, BLOB_STORAGE, BLOB_CONSTRAINT = range(1, 7)
N_PLAIN_BLOBS: Final = 20
BLOB_TRIE: Final = 100

_BYTE_TO_BIASES: Final[npt.NDArray[np.float32]] = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little") == 1, ALLOWED, DISALLOWED
).astype(np.float32)
"""``[256, 8]``: the biases of eight tokens by a byte of a mask."""


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
    """What the controller wants to be called when it has made a fatal error."""
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
        """Note why a function of the host stops the call.  A fatal error is logged, and the controller may add to that."""
        if self.failure is not None:  # inside ``panic``
            return
        self.failure = error
        self.logs.keeps_first = True
        if isinstance(error, Fatal):
            self.logs.write(f"FATAL ERROR: {error}\n".encode("utf-8", "replace"))
            if self.panic is not None:
                with contextlib.suppress(wasmtime.Trap, wasmtime.WasmtimeError):
                    self.panic(self.store)
