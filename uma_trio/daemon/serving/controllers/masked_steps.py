"""The steps in flight that sample controlled answers, and the masks for which the engine waits in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

import attrs

from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.controllers.answers import control_of, is_prefilled
from uma_trio.daemon.serving.in_flight import InFlightSteps
from uma_trio.daemon.serving.step import InFlightStep
from uma_trio.engine_link.masks import MaskFile
from uma_trio.engine_link.messages import StepInput, SubmittedStep

SHORT_MASK_TIMEOUT_MS: Final = 2.0
"""Time after the logits in which masks may still arrive, if the step has answers without a controller and no
grammar."""


@attrs.define(eq=False)
class MaskedSteps:
    """Those of ``in_flight`` in which the engine waits for masks.  The key of a mask is the runtime's id of its answer."""

    _engine: SupervisedEngine
    in_flight: InFlightSteps

    @property
    def begun(self) -> InFlightStep | None:
        """The step that has begun, if it is one of them."""
        step = self.in_flight.begun
        return step if step is not None and step.is_masked else None

    @property
    def keeps_masks(self) -> bool:
        """Whether no mask may be overwritten, because the engine reads them or is about to."""
        step = self.begun
        return step is not None and step.has_asked

    def attach_masks(self, step: InFlightStep, message: SubmittedStep, masks: MaskFile | None) -> None:
        """Have the engine wait for the masks of controlled answers in a step that is not sent yet."""
        sampled = self.sampled(step)
        if not sampled:
            return
        assert masks is not None
        self._engine.link.attach_masks(masks)
        inputs = dict(zip(step.rows, chain.from_iterable(message.calls), strict=True))
        for answer in sampled:
            row = inputs[answer]
            if isinstance(row, StepInput):  # the others go on with the same key
                row.samples[0].controller_mask = control_of(answer).id
        plain = [answer for answer in step.rows if not answer.control.exists]
        if plain and not any(answer.sampling.grammar for answer in plain):
            message.mask_timeout_ms = SHORT_MASK_TIMEOUT_MS
        step.is_masked = True

    def sampled(self, step: InFlightStep) -> list[Answer]:
        """The controlled answers that ``step`` samples."""
        return [answer for answer, row in step.rows.items() if answer.control.exists and row.is_sampled]

    def samples(self, answer: Answer) -> bool:
        """Whether a step in flight samples the next token of ``answer``."""
        rows = [step.rows.get(answer) for step in self.in_flight]
        return any(row is not None and row.is_sampled for row in rows) and is_prefilled(answer)

    def ready(self, step: InFlightStep, rows: Mapping[int, int]) -> None:
        """Tell the engine that the masks of ``step`` are ready, unless the step ended without them.

        Args:
            rows: row of each mask, by the ids of answers.
        """
        if self.in_flight.begun is step:
            self._engine.link.masks_ready(step.number, rows)

    def give_up(self) -> None:
        """Tell the engine that no more masks will come for the step that has begun, if there is one."""
        step = self.begun
        if step is not None:
            step.has_asked = True
            self.ready(step, {})

    def may_run_ahead(self, step: InFlightStep, exchanges_ms: Sequence[float]) -> bool:
        """Whether all controllers in ``step`` are expected to want another token, and to answer while it computes.

        A controller that does not costs the time of a row.

        Args:
            exchanges_ms: durations of the latest ``post_pre`` and of the latest ``mid``.
        """
        if not self._engine.info.can_truncate:
            return False
        sampled = self.sampled(step)
        others = len(sampled) < len(step.rows)
        time_ms = step.planned.plan.predicted_ms + (0.0 if others else step.planned.mask_timeout_ms / 2)
        return sum(exchanges_ms) <= time_ms and all(control_of(answer).may_run_ahead for answer in sampled)
