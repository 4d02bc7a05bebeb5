"""The tick: plan, step, deliver.

The loop is one task.  A step computes in the engine's thread; while it does, what the step before gave is
turned into text and handed to the clients, so the device never waits for a socket.  Everything that others
ask of the runner (submit, cancel, a snapshot) is a plain call between two of its checkpoints: no locks.

Source: docs/ARCHITECTURE.md, "A tick".
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import structlog
import trio

from uma_trio.config import Config
from uma_trio.engine.records import Engine, EngineError, ModelFacts, Step, StepResult, TokenIds
from uma_trio.engine.thread import EngineThread, Pending
from uma_trio.errors import DecodeFailed, KvFull, QueueFull, ShuttingDown, UmaError
from uma_trio.kv.cache import Entry, KvCache
from uma_trio.kv.checkpoints import Checkpoints
from uma_trio.kv.shelf import Saved
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Failure, Generate, Reason
from uma_trio.runner.book import Book
from uma_trio.runner.chain import Chained
from uma_trio.runner.flight import Delivery, Flight, Landed, launch
from uma_trio.runner.intake import Intake
from uma_trio.runner.job import MOST_GUESSES, Job, Sink, State
from uma_trio.runner.spiller import InThread, Spiller, StateFiles, Transfer
from uma_trio.runner.telling import tell_prompt, tell_token
from uma_trio.runner.wishes import answers
from uma_trio.sampling import Lookup
from uma_trio.scheduling import fairness
from uma_trio.scheduling.cost import CostModel, Work
from uma_trio.scheduling.policy import Memory, Plan, Slot, plan
from uma_trio.telemetry.perf_records import PerfSink

log = structlog.get_logger("uma_trio.runner")

NO_DISTRIBUTION: Final = -1

GUESSES_UP_TO: Final = 8
"""Streams; beside more of them guesses are not even looked for: a wide batch has little to gain, and the search
would be between two steps."""

LAUNCHING_S: Final = 0.0005
"""So long the loop keeps quiet when the engine's thread has begun a step by itself.  What it would do meanwhile made
launching a step's kernels on a GPU take 0.3 ms longer, of 9.4."""

LAUNCHING_SHARE: Final = 0.05
"""Of the step at most: the one after it is to be made ready in time."""

TRUSTED: Final = 0.95
"""How far the first guesses are trusted, of a request that asks for them."""


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
        piece: Callable[[int], bytes],
        config: Config,
        cost: CostModel | None = None,
        perf: PerfSink | None = None,
        files: StateFiles | None = None,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._piece = piece
        self._limits = config.limits
        self._intake = Intake(engine.facts, config)
        self._scheduling = config.scheduling
        self.facts: ModelFacts = engine.facts
        self._book = Book(self.facts, perf, debug=config.operations.debug)
        self.telemetry = self._book.telemetry
        self.cache = KvCache(
            n_sequences=self.facts.n_seq_max,
            n_cells=self.facts.n_ctx,
            cells_per_sequence=self.facts.n_ctx_seq,
            unified=self.facts.unified,
            rewinds=self.facts.rewinds,
            checkpoints=self.facts.checkpoints,
            states_rewind=self.facts.states_rewind,
            reuse=config.scheduling.prefix_reuse,
            worth_loading=self._worth_loading,
        )
        self._spiller = (
            None if files is None else self._make_spiller(files, config.sessions.spill_after_s, in_thread)
        )
        self._queue: deque[Job] = deque()
        self._blocked: tuple[Job, int] | None = None
        """The first in the queue found no room, when the cache was as it is."""
        self._running: dict[int, Job] = {}
        self._freed: list[Job] = []
        """Ended from outside: their tokens leave the cache with the next step."""
        self._memory = Memory()
        self.cost = cost or CostModel()
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._closed: UmaError | None = None
        self._flight: Flight | None = None
        self._chained: Chained | None = None
        """Behind ``_flight``; may have begun already."""
        self._stopped = False

    def _make_spiller(self, files: StateFiles, after_s: float, in_thread: InThread) -> Spiller:
        def state_bytes(seq_id: int, points: Checkpoints) -> list[int]:
            return [self._engine.state_bytes(seq_id), *(self._engine.mark_bytes(point.mark) for point in points)]

        async def ask(seq_id: int, points: Checkpoints) -> list[int]:
            return await self._thread.run(lambda: state_bytes(seq_id, points))

        return Spiller(
            self.cache,
            files,
            ask,
            self.wake,
            self._worth_loading,
            after_s=after_s,
            in_thread=in_thread,
        )

    # -- asked from outside, between ticks ------------------------------------------------------

    def submit(
        self, request: Generate, prompt: Prompt, sink: Sink, *, tenant: int = 0, durable: bool = False
    ) -> Job:
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
        jobs: list[Job] = []
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        try:
            for wanted, index in answers(request, seed):
                jobs.append(self._take_on(wanted, index, prompt, sink, tenant, durable=durable))
        except UmaError:
            for job in jobs:
                self._retire(job, keep=False)
                job.state = State.DONE
            if jobs:
                self.wake()
            raise
        if request.echo or request.return_full_text:
            for job in jobs:
                tell_prompt(job)
        self.wake()
        return jobs

    def _take_on(
        self, request: Generate, index: int | None, prompt: Prompt, sink: Sink, tenant: int, *, durable: bool
    ) -> Job:
        """One answer: give it a sequence, or a place in the queue."""
        if self._closed is not None:
            raise self._closed
        durable = durable and self._spiller is not None
        job = self._intake.job(request, prompt, sink, tenant=tenant, durable=durable, index=index)
        self._note_arrival(tenant)
        if self._queue or not self._place(job):
            if len(self._queue) >= self._limits.max_queue:
                raise self._queue_full()
            self._queue.append(job)
        return job

    def _note_arrival(self, tenant: int) -> None:
        """A tenant that had nothing to wait for must not have saved up service meanwhile."""
        waiting = {job.slot.tenant for job in self.jobs() if job.state is not State.DECODE}
        if tenant not in waiting:
            service = self._memory.service.arrived(tenant, waiting)
            self._memory = attrs.evolve(self._memory, service=service)

    def _queue_full(self) -> QueueFull | KvFull:
        """With an estimate of the wait: what requests take on average, for each turn that must come first."""
        waiting = f"{len(self._queue)} requests wait already"
        kv = self.cache.statistics()
        if kv.sequences < self.facts.n_seq_max:  # not for a sequence, so for cells
            error: QueueFull | KvFull = KvFull(f"{kv.cells_reserved} of {kv.cells} KV cells are in use, and {waiting}")
        else:
            error = QueueFull(waiting)
        if self.telemetry.served_ms.value is not None:
            turns = 1 + len(self._queue) // self.facts.n_seq_max
            error.retry_after_ms = round(turns * self.telemetry.served_ms.value)
        return error

    def cancel(self, job: Job, reason: Reason | UmaError = "cancelled") -> None:
        """End ``job`` now, if it has not ended.

        Its last event is sent at once; its KV is freed at the end of the step under way.
        """
        if job.state is not State.DONE:
            job.cancelled_at = trio.current_time()
            self.wake()
            if self._chained is not None and self._chained.feeds(job):
                self.cache.use(job.seq_id, job.n_fed + 1)  # by a step that has begun and is not booked yet
            self._end(job, reason)

    def wake(self) -> None:
        """Something has changed that the next plan should know."""
        if self._chained is not None and self._chained.revoke():
            self._chained = None
        self._wake.set()

    def close(self, reason: UmaError | None = None) -> None:
        """Take no more requests; those that were taken go on."""
        self._closed = reason or ShuttingDown("the server is shutting down")

    async def save_sessions(self) -> None:
        """Until all that is to outlive the cache is saved.  ``run`` must be running."""
        if self._spiller is not None:
            await self._spiller.save_everything()

    def forget(self, tokens: TokenIds, *, tenant: int, needed: Callable[[TokenIds], bool]) -> None:
        """What was kept of a conversation goes, in the cache and on disk.

        Args:
            needed: whether a list of tokens is the beginning of something that goes on.
        """
        names = self.cache.forget(tokens, tenant=tenant, needed=needed)
        if self._spiller is not None:
            self._spiller.remove(names)
        self.wake()

    def keep_states(self, needed: Callable[[Saved], bool]) -> None:
        """Saved states that are not needed go.  ``run`` must be running."""
        names = self.cache.shelf.orphans(needed)
        for name in names:
            self.cache.shelf.discard(name)
        if self._spiller is not None:
            self._spiller.remove(names)

    async def wait_idle(self) -> None:
        """Until no request is left and all KV is freed, or nobody ticks any more."""
        while self._busy and not self._stopped:
            self._idle = trio.Event()
            await self._idle.wait()

    def jobs(self) -> list[Job]:
        """All that have not ended: running ones, then waiting ones."""
        return [*self._running.values(), *self._queue]

    def snapshot(self) -> dict[str, Any]:
        """What ``metrics`` answers, less what the daemon adds.  Never waits for a tick."""
        kv = self.cache.statistics()
        return {
            "model": self.facts.name,
            **self.telemetry.snapshot(),
            "queue_depth": len(self._queue),
            "running": len(self._running),
            "tick_error": round(self.cost.mixed.error, 3),
            "kv": {
                **attrs.asdict(kv),
                "evicted_total": self.cache.evicted_total,
                "bytes": round(kv.cells * self.facts.kv_bytes_per_token),
                "bytes_reserved": round((kv.cells_reserved + kv.cached_cells) * self.facts.kv_bytes_per_token),
            },
            "spill": None if self._spiller is None else self._spiller.snapshot(),
            "sessions_inter_token_ms": {
                job.request.id: round(job.inter_token_ewma_ms, 3)
                for job in self._running.values()
                if job.inter_token_ewma_ms is not None
            },
        }

    # -- the tick -------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tick until cancelled.

        Raises:
            EngineError: the engine failed and could not be started again.
        """
        async with trio.open_nursery() as nursery:
            if self._spiller is not None:
                await nursery.start(self._spiller.run)
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
            self._copied(flight.transfer, result)
            if self._chained is not None and self._chained.is_decided:
                await trio.sleep(min(LAUNCHING_S, LAUNCHING_SHARE * flight.plan.predicted_ms / 1e3))
        except EngineError as error:
            self._copied(flight.transfer, None)
            await self._recover(flight, error)
            return None
        deliveries = []
        most_guesses = MOST_GUESSES if len(flight.drawing) <= GUESSES_UP_TO else 0
        for job, drawn, scores in flight.drawn(result):
            if job.state is State.DONE:
                continue  # cancelled, or found its stop string, while this was computed
            tokens = self._checked(job, drawn) if len(drawn) > 1 else drawn
            delivery = self._gained(job, tokens)
            delivery.scores = scores
            deliveries.append(delivery)
            if delivery.reason is None:
                job.state, slot = State.DECODE, job.slot
                slot.pending, slot.due_s = 1, now + job.target_tbt_s
                if job.lookup is not None:
                    job.offer_guesses(most_guesses)
        return Landed(flight, result, deliveries, now)

    def _checked(self, job: Job, drawn: Sequence[int]) -> Sequence[int]:
        """Of what was drawn after guesses, what counts."""
        tokens = job.checked(drawn)
        self.cache.rewind(job.seq_id, job.n_fed)
        return tokens

    def _gained(self, job: Job, tokens: Sequence[int]) -> Delivery:
        """``job`` has new tokens, up to one that ends it."""
        before, paused = len(job.tokens), job.paused
        job.paused = False
        reason: Reason | UmaError | None = None
        for n, token in enumerate(tokens):
            if token == NO_DISTRIBUTION:
                reason, tokens = DecodeFailed("the model gave no usable logits"), tokens[:n]
                break
            job.gained(token)
            if token in job.ending:
                reason = "stop"
            elif len(job.tokens) >= job.max_tokens:
                reason = "length"
            if reason is not None:
                tokens = tokens[: n + 1]
                break
        if reason is not None:
            self._retire(job, keep=not isinstance(reason, UmaError))
        return Delivery(job, tokens, before, reason, paused)

    def _launch(self) -> Flight | None:
        """Start the next step, if there is anything to do."""
        self._admit()
        streams, prompts, stalled = [], [], []
        for seq_id in sorted(self._running):  # what follows each other can be computed together
            job = self._running[seq_id]
            if not job.sink.has_room:
                job.paused = True
                stalled.append(job.seq_id)
            elif job.state is State.DECODE:
                streams.append(job.slot)
            elif not job.waits:
                prompts.append(job.slot)
        if self.cache.has_followers:
            prompts += self._followed(stalled)
        transfer, copy_ms = self._next_copy(streams)
        chosen = self._plan(streams, prompts, copy_ms)
        self._memory = chosen.memory
        jobs = dict(self._running)  # as the plan calls them
        for share in chosen.shares:
            self._settle(jobs[share.seq_id])
        edits = self.cache.take_edits()
        if transfer is not None:
            edits = (*edits, transfer.edit)
        if not chosen.streams and not chosen.shares and not edits:
            return None
        freed, self._freed = self._freed, []
        flight = launch(chosen, jobs, edits, freed, self._submit, transfer)
        time.sleep(0)  # lets go of the GIL, or the step would begin after the delivery that is to overlap it
        for job in flight.jobs:
            self.cache.use(job.seq_id, job.n_fed)
        return flight

    def _settle(self, job: Job) -> None:
        """``job`` is about to be read: give it the sequence that suits best now, if it holds nothing."""
        if job.n_fed == 0:
            seq_id = self.cache.settle(job.seq_id)
            if seq_id != job.seq_id:
                del self._running[job.seq_id]
                job.seq_id = job.slot.seq_id = seq_id
                self._running[seq_id] = job

    def _next_copy(self, streams: Sequence[Slot]) -> tuple[Transfer | None, float]:
        """The state that this step saves or loads, and the milliseconds that this takes."""
        if self._spiller is None or not self._spiller.waits:
            return None, 0.0
        now = trio.current_time()
        tick_ms = self.cost.predict(Work(0, len(streams), sum([slot.context for slot in streams])))
        spare_ms = 1e3 * (min([slot.due_s for slot in streams]) - now) - tick_ms if streams else math.inf
        transfer = self._spiller.next(spare_ms, tick_ms, now)
        return transfer, 0.0 if transfer is None else self._spiller.predicted_ms(transfer)

    def _copied(self, transfer: Transfer | None, result: StepResult | None) -> None:
        if transfer is not None:
            assert self._spiller is not None
            self._spiller.landed(transfer, result)

    def _plan(self, streams: Sequence[Slot], prompts: Sequence[Slot], copy_ms: float = 0.0) -> Plan:
        return plan(
            streams,
            prompts,
            self._memory,
            now_s=trio.current_time() + copy_ms / 1e3,
            cost=self.cost,
            capacity=self.facts.n_batch,
            limits=self._scheduling,
            mixes=self.facts.unified,
        )

    def _chain(self, flight: Flight) -> None:
        """Make the next step ready behind ``flight``, if the same streams will simply go on."""
        jobs, chosen = flight.jobs, flight.plan
        if chosen.shares or chosen.drafts or not jobs or len(jobs) != len(self._running) or self.cache.has_edits:
            return
        if self._spiller is not None and self._spiller.waits:
            return
        if any(job.state is State.DONE or len(job.tokens) + 1 >= job.max_tokens for job in jobs):
            return  # the last of these tokens is under way
        if not all(job.sink.has_room for job in jobs):
            return
        after = self._plan([job.slot for job in jobs], [])
        if len(after.streams) == len(jobs) and not after.drafts:
            self._chained = Chained(after, jobs, flight.pending, self._engine.step, self._thread.submit)

    def _begun(self) -> Flight | None:
        """The step that has begun by itself, if one has."""
        chained, self._chained = self._chained, None
        if chained is None or chained.revoke():
            return None
        flight = chained.begun()
        self.telemetry.chained_total += 1
        self._memory = self._memory.decoding(flight.plan.streams)
        for job in flight.jobs:
            if job.state is not State.DONE:
                self.cache.use(job.seq_id, job.n_fed)
        return flight

    def _submit(self, step: Step) -> Pending[StepResult]:
        return self._thread.submit(lambda: self._engine.step(step))

    def _followed(self, stalled: Sequence[int]) -> list[Slot]:
        """Those that waited for another sequence and need to no longer."""
        ready = []
        for seq_id, held in self.cache.followed(stalled):
            job = self._running[seq_id]
            job.waits = False
            self._reuse(job, held)
            if job.sink.has_room:
                ready.append(job.slot)
        return ready

    def _reuse(self, job: Job, n: int) -> None:
        """``job`` need not compute the first ``n`` tokens of its prompt."""
        job.n_fed = job.n_cached = job.slot.context = n
        job.pause = self.cache.pause(job.seq_id)
        job.slot.pending = job.pending
        self._book.reused(n)

    def _admit(self) -> None:
        """Give sequences to those that wait: by class, by least-served tenant, in the order of arrival.

        The first in that order is waited for, however large it is, and who waits rises with time: none is
        overtaken for ever.
        """
        service, now = self._memory.service, trio.current_time()
        while self._queue:
            job = min(self._queue, key=lambda job: fairness.rank(job.slot, now - job.arrived_at, service))
            if self._blocked == (job, self.cache.changes):
                return
            if not self._place(job):
                self._blocked = (job, self.cache.changes)
                return
            self._queue.remove(job)

    def _place(self, job: Job) -> bool:
        """Give ``job`` a sequence with all the room that it may need, if there is one."""
        placement = self.cache.place(
            job.prompt.tokens,
            job.cells,
            tenant=job.slot.tenant,
            rank=job.slot.priority,
            private=not job.request.cache_prompt,
            durable=job.durable,
        )
        if placement is None:
            if self._spiller is not None:
                self._spiller.look()  # something may have to be saved to make room
            return False
        job.seq_id = job.slot.seq_id = placement.seq_id
        job.state, job.admitted_at, job.waits = State.PREFILL, trio.current_time(), placement.waits
        if not job.waits:
            self._reuse(job, placement.held)
        self._running[job.seq_id] = job
        if placement.saved is not None:
            assert self._spiller is not None
            assert placement.entry is not None
            self._spiller.fetch(placement.entry, placement.saved, self._restored)
        return True

    def _restored(self, entry: Entry, state: Saved | None) -> None:
        """What ``entry``'s request waited for is there, or (``None``) must be computed."""
        held = self.cache.restored(entry, state)
        if held is not None:
            job = self._running[entry.seq_id]
            job.waits = False
            self._reuse(job, held)
            self.wake()

    def _worth_loading(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether loading a state is predicted to be faster than computing ``n_tokens`` of it."""
        if self._spiller is None:
            return False
        chunk = min(n_tokens, self.facts.n_batch)
        compute_ms = self.cost.predict(Work(chunk, 0, 0, prompt_context=n_tokens / 2)) * n_tokens / chunk
        return self._spiller.load_ms(n_bytes) < compute_ms

    # -- while the next step computes -----------------------------------------------------------

    def _learn(self, landed: Landed) -> None:
        if landed.flight.jobs:
            self.cost = self.cost.observed(landed.flight.plan.work, landed.took_ms)

    def _deliver(self, landed: Landed) -> None:
        """Text for the clients."""
        for delivery in landed.deliveries:
            job = delivery.job
            if delivery.tokens:
                self._book.tokens(delivery, landed.at)
                if not delivery.n_before:
                    self._begin_guessing(job)
            for n, token in enumerate(delivery.tokens, 1):
                score = delivery.scores[n - 1] if delivery.scores else None
                last = delivery.reason is not None and n == len(delivery.tokens)
                tell_token(job, token, score, self._piece, last=last)
                if job.assembler.matched is not None:
                    job.stopped(delivery.n_before + n, self._piece)
                    self._end(job, "stop")
                    break
            else:
                if delivery.reason is not None:
                    self._end(job, delivery.reason)

    def _begin_guessing(self, job: Job) -> None:
        wanted = job.request.speculate
        if self.facts.rewinds and (self._scheduling.speculation if wanted is None else wanted):
            trust = TRUSTED if wanted else 0.5
            job.lookup = Lookup([*job.prompt.tokens.tolist(), *job.tokens], hits=trust)

    # -- ends -----------------------------------------------------------------------------------

    def _retire(self, job: Job, *, keep: bool) -> None:
        """Take ``job`` out of the plans.

        Args:
            keep: others may use what it has computed; else that leaves the cache with the next step.
        """
        if job.state is State.QUEUED:
            self._queue.remove(job)
        elif self._running.get(job.seq_id) is job:
            del self._running[job.seq_id]
            self.cache.end(job.seq_id, job.known_tokens() if keep else None, at=trio.current_time())
            if self._spiller is not None:
                self._spiller.look()
            if job.cancelled_at is not None and not keep:
                self._freed.append(job)

    def _end(self, job: Job, reason: Reason | UmaError) -> None:
        """Tell the client how it ended, and take it out."""
        kept = job.cancelled_at is None or (job.durable and job.tokens)  # a session goes on from what was told
        self._retire(job, keep=bool(kept) and not isinstance(reason, UmaError))
        if not any(other.slot.tenant == job.slot.tenant for other in self.jobs()):
            self._memory = self._memory.without(job.slot.tenant)
        now = trio.current_time()
        job.state, job.ended_at = State.DONE, now
        if isinstance(reason, UmaError):
            reason.request_id = job.request.id
            job.sink.send(Failure.of(reason, metadata=job.request.metadata, index=job.index))
        else:
            job.sink.send(job.eos(reason, now))
        self._book.ended(job, reason, now)
        job.done.set()

    async def _recover(self, flight: Flight, error: EngineError) -> None:
        """A step failed: its jobs end, the others go on."""
        log.error("a tick failed", error=str(error), fatal=error.fatal, requests=len(flight.jobs))
        for job in flight.jobs:
            if job.state is not State.DONE:
                self._end(job, DecodeFailed(f"llama_decode failed: {error}"))
        self._book.freed(flight.freed, trio.current_time())
        self._book.idle()
        if error.fatal:
            await self._thread.run(self._engine.reset)
        self.cache.clear(lost=error.fatal)
        for job in self._running.values():  # they were not in the batch, but may hold copies of what was
            job.n_fed = job.n_cached = job.slot.context = 0
            job.slot.pending, job.state = job.pending, State.PREFILL

    @property
    def _busy(self) -> bool:
        return bool(self._queue or self._running or self.cache.has_edits or self._flight)

    def check_integrity(self) -> None:
        """Sequences, reservations and jobs add up, or AssertionError."""
        self.cache.check_integrity()
        assert len(self._running) == self.cache.statistics().sequences
        assert all(job.seq_id == seq_id for seq_id, job in self._running.items())
        assert all(job.state in (State.PREFILL, State.DECODE) for job in self._running.values())
        assert all(job.state is State.QUEUED for job in self._queue)
        held = self.cache.held()
        assert all(job.n_fed == held.get(seq_id, 0) for seq_id, job in self._running.items())
