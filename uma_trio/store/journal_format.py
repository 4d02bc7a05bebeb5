"""The file of one session, as bytes: a header record, then a record for each turn, only ever added to.

A record is HEAD and a payload.  HEAD has a code of the payload and one of itself (CRC-32), so it is told how much is
whole, and whether what is not whole is the end of the file: there a crash leaves half a record, and only there.
MARK occurs in no payload: text is UTF-8, which has no byte 0xFF, and one byte in four of tokens is zero.  Numbers are
little-endian.

Pure: bytes in, bytes out.
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
from uma_trio.protocol.messages import ChatMessage
from uma_trio.store import tokens as token_list
from uma_trio.store.tokens import MAX_TOKENS, TOKEN_BYTES, Tokens

VERSION: Final = 2
"""Files of version 1 had no count of turns in each record."""
MARK: Final = b"\xffUMJ"

HEAD: Final = struct.Struct("<4sIIII")
"""Mark, kind, bytes of the payload, CRC-32 of the payload, CRC-32 of the 16 bytes before."""

TURN: Final = struct.Struct("<IIIId")
"""Tokens kept, tokens added, messages kept, turns so far, when; the tokens follow, then the messages added, as JSON."""

HEADER_KIND: Final = 0
TURN_KIND: Final = 1

MAX_MESSAGES: Final = 1 << 18
"""Of a session: more than the longest context has room for."""
MAX_TEXT_BYTES: Final = 1 << 24
"""Of all messages of a session, as they stand in the file."""
MAX_TURNS: Final = 1 << 31
MAX_ID_CHARACTERS: Final = 256
MAX_MODEL_CHARACTERS: Final = 1024

SPARE_BYTES: Final = 1 << 16
WASTE: Final = 4
"""A file larger than both, ``SPARE_BYTES`` and ``WASTE`` times what is live in it, is written anew."""

MAX_FILE_BYTES: Final = WASTE * (TOKEN_BYTES * MAX_TOKENS + MAX_TEXT_BYTES) + (1 << 20)


class Damaged(Exception):
    """The file is not to be believed, or nothing reads it any more; says why."""


class Foreign(Exception):
    """The file is whole, and of another model or a later version; says so."""


@attrs.frozen
class SessionKey:
    """Which session: ids are each tenant's own."""

    tenant: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    """Any characters that UTF-8 can say."""


@attrs.frozen(kw_only=True)
class Header:
    """The first record."""

    version: int = VERSION
    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARACTERS)]
    key: SessionKey
    created_at: float


@attrs.frozen(kw_only=True, eq=False)
class SessionRecord:
    """A session as it is after its last turn: what is told of it, the same before and after a restart."""

    key: SessionKey
    created_at: float
    """Seconds since 1970, as ``used_at``."""
    used_at: float
    n_turns: int
    """Those that it was forked with among them."""
    tokens: Tokens
    """What is left of all turns, int32 ``[n]``."""
    messages: tuple[ChatMessage, ...] = ()


@attrs.frozen(eq=False)
class Record:
    """A turn as it stands in a file: the first ``keep`` tokens stay, ``tokens`` follow; so with messages.

    A chat that is rendered anew and ends differently is one turn, too; so are several, of which the disk did not take
    the first.
    """

    keep: int
    """Tokens that stay, in [0, tokens before]."""
    tokens: bytes
    keep_messages: int
    messages: list[ChatMessage]
    sizes: list[int]
    """Of each message as JSON."""
    n_turns: int
    """Of the session, with this one."""
    when: float


@attrs.define
class Extent:
    """How much there is of a session."""

    n_tokens: int = 0
    sizes: list[int] = attrs.field(factory=list)
    """Of each message, in bytes as JSON."""
    text_bytes: int = 0
    """Of all of them."""
    n_turns: int = 0

    @property
    def live_bytes(self) -> int:
        """About how large a file would be that holds nothing else."""
        return TOKEN_BYTES * self.n_tokens + self.text_bytes

    def copy(self) -> Extent:
        return attrs.evolve(self, sizes=self.sizes.copy())

    def apply(self, turn: Record) -> None:
        """Go on by one turn; on an error nothing has changed.

        Raises:
            ValueError: it does not fit what was there before, or makes too much of it.
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
                f"{n_tokens} tokens, and {n_messages} messages of {text_bytes} bytes, are more than a session may hold"
            )
        if not max(1, self.n_turns) <= turn.n_turns <= MAX_TURNS:
            raise ValueError(f"turn {turn.n_turns} comes after {self.n_turns}, and {MAX_TURNS} is the last")
        self.n_tokens, self.text_bytes = n_tokens, text_bytes
        self.sizes[turn.keep_messages :] = turn.sizes
        self.n_turns = turn.n_turns


@attrs.define(eq=False)
class _Session:
    """A session while its records are read."""

    header: Header
    extent: Extent = attrs.field(factory=Extent)
    used_at: float = 0.0
    token_bytes: bytearray = attrs.field(factory=bytearray)
    messages: list[ChatMessage] = attrs.field(factory=list)

    def apply(self, turn: Record) -> None:
        """Go on by one turn.  Raises like ``Extent.apply``."""
        self.extent.apply(turn)
        del self.token_bytes[TOKEN_BYTES * turn.keep :]
        self.token_bytes += turn.tokens
        self.messages[turn.keep_messages :] = turn.messages
        self.used_at = turn.when

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(
            key=self.header.key,
            created_at=self.header.created_at,
            used_at=self.used_at,
            n_turns=self.extent.n_turns,
            tokens=token_list.from_bytes(self.token_bytes),
            messages=tuple(self.messages),
        )


def file_stem(model: str, key: SessionKey) -> str:
    """What the file of a session is called: a hash, for ids may hold anything.

    Raises:
        ValueError: UTF-8 cannot say the id.
    """
    return hashlib.blake2b(msgspec.json.encode([model, key.tenant, key.id]), digest_size=16).hexdigest()


# -- to bytes ----------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """The record that a file begins with.

    Raises:
        ValueError: a field is out of bounds.
    """
    try:
        data = msgspec.json.encode(header)
        if msgspec.json.decode(data, type=Header) != header:
            raise ValueError("a session cannot be kept under this key")
    except msgspec.MsgspecError as error:
        raise ValueError(f"a session cannot be kept: {error}") from None
    return _record(HEADER_KIND, data)


def record_of(session: SessionRecord, before: SessionRecord | None = None) -> Record:
    """What makes ``session`` of ``before``, or of nothing.

    Raises:
        ValueError: something in it is out of bounds, or of another type.
    """
    keep = keep_messages = 0
    if before is not None:
        keep = common_prefix(before.tokens, session.tokens)
        pairs = zip(before.messages, session.messages, strict=False)
        keep_messages = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not math.isfinite(session.used_at):
        raise ValueError(f"{session.used_at} is no time")
    try:
        encoded = [msgspec.json.encode(message) for message in session.messages[keep_messages:]]
        messages = [msgspec.json.decode(data, type=ChatMessage) for data in encoded]
    except msgspec.MsgspecError as error:
        raise ValueError(f"a message cannot be kept: {error}") from None
    return Record(
        keep=keep,
        tokens=token_list.to_bytes(session.tokens[keep:]),
        keep_messages=keep_messages,
        messages=messages,
        sizes=[len(data) for data in encoded],
        n_turns=session.n_turns,
        when=session.used_at,
    )


def encode_turn(turn: Record) -> bytes:
    n_tokens = len(turn.tokens) // TOKEN_BYTES
    fixed = TURN.pack(turn.keep, n_tokens, turn.keep_messages, turn.n_turns, turn.when)
    return _record(TURN_KIND, b"".join([fixed, turn.tokens, msgspec.json.encode(turn.messages)]))


def _record(kind: int, payload: bytes) -> bytes:
    head = HEAD.pack(MARK, kind, len(payload), zlib.crc32(payload), 0)[:-4]
    return b"".join([head, zlib.crc32(head).to_bytes(4, "little"), payload])


# -- from bytes --------------------------------------------------------------------------------------


def decode(data: bytes | bytearray, model: str) -> tuple[SessionRecord, Extent, int]:
    """The session in a file, its extent, and how many of the file's bytes are whole records.

    What follows those is the half of a record that a crash has left; to be cut off.

    Raises:
        Foreign: of another model or a later version.
        Damaged: anything else.
    """
    view = memoryview(data)
    records = _records(data)
    kind, payload, good = next(records, (None, view[:0], 0))
    if kind != HEADER_KIND:
        raise Damaged("it does not begin like a session")
    try:
        session = _Session(_header(payload, model))
        for kind, payload, end in records:
            if kind != TURN_KIND:
                raise Damaged(f"there is a record of the unknown kind {kind}")
            session.apply(_turn(payload))
            good = end
        if not session.extent.n_turns:  # a file is made with its first turn, so no crash has left it so
            raise Damaged("there is no whole turn in it")
        return session.record, session.extent, good
    except (ValueError, msgspec.MsgspecError, struct.error, RecursionError) as error:
        raise Damaged(f"a record does not make sense: {error}") from None


def _records(data: bytes | bytearray) -> Iterator[tuple[int, memoryview, int]]:
    """Kind, payload and end of each whole record, up to the one that is not whole, if that is the last.

    Raises:
        Damaged: others follow the one that is not.
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
            raise Damaged(f"byte {at} begins no record, and byte {after} does")


def _head(view: memoryview, at: int) -> tuple[int, int, int] | None:
    """Kind, size and code of the payload of the record at ``at``; ``None`` if no whole one begins there."""
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


def _header(payload: memoryview, model: str) -> Header:
    version = msgspec.json.decode(payload, type=_Version).version
    if version > VERSION:
        raise Foreign(f"it has version {version} of the format, and this server reads {VERSION}")
    if version < VERSION:
        raise Damaged(f"it has version {version} of the format, which is not read any more; this is version {VERSION}")
    header = msgspec.json.decode(payload, type=Header)
    if header.model != model:
        raise Foreign("it is of another model")
    return header


def _turn(payload: memoryview) -> Record:
    keep, n_tokens, keep_messages, n_turns, when = TURN.unpack_from(payload)
    end = TURN.size + TOKEN_BYTES * n_tokens
    if end > len(payload) or not math.isfinite(when):
        raise Damaged("a turn is out of bounds")
    tokens = token_list.from_bytes(payload[TURN.size : end])
    messages = msgspec.json.decode(payload[end:], type=list[ChatMessage])
    sizes = [len(msgspec.json.encode(message)) for message in messages]
    return Record(keep, tokens.astype("<i4").tobytes(), keep_messages, messages, sizes, n_turns, when)
