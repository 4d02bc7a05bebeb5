"""What the encoder makes of a file, and how it stands in a prompt: tokens and placeholders, and rows in shared memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.media import PLACEHOLDER, STANDING

SHARED_MEMORY: Final = Path("/dev/shm")


def memory_folder() -> Path | None:
    """Where files in shared memory are; ``None``: that of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


@attrs.frozen(eq=False)
class RowFile:
    """Rows of numbers in shared memory, float32 ``[n, width]``. The file ends with this object."""

    fd: int
    n: int
    width: int

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)

    @classmethod
    def of(cls, rows: npt.NDArray[np.float32]) -> RowFile:
        """A file with ``rows``, ``[n, width]``."""
        with tempfile.TemporaryFile(dir=memory_folder()) as file:
            file.write(rows.tobytes())
            file.flush()
            return cls(os.dup(file.fileno()), *rows.shape)

    def read(self, start: int, n: int) -> npt.NDArray[np.float32]:
        """A copy of ``n`` rows from ``start`` on."""
        row_bytes = 4 * self.width
        data = os.pread(self.fd, n * row_bytes, start * row_bytes)
        return np.frombuffer(data, np.float32).reshape(n, self.width)


@attrs.frozen
class RowBlock:
    """Rows that are one picture, a part of one, or a part of sound."""

    n: int
    is_causal: bool = True
    """Otherwise each of them attends to all of them, so one step computes them all."""
    columns: int = 0
    """Columns of a picture with positions in two dimensions (M-RoPE); otherwise 0."""

    @property
    def n_positions(self) -> int:
        """Positions that they take in the prompt."""
        return max(self.columns, -(-self.n // self.columns)) if self.columns else self.n


@attrs.frozen(eq=False)
class EncodedMedia:
    """A picture or sound as it stands in a prompt."""

    tokens: npt.NDArray[np.int32]
    """Shape ``[n]``: tokens that the model expects around it, and one placeholder for each row.

    Placeholders are made of a hash of the file. So equal files have equal ids and others do not, and whatever compares
    prefixes by their tokens also compares pictures."""
    rows: RowFile
    """What stands in place of the placeholders, in their order."""
    blocks: Sequence[RowBlock]
    """What the rows are, in their order."""


def placeholders(digest: bytes, blocks: Sequence[RowBlock]) -> npt.NDArray[np.int32]:
    """Ids for the rows of the file whose SHA-256 is ``digest``."""
    words = np.frombuffer(digest, "<u4") % (STANDING - PLACEHOLDER) + PLACEHOLDER
    ids = np.resize(words, sum([block.n for block in blocks])).astype(np.int32)
    at = 0
    for block in blocks:
        ids[at : at + block.n - block.n_positions] += STANDING - PLACEHOLDER
        at += block.n
    return ids
