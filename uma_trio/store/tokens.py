"""Tokens as they stand in files: little-endian int32, each in [0, MAX_TOKEN_ID]."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]

MAX_TOKENS: Final = 1 << 24
"""Of one sequence: sixteen times the longest context that a model was made for."""

MAX_TOKEN_ID: Final = (1 << 24) - 1
"""No vocabulary is a tenth as large.  Whether an id is one of *this* model is for the caller to check."""

TOKEN_BYTES: Final = 4


def to_bytes(tokens: npt.ArrayLike) -> bytes:
    """The bytes of a one-dimensional array of token ids.

    Raises:
        ValueError: it has another shape, is too long, or holds something else.
    """
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"an array of {array.dtype} of shape {array.shape} is no list of tokens")
    _check(array)
    return array.astype("<i4").tobytes()


def from_bytes(data: bytes | bytearray | memoryview) -> Tokens:
    """The tokens in ``data``, a read-only copy.

    Raises:
        ValueError: some are no token ids, or there are too many.
    """
    array = np.frombuffer(bytes(data), "<i4").astype(np.int32, copy=False)
    array.flags.writeable = False
    _check(array)
    return array


def _check(array: npt.NDArray[np.integer]) -> None:
    if array.size > MAX_TOKENS:
        raise ValueError(f"{array.size} tokens are more than {MAX_TOKENS}")
    if array.size and not (int(array.min()) >= 0 and int(array.max()) <= MAX_TOKEN_ID):
        raise ValueError(f"a token id is not in [0, {MAX_TOKEN_ID}]")
