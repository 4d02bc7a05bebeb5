"""The tick: complete, plan, submit, deliver.

One task runs this loop for one model.  An engine computes steps in another process; while it does, the tokens of the
step before become text and go to the clients, so the device never waits for a socket.  Everything that others ask of
the scheduler (submit, cancel, a snapshot) is a plain call between two of its checkpoints, so there are no locks.

Source: docs/ARCHITECTURE.md, "A tick".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import structlog
import trio

from uma_trio.config import MB, Config
from uma_trio.daemon.aici.exchange import ControllerRuntime
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.policy.bisection import CrashBisection
from uma_trio.daemon.policy.cost import CostModel
from uma_trio.daemon.policy.rest import Rest, rest_of
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.policy.view import Priority
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.changes import append_known, check_steering
from uma_trio.daemon.serving.controllers.driver import MAX_WAIT_S, ControllerDriver
from uma_trio.daemon.serving.embedding import EmbeddingQueue, PendingEmbeddings
from uma_trio.daemon.serving.energy_use import EnergyUse
from uma_trio.daemon.serving.explaining import Explainer, SpellEach
from uma_trio.daemon.serving.forecasting import Forecaster
from uma_trio.daemon.serving.in_flight import InFlightSteps
from uma_trio.daemon.serving.new_tokens import NewTokens, TokenToBytes
from uma_trio.daemon.serving.offload import InThread, Offloader
from uma_trio.daemon.serving.output import send_prompt, send_tokens
from uma_trio.daemon.serving.planning import NoStep, StepPlanner
from uma_trio.daemon.serving.principals import Principals
from uma_trio.daemon.serving.recovery import Recovery
from uma_trio.daemon.serving.request import PreparedRequest, adapters_of, make_answers
from uma_trio.daemon.serving.running import RunningSet, cache_for
from uma_trio.daemon.serving.speculation import Speculator
from uma_trio.daemon.serving.stats import Stats, adapters_in_use, backlog_of
from uma_trio.daemon.serving.steering import Steering
from uma_trio.daemon.serving.step import (
    CompletedStep,
    InFlightStep,
    PlannedStep,
    complete_step,
)
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.daemon.store.memory_states import MemoryStates
from uma_trio.engine_link.messages import EngineDied, ModelInfo, Revoked, StepFailed, StepOutput
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.errors import (
    AnswerNotFound,
    KvFull,
    ModelUnavailable,
    QueueFull,
    ShuttingDown,
    UmaError,
)
from uma_trio.processes.energy import EnergyMeter
from uma_trio.processes.machine import free_memory_bytes
from uma_trio.protocol.answers import HealthCheck, SequenceInfo
from uma_trio.protocol.events import Failure
from uma_trio.protocol.usage import Explanation, FinishReason
from uma_trio.telemetry.perf_records import PerfSink

log = structlog.get_logger("uma_trio.serving")

COPY_WAIT_S: Final = 0.005
"""How long a step waits for the next part of a copy.  Memory for some ten megabytes takes less."""


class Scheduler:
    """Serves answers with one engine.

    Args:
        engine: runs the steps; started again when it dies.
        token_to_bytes: of the model's vocabulary.
        config: limits and scheduling.
        cost: what is known of the engine's speed at the start.
        in_thread: runs a blocking call.
        runtime: of controllers; ``None``: requests cannot have one.
        spell_each: the bytes of each of some tokens, control tokens spelled out; ``None``: as ``token_to_bytes``.
        meter: counts energy; ``None``: nothing does.
    """

    def __init__(
        self,
        engine: SupervisedEngine,
        token_to_bytes: TokenToBytes,
        config: Config,
        cost: CostModel | None = None,
        in_thread: InThread = trio.to_thread.run_sync,
        runtime: ControllerRuntime | None = None,
        spell_each: SpellEach | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:
        self.info: ModelInfo = engine.info
        self._engine = engine
        self._token_to_bytes = token_to_bytes
        self._config = config
        self._stats = Stats(self.info, debug=config.operations.debug, replay=config.operations.perf_log_replay)
        self.telemetry = self._stats.telemetry
        self.sinks: list[PerfSink] = self._stats.sinks
        """Who gets a record of each tick and each request; others may join and leave."""
        self.timings = StepTimings(cost or CostModel(), self.info.n_batch)
        self.cache = cache_for(self.info, self.timings, reuse=config.scheduling.prefix_reuse)
        self.offloader = Offloader(
            self.cache,
            self.timings,
            self.wake,
            after_s=config.sessions.offload_after_s,
            in_thread=in_thread,
            memory=MemoryStates(config.scheduling.preempted_max_mb * MB, free_memory_bytes),
        )
        self._running = RunningSet(self.cache, self.offloader, self.telemetry)
        self._principals = Principals(self.answers, lambda: self._embeddings)
        self._waiting = WaitingQueue(self._running, self._principals, config.limits.max_queue)
        self._embeddings = EmbeddingQueue(self.info, config.limits.max_queue, self._principals.ended)
        self._steps = InFlightSteps(engine)
        self._controllers = ControllerDriver(runtime, engine, self._steps, self._running, self._waiting, self)
        self._bisection: CrashBisection[Answer] = CrashBisection()
        """Which answers may run after the engine has crashed."""
        self._speculator = Speculator(self.info, config.scheduling, self.timings, self._bisection)
        self._planner = StepPlanner(
            info=self.info,
            settings=config.scheduling,
            timings=self.timings,
            running=self._running,
            waiting=self._waiting,
            embeddings=self._embeddings,
            controllers=self._controllers,
            principals=self._principals,
            bisection=self._bisection,
            speculator=self._speculator,
        )
        self._forecaster = Forecaster(
            running=self._running,
            waiting=self._waiting,
            timings=self.timings,
            info=self.info,
            settings=config.scheduling,
        )
        self._energy = EnergyUse(meter)
        self._rest = rest_of(config.scheduling.power_limit, counts_energy=meter is not None)
        """Chooses pauses between steps; ``None``: there is no limit of power."""
        self._explainer = Explainer(
            spell_each or (lambda tokens: [token_to_bytes(token) for token in tokens]), self.timings
        )
        self.on_step: Callable[[], None] | None = None
        """Called in every tick, when what the KV cache holds may have changed."""
        self._recovery = Recovery(
            callbacks=self,
            engine=engine,
            steps=self._steps,
            running=self._running,
            offloader=self.offloader,
            embeddings=self._embeddings,
            bisection=self._bisection,
        )
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._has_ended = False
        """``run`` serves nothing any more."""

    # -- called from outside, between ticks -----------------------------------------------------

    def submit(self, prepared: PreparedRequest) -> Sequence[Answer]:
        """Accept a request: all of its answers or none.

        ``answer.done`` is set after the last event of each answer.  If the forecast says that it will not be complete at
        its deadline, it ends with ``DeadlineMissed``, mostly before this returns.

        Returns:
            ``request.n`` answers.  All but the first share the prompt that the first one computes.  With a controller
            it is one, and the list grows with each fork.

        Raises:
            UmaError: it cannot be served; see ``request.make_answers``.
            QueueFull, KvFull, TooManyRequests: too many wait already.
            ShuttingDown, ModelUnavailable: the scheduler accepts no requests.
        """
        request, controlled = prepared.request, prepared.controlled
        try:
            answers, known = self._enter(prepared)
        except UmaError:
            if controlled is not None:
                self._controllers.drop_unused(controlled)
            raise
        if request.echo or request.return_full_text:
            for answer in answers:
                send_prompt(answer)
        if known is not None:
            self._replay(known)
        has_place = any(answer in self._running for answer in answers) or self._running.capacity().has_spare
        if not has_place or answers[0].deadline_at < math.inf:  # otherwise a tick reports, while its prompt is computed
            self._report_forecasts()
        for answer in answers:
            if answer.state is not State.FINISHED:
                self._forecaster.arrived(answer)
        if answers[0].priority is not Priority.BACKGROUND:
            self._steps.interrupt()
        if has_place or self._waiting.preempts_at <= trio.current_time():
            self.wake()
        else:  # without a place it is in no step
            self.end_wait()
        return answers

    def _report_forecasts(self) -> None:
        for answer, error in self._forecaster.report():
            self.finish(answer, error)

    def _replay(self, known: NewTokens) -> None:
        """Send the events of tokens that an earlier daemon has sampled; end the answer if they do."""
        reason = send_tokens(known, self._token_to_bytes)
        if reason is not None:
            self.finish(known.answer, reason)
        else:
            self._speculator.began(known.answer)

    def _enter(self, prepared: PreparedRequest) -> tuple[list[Answer], NewTokens | None]:
        """Accept a request.  Returns its answers, and what its log knows of the first one, if it knows something."""
        if self._recovery.refusal is not None:
            raise self._recovery.refusal
        principal, record = prepared.principal, prepared.record
        self._principals.check_limit(principal, prepared.request.n)
        if prepared.controlled is not None:
            self._controllers.check(prepared.controlled)
        answers = make_answers(prepared, self.info, self._config, saves_states=self.offloader.saves)
        known = append_known(answers[0], record, self._token_to_bytes) if record is not None and record.known else None
        self._principals.arrived(principal)
        try:
            self._waiting.enter(answers)
        except (QueueFull, KvFull) as refusal:
            self.wake()  # some of the answers may have had a place
            refusal.retry_after_ms = self.retry_after_ms()
            raise
        if prepared.controlled is not None:
            answers = self._controllers.add(answers[0], prepared.controlled)
        for answer in answers:
            self._speculator.arrived(answer)
        return answers, known

    def embed(self, pending: PendingEmbeddings) -> None:
        """Accept a request to embed or to rank texts, which the model can.  ``pending.done`` is set after its last event.

        Raises:
            BadRequest, AdapterNotFound: the model has no such adapters.
            QueueFull, TooManyRequests: too many wait already.
            ShuttingDown, ModelUnavailable: the scheduler accepts no requests.
        """
        if self._recovery.refusal is not None:
            raise self._recovery.refusal
        pending.adapters = adapters_of(pending.request, self.info).scales
        self._principals.check_limit(pending.principal, 1)
        self._principals.arrived(pending.principal)
        self._embeddings.add(pending)
        self.wake()

    def retry_after_ms(self) -> int:
        """When a request that was refused may be sent again; see ``Forecaster``."""
        return self._forecaster.retry_after_ms()

    def explain(self, request_id: str, principal: str) -> Explanation:
        """Why tokens of the prompt of a request of ``principal`` were computed again.

        Raises:
            AnswerNotFound: nothing is known of it.
        """
        return self._explainer.find(request_id, principal, self.answers())

    def forget(self, tokens: TokenIds, principal: str) -> None:
        """Forget the prompts of ``principal`` that are a prefix of ``tokens``."""
        self._explainer.forget(tokens, principal)

    def cancel_embedding(self, pending: PendingEmbeddings, reason: UmaError | None) -> None:
        """End ``pending`` now, if it has not ended: with an error, or as cancelled."""
        if not pending.done.is_set():
            self._embeddings.end(pending, reason)
            self.wake()

    def cancel(self, answer: Answer, reason: FinishReason | UmaError = "cancelled") -> None:
        """End ``answer`` now, if it has not ended.

        Its last event is sent at once.  Its KV cells are given back at once too, unless a step in flight computes it: then at the
        end of that step.  Tokens that stay for others, those of a session, do not wait for a step that has begun.
        """
        if not answer.done.is_set():
            answer.times.cancelled_at = trio.current_time()
            self._steps.revoke_ahead(answer)
            self.wake()
            self.finish(answer, reason)

    def steer(self, answer: Answer, steering: Steering) -> None:
        """Change ``answer`` when the next step that samples it is complete; ``steering.done`` is set then, or at its end.

        Raises:
            BadRequest: it cannot be changed so.
        """
        rows = [row for step in self._steps if (row := step.row_of(answer)) is not None]
        check_steering(answer, steering, n_sampled=sum([row.n_samples for row in rows]))
        answer.bounds.steering = steering
        self._steps.revoke_ahead(answer)
        self.wake()

    def wake(self) -> None:
        """Something has changed that the next plan should know: ends the wait for work.

        A step that runs ahead was planned without knowing it.  A short one is let run, but no step begins another pass.
        """
        self._steps.shorten()
        self.end_wait()

    def end_wait(self) -> None:
        """There is work: ends the wait for it."""
        self._wake.set()

    @property
    def n_threads(self) -> int:
        """Threads that steps are computed with."""
        return self._engine.n_threads

    def set_threads(self, n_threads: int) -> None:
        """Have steps computed with this many threads, because other engines compute as well."""
        before = self.n_threads
        if n_threads != before:
            self._engine.set_threads(n_threads)
            self.timings.change_threads(before, n_threads)

    def close(self, reason: UmaError | None = None) -> None:
        """Accept no more requests; those that were accepted go on."""
        self._recovery.refusal = reason or ShuttingDown()

    def stop(self) -> None:
        """End all requests and the engine at once; ``run`` serves nothing afterwards."""
        self.close()
        self._recovery.is_stopping = True
        self._engine.link.kill()

    async def wait_idle(self) -> None:
        """Wait until no request is left and all KV cells are freed, or ``run`` has ended."""
        while self._is_busy and not self._has_ended:
            self._idle = trio.Event()
            await self._idle.wait()

    def answers(self) -> Iterator[Answer]:
        """All that have not finished: running ones, then waiting ones."""
        return (answer for answer in chain(self._running, self._waiting) if answer.state is not State.FINISHED)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics.  Never waits for a tick."""
        running = [answer for answer in self._running if answer.state is not State.FINISHED]
        return {
            **self._stats.snapshot(
                running, self.cache, waiting=len(self._waiting), tick_error=self.timings.cost.mixed.error
            ),
            **self._energy.snapshot(),
            "prefill_backlog_tokens": backlog_of(running, self._waiting),
            "adapters": adapters_in_use(self.info, running, self._waiting),
            "preempted_bytes": self.offloader.parked_bytes,
            "kv_offload": self.offloader.snapshot(),
            "embeddings": self._embeddings.snapshot(),
            "controllers": self._controllers.snapshot(),
            "engine": self._engine.snapshot(),
        }

    def describe_sequences(self) -> list[SequenceInfo]:
        """What the KV cache holds.  Never waits for a tick."""
        return self._running.describe()

    def health(self) -> list[HealthCheck]:
        """Whether another request could be served now.  Never waits for a tick."""
        link = self._engine.link
        if isinstance(self._recovery.refusal, ModelUnavailable):
            engine = HealthCheck(name="engine", ok=False, reason=str(self._recovery.refusal))
        elif not link.is_usable:
            engine = HealthCheck(name="engine", ok=False, reason=f"restarting: {link.reason or 'it has ended'}")
        else:
            engine = HealthCheck(name="engine", ok=True, reason="running")
        if self.info.purpose != "generate":
            return [engine, self._embeddings.health()]
        return [engine, *self._waiting.health()]

    # -- the tick -------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tick until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.offloader.run)
                nursery.start_soon(self._engine.watch)
                nursery.start_soon(self._energy.run)
                task_status.started()
                while True:
                    await self._tick()
        finally:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._idle.set()

    async def _tick(self) -> None:
        """Complete what the engine has answered, keep it busy, then serve the clients.

        If the next step ran ahead and has begun, the one after it runs ahead in turn, before the clients are served: a step may
        take no longer than that.  Urgent tokens go first.
        """
        completed = await self._complete()
        if self._controllers:
            await self._ask_controllers(completed)
        if self._rest is not None:  # nobody waits for a text while the device rests
            for step in completed:
                self._deliver(step)
            await self._pause(self._rest, completed)
            completed = []
        if self._steps.begun is None:
            await self._advance_copies()
            self._admit(may_preempt=True)
            self._submit(self._planner.next_step())
        elif not any(new.is_urgent for step in completed for new in step.new_tokens):
            self._run_ahead()
        for step in completed:
            self._deliver(step)
        self._report_forecasts()
        if self.on_step is not None:
            self.on_step()
        if self._steps.begun is not None:
            self._run_ahead()
        elif not (self._controllers and self._controllers.has_admitted):
            self._stats.end_of_work()
            if self._is_busy:
                await self._wait_for_work()
            else:
                self._idle.set()
                since = trio.current_time()
                await self._wait_for_work()
                self._stats.record_idle(1e3 * (trio.current_time() - since))
                now = trio.current_time()
                self._energy.begin(now)
                if self._rest is not None:
                    self._rest.begin(now)

    def _run_ahead(self) -> None:
        """Submit the step after the one that computes, unless one is there."""
        step = self._steps.begun
        if step is None or self._steps.ahead is not None or self._rest is not None or self._planner.obstacle(step):
            return
        self._admit(may_preempt=False)
        self._submit(self._planner.step_ahead(step))

    def _admit(self, *, may_preempt: bool) -> None:
        """Give places to answers that wait, as the queue decides.

        Args:
            may_preempt: no step is in flight, so others can lose their places.
        """
        for answer in self._waiting.admit(may_preempt=may_preempt):
            if answer.control.exists:
                self._controllers.preempted(answer)
            self._speculator.preempted(answer)
            self._bisection.discard(answer)

    def _preempt(self) -> None:
        """Let answers lose their places whose turn has ended, or whose copies have; no step is in flight."""
        if self._running.is_copying or self._waiting.preempts_at <= trio.current_time():
            self._admit(may_preempt=True)

    async def _advance_copies(self) -> None:
        """Wait a moment until the next step can have the copy that a request waits for, or until the copy has ended.

        Otherwise streams would be computed before and after each part of the copy, and the request would wait for them.
        """
        until = trio.current_time() + COPY_WAIT_S
        self._preempt()
        while self._running.is_copying and not self.offloader.has_transfers and trio.current_time() < until:
            with trio.move_on_at(until):
                await self._wake.wait()
            self._wake = trio.Event()
            self._preempt()

    async def _pause(self, rest: Rest, completed: Sequence[CompletedStep]) -> None:
        """Let the device rest after the steps ``completed``, of which none is in flight."""
        if not completed:
            return
        now = trio.current_time()
        busy_s = sum([step.duration_ms for step in completed]) / 1e3
        await trio.sleep(rest.after_tick(busy_s, now, self._energy.watts))

    async def _ask_controllers(self, completed: list[CompletedStep]) -> None:
        """Tell controllers what ``completed`` sampled, and wait a moment for what they say about the next step.

        Clients without a controller get their tokens later, as always.
        """
        for step in completed:
            self._deliver_tokens(step, controlled=True)
        if self._steps.begun is not None:
            self._controllers.start_next_exchange()
            return
        until = trio.current_time() + MAX_WAIT_S
        self._controllers.advance()
        while await self._controllers.wait_for_exchange(until):
            self._controllers.advance()
        self._controllers.permit()

    # 1. complete

    async def _complete(self) -> list[CompletedStep]:
        """Wait for the engine, and note what the next plan must know; clients get the tokens later."""
        step = self._steps.begun
        if step is None:
            return []
        completed: list[CompletedStep] = []
        failure: str | None = None
        try:
            for reply in await self._engine.receive(step.planned.plan.predicted_ms / 1e3):
                step = self._steps.begun
                if step is None or reply.number != step.number:
                    continue  # the step ran ahead of one that failed
                match reply:
                    case StepOutput():
                        completed.append(self._complete_step(step, reply))
                    case Revoked():
                        self._undo_revoked(step, began=reply.began)
                    case StepFailed():
                        failure = reply.reason
                        break
        except EngineDied as death:
            failure = str(death)
        if failure is None:
            return completed
        for done in completed:  # what was computed before the failure does not wait for the restart
            self._deliver_tokens(done, controlled=True)
            self._deliver(done)
        await self._recover(failure)
        return []

    def _complete_step(self, step: InFlightStep, output: StepOutput) -> CompletedStep:
        now = trio.current_time()
        self._steps.next_begins(now)
        planned, ahead = step.planned, self._steps.begun
        if planned.transfer is not None:
            self.offloader.complete(planned.transfer, output)
        if planned.embedding is not None:
            self._embeddings.complete(planned.embedding, output)
        for answer in step.rows:
            alone, shared = answer.n_steps
            n = output.n_passes
            answer.n_steps = (alone + n, shared) if len(step.rows) == 1 else (alone, shared + n)
        self._energy.step(step.rows, now)
        new_tokens = complete_step(
            step,
            output,
            self.cache,
            now,
            can_truncate=self.info.can_truncate,
            token_to_bytes=self._token_to_bytes,
            ahead=ahead,
        )
        for new in new_tokens:
            if ahead is not None and (new.reason is not None or not new.tokens):
                ahead.drop(new.answer)
            if new.reason is not None:  # so the next plan may use its cells; its client gets the tokens later
                self._stop_computing(new.answer, new.reason)
        self.free_finished(step)
        completed = CompletedStep(step, output, new_tokens, now)
        self._planner.completed(completed)
        if step.planned.gives_way:
            self._steps.lost_time.completed(completed.duration_ms)
        if completed.is_outlier:
            self._learn(completed)
        return completed

    def _learn(self, completed: CompletedStep) -> None:
        """Learn from the duration of a step: at once if the next plan should know, otherwise while that step computes."""
        step = completed.step
        if step.rows and not any(row.dropped for row in step.rows.values()):
            self.timings.record_step(completed.work, completed.pass_ms, is_outlier=completed.is_outlier)

    def _undo_revoked(self, step: InFlightStep, *, began: bool) -> None:
        """``step`` was withdrawn; if it had begun, its KV operations are done."""
        now = trio.current_time()
        self._steps.next_begins(now)
        self._planner.undo(step.planned, began=began)
        if began:
            self._steps.lost_time.interrupted(1e3 * (now - step.began_at))
            self.telemetry.interrupted_steps_total += 1
            self._stats.end_of_work()
        self.free_finished(step)

    # 2. submit what is planned

    def _submit(self, planned: PlannedStep | NoStep) -> None:
        """Send the next step to the engine, if there is one.  The engine computes it after the step in flight."""
        if isinstance(planned, NoStep):
            return
        step, message = self._steps.add(planned)
        for answer in step.rows:
            if (grammar := answer.sampling.grammar) is not None:
                self._engine.link.define_grammar(grammar.key, grammar.source)
        if self._controllers:
            self._controllers.attach_masks(step, message)
        self._engine.link.submit(message)
        if self._controllers:
            self._controllers.request_masks(step)

    # 3. deliver, while the step computes

    def _deliver(self, completed: CompletedStep) -> None:
        if not completed.is_outlier:
            self._learn(completed)
        gap_ms = self._stats.record_step(completed, waiting=len(self._waiting), running=len(self._running))
        if gap_ms is not None:
            self.timings.record_gap(gap_ms)
        if completed.step.planned.plan.chunks:
            for answer, row in completed.step.rows.items():
                if not answer.done.is_set() and row.end <= len(answer.prompt.tokens):
                    answer.report_prefill(row.end)
        self._deliver_tokens(completed, controlled=False)

    def _deliver_tokens(self, completed: CompletedStep, *, controlled: bool) -> None:
        """Send the new tokens of answers with a controller, or of all others."""
        for new in completed.new_tokens:
            if new.answer.control.exists is not controlled:
                continue
            if not new.answer.done.is_set():  # cancelled by what another answer's delivery set off
                self.deliver(new, completed.at)

    def deliver(self, new: NewTokens, at: float) -> None:
        """Send tokens that an answer got at ``at``, and end it if they do."""
        if new.tokens:
            self._stats.record_tokens(new, at)
            if new.answer.place.was_preempted:
                new.answer.place.note_token(at)
            if not new.n_before:
                self._speculator.began(new.answer)
        reason = send_tokens(new, self._token_to_bytes)
        if new.answer.record is not None:
            new.answer.record.add(new.tokens, new.answer.sampling.params.mu, new.changes)
        if reason is not None:
            self.finish(new.answer, reason)

    # -- the end of an answer ------------------------------------------------------------------

    def finish(self, answer: Answer, reason: FinishReason | UmaError) -> None:
        """End ``answer``, unless it has ended; all ends come here.

        First no plan has it any more, then others forget it, then its client gets the last event.
        """
        if answer.done.is_set():  # by what the end of another one set off
            return
        self._stop_computing(answer, reason)
        now = answer.times.ended_at = trio.current_time()
        if answer.bounds.steering is not None:
            answer.bounds.steering.end(AnswerNotFound(f"{answer.request.id!r} ended before it was changed"))
        self._principals.ended(answer.principal)
        if answer.control.exists:
            self._controllers.ended(answer)
        if isinstance(reason, UmaError):
            reason.request_id = answer.request.id
            answer.sink.send(Failure.of(reason, metadata=answer.request.metadata, index=answer.index))
        else:
            explanation = self._explainer.of(answer) if answer.request.explain else None
            answer.sink.send(answer.eos(reason, now, explanation))
        self._explainer.ended(answer)
        self._stats.record_end(answer, reason, now)
        self._forecaster.ended(answer, reason)
        self._bisection.discard(answer)
        self._speculator.ended(answer)
        answer.done.set()

    def _stop_computing(self, answer: Answer, reason: FinishReason | UmaError) -> None:
        """Take ``answer`` out of the plans, and give its cells back: the first part of its end.

        Where its tokens end it, the next plan comes between this and the rest, which follows these tokens.
        """
        if answer.state is State.FINISHED:
            return
        was_waiting, answer.state = answer.state is State.WAITING, State.FINISHED
        if isinstance(reason, UmaError):
            answer.keep_computed = False
        if was_waiting:
            self._waiting.remove(answer)
        else:
            self._free(answer)

    def free_finished(self, step: InFlightStep, *, failed: bool = False) -> None:
        """Give the cells of answers back that finished while ``step`` was in flight."""
        for answer in step.rows:
            if answer.state is State.FINISHED:
                answer.keep_computed = answer.keep_computed and not failed
                self._free(answer)

    def _free(self, answer: Answer) -> None:
        """Give the cells of a finished answer back, unless it has none or a step in flight still writes to them.

        Tokens that stay for others are given back at once, as the step that has begun will leave them: the next
        request may come before that step is complete.
        """
        if answer.allocation is None:
            return
        cancelled_at = answer.times.cancelled_at
        # a session goes on from what its client has seen, also of an answer that was cancelled
        keep = answer.keep_computed and (cancelled_at is None or (answer.durable and bool(answer.tokens)))
        computing = [step for step in self._steps if step.row_of(answer) is not None]
        if keep and computing == [self._steps.begun] and not computing[0].revoked:
            self.cache.advance(answer.allocation, computing[0].rows[answer].end)
        elif computing:
            return
        self._running.release(answer, keep=keep)
        if cancelled_at is not None and not keep:
            self.telemetry.cancel_to_free_ms.add(1e3 * (trio.current_time() - cancelled_at))

    # -- waiting, for the engine and for work ---------------------------------------------------

    async def _recover(self, reason: str) -> None:
        """The engine has failed: wait until it is there again.  Never returns after ``stop``."""
        self._recovery.take_back(reason)
        self._stats.end_of_work()
        if self._recovery.is_stopping:
            self._recovery.fail_everything(ShuttingDown())
            self._end()
            await trio.sleep_forever()
        await self._recovery.restart_engine()

    async def _wait_for_work(self) -> None:
        async with trio.open_nursery() as nursery:

            async def wake_when_engine_ends() -> None:
                await self._engine.link.ended.wait()
                self._wake.set()

            nursery.start_soon(wake_when_engine_ends)
            with trio.move_on_at(min(self._controllers.ask_at, self._waiting.preempts_at)):
                await self._wake.wait()
            nursery.cancel_scope.cancel()
        self._wake = trio.Event()
        if self._engine.link.ended.is_set():
            await self._recover(self._engine.link.reason)

    # -- integrity ------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting or self._running or self._embeddings or self.cache.has_ops or self._steps.begun)

    def check_integrity(self) -> None:
        """Raise AssertionError unless answers, reservations and steps add up."""
        self._running.check_integrity()
        assert all(answer.state is State.WAITING for answer in self._waiting)
