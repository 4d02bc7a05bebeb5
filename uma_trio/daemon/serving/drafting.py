"""Draft tokens of a draft model: which answers get some, and how much of them it has computed.

The draft model runs in the engine, right before the model that verifies.  It computes an answer if drafts are predicted
to pay for that, some hundred tokens a step.  Its latest answer says what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from uma_trio.daemon.policy.cost import CostModel, DraftCost, Work
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.answer_parts import DraftState
from uma_trio.daemon.serving.new_tokens import NewTokens
from uma_trio.daemon.serving.step import InFlightStep, PlannedStep, StepRow, drafts_by_answer
from uma_trio.engine_link.messages import Drafted, DraftInput, ModelInfo, StepOutput
from uma_trio.engine_link.tokens import common_list_prefix

log = structlog.get_logger("uma_trio.serving")

INITIAL_RATE: Final = 0.85
"""Acceptance rate with which every answer begins."""

RESET_WEIGHT: Final = 0.05
"""Each new answer moves the acceptance rate of all answers back to the initial one by this share: texts may have
changed."""

RATE_WEIGHT: Final = 0.12
"""Weight of the latest draft token in the acceptance rate of its answer."""

PRECISION_WEIGHT: Final = 0.2
"""Weight of the latest draft in the share of proposed tokens that is right."""

SHARED_WEIGHT: Final = 0.03
"""Weight of the latest draft token in the acceptance rate of all answers, which decides whether the draft model computes a
long prompt."""

MAX_STREAMS: Final = 8
"""Most answers for which the draft model proposes tokens in one step."""

FEW_MISSING: Final = 16
"""The draft model computes up to this many missing tokens of an answer without asking whether that pays."""

MAX_MISSING: Final = 256
"""Most missing tokens of an answer that the draft model computes in the step in which it proposes the next ones."""

ANSWER_WEIGHT: Final = 0.1
"""Weight of the latest answer in the mean length of answers."""

INITIAL_ANSWER: Final = 64.0
"""Mean length of answers that is assumed at first, in tokens."""


class DraftModel:
    """What the draft model of one engine does, and what is known of it.

    Args:
        info: of the model that verifies.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._max_tokens, self._max_batch = info.draft_ctx, info.draft_batch
        self._max_missing = min(MAX_MISSING, info.draft_batch)
        self.cost = DraftCost(info.draft_call_ms, info.draft_token_ms)
        self._acceptance_rate = INITIAL_RATE
        self._mean_answer = INITIAL_ANSWER
        self._held: dict[int, list[int]] = {}
        """By sequence id, what the draft model has computed of the answer that was there last."""

    def begin(self, answer: Answer) -> None:
        """Propose tokens for ``answer`` from now on."""
        answer.speculation.model = DraftState(INITIAL_RATE)
        self._acceptance_rate += RESET_WEIGHT * (INITIAL_RATE - self._acceptance_rate)

    def ended(self, answer: Answer) -> None:
        """``answer`` has ended, and tells how long answers are."""
        self.leave(answer)
        self._mean_answer += ANSWER_WEIGHT * (len(answer.tokens) - self._mean_answer)

    def leave(self, answer: Answer) -> None:
        """``answer`` has lost its place in the KV cache.  The next one there may begin with the same tokens."""
        state = answer.speculation.model
        if state is not None and state.seq_id is not None:
            self._held[state.seq_id] = answer.known_tokens(0, min(state.n_computed, answer.n_known))
            state.n_computed, state.seq_id = 0, None

    def _state(self, answer: Answer) -> DraftState:
        """The state of ``answer`` at the place that it has now."""
        state = answer.speculation.model
        assert state is not None
        assert answer.allocation is not None
        if state.seq_id != answer.allocation.seq_id:
            self.leave(answer)
            state.seq_id = answer.allocation.seq_id
            held = self._held.pop(state.seq_id, [])
            state.n_computed = common_list_prefix(held, answer.known_tokens(0, len(held)))
        return state

    def n_missing(self, answer: Answer) -> int:
        """Tokens of ``answer`` that the draft model has not computed."""
        return answer.n_known - self._state(answer).n_computed

    def can_draft(self, answer: Answer, most: int, cost: CostModel, n_new: int = 0) -> int:
        """How many tokens the draft model could propose for ``answer`` in the next step, at most ``most``.

        Args:
            n_new: tokens that the step in flight gives the answer at most.
        """
        if answer.speculation.model is None or self.is_far_behind(answer) or not self._is_worth(answer, cost):
            return 0
        return max(0, min(most, self._max_tokens - answer.n_known - n_new, answer.n_free - 1 - n_new))

    def is_far_behind(self, answer: Answer) -> bool:
        """Whether too many tokens of ``answer`` are missing to compute them in the step of the next draft."""
        return self.n_missing(answer) > self._max_missing

    def should_catch_up(self, answer: Answer, cost: CostModel) -> bool:
        """Whether the draft model is far behind, and computing the missing tokens is predicted to pay."""
        if answer.speculation.model is None or answer.n_known >= self._max_tokens:
            return False
        return self.is_far_behind(answer) and self._is_worth(answer, cost)

    def _is_worth(self, answer: Answer, cost: CostModel) -> bool:
        """Whether drafts are predicted to save more in the rest of the answer than the missing tokens cost."""
        assert answer.speculation.model is not None
        n_missing = self.n_missing(answer)
        if n_missing <= FEW_MISSING:
            return True
        n = len(answer.tokens)
        n_left = min(answer.max_tokens - n, max(self._mean_answer - n, n))
        p = min(answer.speculation.model.acceptance_rate, self._acceptance_rate)
        plain_ms = cost.predict(Work(0, 1, answer.n_known))
        self_ms = self.cost.call_ms + cost.predict(Work(0, 2, answer.n_known)) - plain_ms
        return (p * plain_ms - self_ms) * n_left > self.cost.ms(n_missing / self._max_batch, n_missing)

    def catch_up(self, answers: Iterable[Answer], time_ms: float) -> list[DraftInput]:
        """Inputs with missing tokens of ``answers``, as many as the draft model computes in ``time_ms``."""
        room = self._max_batch
        if self.cost.token_ms:
            room = min(room, max(self._max_missing, int((time_ms - self.cost.call_ms) / self.cost.token_ms)))
        inputs = []
        for answer in answers:
            if room > 0:
                inputs.append(self.input(answer, 0, room))
                room -= len(inputs[-1].tokens)
        return inputs

    def input(self, answer: Answer, n_drafts: int, room: int = MAX_MISSING) -> DraftInput:
        """The next ``room`` missing tokens of ``answer``, and how many drafts follow."""
        state = self._state(answer)
        assert state.seq_id is not None
        start, end = state.n_computed, min(answer.n_known, state.n_computed + room)
        state.n_computed = end
        temperature = 0.0 if answer.sampling.params.greedy else answer.sampling.params.temperature
        return DraftInput(state.seq_id, start, answer.known_tokens(start, end), n_drafts, temperature)

    def undo(self, planned: PlannedStep) -> None:
        """``planned`` was not begun."""
        for draft_input in planned.draft_inputs:
            state = planned.answers[draft_input.seq_id].speculation.model
            if state is not None and state.seq_id == draft_input.seq_id:
                state.n_computed = draft_input.position

    # -- results --------------------------------------------------------------------------------

    def completed(self, step: InFlightStep, output: StepOutput, new_tokens: Iterable[NewTokens]) -> None:
        """Learn from a step: what the draft model took, and which of its tokens were right."""
        drafted = drafts_by_answer(step, output)
        if output.drafted is not None:
            self._learn(output.drafted)
            if output.drafted.failure is not None:
                for answer in drafted:
                    answer.speculation.model = None
        n_right = {new.answer: self._count(new, step.rows[new.answer]) for new in new_tokens}
        for answer, draft in drafted.items():
            state = answer.speculation.model
            if state is not None and state.seq_id == draft.seq_id:
                state.n_computed = min(draft.n_held, n_right.get(answer, answer.n_known))

    def _count(self, new: NewTokens, row: StepRow) -> int:
        """Count which drafts were right; returns how many tokens were known before, those drafts included."""
        n_before, state = new.answer.n_known - len(new.tokens), new.answer.speculation.model
        if state is None or not new.tokens:
            return n_before
        n_asked = row.n_model_drafts
        n_accepted = new.n_drafts_accepted if n_asked else 0
        if n_asked and row.drafts:
            state.precision += PRECISION_WEIGHT * (n_accepted / len(row.drafts) - state.precision)
        for right in [1.0] * n_accepted + [0.0] * (n_accepted < n_asked):
            state.acceptance_rate += RATE_WEIGHT * (right - state.acceptance_rate)
            self._acceptance_rate += SHARED_WEIGHT * (right - self._acceptance_rate)
        return n_before + n_accepted

    def _learn(self, drafted: Drafted) -> None:
        if drafted.failure is not None:
            log.warning("the draft model failed; these answers go on without it", reason=drafted.failure)
        elif drafted.calls:
            self.cost = self.cost.observed(drafted.calls, drafted.n_tokens, drafted.ms)
