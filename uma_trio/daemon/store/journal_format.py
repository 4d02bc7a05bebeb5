"""The file format of one session: a record for each turn.  Files only grow.

The payload of a record (``store.records``) is a ``Turn`` as MessagePack.  MARK also identifies the version of the format.

This module is pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Annotated, Any, Final

import attrs
import msgspec
from msgspec import Meta

from uma_trio.daemon.store.encoding import (
    MAX_PRINCIPAL_BYTES,
    MAX_TOKENS,
    TOKEN_BYTES,
    DamagedFile,
    decode_tokens,
    encode_principal,
    encode_tokens,
)
from uma_trio.daemon.store.records import HEAD, intact_records, record
from uma_trio.engine_link.tokens import TokenIds, common_prefix
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.lease import OWN, Lease

MARK: Final = b"\xffUJ4"
"""UTF-8 text has no byte 0xFF, and every fourth byte of tokens is zero, so neither contains it."""

MAX_TEXT_BYTES: Final = 1 << 24
"""Most bytes of all messages of a session, encoded."""
MAX_TURNS: Final = 1 << 31
MAX_ID_CHARACTERS: Final = 256

MAX_SESSION_BYTES: Final = TOKEN_BYTES * MAX_TOKENS + MAX_TEXT_BYTES
"""Most bytes of one record, and so of a session: a compacted file has only one."""

SPARE_BYTES: Final = 1 << 16
WASTE: Final = 4
"""A file is compacted when it exceeds both ``SPARE_BYTES`` and ``WASTE`` times its live content."""

MAX_FILE_BYTES: Final = WASTE * MAX_SESSION_BYTES + HEAD.size


@attrs.frozen
class SessionKey:
    """The identity of a session: each principal has its own ids."""

    principal: Annotated[str, Meta(min_length=1, max_length=MAX_PRINCIPAL_BYTES)]
    """Owner of the session, 1 to ``MAX_PRINCIPAL_BYTES`` bytes of UTF-8."""
    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    """Any Unicode text."""


@attrs.frozen(kw_only=True, eq=False)
class SessionHead:
    """What a session is, without its history.  Times are seconds since 1970."""

    key: SessionKey
    created_at: float
    used_at: float
    """Time of its latest answer, or of the fork that made it."""
    n_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)]
    """Answered requests.  Includes the turns that were copied by a fork."""
    title: str = ""
    """What it was renamed to; empty if it was not."""
    lease: Lease = OWN
    """Who may write the session, if there are several daemons."""

    @property
    def head(self) -> dict[str, Any]:
        """The values of these fields."""
        return {field.name: getattr(self, field.name) for field in attrs.fields(SessionHead)}


@attrs.frozen(kw_only=True, eq=False)
class SessionRecord(SessionHead):
    """A session after its last turn."""

    tokens: TokenIds
    """What remains of all turns, int32 ``[n]``: the beginning of the next prompt."""
    messages: tuple[ChatMessage, ...] = ()
    """The history of a chat as messages; empty for a session of plain prompts."""


@attrs.frozen(kw_only=True, eq=False)
class Turn(SessionHead):
    """A session's last turn: the first ``keep`` tokens stay, and ``tokens`` follow; likewise for messages.

    A chat whose template renders its end differently is still one record.  So are several turns of which the disk
    rejected all but the last.
    """

    keep: Annotated[int, Meta(ge=0)]
    """Tokens that stay, at most as many as there were."""
    tokens: bytes
    keep_messages: Annotated[int, Meta(ge=0)]
    messages: list[ChatMessage]


def file_stem(key: SessionKey) -> str:
    """Return the name of a session's file without its suffix: a hash, because ids may contain any character.

    Raises:
        ValueError: the key contains lone surrogates.
    """
    return hashlib.blake2b(msgspec.json.encode([key.principal, key.id]), digest_size=16).hexdigest()


_TURN: Final = msgspec.msgpack.Decoder(Turn)
"""Made when the module is imported: two threads in which msgspec meets a class for the first time end the process."""


def encode(session: SessionRecord, before: SessionRecord | None = None) -> bytes:
    """Encode the record that makes ``session`` of ``before``, or of nothing.

    Raises:
        ValueError: a value is out of range or has the wrong type, or the record is too large.
    """
    keep = keep_messages = 0
    if before is not None:
        keep = common_prefix(before.tokens, session.tokens)
        pairs = zip(before.messages, session.messages, strict=False)
        keep_messages = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    turn = Turn(
        **session.head,
        keep=keep,
        tokens=encode_tokens(session.tokens[keep:]),
        keep_messages=keep_messages,
        messages=list(session.messages[keep_messages:]),
    )
    if len(session.tokens) > MAX_TOKENS:
        raise ValueError(f"{len(session.tokens)} tokens exceed the limit of {MAX_TOKENS}")
    try:
        data = msgspec.msgpack.encode(turn)
        _decode_turn(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a session cannot be stored: {error}") from None
    if len(data) > MAX_SESSION_BYTES:
        raise ValueError(f"{len(data)} bytes exceed the limit of {MAX_SESSION_BYTES} for a session")
    return record(MARK, data)


def decode(data: bytes | bytearray) -> tuple[SessionRecord, int]:
    """Decode the content of a file; return the session and the bytes of the intact records.

    Half a record that a crash left may follow these; cut it off.

    Raises:
        DamagedFile: it is damaged, or not of this version.
    """
    last: Turn | None = None
    tokens, messages = bytearray(), list[ChatMessage]()
    n_bytes = 0
    try:
        for payload, end in intact_records(MARK, data):
            turn = _decode_turn(payload)
            last = last or turn
            if (turn.key, turn.created_at) != (last.key, last.created_at):
                raise DamagedFile("it contains a record of another session")
            if TOKEN_BYTES * turn.keep > len(tokens) or turn.keep_messages > len(messages):
                raise DamagedFile("a turn continues more than there was before it")
            tokens[TOKEN_BYTES * turn.keep :] = turn.tokens
            messages[turn.keep_messages :] = turn.messages
            last, n_bytes = turn, end
        if last is None:  # a file is created with its first turn, so no crash has left it like this
            raise DamagedFile("it does not begin like a session file of this version")
        session = SessionRecord(**last.head, tokens=decode_tokens(tokens), messages=tuple(messages))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFile(f"it contains an invalid record: {error}") from None
    return session, n_bytes


def _decode_turn(payload: bytes | memoryview) -> Turn:
    """Decode a turn.  Raises ``ValueError`` or ``msgspec.MsgspecError`` if a field is out of range."""
    turn = _TURN.decode(payload)
    encode_principal(turn.key.principal)
    if not (math.isfinite(turn.created_at) and math.isfinite(turn.used_at)):
        raise ValueError("a time is not a number")
    return turn
