"""Hands sessions of one model over to other daemons, and takes them from there.

The gateway talks to the other daemons; here is what must be on disk before it does.  The rules are those of
``protocol.lease``.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from uma_trio.daemon.serving.offload import Offloader
from uma_trio.daemon.sessions.table import Session, SessionTable, no_tokens
from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.journal import Journal, JournalError
from uma_trio.daemon.store.journal_format import MAX_FILE_BYTES, SessionKey, decode
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.errors import BadRequest, NotHandedOver, SessionBusy, SessionNotFound
from uma_trio.files import read_bytes
from uma_trio.principal import UNIX_USER
from uma_trio.protocol.lease import Lease, LeaseChanged, LeaseQuery, SessionFile, SessionLease, State

log = structlog.get_logger("uma_trio.sessions")


@attrs.define(eq=False)
class HandOver:
    """The leases of one model's sessions.

    Args:
        content: identifies the model.
        offloader: has the KV caches of sessions.
        write: makes a session durable; logs a failure, and tries again later.
        forget: drops the KV states of a session that is about to be gone.
    """

    _table: SessionTable
    _content: str
    _offloader: Offloader
    _n_vocab: int
    _write: Callable[[Session], Awaitable[None]]
    _forget: Callable[[Session], None]
    _in_thread: Callable[..., Awaitable[Any]]
    journal: Journal | None = None
    """Without one, sessions stay where they are."""
    _node: str = attrs.field(factory=lambda: secrets.token_hex(8), init=False)
    """The name of this daemon among its peers, whose list may contain this daemon."""
    _claims: dict[SessionKey, dict[object, int]] = attrs.field(factory=dict, init=False)
    """By the connections that made them, with which they end: the epoch of the session, if it is begun."""

    _to_offer: list[Session] = attrs.field(factory=list, init=False)
    """The least recently used first."""
    _offered: set[SessionKey] = attrs.field(factory=set, init=False)
    _arriving: set[SessionKey] = attrs.field(factory=set, init=False)
    """Sessions whose copies are being written here: they are in the table, and busy."""

    def claimed(self, key: SessionKey) -> Lease | None:
        """The lease of a session that may be begun, because nobody has it; ``None`` if it was not claimed."""
        claims = self._claims.get(key)
        return None if claims is None else Lease(max(claims.values()))

    def release(self, owner: object) -> None:
        """End all claims of ``owner``."""
        for key in [key for key, claims in self._claims.items() if owner in claims]:
            self._release(key, owner)

    def next_offer(self) -> Session | None:
        """Return the next session to give away, most recently used first, each once; ``None`` if there are no more."""
        if self.journal is None:
            return None
        if not self._to_offer:
            idle = [
                session for session in self._table if session.is_here and session.durable and not self._is_used(session)
            ]
            self._to_offer = [session for session in idle if session.record.key not in self._offered]
        if not self._to_offer:
            return None
        session = self._to_offer.pop()
        self._offered.add(session.record.key)
        return session

    async def answer(self, query: LeaseQuery, principal: str, owner: object) -> SessionLease:
        """Carry out a query.

        Raises:
            SessionError: it is not possible.
        """
        key = SessionKey(principal, query.session_id)
        session = self._table.find(key)
        files: Sequence[SessionFile] = ()
        if query.action == "ask":
            answer = self._answer_to(key, session, query)
            return attrs.evolve(answer, id=query.id)
        try:
            match query.action:
                case "claim":
                    self._claim(key, session, query.epoch, owner)
                case "release":
                    self._release(key, owner)
                case "give":
                    files = await self._give(_present(session), query)
                case "files":
                    files = await self._files(_present(session), query.epoch)
                case "accept":
                    await self._accept(key, session, query, owner)
                case "confirm":
                    await self._confirm(session, query.epoch)
                case "take_back":
                    await self._take_back(_present(session), query, owner)
        except LeaseChanged as error:
            raise NotHandedOver(f"{error}: ask again", field="session_id") from None
        return attrs.evolve(self._state(self._table.find(key)), files=[*files], id=query.id)

    def _state(self, session: Session | None) -> SessionLease:
        state = SessionLease(state="absent", node=self._node, content=self._content)
        if session is None:
            return state
        name: State = "held" if session.is_here else "gone" if session.is_gone else "giving"
        lease = session.record.lease
        state = attrs.evolve(state, state=name, epoch=lease.epoch, given_to=lease.given_to)
        return attrs.evolve(state, busy=self._is_used(session), durable=session.durable)

    def _is_used(self, session: Session) -> bool:
        """Whether a request of the session runs, or will: its gateway has found it here."""
        return session.busy or (session.is_here and session.record.key in self._claims)

    def _answer_to(self, key: SessionKey, session: Session | None, query: LeaseQuery) -> SessionLease:
        answer = self._state(session)
        if query.peer == self._node:
            return attrs.evolve(answer, state="self")
        if query.content not in ("", self._content):
            return attrs.evolve(self._state(None), content=self._content)
        if answer.state != "held" and key in self._claims:
            return attrs.evolve(answer, state="claimed")
        return answer

    def _claim(self, key: SessionKey, session: Session | None, epoch: int, owner: object) -> None:
        if key in self._arriving:
            raise SessionBusy(f"session {key.id!r} arrives from another daemon; try again soon", field="session_id")
        if session is not None and session.is_here:
            epoch = session.record.lease.epoch
        elif self._claims.get(key, {}).keys() - {owner}:
            raise SessionBusy(f"another request looks for session {key.id!r}; try again soon", field="session_id")
        self._claims.setdefault(key, {})[owner] = epoch
        if (
            session is not None and session.record.lease.epoch < epoch
        ):  # it will be begun anew: a later holder has closed it
            self._table.remove(session)

    def _release(self, key: SessionKey, owner: object) -> None:
        claims = self._claims.get(key, {})
        claims.pop(owner, None)
        if not claims:
            self._claims.pop(key, None)

    def _own_claim(self, key: SessionKey, owner: object) -> None:
        if owner not in self._claims.get(key, {}):
            raise BadRequest("claim the session first, on this connection", field="action")

    async def _give(self, session: Session, query: LeaseQuery) -> Sequence[SessionFile]:
        if not query.peer:
            raise BadRequest("peer is required to give a session", field="peer")
        if self.journal is None:
            raise NotHandedOver("sessions of this daemon are not on disk, so they stay here", field="session_id")
        self._check_idle(session)
        session.record.lease.changed(query.seen, query.epoch, query.peer)
        if session.is_here:
            await self._offloader.file_of(session.record.tokens, session.record.key.principal)
            self._check_idle(session)  # that takes time, and its requests go first
        session.change(lease=session.record.lease.changed(query.seen, query.epoch, query.peer))
        session.busy = True
        try:
            await self._write(session)  # if that fails nobody gets it, and nobody writes it: it can be taken back
        finally:
            session.busy = False
        log.info("gave a session away", session=session.record.key.id, to=query.peer, epoch=query.epoch)
        return await self._files(session, query.epoch)

    def _check_idle(self, session: Session) -> None:
        if self._is_used(session) or not session.record.n_turns or self._table.find(session.record.key) is not session:
            raise SessionBusy(f"session {session.record.key.id!r} is answering", field="session_id")

    async def _files(self, session: Session, epoch: int) -> Sequence[SessionFile]:
        """What the daemon that gets the session copies.  The files do not change any more."""
        path = None if self.journal is None else self.journal.path_of(session.record.key)
        if session.is_here or session.is_gone or session.record.lease.epoch != epoch:
            raise NotHandedOver(
                f"session {session.record.key.id!r} was not given with the epoch {epoch}", field="epoch"
            )
        if path is None or not session.durable:
            raise NotHandedOver(f"session {session.record.key.id!r} is not on disk: try again", field="session_id")
        paths = [
            ("turns", path),
            ("state", await self._offloader.file_of(session.record.tokens, session.record.key.principal)),
        ]
        return [
            SessionFile(kind="turns" if kind == "turns" else "state", path=str(path), n_bytes=n_bytes)
            for kind, path in paths
            if path is not None and (n_bytes := await self._in_thread(_size, path))
        ]

    async def _accept(self, key: SessionKey, before: Session | None, query: LeaseQuery, owner: object) -> None:
        self._own_claim(key, owner)
        if before is not None and before.record.lease.epoch >= query.epoch:
            raise LeaseChanged(f"the lease has the epoch {before.record.lease.epoch} already")
        try:
            data = await self._in_thread(read_bytes, Path(query.turns), MAX_FILE_BYTES)
            record = (await self._in_thread(decode, data))[0]
        except (OSError, DamagedFile) as error:
            raise NotHandedOver(f"the copy of session {key.id!r} cannot be used: {error}", field="turns") from None
        known = record.tokens[record.tokens < PLACEHOLDER]
        if (record.key.id, record.lease.epoch) != (key.id, query.epoch) or not _same_owner(record.key, key):
            raise NotHandedOver("the copy is of another session or of another time: ask again", field="turns")
        if len(known) and not 0 <= known.min() <= known.max() < self._n_vocab:
            raise NotHandedOver("the copy has tokens that this model does not have", field="turns")
        self._own_claim(key, owner)
        record = attrs.evolve(record, key=key, lease=Lease(query.epoch))
        session = Session(record, trio.current_time(), busy=True)
        self._arriving.add(key)
        self._table.add(session)
        try:
            await self._write(session)
            if query.kv_state:
                await self._offloader.adopt(Path(query.kv_state), key.principal)
        finally:
            session.busy = False
            self._arriving.remove(key)
        log.info(
            "took a session over", session=key.id, epoch=query.epoch, turns=record.n_turns, tokens=len(record.tokens)
        )

    async def _confirm(self, session: Session | None, epoch: int) -> None:
        """Leave nothing of a session that has arrived but where it went, which is a hint only."""
        if session is None or session.is_here or session.is_gone or session.record.lease.epoch != epoch:
            return
        self._forget(session)
        session.change(tokens=no_tokens(), messages=(), title="")
        if self.journal is not None:
            try:
                await self._in_thread(self.journal.remove, session.record.key)
            except JournalError as error:
                log.warning(
                    "a session that was given away is still on disk", session=session.record.key.id, reason=str(error)
                )
                return
        await self._write(session)

    async def _take_back(self, session: Session, query: LeaseQuery, owner: object) -> None:
        self._own_claim(session.record.key, owner)
        if session.is_here or session.is_gone:
            raise LeaseChanged("there is no copy here")
        session.change(lease=session.record.lease.changed(query.seen, query.epoch))
        await self._write(session)


def _same_owner(there: SessionKey, here: SessionKey) -> bool:
    """Whether a session has the same owner at two daemons, which may run as two users: each has this one's sessions."""
    of_users = [key.principal.startswith(UNIX_USER) for key in (there, here)]
    return all(of_users) or there.principal == here.principal


def _present(session: Session | None) -> Session:
    if session is None:
        raise SessionNotFound("there is no such session here", field="session_id")
    return session


def _size(path: Path) -> int:
    return path.stat().st_size
