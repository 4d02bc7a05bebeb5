"""Which sessions there are, and which has to go.  Pure: time is told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from uma_trio.errors import SessionBusy, SessionExists, SessionNotFound
from uma_trio.kv.prefix import Tokens, common_prefix
from uma_trio.protocol.messages import ChatMessage, SessionInfo
from uma_trio.store import SessionKey, SessionRecord


def no_tokens() -> Tokens:
    return np.empty(0, dtype=np.int32)


@attrs.define(eq=False)
class Session:
    """One conversation, as it is after its last answer."""

    principal: str
    name: str
    created_at: float
    """Seconds since 1970, as all times here."""
    used_at: float
    """When its last answer ended, or it was forked."""
    tokens: Tokens = attrs.field(factory=no_tokens)
    """All that was said: what its next request begins with."""
    messages: Sequence[ChatMessage] = ()
    """Likewise, of a chat; nothing of a session of prompts."""
    turns: int = 0
    turns_on_disk: int = 0
    busy: bool = False

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.principal, self.name)

    @property
    def durable(self) -> bool:
        """All of it is on disk."""
        return self.turns_on_disk == self.turns > 0

    @property
    def record(self) -> SessionRecord:
        """What a journal keeps of it."""
        return SessionRecord(
            key=self.key,
            created_at=self.created_at,
            used_at=self.used_at,
            n_turns=self.turns,
            tokens=self.tokens,
            messages=tuple(self.messages),
        )

    @classmethod
    def recalled(cls, record: SessionRecord) -> Session:
        """As it was when ``record`` was made of it; that is on disk."""
        return cls(
            principal=record.key.principal,
            name=record.key.id,
            created_at=record.created_at,
            used_at=record.used_at,
            tokens=record.tokens,
            messages=record.messages,
            turns=record.n_turns,
            turns_on_disk=record.n_turns,
        )

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(
            session_id=self.name,
            turns=self.turns,
            tokens=len(self.tokens),
            durable=self.durable,
            busy=self.busy,
            created_at=round(self.created_at, 3),
            used_at=round(self.used_at, 3),
        )


class Book:
    """All sessions of one model.

    Args:
        most: beyond so many those not used for longest have to go.
        ttl_s: likewise those not used for so long.
    """

    def __init__(self, *, most: int, ttl_s: float) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        """Longest unused first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def add(self, session: Session) -> None:
        """A session that was there before, used no earlier than those that were added."""
        self._sessions[session.key] = session

    def of(self, principal: str) -> list[Session]:
        """A user's, the last used first."""
        return [session for session in reversed(self._sessions.values()) if session.principal == principal]

    def find(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def get(self, principal: str, name: str) -> Session:
        """
        Raises:
            SessionNotFound: there is none.
        """
        session = self._sessions.get(SessionKey(principal, name))
        if session is None:
            raise SessionNotFound(f"there is no session {name!r}")
        return session

    def begin(self, principal: str, name: str, now: float) -> Session:
        """The session for one more request; a new one if there is none.

        Raises:
            SessionBusy: it is answering.
        """
        session = self._sessions.get(SessionKey(principal, name))
        if session is None:
            session = Session(principal, name, now, now)
            self._sessions[session.key] = session
        if session.busy:
            raise SessionBusy(
                f"session {name!r} is answering; wait for its eos, or fork it to ask several things at once"
            )
        session.busy = True
        return session

    def told(self, session: Session, now: float) -> None:
        """One turn more was said in it."""
        session.turns += 1
        session.used_at = now
        self._sessions.move_to_end(session.key)

    def end(self, session: Session) -> None:
        """Its request has ended.  One in which nothing was ever said is forgotten."""
        session.busy = False
        if not session.turns:
            self._sessions.pop(session.key, None)

    def fork(self, principal: str, name: str, new_name: str, now: float) -> Session:
        """A session of another name that goes on from where ``name`` is.

        Raises:
            SessionNotFound, SessionExists: as they say.
        """
        source = self.get(principal, name)
        if not source.turns:
            raise SessionNotFound(f"nothing was said in session {name!r} yet")
        if SessionKey(principal, new_name) in self._sessions:
            raise SessionExists(f"there is a session {new_name!r} already: choose another name, or close it")
        forked = attrs.evolve(source, name=new_name, created_at=now, used_at=now, turns_on_disk=0, busy=False)
        self._sessions[forked.key] = forked
        return forked

    def remove(self, session: Session) -> None:
        """
        Raises:
            SessionBusy: it is answering.
        """
        if session.busy:
            raise SessionBusy(f"session {session.name!r} is answering; cancel its request first")
        self._sessions.pop(session.key, None)

    def outdated(self, now: float) -> list[Session]:
        """Those that have to go: too old, or too many.  Never one that is answering."""
        idle = [session for session in self._sessions.values() if not session.busy]
        excess = len(self._sessions) - self._most
        return [session for n, session in enumerate(idle) if n < excess or now - session.used_at > self._ttl_s]

    def needs(self, tokens: Tokens, *, principal: str) -> bool:
        """Whether some session of ``principal`` begins with ``tokens``."""
        return any(
            session.principal == principal and common_prefix(session.tokens, tokens) == len(tokens)
            for session in self._sessions.values()
        )
