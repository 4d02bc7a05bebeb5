"""Late masks: what a sequence may sample next, written into shared memory while the engine computes the logits.

The buffer has one row for each sequence id.  A writer (a grammar, a controller) fills the rows of a step's sequences while
``llama_decode`` runs and then has ``MasksReady`` sent.  The engine reads the rows before it samples.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

MaskKind: TypeAlias = Literal["bits", "bias"]
"""``bits``: uint32 ``[n_rows, ceil(n_vocab / 32)]``, token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set.
``bias``: float32 ``[n_rows, n_vocab]``, added to the logits; ``-inf`` forbids a token."""


def _shape(kind: MaskKind, n_rows: int, n_vocab: int) -> tuple[int, int]:
    return (n_rows, -(-n_vocab // 32)) if kind == "bits" else (n_rows, n_vocab)


class MaskBuffer:
    """Rows of masks in shared memory.  Both sides map the same file.

    Args:
        fd: of the file; stays the caller's to close.
        n_rows: sequence ids.
    """

    def __init__(self, fd: int, kind: MaskKind, n_rows: int, n_vocab: int) -> None:
        dtype: npt.DTypeLike = np.uint32 if kind == "bits" else np.float32
        shape = _shape(kind, n_rows, n_vocab)
        self.kind = kind
        self._n_vocab = n_vocab
        self.rows: npt.NDArray[Any] = np.frombuffer(mmap.mmap(fd, 4 * shape[0] * shape[1]), dtype).reshape(shape)
        """A row for each sequence id; see ``MaskKind``."""

    def allow_only(self, seq_id: int, tokens: npt.NDArray[np.integer]) -> None:
        """Fill a row so that only ``tokens`` can be sampled."""
        row = self.rows[seq_id]
        if self.kind == "bias":
            row[:] = -np.inf
            row[tokens] = 0.0
        else:
            row[:] = 0
            np.bitwise_or.at(row, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))

    def apply(self, seq_id: int, logits: npt.NDArray[np.float32]) -> None:
        """Apply a row to logits ``[n_vocab]`` in place."""
        row = self.rows[seq_id]
        if self.kind == "bias":
            logits += row
        else:
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: self._n_vocab]
            logits[allowed == 0] = -np.inf


def create_mask_file(kind: MaskKind, n_rows: int, n_vocab: int) -> int:
    """A descriptor of a zeroed file without a name, of the size that ``MaskBuffer`` maps.  The caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("uma-trio masks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    n_rows, width = _shape(kind, n_rows, n_vocab)
    os.ftruncate(fd, 4 * n_rows * width)
    return fd
