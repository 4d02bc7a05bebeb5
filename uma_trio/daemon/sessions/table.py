"""The sessions of one model, and which of them have expired.  Pure: the caller passes the time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import attrs
import numpy as np
import trio

from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.sessions.titles import own_title
from uma_trio.daemon.store.journal_format import SessionKey, SessionRecord
from uma_trio.engine_link.tokens import TokenIds, common_prefix
from uma_trio.errors import SessionBusy, SessionElsewhere, SessionExists, SessionNotFound
from uma_trio.principal import UNIX_USER
from uma_trio.protocol.answers import SessionInfo, SessionList, Transcript
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.lease import OWN, Lease

PART_SESSIONS: Final = 64
"""Sessions in one event of a list."""
PART_CHARS: Final = 1 << 16
"""Characters in one event of a transcript.  A longer message is not divided."""
MESSAGE_CHARS: Final = 256
"""What a message without content counts for."""


def no_tokens() -> TokenIds:
    """An empty history."""
    return np.empty(0, dtype=np.int32)


@attrs.define(eq=False)
class Session:
    """One conversation, and what this daemon does with it."""

    record: SessionRecord
    """The conversation after its latest answer, as the journal stores it.  Replaced as a whole."""
    unused_since: float = 0.0
    """``record.used_at`` on the monotonic clock.  Expiry counts from it, because somebody may set the other clock."""
    turns_on_disk: int = 0
    busy: bool = False
    """Whether a request is running."""
    asked: Sequence[ChatMessage] = attrs.field(default=(), init=False)
    """Messages of the request that is running."""
    answer_record: AnswerRecord | None = attrs.field(default=None, init=False)
    """What keeps the detached answer that is made; the title as well, if it is the first one."""
    writing: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while its file is changed, so that the newest state is written last."""

    @property
    def is_here(self) -> bool:
        """Whether this daemon may write it: it was not given to another one."""
        return not self.record.lease.given_to

    @property
    def is_gone(self) -> bool:
        """Whether another daemon has got it, so that nothing of it is here."""
        return not self.is_here and not len(self.record.tokens)

    @property
    def durable(self) -> bool:
        """Whether all turns are on disk."""
        return self.turns_on_disk == self.record.n_turns > 0

    def change(self, **fields: Any) -> None:
        """Replace ``fields`` of the record."""
        self.record = attrs.evolve(self.record, **fields)

    @classmethod
    def stored(cls, record: SessionRecord, now: float, monotonic: float) -> Session:
        """The session that the journal has stored as ``record``.  One from the future counts as just used."""
        return cls(record, monotonic - max(0.0, now - record.used_at), record.n_turns)

    @property
    def info(self) -> SessionInfo:
        """The session as clients see it."""
        record = self.record
        return SessionInfo(
            session_id=record.key.id,
            turns=record.n_turns,
            tokens=len(record.tokens),
            durable=self.durable,
            busy=self.busy,
            created_at=round(record.created_at, 3),
            used_at=round(record.used_at, 3),
            title=self.shown_title,
        )

    @property
    def shown_title(self) -> str:
        """What it was renamed to; otherwise what it begins with."""
        return self.record.title or own_title(self.record.messages or self.asked)


def containing(sessions: Iterable[Session], text: str) -> list[Session]:
    """Those of ``sessions`` that have ``text`` in their title or in a message, in any case."""
    wanted = text.casefold()
    return [
        session
        for session in sessions
        if wanted in session.shown_title.casefold()
        or any(wanted in message.text.casefold() for message in session.record.messages)
    ]


class SessionTable:
    """All sessions of one model, in the order of their last use.

    Args:
        max_sessions: beyond this number, the least recently used sessions expire.
        ttl_s: sessions expire after so many seconds without a request.
    """

    def __init__(self, *, max_sessions: int, ttl_s: float) -> None:
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def add(self, session: Session) -> None:
        """Add a session from the journal.  Its last use is not before that of any session in the table."""
        self._sessions[session.record.key] = session

    def of(self, principal: str) -> list[Session]:
        """Return the sessions of ``principal`` that are here, or whose copy is, most recently used first.

        Who lists them shall find those on their way too: where the move was cut off, nobody else has them.
        """
        return [
            session
            for session in reversed(self._sessions.values())
            if session.record.key.principal == principal and not session.is_gone
        ]

    def latest(self, n: int) -> list[Session]:
        """Return the ``n`` most recently used sessions of all principals, in that order."""
        return list(islice((session for session in reversed(self._sessions.values()) if session.is_here), n))

    def find(self, key: SessionKey) -> Session | None:
        """Return a session; ``None`` if it does not exist."""
        return self._sessions.get(key)

    def get(self, key: SessionKey) -> Session:
        """Return a session.

        Raises:
            SessionNotFound: it does not exist.
            SessionElsewhere: another daemon has it.
        """
        session = self._sessions.get(key)
        if session is None:
            raise SessionNotFound(f"there is no session {key.id!r}", field="session_id")
        if not session.is_here:
            raise _elsewhere(session)
        return session

    def begin(self, key: SessionKey, now: float, lease: Lease = OWN) -> Session:
        """Mark a session as busy with a request, and create it if it does not exist.  ``end`` must follow.

        Args:
            lease: of a new session.

        Raises:
            SessionBusy: another request of the session is running.
            SessionElsewhere: another daemon has it.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(
                SessionRecord(key=key, created_at=now, used_at=now, n_turns=0, tokens=no_tokens(), lease=lease)
            )
        if not session.is_here:
            raise _elsewhere(session)
        if session.busy:
            raise SessionBusy(
                f"session {key.id!r} is answering; wait for its eos, or fork it to ask several things at once",
                field="session_id",
            )
        session.busy = True
        return session

    def record_turn(self, session: Session, now: float, monotonic: float, **history: Any) -> None:
        """Count an answered request of ``session``, which leaves ``history``.

        Args:
            history: fields of the record.
        """
        session.change(n_turns=session.record.n_turns + 1, used_at=now, **history)
        session.unused_since = monotonic
        self._sessions.move_to_end(session.record.key)

    def end(self, session: Session) -> None:
        """Mark ``session`` as idle.  A session without turns is removed."""
        session.busy, session.asked, session.answer_record = False, (), None
        if not session.record.n_turns:
            self._sessions.pop(session.record.key, None)

    def fork(self, source: Session, new_key: SessionKey, now: float, monotonic: float, lease: Lease = OWN) -> Session:
        """Copy ``source`` to ``new_key``, which has this ``lease``.

        Raises:
            SessionNotFound: it has no turns yet.
            SessionExists: there is such a session already.
        """
        if not source.record.n_turns:
            raise SessionNotFound(
                f"session {source.record.key.id!r} has no answer yet that a fork could continue", field="session_id"
            )
        if new_key in self._sessions:
            raise SessionExists(
                f"there is a session {new_key.id!r} already; choose another name, or close it", field="new_id"
            )
        record = attrs.evolve(source.record, key=new_key, created_at=now, used_at=now, lease=lease)
        forked = self._sessions[new_key] = Session(record, monotonic)
        return forked

    def remove(self, session: Session) -> None:
        """Remove ``session``.

        Raises:
            SessionBusy: a request of the session is running.
        """
        if session.busy:
            raise SessionBusy(
                f"session {session.record.key.id!r} is answering; cancel its request first", field="session_id"
            )
        self._sessions.pop(session.record.key, None)

    def expired(self, monotonic: float) -> list[Session]:
        """Return the idle sessions that are unused for too long or too many, least recently used first.

        Where there are too many, the principal with the most sessions loses one.  So nobody's sessions displace those of
        a principal with fewer.
        """
        idle = [session for session in self._sessions.values() if not session.busy]
        leaving = [session for session in idle if monotonic - session.unused_since > self._ttl_s]
        excess = len(self._sessions) - len(leaving) - self._max_sessions
        if excess > 0:
            late = {*leaving}
            leaving += _of_those_with_most([session for session in idle if session not in late], excess)
        return leaving

    def any_begins_with(self, tokens: TokenIds, *, principal: str) -> bool:
        """Whether the history of a session of ``principal`` begins with ``tokens``."""
        return any(
            session.record.key.principal == principal and common_prefix(session.record.tokens, tokens) == len(tokens)
            for session in self._sessions.values()
        )


def _of_those_with_most(idle: Sequence[Session], n: int) -> list[Session]:
    """``n`` of ``idle``, or all: the first ones of the principals that have the most, one after another."""
    by_principal: dict[str, list[Session]] = {}
    for session in reversed(idle):
        by_principal.setdefault(session.record.key.principal, []).append(session)
    return [max(by_principal.values(), key=len).pop() for _ in range(min(n, len(idle)))]


def _elsewhere(session: Session) -> SessionElsewhere:
    record = session.record
    is_own = record.key.principal.startswith(UNIX_USER)  # tenants need not know where the daemons are
    owner = record.lease.given_to if is_own else "another daemon"
    return SessionElsewhere(
        f"session {record.key.id!r} is at {owner}: ask there, or here over HTTP", field="session_id"
    )


def session_list(sessions: Sequence[Session], id: str | None) -> Iterator[SessionList]:
    """Yield ``sessions`` in parts of ``PART_SESSIONS``; at least one part."""
    for start in range(0, max(1, len(sessions)), PART_SESSIONS):
        end = start + PART_SESSIONS
        infos = [session.info for session in sessions[start:end]]
        yield SessionList(sessions=infos, more=end < len(sessions), id=id)


def transcript(
    info: SessionInfo, messages: Sequence[ChatMessage], text: str | None, id: str | None
) -> Iterator[Transcript]:
    """Yield the content of a session in parts of about ``PART_CHARS`` characters; at least one part.

    Args:
        text: the content of a session of plain prompts; ``None`` for a chat.
    """
    if text is not None:
        for start in range(0, max(1, len(text)), PART_CHARS):
            more = start + PART_CHARS < len(text)
            yield Transcript(session=info, text=text[start : start + PART_CHARS], more=more, id=id)
        return
    part: list[ChatMessage] = []
    n_chars = 0
    for message in messages:
        size = MESSAGE_CHARS + len(message.text) + len(message.reasoning or "") + len(str(message.tool_calls or ""))
        size += message.picture_bytes
        if part and n_chars + size > PART_CHARS:
            yield Transcript(session=info, messages=part, more=True, id=id)
            part, n_chars = [], 0
        part.append(message)
        n_chars += size
    yield Transcript(session=info, messages=part, id=id)
