"""What the calls of a step give, added up to the output of the step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from uma_trio.engine.call import Call, SampledCall
from uma_trio.engine.embedding import Embedded
from uma_trio.engine.kv_operations import KvOutcome
from uma_trio.engine.matchers import FilledMasks
from uma_trio.engine_link.messages import StepOutput
from uma_trio.engine_link.sampling import TokenLogprobs


class StepResults:
    """What the calls of one step have given so far, and how long they took.

    Args:
        started_s: when the step began.
        embedded: what came before the KV operations.
        outcome: of the KV operations, which came before the calls.
    """

    def __init__(self, number: int, started_s: float, embedded: Embedded, outcome: KvOutcome) -> None:
        self._number, self._started_s, self._embedded, self._outcome = number, started_s, embedded, outcome
        self._began_s = started_s + embedded.ms / 1e3
        """When the call that is added next began.  The first one has the time of the KV operations, except copies."""
        self._decode_ms = -outcome.copied_ms - outcome.checkpoints_ms
        self._sample_ms = 0.0
        self._tokens: list[int] = []
        self._scores: list[TokenLogprobs | None] = []
        self._mus: list[tuple[int, float]] = []
        self._copied_logits_rows = 0
        self._filled: list[FilledMasks] = []
        self._forced: dict[int, Sequence[int]] = {}

    def add(
        self,
        call: Call,
        sampled: SampledCall,
        decoded_s: float,
        filled: FilledMasks | None,
        forced: Mapping[int, Sequence[int]] | None,
    ) -> None:
        """Add what ``call`` gave.  It ends now.

        Args:
            decoded_s: when its logits were there.
            filled: masks of grammars that it had.
            forced: the only tokens that can follow the sampled ones, by sequence, if that was looked up.
        """
        self._tokens += sampled.tokens
        self._scores += sampled.scores or [None] * len(sampled.tokens)
        self._copied_logits_rows += sampled.copied_logits_rows
        if sampled.mus:
            seq_ids = [step_input.seq_id for step_input in call.inputs for _ in step_input.samples]
            self._mus += [(seq_ids[row], mu) for row, mu in sampled.mus.items()]
        if filled is not None:
            self._filled.append(filled)
            self._forced |= filled.forced
        if forced:
            self._forced |= forced
        ended_s = time.perf_counter()
        self._decode_ms += 1e3 * (decoded_s - self._began_s)
        self._sample_ms += 1e3 * (ended_s - decoded_s)
        self._began_s = ended_s

    def output(self) -> StepOutput:
        """The output of the step, which ends now."""
        embedded, outcome, scores, filled = self._embedded, self._outcome, self._scores, self._filled
        return StepOutput(
            tokens=tuple(self._tokens),
            number=self._number,
            decode_ms=self._decode_ms,
            sample_ms=self._sample_ms,
            started_s=self._started_s,
            ended_s=time.perf_counter(),
            copied_logits_rows=self._copied_logits_rows,
            scores=scores if scores.count(None) < len(scores) else (),
            mus=self._mus,
            copied_ms=outcome.copied_ms,
            saved_bytes=outcome.saved_bytes,
            refused=outcome.refused,
            mask_wait_ms=sum([masks.wait_ms for masks in filled]) if filled else None,
            forced=[*self._forced.items()],
            grammar_failures=[failure for masks in filled for failure in masks.failures.items()],
            state_sizes=outcome.state_sizes,
            embeddings=embedded.vectors,
            embedding_ms=embedded.ms,
            embedding_bytes=embedded.n_bytes,
            embedding_failure=embedded.failure,
            verify_ms=outcome.verify_ms,
        )
