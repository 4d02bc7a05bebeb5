"""What happened, as numbers: metrics, the perf log, a debug line a tick.  Written while the next step computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import attrs
import structlog

from uma_trio.engine.records import ModelFacts
from uma_trio.errors import UmaError
from uma_trio.kv.cache import KvCache
from uma_trio.protocol.messages import FinishReason
from uma_trio.runner.flight import Delivery, Landed
from uma_trio.runner.job import Job
from uma_trio.telemetry import Telemetry
from uma_trio.telemetry.perf_records import PerfSink, RequestRecord, TickRecord
from uma_trio.telemetry.traffic import Weight, bytes_moved

log = structlog.get_logger("uma_trio.runner")


class Book:
    """Keeps the books of one runner.

    Args:
        perf: also gets a record of each tick and each request.
        debug: log each tick.
    """

    def __init__(self, facts: ModelFacts, perf: PerfSink | None, *, debug: bool) -> None:
        self.telemetry = Telemetry()
        self._facts = facts
        self._perf = perf
        self._debug = debug
        self._weight = Weight(facts.size_bytes, facts.kv_bytes_per_token, facts.n_layer, facts.n_embd, facts.n_vocab)
        self.telemetry.bytes_per_s = facts.memory_bytes_per_s
        self._last_ended_s: float | None = None
        """The end of the last step, on the engine's clock; ``None`` after a time with nothing to do."""

    def idle(self) -> None:
        """There is no next step: the time until the one after is no gap."""
        self._last_ended_s = None

    def tick(self, landed: Landed, *, waiting: int) -> None:
        """A step has been done.

        Args:
            waiting: requests in the queue.
        """
        flight, result = landed.flight, landed.result
        self.freed(flight.freed, flight.pending.began_s)
        if not flight.jobs:
            return
        gap_ms = None if self._last_ended_s is None else 1e3 * (result.started_s - self._last_ended_s)
        self._last_ended_s = result.ended_s
        work = flight.plan.work
        moved = bytes_moved(
            self._weight,
            calls=work.calls,
            tokens=work.decodes + work.prompt_tokens,
            outputs=len(result.tokens),
            context_read=work.context_tokens + work.prompt_tokens * work.prompt_context,
        )
        telemetry, new = self.telemetry, sum([len(delivery.tokens) for delivery in landed.deliveries])
        drafted = sum(flight.plan.drafts)
        accepted = sum([len(delivery.tokens) - 1 for delivery in landed.deliveries if delivery.tokens])
        telemetry.tick(
            n_rows=len(flight.jobs),
            n_prompt_tokens=work.prompt_tokens,
            n_calls=work.calls,
            n_tokens=new,
            decode_ms=result.decode_ms,
            sample_ms=result.sample_ms,
            gap_ms=gap_ms,
            bytes_moved=moved,
        )
        telemetry.logits_rows_total += len(result.tokens)
        telemetry.logits_copied_total += result.copied_rows
        telemetry.drafted_total += drafted
        telemetry.accepted_total += accepted
        if self._perf is not None:
            self._perf.tick(self._record(landed, gap_ms, waiting, moved, new, drafted, accepted))
        if self._debug:
            self._log(landed)

    def _record(
        self,
        landed: Landed,
        gap_ms: float | None,
        waiting: int,
        moved: float,
        new: int,
        drafted: int,
        accepted: int,
    ) -> TickRecord:
        chosen, result = landed.flight.plan, landed.result
        could = (self.telemetry.bytes_per_s or 0.0) * landed.took_ms / 1e3
        return TickRecord(
            t_s=landed.flight.pending.began_s,
            seq_ids=[slot.seq_id for slot in chosen.streams],
            prompts=[(share.seq_id, share.n_tokens) for share in chosen.shares],
            tokens=new,
            context_tokens=chosen.work.context_tokens,
            prompt_context=chosen.work.prompt_context,
            n_decodes=chosen.work.calls,
            drafted=drafted,
            accepted=accepted,
            predicted_ms=chosen.predicted_ms,
            decode_ms=result.decode_ms,
            sample_ms=result.sample_ms,
            host_gap_ms=gap_ms,
            waiting=waiting,
            bytes_moved=moved,
            bandwidth_share=moved / could if could else None,
        )

    def _log(self, landed: Landed) -> None:
        chosen, work, result = landed.flight.plan, landed.flight.plan.work, landed.result
        log.debug(
            "tick",
            streams=len(chosen.streams),
            rows=work.decodes,
            calls=work.calls,
            prompt_tokens=work.prompt_tokens,
            context_tokens=work.context_tokens,
            predicted_ms=round(chosen.predicted_ms, 3),
            decode_ms=round(result.decode_ms, 3),
            sample_ms=round(result.sample_ms, 3),
        )

    def tokens(self, delivery: Delivery, at: float) -> None:
        """A job's new tokens were there at ``at``."""
        job = delivery.job
        gap_ms = job.timed(at, paused=delivery.paused)
        if gap_ms is not None:
            self.telemetry.inter_token_ms.add(gap_ms)
            if self._perf is not None:
                job.gaps_ms.append(gap_ms)
        elif not delivery.n_before:
            self.telemetry.ttft_ms.add(1e3 * (at - job.arrived_at))

    def freed(self, jobs: Iterable[Job], at: float) -> None:
        """``jobs`` have left the KV cache: a step edits before it computes, so ``at`` is its beginning."""
        for job in jobs:
            if job.cancelled_at is not None:
                self.telemetry.cancel_to_free_ms.add(1e3 * (at - job.cancelled_at))

    def ended(self, job: Job, reason: FinishReason | UmaError, at: float) -> None:
        """A request has been answered."""
        failed = isinstance(reason, UmaError)
        why = reason.code if isinstance(reason, UmaError) else reason
        self.telemetry.requests[why] += 1
        if job.admitted_at is not None and not failed:
            self.telemetry.served_ms.add(1e3 * (at - job.admitted_at))
        if self._perf is not None:
            self._perf.request(
                RequestRecord(
                    id=job.request.id,
                    tenant=job.slot.tenant,
                    priority=job.request.slo.priority,
                    arrived_s=job.arrived_at,
                    admitted_s=job.admitted_at,
                    first_token_s=job.first_token_at,
                    ended_s=at,
                    prompt_tokens=len(job.prompt.tokens),
                    cached_tokens=job.n_cached,
                    completion_tokens=len(job.tokens),
                    reason=why,
                    itl_ms=job.gaps_ms,
                )
            )

    def snapshot(
        self,
        running: Collection[Job],
        cache: KvCache,
        *,
        waiting: int,
        tick_error: float,
        spill: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """What ``metrics`` answers, less what the daemon adds.

        Args:
            waiting: requests in the queue.
            tick_error: how far predictions of ticks were off lately, as a share.
            spill: what was saved and loaded, if anything ever is.
        """
        kv = cache.statistics()
        return {
            "model": self._facts.name,
            **self.telemetry.snapshot(),
            "queue_depth": waiting,
            "running": len(running),
            "tick_error": round(tick_error, 3),
            "kv": {
                **attrs.asdict(kv),
                "evicted_total": cache.evicted_total,
                "bytes": round(kv.cells * self._facts.kv_bytes_per_token),
                "bytes_reserved": round((kv.cells_reserved + kv.cached_cells) * self._facts.kv_bytes_per_token),
            },
            "spill": spill,
            "sessions_inter_token_ms": {
                job.request.id: round(job.inter_token_ewma_ms, 3)
                for job in running
                if job.inter_token_ewma_ms is not None
            },
        }
