"""Rows that stand in a prompt in place of tokens: what an encoder made of a picture or of sound."""

from __future__ import annotations

import os
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

PLACEHOLDER: Final = 1 << 30
"""Ids from here on are no tokens of any vocabulary: they stand for rows."""


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

    def read(self, width: int) -> npt.NDArray[np.float32]:
        """The rows, ``[n, width]``.

        Raises:
            ValueError: the file has fewer.
        """
        data = os.pread(self.fd, 4 * self.n * width, 4 * self.start * width)
        return np.frombuffer(data, np.float32).reshape(self.n, width)
