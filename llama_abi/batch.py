"""The input of one decode: tokens with their positions and sequences, and which of them need logits."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError
from llama_abi.types import llama_batch

INT32_MAX = 2**31 - 1
POSITION_AXES = 4
"""Time, height, width, and one that is not used."""

Integers = Sequence[int] | npt.NDArray[np.integer[Any]]


class Batch:
    """Up to ``capacity`` tokens for one decode. Clear and fill it again for the next one. Not thread-safe.

    The batch owns numpy arrays and a ``llama_batch`` that points into them. Rows of logits have the order in which
    their tokens were added.

        batch.clear()
        batch.add(prefill_chunk, pos=128, seq=3)
        batch.add_decodes(tokens=[17, 9], positions=[40, 41], seqs=[0, 1])    # two decoding sequences

    Args:
        n_embd: width of rows that stand in place of tokens; see ``add_rows``. 0: the batch takes tokens.
    """

    def __init__(self, capacity: int, n_embd: int = 0) -> None:
        if not 1 <= capacity <= INT32_MAX:
            raise LlamaError(f"a batch has a capacity of 1 to {INT32_MAX} tokens, not {capacity}")
        self.capacity = capacity
        """Most tokens it can hold. A decode takes at most the context's ``n_batch``."""
        self.n_tokens = 0
        """Number of tokens in it."""
        self.n_outputs = 0
        """Number of tokens that need logits, and of rows that the decode returns."""
        self.max_seq = -1
        """Highest sequence id in it; -1 if it is empty."""
        self.n_embd = n_embd
        """Width of its rows; 0 if it takes tokens."""
        self._token = np.zeros(0 if n_embd else capacity, np.int32)
        self._rows = np.zeros((capacity, n_embd), np.float32)
        self._pos = np.zeros(capacity, np.int32)
        self._axes = np.zeros((POSITION_AXES, capacity) if n_embd else (0, 0), np.int32)
        """Positions of rows: of models with M-RoPE llama.cpp reads all of them, of others the first."""
        self._flat = np.zeros(self._axes.size, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._needs_logits = np.zeros(capacity, np.int8)
        self._n_seq = np.ones(capacity, np.int32)
        self._columns = [column.data for column in (self._token, self._pos, self._seq)]
        self._flags = self._needs_logits.data.cast("B")
        """The same memory as ``_needs_logits``. To write a few numbers, numpy takes ten times as long."""
        self._seq_pointers = self._seq.ctypes.data + np.arange(capacity, dtype=np.uintp) * 4
        int32s, int32_pointers = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        self._struct = llama_batch(
            token=None if n_embd else ctypes.cast(self._token.ctypes.data, int32s),
            embd=ctypes.cast(self._rows.ctypes.data, ctypes.POINTER(ctypes.c_float)) if n_embd else None,
            pos=ctypes.cast((self._flat if n_embd else self._pos).ctypes.data, int32s),
            n_seq_id=ctypes.cast(self._n_seq.ctypes.data, int32s),
            seq_id=ctypes.cast(self._seq_pointers.ctypes.data, int32_pointers),
            logits=ctypes.cast(self._needs_logits.ctypes.data, ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        """Remove all tokens."""
        self.n_tokens = 0
        self.n_outputs = 0
        self.max_seq = -1

    def add(self, tokens: Integers, *, pos: int, seq: int, logits: Literal["none", "last", "all"] = "last") -> int:
        """Append consecutive tokens of one sequence.

        Args:
            tokens: ids of shape ``[n]``, at least one. A numpy array is copied without a Python loop.
            pos: position of the first token; the others follow it.
            seq: sequence id.
            logits: which of these tokens need logits.

        Returns:
            Index of the last token in the batch.

        Raises:
            LlamaError: the batch is full, there are no tokens, or a value is out of bounds. The batch is unchanged.
        """
        ids = _int32(tokens, "token ids")
        start, end = self._add(len(ids), pos, seq, logits, rows=False)
        self._token[start:end] = ids
        return end - 1

    def add_rows(
        self,
        rows: npt.NDArray[np.float32],
        *,
        pos: int,
        seq: int,
        logits: Literal["none", "last", "all"] = "last",
        columns: int = 0,
        first: int = 0,
    ) -> int:
        """Append rows that stand in place of consecutive tokens of one sequence, such as those of a picture.

        Args:
            rows: float32 ``[n, n_embd]``, at least one. ``Model.n_embd_inp`` is the width that a model takes.
            pos, seq, logits: as in ``add``.
            columns: the rows are a picture of so many columns, for a model with M-RoPE: ``pos`` is that of the picture.
                0: consecutive positions.
            first: rows of the picture that come before these.

        Returns:
            Index of the last row in the batch.

        Raises:
            LlamaError: the batch is full or takes tokens, the rows have another shape or are not finite, or a value is
                out of bounds. The batch is unchanged.
        """
        if rows.ndim != 2 or rows.shape[1] != self.n_embd or rows.dtype != np.float32:
            raise LlamaError(f"rows of this batch are float32 [n, {self.n_embd}], not {rows.dtype} {rows.shape}")
        if not np.isfinite(rows).all():
            raise LlamaError("rows must be finite")
        start, end = self._add(len(rows), pos, seq, logits, rows=True)
        self._rows[start:end] = rows
        if columns:
            down, across = np.divmod(np.arange(first, first + len(rows), dtype=np.int32), columns)
            self._pos[start:end] = pos
            self._axes[:, start:end] = self._pos[start:end], pos + down, pos + across, 0 * down
        else:
            self._axes[:, start:end] = self._pos[start:end]
        return end - 1

    def _add(self, n: int, pos: int, seq: int, logits: str, *, rows: bool) -> tuple[int, int]:
        """Append ``n`` places of one sequence; returns where they begin and end."""
        start, end = self._room(n, rows=rows)
        if not 0 <= pos <= INT32_MAX - n:
            raise LlamaError(f"position {pos} is out of bounds")
        if not 0 <= seq <= INT32_MAX:
            raise LlamaError(f"sequence {seq} is out of bounds")
        if logits not in ("none", "last", "all"):
            raise LlamaError(f"logits must be 'none', 'last' or 'all', not {logits!r}")
        self._pos[start:end] = np.arange(pos, pos + n, dtype=np.int32)
        self._seq[start:end] = seq
        self._needs_logits[start:end] = logits == "all"
        if logits == "last":
            self._needs_logits[end - 1] = 1
        self.n_outputs += {"none": 0, "last": 1, "all": n}[logits]
        self.max_seq = max(self.max_seq, seq)
        self.n_tokens = end
        return start, end

    def add_decodes(
        self, tokens: Integers, *, positions: Integers, seqs: Integers, logits: bool | Sequence[bool] = True
    ) -> int:
        """Append one token for each of several sequences, as every decode step does.

        Args:
            tokens, positions, seqs: integers of shape ``[n]``, at least one.
            logits: whether these tokens need logits: all or none, or one value for each.

        Returns:
            Index of the first token in the batch; the others follow it.

        Raises:
            LlamaError: the batch is full, the lengths differ, or a value is out of bounds. The batch is unchanged.
        """
        columns = _numbers(tokens, "token ids"), _numbers(positions, "positions"), _numbers(seqs, "sequences")
        n = len(columns[0])
        needed = bytes([logits] * n) if isinstance(logits, bool) else bytes(map(bool, logits))
        if {*map(len, columns), len(needed)} != {n}:
            raise LlamaError(f"{n} tokens, {len(positions)} positions and {len(seqs)} sequences do not match")
        start, end = self._room(n)
        for column, values in zip(self._columns, columns, strict=True):
            column[start:end] = values
        self._flags[start:end] = needed
        self.n_outputs += needed.count(1)
        self.max_seq = max(self.max_seq, *columns[2])
        self.n_tokens = end
        return start

    def go_on(self, tokens: Integers) -> None:
        """Replace each token by the next one of its sequence. The batch has one token of each, from ``add_decodes``.

        Raises:
            LlamaError: there are not as many tokens as in the batch, or one is out of bounds. The batch is unchanged.
        """
        ids = _numbers(tokens, "token ids")
        if len(ids) != self.n_tokens or self.n_embd:
            raise LlamaError(f"{len(ids)} tokens do not go on with a batch of {self.n_tokens}")
        self._columns[0][: len(ids)] = ids
        self._pos[: len(ids)] += 1

    def _room(self, n: int, *, rows: bool = False) -> tuple[int, int]:
        if rows != bool(self.n_embd):
            raise LlamaError(f"this batch takes {'rows' if self.n_embd else 'tokens'}; another one is needed")
        if n < 1:
            raise LlamaError("there are no tokens to add")
        if self.n_tokens + n > self.capacity:
            raise LlamaError(f"{n} more tokens do not fit: the batch has {self.n_tokens} of {self.capacity}")
        return self.n_tokens, self.n_tokens + n

    def _filled(self) -> Any:
        """The ``llama_batch`` for C. Valid until the batch changes."""
        self._struct.n_tokens = n = self.n_tokens
        if self.n_embd:
            self._flat[: POSITION_AXES * n] = self._axes[:, :n].ravel()
        return self._struct

    def __repr__(self) -> str:
        return f"<Batch {self.n_tokens} of {self.capacity} tokens, {self.n_outputs} need logits>"


def _numbers(values: Integers, what: str) -> array[int]:
    """Convert a few non-negative integers to int32."""
    try:
        numbers = array("i", values)
    except (TypeError, OverflowError) as error:
        raise LlamaError(f"{what}: {error}") from None
    if numbers and min(numbers) < 0:
        raise LlamaError(f"{what} must be integers in [0, {INT32_MAX}]")
    return numbers


def _int32(values: Integers, what: str) -> npt.NDArray[np.int32]:
    """Convert to a one-dimensional array of non-negative int32."""
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise LlamaError(f"{what}: {error}") from None
    if numbers.ndim != 1:
        raise LlamaError(f"{what} must have one dimension, not {numbers.ndim}")
    if numbers.size and (numbers.dtype.kind not in "iu" or int(numbers.min()) < 0 or int(numbers.max()) > INT32_MAX):
        raise LlamaError(f"{what} must be integers in [0, {INT32_MAX}]")
    return numbers.astype(np.int32, copy=False)
