"""Rows that stand in a prompt in place of tokens: what an encoder made of a picture or of sound."""

from __future__ import annotations

import os
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.tokens import TokenIds

PLACEHOLDER: Final = 1 << 30
"""Ids from here on are no tokens of any vocabulary: they stand for rows."""
STANDING: Final = PLACEHOLDER + PLACEHOLDER // 2
"""Rows with ids from here on take no position of their own: the next token has the same position.  A picture with
positions in two dimensions begins with them."""


class MediaRows(msgspec.Struct, array_like=True, gc=False):
    """Which tokens of an input are rows of a file instead.  Their ids are placeholders."""

    at: int
    """The first of them among the tokens of the input."""
    n: int
    """How many, at least one."""
    fd: int
    """Descriptor of the file: float32 ``[rows, width]``.  It goes with the message of the step."""
    start: int
    """Row of the file for the first of them."""
    is_causal: bool = True
    """Otherwise each row attends to all of them, and they are computed in one pass."""
    columns: int = 0
    """Columns of the picture, if its rows have positions in two dimensions; otherwise 0."""
    row: int = 0
    """Rows of the picture before the first of them."""

    def read(self, width: int) -> npt.NDArray[np.float32]:
        """The rows, ``[n, width]``.

        Raises:
            ValueError: the file has fewer.
        """
        data = os.pread(self.fd, 4 * self.n * width, 4 * self.start * width)
        return np.frombuffer(data, np.float32).reshape(self.n, width)


def standing_runs(tokens: TokenIds, start: int = 0) -> list[tuple[int, int]]:
    """The runs of rows that take no position: where each begins, and its length.

    Args:
        tokens: of a sequence, from ``start`` on.
    """
    stands = np.concatenate([[False], tokens >= STANDING, [False]])
    edges = np.flatnonzero(stands[1:] != stands[:-1]).tolist()
    return [(start + begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def before_picture(tokens: TokenIds, length: int) -> int:
    """``length``, or where the picture begins that would be cut there."""
    if not 0 < length < len(tokens) or tokens[length - 1] < PLACEHOLDER or tokens[length] < PLACEHOLDER:
        return length
    texts = np.flatnonzero(tokens[:length] < PLACEHOLDER)
    return int(texts[-1]) + 1 if len(texts) else 0
