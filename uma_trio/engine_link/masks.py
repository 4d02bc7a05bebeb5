"""Masks of controllers: biases of a step's samples, written into shared memory while the engine computes the logits.

A writer (the runtime of controllers) fills rows while ``llama_decode`` runs, and then has ``MasksReady`` sent.  The engine
adds each row to the logits of its sample.  It maps the writer's memory, so nothing is copied.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

ITEM_BYTES: Final = 4
"""Size of one bias."""


@attrs.frozen(eq=False)
class MaskFile:
    """Shared memory that holds rows of biases: float32 ``[n_rows, n_vocab]`` in C order, from its first byte on."""

    fd: int
    """Its descriptor, which stays the owner's to close."""
    n_rows: int
    n_vocab: int
    """Tokens that the writer knows: no more than the model has.  The others cannot be sampled."""


class Masks:
    """The rows of a ``MaskFile``, mapped.

    Raises:
        OSError, ValueError: the file is shorter, or cannot be mapped.
    """

    def __init__(self, file: MaskFile) -> None:
        n_bytes = ITEM_BYTES * file.n_rows * file.n_vocab
        if os.fstat(file.fd).st_size < n_bytes:  # reading beyond the end of a file would kill this process
            raise ValueError(f"the masks have {os.fstat(file.fd).st_size} bytes instead of {n_bytes}")
        self._mapping = mmap.mmap(file.fd, n_bytes)
        self.rows: npt.NDArray[np.float32] = np.frombuffer(self._mapping, np.float32).reshape(file.n_rows, file.n_vocab)

    def add_to(self, logits: npt.NDArray[np.float32], row: int) -> None:
        """Add a row to logits in place; what is beyond the row gets -inf.

        Args:
            logits: ``[n]``, at least as many as the writer knows.
        """
        biases = self.rows[row]
        logits[: len(biases)] += biases
        logits[len(biases) :] = -np.inf
