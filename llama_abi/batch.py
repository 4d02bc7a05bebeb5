"""What goes into one decode: tokens, their positions, their sequences, and which want logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError
from llama_abi.types import llama_batch

INT32_MAX = 2**31 - 1

Integers = Sequence[int] | npt.NDArray[np.integer[Any]]


class Batch:
    """Room for ``capacity`` tokens, filled and cleared again and again; one thread at a time.

    It owns numpy arrays, and a ``llama_batch`` that points into them.  Logits come back in the
    order in which their tokens were added: the first that asked is row 0.

        batch.clear()
        batch.add(prompt_chunk, pos=128, seq=3)
        batch.add_each(tokens=[17, 9], positions=[40, 41], seqs=[0, 1])    # two decoding streams
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= INT32_MAX:
            raise LlamaError(f"a batch of {capacity} tokens cannot be made")
        self.capacity = capacity
        """Most tokens it holds; also bounded by the context's ``n_batch``."""
        self.n_tokens = 0
        """Tokens in it now."""
        self.n_outputs = 0
        """Of these, tokens that want logits: rows that the decode will give."""
        self.max_seq = -1
        """Highest sequence id in it; -1 while empty."""
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._wants = np.zeros(capacity, np.int8)
        self._n_seq = np.ones(capacity, np.int32)
        self._seq_pointers = self._seq.ctypes.data + np.arange(capacity, dtype=np.uintp) * 4
        int32s, int32_pointers = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        self._struct = llama_batch(
            token=ctypes.cast(self._token.ctypes.data, int32s),
            pos=ctypes.cast(self._pos.ctypes.data, int32s),
            n_seq_id=ctypes.cast(self._n_seq.ctypes.data, int32s),
            seq_id=ctypes.cast(self._seq_pointers.ctypes.data, int32_pointers),
            logits=ctypes.cast(self._wants.ctypes.data, ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        """Empty it."""
        self.n_tokens = 0
        self.n_outputs = 0
        self.max_seq = -1

    def add(self, tokens: Integers, *, pos: int, seq: int, logits: Literal["none", "last", "all"] = "last") -> int:
        """Append consecutive tokens of one sequence.

        Args:
            tokens: ids ``[n]``, at least one; a numpy array is copied without a loop.
            pos: position of the first; the others follow.
            seq: sequence id.
            logits: after which of these tokens logits are wanted.

        Returns:
            The index of the last one in the batch.

        Raises:
            LlamaError: no room, nothing to add, or a value out of bounds.  The batch is unchanged.
        """
        ids = _int32(tokens, "token ids")
        n = len(ids)
        start, end = self._room(n)
        if not 0 <= pos <= INT32_MAX - n:
            raise LlamaError(f"position {pos} is out of bounds")
        if not 0 <= seq <= INT32_MAX:
            raise LlamaError(f"sequence {seq} is out of bounds")
        if logits not in ("none", "last", "all"):
            raise LlamaError(f"logits must be 'none', 'last' or 'all', not {logits!r}")
        self._token[start:end] = ids
        self._pos[start:end] = np.arange(pos, pos + n, dtype=np.int32)
        self._seq[start:end] = seq
        self._wants[start:end] = logits == "all"
        if logits == "last":
            self._wants[end - 1] = 1
        self.n_outputs += {"none": 0, "last": 1, "all": n}[logits]
        self.max_seq = max(self.max_seq, seq)
        self.n_tokens = end
        return end - 1

    def add_each(self, tokens: Integers, *, positions: Integers, seqs: Integers, logits: bool = True) -> int:
        """Append one token for each of several sequences: what all decoding streams add to a tick.

        Args:
            tokens, positions, seqs: three of one length, at least one.
            logits: whether these tokens want logits.

        Returns:
            The index of the first one in the batch; the others follow.

        Raises:
            LlamaError: no room, unequal lengths, or a value out of bounds.  The batch is unchanged.
        """
        ids, where, who = _int32(tokens, "token ids"), _int32(positions, "positions"), _int32(seqs, "sequences")
        if not len(ids) == len(where) == len(who):
            raise LlamaError(f"{len(ids)} tokens, {len(where)} positions and {len(who)} sequences")
        start, end = self._room(len(ids))
        self._token[start:end] = ids
        self._pos[start:end] = where
        self._seq[start:end] = who
        self._wants[start:end] = logits
        self.n_outputs += len(ids) if logits else 0
        self.max_seq = max(self.max_seq, int(who.max()))
        self.n_tokens = end
        return start

    def _room(self, n: int) -> tuple[int, int]:
        if n < 1:
            raise LlamaError("there are no tokens to add")
        if self.n_tokens + n > self.capacity:
            raise LlamaError(f"{n} more tokens do not fit: the batch has {self.n_tokens} of {self.capacity}")
        return self.n_tokens, self.n_tokens + n

    def _filled(self) -> Any:
        """The ``llama_batch`` for C; valid until the batch is changed."""
        self._struct.n_tokens = self.n_tokens
        return self._struct

    def __repr__(self) -> str:
        return f"<Batch {self.n_tokens} of {self.capacity} tokens, {self.n_outputs} want logits>"


def _int32(values: Integers, what: str) -> npt.NDArray[np.int32]:
    """As one row of non-negative int32."""
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise LlamaError(f"{what}: {error}") from None
    if found.ndim != 1:
        raise LlamaError(f"{what} must have one dimension, not {found.ndim}")
    if found.size and (found.dtype.kind not in "iu" or int(found.min()) < 0 or int(found.max()) > INT32_MAX):
        raise LlamaError(f"{what} must be integers in [0, {INT32_MAX}]")
    return found.astype(np.int32, copy=False)
