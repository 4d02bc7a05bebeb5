"""Where draft tokens are from: prompt lookup, grammars that allow one token only, and a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import msgspec
import trio

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.bisection import CrashBisection
from uma_trio.daemon.policy.cost import DraftCost
from uma_trio.daemon.policy.plan import Plan
from uma_trio.daemon.policy.tick import NO_DRAFT_MODEL
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.drafting import MAX_STREAMS, DraftModel
from uma_trio.daemon.serving.prompt_lookup import PromptLookup
from uma_trio.daemon.serving.step import CompletedStep, InFlightStep, PlannedStep
from uma_trio.engine_link.messages import DraftInput, ModelInfo

MAX_DRAFTS: Final = 32
"""Draft tokens of one answer in one step."""

MAX_DECODES_WITH_DRAFTS: Final = MAX_STREAMS
"""Answers.  A wider batch has little to gain from drafts, and looking for them would take time between two steps."""

INITIAL_ACCEPTANCE_RATE: Final = 0.5
"""Acceptance rate of draft tokens that is assumed at first."""

INITIAL_ACCEPTANCE_RATE_IF_REQUESTED: Final = 0.95
"""The same where the request asks for speculation."""


@attrs.define(eq=False)
class Speculator:
    """The draft tokens of the steps that one planner plans.

    Args:
        bisection: while it searches, the draft model computes nothing, so it is no suspect.
    """

    _info: ModelInfo
    _settings: Scheduling
    _timings: StepTimings
    _bisection: CrashBisection[Answer]
    _model: DraftModel | None = attrs.field(init=False)

    @_model.default
    def _draft_model(self) -> DraftModel | None:
        return None if self._info.draft_model is None else DraftModel(self._info)

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model."""
        return self._model is not None

    @property
    def model_cost(self) -> DraftCost:
        """What the draft model takes."""
        return NO_DRAFT_MODEL if self._model is None else self._model.cost

    # -- the life of an answer -----------------------------------------------------------------

    def arrived(self, answer: Answer) -> None:
        """Let the draft model propose tokens of ``answer`` from the first one on, if it may."""
        if self._model is not None and self._is_allowed(answer):
            self._model.begin(answer)

    def began(self, answer: Answer) -> None:
        """``answer`` has its first token: look for draft tokens in what it knows, if that is allowed."""
        if self._is_allowed(answer):
            known = [*answer.prompt.tokens.tolist(), *answer.tokens]
            wanted = answer.request.speculate
            rate = INITIAL_ACCEPTANCE_RATE_IF_REQUESTED if wanted else INITIAL_ACCEPTANCE_RATE
            answer.speculation.lookup = PromptLookup(known, acceptance_rate=rate)

    def _is_allowed(self, answer: Answer) -> bool:
        """Whether wrong draft tokens of ``answer`` can be removed, and its request wants some."""
        wanted = answer.request.speculate
        if answer.prompt.media:
            return False  # neither prompt lookup nor a draft model knows what a picture shows
        if answer.control.exists:
            return False  # a controller may refuse each token, so it is asked one at a time
        can_draft = self._info.can_truncate and not answer.sampling.params.is_adaptive
        return can_draft and (self._settings.speculation if wanted is None else wanted)

    def preempted(self, answer: Answer) -> None:
        """``answer`` has lost its place in the KV cache."""
        if self._model is not None:
            self._model.leave(answer)

    def ended(self, answer: Answer) -> None:
        """``answer`` has ended."""
        if self._model is not None:
            self._model.ended(answer)

    # -- the next step --------------------------------------------------------------------------

    def looks_at(self, streams: Sequence[Answer]) -> bool:
        """Whether the next step may have drafts of ``streams`` that no grammar forces."""
        return len(streams) <= MAX_DECODES_WITH_DRAFTS

    def with_drafts(self, view: SequenceView, answer: Answer, step: InFlightStep | None = None) -> SequenceView:
        """``view`` with the drafts that prompt lookup, the grammar or the draft model has.

        Args:
            step: in flight.  Prompt lookup may have drafts after it if it has some now.
        """
        n = len(answer.drafts(MAX_DRAFTS))
        if n:
            view = msgspec.structs.replace(view, n_drafts=n)
        state = answer.speculation.model
        if self._model is None or state is None or answer.speculation.forced or self._bisection.is_active:
            return view
        if n and view.acceptance_rate >= state.acceptance_rate:
            return view
        row = None if step is None else step.row_of(answer)
        n_drafts = self._model.can_draft(answer, MAX_DRAFTS, self._timings.cost, 0 if row is None else row.n_samples)
        if not n_drafts:
            return view
        return msgspec.structs.replace(
            view,
            n_drafts=n_drafts,
            acceptance_rate=state.acceptance_rate,
            drafts_by_model=True,
            draft_precision=state.precision,
            n_missing=self._model.n_missing(answer) - 1,
        )

    def depends_on_tokens(self, streams: Sequence[Answer]) -> bool:
        """Whether drafts in the next step depend on tokens of the one in flight, or the draft model has to catch up."""
        n_forced = sum([len(stream.speculation.forced) for stream in streams])
        return n_forced > 0 or often_forced(streams) or bool(self._behind(streams))

    def inputs(self, chosen: Plan, answers: Mapping[int, Answer]) -> list[DraftInput]:
        """What the draft model computes for ``chosen``."""
        if self._model is None:
            return []
        return [
            self._model.input(answers[view.seq_id], n)
            for view, n in zip(chosen.decodes, chosen.drafts, strict=False)
            if n and view.drafts_by_model
        ]

    def catch_up(self, chosen: Plan, answers: Mapping[int, Answer]) -> tuple[list[DraftInput], float]:
        """What the draft model computes next to ``chosen``, which has no drafts of it, and the milliseconds."""
        if self._model is None or chosen.chunks:
            return [], 0.0
        behind = self._behind([answers[view.seq_id] for view in chosen.decodes])
        if not behind:
            return [], 0.0
        time_ms = 1e3 * (min([view.due_s for view in chosen.decodes]) - trio.current_time())
        inputs = self._model.catch_up(behind, min(time_ms / 2, self._settings.prefill_tick_ms) - chosen.predicted_ms)
        return inputs, self._model.cost.ms(1, sum([len(draft_input.tokens) for draft_input in inputs]))

    def _behind(self, streams: Sequence[Answer]) -> list[Answer]:
        """Streams that the draft model should compute the tokens of, before it can propose some."""
        if self._model is None or not self.looks_at(streams) or self._bisection.is_active:
            return []
        return [stream for stream in streams if self._model.should_catch_up(stream, self._timings.cost)]

    # -- results --------------------------------------------------------------------------------

    def completed(self, completed: CompletedStep) -> None:
        """Learn what the draft model took, and which of its tokens were right."""
        if self._model is not None:
            self._model.completed(completed.step, completed.output, completed.new_tokens)

    def undo(self, planned: PlannedStep) -> None:
        """``planned`` was not begun."""
        if self._model is not None:
            self._model.undo(planned)


def often_forced(streams: Sequence[Answer]) -> bool:
    """Whether to know what grammars force before the next step is planned: if that helps half of the answers."""
    return 2 * sum([answer.often_forced for answer in streams]) >= max(1, len(streams))
