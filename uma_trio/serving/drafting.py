"""Draft tokens of a draft model: which sequences get some, and how much of them it has computed.

The draft model runs in the engine, right before the model that verifies.  It computes a sequence when drafts are
predicted to pay for that, some hundred tokens a step; what it holds is what its latest answer says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from uma_trio.engine.messages import Drafted, DraftInput, ModelInfo, StepOutput
from uma_trio.scheduling.cost import CostModel
from uma_trio.scheduling.draft_cost import DraftCost
from uma_trio.serving.sequence import DraftState, Sequence
from uma_trio.serving.step import InFlightStep, NewTokens, drafts_by_sequence

log = structlog.get_logger("uma_trio.serving")

INITIAL_RATE: Final = 0.85
"""Acceptance rate of the draft model that is assumed at first."""

HOPE: Final = 0.8
"""While no drafts are verified, the expected acceptance rate slowly rises to this: the text may have changed."""

HOPE_WEIGHT: Final = 0.001
"""Share of that way for each token without drafts.  A draft that fails then takes back what 100 tokens gave."""

RATE_WEIGHT: Final = 0.12
"""Weight of the latest draft token in the acceptance rate of its sequence."""

SHARED_WEIGHT: Final = 0.03
"""The same for the rate with which new sequences begin."""

MAX_STREAMS: Final = 8
"""Sequences that it proposes tokens for in one step, at most."""

MAX_MISSING: Final = 64
"""Tokens of a sequence that it computes in the step in which it proposes the next ones, at most; less in small batches."""

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
        self._max_missing = min(MAX_MISSING, max(1, info.draft_batch // MAX_STREAMS))
        self.cost = DraftCost(info.draft_call_ms, info.draft_token_ms)
        self._acceptance_rate = INITIAL_RATE
        self._mean_answer = INITIAL_ANSWER
        self._ended: set[int] = set()
        """Sequence ids whose tokens it may still hold, and no longer needs."""

    def begin(self, sequence: Sequence) -> None:
        """Propose tokens for ``sequence`` from now on."""
        sequence.draft_state = DraftState(self._acceptance_rate)

    def ended(self, sequence: Sequence) -> None:
        """``sequence`` has ended, and tells how long answers are.  Its cells would slow down the others' attention."""
        self.preempted(sequence)
        self._mean_answer += ANSWER_WEIGHT * (len(sequence.tokens) - self._mean_answer)

    def preempted(self, sequence: Sequence) -> None:
        """``sequence`` has lost its place in the KV cache; its tokens in the draft model's cache go, too."""
        state = sequence.draft_state
        if state is not None and state.seq_id is not None:
            self._ended.add(state.seq_id)
            state.n_computed, state.seq_id = 0, None

    def n_missing(self, sequence: Sequence) -> int:
        """Tokens that it lacks of ``sequence``."""
        assert sequence.draft_state is not None
        return sequence.n_known - sequence.draft_state.n_computed

    def can_draft(self, sequence: Sequence, most: int) -> int:
        """How many tokens it could propose for ``sequence`` in the next step, at most ``most``."""
        if sequence.draft_state is None or self.n_missing(sequence) > self._max_missing:
            return 0
        return max(0, min(most, self._max_tokens - sequence.n_known, sequence.max_tokens - len(sequence.tokens) - 1))

    def is_worth(self, sequence: Sequence, cost: CostModel) -> bool:
        """Whether it lacks many tokens of ``sequence``, and computing them is predicted to pay."""
        if (state := sequence.draft_state) is None:
            return False
        n_missing = self.n_missing(sequence)
        if n_missing <= self._max_missing or sequence.n_known >= self._max_tokens:
            return False
        n = len(sequence.tokens)
        n_left = min(sequence.max_tokens - n, max(self._mean_answer - n, n))
        plain_ms = cost.decode_call_ms(1, sequence.n_known)
        p, self_ms = state.acceptance_rate, self.cost.call_ms + cost.decode_call_ms(2, 0) - cost.decode_call_ms(1, 0)
        gain_ms = p * plain_ms - max(0.0, self_ms) - (1 - p) * self.cost.gap_ms
        return gain_ms * n_left > self.cost.ms(n_missing / self._max_batch, n_missing)

    def catch_up(self, sequences: Iterable[Sequence], time_ms: float) -> list[DraftInput]:
        """Inputs with tokens that it lacks of ``sequences``, as many as it computes in ``time_ms``."""
        room = self._max_batch
        if self.cost.token_ms:
            room = min(room, max(self._max_missing, int((time_ms - self.cost.call_ms) / self.cost.token_ms)))
        found = []
        for sequence in sequences:
            if room > 0:
                found.append(self.input(sequence, 0, room))
                room -= len(found[-1].tokens)
        return found

    def removals(self, inputs: Iterable[DraftInput]) -> list[DraftInput]:
        """Inputs that remove the sequences that have ended, if there are ``inputs`` of others."""
        self._ended -= {each.seq_id for each in inputs}
        ended, self._ended = self._ended, set()
        return [DraftInput(seq_id, 0, ()) for seq_id in ended]

    def input(self, sequence: Sequence, n_drafts: int, room: int = MAX_MISSING) -> DraftInput:
        """The next ``room`` tokens that it lacks of ``sequence``, and how many drafts follow."""
        assert sequence.draft_state is not None
        assert sequence.allocation is not None
        sequence.draft_state.seq_id = sequence.allocation.seq_id
        start = sequence.draft_state.n_computed
        end = min(sequence.n_known, start + room)
        return DraftInput(sequence.allocation.seq_id, start, sequence.known_tokens(start, end), n_drafts)

    # -- results --------------------------------------------------------------------------------

    def completed(self, step: InFlightStep, output: StepOutput, new_tokens: Iterable[NewTokens]) -> None:
        """Learn from a step: what the draft model took, and which of its tokens were right."""
        drafted = drafts_by_sequence(step, output)
        if output.drafted is not None:
            self._learn(output.drafted)
            if output.drafted.failure is not None:
                for sequence in drafted:
                    sequence.draft_state = None
        n_right = {new.sequence: self._count(new, step.rows[new.sequence].n_model_drafts) for new in new_tokens}
        for sequence, draft in drafted.items():
            if sequence.draft_state is not None:
                sequence.draft_state.n_computed = min(draft.n_held, n_right.get(sequence, sequence.n_known))

    def _count(self, new: NewTokens, n_asked: int) -> int:
        """Count which drafts were right; returns how many tokens were known before, those drafts included."""
        n_before, state = new.sequence.n_known - len(new.tokens), new.sequence.draft_state
        if state is None or not new.tokens:
            return n_before
        if not n_asked:
            state.acceptance_rate += HOPE_WEIGHT * max(0.0, HOPE - state.acceptance_rate)
            self._acceptance_rate += HOPE_WEIGHT * max(0.0, HOPE - self._acceptance_rate)
            return n_before
        for right in [1.0] * new.n_drafts_accepted + [0.0] * (new.n_drafts_accepted < n_asked):
            state.acceptance_rate += RATE_WEIGHT * (right - state.acceptance_rate)
            self._acceptance_rate += SHARED_WEIGHT * (right - self._acceptance_rate)
        return n_before + new.n_drafts_accepted

    def waited(self, gap_ms: float) -> None:
        """The device waited so long for a step that did not run ahead."""
        self.cost = self.cost.waited(gap_ms)

    def _learn(self, drafted: Drafted) -> None:
        if drafted.failure is not None:
            log.warning("the draft model failed; these sequences go on without it", reason=drafted.failure)
        elif drafted.calls:
            self.cost = self.cost.observed(drafted.calls, drafted.n_tokens, drafted.ms)
