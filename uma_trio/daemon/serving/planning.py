"""What the next step contains, or why there is none now.

``daemon/policy/plan.py`` divides the time of a step between streams and prompts.  Here is everything around it: what is
ready, texts to embed and copies of KV states next to it, draft tokens, and when a step may run ahead.  Nothing here
talks to the engine or waits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import attrs
import trio

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.bisection import CrashBisection
from uma_trio.daemon.policy.cost import MAX_MARGIN
from uma_trio.daemon.policy.gaps import NO_FILLERS
from uma_trio.daemon.policy.plan import Plan, plan, repeated
from uma_trio.daemon.policy.tick import Tick
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.policy.view import Priority, SequenceView, foreground
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.controllers.driver import ControllerDriver
from uma_trio.daemon.serving.embedding import EmbeddingChunk, EmbeddingQueue
from uma_trio.daemon.serving.principals import Principals
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.daemon.serving.speculation import Speculator, often_forced
from uma_trio.daemon.serving.step import CompletedStep, InFlightStep, PlannedStep
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.engine_link.attention import Attention, AttentionScan
from uma_trio.engine_link.kv_ops import KvOp
from uma_trio.engine_link.messages import DraftInput, ModelInfo

MASK_TIMEOUT_MS: Final = 10.0
"""An answer whose mask is not ready this long after the logits is left out, and computed again in a later step."""

LONG_MASK_TIMEOUT_MS: Final = 1000.0
"""The same where that is impossible, because the memory cannot be truncated: then the answer fails."""


MIN_UNMATCHED: Final = 8
"""Tokens without a draft of prompt lookup after which a step may have several passes: drafts come in runs."""


class NoStep(enum.Enum):
    """Why there is no next step now."""

    NOTHING_READY = "nothing can be computed"
    NO_ANSWER = "the step in flight computes no answer"
    DRAFTS = "prompt lookup or a grammar may have draft tokens, or the draft model lacks a part of a prompt"
    UNKNOWN_DURATION = "a copy of a KV state or texts to embed wait, and the next plan must know how long they take"
    OUTLIER = "the last step was predicted badly, so a chunk of a prompt could delay all streams"
    CONTROLLER = "a controller says what is sampled next, or may say so before this step is complete"
    SUSPECTS = "the answer that makes the engine fail is searched, so what runs next depends on this step"
    PREEMPTION = "an answer loses its place to a request that waits, and the step in flight computes it"
    CANNOT_TRUNCATE = "a prompt begins or goes on, and its answer cannot be cut to what it turns out to hold"


@attrs.define(eq=False, kw_only=True)
class StepPlanner:
    """Plans the steps of one engine, one after another.

    Its arguments change between two plans, and planning changes some of them: texts and KV operations leave their queues,
    and the policy's state advances.  So a planned step must be submitted, or given back with ``undo``.
    """

    _info: ModelInfo
    _settings: Scheduling
    _timings: StepTimings
    _running: RunningSet
    _waiting: WaitingQueue
    _embeddings: EmbeddingQueue
    _controllers: ControllerDriver
    _principals: Principals
    _bisection: CrashBisection[Answer]
    _speculator: Speculator
    _had_chunk: bool = attrs.field(default=False, init=False)
    """The last step that was planned had texts to embed."""
    last_was_outlier: bool = attrs.field(default=True, init=False)
    """The last step took much more or less time than predicted, or there was none."""

    # -- the next step --------------------------------------------------------------------------

    def next_step(self) -> PlannedStep | NoStep:
        """What to compute now; no step is in flight."""
        self._timings.attention = self._attention()
        starts_at = trio.current_time()
        decodes, prefills = self._views()
        if self._running.is_copying:  # a request waits for the copy: a chunk or background streams would delay it
            decodes, prefills = foreground(decodes), []
        urgent = foreground(decodes) or decodes  # background streams that wait for others are always late
        transfer, embedding = self._running.offloader.next_transfer(urgent), None
        if transfer is not None:
            starts_at += self._running.offloader.predicted_ms(transfer) / 1e3
            if not foreground([*decodes, *prefills]):  # a copy cannot be interrupted, so it has no rows next to it
                decodes, prefills = [], []
        elif not self._running.is_copying:
            embedding = self._next_chunk(urgent, prefills)
        if embedding is not None:
            starts_at += embedding.predicted_ms / 1e3
        by_seq_id: Mapping[int, Answer] = self._running.by_seq_id()
        look_ahead = not prefills and often_forced([by_seq_id[view.seq_id] for view in decodes])
        rows, answers = self._settle(self._plan(decodes, prefills, starts_at), by_seq_id)
        draft_inputs, draft_ms = self._draft_inputs(rows, answers)
        ops: Sequence[KvOp] = self._running.cache.take_ops()
        if transfer is not None:
            ops = (*ops, transfer.op)
        if not rows.decodes and not rows.chunks and not ops and embedding is None:
            return NoStep.NOTHING_READY
        is_alone = transfer is None and embedding is None and not draft_inputs
        gives_way = is_alone and self._gives_way(rows, answers)
        if embedding is not None:
            chosen = _with_chunk(rows, embedding)
        elif is_alone and not (ops or prefills or gives_way):
            chosen = self._repeated(rows, answers, starts_at)
        else:
            chosen = rows
        return self._planned(
            attrs.evolve(chosen, predicted_ms=chosen.predicted_ms + draft_ms) if draft_ms else chosen,
            answers,
            ops,
            look_ahead=look_ahead,
            transfer=transfer,
            embedding=embedding,
            draft_inputs=draft_inputs,
            gives_way=gives_way,
        )

    def obstacle(self, step: InFlightStep) -> NoStep | None:
        """Why no step may run ahead of ``step``, whatever is ready."""
        if step.revoked or not step.rows:
            return NoStep.NO_ANSWER
        if step.planned.plan.drafts and any(row.drafts for row in step.rows.values()):
            return NoStep.DRAFTS
        if self._running.offloader.has_transfers or self._running.is_copying or self._embeddings.is_ready:
            return NoStep.UNKNOWN_DURATION
        if self._bisection.is_active:
            return NoStep.SUSPECTS
        if self._waiting.preempts_at <= trio.current_time():
            return NoStep.PREEMPTION
        if self._controllers and self._controllers.prevents_run_ahead(step):
            return NoStep.CONTROLLER
        if not self._info.can_truncate and (
            self._waiting.may_admit or any(answer.state is State.PREFILL for answer in self._running)
        ):
            return NoStep.CANNOT_TRUNCATE
        return None

    def step_ahead(self, step: InFlightStep) -> PlannedStep | NoStep:
        """What to compute after ``step``, the only one in flight, as soon as it is complete; there is no ``obstacle``.

        It goes on with the tokens that ``step`` samples, so they must not decide what it contains.
        """
        self._timings.attention = self._attention(step)
        decodes, prefills = step.views_after(chain(*self._running.begin_plan(step.rows)))
        answers: Mapping[int, Answer] = self._running.by_seq_id()
        if prefills:
            if self.last_was_outlier:
                return NoStep.OUTLIER
        else:
            streams = [answers[view.seq_id] for view in decodes]
            if self._speculator.depends_on_tokens(streams):
                return NoStep.DRAFTS
            if self._speculator.looks_at(streams):
                decodes = [self._speculator.with_drafts(view, answers[view.seq_id], step) for view in decodes]
        chosen = self._plan(decodes, prefills, step.completed_at)
        if chosen.drafts and any(
            n and not view.drafts_by_model for view, n in zip(chosen.decodes, chosen.drafts, strict=True)
        ):
            return NoStep.DRAFTS
        if not chosen.decodes and not chosen.chunks:
            return NoStep.NOTHING_READY
        chosen, answers = self._settle(chosen, answers, step)
        draft_inputs = self._speculator.inputs(chosen, answers) if chosen.drafts else ()
        gives_way = not draft_inputs and self._gives_way(chosen, answers)
        ops = self._running.cache.take_ops(in_flight=True)
        if not (ops or prefills or gives_way):
            chosen = self._repeated(chosen, answers, step.completed_at, step)
        return self._planned(chosen, answers, ops, draft_inputs=draft_inputs, gives_way=gives_way)

    def _planned(self, chosen: Plan, answers: Mapping[int, Answer], ops: Sequence[KvOp], **others: Any) -> PlannedStep:
        before, self._principals.policy = self._principals.policy, chosen.state
        timeout_ms = MASK_TIMEOUT_MS if self._info.can_truncate else LONG_MASK_TIMEOUT_MS
        return PlannedStep(
            plan=chosen, answers=answers, ops=ops, policy_before=before, mask_timeout_ms=timeout_ms, **others
        )

    def completed(self, completed: CompletedStep) -> None:
        """Learn from a step what the next plan must know."""
        rows = completed.step.rows
        self._speculator.completed(completed)
        self._bisection.step_completed({answer: row.end for answer, row in rows.items()})
        self.last_was_outlier = completed.is_outlier

    def undo(self, planned: PlannedStep, *, began: bool = False) -> None:
        """``planned`` was withdrawn.

        Args:
            began: its KV operations are done.
        """
        if not began:
            self._running.cache.put_back(planned.ops)
        self._speculator.undo(planned)
        self._principals.policy = self._principals.policy.undo(planned.policy_before, planned.plan.state)

    # -- its parts ------------------------------------------------------------------------------

    def _views(self) -> tuple[list[SequenceView], list[SequenceView]]:
        """What the next step can decode and prefill, if none is in flight; by sequence id."""
        decodes, prefills = self._running.begin_plan()
        if self._bisection.is_active:
            suspects = self._bisection.current({*decodes, *prefills})
            decodes = [answer for answer in decodes if not suspects or answer in suspects]
            prefills = [answer for answer in prefills if not suspects or answer in suspects]
        looks_at_all = self._speculator.looks_at(decodes)
        views = [answer.view() for answer in decodes]
        return (
            [
                self._speculator.with_drafts(view, answer) if looks_at_all or answer.speculation.forced else view
                for view, answer in zip(views, decodes, strict=True)
            ],
            [answer.view(pause=self._pause_of(answer)) for answer in prefills],
        )

    def _gives_way(self, chosen: Plan, answers: Mapping[int, Answer]) -> bool:
        """Whether a step without anything else may be interrupted: it computes background answers, and can be undone."""
        if not (self._info.can_truncate and self._info.state_can_truncate):
            return False
        seq_ids = [*[view.seq_id for view in chosen.decodes], *[chunk.seq_id for chunk in chosen.chunks]]
        computed = [answers[seq_id] for seq_id in seq_ids]
        return all(
            answer.priority is Priority.BACKGROUND and not answer.control.exists and not answer.prompt.media
            for answer in computed
        )

    def _pause_of(self, answer: Answer) -> int:
        assert answer.allocation is not None
        return self._running.cache.next_pause(answer.allocation)

    def _draft_inputs(self, rows: Plan, answers: Mapping[int, Answer]) -> tuple[Sequence[DraftInput], float]:
        """What the draft model computes next to ``rows``, and the milliseconds that the plan does not have yet."""
        if not self._speculator.has_model:
            return (), 0.0
        inputs = self._speculator.inputs(rows, answers)
        return (inputs, 0.0) if inputs else self._speculator.catch_up(rows, answers)

    def _next_chunk(self, decodes: Sequence[SequenceView], prefills: Sequence[SequenceView]) -> EmbeddingChunk | None:
        """The texts that the next step embeds, in the time that streams leave.  Prompts get half of that time."""
        had_chunk, self._had_chunk = self._had_chunk, False
        if not self._embeddings.is_ready or (self._bisection.is_active and (decodes or prefills)):
            return None  # after a crash, texts and answers are suspected separately
        time_ms = self._settings.prefill_tick_ms
        if decodes:
            time_ms = 1e3 * (min([view.due_s for view in decodes]) - trio.current_time())
            time_ms = (1 - MAX_MARGIN) * time_ms - self._timings.decode_ms(decodes)
        if prefills:
            time_ms /= 2
        if decodes and had_chunk and time_ms < self._embeddings.min_chunk_ms:
            return None  # streams will be late: every other step has the smallest chunk
        chunk = self._embeddings.next_chunk(time_ms, self._principals.service)
        self._had_chunk = chunk is not None
        return chunk

    def _plan(self, decodes: Sequence[SequenceView], prefills: Sequence[SequenceView], starts_at: float) -> Plan:
        return plan(
            Tick(
                decodes,
                prefills,
                self._principals.policy,
                now_s=starts_at,
                cost=self._timings.cost,
                max_tokens=self._info.n_batch,
                settings=self._settings,
                mixes_prefill=self._info.unified,
                attention=self._timings.attention,
                records_calls=self._info.records_calls,
                fillers=self._fillers() if len(decodes) > 1 else NO_FILLERS,
                draft_cost=self._speculator.model_cost,
                gap_ms=self._timings.gap_ms,
            )
        )

    def _repeated(
        self, chosen: Plan, answers: Mapping[int, Answer], starts_at: float, in_flight: InFlightStep | None = None
    ) -> Plan:
        """``chosen``, which computes no prompt, with several passes if that is quick and nothing comes between them."""
        longest_ms = self._settings.multi_step_ms
        if 2 * chosen.predicted_ms > longest_ms or chosen.drafts or not chosen.decodes:
            return chosen
        if self._speculator.has_model or self._controllers or self._bisection.is_active or not self._info.can_truncate:
            return chosen
        most = min([_max_passes(answers[view.seq_id], in_flight) for view in chosen.decodes])
        due_ms = 1e3 * (min([view.due_s for view in chosen.decodes]) - starts_at)
        return repeated(chosen, most, min(longest_ms, due_ms))

    def _attention(self, step: InFlightStep | None = None) -> Attention:
        """What attention scans in the next step.

        Args:
            step: in flight, with rows that the KV cache does not count yet.
        """
        scan = self._info.attention_scan
        if scan is not AttentionScan.CACHE:
            return Attention(scan)
        n = None if step is None else step.planned.plan.n_rows
        return Attention(scan, self._running.cache.cells_scanned(n))

    def _fillers(self) -> Mapping[int, int]:
        """See ``Tick.fillers``.  No answer holds more than a request may have: a model may know no position beyond that."""
        return self._running.cache.lengths_below(self._info.max_request_tokens) if self._info.fills_gaps else NO_FILLERS

    def _settle(
        self, chosen: Plan, answers: Mapping[int, Answer], in_flight: InFlightStep | None = None
    ) -> tuple[Plan, Mapping[int, Answer]]:
        """Move the answers whose prefill begins to the sequence ids that suit best.

        Returns:
            The plan with those ids, and the answers by them.
        """
        if not chosen.chunks:
            return chosen, answers
        chunks = []
        for chunk in chosen.chunks:
            answer = answers[chunk.seq_id]
            assert answer.allocation is not None
            if not answer.n_computed and (in_flight is None or in_flight.row_of(answer) is None):
                self._running.cache.settle(answer.allocation)
            chunks.append(attrs.evolve(chunk, seq_id=answer.allocation.seq_id))
        return attrs.evolve(chosen, chunks=tuple(chunks)), self._running.by_seq_id()


def _with_chunk(rows: Plan, embedding: EmbeddingChunk) -> Plan:
    """``rows``, with the texts to embed charged to their principals."""
    service = rows.state.service.charged(embedding.costs())
    return attrs.evolve(rows, state=attrs.evolve(rows.state, service=service))


def _max_passes(answer: Answer, in_flight: InFlightStep | None) -> int:
    """How many tokens of ``answer`` may be sampled in a row, after the step in flight, before the daemon must know them."""
    sampling = answer.sampling
    if sampling.grammar is not None or sampling.params.is_adaptive or answer.speculation.forced:
        return 1
    lookup = answer.speculation.lookup
    if lookup is not None and lookup.n_unmatched < MIN_UNMATCHED:
        return 1
    row = None if in_flight is None else in_flight.row_of(answer)
    return answer.n_free - (0 if row is None else row.n_samples)
