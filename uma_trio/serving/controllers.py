"""Controllers in the tick: what is asked of their runtime, and what follows from its answers.

One exchange with the runtime is under way at a time.  ``post_pre`` ends a step of all controlled sequences and begins the
next one; ``mid`` asks for the masks of those that sample, while the engine computes their logits.  Sequences without a
controller wait for neither.

Source: docs/design/controllers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Items
from typing import Any, Final, Protocol

import trio

from uma_trio.aici.exchange import ControllerRuntime, Exchange, MidResults, PostPreResults
from uma_trio.aici.messages import MidOp, PostOp, PreOp, PreResult, SequenceResult
from uma_trio.engine.messages import SubmittedStep
from uma_trio.engine.supervisor import SupervisedEngine
from uma_trio.errors import ControllerFailed, ControllerUnavailable, UmaError
from uma_trio.protocol.messages import FinishReason
from uma_trio.serving.control import ControlledRequest, Phase
from uma_trio.serving.controlled import ControlledSequences, control_of, have_room, is_prefilled
from uma_trio.serving.forking import Forking, ForkRefused
from uma_trio.serving.masked_steps import MaskedSteps
from uma_trio.serving.output import send_controller_output, send_rest, send_unsent
from uma_trio.serving.queue import RunningSet
from uma_trio.serving.sequence import Sequence, State
from uma_trio.serving.step import InFlightStep, NewTokens, append_forced, splice
from uma_trio.telemetry.metrics import RecentValues

MAX_WAIT_S: Final = 0.002
"""A plan waits so long for an exchange.  After one that took longer, plans do not wait until one was quick again."""

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

    def revoke_ahead(self) -> None:
        """Withdraw the step that runs ahead, if there is one."""

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
        self._controlled = ControlledSequences()
        self._forking = Forking(self._controlled, running)
        self._freed: list[int] = []
        """Ids that the runtime has to forget."""
        self._abandoned: list[ControlledRequest] = []
        """Requests that have ended before they had a sequence in the runtime."""
        self._exchange: Exchange[PostPreResults] | Exchange[MidResults] | None = None
        """The one that is under way."""
        self._sent_at = -math.inf
        """When the last one began."""
        self._done_at = -math.inf
        """When the last one was done."""
        self._is_slow = False
        """The last exchange took longer than a plan waits."""
        self._steps = MaskedSteps(engine)
        self._post_pre_ms, self._mid_ms = RecentValues(), RecentValues()
        """Time from asking until the answer was there."""
        self._exchanges_ms = [math.inf, math.inf]
        """The same of the latest ``post_pre`` and of the latest ``mid``."""
        self._skipped = 0
        """Masks that were not there in time."""
        if runtime is not None:
            runtime.on_change = self._runtime_changed
            runtime.on_unused = lambda name: self.abandon(ControlledRequest(name=name, generation=runtime.generation))

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._controlled or self._freed or self._abandoned or self._steps)

    def snapshot(self) -> dict[str, Any] | None:
        """Numbers for the metrics; ``None`` without a runtime."""
        if self._runtime is None:
            return None
        post_pre_p50, post_pre_p99 = self._post_pre_ms.percentiles(50, 99)
        mid_p50, mid_p99 = self._mid_ms.percentiles(50, 99)
        return {
            "sequences": len(self._controlled),
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
        return self._controlled.begin(sequence, request)

    def abandon(self, request: ControlledRequest) -> None:
        """The runtime has a controller for ``request``, which was refused or has ended before it had a sequence."""
        if self._is_current(request):
            self._abandoned.append(request)
            self._serving.look()

    def ended(self, sequence: Sequence) -> None:
        """``sequence`` has ended, whatever the reason was."""
        control = control_of(sequence)
        send_unsent(sequence)
        self._controlled.remove(sequence)
        self._forking.give_up(sequence)
        if control.phase is Phase.NEW:
            self.abandon(control.request)
        elif self._is_current(control.request):
            self._freed.append(control.id)

    def _is_current(self, request: ControlledRequest) -> bool:
        runtime = self._runtime
        return runtime is not None and runtime.is_usable and runtime.generation == request.generation

    def _runtime_changed(self) -> None:
        """End the sequences whose controllers have died with their runtime."""
        assert self._runtime is not None
        lost = [each for each in self._controlled if not self._is_current(control_of(each).request)]
        if lost:
            self._end_lost(lost, self._runtime.reason or "it was restarted")

    def _end_lost(self, lost: Items[Sequence], why: str) -> None:
        """End sequences whose controllers have died."""
        self._steps.give_up()
        for sequence in lost:
            if sequence.state is not State.FINISHED:  # ended by what another one's end set off
                self._serving.finish(sequence, ControllerUnavailable(f"the runtime of controllers has ended: {why}"))
        self._freed = []
        self._abandoned = [request for request in self._abandoned if self._is_current(request)]
        self._serving.wake()

    # -- called by the tick ---------------------------------------------------------------------

    def step_completed(self, step: InFlightStep) -> None:
        """The tokens of ``step`` are counted and sent; tell their controllers."""
        self._steps.completed(step)
        self._advance()

    def step_revoked(self, step: InFlightStep) -> None:
        """``step`` ran ahead and was not begun.  Masks and splices that were not used yet stay."""
        self._steps.removed(step)

    def steps_lost(self) -> None:
        """The engine has died, with all steps in flight; otherwise as ``step_revoked``."""
        self._steps.lost()

    async def settle(self) -> None:
        """Bring controlled sequences as far as they come in a moment; no step is in flight."""
        until = trio.current_time() + MAX_WAIT_S
        while True:
            for sequence in self._controlled.in_phase(Phase.ANSWERED):
                if control_of(sequence).splice is not None:
                    self._serving.deliver(splice(sequence, self._running.cache), trio.current_time())
            self._advance()
            now = trio.current_time()
            if self._exchange is None or self._is_slow or now >= until:
                break
            if not self._controlled.in_phase(
                Phase.ASKED, Phase.SAMPLING
            ):  # it only frees sequences, or asks suspended ones
                break
            if not await self._exchange.wait(max(0.0, min(until, self._sent_at + MAX_WAIT_S) - now)):
                self._is_slow = self._age_s >= MAX_WAIT_S
        self._permit()

    def _permit(self) -> None:
        """Decide which sequences may sample in the next step: those that have a mask, or all that can ask for one.

        The rows of masks are written anew by each ``mid``, so both cannot be in one step.
        """
        may_ask = self._exchange is None and not self._controlled.in_phase(Phase.ANSWERED)
        for sequence in self._controlled.in_phase(Phase.READY, Phase.ANSWERED):
            control = control_of(sequence)
            asks = may_ask and sequence.sink.has_room and not control.asks_ahead
            control.is_permitted = asks or control.phase is Phase.ANSWERED

    def claim(self, step: InFlightStep, message: SubmittedStep) -> None:
        """Have the engine wait for the masks of controlled sequences in a step that is not sent yet."""
        assert self._runtime is not None
        self._steps.claim(step, message, self._runtime.masks)

    def step_sent(self, step: InFlightStep) -> None:
        """``step`` is on its way to the engine: ask for its masks, or say that all are there."""
        if self._steps.begun is not step:
            return
        sampled = self._steps.sampled(step)
        rows = {each.id: each.mask_row for each in map(control_of, sampled) if each.mask_row is not None}
        assert len(rows) in (0, len(sampled))
        self._steps.has_asked = True
        if rows:
            self._steps.ready(step, rows)
        else:
            self._ask_mid(sampled)

    def holds_back(self, step: InFlightStep) -> bool:
        """Whether no step may run ahead of ``step``, because that would delay a controlled sequence."""
        if self._can_go_on:
            return True
        return self._steps.begun is step and not self._steps.may_run_ahead(step, self._exchanges_ms)

    @property
    def _can_go_on(self) -> bool:
        """Whether the next step could bring a controlled sequence further that none in flight does."""
        return self._forking.is_possible() or any(
            _can_go_on(each) for each in self._controlled if not self._steps.samples(each)
        )

    @property
    def ask_at(self) -> float:
        """When suspended sequences must be asked again, on trio's clock."""
        if self._exchange is not None or not self._controlled.in_phase(Phase.SUSPENDED):
            return math.inf
        return self._done_at + ASK_AGAIN_S

    # -- what is asked --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Ask the runtime what can be asked now.

        Nothing is asked between a mask and the token that comes of it: ``pre`` comes after ``post``, and the masks of a
        step stay where they are until the engine has read them.
        """
        while self._exchange is None and self and not self._steps.keeps_masks:
            if self._controlled.in_phase(Phase.ANSWERED):
                self._steps.give_up()
                return
            if self._wants_post_pre:
                self._ask_post_pre()
                continue
            if self._steps.begun is not None:
                self._ask_mid_for(self._steps.begun)
                continue
            try:
                asked = self._forking.next_group()
            except ForkRefused as refusal:
                self._serving.finish(refusal.sequence, refusal.error)
                continue
            if not asked:
                asked = self._ready if any(control_of(each).asks_ahead for each in self._ready) else []
            if not asked:
                return
            self._ask_mid(asked)

    @property
    def _wants_post_pre(self) -> bool:
        controlled = self._controlled
        if controlled.in_phase(Phase.REPORT) or any(each.allocation for each in controlled.in_phase(Phase.NEW)):
            return True
        if self._ready or self._steps.begun is not None:  # masks come first, and a post_pre comes after their tokens
            return False
        return bool(self._freed or self._abandoned) or trio.current_time() >= self.ask_at

    @property
    def _ready(self) -> list[Sequence]:
        """The sequences that can ask for their masks."""
        return have_room([each for each in self._controlled.in_phase(Phase.READY) if is_prefilled(each)])

    def _ask_post_pre(self) -> None:
        assert self._runtime is not None
        post: list[PostOp] = []
        pre: list[PreOp] = []
        for sequence in self._controlled:
            control = control_of(sequence)
            if control.report is not None:
                post.append(control.report)
                control.report = None
            elif control.phase is Phase.NEW and sequence.allocation is not None:
                pre.append(PreOp(control.id, control.request.name))
            else:
                continue
            control.phase = Phase.ASKED
        freed, self._freed = self._freed, []
        for request in self._abandoned:  # begins and ends in the same exchange
            freed.append(self._controlled.new_id())
            pre.append(PreOp(freed[-1], request.name))
        self._abandoned = []
        exchange = self._runtime.post_pre(post, pre, freed)

        def take() -> None:
            self._exchanges_ms[0] = 1e3 * self._age_s
            self._is_slow = self._age_s > MAX_WAIT_S
            self._take_post_pre(exchange)

        self._send(exchange, take, self._post_pre_ms)

    def _ask_mid_for(self, step: InFlightStep) -> None:
        """Ask for the masks of ``step``, which ran ahead, of those whose controllers want to go on."""
        asked = [each for each in self._ready if step.row_of(each) is not None]
        if asked:
            self._steps.has_asked = True
            self._ask_mid(asked)
        else:
            self._steps.give_up()

    def _ask_mid(self, asked: Items[Sequence]) -> None:
        assert self._runtime is not None
        ops = []
        for sequence in asked:
            control = control_of(sequence)
            ops.append(MidOp(control.id, control.clone_of))
            control.phase, control.clone_of, control.is_asked = Phase.SAMPLING, None, True
        exchange = self._runtime.mid(ops)
        step = self._steps.begun

        def take() -> None:
            self._exchanges_ms[1] = 1e3 * self._age_s
            if step is None:
                self._is_slow = self._age_s > MAX_WAIT_S
                for sequence in asked:
                    control_of(sequence).asks_ahead = self._is_slow
            self._take_mid(exchange, {op.id: row for row, op in enumerate(ops)}, step)

        self._send(exchange, take, self._mid_ms)

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
        self._exchange, self._sent_at = exchange, trio.current_time()

        def done() -> None:
            self._exchange, self._done_at = None, trio.current_time()
            if exchange.failure:
                has_begun = [each for each in self._controlled if control_of(each).phase is not Phase.NEW]
                self._end_lost(has_begun, exchange.failure)
            else:
                duration_ms.add(1e3 * self._age_s)
                take()
            self._advance()
            if self._can_go_on:
                self._serving.wake()
            else:
                self._serving.look()

        exchange.when_done(done)

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
        for sequence in self._controlled.in_phase(Phase.ASKED):
            self._fail(sequence, "the runtime of controllers has not answered for this sequence")
        self._find_deadlocks({id for id, found in exchange.answer.pre.items() if found.skipped is True})

    def _said(self, id: int, found: SequenceResult[Any]) -> Sequence | None:
        """Pass on what a controller has to say; returns its sequence, unless that has ended."""
        sequence = self._controlled.get(id)
        if sequence is None:
            return None
        send_controller_output(sequence, found)
        if found.error:
            self._fail(sequence, found.error)
            return None
        return sequence

    def _begin(self, sequence: Sequence, result: PreResult) -> None:
        """Begin a step of ``sequence`` as its controller wants it."""
        control = control_of(sequence)
        if result.ff_tokens:
            self._serving.deliver(append_forced(sequence, result.ff_tokens), trio.current_time())
            if sequence.state is State.FINISHED:
                return
        if control.phase is Phase.SUSPENDED and not result.suspend:  # the time until its next token begins now
            sequence.due_at, sequence.paused = trio.current_time() + sequence.target_itl_s, True
        control.n_forks, control.is_permitted = result.num_forks, False
        if result.suspend or result.num_forks != 1:
            control.n_plain = 0
        if result.num_forks == 0:
            self._stop(sequence)
        elif result.suspend:
            control.phase = Phase.SUSPENDED
        elif result.num_forks > 1:
            control.phase = Phase.FORK
        else:
            control.phase = Phase.READY
        if control.phase is not Phase.FORK:
            self._forking.give_up(sequence)

    def _stop(self, sequence: Sequence) -> None:
        send_rest(sequence)
        self._serving.finish(sequence, "stop")

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._serving.finish(sequence, ControllerFailed(reason[-MAX_ERROR_CHARACTERS:]))

    def _find_deadlocks(self, late: Set[int]) -> None:
        """End requests that wait for nobody but themselves.

        Args:
            late: sequences that are suspended only until their controllers have answered.
        """
        for request, live in self._controlled.by_request():
            controls = [control_of(each) for each in live]
            suspended = all(each.phase is Phase.SUSPENDED and each.id not in late for each in controls)
            request.n_deadlocked = request.n_deadlocked + 1 if suspended else 0
            if request.n_deadlocked > MAX_DEADLOCKED:
                for sequence in live:
                    self._serving.finish(sequence, "deadlock")

    def _take_mid(self, exchange: Exchange[MidResults], rows: Mapping[int, int], step: InFlightStep | None) -> None:
        """Act on masks.

        Args:
            rows: where they are, by the ids of sequences.
            step: waits for them, unless it has ended without them.
        """
        assert exchange.answer is not None
        if any(found.result is not None for found in exchange.answer.values()):
            self._serving.revoke_ahead()  # it goes on from tokens that a splice replaces
        if step is not None:
            good = {id for id, found in exchange.answer.items() if not found.error and found.skipped is not True}
            self._steps.ready(step, {id: row for id, row in rows.items() if id in good})
        for id, found in exchange.answer.items():
            sequence = self._said(id, found)
            if sequence is None:
                continue
            control = control_of(sequence)
            if found.skipped is True:
                control.phase = Phase.READY
                self._skipped += 1
            elif found.result is None:
                control.phase, control.mask_row = Phase.ANSWERED, rows[id]
            else:
                control.phase, control.splice = Phase.ANSWERED, found.result


def _can_go_on(sequence: Sequence) -> bool:
    """Whether the next step could compute, splice or sample something of ``sequence``."""
    if sequence.allocation is None:
        return False
    if sequence.n_known - 1 > sequence.n_computed:
        return not sequence.is_blocked
    phase = control_of(sequence).phase
    return phase is Phase.ANSWERED or (phase is Phase.READY and sequence.sink.has_room)
