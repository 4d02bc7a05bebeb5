"""From a plan to a step, and from its output to tokens; the same for a step that runs ahead.

A step runs ahead when it is submitted while the one before computes: its inputs are the tokens that this one is about to
sample (``SAMPLED``).  The engine begins it at once, so the device never waits for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import repeat
from typing import Final

import attrs
import trio

from uma_trio.engine.messages import Step, StepInput, StepOutput
from uma_trio.errors import DecodeFailed, UmaError
from uma_trio.kv.cache import KvCache
from uma_trio.kv.ops import KvOp
from uma_trio.offload import Transfer
from uma_trio.protocol.messages import FinishReason
from uma_trio.sampling import NO_TOKEN, TokenLogprobs
from uma_trio.scheduling.policy import Plan
from uma_trio.serving.sequence import Sequence, State

OUTLIER: Final = 0.5
"""Share by which a step took more or less than predicted, from which on the next plan should know at once."""


@attrs.define(eq=False)
class StepRow:
    """What a step computes of one sequence."""

    sequence: Sequence
    end: int
    """Tokens in the KV cache behind it."""
    n_samples: int
    drafts: Items[int] = ()
    dropped: bool = False
    """The sequence has ended in the step before; the engine leaves it out."""


@attrs.define(eq=False)
class InFlightStep:
    """A step that was submitted and is not complete."""

    number: int
    plan: Plan
    rows: Items[StepRow]
    """In the order of the step's inputs."""
    ops: Items[KvOp]
    freed: Items[Sequence] = ()
    """Cancelled sequences whose tokens leave the KV cache with this step."""
    transfer: Transfer | None = None
    """The state that it saves or loads."""
    runs_ahead: bool = False
    revoked: bool = False
    """The engine was asked not to begin it."""
    began_at: float = attrs.field(factory=trio.current_time)

    def computes(self, sequence: Sequence) -> bool:
        """Whether it writes to the KV cells of ``sequence``."""
        return any(row.sequence is sequence and not row.dropped for row in self.rows)

    def end_of(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` in the KV cache behind this step, which computes it."""
        return next(row.end for row in self.rows if row.sequence is sequence)

    def drop(self, sequence: Sequence) -> None:
        """``sequence`` has ended with a token that the engine knows to end it."""
        for row in self.rows:
            if row.sequence is sequence:
                row.dropped = True


@attrs.define(eq=False)
class NewTokens:
    """Tokens that a step sampled for one sequence, on their way to its client."""

    sequence: Sequence
    tokens: Items[int]
    n_before: int
    """Tokens that the sequence had."""
    reason: FinishReason | UmaError | None
    """Why the sequence ends behind these tokens, if it does."""
    paused: bool
    """The client had not read: the time since the last token is not the server's."""
    scores: Items[TokenLogprobs | None]
    """Logprobs of the tokens, perhaps followed by those of rejected draft tokens.  Empty unless requested."""


@attrs.frozen
class CompletedStep:
    """What came of a step."""

    step: InFlightStep
    output: StepOutput
    new_tokens: Items[NewTokens]
    at: float

    @property
    def duration_ms(self) -> float:
        return self.output.decode_ms + self.output.sample_ms

    @property
    def is_outlier(self) -> bool:
        """It took much more or less time than predicted."""
        predicted = self.step.plan.predicted_ms
        return abs(self.duration_ms - predicted) > OUTLIER * predicted


def build_step(
    plan: Plan,
    by_seq_id: Mapping[int, Sequence],
    ops: Items[KvOp],
    number: int,
    *,
    freed: Items[Sequence] = (),
    transfer: Transfer | None = None,
) -> tuple[InFlightStep, Step]:
    """The step that ``plan`` asks for: what the daemon remembers of it, and what the engine gets."""
    rows: list[StepRow] = []
    calls: list[list[StepInput]] = []
    decodes = iter(zip(plan.decodes, plan.drafts or repeat(0)))  # noqa: B905  (the second has no end)
    for width in plan.call_widths:
        inputs = []
        for _ in range(width):
            view, n_drafts = next(decodes)
            sequence = by_seq_id[view.seq_id]
            drafts = sequence.drafts(n_drafts) if n_drafts else ()
            inputs.append(sequence.decode_input(drafts))
            rows.append(StepRow(sequence, sequence.n_computed + 1 + len(drafts), 1 + len(drafts), drafts))
        if inputs:
            calls.append(inputs)
    if plan.prefill_separately or not calls:
        calls.append([])
    for chunk in plan.chunks:
        sequence = by_seq_id[chunk.seq_id]
        prefill = sequence.prefill_input(chunk.n_tokens)
        calls[-1].append(prefill)
        rows.append(StepRow(sequence, sequence.n_computed + chunk.n_tokens, len(prefill.samples)))
    step = Step(ops, [inputs for inputs in calls if inputs], number)
    return InFlightStep(number, plan, rows, ops, freed, transfer), step


def build_run_ahead(
    plan: Plan, by_seq_id: Mapping[int, Sequence], ops: Items[KvOp], number: int, freed: Items[Sequence]
) -> tuple[InFlightStep, Step]:
    """The same for a step behind one in flight that decodes the same sequences."""
    sequences = [by_seq_id[view.seq_id] for view in plan.decodes]
    rows = [StepRow(sequence, sequence.n_computed + 2, 1) for sequence in sequences]
    inputs = iter([sequence.run_ahead_input() for sequence in sequences])
    calls = [[next(inputs) for _ in range(width)] for width in plan.call_widths]
    return InFlightStep(number, plan, rows, ops, freed, runs_ahead=True), Step(ops, calls, number)


def can_run_ahead(sequence: Sequence) -> bool:
    """Whether a step can run ahead for ``sequence``, which the step in flight decodes."""
    last_in_flight = len(sequence.tokens) + 1 >= sequence.max_tokens
    return sequence.state is State.DECODE and not last_in_flight and sequence.sink.has_room


def complete_step(step: InFlightStep, output: StepOutput, cache: KvCache, now: float) -> list[NewTokens]:
    """Note what a step computed: tokens in the KV cache, and tokens that were sampled.

    Sequences that finished while the step was in flight get their tokens counted and nothing else.
    """
    new_tokens = []
    at = 0
    for row in step.rows:
        sampled: Items[int] = output.tokens[at : at + row.n_samples]
        scores = output.scores[at : at + row.n_samples]
        at += row.n_samples
        sequence = row.sequence
        if row.dropped:
            continue
        if sequence.allocation is None:
            continue  # it has finished, and this step's tokens are counted
        cache.advance(sequence.allocation, row.end)
        if sequence.state is State.FINISHED or not row.n_samples:
            continue
        if row.drafts:
            sampled = _accepted(row.drafts, sampled)
            rejected = len(row.drafts) + 1 - len(sampled)
            if rejected:
                cache.truncate(sequence.allocation, row.end - rejected)
        new_tokens.append(_append(sequence, sampled, scores))
        sequence.state = State.DECODE
        sequence.due_at = now + sequence.target_itl_s
    return new_tokens


def _accepted(drafts: Items[int], sampled: Items[int]) -> Items[int]:
    """The draft tokens that were sampled as well, and one more."""
    n = 0
    while n < len(drafts) and sampled[n] == drafts[n]:
        n += 1
    return sampled[: n + 1]


def _append(sequence: Sequence, tokens: Items[int], scores: Items[TokenLogprobs | None]) -> NewTokens:
    """Add sampled tokens to ``sequence``, up to one that ends it."""
    n_before, paused = len(sequence.tokens), sequence.paused
    sequence.paused = False
    reason: FinishReason | UmaError | None = None
    for n, token in enumerate(tokens):
        if token == NO_TOKEN:
            reason, tokens = DecodeFailed("the model gave no usable logits"), tokens[:n]
            break
        sequence.append(token)
        if token in sequence.end_ids:
            reason = "stop"
        elif len(sequence.tokens) == sequence.max_tokens:
            reason = "length"
        if reason is not None:
            tokens = tokens[: n + 1]
            break
    return NewTokens(sequence, tokens, n_before, reason, paused, scores)
