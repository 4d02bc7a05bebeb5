"""Counters and recent measurements: plain numbers, with no lock and no work on the hot path.

All of it is written and read by the one thread that runs the event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import attrs
import numpy as np

RECENT: Final = 4096
"""Measurements that percentiles are taken over: at 100 tokens a second, the last 40 seconds."""


class Recent:
    """The last ``size`` measurements; percentiles are computed when asked for."""

    def __init__(self, size: int = RECENT) -> None:
        self._values = np.zeros(size, dtype=np.float64)
        self._count = 0
        self._found: dict[tuple[float, ...], list[float | None]] = {}
        """Percentiles since the last measurement: many who ask at once cost one computation."""

    def add(self, value: float) -> None:
        self._values[self._count % len(self._values)] = value
        self._count += 1
        if self._found:
            self._found.clear()

    def percentiles(self, *wanted: float) -> list[float | None]:
        """One for each of ``wanted``, in [0, 100]; ``None`` while nothing was measured."""
        if wanted not in self._found:
            self._found[wanted] = self._percentiles(wanted)
        return self._found[wanted]

    def _percentiles(self, wanted: tuple[float, ...]) -> list[float | None]:
        kept = self._values[: self._count]
        if not len(kept):
            return [None for _ in wanted]
        return [round(float(value), 3) for value in np.percentile(kept, wanted)]


@attrs.define
class Average:
    """Mean of all that was added."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        return round(self.total / self.count, 3) if self.count else None


@attrs.define
class Telemetry:
    """What one model's runner counts; docs/METRICS.md explains each."""

    tokens_total: int = 0
    prompt_tokens_total: int = 0
    ticks_total: int = 0
    batch_calls_total: int = 0
    batch_rows_total: int = 0
    chained_total: int = 0
    """Ticks that followed the one before without a plan in between."""
    prompts_reused_total: int = 0
    """Prompts of which something was there already."""
    cached_tokens_total: int = 0
    """Prompt tokens that did not have to be computed."""
    drafted_total: int = 0
    """Guesses at tokens that were checked, and"""
    accepted_total: int = 0
    """those of them that came true."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Finished requests by reason."""
    rejected: Counter[str] = attrs.field(factory=Counter)
    """Refused requests and connections by error code."""
    inter_token_ms: Recent = attrs.field(factory=Recent)
    ttft_ms: Recent = attrs.field(factory=Recent)
    host_gap_ms: Recent = attrs.field(factory=Recent)
    cancel_to_free_ms: Recent = attrs.field(factory=Recent)
    served_ms: Average = attrs.field(factory=Average)
    """From getting a sequence to the end, of requests that ran to theirs or were cancelled."""
    decode_ms: Average = attrs.field(factory=Average)
    sample_ms: Average = attrs.field(factory=Average)

    logits_rows_total: int = 0
    """Rows of logits that tokens were chosen from, and"""
    logits_copied_total: int = 0
    """those of them that were copied before."""
    bytes_moved: float = 0.0
    """Estimated; see ``traffic``."""
    busy_ms: float = 0.0
    """In steps, and"""
    gaps_ms: float = 0.0
    """between them, while there was something to do."""
    bytes_per_s: float | None = None
    """What the memory can move, if that is known."""

    def tick(
        self,
        *,
        n_rows: int,
        n_prompt_tokens: int,
        n_tokens: int,
        decode_ms: float,
        sample_ms: float,
        gap_ms: float | None = None,
        n_calls: int = 1,
        bytes_moved: float = 0.0,
    ) -> None:
        """One tick has ended that served ``n_rows`` sequences and gave ``n_tokens``."""
        self.ticks_total += 1
        self.batch_calls_total += n_calls
        self.batch_rows_total += n_rows
        self.prompt_tokens_total += n_prompt_tokens
        self.tokens_total += n_tokens
        self.decode_ms.add(decode_ms)
        self.sample_ms.add(sample_ms)
        self.busy_ms += decode_ms + sample_ms
        self.bytes_moved += bytes_moved
        if gap_ms is not None:
            self.host_gap_ms.add(gap_ms)
            self.gaps_ms += gap_ms

    def reused(self, n: int) -> None:
        """The first ``n`` tokens of a prompt need not be computed."""
        self.prompts_reused_total += n > 0
        self.cached_tokens_total += n

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``None`` for what was not measured yet."""
        p50, p95, p99 = self.inter_token_ms.percentiles(50, 95, 99)
        ttft_p50, ttft_p95 = self.ttft_ms.percentiles(50, 95)
        gap_p50, gap_p95 = self.host_gap_ms.percentiles(50, 95)
        freed_p50, freed_max = self.cancel_to_free_ms.percentiles(50, 100)
        calls, tokens = self.batch_calls_total, self.tokens_total + self.prompt_tokens_total
        seconds = self.busy_ms / 1e3
        could = None if self.bytes_per_s is None else self.bytes_per_s * seconds
        return {
            "tokens_total": self.tokens_total,
            "prompt_tokens_total": self.prompt_tokens_total,
            "ticks_total": self.ticks_total,
            "batch_calls_total": calls,
            "chained_total": self.chained_total,
            "prompts_reused_total": self.prompts_reused_total,
            "cached_tokens_total": self.cached_tokens_total,
            "drafted_total": self.drafted_total,
            "accepted_total": self.accepted_total,
            "avg_batch": round(self.batch_rows_total / self.ticks_total, 3) if self.ticks_total else None,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "ttft_p50_ms": ttft_p50,
            "ttft_p95_ms": ttft_p95,
            "decode_ms_avg": self.decode_ms.value,
            "sample_ms_avg": self.sample_ms.value,
            "host_gap_p50_ms": gap_p50,
            "host_gap_p95_ms": gap_p95,
            "logits_copy_free_share": (
                round(1 - self.logits_copied_total / self.logits_rows_total, 4) if self.logits_rows_total else None
            ),
            "idle_share": round(self.gaps_ms / (self.gaps_ms + self.busy_ms), 4) if self.busy_ms else None,
            "bytes_per_token": round(self.bytes_moved / tokens) if tokens else None,
            "bandwidth_share": round(self.bytes_moved / could, 4) if could else None,
            "cancel_to_free_p50_ms": freed_p50,
            "cancel_to_free_max_ms": freed_max,
            "requests_total": dict(self.requests),
            "rejected_total": dict(self.rejected),
        }


@attrs.define
class SpillMeters:
    """What was saved to files and loaded from them."""

    saved_total: int = 0
    saved_bytes_total: int = 0
    loaded_total: int = 0
    loaded_bytes_total: int = 0
    loaded_tokens_total: int = 0
    """Tokens that did not have to be computed."""
    skipped_total: int = 0
    """Sequences that were not saved, since computing them again is quicker than loading them."""
    failed_total: int = 0
    """Sequences that could not be saved."""
    unusable_total: int = 0
    """States that could not be loaded."""
    stall_ms: Recent = attrs.field(factory=Recent)
    """What the copies made steps take longer."""
    stall_max_ms: float = 0.0

    def saved(self, n_bytes: int) -> None:
        self.saved_total += 1
        self.saved_bytes_total += n_bytes

    def loaded(self, n_bytes: int, n_tokens: int) -> None:
        self.loaded_total += 1
        self.loaded_bytes_total += n_bytes
        self.loaded_tokens_total += n_tokens

    def stalled(self, ms: float) -> None:
        self.stall_ms.add(ms)
        self.stall_max_ms = max(self.stall_max_ms, ms)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``None`` for what was not measured yet."""
        p50, p99 = self.stall_ms.percentiles(50, 99)
        return {
            "saved_total": self.saved_total,
            "saved_bytes_total": self.saved_bytes_total,
            "loaded_total": self.loaded_total,
            "loaded_bytes_total": self.loaded_bytes_total,
            "loaded_tokens_total": self.loaded_tokens_total,
            "skipped_total": self.skipped_total,
            "failed_total": self.failed_total,
            "unusable_total": self.unusable_total,
            "stall_p50_ms": p50,
            "stall_p99_ms": p99,
            "stall_max_ms": round(self.stall_max_ms, 3) if self.stall_ms.percentiles(50)[0] is not None else None,
        }
