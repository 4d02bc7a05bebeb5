"""Controllers in the tick: what is asked of their runtime, and what follows from its answers.

One exchange with the runtime is under way at a time.  ``post_pre`` ends a step of all controlled sequences and begins the
next one; ``mid`` asks for the masks of those that sample, while the engine computes their logits.  Sequences without a
controller wait for neither.

Source: docs/AICI.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from itertools import chain
from typing import Any, Final, Protocol

import trio

from uma_trio.aici.exchange import ControllerRuntime, Exchange, MidResults, PostPreResults
from uma_trio.aici.messages import MidOp, PostOp, PreOp, PreResult, SequenceResult
from uma_trio.engine.messages import StepInput, SubmittedStep
from uma_trio.engine.supervisor import SupervisedEngine
from uma_trio.errors import ControllerFailed, ControllerUnavailable, KvFull, UmaError
from uma_trio.protocol.controllers import Fork
from uma_trio.protocol.messages import FinishReason
from uma_trio.serving.control import Control, ControlledRequest, Phase
from uma_trio.serving.output import send_controller_output, send_rest
from uma_trio.serving.queue import RunningSet
from uma_trio.serving.sequence import Sequence, State
from uma_trio.serving.step import InFlightStep, NewTokens, append_forced, splice
from uma_trio.telemetry.metrics import RecentValues

MAX_WAIT_S: Final = 0.002
"""A plan waits so long for an exchange.  After one that took longer, plans do not wait until one was quick again."""

SHORT_MASK_TIMEOUT_MS: Final = 2.0
"""Masks may come so long after the logits, if sequences without a controller are in the step."""

ASK_AGAIN_S: Final = 0.01
"""Suspended sequences are asked again after this time, if nothing else happens."""

MAX_DEADLOCKED: Final = 3
"""Exchanges in a row in which all sequences of a request may be suspended."""

MAX_ERROR_CHARACTERS: Final = 2000


class Serving(Protocol):
    """What the scheduler does for controlled sequences."""

    def deliver(self, new: NewTokens, at: float) -> None:
        """Send new tokens, and end the sequence if they do."""

    def finish(self, sequence: Sequence, reason: FinishReason | UmaError) -> None:
        """End a sequence."""

    def wake(self) -> None:
        """Something has changed that the next plan should know."""

    def look(self) -> None:
        """End the wait for work, if there is none."""


class Controllers:
    """The controlled sequences of one scheduler.

    Args:
        runtime: runs the controllers; ``None``: there are none.
        engine: computes the steps.
    """

    def __init__(
        self, runtime: ControllerRuntime | None, engine: SupervisedEngine, running: RunningSet, serving: Serving
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._running = running
        self._serving = serving
        self._live: dict[int, Sequence] = {}
        """Sequences by the ids under which the runtime knows them, or will."""
        self._answers: dict[ControlledRequest, list[Sequence]] = {}
        """All sequences of the requests that have live ones; the lists grow with each fork."""
        self._freed: list[int] = []
        """Ids that the runtime has to forget."""
        self._last_id = 0
        self._pending = False
        """An exchange is under way."""
        self._exchange: Exchange[PostPreResults] | Exchange[MidResults] | None = None
        """The last one."""
        self._sent_at = -math.inf
        self._is_slow = False
        """The last exchange took longer than a plan waits."""
        self._step: InFlightStep | None = None
        """The step in flight that samples controlled sequences."""
        self._post_pre_ms, self._mid_ms = RecentValues(), RecentValues()
        """Time from asking until the answer was there."""
        self._skipped = 0
        """Masks that were not there in time."""
        self._fork_that_waits: tuple[Sequence, int] | None = None
        """There was no room for it when the cache was as it is."""
        if runtime is not None:
            runtime.on_change = self._runtime_changed

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._live or self._freed)

    def snapshot(self) -> dict[str, Any] | None:
        """Numbers for the metrics; ``None`` without a runtime."""
        if self._runtime is None:
            return None
        post_pre_p50, post_pre_p99 = self._post_pre_ms.percentiles(50, 99)
        mid_p50, mid_p99 = self._mid_ms.percentiles(50, 99)
        return {
            "sequences": len(self._live),
            "post_pre_p50_ms": post_pre_p50,
            "post_pre_p99_ms": post_pre_p99,
            "mid_p50_ms": mid_p50,
            "mid_p99_ms": mid_p99,
            "skipped_total": self._skipped,
            **self._runtime.snapshot(),
        }

    # -- the life of a sequence -----------------------------------------------------------------

    def check(self, request: ControlledRequest) -> None:
        """Raise ControllerUnavailable unless the runtime that has the controller of ``request`` still runs."""
        if not self._is_current(request):
            raise ControllerUnavailable("the runtime of controllers has ended")

    def add(self, sequence: Sequence, request: ControlledRequest) -> list[Sequence]:
        """Steer ``sequence``, the first of ``request``; returns its sequences, a list that grows with each fork."""
        sequence.index, sequence.control = 0, self._new_control(request)
        self._answers[request] = [sequence]
        self._live[sequence.control.id] = sequence
        return self._answers[request]

    def _new_control(self, request: ControlledRequest) -> Control:
        self._last_id += 1
        return Control(request=request, id=self._last_id)

    def ended(self, sequence: Sequence) -> None:
        """``sequence`` has ended, whatever the reason was."""
        control = _control(sequence)
        del self._live[control.id]
        if control.phase is not Phase.NEW and self._is_current(control.request):
            self._freed.append(control.id)
        if all(other.state is State.FINISHED for other in self._answers[control.request]):
            del self._answers[control.request]
        if self._fork_that_waits is not None and self._fork_that_waits[0] is sequence:
            self._let_wait(None)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._serving.finish(sequence, ControllerFailed(reason[-MAX_ERROR_CHARACTERS:]))

    def _is_current(self, request: ControlledRequest) -> bool:
        runtime = self._runtime
        return runtime is not None and runtime.is_usable and runtime.generation == request.generation

    def _runtime_changed(self) -> None:
        """End the sequences whose controllers have died with their runtime."""
        assert self._runtime is not None
        lost = [each for each in self._live.values() if not self._is_current(_control(each).request)]
        for sequence in lost:
            if sequence.state is not State.FINISHED:  # ended by what another one's end set off
                reason = self._runtime.reason or "it was restarted"
                self._serving.finish(sequence, ControllerUnavailable(f"the runtime of controllers has ended: {reason}"))
        if lost:
            self._freed.clear()
            self._serving.wake()

    # -- called by the tick ---------------------------------------------------------------------

    def step_completed(self, step: InFlightStep) -> None:
        """The tokens of ``step`` are counted and sent; tell their controllers."""
        if self._step is step:
            self._step = None
        self._advance()

    def steps_lost(self) -> None:
        """The engine has died, with all steps in flight."""
        lost, self._step = self._step, None
        for sequence in lost.rows if lost is not None else ():
            if sequence.control is not None and sequence.control.splice is not None:
                self._splice(sequence)

    async def settle(self) -> None:
        """Bring controlled sequences as far as they come in a moment; no step is in flight."""
        self._advance()
        if not self._is_slow:
            until = trio.current_time() + MAX_WAIT_S
            while self._pending and self._exchange is not None and trio.current_time() < until:
                await self._exchange.wait(until - trio.current_time())
        self._permit()

    def claim(self, step: InFlightStep, message: SubmittedStep) -> list[Sequence]:
        """Give the samples of controlled sequences in a step that is not sent yet the rows of their masks.

        Returns:
            The sequences whose masks are to be asked for with ``step_sent``.
        """
        inputs = chain.from_iterable(message.calls)
        sampling = [
            (sequence, each)
            for (sequence, row), each in zip(step.rows.items(), inputs, strict=True)
            if sequence.control is not None and row.n_samples and isinstance(each, StepInput)
        ]
        if not sampling:
            return []
        assert self._runtime is not None
        assert self._runtime.masks is not None
        self._step = step
        self._engine.link.attach_masks(self._runtime.masks)
        if any(sequence.control is None for sequence in step.rows) and not any(
            sequence.sampling.grammar for sequence in step.rows
        ):
            message.mask_timeout_ms = SHORT_MASK_TIMEOUT_MS
        asked = []
        for n, (sequence, each) in enumerate(sampling):
            control = _control(sequence)
            if control.mask_row is None:
                asked.append(sequence)
            each.samples[0].late_mask = n if control.mask_row is None else control.mask_row
        return asked

    def step_sent(self, step: InFlightStep, asked: Items[Sequence]) -> None:
        """``step`` is on its way to the engine: ask for the masks of ``asked``, or say that all are there."""
        if self._step is not step:
            return
        if asked:
            self._ask_mid(asked)
        else:
            self._engine.link.masks_ready(step.number)

    def holds_back(self, step: InFlightStep) -> bool:
        """Whether no step may run ahead of ``step``, because that would delay a controlled sequence."""
        return self._step is step or any(self._can_go_on(sequence) for sequence in self._live.values())

    def _can_go_on(self, sequence: Sequence) -> bool:
        if sequence.allocation is None or not sequence.sink.has_room:
            return False
        if sequence.n_known - 1 > sequence.n_computed:
            return not sequence.is_blocked
        phase = _control(sequence).phase
        return phase in (Phase.READY, Phase.ANSWERED) or (phase is Phase.FORK and self._may_fork(sequence))

    @property
    def ask_at(self) -> float:
        """When suspended sequences must be asked again, on trio's clock."""
        if self._pending or not any(self._in_phase(Phase.SUSPENDED)):
            return math.inf
        return self._sent_at + ASK_AGAIN_S

    # -- what is asked --------------------------------------------------------------------------

    def _in_phase(self, *phases: Phase) -> list[Sequence]:
        return [each for each in self._live.values() if _control(each).phase in phases]

    def _advance(self) -> None:
        """Ask the runtime what can be asked now.

        Nothing is asked between a mask and the token that comes of it: ``pre`` comes after ``post``, and the masks of a
        step stay where they are until the engine has read them.
        """
        if self._pending or not self or self._step is not None:
            return
        if any(each.sink.has_room for each in self._in_phase(Phase.ANSWERED)):
            return  # the next step has their masks
        if self._wants_post_pre():
            self._ask_post_pre()
        elif not self._place_forks():
            ready = [each for each in self._in_phase(Phase.READY) if self._can_go_on(each) and _is_prefilled(each)]
            if any(_control(each).asks_ahead for each in ready):
                self._ask_mid(ready)

    def _wants_post_pre(self) -> bool:
        if self._in_phase(Phase.REPORT) or any(each.allocation for each in self._in_phase(Phase.NEW)):
            return True
        if self._in_phase(Phase.SUSPENDED) and trio.current_time() >= self._sent_at + ASK_AGAIN_S:
            return True
        return bool(self._freed) and not self._in_phase(Phase.READY, Phase.FORK)

    def _ask_post_pre(self) -> None:
        assert self._runtime is not None
        post: list[PostOp] = []
        pre: list[PreOp] = []
        for sequence in self._live.values():
            control = _control(sequence)
            if control.report is not None:
                post.append(control.report)
                control.report = None
            elif control.phase is Phase.NEW and sequence.allocation is not None:
                pre.append(PreOp(control.id, control.request.name))
            else:
                continue
            control.phase = Phase.ASKED
        freed, self._freed = self._freed, []
        self._drop_masks()
        exchange = self._runtime.post_pre(post, pre, freed)

        def take() -> None:
            self._is_slow = self._age_s > MAX_WAIT_S
            self._take_post_pre(exchange)

        self._send(exchange, take, self._post_pre_ms)

    def _ask_mid(self, asked: Items[Sequence]) -> None:
        assert self._runtime is not None
        self._drop_masks()
        ops = []
        for sequence in asked:
            control = _control(sequence)
            ops.append(MidOp(control.id, control.clone_of))
            control.phase, control.clone_of = Phase.SAMPLING, None
        exchange = self._runtime.mid(ops)
        is_ahead = self._step is None

        def take() -> None:
            if is_ahead:
                self._is_slow = self._age_s > MAX_WAIT_S
                for sequence in asked:
                    _control(sequence).asks_ahead = self._is_slow
            self._take_mid(exchange, {op.id: row for row, op in enumerate(ops)})

        self._send(exchange, take, self._mid_ms)

    def _drop_masks(self) -> None:
        """Forget masks that no step has used: their clients do not read, and others go on."""
        for sequence in self._in_phase(Phase.ANSWERED):
            _control(sequence).clear_mask()
            _control(sequence).phase = Phase.READY

    @property
    def _age_s(self) -> float:
        """Time since the last exchange was begun."""
        return trio.current_time() - self._sent_at

    def _send(
        self,
        exchange: Exchange[PostPreResults] | Exchange[MidResults],
        take: Callable[[], None],
        duration_ms: RecentValues,
    ) -> None:
        self._pending, self._exchange, self._sent_at = True, exchange, trio.current_time()

        def done() -> None:
            self._pending = False
            if exchange.failure:
                self._exchange_failed(exchange.failure)
            else:
                duration_ms.add(1e3 * self._age_s)
                take()
            self._advance()
            if any(self._can_go_on(sequence) for sequence in self._live.values()):
                self._serving.wake()
            else:
                self._serving.look()

        exchange.when_done(done)

    def _exchange_failed(self, failure: str) -> None:
        for sequence in [*self._live.values()]:
            if sequence.state is not State.FINISHED and _control(sequence).phase is not Phase.NEW:
                self._serving.finish(
                    sequence, ControllerUnavailable(f"the runtime of controllers has ended: {failure}")
                )

    # -- what follows from answers --------------------------------------------------------------

    def _take_post_pre(self, exchange: Exchange[PostPreResults]) -> None:
        assert exchange.answer is not None
        for id, posted in exchange.answer.post.items():
            sequence = self._said(id, posted)
            if sequence is not None and posted.result is not None and posted.result.stop:
                self._stop(sequence)
        for id, found in exchange.answer.pre.items():
            sequence = self._said(id, found)
            if sequence is not None and found.result is not None:
                self._begin(sequence, found.result)
        for sequence in self._in_phase(Phase.ASKED):
            self._fail(sequence, "the runtime of controllers has not answered for this sequence")
        self._find_deadlocks()

    def _said(self, id: int, found: SequenceResult[Any]) -> Sequence | None:
        """Pass on what a controller has to say; returns its sequence, unless that has ended."""
        sequence = self._live.get(id)
        if sequence is None:
            return None
        send_controller_output(sequence, found)
        if found.error:
            self._fail(sequence, found.error)
            return None
        return sequence

    def _begin(self, sequence: Sequence, result: PreResult) -> None:
        """Begin a step of ``sequence`` as its controller wants it."""
        control = _control(sequence)
        if result.ff_tokens:
            self._serving.deliver(append_forced(sequence, result.ff_tokens), trio.current_time())
            if sequence.state is State.FINISHED:
                return
        control.n_forks = result.num_forks
        if result.num_forks == 0:
            self._stop(sequence)
        elif result.suspend:
            control.phase = Phase.SUSPENDED
        elif result.num_forks > 1:
            control.phase = Phase.FORK
        else:
            control.phase = Phase.READY

    def _stop(self, sequence: Sequence) -> None:
        send_rest(sequence)
        self._serving.finish(sequence, "stop")

    def _find_deadlocks(self) -> None:
        """End requests that wait for nobody but themselves."""
        for request, answers in [*self._answers.items()]:
            live = [each for each in answers if each.state is not State.FINISHED]
            suspended = all(_control(each).phase is Phase.SUSPENDED for each in live)
            request.n_deadlocked = request.n_deadlocked + 1 if suspended else 0
            if request.n_deadlocked > MAX_DEADLOCKED:
                for sequence in live:
                    self._serving.finish(sequence, "deadlock")

    def _take_mid(self, exchange: Exchange[MidResults], rows: Mapping[int, int]) -> None:
        assert exchange.answer is not None
        missing = []
        for id, found in exchange.answer.items():
            sequence = self._said(id, found)
            if sequence is None:
                missing.append(rows[id])
                continue
            control = _control(sequence)
            if found.skipped is True:
                control.phase = Phase.READY
                self._skipped += 1
                missing.append(rows[id])
            elif found.result is None:
                control.phase, control.mask_row = Phase.ANSWERED, rows[id]
            else:
                control.phase, control.splice = Phase.ANSWERED, found.result
                if self._step is None or self._step.row_of(sequence) is None:
                    self._splice(sequence)
        if self._step is not None:
            self._engine.link.masks_ready(self._step.number, missing)

    def _splice(self, sequence: Sequence) -> None:
        """Do what the controller said in place of sampling; no step in flight samples ``sequence``."""
        new = splice(sequence, self._running.cache)
        self._serving.deliver(new, trio.current_time())

    # -- what may be in the next step -----------------------------------------------------------

    def _permit(self) -> None:
        """Decide which sequences may sample in the next step: those that have a mask, or all that can ask for one.

        The rows of masks are written anew by each ``mid``, so both cannot be in one step.
        """
        if not all(_is_prefilled(each) for each in self._in_phase(Phase.ANSWERED)):  # the engine was restarted
            self._drop_masks()
        have_mask = any(each.sink.has_room for each in self._in_phase(Phase.ANSWERED))
        for sequence in self._in_phase(Phase.READY, Phase.ANSWERED):
            control = _control(sequence)
            may_ask = not (have_mask or self._pending or control.asks_ahead)
            control.is_permitted = control.phase is Phase.ANSWERED or may_ask

    # -- forks ----------------------------------------------------------------------------------

    def _may_fork(self, sequence: Sequence) -> bool:
        return self._fork_that_waits is None or self._fork_that_waits[1] != self._running.cache.changes

    def _let_wait(self, sequence: Sequence | None) -> None:
        """Keep all room that becomes free for the forks of ``sequence``."""
        self._fork_that_waits = None if sequence is None else (sequence, self._running.cache.changes)
        self._running.keeps_room = sequence is not None

    def _place_forks(self) -> bool:
        """Fork the first sequence that wants it, if there is room, and ask for the masks of its forks.

        Returns:
            Whether there is one now.
        """
        for sequence in self._in_phase(Phase.FORK):
            if not _is_prefilled(sequence) or not sequence.sink.has_room:
                continue
            if not self._may_fork(sequence):
                return False
            control = _control(sequence)
            n = control.n_forks - 1
            if (impossible := self._running.why_no_fork(sequence, n)) is not None:
                self._fail(sequence, f"the controller forks an answer into {n + 1}, but {impossible}")
                continue
            forks = [self._fork(sequence, control.request) for _ in range(n)]
            if not self._running.fork(sequence, forks):
                control.request.n_answers -= n
                if self._nobody_makes_room(sequence):
                    self._serving.finish(sequence, KvFull(f"there is no room for {n} forks: all others wait as well"))
                    continue
                self._let_wait(sequence)
                return False
            self._let_wait(None)
            self._announce(sequence, forks)
            self._ask_mid([sequence, *forks])
            return True
        return False

    def _fork(self, parent: Sequence, request: ControlledRequest) -> Sequence:
        control = self._new_control(request)
        control.clone_of = _control(parent).id
        request.n_answers += 1
        return parent.fork(request.n_answers - 1, control, trio.current_time())

    def _announce(self, parent: Sequence, forks: Items[Sequence]) -> None:
        assert parent.index is not None
        for fork in forks:
            assert fork.index is not None
            self._live[_control(fork).id] = fork
            self._answers[_control(fork).request].append(fork)
            fork.sink.send(Fork(id=fork.request.id, index=fork.index, parent=parent.index))

    def _nobody_makes_room(self, sequence: Sequence) -> bool:
        waiting = {*self._in_phase(Phase.FORK, Phase.SUSPENDED), sequence}
        return all(other in waiting or other.state is State.FINISHED for other in self._running)


def _control(sequence: Sequence) -> Control:
    assert sequence.control is not None
    return sequence.control


def _is_prefilled(sequence: Sequence) -> bool:
    """Whether all of its tokens but the last one are in the KV cache."""
    return sequence.allocation is not None and sequence.n_known - sequence.n_computed == 1
