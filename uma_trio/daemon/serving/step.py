"""From a planned step to the engine's, and from its output to tokens; the same for a step that runs ahead.

A step runs ahead when it is planned and submitted while the one before computes.  Answers go on in it with the tokens
that this one is about to sample.  The engine begins it at once, so the device never waits for the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from operator import attrgetter
from typing import Final

import attrs
import trio

from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.policy.cost import Work
from uma_trio.daemon.policy.plan import Plan
from uma_trio.daemon.policy.tick import PolicyState
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.changes import apply_steering, at_end_of_sentence
from uma_trio.daemon.serving.controllers.results import complete_sample
from uma_trio.daemon.serving.embedding import EmbeddingChunk
from uma_trio.daemon.serving.new_tokens import (
    DraftSource,
    NewTokens,
    TokenToBytes,
    append_forced,
    append_tokens,
    no_tokens,
)
from uma_trio.daemon.serving.offload import Transfer
from uma_trio.engine_link.kv_ops import KvOp
from uma_trio.engine_link.messages import (
    DROPPED,
    MASK_LATE,
    Continued,
    Draft,
    DraftInput,
    Step,
    StepInput,
    StepOutput,
    SubmittedStep,
)
from uma_trio.engine_link.sampling import TokenLogprobs
from uma_trio.errors import InvalidConstraint

OUTLIER: Final = 0.5
"""Relative error of the predicted duration above which a step is an outlier: the next plan should know of it at once."""


@attrs.frozen(eq=False, kw_only=True)
class PlannedStep:
    """What a step is to compute.  Nothing of it is submitted yet."""

    plan: Plan
    answers: Mapping[int, Answer]
    """By the sequence ids of the plan."""
    ops: Sequence[KvOp]
    """Operations on the KV cache, before anything is computed."""
    policy_before: PolicyState
    """The policy's state without this step; ``plan.state`` is the one with it."""
    mask_timeout_ms: float
    """Time after the logits in which a mask may still arrive.  Later, its answer gets no token in this step."""
    look_ahead: bool = False
    """The engine finds what grammars force, because the next plan needs it."""
    transfer: Transfer | None = None
    """The state that it saves or loads."""
    embedding: EmbeddingChunk | None = None
    """The texts that it embeds."""
    draft_inputs: Sequence[DraftInput] = ()
    """What the draft model computes."""
    gives_way: bool = False
    """It may be interrupted, because it computes nothing but background answers."""


@attrs.define(eq=False)
class StepRow:
    """What a step computes of one answer."""

    answer: Answer
    end: int
    """Tokens in the KV cache after it.  Until it is complete, with all drafts; then with those that were accepted."""
    n_samples: int
    drafts: Sequence[int] = ()
    source: DraftSource = "lookup"
    """Where the drafts are from."""
    n_model_drafts: int = 0
    """Drafts that the draft model may propose in the step.  Until it is complete, ``n_samples`` counts them."""
    dropped: bool = False
    """The step before ended the answer or sampled nothing for it; the engine leaves it out."""
    n_recomputed: int = 0
    """Tokens that had been computed before, and were lost."""

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples a token of it."""
        return self.n_samples > 0 and not self.dropped

    def propose(self, drafts: Sequence[int]) -> None:
        """The draft model has proposed ``drafts``."""
        n_fewer = self.n_model_drafts - len(drafts)
        self.drafts = drafts
        self.end -= n_fewer
        self.n_samples -= n_fewer

    def accept(self, sampled: Sequence[int]) -> Sequence[int]:
        """The drafts that were sampled as well, and one more token; the engine removes the other drafts.

        Without drafts: what was sampled before the answer ended.
        """
        if not self.drafts:
            n_left = sampled.count(DROPPED)
            self.end -= n_left
            return sampled[: len(sampled) - n_left]
        n = 0
        while n < len(self.drafts) and sampled[n] == self.drafts[n]:
            n += 1
        self.end -= len(self.drafts) - n
        return sampled[: n + 1]


@attrs.define(eq=False)
class InFlightStep:
    """A step that was submitted and is not complete."""

    number: int
    planned: PlannedStep
    rows: Mapping[Answer, StepRow]
    """In the order of the step's inputs."""
    runs_ahead: bool = False
    revoked: bool = False
    """The engine was asked not to begin it."""
    is_masked: bool = False
    """The engine waits in it for masks of controllers."""
    has_asked: bool = False
    """Its masks were requested, are ready, or will not come.  None are requested before it begins."""
    began_at: float = attrs.field(factory=trio.current_time)

    @property
    def completed_at(self) -> float:
        """When it is expected to be complete."""
        return max(trio.current_time(), self.began_at + self.planned.plan.predicted_ms / 1e3)

    def row_of(self, answer: Answer) -> StepRow | None:
        """What it computes of ``answer``, if anything."""
        row = self.rows.get(answer)
        return None if row is None or row.dropped else row

    def drop(self, answer: Answer) -> None:
        """The engine leaves ``answer`` out: the step before sampled no token for it, or one that ended it."""
        if answer in self.rows:
            self.rows[answer].dropped = True

    def move(self, answer: Answer, n_tokens: int) -> None:
        """The step before left ``n_tokens`` more tokens of ``answer`` than was planned; mostly a negative number."""
        if answer in self.rows:
            self.rows[answer].end += n_tokens

    def views_after(self, answers: Iterable[Answer]) -> tuple[list[SequenceView], list[SequenceView]]:
        """What the next step can decode and prefill if it is planned before this one is complete; by sequence id.

        An answer is left out if this step may sample its last token, or the last one of its reasoning.
        """
        decodes: list[SequenceView] = []
        prefills: list[SequenceView] = []
        completed_at = self.completed_at
        for answer in answers:
            row = self.row_of(answer)
            if row is None:
                samples = answer.state is State.DECODE
                view = answer.view()
            else:
                samples = row.n_samples > 0
                if samples and row.n_samples >= answer.n_free:
                    continue
                view = answer.view_after(row.end, samples=samples, completed_at=completed_at)
            (decodes if samples else prefills).append(view)
        decodes.sort(key=attrgetter("seq_id"))  # one whose prefill ends comes after the others
        return decodes, prefills


@attrs.frozen
class CompletedStep:
    """A completed step and its tokens."""

    step: InFlightStep
    output: StepOutput
    new_tokens: Sequence[NewTokens]
    at: float
    is_outlier: bool = attrs.field(init=False)
    """It took much more or less time than predicted."""

    @is_outlier.default
    def _deviates(self) -> bool:
        predicted, drafted = self.step.planned.plan.pass_ms * self.output.n_passes, self.output.drafted
        ms = self.duration_ms + (0.0 if drafted is None else drafted.ms)
        return abs(ms - predicted) > OUTLIER * predicted

    @property
    def duration_ms(self) -> float:
        """Without the time of the draft model."""
        return self.output.decode_ms + self.output.sample_ms

    @property
    def pass_ms(self) -> float:
        """Its duration, divided by the forward passes that were computed."""
        return self.duration_ms / self.output.n_passes

    @property
    def work(self) -> Work:
        """What each forward pass computed: the draft model may have proposed fewer tokens than were planned."""
        work = self.step.planned.plan.work
        if self.output.drafted is None or not any(row.n_model_drafts for row in self.step.rows.values()):
            return work
        n_rows = sum([row.n_samples for row in self.step.rows.values()])
        context = round(work.context_tokens * n_rows / max(1, work.decode_rows))
        return attrs.evolve(work, decode_rows=n_rows, context_tokens=context)


def build_step(
    planned: PlannedStep, number: int, *, in_flight: InFlightStep | None = None
) -> tuple[InFlightStep, SubmittedStep]:
    """The step that was planned: what the daemon remembers of it, and what the engine gets.

    Args:
        in_flight: the step in flight that it runs ahead of.
    """
    plan = planned.plan
    calls: list[_Call] = []
    decodes = iter(zip(plan.decodes, plan.drafts or repeat(0)))  # noqa: B905  (the second has no end)
    for width in plan.call_widths:
        call = _Call()
        for view, n_drafts in islice(decodes, width):
            answer = planned.answers[view.seq_id]
            n_model_drafts = n_drafts if view.drafts_by_model else 0
            drafts = answer.drafts(n_drafts) if n_drafts and not n_model_drafts else ()
            goes_on = in_flight is not None and in_flight.row_of(answer) is not None
            call.inputs.append(view.seq_id if goes_on else answer.decode_input(drafts))
            source: DraftSource = "model" if n_model_drafts else "grammar" if answer.speculation.forced else "lookup"
            n_rows = plan.n_passes + len(drafts) + n_model_drafts
            call.rows.append(StepRow(answer, view.n_context + n_rows, n_rows, drafts, source, n_model_drafts))
        if width:
            calls.append(call)
    if plan.chunks and (plan.prefill_separately or not calls):
        calls.append(_Call())
    for chunk in plan.chunks:
        answer = planned.answers[chunk.seq_id]
        row = None if in_flight is None else in_flight.row_of(answer)
        start = answer.n_computed if row is None else row.end
        prefill = answer.prefill_input(start, chunk.n_tokens)
        calls[-1].inputs.append(prefill)
        end = start + chunk.n_tokens
        n_recomputed = max(0, min(end, answer.place.n_lost) - start)
        calls[-1].rows.append(StepRow(answer, end, len(prefill.samples), n_recomputed=n_recomputed))
    step = Step(
        planned.ops,
        [call.inputs for call in calls],
        number,
        0 if in_flight is None else in_flight.number,
        planned.look_ahead,
        planned.mask_timeout_ms,
    )
    if planned.embedding is not None:
        step.embeddings = planned.embedding.inputs
        step.embedding_adapters = planned.embedding.adapters
    step.gives_way, step.n_passes = planned.gives_way, plan.n_passes
    if planned.draft_inputs:
        step.drafts, step.min_draft_probability = planned.draft_inputs, plan.min_draft_probability
    by_answer = {row.answer: row for call in calls for row in call.rows}
    return InFlightStep(number, planned, by_answer, runs_ahead=in_flight is not None), step


@attrs.define
class _Call:
    """One ``llama_decode`` call."""

    inputs: list[StepInput | Continued] = attrs.field(factory=list)
    rows: list[StepRow] = attrs.field(factory=list)


def drafts_by_answer(step: InFlightStep, output: StepOutput) -> dict[Answer, Draft]:
    """What the draft model answered, by the answers of ``step``."""
    drafts = () if output.drafted is None else output.drafted.drafts
    return {step.planned.answers[draft.seq_id]: draft for draft in drafts}


def complete_step(
    step: InFlightStep,
    output: StepOutput,
    cache: KvCache,
    now: float,
    *,
    can_truncate: bool,
    token_to_bytes: TokenToBytes,
    ahead: InFlightStep | None = None,
) -> list[NewTokens]:
    """Note what a step computed: tokens in the KV cache, and tokens that were sampled.

    Answers that finished while the step was in flight get their tokens counted and nothing else.

    Args:
        can_truncate: the last tokens of an answer can be removed.
        token_to_bytes: of the model's vocabulary.
        ahead: the step that ran ahead of it, and may have begun.
    """
    drafted = drafts_by_answer(step, output)
    forced = dict(output.forced) if can_truncate else {}
    failures, mus = dict(output.grammar_failures), dict(output.mus)
    new_tokens, at = [], 0
    for row in step.rows.values():
        answer, planned_end = row.answer, row.end
        if row.n_model_drafts:
            row.propose(drafted[answer].tokens if answer in drafted else ())
        sampled: Sequence[int] = output.tokens[at : at + row.n_samples]
        scores = output.scores[at : at + row.n_samples]
        at += row.n_samples
        if row.dropped:
            continue
        sampled = _count_tokens(row, sampled, planned_end, cache, ahead)
        allocation = answer.allocation
        if allocation is None or answer.state is State.FINISHED or not row.n_samples:
            continue
        is_plain = not answer.control.exists
        if is_plain and MASK_LATE in sampled:  # then all of its samples have it
            new_tokens.append(_undo(answer, row, cache, can_truncate=can_truncate))
            continue
        answer.due_at = now + answer.target_itl_ms / 1e3
        mu = mus.get(allocation.seq_id)
        new: NewTokens | None
        if is_plain:
            failure = failures.get(allocation.seq_id)
            allowed = forced.get(allocation.seq_id, ()) if mu is None else ()  # mirostat samples one token a step
            new = _complete_row(row, sampled, scores, failure, allowed)
            if answer.bounds.steering is not None and (ahead is None or ahead.row_of(answer) is None):
                apply_steering(new, answer.bounds.steering, token_to_bytes)
            elif answer.bounds.budget is not None and new.reason is None:
                append_forced(new, answer.bounds.budget.end_after(new.tokens, token_to_bytes))
        else:
            new = complete_sample(answer, sampled[0], scores, cache)
        if new is not None:
            if new.reason is None and at_end_of_sentence(answer, token_to_bytes):
                new.reason = "stop"
            new_tokens.append(new)
            if mu is not None and not new.by_controller:
                answer.adapt(mu)
    return new_tokens


def _count_tokens(
    row: StepRow, sampled: Sequence[int], planned_end: int, cache: KvCache, ahead: InFlightStep | None
) -> Sequence[int]:
    """Note which tokens of ``row`` the KV cache holds now; returns the tokens that were sampled, up to a wrong draft.

    Args:
        planned_end: tokens in the KV cache that the step ahead counted on.
    """
    answer, computed_end = row.answer, row.end
    if len(sampled) > 1:
        sampled = row.accept(sampled)
    if ahead is not None and sampled:
        ahead.move(answer, row.end - planned_end)
        if min(sampled) < 0 or not answer.ending_ids.isdisjoint(sampled):  # as the engine does; see ``Continued``
            ahead.drop(answer)
    if answer.allocation is None:
        return sampled  # it has finished, and this step's tokens are counted
    if ahead is None or ahead.row_of(answer) is None:  # perhaps no step follows, so tell the engine
        cache.advance(answer.allocation, computed_end)
        cache.truncate(answer.allocation, row.end)
    else:
        cache.advance(answer.allocation, row.end)
    return sampled


def _complete_row(
    row: StepRow,
    sampled: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    failure: str | None,
    forced: Sequence[int],
) -> NewTokens:
    """Add what was sampled for an answer without a controller.

    Args:
        failure: why its grammar cannot go on.
        forced: the only tokens that its grammar allows next, if all drafts are accepted.
    """
    answer = row.answer
    new = append_tokens(answer, sampled, scores, failure)
    new.n_drafts_accepted = max(0, len(new.tokens) - 1) if row.drafts else 0
    new.draft_source = row.source
    if row.source == "grammar":
        answer.speculation.n_forced += new.n_drafts_accepted
    answer.speculation.forced = forced if len(sampled) == 1 + len(row.drafts) else ()
    answer.state = State.DECODE
    return new


def _undo(answer: Answer, row: StepRow, cache: KvCache, *, can_truncate: bool) -> NewTokens:
    """Roll back a row whose mask was late; a later step computes and samples it again."""
    assert answer.allocation is not None
    reason = None
    if can_truncate:
        cache.truncate(answer.allocation, row.end - 1)
    else:
        reason = InvalidConstraint("the constraint is too complex to be followed in time")
    return no_tokens(answer, reason)
