"""The memory of the biases: a row for each sequence of ``mid_process``, in the order of its ``ops``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from uma_trio.aici.shared_memory import SharedMemory


class TooManyRows(Exception):
    """The shared memory is too small for a row for each sequence."""


def open_rows(memory: SharedMemory, n_rows: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """The biases of ``n_rows`` sequences, shape ``[n_rows, n_vocab]``: a view of the shared memory.

    The engine adds a row to the logits of a sequence.  The runtime overwrites the rows in the next ``mid_process``.
    The view must be gone before the memory is closed.

    Raises:
        TooManyRows: see there.
        OSError: no room in shared memory.
    """
    n_bytes = n_rows * n_vocab * 4
    if memory.size <= n_bytes:
        raise TooManyRows(f"shm size too small: {memory.size} bytes for {n_rows} rows of {n_vocab} floats")
    memory.reserve(0, n_bytes)
    return np.frombuffer(memory.map, "<f4", n_rows * n_vocab).reshape(n_rows, n_vocab)
