"""The tick: plan, step, deliver.

The loop is one task.  A step computes in the engine's thread; while it does, what the step before gave is
turned into text and handed to the clients, so the device never waits for a socket.  Everything that others
ask of the runner (submit, cancel, a snapshot) is a plain call between two of its checkpoints: no locks.

Source: docs/ARCHITECTURE.md, "A tick".
"""

from __future__ import annotations

import time
from typing import Any, Final

import structlog
import trio

from uma_trio.config import Config
from uma_trio.engine.records import Engine, EngineError, ModelFacts, Step, StepResult
from uma_trio.engine.thread import EngineThread, Pending
from uma_trio.errors import DecodeFailed, KvFull, ModelUnavailable, QueueFull, ShuttingDown, UmaError
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import FinishReason, Generate
from uma_trio.runner.book import Book
from uma_trio.runner.chain import Chained, goes_on
from uma_trio.runner.ending import Endings
from uma_trio.runner.flight import Flight, Landed, gained, launch
from uma_trio.runner.guessing import Guessing, most_guesses
from uma_trio.runner.intake import Intake
from uma_trio.runner.job import Job, Sink, State
from uma_trio.runner.pace import Pace
from uma_trio.runner.planning import Planner
from uma_trio.runner.sequences import Sequences, cache_for
from uma_trio.runner.spiller import InThread, Spiller
from uma_trio.runner.state_files import StateFiles
from uma_trio.runner.telling import Piece, tell_prompt, tell_tokens
from uma_trio.runner.waiting import Queue
from uma_trio.scheduling.cost import CostModel
from uma_trio.telemetry.perf_records import PerfSink

log = structlog.get_logger("uma_trio.runner")

LAUNCHING_S: Final = 0.0005
"""So long the loop keeps quiet when the engine's thread has begun a step by itself.  What it would do meanwhile made
launching a step's kernels on a GPU take 0.3 ms longer, of 9.4."""

LAUNCHING_SHARE: Final = 0.05
"""Of the step at most: the one after it is to be made ready in time."""


class Runner:
    """Serves jobs with one engine.

    Args:
        engine: used from ``thread`` alone.
        thread: the engine's own.
        piece: token id -> its bytes.
        config: limits and scheduling.
        cost: what is known of the engine's speed at the start.
        perf: gets a record of each tick and each request.
        files: where sequences go that are to outlive their cells; ``None``: nowhere.
        in_thread: runs a blocking call.
    """

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        piece: Piece,
        config: Config,
        cost: CostModel | None = None,
        perf: PerfSink | None = None,
        files: StateFiles | None = None,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self.facts: ModelFacts = engine.facts
        facts, scheduling = self.facts, config.scheduling
        self._engine = engine
        self._thread = thread
        self._piece = piece
        self._book = Book(facts, perf, debug=config.operations.debug)
        self.telemetry = self._book.telemetry
        self.pace = Pace(cost or CostModel(), facts.n_batch, 1 if files is None else files.readers)
        self.cache = cache_for(facts, self.pace, reuse=scheduling.prefix_reuse)
        self.states = Spiller(
            self.cache.saving,
            files,
            engine,
            thread,
            self.pace,
            self.wake,
            after_s=config.sessions.spill_after_s,
            in_thread=in_thread,
        )
        self._sequences = Sequences(self.cache, self.states, self.telemetry)
        self._queue = Queue(
            self.cache,
            self._sequences,
            self.telemetry,
            n_sequences=facts.n_seq_max,
            most=config.limits.max_queue,
        )
        self._intake = Intake(facts, config)
        self._planner = Planner(facts, scheduling, self.pace)
        self._endings = Endings(self._queue, self._sequences, self._planner, self._book)
        self._guessing = Guessing(facts.rewinds, scheduling.speculation)
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._closed: UmaError | None = None
        self._flight: Flight | None = None
        self._chained: Chained | None = None
        """Behind ``_flight``; may have begun already."""
        self._stopped = False

    # -- asked from outside, between ticks ------------------------------------------------------

    def submit(self, request: Generate, prompt: Prompt, sink: Sink, *, tenant: int = 0, durable: bool = False) -> Job:
        """``submit_all`` of a request for one answer."""
        [job] = self.submit_all(request, prompt, sink, tenant=tenant, durable=durable)
        return job

    def submit_all(
        self, request: Generate, prompt: Prompt, sink: Sink, *, tenant: int = 0, durable: bool = False
    ) -> list[Job]:
        """Take a request on, all of its answers or none.

        Its events go to ``sink``; ``job.done`` is set after the last of each answer.

        Args:
            tenant: whose service it counts as.
            durable: what it leaves in the cache is to be saved before it has to go.

        Returns:
            ``request.n`` jobs of one prompt.  Those after the first go on from what it computes, as all do that begin
            alike.

        Raises:
            UmaError: it cannot be served; see ``admission``.
            QueueFull: too many wait already.
            ShuttingDown: the runner takes no more.
        """
        if self._closed is not None:
            raise self._closed
        jobs = self._intake.jobs(request, prompt, sink, tenant=tenant, durable=durable and self.states.saves)
        self._planner.arrived(tenant, {job.slot.tenant for job in self.jobs() if job.state is not State.DECODE})
        try:
            self._queue.enter(jobs)
        except (QueueFull, KvFull):
            if len(jobs) > 1:
                self.wake()  # some of them may have had a sequence
            raise
        if request.echo or request.return_full_text:
            for job in jobs:
                tell_prompt(job)
        self.wake()
        return jobs

    def cancel(self, job: Job, reason: FinishReason | UmaError = "cancelled") -> None:
        """End ``job`` now, if it has not ended.

        Its last event is sent at once; its KV is freed at the end of the step under way.
        """
        if job.state is not State.DONE:
            job.cancelled_at = trio.current_time()
            self.wake()
            if self._chained is not None and self._chained.feeds(job):
                self.cache.use(job.seq_id, job.n_fed + 1)  # by a step that has begun and is not booked yet
            self._endings.end(job, reason)

    def wake(self) -> None:
        """Something has changed that the next plan should know."""
        if self._chained is not None and self._chained.revoke():
            self._chained = None
        self._wake.set()

    def close(self, reason: UmaError | None = None) -> None:
        """Take no more requests; those that were taken go on."""
        self._closed = reason or ShuttingDown("the server is shutting down")

    async def wait_idle(self) -> None:
        """Until no request is left and all KV is freed, or nobody ticks any more."""
        while self._busy and not self._stopped:
            self._idle = trio.Event()
            await self._idle.wait()

    def jobs(self) -> list[Job]:
        """All that have not ended: running ones, then waiting ones."""
        return [*self._sequences.jobs.values(), *self._queue]

    def snapshot(self) -> dict[str, Any]:
        """See ``Book.snapshot``.  Never waits for a tick."""
        return self._book.snapshot(
            self._sequences.jobs.values(),
            self.cache,
            waiting=len(self._queue),
            tick_error=self.pace.cost.mixed.error,
            spill=self.states.snapshot(),
        )

    # -- the tick -------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tick until cancelled.

        Raises:
            EngineError: the engine failed and could not be started again.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self.states.run)
            task_status.started()
            await self._tick_forever()

    async def _tick_forever(self) -> None:
        try:
            while True:
                landed = None if self._flight is None else await self._land(self._flight)
                if landed is not None and landed.is_surprising:
                    self._learn(landed)
                self._flight = self._begun() or self._launch()
                if landed is not None:
                    if not landed.is_surprising:
                        self._learn(landed)  # it takes its time, which is no gap here
                    self._book.tick(landed, waiting=len(self._queue))
                    self._deliver(landed)
                if self._flight is not None:
                    self._chain(self._flight)
                else:
                    self._book.idle()
                    if not self._busy:
                        self._idle.set()
                    await self._wake.wait()
                    self._wake = trio.Event()
                await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            for under_way in (self._flight, self._chained):
                if under_way is not None:  # a context in use cannot be left
                    await under_way.pending.settled()
            self._stopped = True
            self._idle.set()

    async def _land(self, flight: Flight) -> Landed | None:
        """Wait for a step and book what the next one must know; nobody is told yet."""
        try:
            result = await flight.pending.wait()
            now = trio.current_time()
            if flight.transfer is not None:
                self.states.transfers.landed(flight.transfer, result)
            if self._chained is not None and self._chained.is_decided:
                await trio.sleep(min(LAUNCHING_S, LAUNCHING_SHARE * flight.plan.predicted_ms / 1e3))
        except EngineError as error:
            await self._recover(flight, error)
            return None
        deliveries = []
        most = most_guesses(len(flight.drawing))
        for job, drawn, scores in flight.drawn(result):
            if job.state is State.DONE:
                continue  # cancelled, or found its stop string, while this was computed
            if len(drawn) > 1:  # there were guesses
                drawn = job.checked(drawn)
                self.cache.rewind(job.seq_id, job.n_fed)
            delivery = gained(job, drawn, scores)
            deliveries.append(delivery)
            if delivery.reason is None:
                job.state, slot = State.DECODE, job.slot
                slot.pending, slot.due_s = 1, now + job.target_tbt_s
                if job.lookup is not None:
                    job.offer_guesses(most)
            else:
                self._endings.retire(job, keep=not isinstance(delivery.reason, UmaError))
        return Landed(flight, result, deliveries, now)

    def _launch(self) -> Flight | None:
        """Start the next step, if there is anything to do."""
        self._queue.admit(self._planner.service)
        streams, prompts = self._sequences.ready()
        transfers = self.states.transfers
        transfer = transfers.next(streams)
        copy_ms = 0.0 if transfer is None else transfers.predicted_ms(transfer)
        chosen = self._planner.plan(streams, prompts, copy_ms)
        self._planner.accepted(chosen)
        jobs = dict(self._sequences.jobs)  # as the plan calls them
        for share in chosen.shares:
            self._sequences.settle(jobs[share.seq_id])
        edits = self.cache.take_edits()
        if transfer is not None:
            edits = (*edits, transfer.edit)
        if not chosen.streams and not chosen.shares and not edits:
            return None
        flight = launch(chosen, jobs, edits, self._endings.take_freed(), self._submit, transfer)
        time.sleep(0)  # lets go of the GIL, or the step would begin after the delivery that is to overlap it
        for job in flight.jobs:
            self.cache.use(job.seq_id, job.n_fed)
        return flight

    def _chain(self, flight: Flight) -> None:
        """Make the next step ready behind ``flight``, if the same streams will simply go on."""
        jobs = flight.jobs
        if len(jobs) != len(self._sequences.jobs) or self.cache.has_edits or self.states.transfers:
            return
        if not goes_on(flight):
            return
        after = self._planner.plan([job.slot for job in jobs])
        if len(after.streams) == len(jobs) and not after.drafts:
            self._chained = Chained(after, jobs, flight.pending, self._engine.step, self._thread.submit)

    def _begun(self) -> Flight | None:
        """The step that has begun by itself, if one has."""
        chained, self._chained = self._chained, None
        if chained is None or chained.revoke():
            return None
        flight = chained.begun()
        self.telemetry.chained_total += 1
        self._planner.decoded(flight.plan.streams)
        for job in flight.jobs:
            if job.state is not State.DONE:
                self.cache.use(job.seq_id, job.n_fed)
        return flight

    def _submit(self, step: Step) -> Pending[StepResult]:
        return self._thread.submit(lambda: self._engine.step(step))

    # -- while the next step computes -----------------------------------------------------------

    def _learn(self, landed: Landed) -> None:
        if landed.flight.jobs:
            self.pace.stepped(landed.flight.plan.work, landed.took_ms)

    def _deliver(self, landed: Landed) -> None:
        """Text for the clients."""
        for delivery in landed.deliveries:
            if delivery.tokens:
                self._book.tokens(delivery, landed.at)
                if not delivery.n_before:
                    self._guessing.begin(delivery.job)
            reason = tell_tokens(delivery, self._piece)
            if reason is not None:
                self._endings.end(delivery.job, reason)

    async def _recover(self, flight: Flight, error: EngineError) -> None:
        """A step failed: its jobs end, the others go on."""
        log.error("a tick failed", error=str(error), fatal=error.fatal, requests=len(flight.jobs))
        if flight.transfer is not None:
            self.states.transfers.landed(flight.transfer, None)
        for job in flight.jobs:
            if job.state is not State.DONE:
                self._endings.end(job, DecodeFailed(f"llama_decode failed: {error}"))
        self._book.freed(flight.freed, trio.current_time())
        self._book.idle()
        if error.fatal:
            await self._reset()
        self._sequences.clear(lost=error.fatal)

    async def _reset(self) -> None:
        """Make the engine's memory anew; where that fails nothing more can be computed, and everybody is told so.

        Raises:
            EngineError: it failed.
        """
        try:
            await self._thread.run(self._engine.reset)
        except EngineError as error:
            log.error("the model's memory cannot be made anew; the server ends", reason=str(error))
            told = "the model has failed and cannot go on; the server ends"
            self.close(ModelUnavailable(told))
            for job in self.jobs():
                self._endings.end(job, ModelUnavailable(told))
            raise

    @property
    def _busy(self) -> bool:
        return bool(self._queue or self._sequences.jobs or self.cache.has_edits or self._flight)

    def check_integrity(self) -> None:
        """Sequences, reservations and jobs add up, or AssertionError."""
        self._sequences.check_integrity()
        self._queue.check_integrity()
