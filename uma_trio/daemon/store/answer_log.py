"""The log of one detached answer: what it was asked, its tokens, and the events that clients get.

===========  =====================================================================================
``Begin``    the request and its principal; written before the daemon accepts it
``Prompt``   the tokens of the prompt, which a second rendering could make differently
``Tokens``   new tokens, with the events that they became; both or none of them survive a crash
``Attempt``  a daemon begins to work on the answer
``Pause``    it no longer does: the answer waits for its turn, or the daemon stops
``Renamed``  the answer's session has a title, and no turn yet with which it could be written
``End``      the last event
===========  =====================================================================================

A file holds these as records (``store.records``) and only grows, so any beginning of it is an earlier state of the
answer.  Events are kept as they were made: their numbers stay the same with a later version, and reading them needs no
model.

This module is pure: bytes in, bytes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import attrs
import msgspec

from uma_trio.daemon.store.encoding import TOKEN_BYTES, DamagedFile, decode_tokens, encode_principal, encode_tokens
from uma_trio.daemon.store.journal_format import SessionKey
from uma_trio.daemon.store.records import intact_records, record
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Insertion

MARK: Final = b"\xffUA1"

MAX_ATTEMPTS: Final = 4
"""So many attempts in a row, the last one alone, say that the answer ends daemons."""

EndState = Literal["completed", "cancelled", "failed"]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """An answer was accepted."""

    principal: Principal
    request: Generate
    created_at: float
    """Seconds since 1970."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """The prompt was made."""

    tokens: bytes
    text: str
    dropped: int
    """As in ``daemon.prompts.prompt.Prompt``, like the two fields before."""
    model: str
    """Names the content of the model; another one cannot go on."""
    turns: int
    """Turns that the answer's session had; 0 without one."""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client has changed the answer while it was made."""

    after_tokens: int
    """Tokens that the answer had."""
    insertions: list[Insertion] = []
    opens_reasoning: bool = False
    """After an inserted message the model begins with reasoning."""
    ends_reasoning: bool = False
    max_tokens: int | None = None
    stop: Literal["now", "sentence"] | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Tokens were sampled."""

    tokens: bytes
    events: list[bytes]
    """Events of the socket protocol as MessagePack, without their numbers."""
    mu: float | None = None
    """The state of mirostat after these tokens."""
    changes: list[Change] = []
    """Changes of the answer, whose insertions are among these tokens."""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True, tag="attempt"):
    """A daemon begins to work on the answer, and perhaps dies of it."""

    alone: bool = False
    """The daemon does nothing else until the next record of the answer."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """The daemon no longer works on the answer, and lives."""


class Renamed(msgspec.Struct, frozen=True, tag="renamed"):
    """The answer's session, which begins with it, was given a title."""

    title: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The answer has ended."""

    events: list[bytes]
    """Events as in ``Tokens``; the last one is ``eos`` or ``error``."""
    state: EndState
    ended_at: float
    """Seconds since 1970."""
    reason: str | None = None
    """Why it has failed."""


Record = Begin | Prompt | Tokens | Attempt | Pause | Renamed | End
_RECORD: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)  # as in journal_format


@attrs.define(eq=False)
class AnswerLog:
    """What the records of an answer say."""

    begin: Begin
    prompt: Prompt | None = None
    tokens: bytearray = attrs.field(factory=bytearray)
    """Little-endian int32."""
    mu: float | None = None
    changes: list[Change] = attrs.field(factory=list)
    events: list[bytes] = attrs.field(factory=list)
    """Event number ``n`` is ``events[n - 1]``."""
    n_attempts: int = 0
    """How many attempts since the last token have not reported that they live."""
    is_alone: bool = False
    """The last of these attempts is made alone."""
    title: str = ""
    """What its session was renamed to before it had a turn."""
    end: End | None = None

    @property
    def key(self) -> SessionKey:
        """The identity of the answer: each principal has its own ids."""
        return SessionKey(self.begin.principal.name, self.begin.request.id)

    @property
    def is_suspect(self) -> bool:
        """Whether the answer perhaps ends daemons: the next attempt is the last one, if it is made alone."""
        return self.n_attempts >= MAX_ATTEMPTS - 1

    @property
    def is_fatal(self) -> bool:
        """Whether the answer has ended its daemons.  A daemon that did nothing else has died of it."""
        return self.is_alone and self.n_attempts >= MAX_ATTEMPTS

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = decode_tokens(self.tokens).tolist()
        return ids

    def add(self, new: Record) -> None:
        """Take over a record that follows.

        Raises:
            ValueError: it cannot follow.
        """
        if self.end is not None or isinstance(new, Begin):
            raise ValueError("it goes on after its end")
        match new:
            case Prompt():
                if self.prompt is not None:
                    raise ValueError("it has two prompts")
                self.prompt = new
            case Tokens():
                if self.prompt is None:
                    raise ValueError("it has tokens without a prompt")
                _check_changes(new, len(self.tokens) // TOKEN_BYTES)
                self.tokens += new.tokens
                self.changes += new.changes
                self.mu, self.n_attempts, self.is_alone = new.mu, 0, False
                self.events += new.events
            case Attempt():
                self.n_attempts, self.is_alone = self.n_attempts + 1, new.alone
            case Pause():
                self.n_attempts, self.is_alone = max(0, self.n_attempts - 1), False
            case Renamed():
                self.title = new.title
            case End():
                self.events += new.events
                self.end = new


def new_tokens(tokens: list[int], events: list[bytes], mu: float | None, changes: Sequence[Change] = ()) -> Tokens:
    """The record of new tokens."""
    return Tokens(tokens=encode_tokens(tokens), events=events, mu=mu, changes=list(changes))


def encode(new: Record) -> bytes:
    """Encode a record."""
    return record(MARK, msgspec.msgpack.encode(new))


def decode(data: bytes | bytearray) -> tuple[AnswerLog, int]:
    """Decode the content of a file; return it and the number of its bytes.

    Half a record that a crash left may follow; cut it off.

    Raises:
        DamagedFile: it is damaged, or not of this version.
    """
    log: AnswerLog | None = None
    n_bytes = 0
    try:
        for payload, end in intact_records(MARK, data):
            record = _decode(payload)
            if log is not None:
                log.add(record)
            elif isinstance(record, Begin):
                log = AnswerLog(record)
            else:
                raise DamagedFile("it does not begin with a request")
            n_bytes = end
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFile(f"it contains an invalid record: {error}") from None
    if log is None:  # a file is created with its first record, so no crash has left it like this
        raise DamagedFile("it does not begin like an answer of this version")
    return log, n_bytes


def _decode(payload: bytes | memoryview) -> Record:
    """Decode a record.  Raises ``ValueError`` or ``msgspec.MsgspecError`` if a field is out of range."""
    record = _RECORD.decode(payload)
    match record:
        case Begin():
            encode_principal(record.principal.name)
            _check_time(record.created_at)
        case Prompt() | Tokens():
            if len(record.tokens) % TOKEN_BYTES:
                raise ValueError("it has half a token")
            decode_tokens(record.tokens)
        case End():
            _check_time(record.ended_at)
    return record


def _check_changes(new: Tokens, n_before: int) -> None:
    """Raise ``ValueError`` unless the changes and what they inserted are in order, among the tokens of their record."""
    at, end = n_before, n_before + len(new.tokens) // TOKEN_BYTES
    for change in new.changes:
        for start, n in (
            (change.after_tokens, 0),
            *((insertion.after_tokens, insertion.tokens) for insertion in change.insertions),
        ):
            if not at <= start <= start + n <= end:
                raise ValueError("it has a change of other tokens")
            at = start + n


def _check_time(seconds: float) -> None:
    if not math.isfinite(seconds):
        raise ValueError("a time is not a number")
