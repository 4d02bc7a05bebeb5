"""The file format of one saved sequence state.

::

    offset      bytes               content
    0           PAYLOAD_AT          header: FIELDS, zeros, hash of all that
    PAYLOAD_AT  n_bytes             the state as llama.cpp serialised it
    ...         4 * n_tokens        token ids, int32
    ...         extra_bytes         Extra, as JSON
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
from typing import Final

import attrs
import msgspec

from uma_trio.daemon.kv.offload_index import SavedState
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

MAGIC: Final = b"UMASTATE"
VERSION: Final = 2

PAYLOAD_AT: Final = 1 << 14
"""Where the state begins.  A multiple of the page size of the system (4 KiB, or 16 KiB on Apple silicon)."""

NAME_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 32

MAX_EXTRA_BYTES: Final = 1 << 16

FIELDS: Final = struct.Struct(f"<8sI4x16s32s{MAX_PRINCIPAL_BYTES + 1}p7xdQII16s")
"""Magic, version, name, fingerprint, principal, saved_at, n_bytes, n_tokens, extra_bytes, hash of the tail."""


class Extra(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extra metadata."""

    checkpoints: tuple[tuple[int, int], ...] = ()
    """As in ``SavedState``, like the field after it."""
    adapters: str = ""


_EXTRA: Final = msgspec.json.Decoder(Extra)  # as in journal_format


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
    """Condense a fingerprint of any length to ``FINGERPRINT_BYTES``."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


def encode(
    state: SavedState, *, fingerprint: bytes, saved_at: float, page_hashes: Sequence[bytes]
) -> tuple[bytes, bytes]:
    """Encode all of a file but the state itself: its first ``PAYLOAD_AT`` bytes, and the tail that follows the state.

    Args:
        saved_at: seconds since 1970.

    Raises:
        ValueError: the tokens, the principal or the extra metadata cannot be stored.
    """
    token_bytes = encode_tokens(state.tokens)
    extra = msgspec.json.encode(Extra(state.checkpoints, state.adapters))
    if len(extra) > MAX_EXTRA_BYTES:
        raise ValueError(f"the extra metadata exceed {MAX_EXTRA_BYTES} bytes")
    tail = b"".join([token_bytes, extra, *page_hashes])
    n_tokens = len(token_bytes) // TOKEN_BYTES
    header = Header(state.name, state.principal, saved_at, state.n_bytes, n_tokens, len(extra), hash_of(tail))
    return encode_header(header, fingerprint), tail


def encode_header(header: Header, fingerprint: bytes) -> bytes:
    """Encode the first ``PAYLOAD_AT`` bytes of a file.

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
    """Decode and verify the header of the file ``name``.

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


def decode_tail(data: bytes | bytearray, header: Header) -> tuple[SavedState, list[bytes]]:
    """Decode and verify the tail; return the description of the state and the hashes of its pages.

    Raises:
        DamagedFile: the tail is cut off or altered, or its content is not possible.
    """
    if len(data) != header.tail_bytes or hash_of(data) != header.tail_hash:
        raise DamagedFile("its tokens or hashes were altered")
    view = memoryview(data)
    tokens, rest = view[: TOKEN_BYTES * header.n_tokens], view[TOKEN_BYTES * header.n_tokens :]
    extra, hashes = rest[: header.extra_bytes], bytes(rest[header.extra_bytes :])
    try:
        metadata = _EXTRA.decode(extra)
        state = SavedState(
            name=header.name,
            principal=header.principal,
            tokens=decode_tokens(tokens),
            n_bytes=header.n_bytes,
            checkpoints=metadata.checkpoints,
            adapters=metadata.adapters,
        )
        check_checkpoints(state)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFile(f"its metadata is invalid: {error}") from None
    return state, [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def check_checkpoints(state: SavedState) -> None:
    """Raise ``ValueError`` unless the checkpoints can be those of such a state."""
    lengths = [0, *(length for length, _ in state.checkpoints), len(state.tokens) + 1]
    sizes = [n_bytes for _, n_bytes in state.checkpoints]
    if sorted(set(lengths)) != lengths or min([1, *sizes]) < 1 or sum(sizes) >= state.n_bytes:
        raise ValueError(
            f"its checkpoints are {str(state.checkpoints)[:100]}, of {len(state.tokens)} tokens in {state.n_bytes} bytes"
        )
