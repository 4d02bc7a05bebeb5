"""The file format of one session: a header record, followed by one record for each turn.  Files only grow.

A record is HEAD and a payload.  HEAD contains a CRC-32 of the payload and one of itself, so a reader knows how much of
a file is intact, and whether the damage is at its end: a crash leaves half a record there, and nowhere else.  MARK
occurs in no payload, because UTF-8 text has no byte 0xFF and every fourth byte of the tokens is zero.  All numbers
are little-endian.

This module is pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, Final

import attrs
import msgspec
from msgspec import Meta

from uma_trio.kv.prefix import common_prefix
from uma_trio.protocol.chat import ChatMessage
from uma_trio.store.encoding import (
    MAX_PRINCIPAL_BYTES,
    MAX_TOKENS,
    TOKEN_BYTES,
    DamagedFile,
    ForeignFile,
    Tokens,
    decode_tokens,
    encode_principal,
    encode_tokens,
    principal_uid,
    uid_principal,
)

VERSION: Final = 3
UID_VERSION: Final = 2
"""The oldest version that is read.  Its headers, and so the names of its files, have a user id for the principal."""

MARK: Final = b"\xffUMJ"

HEAD: Final = struct.Struct("<4sIIII")
"""Mark, kind, bytes of the payload, CRC-32 of the payload, CRC-32 of the preceding 16 bytes."""

TURN: Final = struct.Struct("<IIIId")
"""Tokens kept, tokens added, messages kept, number of turns, time.  The added tokens follow, then the added messages as
JSON."""

HEADER_KIND: Final = 0
TURN_KIND: Final = 1

MAX_MESSAGES: Final = 1 << 18
"""Most messages of a session: more than the longest context has room for."""
MAX_TEXT_BYTES: Final = 1 << 24
"""Most bytes of all messages of a session, as JSON."""
MAX_TURNS: Final = 1 << 31
MAX_ID_CHARACTERS: Final = 256
MAX_MODEL_CHARACTERS: Final = 1024

SPARE_BYTES: Final = 1 << 16
WASTE: Final = 4
"""A file is compacted when it exceeds both ``SPARE_BYTES`` and ``WASTE`` times its live content."""

MAX_FILE_BYTES: Final = WASTE * (TOKEN_BYTES * MAX_TOKENS + MAX_TEXT_BYTES) + (1 << 20)


@attrs.frozen
class SessionKey:
    """Identifies a session: each principal has its own ids."""

    principal: Annotated[str, Meta(min_length=1, max_length=MAX_PRINCIPAL_BYTES)]
    """Owner of the session, 1 to ``MAX_PRINCIPAL_BYTES`` bytes of UTF-8."""
    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    """Any Unicode text."""


@attrs.frozen(kw_only=True)
class Header:
    """The first record of a file."""

    version: int = VERSION
    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARACTERS)]
    key: SessionKey
    created_at: float


@attrs.frozen(kw_only=True, eq=False)
class SessionRecord:
    """A session after its last turn."""

    key: SessionKey
    created_at: float
    """Seconds since 1970, like ``used_at``."""
    used_at: float
    n_turns: int
    """Includes the turns that were copied by a fork."""
    tokens: Tokens
    """What remains of all turns, int32 ``[n]``."""
    messages: tuple[ChatMessage, ...] = ()


@attrs.frozen(eq=False)
class TurnRecord:
    """The difference that a turn makes: the first ``keep`` tokens stay, and ``tokens`` follow; likewise for messages.

    A chat whose template renders its end differently is still one record.  So are several turns of which the disk
    rejected all but the last.
    """

    keep: int
    """Tokens that stay, in [0, number of tokens before]."""
    tokens: bytes
    keep_messages: int
    messages: list[ChatMessage]
    sizes: list[int]
    """Bytes of each message as JSON."""
    n_turns: int
    """Turns of the session, including this one."""
    when: float
    """Seconds since 1970."""


@attrs.define
class SessionSize:
    """How much a session contains."""

    n_tokens: int = 0
    sizes: list[int] = attrs.field(factory=list)
    """Bytes of each message as JSON."""
    text_bytes: int = 0
    """Sum of ``sizes``."""
    n_turns: int = 0

    @property
    def live_bytes(self) -> int:
        """Approximate size of a file with nothing but the current content."""
        return TOKEN_BYTES * self.n_tokens + self.text_bytes

    def copy(self) -> SessionSize:
        return attrs.evolve(self, sizes=self.sizes.copy())

    def apply(self, turn: TurnRecord) -> None:
        """Advances by one turn.  Changes nothing if it raises.

        Raises:
            ValueError: the turn does not fit the content before it, or makes the session too large.
        """
        if turn.keep > self.n_tokens or turn.keep_messages > len(self.sizes):
            raise ValueError(
                f"a turn keeps {turn.keep} of {self.n_tokens} tokens and {turn.keep_messages} of "
                f"{len(self.sizes)} messages"
            )
        n_tokens = turn.keep + len(turn.tokens) // TOKEN_BYTES
        n_messages = turn.keep_messages + len(turn.sizes)
        text_bytes = self.text_bytes - sum(self.sizes[turn.keep_messages :]) + sum(turn.sizes)
        if n_tokens > MAX_TOKENS or n_messages > MAX_MESSAGES or text_bytes > MAX_TEXT_BYTES:
            raise ValueError(
                f"{n_tokens} tokens and {n_messages} messages of {text_bytes} bytes exceed the limits of a session"
            )
        if not max(1, self.n_turns) <= turn.n_turns <= MAX_TURNS:
            raise ValueError(f"turn {turn.n_turns} cannot follow turn {self.n_turns}; the last is {MAX_TURNS}")
        self.n_tokens, self.text_bytes = n_tokens, text_bytes
        self.sizes[turn.keep_messages :] = turn.sizes
        self.n_turns = turn.n_turns


@attrs.frozen(eq=False)
class SessionFile:
    """The content of a file."""

    session: SessionRecord
    size: SessionSize
    n_bytes: int
    """Bytes of the intact records.  Half a record that a crash left may follow; cut it off."""
    version: int
    """``VERSION``, or an earlier one that is still read."""
    stem: str
    """What the file must be called, without its suffix."""


@attrs.define(eq=False)
class _Replay:
    """A session while its records are applied one after the other."""

    header: Header
    size: SessionSize = attrs.field(factory=SessionSize)
    used_at: float = 0.0
    token_bytes: bytearray = attrs.field(factory=bytearray)
    messages: list[ChatMessage] = attrs.field(factory=list)

    def apply(self, turn: TurnRecord) -> None:
        """Advances by one turn.  Raises like ``SessionSize.apply``."""
        self.size.apply(turn)
        del self.token_bytes[TOKEN_BYTES * turn.keep :]
        self.token_bytes += turn.tokens
        self.messages[turn.keep_messages :] = turn.messages
        self.used_at = turn.when

    @property
    def session(self) -> SessionRecord:
        return SessionRecord(
            key=self.header.key,
            created_at=self.header.created_at,
            used_at=self.used_at,
            n_turns=self.size.n_turns,
            tokens=decode_tokens(self.token_bytes),
            messages=tuple(self.messages),
        )


def file_stem(model: str, key: SessionKey) -> str:
    """Returns the name of a session's file without its suffix: a hash, because ids may contain any character.

    Raises:
        ValueError: the key contains lone surrogates.
    """
    return _hash([model, key.principal, key.id])


def uid_file_stem(model: str, key: SessionKey) -> str | None:
    """Returns the stem of the same session's file in version ``UID_VERSION``; ``None`` if there was none.

    Raises:
        ValueError: the key contains lone surrogates.
    """
    try:
        uid = principal_uid(key.principal)
    except ValueError:
        return None
    return _hash([model, uid, key.id])


def _hash(value: list[str | int]) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()


# -- encoding ----------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """Encodes the first record of a file.

    Raises:
        ValueError: a field is out of range.
    """
    encode_principal(header.key.principal)
    try:
        data = msgspec.json.encode(header)
        if msgspec.json.decode(data, type=Header) != header:
            raise ValueError("a session with this key cannot be stored")
    except msgspec.MsgspecError as error:
        raise ValueError(f"a session cannot be stored: {error}") from None
    return _record(HEADER_KIND, data)


def turn_record(session: SessionRecord, before: SessionRecord | None = None) -> TurnRecord:
    """Computes the difference between ``before``, or an empty session, and ``session``.

    Raises:
        ValueError: a value is out of range or has the wrong type.
    """
    keep = keep_messages = 0
    if before is not None:
        keep = common_prefix(before.tokens, session.tokens)
        pairs = zip(before.messages, session.messages, strict=False)
        keep_messages = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not math.isfinite(session.used_at):
        raise ValueError(f"{session.used_at} is not a time")
    try:
        encoded = [msgspec.json.encode(message) for message in session.messages[keep_messages:]]
        messages = [msgspec.json.decode(data, type=ChatMessage) for data in encoded]
    except msgspec.MsgspecError as error:
        raise ValueError(f"a message cannot be stored: {error}") from None
    return TurnRecord(
        keep=keep,
        tokens=encode_tokens(session.tokens[keep:]),
        keep_messages=keep_messages,
        messages=messages,
        sizes=[len(data) for data in encoded],
        n_turns=session.n_turns,
        when=session.used_at,
    )


def encode_turn(turn: TurnRecord) -> bytes:
    """Encodes the record of a turn."""
    n_tokens = len(turn.tokens) // TOKEN_BYTES
    fields = TURN.pack(turn.keep, n_tokens, turn.keep_messages, turn.n_turns, turn.when)
    return _record(TURN_KIND, b"".join([fields, turn.tokens, msgspec.json.encode(turn.messages)]))


def _record(kind: int, payload: bytes) -> bytes:
    head = HEAD.pack(MARK, kind, len(payload), zlib.crc32(payload), 0)[:-4]
    return b"".join([head, zlib.crc32(head).to_bytes(4, "little"), payload])


# -- decoding ----------------------------------------------------------------------------------------


def decode(data: bytes | bytearray, model: str) -> SessionFile:
    """Decodes the content of a file of this version or of ``UID_VERSION``.

    Raises:
        ForeignFile: the file is from another model or a later version.
        DamagedFile: anything else is wrong with it.
    """
    view = memoryview(data)
    records = _records(data)
    kind, payload, good = next(records, (None, view[:0], 0))
    if kind != HEADER_KIND:
        raise DamagedFile("it does not begin like a session file")
    try:
        header, stem = _header(payload, model)
        replay = _Replay(header)
        for kind, payload, end in records:
            if kind != TURN_KIND:
                raise DamagedFile(f"it contains a record of the unknown kind {kind}")
            replay.apply(_turn(payload))
            good = end
        if not replay.size.n_turns:  # a file is created with its first turn, so no crash has left it like this
            raise DamagedFile("it does not contain an intact turn")
        return SessionFile(replay.session, replay.size, good, header.version, stem)
    except (ValueError, msgspec.MsgspecError, struct.error, RecursionError) as error:
        raise DamagedFile(f"it contains an invalid record: {error}") from None


def _records(data: bytes | bytearray) -> Iterator[tuple[int, memoryview, int]]:
    """Yields kind, payload and end of each intact record, up to the first damaged one.

    Raises:
        DamagedFile: intact records follow the damaged one.
    """
    view, at = memoryview(data), 0
    while (found := _head(view, at)) is not None:
        kind, size, code = found
        start = at + HEAD.size
        payload = view[start : start + size]
        if zlib.crc32(payload) != code:
            break
        at = start + size
        yield kind, payload, at
    after = at
    while (after := data.find(MARK, after + 1)) >= 0:
        if _head(view, after) is not None:
            raise DamagedFile(f"no record begins at byte {at}, although one begins at byte {after}")


def _head(view: memoryview, at: int) -> tuple[int, int, int] | None:
    """Returns kind, payload size and payload CRC of the record at ``at``; ``None`` if there is no complete record."""
    head = view[at : at + HEAD.size]
    if len(head) < HEAD.size:
        return None
    mark, kind, size, code, own = HEAD.unpack(head)
    if mark != MARK or own != zlib.crc32(head[:-4]) or size > len(view) - at - HEAD.size:
        return None
    return kind, size, code


@attrs.frozen
class _Version:
    version: int


@attrs.frozen
class _UidKey:
    tenant: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]


@attrs.frozen
class _UidHeader:
    """A header of version ``UID_VERSION``."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARACTERS)]
    key: _UidKey
    created_at: float


def _header(payload: memoryview, model: str) -> tuple[Header, str]:
    """Decodes the header record; returns the header and the stem of the file's name."""
    version = msgspec.json.decode(payload, type=_Version).version
    if version > VERSION:
        raise ForeignFile(f"it has format version {version}; this daemon reads version {VERSION}")
    if version < UID_VERSION:
        raise DamagedFile(f"it has format version {version}, which is not supported any more; this is {VERSION}")
    if version == UID_VERSION:
        old = msgspec.json.decode(payload, type=_UidHeader)
        key = SessionKey(uid_principal(old.key.tenant), old.key.id)
        header = Header(version=version, model=old.model, key=key, created_at=old.created_at)
        stem = _hash([old.model, old.key.tenant, old.key.id])
    else:
        header = msgspec.json.decode(payload, type=Header)
        encode_principal(header.key.principal)
        stem = file_stem(header.model, header.key)
    if header.model != model:
        raise ForeignFile("it is from another model")
    return header, stem


def _turn(payload: memoryview) -> TurnRecord:
    keep, n_tokens, keep_messages, n_turns, when = TURN.unpack_from(payload)
    end = TURN.size + TOKEN_BYTES * n_tokens
    if end > len(payload) or not math.isfinite(when):
        raise DamagedFile("a field of a turn is out of range")
    tokens = decode_tokens(payload[TURN.size : end])
    messages = msgspec.json.decode(payload[end:], type=list[ChatMessage])
    sizes = [len(msgspec.json.encode(message)) for message in messages]
    return TurnRecord(keep, tokens.astype("<i4").tobytes(), keep_messages, messages, sizes, n_turns, when)
