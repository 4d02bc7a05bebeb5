"""What happened, as numbers: metrics, the perf log, a debug line for each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import attrs
import structlog

from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.policy.cost import Work
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.new_tokens import DRAFT_SOURCES, NewTokens
from uma_trio.daemon.serving.replaying import Kept, replay_of
from uma_trio.daemon.serving.step import CompletedStep
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.errors import UmaError
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import FinishReason, Timings, Usage
from uma_trio.telemetry.metrics import ModelSize, Telemetry, estimate_bytes_moved
from uma_trio.telemetry.perf_records import PerfSink, RequestRecord, TickRecord

log = structlog.get_logger("uma_trio.serving")


def log_request(
    request: Generate, model: str, reason: str, usage: Usage, timings: Timings, *, index: int | None
) -> None:
    """Log an answer that has ended."""
    log.info(
        "request",
        id=request.id,
        index=index,
        session=request.session_id,
        model=model,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        tokens=usage.completion_tokens,
        ttft_ms=timings.ttft_ms,
        tokens_per_s=timings.tokens_per_s,
        total_ms=timings.total_ms,
        reason=reason,
    )


def log_step(completed: CompletedStep) -> None:
    """Log a step that computed something."""
    work, plan, output = completed.work, completed.step.planned.plan, completed.output
    log.debug(
        "step",
        decodes=work.decode_rows,
        calls=work.n_calls,
        prompt_tokens=work.prefill_tokens,
        context_tokens=work.context_tokens,
        predicted_ms=round(plan.predicted_ms, 3),
        decode_ms=round(output.decode_ms, 3),
        sample_ms=round(output.sample_ms, 3),
    )


def _context_read(work: Work, scan: AttentionScan) -> float:
    """Cells that a step read.  A kernel that scans the whole cache reads each cell once for all rows of a call."""
    if scan is AttentionScan.CACHE:
        return work.n_calls * max(work.mean_prefill_context, work.context_tokens / max(1, work.decode_rows))
    return work.context_tokens + work.prefill_tokens * work.mean_prefill_context


def _drafts(completed: CompletedStep) -> dict[str, int]:
    """The fields of a ``TickRecord`` about draft tokens."""
    drafted, accepted = dict.fromkeys(DRAFT_SOURCES, 0), dict.fromkeys(DRAFT_SOURCES, 0)
    for row in completed.step.rows.values():
        drafted[row.source] += len(row.drafts)
    for new in completed.new_tokens:
        accepted[new.draft_source] += new.n_drafts_accepted
    return {
        "draft_tokens": drafted["lookup"] + drafted["model"],
        "accepted_draft_tokens": accepted["lookup"] + accepted["model"],
        "model_draft_tokens": drafted["model"],
        "accepted_model_draft_tokens": accepted["model"],
        "forced_tokens": accepted["grammar"],
    }


class Stats:
    """Counts for one scheduler.  Called while the next step computes.

    Args:
        debug: log each step.
        replay: what records of answers have for a replay.
    """

    def __init__(self, info: ModelInfo, *, debug: bool, replay: Kept = "off") -> None:
        self.telemetry = Telemetry(bytes_per_s=info.memory_bytes_per_s)
        self._info = info
        self.sinks: list[PerfSink] = []
        """Receivers of records."""
        self._debug = debug
        self._replay = replay
        self._model_size = ModelSize(info.size_bytes, info.kv_bytes_per_token, info.n_layer, info.n_embd, info.n_vocab)
        self._last_ended_s: float | None = None
        """End of the last step on the engine's clock; ``None`` after a time with nothing to compute."""
        self._idle_ms = 0.0
        """How long there was no request since the last record of a tick."""

    def end_of_work(self) -> None:
        """There is no next step, so the time until the one after is no gap."""
        self._last_ended_s = None

    def record_idle(self, ms: float) -> None:
        """Count a time in which there was no request."""
        self._idle_ms += ms

    def record_step(self, completed: CompletedStep, *, waiting: int, running: int) -> float | None:
        """Count a step.

        Args:
            waiting: requests in the queue.
            running: answers that have places.

        Returns:
            Milliseconds that the device waited for it; ``None`` if there was nothing to compute before.
        """
        step, output = completed.step, completed.output
        if not (step.rows or output.embedding_ms or output.copied_ms):
            return None
        gap_ms = None if self._last_ended_s is None else 1e3 * (output.started_s - self._last_ended_s)
        self._last_ended_s = output.ended_s
        tick = TickRecord(
            start_s=step.began_at,
            embedding_ms=output.embedding_ms or None,
            copy_ms=output.copied_ms or None,
            host_gap_ms=gap_ms,
            idle_ms=self._idle_ms or None,
            running=running,
            queue_depth=waiting,
            **(self._computed(completed) if step.rows else {"decode_calls": 0}),
        )
        self._idle_ms = 0.0
        if step.rows:
            self.telemetry.count_tick(tick)
            if self._debug:
                log_step(completed)
        self._write(tick)
        return gap_ms

    def _computed(self, completed: CompletedStep) -> dict[str, Any]:
        """The fields of a ``TickRecord`` about what the step computed."""
        step, output, work = completed.step, completed.output, completed.work
        plan, n = step.planned.plan, output.n_passes
        moved = estimate_bytes_moved(
            self._model_size,
            calls=n * work.n_calls,
            tokens=n * work.decode_rows + work.prefill_tokens,
            outputs=len(output.tokens),
            context_read=n * _context_read(work, self._info.attention_scan),
        )
        could_move = (self._info.memory_bytes_per_s or 0.0) * completed.duration_ms / 1e3
        fields: dict[str, Any] = _drafts(completed) if plan.drafts else {}
        if plan.chunks:
            fields["recomputed_tokens"] = sum([row.n_recomputed for row in step.rows.values()])
        return fields | {
            "decode_seq_ids": [view.seq_id for view in plan.decodes],
            "prefill_chunks": [(chunk.seq_id, chunk.n_tokens) for chunk in plan.chunks],
            "tokens": sum([len(new.tokens) for new in completed.new_tokens]),
            "context_tokens": n * work.context_tokens,
            "prefill_context": work.mean_prefill_context,
            "decode_calls": n * work.n_calls,
            "n_passes": n,
            "late_masks": sum([new.is_late for new in completed.new_tokens]),
            "logits_rows": len(output.tokens),
            "copied_logits_rows": output.copied_logits_rows,
            "runs_ahead": step.runs_ahead,
            "draft_model_ms": None if output.drafted is None else output.drafted.ms,
            "predicted_ms": plan.predicted_ms,
            "decode_ms": output.decode_ms,
            "sample_ms": output.sample_ms,
            "mask_wait_ms": output.mask_wait_ms,
            "bytes_moved": moved,
            "memory_bandwidth_share": moved / could_move if could_move else None,
        }

    def record_tokens(self, new: NewTokens, at: float) -> None:
        """Count the tokens that an answer got at ``at``."""
        answer, telemetry = new.answer, self.telemetry
        counts = telemetry.principals.of(answer.principal.name)
        counts.tokens_total += len(new.tokens)
        # a fork begins with tokens that it has not got
        is_first = answer.times.first_token_at is None and not new.n_before
        gap_ms = answer.times.record_tokens(at, paused=new.paused)
        if gap_ms is not None:
            telemetry.record_inter_token(gap_ms)
            if self.sinks:
                answer.times.gaps_ms.append(gap_ms)
        elif is_first:
            assert answer.times.admitted_at is not None
            telemetry.record_first_token(1e3 * (at - answer.times.arrived_at), 1e3 * (at - answer.times.admitted_at))
            counts.prompt_tokens_total += len(answer.prompt.tokens) - answer.n_cached
            counts.cached_tokens_total += answer.n_cached

    def record_end(self, answer: Answer, reason: FinishReason | UmaError, at: float) -> None:
        """Count an answer that has ended."""
        why = reason.code if isinstance(reason, UmaError) else reason
        model = self._info.served_name
        log_request(answer.request, model, why, answer.usage, answer.timings(at), index=answer.index)
        record = RequestRecord(
            id=answer.request.id,
            principal=answer.principal.name,
            priority=answer.request.slo.priority,
            arrived_s=answer.times.arrived_at,
            admitted_s=answer.times.admitted_at,
            first_token_s=answer.times.first_token_at,
            finished_s=at,
            prompt_tokens=len(answer.prompt.tokens),
            cached_tokens=answer.n_cached,
            completion_tokens=len(answer.tokens),
            finish_reason=why,
            inter_token_ms=answer.times.gaps_ms,
            replay=replay_of(answer, self._replay) if self.sinks and answer.times.admitted_at is not None else None,
        )
        self.telemetry.count_request(record)
        self._write(record)

    def _write(self, record: TickRecord | RequestRecord) -> None:
        for sink in self.sinks:
            sink.write(record)

    def snapshot(
        self, running: Collection[Answer], cache: KvCache, *, waiting: int, tick_error: float
    ) -> dict[str, Any]:
        """The scheduler's part of the metrics.

        Args:
            waiting: requests in the queue.
            tick_error: how far predictions of steps were off lately, as a share.
        """
        kv = cache.statistics()
        per_token = self._info.kv_bytes_per_token
        return {
            "model": self._info.served_name,
            **self.telemetry.snapshot(),
            "queue_depth": waiting,
            "running": len(running),
            "principals": self.telemetry.principals.snapshot(answer.principal.name for answer in running),
            "tick_prediction_error": round(tick_error, 3),
            "kv": {
                **attrs.asdict(kv),
                "evicted_total": cache.evicted_total,
                "bytes": round(kv.cells * per_token),
                "bytes_used": round((kv.cells_used + kv.cached_cells) * per_token),
                "bytes_reserved": round((kv.cells_reserved + kv.cached_cells) * per_token),
            },
            "requests_inter_token_ms": {
                answer.request.id: round(answer.times.inter_token_ewma_ms, 3)
                for answer in running
                if answer.times.inter_token_ewma_ms is not None
            },
        }


def backlog_of(running: Iterable[Answer], waiting: Iterable[Answer]) -> int:
    """Prompt tokens that are still to be computed.

    What of a waiting prompt is in the KV cache is not known before it has a place, so all of it counts, unless its state
    was copied when it lost its place.
    """
    left = [answer.n_known - answer.n_computed for answer in running if answer.state is State.PREFILL]
    return sum(left) + sum([answer.n_known for answer in waiting if answer.place.parked is None])


def adapters_in_use(info: ModelInfo, running: Iterable[Answer], waiting: Iterable[Answer]) -> dict[str, dict[str, int]]:
    """How many running and waiting requests use each of the model's adapters, by its name."""
    counts = {adapter.name: {"running": 0, "waiting": 0} for adapter in info.adapters}
    for state, answers in (("running", running), ("waiting", waiting)):
        for number, _ in chain.from_iterable(answer.adapters.scales for answer in answers):
            counts[info.adapters[number].name][state] += 1
    return counts
