"""Metrics of one model: plain numbers, without locks. docs/METRICS.md explains each.

Only the thread of the event loop reads and writes them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import attrs
import numpy as np

from uma_trio.telemetry.histogram import REQUEST_MS, SEQUENCES, TOKEN_MS, TOKENS, Histogram
from uma_trio.telemetry.principals import PrincipalMetrics

WINDOW: Final = 4096
"""Number of measurements that percentiles cover: the last 40 seconds at 100 tokens a second."""

MOVING: Final = 64
"""Measurements that count most in a ``MovingAverage``."""


class RecentValues:
    """A ring of the last ``size`` measurements. Percentiles are computed on demand and cached."""

    def __init__(self, size: int = WINDOW) -> None:
        self._values = np.zeros(size, dtype=np.float64)
        self._count = 0
        self._cache: dict[tuple[float, ...], list[float | None]] = {}

    def add(self, value: float) -> None:
        self._values[self._count % len(self._values)] = value
        self._count += 1
        if self._cache:
            self._cache.clear()

    def percentiles(self, *levels: float) -> list[float | None]:
        """One value for each level in [0, 100]; ``None`` before the first measurement."""
        if levels not in self._cache:
            values = self._values[: self._count]
            found = np.percentile(values, levels) if len(values) else [None] * len(levels)
            self._cache[levels] = [None if value is None else round(float(value), 3) for value in found]
        return self._cache[levels]


@attrs.define
class Average:
    """The mean of all measurements since the start."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """``None`` before the first measurement."""
        return round(self.total / self.count, 3) if self.count else None


@attrs.define
class MovingAverage:
    """A mean in which older measurements weigh less."""

    value: float | None = None
    """``None`` before the first measurement."""
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MOVING)
        before = 0.0 if self.value is None else self.value
        self.value = before + (value - before) / self.count


@attrs.frozen
class Histograms:
    """Distributions since the start."""

    ttft_ms: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_MS))
    inter_token_ms: Histogram = attrs.field(factory=lambda: Histogram(TOKEN_MS))
    tick_ms: Histogram = attrs.field(factory=lambda: Histogram(TOKEN_MS))
    batch: Histogram = attrs.field(factory=lambda: Histogram(SEQUENCES))
    """Sequences in a tick."""
    request_ms: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_MS))
    """From arrival to the end of a complete answer."""
    request_queue_ms: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_MS))
    request_prefill_ms: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_MS))
    """From admission to the first token."""
    request_decode_ms: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_MS))
    """From the first token to the end of a complete answer."""
    request_prompt_tokens: Histogram = attrs.field(factory=lambda: Histogram(TOKENS))
    request_tokens: Histogram = attrs.field(factory=lambda: Histogram(TOKENS))
    """Tokens of a complete answer."""

    def snapshot(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).snapshot() for field in attrs.fields(Histograms)}


@attrs.define
class Telemetry:
    """Counters of one model's scheduler."""

    tokens_total: int = 0
    prompt_tokens_total: int = 0
    ticks_total: int = 0
    decode_calls_total: int = 0
    run_ahead_steps_total: int = 0
    mixed_ticks_total: int = 0
    """Ticks with decodes and prefill."""
    mixed_run_ahead_steps_total: int = 0
    """Those of them that ran ahead."""
    prefix_cache_hits_total: int = 0
    cached_tokens_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    model_draft_tokens_total: int = 0
    """Those of them that the draft model proposed."""
    accepted_model_draft_tokens_total: int = 0
    draft_model_ms: Average = attrs.field(factory=Average)
    """Time of the draft model, in ticks in which it computed."""
    forced_tokens_total: int = 0
    late_masks_total: int = 0
    mask_wait_ms: Average = attrs.field(factory=Average)
    """How long sampling waited for the masks of grammars, in ticks with constrained requests."""
    preemptions_total: int = 0
    """Streams that lost their places to requests that waited."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Finished requests by finish reason."""
    rejected: Counter[str] = attrs.field(factory=Counter)
    """Rejected requests and connections by error code."""
    inter_token_ms: RecentValues = attrs.field(factory=RecentValues)
    ttft_ms: RecentValues = attrs.field(factory=RecentValues)
    host_gap_ms: RecentValues = attrs.field(factory=RecentValues)
    cancel_to_free_ms: RecentValues = attrs.field(factory=RecentValues)
    mixed_tick_errors: RecentValues = attrs.field(factory=RecentValues)
    """Relative errors of the predicted duration, of ticks with decodes and prefill."""
    served_ms: MovingAverage = attrs.field(factory=MovingAverage)
    """Time from admission to the end, of requests that finished or were cancelled."""
    decode_ms: Average = attrs.field(factory=Average)
    sample_ms: Average = attrs.field(factory=Average)
    logits_rows_total: int = 0
    logits_copied_total: int = 0
    """Rows of logits that had to be copied before sampling."""
    bytes_moved: float = 0.0
    """Memory traffic, estimated by ``estimate_bytes_moved``."""
    bytes_per_s: float | None = None
    """Memory bandwidth of the device, if it was measured."""
    histograms: Histograms = attrs.field(factory=Histograms)
    principals: PrincipalMetrics = attrs.field(factory=PrincipalMetrics)
    _sequences_total: int = 0
    """Sum of the batch sizes of all ticks."""
    _busy_ms: float = 0.0
    _host_gap_total_ms: float = 0.0

    def record_step(
        self,
        *,
        n_sequences: int,
        n_prompt_tokens: int,
        n_tokens: int,
        decode_ms: float,
        sample_ms: float,
        gap_ms: float | None = None,
        n_calls: int = 1,
        bytes_moved: float = 0.0,
    ) -> None:
        """Record a completed tick.

        Args:
            n_sequences: sequences in the tick, prefill included.
            n_tokens: tokens that it generated.
            gap_ms: time since the previous tick; ``None`` if there was no work in between.
            n_calls: calls of ``llama_decode``.
        """
        self.ticks_total += 1
        self.decode_calls_total += n_calls
        self._sequences_total += n_sequences
        self.prompt_tokens_total += n_prompt_tokens
        self.tokens_total += n_tokens
        self.decode_ms.add(decode_ms)
        self.sample_ms.add(sample_ms)
        self._busy_ms += decode_ms + sample_ms
        self.histograms.tick_ms.add(decode_ms + sample_ms)
        self.histograms.batch.add(n_sequences)
        self.bytes_moved += bytes_moved
        if gap_ms is not None:
            self.host_gap_ms.add(gap_ms)
            self._host_gap_total_ms += gap_ms

    def record_prefix_reuse(self, n_tokens: int) -> None:
        """Record an admitted prompt whose first ``n_tokens`` tokens were in the KV cache; 0 is a miss."""
        self.prefix_cache_hits_total += n_tokens > 0
        self.cached_tokens_total += n_tokens

    def record_admission(self, waited_ms: float) -> None:
        """Record a request that got its KV cells ``waited_ms`` after it had arrived."""
        self.histograms.request_queue_ms.add(waited_ms)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``None`` for figures without a measurement."""
        p50, p95, p99 = self.inter_token_ms.percentiles(50, 95, 99)
        ttft_p50, ttft_p95 = self.ttft_ms.percentiles(50, 95)
        gap_p50, gap_p95 = self.host_gap_ms.percentiles(50, 95)
        freed_p50, freed_max = self.cancel_to_free_ms.percentiles(50, 100)
        error_p50, error_p90 = self.mixed_tick_errors.percentiles(50, 90)
        all_tokens = self.tokens_total + self.prompt_tokens_total
        return {
            "tokens_total": self.tokens_total,
            "prompt_tokens_total": self.prompt_tokens_total,
            "ticks_total": self.ticks_total,
            "decode_calls_total": self.decode_calls_total,
            "run_ahead_steps_total": self.run_ahead_steps_total,
            "mixed_ticks_total": self.mixed_ticks_total,
            "mixed_run_ahead_steps_total": self.mixed_run_ahead_steps_total,
            "prefix_cache_hits_total": self.prefix_cache_hits_total,
            "cached_tokens_total": self.cached_tokens_total,
            "draft_tokens_total": self.draft_tokens_total,
            "accepted_draft_tokens_total": self.accepted_draft_tokens_total,
            "acceptance_rate": _ratio(self.accepted_draft_tokens_total, self.draft_tokens_total),
            "model_draft_tokens_total": self.model_draft_tokens_total,
            "accepted_model_draft_tokens_total": self.accepted_model_draft_tokens_total,
            "model_acceptance_rate": _ratio(self.accepted_model_draft_tokens_total, self.model_draft_tokens_total),
            "draft_model_ms_avg": self.draft_model_ms.value,
            "forced_tokens_total": self.forced_tokens_total,
            "late_masks_total": self.late_masks_total,
            "mask_wait_ms_avg": self.mask_wait_ms.value,
            "avg_batch": _ratio(self._sequences_total, self.ticks_total, 3),
            "inter_token_p50_ms": p50,
            "inter_token_p95_ms": p95,
            "inter_token_p99_ms": p99,
            "ttft_p50_ms": ttft_p50,
            "ttft_p95_ms": ttft_p95,
            "decode_ms_avg": self.decode_ms.value,
            "sample_ms_avg": self.sample_ms.value,
            "host_gap_p50_ms": gap_p50,
            "host_gap_p95_ms": gap_p95,
            "host_gap_share": _ratio(self._host_gap_total_ms, self._host_gap_total_ms + self._busy_ms),
            "logits_zero_copy_share": _ratio(self.logits_rows_total - self.logits_copied_total, self.logits_rows_total),
            "bytes_per_token": round(self.bytes_moved / all_tokens) if all_tokens else None,
            "memory_bandwidth_share": _ratio(self.bytes_moved, (self.bytes_per_s or 0.0) * self._busy_ms / 1e3),
            "mixed_tick_error_p50": error_p50,
            "mixed_tick_error_p90": error_p90,
            "cancel_to_free_p50_ms": freed_p50,
            "cancel_to_free_max_ms": freed_max,
            "preemptions_total": self.preemptions_total,
            "requests_total": dict(self.requests),
            "rejected_total": dict(self.rejected),
            "histograms": self.histograms.snapshot(),
        }


@attrs.define
class OffloadMetrics:
    """Counters of KV offload: states that were saved to files and loaded from them."""

    saved_total: int = 0
    saved_bytes_total: int = 0
    loaded_total: int = 0
    loaded_bytes_total: int = 0
    loaded_tokens_total: int = 0
    skipped_total: int = 0
    """Sequences that were not saved, because computing them again is predicted to be faster."""
    save_failed_total: int = 0
    load_failed_total: int = 0
    stall_ms: RecentValues = attrs.field(factory=RecentValues)
    """Time that a copy added to a step."""
    stall_max_ms: float | None = None
    prepare_ms: RecentValues = attrs.field(factory=RecentValues)
    """Time from the request for a state until its file was ready for the engine."""
    load_ms: RecentValues = attrs.field(factory=RecentValues)
    """Time that the engine took to copy a state."""
    verify_ms: RecentValues = attrs.field(factory=RecentValues)
    """Time that the engine then took until the state was verified."""

    def record_saved(self, n_bytes: int) -> None:
        self.saved_total += 1
        self.saved_bytes_total += n_bytes

    def record_loaded(self, n_bytes: int, n_tokens: int) -> None:
        self.loaded_total += 1
        self.loaded_bytes_total += n_bytes
        self.loaded_tokens_total += n_tokens

    def record_restore(self, load_ms: float, verify_ms: float) -> None:
        self.load_ms.add(load_ms)
        self.verify_ms.add(verify_ms)

    def record_stall(self, ms: float) -> None:
        self.stall_ms.add(ms)
        self.stall_max_ms = max(self.stall_max_ms or 0.0, round(ms, 3))

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``None`` for figures without a measurement."""
        p50, p99 = self.stall_ms.percentiles(50, 99)
        return {
            "saved_total": self.saved_total,
            "saved_bytes_total": self.saved_bytes_total,
            "loaded_total": self.loaded_total,
            "loaded_bytes_total": self.loaded_bytes_total,
            "loaded_tokens_total": self.loaded_tokens_total,
            "skipped_total": self.skipped_total,
            "save_failed_total": self.save_failed_total,
            "load_failed_total": self.load_failed_total,
            "stall_p50_ms": p50,
            "stall_p99_ms": p99,
            "stall_max_ms": self.stall_max_ms,
            "prepare_p50_ms": self.prepare_ms.percentiles(50)[0],
            "load_p50_ms": self.load_ms.percentiles(50)[0],
            "verify_p50_ms": self.verify_ms.percentiles(50)[0],
        }


def _ratio(part: float, total: float, digits: int = 4) -> float | None:
    return round(part / total, digits) if total else None


# -- memory traffic ----------------------------------------------------------------------------------

VECTORS_PER_LAYER: Final = 12
"""Activations that a layer writes and reads, in units of the model's width: norms, q, k, v, attention output, and the
wider ones of the feed-forward block."""

BYTES_PER_ACTIVATION: Final = 8
"""One float32, written once and read once."""


@attrs.frozen
class ModelSize:
    """The sizes that decide how much memory traffic a tick causes."""

    weights_bytes: int
    kv_bytes_per_token: float
    n_layer: int
    n_embd: int
    n_vocab: int


def estimate_bytes_moved(model: ModelSize, *, calls: int, tokens: int, outputs: int, context_read: float) -> float:
    """Estimate the memory traffic of one tick, in bytes. Decoding is limited by it.

    Ignores caches, so the estimate is too high for models that fit into them.

    Args:
        calls: calls of ``llama_decode``; each reads all weights.
        tokens: tokens in all calls; each writes its keys, values and activations.
        outputs: tokens whose logits were computed.
        context_read: tokens whose keys and values were read, counted once for each time.
    """
    weights = calls * model.weights_bytes
    kv = model.kv_bytes_per_token * (context_read + tokens)
    activations = tokens * model.n_layer * model.n_embd * VECTORS_PER_LAYER * BYTES_PER_ACTIVATION
    return weights + kv + activations + outputs * model.n_vocab * 4.0
