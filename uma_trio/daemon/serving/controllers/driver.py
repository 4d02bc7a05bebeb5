"""Drives the controllers in the tick: asks their runtime, and acts on its answers.

Only one exchange with the runtime runs at a time.  ``post_pre`` ends a step of all controlled answers and begins the
next; ``mid`` asks for the masks of those that sample, while the engine computes their logits.  Answers without a
controller wait at most ``MAX_WAIT_S`` for a plan and ``SHORT_MASK_TIMEOUT_MS`` for masks.

Source: docs/design/constraints.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import trio
from msgspec import UNSET

from uma_trio.aici_link.messages import MidOp, PostOp, PreOp, PreResult, SequenceResult
from uma_trio.daemon.aici.exchange import NO_ANSWER, ControllerRuntime, Exchange, MidResults, PostPreResults
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.controllers.answers import ControlledAnswers, control_of, is_prefilled, reading
from uma_trio.daemon.serving.controllers.forking import Forking
from uma_trio.daemon.serving.controllers.loop import Loop
from uma_trio.daemon.serving.controllers.masked_steps import MaskedSteps
from uma_trio.daemon.serving.controllers.results import append_inserted, splice
from uma_trio.daemon.serving.controllers.state import ControlledRequest, Phase
from uma_trio.daemon.serving.in_flight import InFlightSteps
from uma_trio.daemon.serving.output import send_controller_output, send_rest, send_unsent
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.daemon.serving.step import InFlightStep
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.engine_link.messages import SubmittedStep
from uma_trio.errors import ControllerFailed, ControllerUnavailable
from uma_trio.telemetry.measures import RecentValues

MAX_WAIT_S: Final = 0.002
"""Longest wait of a plan for an exchange.  After a slower exchange, plans do not wait until one is fast again."""

ASK_AGAIN_S: Final = 0.01
"""Suspended answers are asked again after this time, if nothing else happens."""

MAX_SUSPENDED_EXCHANGES: Final = 4
"""A request ends after this many exchanges in a row in which all of its answers were suspended."""

MAX_ERROR_CHARACTERS: Final = 2000


class ControllerDriver:
    """The controlled answers of one scheduler.

    Args:
        runtime: runs the controllers; ``None``: there are none.
        engine: computes the steps.
        steps: which it has now.
        loop: the scheduler.
    """

    def __init__(
        self,
        runtime: ControllerRuntime | None,
        engine: SupervisedEngine,
        steps: InFlightSteps,
        running: RunningSet,
        waiting: WaitingQueue,
        loop: Loop,
    ) -> None:
        self._runtime = runtime
        self._running = running
        self._loop = loop
        self._controlled = ControlledAnswers()
        self._forking = Forking(self._controlled, running, waiting, loop)
        self._freed: list[int] = []
        """Ids that the runtime must forget."""
        self._unused: list[ControlledRequest] = []
        """Requests that ended before they had an answer in the runtime."""
        self._exchange: Exchange[PostPreResults] | Exchange[MidResults] | None = None
        """The exchange that is running."""
        self._sent_at = -math.inf
        """When the latest exchange began."""
        self._done_at = -math.inf
        """When the latest exchange ended."""
        self._is_slow = False
        """The latest exchange took longer than a plan waits."""
        self._steps = MaskedSteps(engine, steps)
        self._post_pre_ms, self._mid_ms = RecentValues(50, 99), RecentValues(50, 99)
        """Durations of recent exchanges."""
        self._exchanges_ms = [math.inf, math.inf]
        """Durations of the latest ``post_pre`` and of the latest ``mid``."""
        self._skipped = 0
        """Steps that controllers skipped, because they took too long."""
        if runtime is not None:
            runtime.on_change, runtime.on_unused = self._runtime_changed, self._drop_unused

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        if self._controlled.live or self._freed or self._unused:
            return True
        begun, ahead = self._steps.in_flight.begun, self._steps.in_flight.ahead
        return (begun is not None and begun.is_masked) or (ahead is not None and ahead.is_masked)

    def snapshot(self) -> dict[str, Any] | None:
        """Numbers for the metrics; ``None`` without a runtime."""
        if self._runtime is None:
            return None
        return {
            "sequences": len(self._controlled.live),
            **self._post_pre_ms.snapshot("post_pre_ms"),
            **self._mid_ms.snapshot("mid_ms"),
            "skipped_total": self._skipped,
            **self._runtime.snapshot(),
        }

    # -- the life of an answer -----------------------------------------------------------------

    def check(self, request: ControlledRequest) -> None:
        """Raise ControllerUnavailable unless the runtime that has the controller of ``request`` still runs."""
        if not self._is_current(request):
            raise ControllerUnavailable("the runtime of controllers has ended")

    def add(self, answer: Answer, request: ControlledRequest) -> list[Answer]:
        """Control ``answer``, the first of ``request``; returns its answers, a list that grows with each fork."""
        return self._controlled.begin(answer, request)

    def _drop_unused(self, name: str) -> None:
        """The runtime has started a controller for a request that was cancelled meanwhile."""
        assert self._runtime is not None
        self.drop_unused(ControlledRequest(name=name, generation=self._runtime.generation))

    def drop_unused(self, request: ControlledRequest) -> None:
        """Make the runtime drop the controller of ``request``, which ended before it had an answer."""
        if self._is_current(request):
            self._unused.append(request)
            self._loop.end_wait()

    def ended(self, answer: Answer) -> None:
        """Forget ``answer``, which has ended."""
        control = control_of(answer)
        send_unsent(answer)
        self._controlled.remove(answer)
        self._forking.give_up(answer)
        if control.phase is Phase.NEW:
            self.drop_unused(control.request)
        elif self._is_current(control.request):
            self._freed.append(control.id)

    def preempted(self, answer: Answer) -> None:
        """``answer`` has lost its place in the KV cache, and gets another one later."""
        control_of(answer).is_permitted = False
        self._forking.give_up(answer)

    def _is_current(self, request: ControlledRequest) -> bool:
        runtime = self._runtime
        return runtime is not None and runtime.is_usable and runtime.generation == request.generation

    def _runtime_changed(self) -> None:
        """The runtime has died or was restarted: end the answers whose controllers died with their runtime."""
        assert self._runtime is not None
        lost = [answer for answer in self._controlled if not self._is_current(control_of(answer).request)]
        if lost:
            self._end_lost(lost, self._runtime.reason or "it was restarted")

    def _end_lost(self, lost: Sequence[Answer], why: str) -> None:
        """End answers whose controllers died."""
        self._steps.give_up()
        for answer in lost:
            self._loop.finish(answer, ControllerUnavailable(f"the runtime of controllers has ended: {why}"))
        self._freed = []
        self._unused = [request for request in self._unused if self._is_current(request)]
        self._loop.wake()

    # -- called by the tick ---------------------------------------------------------------------

    def advance(self) -> None:
        """Splice what controllers have asked for, and start the next exchange; no step is in flight."""
        for answer in self._controlled.in_phase(Phase.MASK_READY):
            if control_of(answer).splice is not None:
                self._loop.deliver(splice(answer, self._running.cache), trio.current_time())
        self.start_next_exchange()

    async def wait_for_exchange(self, until: float) -> bool:
        """Wait for the exchange that runs, if answers wait for it that should be in the next plan.

        Args:
            until: on trio's clock.

        Returns:
            Whether it has ended.  If not, waiting any longer would not pay.
        """
        now = trio.current_time()
        if self._exchange is None or self._is_slow or now >= until:
            return False
        if not self._controlled.in_phase(Phase.AWAITING_PRE, Phase.AWAITING_MASK):
            return False  # the exchange only frees answers, or asks suspended ones
        slow_at = self._sent_at + MAX_WAIT_S
        if await self._exchange.wait(max(0.0, min(until, slow_at) - now)):
            return True
        self._is_slow = slow_at <= until
        return False

    def permit(self) -> None:
        """Decide which answers may sample in the next step: those that have a mask, or all that can ask for one.

        Each ``mid`` overwrites the rows of masks, so both kinds cannot be in one step.
        """
        may_ask = self._exchange is None and not self._controlled.in_phase(Phase.MASK_READY)
        for answer in self._controlled.in_phase(Phase.READY, Phase.MASK_READY):
            control = control_of(answer)
            asks = may_ask and answer.sink.has_room and not control.needs_mask_first
            control.is_permitted = asks or control.phase is Phase.MASK_READY

    def attach_masks(self, step: InFlightStep, message: SubmittedStep) -> None:
        """Have the engine wait for the masks of controlled answers in a step that is not sent yet."""
        assert self._runtime is not None
        self._steps.attach_masks(step, message, self._runtime.masks)

    def request_masks(self, step: InFlightStep) -> None:
        """Ask for the masks of ``step``, which was just sent, or tell the engine that they are ready."""
        if self._steps.begun is not step:  # of a step that runs ahead, when it begins
            return
        sampled = self._steps.sampled(step)
        rows = {control.id: control.mask_row for control in map(control_of, sampled) if control.mask_row is not None}
        assert len(rows) in (0, len(sampled))
        step.has_asked = True
        if rows:
            self._steps.ready(step, rows)
        else:
            self._ask_mid(sampled)

    def prevents_run_ahead(self, step: InFlightStep) -> bool:
        """Whether no step may run ahead of ``step``, because that would delay a controlled answer."""
        if self._can_go_on:
            return True
        return step.is_masked and not self._steps.may_run_ahead(step, self._exchanges_ms)

    @property
    def _can_go_on(self) -> bool:
        """Whether the next step could advance a controlled answer that no step in flight advances."""
        return self._forking.is_possible() or any(
            _can_go_on(answer) for answer in self._controlled if not self._steps.samples(answer)
        )

    @property
    def has_admitted(self) -> bool:
        """Whether the latest plan has given places to answers whose controllers can be asked now."""
        may_ask = self._exchange is None and not self._controlled.in_phase(Phase.MASK_READY)
        return may_ask and any(answer.allocation for answer in self._controlled.in_phase(Phase.NEW))

    @property
    def ask_at(self) -> float:
        """When suspended answers must be asked again, on trio's clock."""
        if self._exchange is not None or not self._controlled.in_phase(Phase.SUSPENDED):
            return math.inf
        return self._done_at + ASK_AGAIN_S

    # -- what is asked --------------------------------------------------------------------------

    def start_next_exchange(self) -> None:
        """Start exchanges, as long as there is one to start and none runs.

        None starts between a mask and the token that it allows: ``pre`` comes after ``post``, and the masks of a step
        stay where they are until the engine has read them.  They also stay if the step is revoked, or lost with the
        engine.
        """
        while self._exchange is None and self and not self._steps.keeps_masks:
            if self._controlled.in_phase(Phase.MASK_READY):
                self._steps.give_up()
                return
            if self._wants_post_pre:
                self._ask_post_pre()
                continue
            if self._steps.begun is not None:
                self._ask_mid_for(self._steps.begun)
                continue
            asked = self._forking.next_group()
            if asked is None:
                continue
            if not asked:
                asked = self._ready if any(control_of(answer).needs_mask_first for answer in self._ready) else []
            if not asked:
                return
            self._ask_mid(asked)

    @property
    def _wants_post_pre(self) -> bool:
        controlled = self._controlled
        if controlled.in_phase(Phase.POST_PENDING) or any(
            answer.allocation for answer in controlled.in_phase(Phase.NEW)
        ):
            return True
        if self._ready or self._steps.begun is not None:  # masks come first, and a post_pre comes after their tokens
            return False
        return bool(self._freed or self._unused) or trio.current_time() >= self.ask_at

    @property
    def _ready(self) -> list[Answer]:
        """The answers that can ask for their masks."""
        return reading([answer for answer in self._controlled.in_phase(Phase.READY) if is_prefilled(answer)])

    def _ask_post_pre(self) -> None:
        assert self._runtime is not None
        post: list[PostOp] = []
        pre: list[PreOp] = []
        for answer in self._controlled:
            control = control_of(answer)
            if control.post is not None:
                post.append(control.post)
                control.post = None
            elif control.phase is Phase.NEW and answer.allocation is not None:
                pre.append(PreOp(control.id, control.request.name))
            else:
                continue
            control.phase = Phase.AWAITING_PRE
        freed, self._freed = self._freed, []
        for request in self._unused:  # begins and ends in the same exchange
            freed.append(self._controlled.new_id())
            pre.append(PreOp(freed[-1], request.name))
        self._unused = []
        exchange = self._runtime.post_pre(post, pre, freed)

        def take() -> None:
            self._exchanges_ms[0] = 1e3 * self._age_s
            self._is_slow = self._age_s > MAX_WAIT_S
            self._take_post_pre(exchange)

        self._send(exchange, take, self._post_pre_ms)

    def _ask_mid_for(self, step: InFlightStep) -> None:
        """Ask for the masks of ``step``, which ran ahead: of the answers whose controllers want another token."""
        asked = [answer for answer in self._ready if step.row_of(answer) is not None]
        if asked:
            step.has_asked = True
            self._ask_mid(asked)
        else:
            self._steps.give_up()

    def _ask_mid(self, asked: Sequence[Answer]) -> None:
        assert self._runtime is not None
        ops = []
        for answer in asked:
            control = control_of(answer)
            ops.append(MidOp(control.id, control.clone_of))
            control.phase, control.clone_of, control.mask_requested = Phase.AWAITING_MASK, None, True
        exchange = self._runtime.mid(ops)
        step = self._steps.begun

        def take() -> None:
            self._exchanges_ms[1] = 1e3 * self._age_s
            if step is None:
                self._is_slow = self._age_s > MAX_WAIT_S
                for answer in asked:
                    control_of(answer).needs_mask_first = self._is_slow
            self._take_mid(exchange, {op.id: row for row, op in enumerate(ops)}, step)

        self._send(exchange, take, self._mid_ms)

    @property
    def _age_s(self) -> float:
        """Time since the latest exchange began."""
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
                has_begun = [answer for answer in self._controlled if control_of(answer).phase is not Phase.NEW]
                self._end_lost(has_begun, exchange.failure)
            else:
                duration_ms.add(1e3 * self._age_s)
                take()
            self.start_next_exchange()
            if self._can_go_on:
                self._loop.wake()
            else:
                self._loop.end_wait()

        exchange.when_done(done)

    # -- what follows from answers --------------------------------------------------------------

    def _take_post_pre(self, exchange: Exchange[PostPreResults]) -> None:
        assert exchange.answer is not None
        for id, posted in exchange.answer.post.items():
            answer = self._forward_output(id, posted)
            if answer is not None and posted.result is not None and posted.result.stop:
                send_rest(answer)
                self._loop.finish(answer, "stop")
        for id, before_token in exchange.answer.pre.items():
            answer = self._forward_output(id, before_token)
            if answer is not None and before_token.result is not None:
                self._begin(answer, before_token.result)
        for answer in self._controlled.in_phase(Phase.AWAITING_PRE):
            self._fail(answer, NO_ANSWER)
        self._find_deadlocks({id for id, before_token in exchange.answer.pre.items() if before_token.skipped is True})

    def _forward_output(self, id: int, result: SequenceResult[Any]) -> Answer | None:
        """Send the output of a controller to its client.

        Returns:
            Its answer; ``None`` if that has ended, or the controller failed.
        """
        answer = self._controlled.live.get(id)
        if answer is None:
            return None
        send_controller_output(answer, result)
        if result.error:
            self._fail(answer, result.error)
            return None
        return answer

    def _fail(self, answer: Answer, reason: str) -> None:
        self._loop.finish(answer, ControllerFailed(reason[-MAX_ERROR_CHARACTERS:]))

    def _begin(self, answer: Answer, result: PreResult) -> None:
        """Act on the result of ``pre``, which begins a step of ``answer``."""
        control = control_of(answer)
        if result.ff_tokens:
            self._loop.deliver(append_inserted(answer, result.ff_tokens), trio.current_time())
            if answer.state is State.FINISHED:
                return
            if answer.allocation is not None and not answer.n_computed:
                self._running.share_prefix(answer)
        if control.phase is Phase.SUSPENDED and not result.suspend:  # the time until its next token begins now
            answer.due_at, answer.times.paused = trio.current_time() + answer.target_itl_ms / 1e3, True
        control.n_forks, control.is_permitted = result.num_forks, False
        control.waits_for = [] if result.waits_for is UNSET else result.waits_for
        if result.suspend or result.num_forks != 1:
            control.n_sampled_in_row = 0
        if result.num_forks == 0:
            send_rest(answer)
            self._loop.finish(answer, "stop")
        elif result.suspend:
            control.phase = Phase.SUSPENDED
        elif result.num_forks > 1:
            control.phase = Phase.FORK
        else:
            control.phase = Phase.READY
        if control.phase is not Phase.FORK:
            self._forking.give_up(answer)

    def _find_deadlocks(self, late: Set[int]) -> None:
        """End requests whose answers are all suspended, since none can wake another.

        Args:
            late: answers that are suspended only until their controllers answer.
        """
        for request, live in self._controlled.by_request():
            controls = [control_of(answer) for answer in live]
            suspended = all(control.phase is Phase.SUSPENDED and control.id not in late for control in controls)
            request.n_deadlocked = request.n_deadlocked + 1 if suspended else 0
            if request.n_deadlocked >= MAX_SUSPENDED_EXCHANGES:
                for answer in live:
                    self._loop.finish(answer, "deadlock")

    def _take_mid(self, exchange: Exchange[MidResults], rows: Mapping[int, int], step: InFlightStep | None) -> None:
        """Act on the answer of ``mid``.

        Args:
            rows: row of each mask, by the ids of answers.
            step: the step that waits for the masks, unless it ended without them; ``None``: no step does yet.
        """
        assert exchange.answer is not None
        if any(result.result is not None for result in exchange.answer.values()):
            self._steps.in_flight.revoke_ahead()  # its inputs are tokens that a splice replaces
        if step is not None:
            good = {id for id, result in exchange.answer.items() if not result.error and result.skipped is not True}
            self._steps.ready(step, {id: row for id, row in rows.items() if id in good})
        for id, result in exchange.answer.items():
            answer = self._forward_output(id, result)
            if answer is None:
                continue
            control = control_of(answer)
            if result.skipped is True:
                control.phase = Phase.READY
                self._skipped += 1
            elif result.result is None:
                control.phase, control.mask_row = Phase.MASK_READY, rows[id]
            else:
                control.phase, control.splice = Phase.MASK_READY, result.result


def _can_go_on(answer: Answer) -> bool:
    """Whether the next step could compute, splice or sample something of ``answer``."""
    if answer.allocation is None:
        return False
    if answer.n_known - 1 > answer.n_computed:
        return not answer.is_blocked
    phase = control_of(answer).phase
    return phase is Phase.MASK_READY or (phase is Phase.READY and answer.sink.has_room)
