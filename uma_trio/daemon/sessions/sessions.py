"""Requests of sessions, their journal on disk, and how sessions expire."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import attrs
import numpy as np
import structlog
import trio

from uma_trio.config import Config
from uma_trio.daemon.prompts.prompt import History, Prompt, PromptMaker, prompt_room, surplus_tokens
from uma_trio.daemon.serving.answer import Answer, EventSink
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.sessions.hand_over import HandOver
from uma_trio.daemon.sessions.table import Session, SessionTable, containing, session_list, transcript
from uma_trio.daemon.sessions.trimming import drop_oldest
from uma_trio.daemon.store.journal import Journal, JournalError
from uma_trio.daemon.store.journal_format import SessionKey
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.tokens import TokenIds, common_prefix
from uma_trio.errors import BadRequest, SessionElsewhere
from uma_trio.protocol.answers import SessionInfo, SessionList, Transcript
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.events import Eos, Failure, Inserted, Reasoning, Token
from uma_trio.protocol.lease import OWN, Lease
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.queries import SessionQuery
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Generation, Insertion

log = structlog.get_logger("uma_trio.sessions")

MAX_MESSAGES: Final = 1 << 18
"""Most messages of a session: more than the longest context has room for."""

SWEEP_S: Final = 60.0
"""Interval between two searches for expired sessions and for damaged files."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 2.0
"""Before what could not be written is tried again.  The wait doubles from one to the next."""


class SessionTurn:
    """One request of a session, and the sink of its events.

    Other events pass through to the client.  The last event is held back until the turn is on disk.
    """

    def __init__(
        self, session: Session, history: Sequence[ChatMessage], request: Generate, prompt: Prompt, sink: EventSink
    ) -> None:
        self.session = session
        self.history = history
        """The messages before those of the request that are part of ``prompt``."""
        self.prompt = prompt
        self.request = request
        self.last: ServerEvent | None = None
        """The last event, which the client has not received."""
        self._sink = sink
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._interrupted: list[ChatMessage] = []
        """The parts of the answer that messages of the user have interrupted, each with that message."""
        self._insertions: list[Insertion] = []
        last = [*session.record.messages[-1:]]
        self._begun = last[0].generation if last and last == (request.messages or [])[-1:] else None
        """How the answer was generated that the request continues, if it is the session's."""

    @property
    def has_room(self) -> bool:
        return self._sink.has_room

    @property
    def text(self) -> str:
        """Text of the answer that the client has received, or will receive with the last event."""
        if isinstance(self.last, Eos) and self.last.text is not None:
            shows_prompt = self.request.echo or self.request.return_full_text
            return self.last.text.removeprefix(self.prompt.text if shows_prompt else "")
        return "".join(self._texts)

    @property
    def reply(self) -> ChatMessage:
        """The answer as a message of the session."""
        reasoning = "".join(self._reasoning)
        calls = generation = None
        if isinstance(self.last, Eos):
            reasoning = reasoning if self.last.reasoning is None else self.last.reasoning
            calls = self.last.tool_calls
            generation = Generation(
                reason=self.last.reason,
                usage=self.last.usage,
                timings=self.last.timings,
                insertions=self._insertions or None,
            )
        return ChatMessage(
            role="assistant",
            content=self.text,
            reasoning=reasoning or None,
            tool_calls=calls,
            generation=generation,
        )

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of the request and the answer, which may be the rest of the last one."""
        given, (first, *others) = self.request.messages or [], (*self._interrupted, self.reply)
        if not self.request.continue_final_message:
            return (*given, first, *others)
        *before, begun = given
        reasoning = f"{begun.reasoning or ''}{first.reasoning or ''}" or None
        generation = first.generation
        if generation is not None and self._begun is not None:
            generation = generation.after(self._begun)
        content = f"{begun.text}{first.text}"
        return (*before, attrs.evolve(first, content=content, reasoning=reasoning, generation=generation), *others)

    def send(self, *events: ServerEvent) -> None:
        """Pass events on; keep the last one of the answer."""
        passed = [event for event in events if not isinstance(event, Eos | Failure)]
        for event in passed:
            if isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, Token) and not event.echo:
                self._texts.append(event.text)
            elif isinstance(event, Inserted):
                self._note(event.insertion)
        if passed:
            self._sink.send(*passed)
        if len(passed) < len(events):
            self.last = events[-1]

    def _note(self, insertion: Insertion) -> None:
        self._insertions.append(insertion)
        if insertion.kind == "message":
            self._interrupted += [self.reply, ChatMessage(role="user", content=insertion.text)]
            self._texts, self._reasoning = [], []


class Sessions:
    """All sessions of one model.  They end with the daemon unless they have a journal; see ``open``.

    Args:
        content: identifies the model.
        in_thread: runs a blocking call.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        prompts: PromptMaker,
        *,
        content: str = "",
        in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
    ) -> None:
        self._limits = config.limits
        self._table = SessionTable(
            max_sessions=config.sessions.max_stored_sessions, ttl_s=config.sessions.session_ttl_s
        )
        self._scheduler = scheduler
        self._prompts = prompts
        self._journal: Journal | None = None
        self._in_thread = in_thread
        self.hand_over = HandOver(
            self._table,
            content,
            scheduler.offloader,
            scheduler.info.n_vocab,
            self._write,
            lambda session: self._forget(session.record.tokens, session.record.key.principal),
            in_thread,
        )
        """Moves sessions between daemons."""
        self._has_peers = bool(config.http.peers)
        self.journal_failures = 0
        self._write_failed = trio.Event()
        """Something that the journal should hold is not on disk."""
        self._repair_failure = ""
        """Why the last repair failed; empty if it did not."""

    async def open(self, journal: Journal) -> None:
        """Load the sessions of earlier runs from ``journal``, and write them there from now on.

        A journal that cannot be read is logged, and there are no sessions of earlier runs.
        """
        self._journal = self.hand_over.journal = journal
        try:
            records = await self._in_thread(journal.load)
        except JournalError as error:
            log.error("the sessions cannot be read; the daemon starts without any", reason=str(error))
            return
        n_vocab = self._scheduler.info.n_vocab
        for record in records:
            known = record.tokens[record.tokens < PLACEHOLDER]  # the others stand for rows of pictures
            if len(known) and not 0 <= known.min() <= known.max() < n_vocab:
                log.warning("skipped a session with tokens that the model does not have", session=record.key.id)
                continue
            self._table.add(Session.stored(record, time.time(), trio.current_time()))
        for problem in journal.problems:
            log.warning("a session's file is damaged", reason=problem)
        self._scheduler.offloader.keep(
            lambda state: self._table.any_begins_with(state.tokens, principal=state.principal)
        )
        await self._close_expired()

    # -- one request ----------------------------------------------------------------------------

    def does_without(self, request: Generate, principal: str) -> bool:
        """Whether ``request`` is to run without its session: it has the whole conversation, and the session is busy.

        Its client sends everything each time, perhaps to several at once, and need not know that there is a session.
        """
        if request.session_id is None or request.history != "replace":
            return False
        session = self._table.find(SessionKey(principal, request.session_id))
        return session is not None and session.busy

    def has_turn(self, request: Generate, principal: str, turns: int | None) -> bool:
        """Whether the session of ``request`` has its answer already: the daemon was killed before it noted the end.

        Args:
            turns: that the session had when the answer began; ``None``: it was not begun before.
        """
        if request.session_id is None or turns is None:
            return False
        session = self._table.find(SessionKey(principal, request.session_id))
        return session is not None and session.record.n_turns > turns

    async def begin(
        self, request: Generate, principal: str, sink: EventSink, answer_record: AnswerRecord | None = None
    ) -> SessionTurn:
        """Begin a request with a ``session_id``.  ``end`` must follow.

        Args:
            answer_record: of an answer that may outlive the daemon.

        Raises:
            SessionBusy: another request of the session is running.
            SessionElsewhere: another daemon has it, or may have it.
            BadRequest: the request does not fit the session's history.
            UmaError: as ``PromptMaker.make``.
        """
        assert request.session_id is not None
        key = SessionKey(principal, request.session_id)
        lease = self._lease_of(key, "session_id", may_ask=not request.detached)
        session = self._table.begin(key, time.time(), lease)
        try:
            _check(session, request)
            session.asked, session.answer_record = request.messages or (), answer_record
            if answer_record is not None and not session.record.n_turns:
                session.change(title=answer_record.title)
            prompt, history = await self._make_prompt(session, request)
        except BaseException:
            self._table.end(session)
            raise
        return SessionTurn(session, history, request, prompt, sink)

    def _lease_of(self, key: SessionKey, field: str, *, may_ask: bool = True) -> Lease:
        """The lease that a session has if it is begun now.

        Args:
            field: of the request that names it.
            may_ask: whether the others could have been asked first.

        Raises:
            SessionElsewhere: another daemon may have it.
        """
        lease = self.hand_over.claimed(key)
        if self._has_peers and may_ask and lease is None and self._table.find(key) is None:
            message = f"session {key.id!r} may be at another daemon: begin it over HTTP, where the others are asked"
            raise SessionElsewhere(message, field=field)
        return lease or OWN

    async def _make_prompt(self, session: Session, request: Generate) -> tuple[Prompt, Sequence[ChatMessage]]:
        """Render the prompt; return it with the messages of the history that are in it.

        With ``n_keep``, the oldest messages are dropped until the rest fits the context.  The session forgets them too:
        otherwise each turn of a long chat would take more time, memory and disk.  If no message can be dropped,
        ``serving.request.make_answers`` drops tokens, as it does for a session of plain prompts.
        """
        record, principal = session.record, session.record.key.principal
        if request.history == "replace":
            past = None if request.messages is None else History(record.tokens)
            return await self._prompts.make(request, past, principal=principal), ()
        history = record.messages[: len(record.messages) - request.drop_messages]
        prompt = await self._prompts.make(request, History(record.tokens, history), principal=principal)
        info, limits, n_whole = self._scheduler.info, self._limits, len(prompt.tokens)
        n_drop = surplus_tokens(n_whole, request, info, limits)
        if request.messages is None or not n_drop:
            return prompt, history
        while (n_tokens := len(prompt.tokens)) > prompt_room(request, info, limits):
            shorter = drop_oldest(
                history,
                request.messages,
                n_tokens=n_tokens,
                n_keep=request.n_keep or 0,
                n_drop=n_drop - (n_whole - n_tokens),
            )
            if len(shorter) == len(history):
                break
            history = shorter
            prompt = await self._prompts.make(request, History(record.tokens, history), principal=principal)
        return attrs.evolve(prompt, dropped=n_whole - len(prompt.tokens)), history

    async def end(self, turn: SessionTurn, answer: Answer | None) -> ServerEvent | None:
        """End a request: add it to the history, and wait until the history is on disk.

        Args:
            answer: the finished answer; ``None`` if none was started.

        Returns:
            The last event, which the caller sends to the client; ``None`` if there is none.
        """
        session = turn.session
        try:
            if answer is None or not isinstance(turn.last, Eos):
                return turn.last
            if answer.tokens:
                await self._record_turn(turn, answer)
            return attrs.evolve(turn.last, session=attrs.evolve(session.info, busy=False))
        finally:
            self._table.end(session)

    async def _record_turn(self, turn: SessionTurn, answer: Answer) -> None:
        session, before = turn.session, turn.session.record.tokens
        tokens = np.concatenate([answer.prompt.tokens, self._history_tokens(turn, answer)])
        messages = () if turn.request.messages is None else (*turn.history, *turn.messages)
        self._table.record_turn(session, time.time(), trio.current_time(), tokens=tokens, messages=messages)
        if common_prefix(before, tokens) < len(before):  # the chat was rendered differently, or lost messages
            self._forget(before, session.record.key.principal)
        await self._write(session)

    def _history_tokens(self, turn: SessionTurn, answer: Answer) -> TokenIds:
        """Tokens of the answer, ``[n]``, without its end token and without a stop string."""
        tokens = answer.tokens
        assembler, n = answer.text.assembler, answer.text.n_before_message
        if assembler.matched is not None:
            rest = self._prompts.truncate_tokens(tokens[n:], assembler.output(turn.text))
            return np.concatenate([np.asarray(tokens[:n], np.int32), rest])
        if tokens and tokens[-1] in answer.end_ids:
            tokens = tokens[:-1]
        return np.asarray(tokens, np.int32)

    async def _write(self, session: Session) -> None:
        """Write ``session`` to the journal.  If that fails, it is logged, and the session lives in memory only."""
        if self._journal is None:
            return
        async with session.writing:
            record = session.record
            if self._table.find(record.key) is not session:  # it was closed meanwhile
                return
            try:
                if await self._in_thread(self._journal.write, record):
                    log.warning("a session's file was missing or cut; it was written again", session=record.key.id)
                session.turns_on_disk = record.n_turns
            except JournalError as error:
                session.turns_on_disk = 0
                self._failed()
                log.warning("a session is not on disk; it stays in memory", session=record.key.id, reason=str(error))

    # -- queries --------------------------------------------------------------------------------

    async def answer_query(self, query: SessionQuery, principal: str) -> Iterable[SessionList | Transcript]:
        """List, describe, read, fork, rename or close sessions of ``principal``; returns the events of the answer.

        Raises:
            SessionError: the query is not possible.
        """
        if query.action == "list":
            sessions = self._table.of(principal)
            if query.contains:
                sessions = await self._in_thread(containing, sessions, query.contains)
            return session_list(sessions, query.id)
        assert query.session_id is not None
        session = self._table.get(SessionKey(principal, query.session_id))
        if query.action == "fork":
            session = await self._fork(session, SessionKey(principal, query.new_id or ""))
        if query.action == "read":
            return await self._read(session, query.id)
        if query.action == "close":
            await self._close(session)
        if query.action == "rename":
            await self._rename(session, query.title or "")
        return [SessionList(sessions=[session.info], id=query.id)]

    async def _read(self, session: Session, id: str | None) -> Iterable[Transcript]:
        info, messages, tokens = (
            session.info,
            session.record.messages,
            session.record.tokens,
        )  # the session may go on meanwhile
        text = None
        if not messages:
            text = await self._in_thread(partial(self._prompts.tokenizer.decode, tokens, special=True))
        return transcript(info, messages, text, id)

    async def _rename(self, session: Session, title: str) -> None:
        """Give ``session`` a title.  It is on disk when this returns, also while the first answer is made."""
        session.change(title=title)
        if session.record.n_turns:
            await self._write(session)
        elif session.answer_record is not None:
            await session.answer_record.rename(title)

    async def _fork(self, source: Session, key: SessionKey) -> Session:
        lease = self._lease_of(key, "new_id")
        session = self._table.fork(source, key, time.time(), trio.current_time(), lease)
        await self._write(session)
        return session

    async def _close(self, session: Session) -> None:
        self._table.remove(session)
        record = session.record
        self._forget(record.tokens, record.key.principal)
        if self._journal is not None:
            try:
                async with session.writing:
                    await self._in_thread(self._journal.remove, record.key)
            except JournalError as error:
                self._failed()
                log.warning("a closed session is still on disk", session=record.key.id, reason=str(error))

    def _forget(self, tokens: TokenIds, principal: str) -> None:
        """Drop the KV states of ``tokens``, except for prefixes that other sessions of ``principal`` begin with."""
        self._scheduler.forget(tokens, principal)
        self._scheduler.offloader.forget(
            tokens, principal=principal, needed=lambda saved: self._table.any_begins_with(saved, principal=principal)
        )

    # -- housekeeping ---------------------------------------------------------------------------

    def _failed(self) -> None:
        self.journal_failures += 1
        self._write_failed.set()

    async def sweep_forever(self) -> None:
        """Close expired sessions and repair the journal once a minute, until cancelled; after a failed write, soon."""
        retry_s = FIRST_RETRY_S
        while True:
            await self._close_expired()
            with trio.move_on_after(SWEEP_S):
                await self._write_failed.wait()
                await trio.sleep(retry_s)
            self._write_failed = trio.Event()
            if await self.repair():
                retry_s = FIRST_RETRY_S
            else:
                self._write_failed.set()
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _close_expired(self) -> None:
        while expired := self._table.expired(trio.current_time()):  # closing one takes time, so look again
            session = expired[0]
            log.info("closed an expired session", session=session.record.key.id, used_at=session.record.used_at)
            await self._close(session)

    async def repair(self) -> bool:
        """Write turns whose write failed, and files that another program has removed.

        Failures are counted, and logged if they are new.

        Returns:
            Whether everything is on disk.
        """
        journal = self._journal
        if journal is None:
            return True
        n_written, failure = 0, ""
        try:
            for key in await self._in_thread(journal.needs_repair):
                try:
                    record = await self._in_thread(journal.repair, key)
                except JournalError as error:  # the others are perhaps luckier
                    self.journal_failures += 1
                    failure = str(error)
                    continue
                n_written += 1
                session = self._table.find(key)
                if record is not None and session is not None and session.record.created_at == record.created_at:
                    session.turns_on_disk = max(session.turns_on_disk, record.n_turns)
        except JournalError as error:
            self.journal_failures += 1
            failure = str(error)
        if n_written:
            log.warning("wrote sessions that were missing on disk", sessions=n_written)
        if failure and failure != self._repair_failure:
            log.warning("some sessions are not on disk", reason=failure)
        self._repair_failure = failure
        return not failure

    def latest(self, n: int) -> list[SessionInfo]:
        """The ``n`` most recently used sessions of all principals, in that order."""
        return [session.info for session in self._table.latest(n)]

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        sessions = [session for session in self._table if session.is_here]
        return {
            "stored": len(sessions),
            "active": sum(session.busy for session in sessions),
            "tokens": sum(len(session.record.tokens) for session in sessions),
            "not_durable": sum(not session.durable and session.record.n_turns > 0 for session in sessions),
            "journal_failures_total": self.journal_failures,
            "journal_restored_total": self._journal.restored if self._journal is not None else 0,
        }


def _check(session: Session, request: Generate) -> None:
    """Check that ``request`` fits the history: a chat continues with messages, and any other session with prompts.

    Raises:
        BadRequest: it does not fit, or the session would have more than ``MAX_MESSAGES`` messages.
    """
    if request.history == "replace":
        return
    record, n_messages = session.record, len(session.record.messages)
    if record.n_turns and (request.messages is not None) != bool(n_messages):
        began, sent = ("messages", "a prompt") if n_messages else ("a prompt", "messages")
        raise BadRequest(
            f"session {record.key.id!r} began with {began} and cannot continue with {sent}: send {began}, or use another "
            "session",
            field="session_id",
        )
    if request.drop_messages > n_messages:
        raise BadRequest(
            f"session {record.key.id!r} has {n_messages} messages; drop_messages is {request.drop_messages}",
            field="drop_messages",
        )
    if n_messages + len(request.messages or ()) >= MAX_MESSAGES:
        raise BadRequest(
            f"session {record.key.id!r} has {n_messages} messages; a session has at most {MAX_MESSAGES}",
            field="messages",
        )
