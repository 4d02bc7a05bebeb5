"""The steps in flight that sample controlled sequences, and the masks for which the engine waits in them."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from itertools import chain
from typing import Final

from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.serving.controllers.sequences import control_of, is_prefilled
from uma_trio.daemon.serving.sequence import Sequence
from uma_trio.daemon.serving.step import InFlightStep
from uma_trio.engine_link.masks import MaskFile
from uma_trio.engine_link.messages import StepInput, SubmittedStep

SHORT_MASK_TIMEOUT_MS: Final = 2.0
"""Time after the logits in which masks may still arrive, if the step has sequences without a controller and no
grammar."""


class MaskedSteps:
    """At most two steps: one that has begun, and one that runs ahead of it.

    The key of a mask is the runtime's id of its sequence.
    """

    def __init__(self, engine: SupervisedEngine) -> None:
        self._engine = engine
        self.begun: InFlightStep | None = None
        """The step that has begun."""
        self.ahead: InFlightStep | None = None
        """The step that runs ahead.  Its masks are asked for when it begins."""
        self.has_asked = False
        """The masks of ``begun`` were requested, are ready, or will not come."""

    @property
    def keeps_masks(self) -> bool:
        """Whether no mask may be overwritten, because the engine reads them or is about to."""
        return self.begun is not None and self.has_asked

    def attach_masks(self, step: InFlightStep, message: SubmittedStep, masks: MaskFile | None) -> None:
        """Have the engine wait for the masks of controlled sequences in a step that is not sent yet."""
        sampled = self.sampled(step)
        if not sampled:
            return
        assert masks is not None
        self._engine.link.attach_masks(masks)
        inputs = dict(zip(step.rows, chain.from_iterable(message.calls), strict=True))
        for sequence in sampled:
            found = inputs[sequence]
            if isinstance(found, StepInput):  # the others go on with the same key
                found.samples[0].late_mask = control_of(sequence).id
        plain = [sequence for sequence in step.rows if not sequence.control.exists]
        if plain and not any(sequence.sampling.grammar for sequence in plain):
            message.mask_timeout_ms = SHORT_MASK_TIMEOUT_MS
        if step.runs_ahead:
            self.ahead = step
        else:
            self.begun, self.has_asked = step, False

    def completed(self, step: InFlightStep) -> None:
        """Forget ``step``, which is complete: the step that ran ahead of it has begun."""
        self.removed(step)
        if self.begun is None:
            self.begun, self.ahead, self.has_asked = self.ahead, None, False

    def removed(self, step: InFlightStep) -> None:
        """Forget ``step``, which is no longer in flight."""
        if self.begun is step:
            self.begun = None
        if self.ahead is step:
            self.ahead = None

    def lost(self) -> None:
        """Forget all steps: the engine died."""
        self.begun = self.ahead = None

    def sampled(self, step: InFlightStep) -> list[Sequence]:
        """The controlled sequences that ``step`` samples."""
        return [each for each, row in step.rows.items() if each.control.exists and row.is_sampled]

    def samples(self, sequence: Sequence) -> bool:
        """Whether a step in flight samples the next token of ``sequence``."""
        rows = [step.rows.get(sequence) for step in (self.begun, self.ahead) if step is not None]
        return any(row is not None and row.is_sampled for row in rows) and is_prefilled(sequence)

    def ready(self, step: InFlightStep, rows: Mapping[int, int]) -> None:
        """Tell the engine that the masks of ``step`` are ready, unless the step ended without them.

        Args:
            rows: row of each mask, by the ids of sequences.
        """
        if self.begun is step:
            self._engine.link.masks_ready(step.number, rows)

    def give_up(self) -> None:
        """Tell the engine that no more masks will come for the step that has begun, if there is one."""
        if self.begun is not None:
            self.has_asked = True
            self.ready(self.begun, {})

    def may_run_ahead(self, step: InFlightStep, exchanges_ms: abc.Sequence[float]) -> bool:
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
        return sum(exchanges_ms) <= time_ms and all(control_of(each).may_run_ahead for each in sampled)
