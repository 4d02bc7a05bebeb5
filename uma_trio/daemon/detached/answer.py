"""One detached answer: where its events and tokens go, and what clients see of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs
import msgspec
import trio

from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.requests import Generation
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.store import answer_log as log
from uma_trio.daemon.store.answer_log import AnswerLog, Change, EndState, Record
from uma_trio.daemon.store.encoding import decode_tokens, encode_tokens
from uma_trio.errors import AnswerNotFound, ModelUnavailable, ShuttingDown
from uma_trio.protocol.answers import AnswerInfo
from uma_trio.protocol.events import Eos, Failure, Forecast, LoadProgress, PrefillProgress, UnknownEvent
from uma_trio.protocol.messages import ServerEvent, parse_event, to_fields

PASSING: Final = (PrefillProgress, LoadProgress, Forecast)
"""Events that say how far an answer is, before its first token.  Clients get the latest one; none is kept."""


INTERRUPTIONS: Final = (ModelUnavailable.code, ShuttingDown.code)
"""Codes of errors that end other requests, and that an answer outlives: its engine cannot be started, or the daemon ends."""


class DetachedAnswer(AnswerRecord):
    """The sink and the record of an answer.  Clients get what has been written, and nothing else.

    Args:
        stored: its records so far.
        n_bytes: size of its file.
        on_record: called when there are records to write.
        clock: returns seconds since 1970.
    """

    def __init__(
        self, stored: AnswerLog, n_bytes: int, on_record: Callable[[DetachedAnswer], None], clock: Callable[[], float]
    ) -> None:
        self.log: AnswerLog = stored
        """What has been written.  Of an answer that has ended, a file may have the events instead."""
        self.n_events = len(stored.events)
        self.n_bytes = n_bytes
        self.is_durable = False
        """Whether all of it is on disk."""
        self.key = stored.key
        self.generation: Generation | None = None
        """What makes it, while it runs."""
        self.scope = trio.CancelScope()
        """The scope of its task."""
        self.is_cancelled = False
        self.n_readers = 0
        """Clients that are attached."""
        self.left_at = trio.current_time()
        """When the last one left."""
        self._passing: tuple[ServerEvent, float] | None = None
        """The latest event that says how far it is, and when it came."""
        self.n_passing = 0
        """How many there were."""
        self.is_resumed = False
        """Whether an earlier daemon has accepted it."""
        self._is_attempted = False
        self.tried = trio.Event()
        """Set when this daemon has worked on it, and lives: it has a new token, waits, or has ended."""
        self.interruption: Failure | None = None
        """What has ended the last attempt to make it, but not the answer."""
        self.title = stored.title
        self._known, self._changes = stored.token_ids, [*stored.changes]
        self._n_replayed = len(stored.events)
        """Events that come again, because they are made of tokens that are known."""
        self._events: list[bytes] = []
        """Made of tokens that ``add`` gets next."""
        self._unwritten: list[Record] = []
        self._n_noted = self._n_written = 0
        """Records."""
        self._has_ended = stored.end is not None
        self._is_closed = False
        self._on_record = on_record
        self._clock = clock
        self._changed = trio.Event()

    # -- where it goes: EventSink and AnswerRecord, which say what the methods do -------------------

    @property
    def has_room(self) -> bool:
        """Always: a client that does not read costs its own connection only."""
        return True

    def send(self, *events: ServerEvent) -> None:
        """Keep events."""
        for event in events:
            self._keep(event)

    def _keep(self, event: ServerEvent) -> None:
        if self._is_closed or self._has_ended:
            return
        if isinstance(event, PASSING):
            self._passing = event, trio.current_time()
            self.n_passing += 1
            self._announce()
            return
        if isinstance(event, Eos) and event.reason == "cancelled" and not self.is_cancelled:
            self.close()  # nobody has cancelled it: the daemon ends
        elif isinstance(event, Failure) and event.code in INTERRUPTIONS:
            self.interruption = event
        elif isinstance(event, Eos | Failure):
            self._end(event)
        elif self._n_replayed:
            self._n_replayed -= 1
        else:
            self._events.append(_encode(event))

    @property
    def known(self) -> Sequence[int]:
        return self._known

    @property
    def mu(self) -> float | None:
        return self.log.mu

    @property
    def changes(self) -> Sequence[Change]:
        return self._changes

    def add(self, tokens: Sequence[int], mu: float | None, changes: Sequence[Change]) -> None:
        """Keep tokens, and the events that came since the last ones."""
        events, self._events = self._events, []
        self.note(log.new_tokens(list(tokens), events, mu, changes))

    async def kept(self, change: Change) -> None:
        while change not in self.log.changes:
            if self._is_closed:
                raise ShuttingDown()
            if self.log.end is not None:
                raise AnswerNotFound(f"{self.key.id!r} ended before it was changed")
            await self._changed.wait()

    async def rename(self, title: str) -> None:
        self.title = title
        self.note(log.Renamed(title))
        await self._all_written()

    def begin(self, prompt: Prompt, model: str, turns: int) -> Prompt:
        kept = self.log.prompt
        if kept is None:
            text, tokens = prompt.text, encode_tokens(prompt.tokens)
            self.note(log.Prompt(tokens=tokens, text=text, dropped=prompt.dropped, model=model, turns=turns))
            return prompt
        if kept.model != model:
            raise ModelUnavailable(f"the answer was begun by another model of this name: {kept.model}")
        return attrs.evolve(prompt, tokens=decode_tokens(kept.tokens), text=kept.text, dropped=kept.dropped)

    @property
    def turns(self) -> int | None:
        return None if self.log.prompt is None else self.log.prompt.turns

    def attempt(self, *, alone: bool = False) -> None:
        """Note that the answer is worked on from now on.

        Args:
            alone: the daemon does nothing else until the answer is ``tried``.
        """
        if not self._is_attempted:
            self._is_attempted = True
            self.note(log.Attempt(alone))

    async def begin_attempt(self) -> None:
        self.attempt()
        await self._all_written()

    def pause(self) -> None:
        if self._is_attempted:
            self._is_attempted = False
            self.note(log.Pause())
        else:
            self.tried.set()

    def _end(self, event: Eos | Failure) -> None:
        self._has_ended = True
        state: EndState = "failed"
        reason = None
        if isinstance(event, Eos):
            state = "cancelled" if event.reason == "cancelled" else "completed"
        else:
            reason = f"{event.code}: {event.message}"
        events = [*self._events, _encode(event)]
        self.note(log.End(events=events, state=state, ended_at=self._clock(), reason=reason))

    def note(self, record: Record) -> None:
        """Add a record, which clients see when it is written."""
        if not self._is_closed:
            self._unwritten.append(record)
            self._n_noted += 1
            self._on_record(self)

    async def _all_written(self) -> None:
        """Wait until the records that there are now can be shown, or the daemon ends."""
        n = self._n_noted
        while self._n_written < n and not self._is_closed:
            await self._changed.wait()

    # -- for all answers --------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether its last event came, although it is perhaps not written yet."""
        return self._has_ended

    async def again(self) -> None:
        """Prepare for another attempt, from the tokens so far: the answer was refused, or its engine was lost."""
        await self._all_written()
        self.interruption = None
        self._known, self._changes = self.log.token_ids, [*self.log.changes]
        self._n_replayed, self._events = self.n_events, []

    def close(self) -> None:
        """Take over nothing more: the daemon ends, and the next one goes on."""
        if not self._has_ended:
            self.pause()
        self._is_closed = True
        self._announce()

    def take(self) -> list[Record]:
        """The records that are to be written next."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def written(self, records: Sequence[Record], n_bytes: int) -> None:
        """``records`` can be shown now."""
        for record in records:
            self.log.add(record)
        self.n_events = len(self.log.events)
        self.n_bytes += n_bytes
        self._n_written += len(records)
        if any(isinstance(record, log.Tokens | log.Pause | log.End) for record in records):
            self.tried.set()
        self._announce()

    def forget_events(self) -> None:
        """Keep nothing in memory that the file of an answer has that has ended, and that nobody reads."""
        if self.log.end is None or not self.is_durable or self.n_readers:
            return
        self.log.events = []
        self.log.tokens.clear()
        self._known = []

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- what clients see -------------------------------------------------------------------------

    @property
    def info(self) -> AnswerInfo:
        """The answer in lists."""
        begin, end = self.log.begin, self.log.end
        return AnswerInfo(
            answer_id=begin.request.id,
            state=end.state if end is not None else "queued" if self.log.prompt is None else "running",
            events=self.n_events,
            durable=self.is_durable,
            created_at=round(begin.created_at, 3),
            ended_at=None if end is None else round(end.ended_at, 3),
            reason=None if end is None else end.reason,
        )

    @property
    def passing(self) -> ServerEvent | None:
        """How far the answer is now; ``None`` if that is not known, or if it has begun."""
        if self._passing is None or self.n_events:
            return None
        event, came_at = self._passing
        if not isinstance(event, Forecast):
            return event
        age_ms = 1e3 * (trio.current_time() - came_at)
        start_ms, end_ms = (max(0.0, ms - age_ms) for ms in (event.start_ms, event.end_ms))
        return attrs.evolve(event, start_ms=start_ms, end_ms=end_ms)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A client reads: its events stay in memory, also if the answer is deleted meanwhile."""
        self.n_readers += 1
        try:
            yield
        finally:
            self.n_readers -= 1
            self.left_at = trio.current_time()
            self.forget_events()

    @property
    def is_unattended(self) -> bool:
        """Whether it is made for a client that has left.  A request that can wait has none from the beginning."""
        return not self.has_ended and not self.n_readers and self.log.begin.request.admit_now

    def is_complete(self, after: int) -> bool:
        """Whether no event follows number ``after``."""
        return self.log.end is not None and after >= self.n_events

    async def wait_for_event(self, after: int, n_passing: int) -> None:
        """Wait until there is an event with a higher number, or more passing ones, or the answer has ended.

        Raises:
            ShuttingDown: the daemon ends.
        """
        while self.n_events <= after and self.n_passing == n_passing and self.log.end is None:
            if self._is_closed:
                raise ShuttingDown("the server is shutting down; the answer goes on when it is started again")
            await self._changed.wait()

    async def wait_for_end(self) -> None:
        """Wait until all of it is written, or the daemon ends."""
        while self.log.end is None and not self._is_closed:
            await self._changed.wait()


def event_of(data: bytes, number: int) -> ServerEvent:
    """An event that was kept, with its number."""
    event = parse_event({**msgspec.msgpack.decode(data), "number": number})
    assert not isinstance(event, UnknownEvent)
    return event


def _encode(event: ServerEvent) -> bytes:
    return msgspec.msgpack.encode(to_fields(event))
