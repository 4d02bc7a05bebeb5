"""What happened, as numbers: timings that predictions learn from, metrics, the perf log."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from typing import Any, Final, Literal

import attrs
import structlog

from uma_trio.engine.messages import ModelInfo
from uma_trio.errors import UmaError
from uma_trio.kv.cache import KvCache
from uma_trio.protocol.messages import Reason
from uma_trio.scheduling.cost import CostModel, Work
from uma_trio.scheduling.view import SequenceView
from uma_trio.serving.sequence import Sequence
from uma_trio.serving.step import CompletedStep, NewTokens
from uma_trio.telemetry import Telemetry
from uma_trio.telemetry.perf_records import PerfSink, RequestRecord, TickRecord
from uma_trio.telemetry.traffic import Weight, bytes_moved

log = structlog.get_logger("uma_trio.serving")

FIRST_BYTES_PER_MS: Final = {"save": 2e6, "load": 1e7, "read": 1e6}
"""Copy rates that are assumed until there are measurements; reading is per thread."""

LEARN_FROM_BYTES: Final = 4_000_000
"""In a smaller copy most of the time is overhead, so it says little about the rate."""

RATE_WEIGHT: Final = 0.3
"""Weight of the latest copy in the rate."""

OVERHEAD_MS: Final = 3.0
"""Of loading a state of any size."""


class StepTimings:
    """What steps and copies of states take on this machine, as learned.

    Args:
        cost: what is known of steps at the start.
        n_batch: tokens of one call.
        readers: threads that verify one state together.
    """

    def __init__(self, cost: CostModel, n_batch: int, readers: int = 1) -> None:
        self.cost = cost
        self._bytes_per_ms = {**FIRST_BYTES_PER_MS, "read": readers * FIRST_BYTES_PER_MS["read"]}
        self._n_batch = n_batch

    def record_step(self, work: Work, ms: float) -> None:
        """Learn from a step."""
        self.cost = self.cost.observed(work, ms)

    def record_copy(self, way: Literal["read", "load", "save"], n_bytes: int, ms: float) -> None:
        """Learn from a copy."""
        if n_bytes >= LEARN_FROM_BYTES:
            rate = n_bytes / max(ms, 1e-3)
            self._bytes_per_ms[way] += RATE_WEIGHT * (rate - self._bytes_per_ms[way])

    def decode_ms(self, decodes: Items[SequenceView]) -> float:
        """What a step of these alone is predicted to take."""
        return self.cost.predict(Work(0, len(decodes), sum([view.n_context for view in decodes])))

    def copy_ms(self, way: Literal["read", "load", "save"], n_bytes: int) -> float:
        """What a copy is predicted to take."""
        return n_bytes / self._bytes_per_ms[way]

    def worth_loading(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether reading, verifying and loading a state is predicted to be faster than computing ``n_tokens`` of it."""
        chunk = min(n_tokens, self._n_batch)
        compute_ms = self.cost.predict(Work(chunk, 0, 0, prompt_context=n_tokens / 2)) * n_tokens / chunk
        return OVERHEAD_MS + self.copy_ms("read", n_bytes) + self.copy_ms("load", n_bytes) < compute_ms


class Stats:
    """Counts for one scheduler.  Called while the next step computes.

    Args:
        perf: also gets a record of each step and each request.
        debug: log each step.
    """

    def __init__(self, info: ModelInfo, perf: PerfSink | None, *, debug: bool) -> None:
        self.telemetry = Telemetry()
        self._info = info
        self._perf = perf
        self._debug = debug
        self._weight = Weight(info.size_bytes, info.kv_bytes_per_token, info.n_layer, info.n_embd, info.n_vocab)
        self.telemetry.bytes_per_s = info.memory_bytes_per_s
        self._last_ended_s: float | None = None
        """End of the last step on the engine's clock; ``None`` after a time with nothing to do."""

    def idle(self) -> None:
        """There is no next step, so the time until the one after is no gap."""
        self._last_ended_s = None

    def record_step(self, completed: CompletedStep, *, waiting: int) -> None:
        """Count a step.

        Args:
            waiting: requests in the queue.
        """
        step, output, plan = completed.step, completed.output, completed.step.plan
        self.record_freed(step.freed, step.began_at)
        if not step.rows:
            return
        gap_ms = None if self._last_ended_s is None else 1e3 * (output.started_s - self._last_ended_s)
        self._last_ended_s = output.ended_s
        work = plan.work
        moved = bytes_moved(
            self._weight,
            calls=work.calls,
            tokens=work.decodes + work.prompt_tokens,
            outputs=len(output.tokens),
            context_read=work.context_tokens + work.prompt_tokens * work.prompt_context,
        )
        n_new = sum([len(new.tokens) for new in completed.new_tokens])
        drafted = sum(plan.drafts)
        accepted = sum([len(new.tokens) - 1 for new in completed.new_tokens if new.tokens])
        telemetry = self.telemetry
        telemetry.record_step(
            n_rows=len(step.rows),
            n_prompt_tokens=work.prompt_tokens,
            n_calls=work.calls,
            n_tokens=n_new,
            decode_ms=output.decode_ms,
            sample_ms=output.sample_ms,
            gap_ms=gap_ms,
            bytes_moved=moved,
        )
        telemetry.run_ahead_steps_total += step.runs_ahead
        telemetry.logits_rows_total += len(output.tokens)
        telemetry.logits_copied_total += output.copied_rows
        telemetry.draft_tokens_total += drafted
        telemetry.accepted_draft_tokens_total += accepted
        if self._perf is not None:
            could_move = (telemetry.bytes_per_s or 0.0) * completed.duration_ms / 1e3
            self._perf.tick(
                TickRecord(
                    t_s=step.began_at,
                    seq_ids=[view.seq_id for view in plan.decodes],
                    prompts=[(chunk.seq_id, chunk.n_tokens) for chunk in plan.chunks],
                    tokens=n_new,
                    context_tokens=work.context_tokens,
                    prompt_context=work.prompt_context,
                    n_decodes=work.calls,
                    drafted=drafted,
                    accepted=accepted,
                    predicted_ms=plan.predicted_ms,
                    decode_ms=output.decode_ms,
                    sample_ms=output.sample_ms,
                    host_gap_ms=gap_ms,
                    waiting=waiting,
                    bytes_moved=moved,
                    bandwidth_share=moved / could_move if could_move else None,
                )
            )
        if self._debug:
            log.debug(
                "step",
                decodes=work.decodes,
                calls=work.calls,
                prompt_tokens=work.prompt_tokens,
                context_tokens=work.context_tokens,
                predicted_ms=round(plan.predicted_ms, 3),
                decode_ms=round(output.decode_ms, 3),
                sample_ms=round(output.sample_ms, 3),
            )

    def record_tokens(self, new: NewTokens, at: float) -> None:
        """Count the tokens that a sequence got at ``at``."""
        sequence = new.sequence
        gap_ms = sequence.record_token_time(at, paused=new.paused)
        if gap_ms is not None:
            self.telemetry.inter_token_ms.add(gap_ms)
            if self._perf is not None:
                sequence.gaps_ms.append(gap_ms)
        elif not new.n_before:
            self.telemetry.ttft_ms.add(1e3 * (at - sequence.arrived_at))

    def record_freed(self, sequences: Iterable[Sequence], at: float) -> None:
        """``sequences``, which were cancelled, have left the KV cache at ``at``, the beginning of a step."""
        for sequence in sequences:
            if sequence.cancelled_at is not None:
                self.telemetry.cancel_to_free_ms.add(1e3 * (at - sequence.cancelled_at))

    def record_end(self, sequence: Sequence, reason: Reason | UmaError, at: float) -> None:
        """Count an answer that has ended."""
        why = reason.code if isinstance(reason, UmaError) else reason
        self.telemetry.requests[why] += 1
        if sequence.admitted_at is not None and not isinstance(reason, UmaError):
            self.telemetry.served_ms.add(1e3 * (at - sequence.admitted_at))
        if self._perf is not None:
            self._perf.request(
                RequestRecord(
                    id=sequence.request.id,
                    principal=sequence.principal.name,
                    priority=sequence.request.slo.priority,
                    arrived_s=sequence.arrived_at,
                    admitted_s=sequence.admitted_at,
                    first_token_s=sequence.first_token_at,
                    ended_s=at,
                    prompt_tokens=len(sequence.prompt.tokens),
                    cached_tokens=sequence.n_cached,
                    completion_tokens=len(sequence.tokens),
                    reason=why,
                    itl_ms=sequence.gaps_ms,
                )
            )

    def snapshot(
        self, running: Collection[Sequence], cache: KvCache, *, waiting: int, tick_error: float
    ) -> dict[str, Any]:
        """The scheduler's part of the metrics.

        Args:
            waiting: requests in the queue.
            tick_error: how far predictions of steps were off lately, as a share.
        """
        kv = cache.statistics()
        per_token = self._info.kv_bytes_per_token
        return {
            "model": self._info.name,
            **self.telemetry.snapshot(),
            "queue_depth": waiting,
            "running": len(running),
            "tick_error": round(tick_error, 3),
            "kv": {
                **attrs.asdict(kv),
                "evicted_total": cache.evicted_total,
                "bytes": round(kv.cells * per_token),
                "bytes_reserved": round((kv.cells_reserved + kv.cached_cells) * per_token),
            },
            "requests_inter_token_ms": {
                sequence.request.id: round(sequence.inter_token_ewma_ms, 3)
                for sequence in running
                if sequence.inter_token_ewma_ms is not None
            },
        }
