"""Values that both file formats share: token ids, principals, and the two reasons to reject a file."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.tokens import TokenIds

MAX_TOKENS: Final = 1 << 24
"""Most tokens of one sequence: sixteen times the longest context of any published model."""

MAX_TOKEN_ID: Final = (1 << 24) - 1
"""Largest token id that a file may contain.  Vocabularies are less than a tenth of that.

The caller checks whether an id belongs to the vocabulary of its model.  Placeholders of rows of a picture are far above.
"""

TOKEN_BYTES: Final = 4

MAX_PRINCIPAL_BYTES: Final = 128
"""Most bytes of a principal in UTF-8."""


class DamagedFile(Exception):
    """The file's content cannot be trusted; the message gives the reason."""


class ForeignFile(Exception):
    """The file is intact but belongs to another model, library or format version; the message says which."""


# -- tokens ------------------------------------------------------------------------------------------


def encode_tokens(tokens: npt.ArrayLike) -> bytes:
    """Encode token ids as little-endian int32.

    Args:
        tokens: ids in [0, MAX_TOKEN_ID] and placeholders, shape ``[n_tokens]``.

    Raises:
        ValueError: the array has another shape or type, is too long, or contains an id that is out of range.
    """
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected a list of token ids, got an array of {array.dtype} with shape {array.shape}")
    _check(array)
    return array.astype("<i4").tobytes()


def decode_tokens(data: bytes | bytearray | memoryview) -> TokenIds:
    """Decode token ids into a read-only copy, int32 ``[n_tokens]``.

    Raises:
        ValueError: there are too many ids, or one is out of range.
    """
    array = np.frombuffer(bytes(data), "<i4").astype(np.int32, copy=False)
    array.flags.writeable = False
    _check(array)
    return array


def _check(array: npt.NDArray[np.integer]) -> None:
    if array.size > MAX_TOKENS:
        raise ValueError(f"{array.size} tokens exceed the limit of {MAX_TOKENS}")
    ids = array[array < PLACEHOLDER]
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) <= MAX_TOKEN_ID):
        raise ValueError(f"a token id is not in [0, {MAX_TOKEN_ID}]")


# -- principals --------------------------------------------------------------------------------------


def encode_principal(principal: str) -> bytes:
    """Encode a principal as UTF-8.

    Raises:
        ValueError: the principal is empty, longer than ``MAX_PRINCIPAL_BYTES``, or not valid Unicode.
    """
    data = principal.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
    if not 1 <= len(data) <= MAX_PRINCIPAL_BYTES:
        raise ValueError(f"a principal has 1 to {MAX_PRINCIPAL_BYTES} bytes, not {len(data)}")
    return data
