"""Sessions in use: their requests, their journal, their end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import structlog
import trio

from uma_trio.config import Config
from uma_trio.errors import BadRequest
from uma_trio.kv.prefix import Tokens, common_prefix
from uma_trio.models.prompt import History, Prompt, PromptMaker
from uma_trio.protocol.messages import (
    ChatMessage,
    Eos,
    Generate,
    ServerEvent,
    SessionList,
    SessionQuery,
    Token,
)
from uma_trio.serving.request import prompt_room, surplus_tokens
from uma_trio.serving.scheduler import Scheduler
from uma_trio.serving.sequence import EventSink
from uma_trio.serving.sequence import Sequence as Answer
from uma_trio.sessions.book import Book, Session
from uma_trio.sessions.forgetting import without_oldest
from uma_trio.store.journal import Journal, JournalError
from uma_trio.store.journal_format import MAX_MESSAGES

log = structlog.get_logger("uma_trio.sessions")

SWEEP_S: Final = 60.0
"""How often it is looked for sessions that have to go, and for files that have gone."""


class Turn:
    """One request of a session, and the sink of its events: keeps what is said, and the last event back.

    That is sent when what was said is on disk.
    """

    def __init__(
        self, session: Session, before: Sequence[ChatMessage], request: Generate, prompt: Prompt, sink: EventSink
    ) -> None:
        self.session = session
        self.before = before
        """Messages that ``prompt`` was rendered from, without the request's."""
        self.prompt = prompt
        self.request = request
        self.last: ServerEvent | None = None
        """What ended it; nobody has been told."""
        self._sink = sink
        self._said: list[str] = []

    @property
    def has_room(self) -> bool:
        return self._sink.has_room

    @property
    def text(self) -> str:
        """Of the answer what the client has been told, or will be with the last event."""
        if isinstance(self.last, Eos) and self.last.text is not None:
            shows_prompt = self.request.echo or self.request.return_full_text
            return self.last.text.removeprefix(self.prompt.text if shows_prompt else "")
        return "".join(self._said)

    def send(self, event: ServerEvent) -> None:
        if isinstance(event, Token):
            if not event.echo:
                self._said.append(event.text)
            self._sink.send(event)
        else:
            self.last = event


class Sessions:
    """All sessions of a server's model.

    Args:
        journal: what makes them durable; ``None``: they end with the server.
        clock: seconds since 1970.
        in_thread: runs a blocking call.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        prompts: PromptMaker,
        journal: Journal | None,
        *,
        clock: Callable[[], float] = time.time,
        in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
    ) -> None:
        self._limits = config.limits
        self._book = Book(most=config.sessions.max_stored_sessions, ttl_s=config.sessions.session_ttl_s)
        self._scheduler = scheduler
        self._prompts = prompts
        self._journal = journal
        self._clock = clock
        self._in_thread = in_thread
        self._recalled = False
        self.journal_failures = 0

    def recall(self) -> None:
        """Find the sessions that were there before.  Blocks: to be called before serving."""
        if self._journal is None:
            return
        try:
            records = self._journal.load()
        except JournalError as error:
            log.error("sessions cannot be read; this server begins without any", reason=str(error))
            return
        n_vocab = self._scheduler.info.n_vocab
        for record in records:
            if len(record.tokens) and not 0 <= record.tokens.min() <= record.tokens.max() < n_vocab:
                log.warning("a session is passed over: it has tokens that the model has not", session=record.key.id)
                continue
            self._book.add(Session.recalled(record))
        for problem in self._journal.problems:
            log.warning("a session's file is not as it was", reason=problem)
        self._recalled = True

    # -- one request ----------------------------------------------------------------------------

    async def begin(self, request: Generate, principal: str, sink: EventSink) -> Turn:
        """Take a request with a ``session_id`` on.  ``end`` must follow.

        Raises:
            SessionBusy: the session is answering another one.
            UmaError: as ``PromptMaker.make``.
        """
        assert request.session_id is not None
        session = self._book.begin(principal, request.session_id, self._clock())
        try:
            _check(session, request)
            prompt, before = await self._prompt(session, request)
        except BaseException:
            self._book.end(session)
            raise
        return Turn(session, before, request, prompt, sink)

    async def _prompt(self, session: Session, request: Generate) -> tuple[Prompt, Sequence[ChatMessage]]:
        """The prompt, and the messages before the request's that are in it: with ``n_keep`` not more than fit.

        What the model is not shown any more is not remembered either, or a chat would take longer with each turn, and
        more memory and disk, for as long as it goes on.  Whole messages go, and what is left is a chat like any other.
        Where none can go any more, ``request.fit_prompt`` drops tokens, as of a session of prompts.
        """
        before = session.messages
        prompt = await self._prompts.make(request, History(session.tokens, before))
        facts, limits, n_whole = self._scheduler.info, self._limits, len(prompt.tokens)
        n_drop = surplus_tokens(n_whole, request, facts, limits)
        if request.messages is None or not n_drop:
            return prompt, before
        while (n_tokens := len(prompt.tokens)) > prompt_room(request, facts, limits):
            shorter = without_oldest(
                before,
                request.messages,
                n_tokens=n_tokens,
                n_keep=request.n_keep or 0,
                n_drop=n_drop - (n_whole - n_tokens),
            )
            if len(shorter) == len(before):
                break
            before = shorter
            prompt = await self._prompts.make(request, History(session.tokens, before))
        return attrs.evolve(prompt, dropped=n_whole - len(prompt.tokens)), before

    async def end(self, turn: Turn, answer: Answer | None) -> ServerEvent | None:
        """The request has ended: what was said is made durable.

        Args:
            answer: as it ended; ``None`` if it was never begun.

        Returns:
            The last event, for the client.
        """
        session = turn.session
        try:
            if answer is None or not isinstance(turn.last, Eos):
                return turn.last
            if answer.tokens:
                await self._remember(turn, answer)
            return attrs.evolve(turn.last, session=attrs.evolve(session.info, busy=False))
        finally:
            self._book.end(session)

    async def _remember(self, turn: Turn, answer: Answer) -> None:
        session = turn.session
        before, said = session.tokens, self._said(turn, answer)
        session.tokens = np.concatenate([answer.prompt.tokens, said])
        if common_prefix(before, session.tokens) < len(
            before
        ):  # a chat was rendered differently, or something was dropped
            self._forget(before, session.principal)
        if turn.request.messages is not None:
            reply = ChatMessage(role="assistant", content=turn.text)
            session.messages = (*turn.before, *turn.request.messages, reply)
        self._book.told(session, self._clock())
        await self._write(session)

    def _said(self, turn: Turn, answer: Answer) -> Any:
        """The answer's tokens: without one that ended it, and none of a stop string."""
        tokens = answer.tokens
        if answer.assembler.matched is not None:
            return self._prompts.truncate_tokens(tokens, turn.text)
        if tokens and tokens[-1] in answer.end_ids:
            tokens = tokens[:-1]
        return np.asarray(tokens, np.int32)

    async def _write(self, session: Session) -> None:
        if self._journal is None:
            return
        try:
            if await self._in_thread(self._journal.write, session.record):
                log.warning("a session's file was gone or cut; it was written anew", session=session.name)
            session.turns_on_disk = session.turns
        except JournalError as error:
            self.journal_failures += 1
            log.warning("a session is not on disk; it goes on in memory", session=session.name, reason=str(error))

    # -- asked by clients -----------------------------------------------------------------------

    async def answer(self, query: SessionQuery, principal: str) -> SessionList:
        """
        Raises:
            SessionError: it cannot be done.
        """
        if query.action == "list":
            return SessionList(sessions=[session.info for session in self._book.of(principal)], id=query.id)
        assert query.session_id is not None
        if query.action == "fork":
            assert query.new_id is not None
            session = await self._fork(principal, query.session_id, query.new_id)
        else:
            session = self._book.get(principal, query.session_id)
            if query.action == "close":
                await self._close(session)
        return SessionList(sessions=[session.info], id=query.id)

    async def _fork(self, principal: str, name: str, new_name: str) -> Session:
        session = self._book.fork(principal, name, new_name, self._clock())
        session.busy = True
        try:
            await self._write(session)
        finally:
            session.busy = False
        return session

    async def _close(self, session: Session) -> None:
        self._book.remove(session)
        self._forget(session.tokens, session.principal)
        if self._journal is not None:
            try:
                await self._in_thread(self._journal.remove, session.key)
            except JournalError as error:
                self.journal_failures += 1
                log.warning("a closed session is still on disk", session=session.name, reason=str(error))

    def _forget(self, tokens: Tokens, principal: str) -> None:
        """Nobody goes on from ``tokens``: what was computed of them goes, but for what other sessions begin with."""
        self._scheduler.offloader.forget(
            tokens, principal=principal, needed=lambda found: self._book.needs(found, principal=principal)
        )

    # -- what goes by itself --------------------------------------------------------------------

    async def sweep_forever(self) -> None:
        """Close sessions that are too old or too many and mend the journal, until cancelled; first what is left of
        sessions that are gone."""
        if self._recalled:
            self._scheduler.offloader.keep(lambda state: self._book.needs(state.tokens, principal=state.principal))
        while True:
            while outdated := self._book.outdated(self._clock()):  # asked anew: closing one takes time
                session = outdated[0]
                log.info("a session is closed", session=session.name, unused_since=session.used_at)
                await self._close(session)
            await trio.sleep(SWEEP_S)
            await self.mend()

    async def mend(self) -> None:
        """Write what could not be written when it was said, and what somebody has removed since."""
        journal = self._journal
        if journal is None:
            return
        try:
            behind = await self._in_thread(journal.needs_repair)
            for key in behind:
                record = await self._in_thread(journal.repair, key)
                session = self._book.find(key)
                if record is not None and session is not None and session.created_at == record.created_at:
                    session.turns_on_disk = max(session.turns_on_disk, record.n_turns)
        except JournalError as error:
            self.journal_failures += 1
            log.warning("sessions are not on disk as they should be", reason=str(error))
        else:
            if behind:
                log.warning("sessions that were missing on disk were written again", sessions=len(behind))

    def snapshot(self) -> dict[str, Any]:
        sessions = list(self._book)
        return {
            "stored": len(sessions),
            "active": sum(session.busy for session in sessions),
            "tokens": sum(len(session.tokens) for session in sessions),
            "not_durable": sum(not session.durable and session.turns > 0 for session in sessions),
            "journal_failures_total": self.journal_failures,
            "journal_restored_total": self._journal.restored if self._journal is not None else 0,
        }


def _check(session: Session, request: Generate) -> None:
    """A chat goes on with messages and anything else with prompts: the other cannot be put behind it.

    Raises:
        BadRequest: it does not, or has too many.
    """
    if session.turns and (request.messages is not None) != bool(session.messages):
        had, wants = ("messages", "a prompt") if session.messages else ("a prompt", "messages")
        raise BadRequest(
            f"session {session.name!r} was begun with {had} and cannot go on with {wants}: send {had}, or name another session"
        )
    if len(session.messages) + len(request.messages or ()) >= MAX_MESSAGES:
        raise BadRequest(f"session {session.name!r} has {len(session.messages)} messages, the most are {MAX_MESSAGES}")
