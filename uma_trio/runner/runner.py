"""The tick: plan, step, deliver.

The loop is one task.  A step computes in the engine's thread; while it does, what the step before gave is
turned into text and handed to the clients, so the device never waits for a socket.  Everything that others
ask of the runner (submit, cancel, a snapshot) is a plain call between two of its checkpoints: no locks.

Source: docs/ARCHITECTURE.md, "A tick".
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs
import numpy as np
import structlog
import trio

from uma_trio.config import Config
from uma_trio.engine.records import Draw, Engine, EngineError, Feed, ModelFacts, Step, StepResult
from uma_trio.engine.thread import EngineThread, Pending
from uma_trio.errors import DecodeFailed, QueueFull, ShuttingDown, UmaError
from uma_trio.kv.ledger import Ledger
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Failure, Generate, Reason, Token
from uma_trio.runner import admission
from uma_trio.runner.job import Job, Sink, State
from uma_trio.sampling import SamplingParams
from uma_trio.scheduling import fairness
from uma_trio.scheduling.cost import CostModel
from uma_trio.scheduling.policy import Memory, Plan, Priority, Slot, plan
from uma_trio.telemetry import Telemetry

log = structlog.get_logger("uma_trio.runner")

NO_DISTRIBUTION: Final = -1


@attrs.frozen
class _Flight:
    """A step under way."""

    plan: Plan
    jobs: tuple[Job, ...]
    """In the order of the step's feeds."""
    drawing: tuple[Job, ...]
    """Those whose next token is sampled, in order."""
    freeing: tuple[Job, ...]
    """Those whose tokens leave the KV cache."""
    pending: Pending[StepResult]


@attrs.frozen
class _Delivery:
    """A sampled token on its way to a client."""

    job: Job
    token: int
    reason: Reason | None
    """Why the job ends with this token, if it does."""


class Runner:
    """Serves jobs with one engine.

    Args:
        engine: used from ``thread`` alone.
        thread: the engine's own.
        piece: token id -> its bytes.
        config: limits and scheduling.
        cost: what is known of the engine's speed at the start.
    """

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        piece: Callable[[int], bytes],
        config: Config,
        cost: CostModel | None = None,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._piece = piece
        self._limits = config.limits
        self._scheduling = config.scheduling
        self._debug = config.operations.debug
        self.facts: ModelFacts = engine.facts
        self.telemetry = Telemetry()
        self.ledger = Ledger(
            n_sequences=self.facts.n_seq_max,
            n_cells=self.facts.n_ctx,
            cells_per_sequence=self.facts.n_ctx_seq,
        )
        self._eog = frozenset(self.facts.eog_ids)
        self._eog_mask = np.asarray(self.facts.eog_ids, dtype=np.int32)
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._to_free: list[Job] = []
        self._memory = Memory()
        self.cost = cost or CostModel()
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._closed: UmaError | None = None
        self._last_step_ended_s: float | None = None
        self._flight: _Flight | None = None
        self._stopped = False

    # -- asked from outside, between ticks ------------------------------------------------------

    def submit(self, request: Generate, prompt: Prompt, sink: Sink, *, tenant: int = 0) -> Job:
        """Take a request on.  Its events go to ``sink``; ``job.done`` is set after the last of them.

        Args:
            tenant: whose service it counts as.

        Raises:
            UmaError: it cannot be served; see ``admission``.
            QueueFull: too many wait already.
            ShuttingDown: the runner takes no more.
        """
        if self._closed is not None:
            raise self._closed
        max_tokens = admission.tokens_to_generate(request, len(prompt.tokens), self.facts, self._limits)
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        params = SamplingParams(request.temperature, request.top_k, request.top_p, seed)
        job = Job(
            request=request,
            prompt=prompt,
            max_tokens=max_tokens,
            params=params,
            mask=self._eog_mask if request.ignore_eos and len(self._eog_mask) else None,
            sink=sink,
            arrived_at=trio.current_time(),
            slot=Slot(-1, len(prompt.tokens), priority=Priority[request.slo.priority.upper()], tenant=tenant),
            target_tbt_s=self._target_tbt_ms(request) / 1e3,
        )
        self._note_arrival(tenant)
        if self._queue or not self._place(job):
            if len(self._queue) >= self._limits.max_queue:
                raise self._queue_full()
            self._queue.append(job)
        if request.echo:
            self._tell(job, prompt.text, None, echo=True)
        self.wake()
        return job

    def _note_arrival(self, tenant: int) -> None:
        """A tenant that had nothing to wait for must not have saved up service meanwhile."""
        waiting = {job.slot.tenant for job in self.jobs() if job.state is not State.DECODE}
        if tenant not in waiting:
            service = self._memory.service.arrived(tenant, waiting)
            self._memory = attrs.evolve(self._memory, service=service)

    def _target_tbt_ms(self, request: Generate) -> float:
        if request.slo.target_tbt_ms is not None:
            return request.slo.target_tbt_ms
        background = request.slo.priority == "background"
        return self._scheduling.background_tbt_ms if background else self._scheduling.target_tbt_ms

    def _queue_full(self) -> QueueFull:
        """With an estimate of the wait: what requests take on average, for each turn that must come first."""
        error = QueueFull(f"{len(self._queue)} requests wait already")
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
            self._end(job, reason)
            self.wake()

    def wake(self) -> None:
        """Something has changed that the next plan should know."""
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
        return [*self._running.values(), *self._queue]

    def snapshot(self) -> dict[str, Any]:
        """What ``metrics`` answers, less what the daemon adds.  Never waits for a tick."""
        kv = self.ledger.statistics()
        return {
            "model": self.facts.name,
            **self.telemetry.snapshot(),
            "queue_depth": len(self._queue),
            "running": len(self._running),
            "tick_error": round(self.cost.mixed.error, 3),
            "kv": attrs.asdict(kv),
            "sessions_inter_token_ms": {
                job.request.id: round(job.inter_token_ewma_ms, 3)
                for job in self._running.values()
                if job.inter_token_ewma_ms is not None
            },
        }

    # -- the tick -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick until cancelled.

        Raises:
            EngineError: the engine failed and could not be started again.
        """
        try:
            while True:
                deliveries: list[_Delivery] = []
                if self._flight is not None:
                    deliveries = await self._land(self._flight)
                self._flight = self._launch()
                self._deliver(deliveries)
                if self._flight is None:
                    if not self._busy:
                        self._idle.set()
                    await self._wake.wait()
                    self._wake = trio.Event()
                await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            if self._flight is not None:  # a context in use cannot be left
                await self._flight.pending.settled()
            self._stopped = True
            self._idle.set()

    async def _land(self, flight: _Flight) -> list[_Delivery]:
        """Wait for a step and book what it gave; nobody is told yet."""
        try:
            result = await flight.pending.wait()
        except EngineError as error:
            await self._recover(flight, error)
            return []
        now = trio.current_time()
        self._book(flight, result, now)
        deliveries = []
        for job, token in zip(flight.drawing, result.tokens, strict=True):
            if job.state is State.DONE:
                continue  # cancelled, or found its stop string, while this was computed
            if token == NO_DISTRIBUTION:
                self._end(job, DecodeFailed("the model gave no usable logits"))
                continue
            job.state = State.DECODE
            gap_ms = job.sampled(token, now)
            job.slot.pending, job.slot.due_s = 1, now + job.target_tbt_s
            if len(job.tokens) == 1:
                self.telemetry.ttft_ms.add(1e3 * (now - job.arrived_at))
            if gap_ms is not None:
                self.telemetry.inter_token_ms.add(gap_ms)
            self.telemetry.tokens_total += 1
            reason: Reason | None = None
            if token in self._eog:
                reason = "stop"
            elif len(job.tokens) >= job.max_tokens:
                reason = "length"
            if reason is not None:
                self._retire(job)
            deliveries.append(_Delivery(job, token, reason))
        return deliveries

    def _book(self, flight: _Flight, result: StepResult, now: float) -> None:
        self._note_freed(flight.freeing, now - (result.ended_s - result.started_s))
        if not flight.jobs:
            return
        chosen = flight.plan
        self.telemetry.tick(
            n_rows=len(flight.jobs),
            n_prompt_tokens=chosen.work.prompt_tokens,
            decode_ms=result.decode_ms,
            sample_ms=result.sample_ms,
        )
        if self._last_step_ended_s is not None:
            self.telemetry.host_gap_ms.add(1e3 * (result.started_s - self._last_step_ended_s))
        self._last_step_ended_s = result.ended_s
        self.cost = self.cost.observed(chosen.work, result.decode_ms + result.sample_ms)
        if self._debug:
            log.debug(
                "tick",
                streams=chosen.work.decodes,
                prompt_tokens=chosen.work.prompt_tokens,
                context_tokens=chosen.work.context_tokens,
                predicted_ms=round(chosen.predicted_ms, 3),
                decode_ms=round(result.decode_ms, 3),
                sample_ms=round(result.sample_ms, 3),
            )

    def _launch(self) -> _Flight | None:
        """Start the next step, if there is anything to do."""
        freeing = tuple(self._to_free)
        self._to_free.clear()
        removals = tuple(job.seq_id for job in freeing)
        for seq_id in removals:
            self.ledger.release(seq_id)
        self._admit()
        now = trio.current_time()
        streams, prompts = [], []
        for job in self._running.values():
            if not job.sink.has_room:
                job.paused = True
            elif job.state is State.DECODE:
                streams.append(job.slot)
            else:
                prompts.append(job.slot)
        chosen = plan(
            streams,
            prompts,
            self._memory,
            now_s=now,
            cost=self.cost,
            capacity=self.facts.n_batch,
            limits=self._scheduling,
        )
        self._memory = chosen.memory
        if not chosen.streams and not chosen.shares and not removals:
            self._last_step_ended_s = None  # idle time is no gap
            return None
        drawing, jobs, feeds = [], [], []
        for slot in chosen.streams:
            job = self._running[slot.seq_id]
            feeds.append(self._feed(job, 1, job.draw()))
            jobs.append(job)
            drawing.append(job)
        for share in chosen.shares:
            job = self._running[share.seq_id]
            feeds.append(self._feed(job, share.n_tokens, job.draw() if share.ends else None))
            jobs.append(job)
            if share.ends:
                drawing.append(job)
        step = Step(removals, tuple(feeds))
        pending = self._thread.submit(lambda: self._engine.step(step))
        time.sleep(0)  # lets go of the GIL, or the step would begin after the delivery that is to overlap it
        return _Flight(chosen, tuple(jobs), tuple(drawing), freeing, pending)

    def _feed(self, job: Job, n: int, draw: Draw | None) -> Feed:
        """The next ``n`` tokens of ``job``, booked as being in the cache."""
        feed = Feed(job.seq_id, job.n_fed, job.next_tokens(n), draw)
        job.n_fed += n
        job.slot.context = job.n_fed
        job.slot.pending -= n
        self.ledger.use(job.seq_id, n)
        return feed

    def _admit(self) -> None:
        """Give sequences to those that wait: by class, by least-served tenant, in the order of arrival.

        The first in that order is waited for, however large it is, and who waits rises with time: none is
        overtaken for ever.
        """
        service, now = self._memory.service, trio.current_time()
        while self._queue:
            job = min(self._queue, key=lambda job: fairness.rank(job.slot, now - job.arrived_at, service))
            if not self._place(job):
                return
            self._queue.remove(job)

    def _place(self, job: Job) -> bool:
        """Give ``job`` a sequence with all the room that it may need, if there is one."""
        seq_id = self.ledger.reserve(job.cells)
        if seq_id is None:
            return False
        job.seq_id, job.state, job.admitted_at = seq_id, State.PREFILL, trio.current_time()
        job.slot.seq_id = seq_id
        self._running[seq_id] = job
        return True

    def _deliver(self, deliveries: Iterable[_Delivery]) -> None:
        """Text for the clients, while the next step computes."""
        for delivery in deliveries:
            job, token = delivery.job, delivery.token
            if job.state is State.DONE:
                continue
            text = "" if token in self._eog else job.assembler.feed(self._piece(token))
            if job.assembler.matched is not None:
                self._tell(job, text, token)
                self._end(job, "stop")
            elif delivery.reason is not None:
                text += job.assembler.finish()
                if text or token not in self._eog:
                    self._tell(job, text, token)
                self._end(job, delivery.reason)
            else:
                self._tell(job, text, token)

    def _tell(self, job: Job, text: str, token: int | None, *, echo: bool = False) -> None:
        if job.request.stream:
            job.sink.send(Token(id=job.request.id, text=text, token_id=token, echo=echo))
        else:
            job.texts.append(text)

    # -- ends -----------------------------------------------------------------------------------

    def _retire(self, job: Job) -> None:
        """Take ``job`` out of the plans; its sequence is freed with the next step."""
        if job.state is State.QUEUED:
            self._queue.remove(job)
        elif self._running.get(job.seq_id) is job:
            del self._running[job.seq_id]
            self._to_free.append(job)

    def _end(self, job: Job, reason: Reason | UmaError) -> None:
        """Tell the client how it ended, and take it out."""
        self._retire(job)
        if not any(other.slot.tenant == job.slot.tenant for other in self.jobs()):
            self._memory = self._memory.without(job.slot.tenant)
        now = trio.current_time()
        job.state, job.ended_at = State.DONE, now
        if isinstance(reason, UmaError):
            reason.request_id = job.request.id
            job.sink.send(Failure.of(reason, metadata=job.request.metadata))
            self.telemetry.requests[reason.code] += 1
        else:
            job.sink.send(job.eos(reason, now))
            self.telemetry.requests[reason] += 1
            if job.admitted_at is not None:
                self.telemetry.served_ms.add(1e3 * (now - job.admitted_at))
        job.done.set()

    async def _recover(self, flight: _Flight, error: EngineError) -> None:
        """A step failed: its jobs end, the others go on."""
        log.error("a tick failed", error=str(error), fatal=error.fatal, requests=len(flight.jobs))
        for job in flight.jobs:
            if job.state is not State.DONE:
                self._end(job, DecodeFailed(f"llama_decode failed: {error}"))
        self._note_freed(flight.freeing, trio.current_time())
        self._last_step_ended_s = None
        if error.fatal:
            await self._thread.run(self._engine.reset)
            for job in self._running.values():  # they were not in the batch, but their KV is gone
                job.n_fed, job.state = 0, State.PREFILL
                job.slot.context, job.slot.pending = 0, job.pending
                self.ledger.forget(job.seq_id)

    def _note_freed(self, jobs: Iterable[Job], at: float) -> None:
        """``jobs`` have left the KV cache: a step removes before it computes, so ``at`` is its beginning."""
        for job in jobs:
            if job.cancelled_at is not None:
                self.telemetry.cancel_to_free_ms.add(1e3 * (at - job.cancelled_at))

    @property
    def _busy(self) -> bool:
        return bool(self._queue or self._running or self._to_free or self._flight)

    def check_integrity(self) -> None:
        """Sequences, reservations and jobs add up, or AssertionError."""
        self.ledger.check_integrity()
        held = set(self._running) | {job.seq_id for job in self._to_free}
        assert len(held) == self.ledger.statistics().sequences
        assert all(job.seq_id == seq_id for seq_id, job in self._running.items())
        assert all(job.state in (State.PREFILL, State.DECODE) for job in self._running.values())
        assert all(job.state is State.QUEUED for job in self._queue)
