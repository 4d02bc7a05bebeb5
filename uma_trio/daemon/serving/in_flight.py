"""The steps that the engine has: one that has begun, and perhaps one that runs ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import trio

from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.policy.lost_time import LostTime
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.step import InFlightStep, PlannedStep, build_step
from uma_trio.engine_link.messages import SubmittedStep

MAX_DELAY_MS: Final = 3.0
"""A new request may wait this long for a step that runs ahead.  A longer one is revoked: the device waits for about 1 ms then,
and the first token of the request comes a step earlier.  On an H200 loads of 8 and 32 clients ended sooner so."""


@attrs.define(eq=False)
class InFlightSteps:
    """At most two steps.

    One that runs ahead can be revoked until it begins; one of background answers can also be interrupted.  The engine
    answers each of them, revoked ones included.
    """

    _engine: SupervisedEngine
    begun: InFlightStep | None = attrs.field(default=None, init=False)
    """The step that computes.  If it ran ahead, it may have been revoked before it began."""
    ahead: InFlightStep | None = attrs.field(default=None, init=False)
    """The step that runs ahead of it; it may have been revoked."""
    lost_time: LostTime = attrs.field(factory=LostTime, init=False)
    _n_steps: int = attrs.field(default=0, init=False)

    def __iter__(self) -> Iterator[InFlightStep]:
        """The steps in their order."""
        return (step for step in (self.begun, self.ahead) if step is not None)

    def add(self, planned: PlannedStep) -> tuple[InFlightStep, SubmittedStep]:
        """The step that is planned, and the message that must be sent to the engine at once."""
        self._n_steps += 1
        step, message = build_step(planned, self._n_steps, in_flight=self.begun)
        if self.begun is None:
            self.begun = step
        else:
            assert self.ahead is None
            self.ahead = step
        return step, message

    def next_begins(self, now: float) -> None:
        """The step that computed has ended."""
        self.begun, self.ahead = self.ahead, None
        if self.begun is not None:
            self.begun.began_at = now

    def lost(self) -> list[InFlightStep]:
        """The engine has died: returns the steps that were in flight."""
        steps = [*self]
        self.begun = self.ahead = None
        return steps

    # -- steps that are withdrawn ---------------------------------------------------------------

    def revoke_ahead(self, answer: Answer | None = None) -> None:
        """Revoke the step that runs ahead, if there is one; with ``answer``, only if it computes something of it."""
        if self.ahead is not None and (answer is None or self.ahead.row_of(answer) is not None):
            self._revoke(self.ahead)

    def shorten(self) -> None:
        """Let a new request wait less: no step begins another pass, and a long one that runs ahead is revoked."""
        for step in self:
            if step.planned.plan.n_passes > 1:
                self._engine.link.end_passes(step.number)
        if self.ahead is not None and self.ahead.planned.plan.pass_ms > MAX_DELAY_MS:
            self._revoke(self.ahead)

    def interrupt(self) -> None:
        """End the step that computes, if it gives way to a request that has just come, and nobody counts on it yet."""
        step = self.begun
        if step is None or not step.planned.gives_way:
            return
        if any(answer.state is State.FINISHED for answer in step.rows):  # others may have what it computes
            return
        if self.lost_time.may_lose(1e3 * (trio.current_time() - step.began_at)):
            self._revoke(step)

    def _revoke(self, step: InFlightStep) -> None:
        if not step.revoked:
            step.revoked = True
            self._engine.link.revoke(step.number)
