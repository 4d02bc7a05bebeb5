"""Draft tokens of a draft model: which sequences get some, and how much of them it has computed.

The draft model runs in the engine, right before the model that verifies.  It computes a sequence if drafts are predicted
to pay for that, some hundred tokens a step.  Its latest answer says what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from uma_trio.daemon.scheduling.cost import CostModel, DraftCost, Work
from uma_trio.daemon.serving.new_tokens import NewTokens
from uma_trio.daemon.serving.sequence import Sequence
from uma_trio.daemon.serving.sequence_parts import DraftState
from uma_trio.daemon.serving.step import InFlightStep, PlannedStep, StepRow, drafts_by_sequence
from uma_trio.engine_link.messages import Drafted, DraftInput, ModelInfo, StepOutput
from uma_trio.engine_link.tokens import common_list_prefix

log = structlog.get_logger("uma_trio.serving")

INITIAL_RATE: Final = 0.85
"""Acceptance rate with which every sequence begins."""

RESET_WEIGHT: Final = 0.05
"""Each new sequence moves the acceptance rate of all sequences back to the initial one by this share: texts may have
changed."""

RATE_WEIGHT: Final = 0.12
"""Weight of the latest draft token in the acceptance rate of its sequence."""

PRECISION_WEIGHT: Final = 0.2
"""Weight of the latest draft in the share of proposed tokens that is right."""

SHARED_WEIGHT: Final = 0.03
"""Weight of the latest draft token in the acceptance rate of all sequences, which decides whether the draft model computes a
long prompt."""

MAX_STREAMS: Final = 8
"""Most sequences for which the draft model proposes tokens in one step."""

FEW_MISSING: Final = 16
"""The draft model computes up to this many missing tokens of a sequence without asking whether that pays."""

MAX_MISSING: Final = 256
"""Most missing tokens of a sequence that the draft model computes in the step in which it proposes the next ones."""

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
        """By sequence id, what the draft model has computed of the sequence that was there last."""

    def begin(self, sequence: Sequence) -> None:
        """Propose tokens for ``sequence`` from now on."""
        sequence.speculation.model = DraftState(INITIAL_RATE)
        self._acceptance_rate += RESET_WEIGHT * (INITIAL_RATE - self._acceptance_rate)

    def ended(self, sequence: Sequence) -> None:
        """``sequence`` has ended, and tells how long answers are."""
        self.leave(sequence)
        self._mean_answer += ANSWER_WEIGHT * (len(sequence.tokens) - self._mean_answer)

    def leave(self, sequence: Sequence) -> None:
        """``sequence`` has lost its place in the KV cache.  The next one there may begin with the same tokens."""
        state = sequence.speculation.model
        if state is not None and state.seq_id is not None:
            self._held[state.seq_id] = sequence.known_tokens(0, min(state.n_computed, sequence.n_known))
            state.n_computed, state.seq_id = 0, None

    def _state(self, sequence: Sequence) -> DraftState:
        """The state of ``sequence`` at the place that it has now."""
        state = sequence.speculation.model
        assert state is not None
        assert sequence.allocation is not None
        if state.seq_id != sequence.allocation.seq_id:
            self.leave(sequence)
            state.seq_id = sequence.allocation.seq_id
            held = self._held.pop(state.seq_id, [])
            state.n_computed = common_list_prefix(held, sequence.known_tokens(0, len(held)))
        return state

    def n_missing(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that the draft model has not computed."""
        return sequence.n_known - self._state(sequence).n_computed

    def can_draft(self, sequence: Sequence, most: int, cost: CostModel, n_new: int = 0) -> int:
        """How many tokens the draft model could propose for ``sequence`` in the next step, at most ``most``.

        Args:
            n_new: tokens that the step in flight gives the sequence at most.
        """
        if sequence.speculation.model is None or self.is_far_behind(sequence) or not self._is_worth(sequence, cost):
            return 0
        return max(0, min(most, self._max_tokens - sequence.n_known - n_new, sequence.n_free - 1 - n_new))

    def is_far_behind(self, sequence: Sequence) -> bool:
        """Whether too many tokens of ``sequence`` are missing to compute them in the step of the next draft."""
        return self.n_missing(sequence) > self._max_missing

    def should_catch_up(self, sequence: Sequence, cost: CostModel) -> bool:
        """Whether the draft model is far behind, and computing the missing tokens is predicted to pay."""
        if sequence.speculation.model is None or sequence.n_known >= self._max_tokens:
            return False
        return self.is_far_behind(sequence) and self._is_worth(sequence, cost)

    def _is_worth(self, sequence: Sequence, cost: CostModel) -> bool:
        """Whether drafts are predicted to save more in the rest of the answer than the missing tokens cost."""
        assert sequence.speculation.model is not None
        n_missing = self.n_missing(sequence)
        if n_missing <= FEW_MISSING:
            return True
        n = len(sequence.tokens)
        n_left = min(sequence.max_tokens - n, max(self._mean_answer - n, n))
        p = min(sequence.speculation.model.acceptance_rate, self._acceptance_rate)
        plain_ms = cost.predict(Work(0, 1, sequence.n_known))
        self_ms = self.cost.call_ms + cost.predict(Work(0, 2, sequence.n_known)) - plain_ms
        return (p * plain_ms - self_ms) * n_left > self.cost.ms(n_missing / self._max_batch, n_missing)

    def catch_up(self, sequences: Iterable[Sequence], time_ms: float) -> list[DraftInput]:
        """Inputs with missing tokens of ``sequences``, as many as the draft model computes in ``time_ms``."""
        room = self._max_batch
        if self.cost.token_ms:
            room = min(room, max(self._max_missing, int((time_ms - self.cost.call_ms) / self.cost.token_ms)))
        found = []
        for sequence in sequences:
            if room > 0:
                found.append(self.input(sequence, 0, room))
                room -= len(found[-1].tokens)
        return found

    def input(self, sequence: Sequence, n_drafts: int, room: int = MAX_MISSING) -> DraftInput:
        """The next ``room`` missing tokens of ``sequence``, and how many drafts follow."""
        state = self._state(sequence)
        assert state.seq_id is not None
        start, end = state.n_computed, min(sequence.n_known, state.n_computed + room)
        state.n_computed = end
        temperature = 0.0 if sequence.sampling.params.greedy else sequence.sampling.params.temperature
        return DraftInput(state.seq_id, start, sequence.known_tokens(start, end), n_drafts, temperature)

    def undo(self, planned: PlannedStep) -> None:
        """``planned`` was not begun."""
        for each in planned.draft_inputs:
            state = planned.sequences[each.seq_id].speculation.model
            if state is not None and state.seq_id == each.seq_id:
                state.n_computed = each.position

    # -- results --------------------------------------------------------------------------------

    def completed(self, step: InFlightStep, output: StepOutput, new_tokens: Iterable[NewTokens]) -> None:
        """Learn from a step: what the draft model took, and which of its tokens were right."""
        drafted = drafts_by_sequence(step, output)
        if output.drafted is not None:
            self._learn(output.drafted)
            if output.drafted.failure is not None:
                for sequence in drafted:
                    sequence.speculation.model = None
        n_right = {new.sequence: self._count(new, step.rows[new.sequence]) for new in new_tokens}
        for sequence, draft in drafted.items():
            state = sequence.speculation.model
            if state is not None and state.seq_id == draft.seq_id:
                state.n_computed = min(draft.n_held, n_right.get(sequence, sequence.n_known))

    def _count(self, new: NewTokens, row: StepRow) -> int:
        """Count which drafts were right; returns how many tokens were known before, those drafts included."""
        n_before, state = new.sequence.n_known - len(new.tokens), new.sequence.speculation.model
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
            log.warning("the draft model failed; these sequences go on without it", reason=drafted.failure)
        elif drafted.calls:
            self.cost = self.cost.observed(drafted.calls, drafted.n_tokens, drafted.ms)
