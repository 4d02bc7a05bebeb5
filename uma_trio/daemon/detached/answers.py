"""All detached answers of a daemon: tasks that make them, files that keep them, and what clients may do with them.

An answer is a request in a task of the daemon.  Its events go to a log (``store.answer_log``), from which any number of
clients read at their own pace.  The next daemon goes on with what has no end.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs
import structlog
import trio

from uma_trio.config import MB, Config
from uma_trio.daemon.detached.answer import DetachedAnswer
from uma_trio.daemon.prompts.fair_limiter import FairLimiter
from uma_trio.daemon.registry import ModelRegistry
from uma_trio.daemon.requests import NO_USAGE, Generation, check_without_prompt
from uma_trio.daemon.serving.offload import InThread
from uma_trio.daemon.store.answer_folder import AnswerFolder, AnswerFolderError
from uma_trio.daemon.store.answer_log import AnswerLog, Begin, End, Record, encode
from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.journal_format import SessionKey
from uma_trio.errors import (
    AnswerExists,
    AnswerNotFound,
    DecodeFailed,
    InternalError,
    KvFull,
    ModelLoading,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RequestTimeout,
    SessionBusy,
    ShuttingDown,
    TooManyRequests,
    UmaError,
)
from uma_trio.principal import Principal
from uma_trio.protocol.answers import AnswerInfo, AnswerList
from uma_trio.protocol.events import Eos, Failure
from uma_trio.protocol.queries import AnswersQuery
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings

log = structlog.get_logger("uma_trio.detached")

TRANSIENT: Final = (QueueFull, KvFull, TooManyRequests, ModelLoading, ModelUnavailable, ShuttingDown)
"""What a client would wait for, and send its request again."""
RETRY_S: Final = 1.0
SWEEP_S: Final = 60.0
UNATTENDED_SWEEP_S: Final = 5.0
"""A client that has lost its connection is back by then."""
PART_ANSWERS: Final = 64
"""Answers in one event of a list."""


class DetachedAnswers:
    """The detached answers of a daemon.

    Args:
        folder: keeps them; ``None``: they end with the daemon.
        in_thread: runs a blocking call.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        config: Config,
        models: ModelRegistry,
        folder: AnswerFolder | None = None,
        *,
        in_thread: InThread = trio.to_thread.run_sync,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._folder = folder
        self._in_thread = in_thread
        self._clock = clock
        self._seed = config.sampling.seed
        self._limits = config.limits
        self._max_unfinished = config.sessions.max_detached
        self._max_bytes = config.sessions.detached_max_mb * MB
        self._ttl_s = config.sessions.session_ttl_s
        self._max_unattended = config.sessions.max_unattended
        self._unattended_s = config.sessions.unattended_s
        self._answers: dict[SessionKey, DetachedAnswer] = {}
        """The oldest first."""
        self._turns = FairLimiter(max(1, config.limits.max_queue // 2))
        """Few answers wait in the queues of models, so that others find room there."""
        self._unwritten: dict[DetachedAnswer, None] = {}
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._is_closed = False
        self._suspect: DetachedAnswer | None = None
        """Tried alone, before anything else."""

    # -- running ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the answers of earlier daemons, and make new ones, until cancelled.  Then none of them has ended."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._load()
                nursery.start_soon(self._write_forever)
                nursery.start_soon(self._expire_forever)
                nursery.start_soon(self._end_unattended_forever)
                self._resume(nursery)
                task_status.started()
        finally:
            self.close()
            await self._write()

    def _resume(self, nursery: trio.Nursery) -> None:
        """Go on with what has no end: suspects first and one after another, of which the first one is tried alone."""
        unfinished = [answer for answer in self._answers.values() if not answer.has_ended]
        suspects = [answer for answer in unfinished if answer.log.is_suspect]
        suspects.sort(key=lambda answer: -answer.log.n_attempts)
        before: DetachedAnswer | None = None
        for answer in suspects:
            if before is None:
                log.warning(
                    "daemons died while they made an answer; it is tried alone before clients are served",
                    id=answer.key.id,
                )
                self._suspect = answer
                answer.attempt(alone=True)
            nursery.start_soon(self._make, answer, before)
            before = answer
        for answer in unfinished:
            if answer not in suspects:
                nursery.start_soon(self._make, answer, before)

    async def wait_for_suspect(self) -> None:
        """Wait while an answer is tried alone: no client may ask for anything else."""
        if self._suspect is not None:
            await self._suspect.tried.wait()

    def close(self) -> None:
        """Take over nothing more; the answers go on with the next daemon.  Does not wait."""
        self._is_closed = True
        for answer in self._answers.values():
            answer.close()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _load(self) -> None:
        if self._folder is None:
            return
        try:
            stored = await self._in_thread(self._folder.load)
        except AnswerFolderError as error:
            log.error("detached answers cannot be read; the daemon starts without any", reason=str(error))
            return
        for problem in self._folder.problems:
            log.warning("a detached answer cannot be used", reason=problem)
        for stored_answer in sorted(stored, key=lambda stored_answer: stored_answer.log.begin.created_at):
            answer = self._add(stored_answer.log, stored_answer.n_bytes)
            answer.is_durable = True
            if answer.has_ended:
                answer.forget_events()
            elif stored_answer.log.is_fatal:
                reason = f"the daemon has ended {stored_answer.log.n_attempts} times while it answered, the last time it did nothing else"
                answer.send(_failure(answer, DecodeFailed(reason)))
            else:
                answer.is_resumed = True

    def _add(self, stored: AnswerLog, n_bytes: int) -> DetachedAnswer:
        answer = DetachedAnswer(stored, n_bytes, self._has_records, self._clock)
        self._answers[answer.key] = answer
        return answer

    async def _make(self, answer: DetachedAnswer, after: DetachedAnswer | None = None) -> None:
        """Make ``answer``, or go on with it, until it has ended.

        Args:
            after: an answer that is to be tried before.
        """
        begin = answer.log.begin
        limit_s = self._limits.request_timeout_s
        with answer.scope:
            if after is not None:
                await after.tried.wait()
            async with self._turns.of(begin.principal.name):
                until = trio.current_time() + limit_s
                while not answer.has_ended:
                    why = await self._attempt(answer)
                    if answer.has_ended:
                        break
                    if trio.current_time() + RETRY_S > until:
                        answer.send(_failure(answer, RequestTimeout(f"not done after {limit_s:g} s: {why}")))
                        break
                    await trio.sleep(RETRY_S)
                    await answer.again()
        if answer.is_cancelled and not answer.has_ended:
            now = self._clock()
            waited_ms = round(1e3 * max(0.0, now - begin.created_at), 3)
            timings = Timings(queue_ms=waited_ms, ttft_ms=None, total_ms=waited_ms, tokens_per_s=None)
            answer.send(Eos(id=begin.request.id, reason="cancelled", usage=NO_USAGE, timings=timings))

    async def _attempt(self, answer: DetachedAnswer) -> str:
        """Make ``answer``; returns why it has to be tried again, if it has not ended."""
        begin = answer.log.begin
        answer.generation = generation = Generation(self._models, begin.request, begin.principal, answer)
        generation.record = answer
        try:
            await generation.run()
        except UmaError as error:
            # somebody has perhaps taken the session while the daemon was started
            is_busy = isinstance(error, SessionBusy) and answer.log.prompt is not None
            has_begun = bool(answer.log.tokens) or answer.is_resumed
            waits = has_begun or not begin.request.admit_now
            if is_busy or (waits and isinstance(error, TRANSIENT)):
                return str(error)
            answer.send(_failure(answer, error))
        except Exception:
            log.exception("a detached answer failed with a bug of the daemon", request=begin.request.id)
            answer.send(_failure(answer, InternalError("internal error; the daemon's log has the details")))
        finally:
            answer.generation = None
            if not answer.has_ended:
                answer.pause()
        return "" if answer.interruption is None else answer.interruption.message

    # -- writing ----------------------------------------------------------------------------------

    def _has_records(self, answer: DetachedAnswer) -> None:
        self._unwritten[answer] = None
        self._wake.set()

    async def _write_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self._write()

    async def _write(self) -> None:
        """Write what all answers have got since the last time, in one thread, and show it to clients afterwards."""
        batch = [(answer, answer.take()) for answer in self._unwritten]
        self._unwritten.clear()
        parts = [(answer, records, b"".join(map(encode, records))) for answer, records in batch]
        if self._folder is not None:
            with trio.CancelScope(shield=True):
                await self._in_thread(self._append, parts)
        for answer, records, data in parts:
            answer.written(records, len(data))
            answer.forget_events()

    def _append(self, parts: Sequence[tuple[DetachedAnswer, list[Record], bytes]]) -> None:
        assert self._folder is not None
        for answer, records, data in parts:
            if not answer.is_durable:
                continue
            try:
                has_end = any(isinstance(record, End) for record in records)
                self._folder.append(answer.key, data, answer.n_bytes, durable=has_end)
            except AnswerFolderError as error:
                answer.is_durable = False
                log.warning("a detached answer is not on disk; it stays in memory", reason=str(error))

    async def _expire_forever(self) -> None:
        """Remove what has ended long ago."""
        while True:
            await trio.sleep(SWEEP_S)
            before = self._clock() - self._ttl_s
            for answer in [*self._answers.values()]:
                if answer.log.end is not None and answer.log.end.ended_at < before:
                    await self._remove(answer)

    async def _end_unattended_forever(self) -> None:
        """Cancel answers whose clients have left, and do not come back."""
        while True:
            await trio.sleep(UNATTENDED_SWEEP_S)
            now = trio.current_time()
            seen: Counter[str] = Counter()
            unattended = [answer for answer in self._answers.values() if answer.is_unattended]
            for answer in sorted(unattended, key=lambda answer: -answer.left_at):
                seen[answer.key.principal] += 1
                is_late = now - answer.left_at > self._unattended_s
                if is_late or seen[answer.key.principal] > self._max_unattended:
                    log.info("an answer is cancelled, since its client has left", request=answer.key.id)
                    self._cancel(answer)

    async def _remove(self, answer: DetachedAnswer) -> None:
        if self._answers.get(answer.key) is answer:
            del self._answers[answer.key]
            if self._folder is not None:
                try:
                    await self._in_thread(self._folder.remove, answer.key)
                except AnswerFolderError as error:
                    log.warning("a removed answer is still on disk", reason=str(error))

    # -- for clients ------------------------------------------------------------------------------

    async def begin(self, request: Generate, principal: Principal) -> AnswerInfo:
        """Accept a detached request.  When this returns, it is answered also if the daemon is killed.

        Raises:
            AnswerExists: the principal has an answer of this id.
            TooManyRequests: the principal has too many.
            ModelNotFound: there is no such model.
            ShuttingDown: the daemon is draining.
            UmaError: it can never be answered, as far as a loaded model knows that without the prompt.
        """
        if self._is_closed or self._nursery is None:
            raise ShuttingDown()
        if request.model is not None:
            await self._models.describe(request.model, principal.name)
        with contextlib.suppress(ModelNotFound):  # a model of this machine that is not loaded yet
            service = self._models.loaded(request.model)
            if service is not None:
                check_without_prompt(request, service)
        seed = self._seed if request.seed is None else request.seed
        kept = attrs.evolve(request, stream=True, seed=secrets.randbits(63) if seed is None else seed)
        new = AnswerLog(Begin(principal=principal, request=kept, created_at=self._clock()))
        if new.key in self._answers:
            raise AnswerExists(f"there is a detached answer {request.id!r} already; choose another id", field="id")
        data = encode(new.begin)
        await self._make_room(principal.name, len(data))
        if new.key in self._answers:
            raise AnswerExists(f"there is a detached answer {request.id!r} already; choose another id", field="id")
        answer = self._add(new, len(data))
        if self._folder is not None:
            try:
                await self._in_thread(self._folder.create, answer.key, data)
                answer.is_durable = True
            except AnswerFolderError as error:
                log.warning("a detached answer is not on disk; it stays in memory", reason=str(error))
        self._nursery.start_soon(self._make, answer)
        return answer.info

    async def _make_room(self, principal: str, n_bytes: int) -> None:
        own = self._of(principal)
        n_unfinished = sum(answer.log.end is None for answer in own)
        if n_unfinished >= self._max_unfinished:
            raise TooManyRequests(
                f"{principal} has {n_unfinished} detached answers that have not ended (max_detached)",
                retry_after_ms=round(1e3 * RETRY_S),
            )
        n_bytes += sum(answer.n_bytes for answer in own)
        for answer in own:
            if n_bytes > self._max_bytes and answer.log.end is not None:
                n_bytes -= answer.n_bytes
                await self._remove(answer)
        if n_bytes > self._max_bytes:
            raise TooManyRequests(f"the detached answers of {principal} take {n_bytes} bytes (detached_max_mb)")

    def _of(self, principal: str) -> list[DetachedAnswer]:
        """The answers of ``principal``, the oldest first."""
        return [answer for answer in self._answers.values() if answer.key.principal == principal]

    def find(self, principal: str, id: str) -> DetachedAnswer:
        """An answer of ``principal``.

        Raises:
            AnswerNotFound: there is no such answer.
        """
        answer = self._answers.get(SessionKey(principal, id))
        if answer is None:
            raise AnswerNotFound(f"there is no detached answer {id!r}", field="answer_id")
        return answer

    async def answer_query(self, query: AnswersQuery, principal: str) -> Iterator[AnswerList]:
        """List, describe, cancel or delete answers of ``principal``; returns the events of the answer.

        Raises:
            AnswerNotFound: there is no such answer.
        """
        if query.answer_id is None:
            return _lists([answer.info for answer in reversed(self._of(principal))], query.id)
        answer = self.find(principal, query.answer_id)
        if query.action == "delete":
            answer.is_durable = False  # its file goes, so its end need not be on disk before
        if query.action in ("cancel", "delete"):
            self._cancel(answer)
            await answer.wait_for_end()
        if query.action == "delete":
            await self._remove(answer)
        request = answer.log.begin.request
        messages = request.messages if query.with_messages else None
        info = attrs.evolve(answer.info, client_state=request.client_state, messages=messages)
        return iter([AnswerList(answers=[info], id=query.id)])

    def _cancel(self, answer: DetachedAnswer) -> None:
        answer.is_cancelled = True
        if answer.generation is not None:
            answer.generation.cancel()
        else:
            answer.scope.cancel()

    async def events(self, answer: DetachedAnswer, after: int, n_passing: int) -> tuple[int, Sequence[bytes]]:
        """The events after number ``after`` that there are, for ``event_of``, and the number of the first one.

        Waits for one, or for a passing one after the first ``n_passing``.

        Raises:
            AnswerNotFound: it was deleted meanwhile.
            ShuttingDown: the daemon ends.
        """
        await answer.wait_for_event(after, n_passing)
        records = answer.log
        if answer.n_events > len(records.events):  # then its file has them
            assert self._folder is not None
            try:
                records = await self._in_thread(self._folder.read, answer.key)
            except (AnswerFolderError, DamagedFile) as error:
                raise AnswerNotFound(f"the answer {answer.key.id!r} cannot be read any more: {error}") from None
        return after + 1, records.events[after:]


def _failure(answer: DetachedAnswer, error: UmaError) -> Failure:
    request = answer.log.begin.request
    error.request_id = request.id
    log.info("a detached answer has failed", id=request.id, code=error.code, reason=str(error))
    return Failure.of(error, metadata=request.metadata)


def _lists(infos: Sequence[AnswerInfo], id: str | None) -> Iterator[AnswerList]:
    """Yield ``infos`` in parts of ``PART_ANSWERS``; at least one part."""
    for start in range(0, max(1, len(infos)), PART_ANSWERS):
        end = start + PART_ANSWERS
        yield AnswerList(answers=[*infos[start:end]], more=end < len(infos), id=id)
