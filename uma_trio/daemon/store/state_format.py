"""The file format of one saved sequence state.

::

    offset      bytes               content
    0           PAYLOAD_AT          header: FIELDS, zeros, hash of all that
    PAYLOAD_AT  n_bytes             the state as llama.cpp serialised it
    ...         4 * n_tokens        token ids, int32
    ...         extra_bytes         extra metadata, a JSON object
    ...         HASH_BYTES a page   hash of each PAGE_BYTES of the state

All numbers are little-endian.  Every hash is XXH3-128.  The tail is everything after the state.  The header's hash
covers the hash of the tail, and the tail contains the hashes of the pages, so any changed, missing or misplaced byte
is detected.

Hashes detect accidents, not attacks: a process that can write to the folder can also compute them.  Only the user
of the daemon can write to it.

This module is pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec
import numpy.typing as npt

from uma_trio.daemon.store.encoding import (
    MAX_PRINCIPAL_BYTES,
    MAX_TOKENS,
    TOKEN_BYTES,
    DamagedFile,
    ForeignFile,
    decode_tokens,
    encode_principal,
    encode_tokens,
)
from uma_trio.engine_link.state_pages import HASH_BYTES, hash_of, n_pages
from uma_trio.engine_link.tokens import TokenIds

MAGIC: Final = b"UMASTATE"
VERSION: Final = 2

PAYLOAD_AT: Final = 1 << 14
"""Where the state begins.  A multiple of the page size of the system (4 KiB, or 16 KiB on Apple silicon)."""

NAME_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 32

MAX_EXTRA_BYTES: Final = 1 << 16

FIELDS: Final = struct.Struct(f"<8sI4x16s32s{MAX_PRINCIPAL_BYTES + 1}p7xdQII16s")
"""Magic, version, name, fingerprint, principal, saved_at, n_bytes, n_tokens, extra_bytes, hash of the tail."""


@attrs.frozen(eq=False)
class StoredState:
    """A saved sequence state, as its file describes it."""

    name: str
    """Name in the ``StateFolder``: 32 hexadecimal digits."""
    tokens: TokenIds
    """Tokens of the sequence, int32 ``[n_tokens]``, read-only."""
    n_bytes: int
    """Size of the state."""
    file_bytes: int
    """Size of the whole file."""
    principal: str
    """Owner of the sequence."""
    saved_at: float
    """Seconds since 1970."""
    extra: dict[str, Any]
    """Additional metadata, made of JSON values."""


@attrs.frozen
class Header:
    """The fields of a header; the tail is described but not read yet."""

    name: str
    principal: str
    saved_at: float
    n_bytes: int
    n_tokens: int
    extra_bytes: int
    tail_hash: bytes

    @property
    def tail_at(self) -> int:
        return PAYLOAD_AT + self.n_bytes

    @property
    def tail_bytes(self) -> int:
        return TOKEN_BYTES * self.n_tokens + self.extra_bytes + HASH_BYTES * n_pages(self.n_bytes)

    @property
    def file_bytes(self) -> int:
        return self.tail_at + self.tail_bytes


def fingerprint_of(text: bytes | str) -> bytes:
    """Condenses a fingerprint of any length to ``FINGERPRINT_BYTES``."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


def encode(
    *,
    name: str,
    fingerprint: bytes,
    tokens: npt.ArrayLike,
    principal: str,
    saved_at: float,
    extra: dict[str, Any],
    n_bytes: int,
    page_hashes: Sequence[bytes],
) -> tuple[StoredState, bytes, bytes]:
    """Encodes all of a file but the state itself.

    Returns:
        The description of the file, its first ``PAYLOAD_AT`` bytes, and the tail that follows the state.

    Raises:
        ValueError: the tokens, the principal or the extra metadata cannot be stored.
    """
    token_bytes, extra_json = encode_tokens(tokens), encode_extra(extra)
    tail = b"".join([token_bytes, extra_json, *page_hashes])
    n_tokens = len(token_bytes) // TOKEN_BYTES
    header = Header(name, principal, saved_at, n_bytes, n_tokens, len(extra_json), hash_of(tail))
    state = StoredState(
        name=name,
        tokens=decode_tokens(token_bytes),
        n_bytes=n_bytes,
        file_bytes=header.file_bytes,
        principal=principal,
        saved_at=saved_at,
        extra=extra,
    )
    return state, encode_header(header, fingerprint), tail


def encode_header(header: Header, fingerprint: bytes) -> bytes:
    """Encodes the first ``PAYLOAD_AT`` bytes of a file.

    Raises:
        ValueError: the principal cannot be stored.
    """
    fields = FIELDS.pack(
        MAGIC,
        VERSION,
        bytes.fromhex(header.name),
        fingerprint,
        encode_principal(header.principal),
        header.saved_at,
        header.n_bytes,
        header.n_tokens,
        header.extra_bytes,
        header.tail_hash,
    )
    hashed = fields.ljust(PAYLOAD_AT - HASH_BYTES, b"\0")
    return hashed + hash_of(hashed)


def decode_header(data: bytes | bytearray, name: str, file_bytes: int, fingerprint: bytes) -> Header:
    """Decodes and verifies the header of the file ``name``.

    Args:
        data: the first ``PAYLOAD_AT`` bytes of the file, or fewer if it is shorter.
        file_bytes: size of the file.

    Raises:
        DamagedFile: the header is cut off, altered or of another state, or the file has the wrong size.
        ForeignFile: the file has another version or fingerprint.
    """
    if len(data) != PAYLOAD_AT or not data.startswith(MAGIC):
        raise DamagedFile("it does not begin like a state file")
    if hash_of(data[:-HASH_BYTES]) != data[-HASH_BYTES:]:
        raise DamagedFile("its header was altered")
    (_, version, of_name, of, principal, saved_at, n_bytes, n_tokens, extra_bytes, tail_hash) = FIELDS.unpack_from(data)
    if version != VERSION:
        raise ForeignFile(f"it has format version {version}; this daemon reads version {VERSION}")
    if of_name.hex() != name:
        raise DamagedFile("it is the file of another state under this name")
    if of != fingerprint:
        raise ForeignFile("it is from another model, library or layout")
    try:
        header = Header(name, principal.decode(), saved_at, n_bytes, n_tokens, extra_bytes, tail_hash)
        encode_principal(header.principal)
    except ValueError as error:
        raise DamagedFile(f"its principal is invalid: {error}") from None
    if not (n_bytes > 0 and n_tokens <= MAX_TOKENS and extra_bytes <= MAX_EXTRA_BYTES and math.isfinite(saved_at)):
        raise DamagedFile("a field of its header is out of range")
    if file_bytes != header.file_bytes:
        raise DamagedFile(f"it has {file_bytes} bytes instead of {header.file_bytes}")
    return header


def decode_tail(data: bytes | bytearray, header: Header) -> tuple[StoredState, list[bytes]]:
    """Decodes and verifies the tail; returns the description of the state and the hashes of its pages.

    Raises:
        DamagedFile: the tail is cut off or altered.
    """
    if len(data) != header.tail_bytes or hash_of(data) != header.tail_hash:
        raise DamagedFile("its tokens or hashes were altered")
    view = memoryview(data)
    tokens, rest = view[: TOKEN_BYTES * header.n_tokens], view[TOKEN_BYTES * header.n_tokens :]
    extra, hashes = rest[: header.extra_bytes], bytes(rest[header.extra_bytes :])
    try:
        state = StoredState(
            name=header.name,
            tokens=decode_tokens(tokens),
            n_bytes=header.n_bytes,
            file_bytes=header.file_bytes,
            principal=header.principal,
            saved_at=header.saved_at,
            extra=decode_extra(extra),
        )
    except ValueError as error:
        raise DamagedFile(f"its metadata is invalid: {error}") from None
    return state, [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def encode_extra(extra: dict[str, Any]) -> bytes:
    """Encodes the extra metadata as JSON.

    Raises:
        ValueError: it has more than ``MAX_EXTRA_BYTES``, or does not survive the way to JSON and back.
    """
    try:
        data = msgspec.json.encode(extra)
        decoded = msgspec.json.decode(data, type=dict[str, Any])
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"extra cannot be encoded: {error}") from None
    if len(data) > MAX_EXTRA_BYTES or decoded != extra:
        raise ValueError(f"extra exceeds {MAX_EXTRA_BYTES} bytes or is not made of JSON values")
    return data


def decode_extra(data: bytes | memoryview) -> dict[str, Any]:
    """Decodes the extra metadata.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"extra is not a JSON object: {error}") from None
