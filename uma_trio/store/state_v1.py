"""Reads state files of format version 1, which ``StateFolder.scan`` rewrites in the current version.

Version 1 differs from ``state_format`` in two ways: the owner is a Unix user id, and every hash is a BLAKE2b code with
a key that lies in the folder.  Delete this module once no such files are left to upgrade.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, Final

import attrs

from uma_trio.store.encoding import (
    MAX_TOKENS,
    TOKEN_BYTES,
    DamagedFile,
    ForeignFile,
    Tokens,
    decode_tokens,
    uid_principal,
)
from uma_trio.store.state_format import MAGIC, MAX_EXTRA_BYTES, PAYLOAD_AT, decode_extra, n_pages

VERSION: Final = 1
KEY: Final = "key"
"""Name of the file with the folder's key."""
KEY_BYTES: Final = 32
CODE_BYTES: Final = 32

FIELDS: Final = struct.Struct("<8sI4x16s32sqdQII32s")
"""Magic, version, name, fingerprint, user id, saved_at, n_bytes, n_tokens, extra_bytes, code of the tail."""

_START: Final = MAGIC + struct.pack("<I", VERSION)


@attrs.frozen(eq=False)
class OldState:
    """A state file of version 1, verified except for the state itself."""

    tokens: Tokens
    n_bytes: int
    principal: str
    saved_at: float
    extra: dict[str, Any]
    page_codes: list[bytes]


def is_old(data: bytes | bytearray) -> bool:
    """Tells whether ``data`` begins like a state file of version 1."""
    return data.startswith(_START)


def code_of(data: bytes | bytearray | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CODE_BYTES, key=key).digest()


def decode(
    read: Callable[[int, int], bytearray], file_bytes: int, name: str, fingerprint: bytes, key: bytes
) -> OldState:
    """Decodes and verifies everything but the state.

    Args:
        read: returns at most this many bytes, from an offset of the file.

    Raises:
        DamagedFile: something is cut off, altered or out of range, or ``key`` is not the one that was used.
        ForeignFile: the file has another fingerprint.
    """
    start = read(PAYLOAD_AT, 0)
    if len(key) != KEY_BYTES or len(start) != PAYLOAD_AT or code_of(start[:-CODE_BYTES], key) != start[-CODE_BYTES:]:
        raise DamagedFile("its header was altered, or the key in its folder is not the one that it was written with")
    (_, _, of_name, of, uid, saved_at, n_bytes, n_tokens, extra_bytes, tail_code) = FIELDS.unpack_from(start)
    if of_name.hex() != name:
        raise DamagedFile("it is the file of another state under this name")
    if of != fingerprint:
        raise ForeignFile("it is from another model, library or layout")
    if not (n_bytes > 0 and n_tokens <= MAX_TOKENS and extra_bytes <= MAX_EXTRA_BYTES and math.isfinite(saved_at)):
        raise DamagedFile("a field of its header is out of range")
    extra_at = TOKEN_BYTES * n_tokens
    codes_at = extra_at + extra_bytes
    tail_bytes = codes_at + CODE_BYTES * n_pages(n_bytes)
    if file_bytes != PAYLOAD_AT + n_bytes + tail_bytes:
        raise DamagedFile(f"it has {file_bytes} bytes instead of {PAYLOAD_AT + n_bytes + tail_bytes}")
    tail = bytes(read(tail_bytes, PAYLOAD_AT + n_bytes))
    if code_of(tail, key) != tail_code:
        raise DamagedFile("its tokens or hashes were altered")
    try:
        return OldState(
            tokens=decode_tokens(tail[:extra_at]),
            n_bytes=n_bytes,
            principal=uid_principal(uid),
            saved_at=saved_at,
            extra=decode_extra(tail[extra_at:codes_at]),
            page_codes=[tail[at : at + CODE_BYTES] for at in range(codes_at, tail_bytes, CODE_BYTES)],
        )
    except ValueError as error:
        raise DamagedFile(f"its metadata is invalid: {error}") from None
