"""Metrics of one model: plain numbers, without locks. ``catalogue.py`` describes each.

Only the thread of the event loop reads and writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import attrs

from uma_trio.telemetry.measures import (
    REQUEST_MS,
    SEQUENCES,
    TOKEN_MS,
    TOKENS,
    Average,
    Histogram,
    RecentValues,
    snapshot_of,
)
from uma_trio.telemetry.perf_records import AVERAGED, SUMMED, RequestRecord, TickRecord

MAX_PRINCIPALS: Final = 64
"""Principals with counts of their own; names come from outside."""

OTHER: Final = "other"
"""All principals together that came when there were ``MAX_PRINCIPALS``."""

MIN_MS: Final = 1e-3
"""Errors of predictions are relative to the duration of a tick, or to this if it is shorter."""


@attrs.frozen
class Histograms:
    """Distributions since the start."""

    ttft_ms: Histogram = attrs.field(factory=partial(Histogram, REQUEST_MS))
    inter_token_ms: Histogram = attrs.field(factory=partial(Histogram, TOKEN_MS))
    tick_ms: Histogram = attrs.field(factory=partial(Histogram, TOKEN_MS))
    batch: Histogram = attrs.field(factory=partial(Histogram, SEQUENCES))
    request_ms: Histogram = attrs.field(factory=partial(Histogram, REQUEST_MS))
    request_queue_ms: Histogram = attrs.field(factory=partial(Histogram, REQUEST_MS))
    request_prefill_ms: Histogram = attrs.field(factory=partial(Histogram, REQUEST_MS))
    request_decode_ms: Histogram = attrs.field(factory=partial(Histogram, REQUEST_MS))
    request_prompt_tokens: Histogram = attrs.field(factory=partial(Histogram, TOKENS))
    request_tokens: Histogram = attrs.field(factory=partial(Histogram, TOKENS))


@attrs.define
class PrincipalCounts:
    """What one principal was given since the start."""

    requests_total: int = 0
    tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0


class PrincipalMetrics:
    """Counts for the first ``MAX_PRINCIPALS`` principals by name, and for all others together."""

    def __init__(self) -> None:
        self._counts: dict[str, PrincipalCounts] = {}

    def of(self, name: str) -> PrincipalCounts:
        """The counts that ``name`` adds to."""
        counts = self._counts.get(name)
        return self._counts.setdefault(self._label(name), PrincipalCounts()) if counts is None else counts

    def _label(self, name: str) -> str:
        return name if name in self._counts or len(self._counts) < MAX_PRINCIPALS else OTHER

    def snapshot(self, running: Iterable[str]) -> dict[str, Any]:
        """Plain numbers by principal.

        Args:
            running: the principal of each running request.
        """
        for name in (names := [*running]):
            self.of(name)
        by_name = {name: snapshot_of(counts) | {"running": 0} for name, counts in self._counts.items()}
        for name in names:
            by_name[self._label(name)]["running"] += 1
        return by_name


@attrs.define
class Telemetry:
    """Counters of one model's scheduler.

    Completed ticks and ended requests are counted from their records, which are those of the perf log.  So these metrics
    are the sums of the records.  What has no record is counted where it happens: prefix reuse, preemptions, cancels, and
    interrupted steps, which are computed again.
    """

    prompt_tokens_total: int = 0
    ticks_total: int = 0
    run_ahead_steps_total: int = 0
    mixed_ticks_total: int = 0
    mixed_run_ahead_steps_total: int = 0
    prefix_cache_hits_total: int = 0
    cached_tokens_total: int = 0
    preemptions_total: int = 0
    interrupted_steps_total: int = 0
    requests: Counter[str] = attrs.field(factory=Counter)
    inter_token_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50, 95, 99))
    ttft_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50, 95))
    host_gap_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50, 95))
    cancel_to_free_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50, 100))
    mixed_tick_error: RecentValues = attrs.field(factory=partial(RecentValues, 50, 90))
    histograms: Histograms = attrs.field(factory=Histograms)
    principals: PrincipalMetrics = attrs.field(factory=PrincipalMetrics)
    totals: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SUMMED, 0))
    """The sums of the fields of all ticks that are ``Summed``."""
    averages: dict[str, Average] = attrs.field(factory=lambda: {name: Average() for name in AVERAGED})
    """The means of the fields that are ``Averaged``."""
    _bytes_per_s: float | None = None
    """Memory bandwidth of the device, if it was measured."""
    _bytes_moved: float = 0.0
    _logits_rows: int = 0
    _copied_logits_rows: int = 0
    _host_gap_total_ms: float = 0.0

    def count_tick(self, tick: TickRecord) -> None:
        """Count a completed tick.  One that called no ``llama_decode`` has nothing to count."""
        if not tick.decode_calls:
            return
        totals, n_decodes, n_prefills, duration_ms = self.totals, tick.n_decodes, tick.n_prefills, tick.duration_ms
        for name in SUMMED:
            totals[name] += getattr(tick, name)
        for name, average in self.averages.items():
            if (ms := getattr(tick, name)) is not None:
                average.add(ms)
        self.ticks_total += 1
        self.run_ahead_steps_total += tick.runs_ahead
        self._logits_rows += tick.logits_rows
        self._copied_logits_rows += tick.copied_logits_rows
        self._bytes_moved += tick.bytes_moved or 0.0
        self.histograms.tick_ms.add(duration_ms)
        self.histograms.batch.add(n_decodes + n_prefills)
        if tick.host_gap_ms is not None:
            self.host_gap_ms.add(tick.host_gap_ms)
            self._host_gap_total_ms += tick.host_gap_ms
        if n_prefills:
            self.prompt_tokens_total += tick.prompt_tokens
        if n_decodes and n_prefills:
            self.mixed_ticks_total += 1
            self.mixed_run_ahead_steps_total += tick.runs_ahead
            if tick.predicted_ms is not None:
                self.mixed_tick_error.add(abs(tick.predicted_ms / max(duration_ms, MIN_MS) - 1))

    def count_request(self, request: RequestRecord) -> None:
        """Count an answer that has ended."""
        reason = request.finish_reason
        self.requests[reason] += 1
        self.principals.of(request.principal).requests_total += 1
        if request.admitted_s is None or reason.startswith("E_"):
            return
        if reason == "cancelled":
            return
        self.histograms.request_ms.add(1e3 * (request.finished_s - request.arrived_s))
        self.histograms.request_prompt_tokens.add(request.prompt_tokens)
        self.histograms.request_tokens.add(request.completion_tokens)
        if request.first_token_s is not None:
            self.histograms.request_decode_ms.add(1e3 * (request.finished_s - request.first_token_s))

    def record_prefix_reuse(self, n_tokens: int) -> None:
        """Record an admitted prompt whose first ``n_tokens`` tokens were in the KV cache; 0 is a miss."""
        self.prefix_cache_hits_total += n_tokens > 0
        self.cached_tokens_total += n_tokens

    def record_admission(self, waited_ms: float) -> None:
        """Record a request that got its KV cells ``waited_ms`` after it had arrived."""
        self.histograms.request_queue_ms.add(waited_ms)

    def record_first_token(self, ttft_ms: float, prefill_ms: float) -> None:
        """Record the first token of an answer, from the arrival of its request and from its admission."""
        self.ttft_ms.add(ttft_ms)
        self.histograms.ttft_ms.add(ttft_ms)
        self.histograms.request_prefill_ms.add(prefill_ms)

    def record_inter_token(self, ms: float) -> None:
        """Record the time since the token before."""
        self.inter_token_ms.add(ms)
        self.histograms.inter_token_ms.add(ms)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``None`` for figures without a measurement."""
        totals, averages = self.totals, self.averages
        busy_ms = averages["decode_ms"].total + averages["sample_ms"].total
        all_tokens = totals["tokens"] + self.prompt_tokens_total
        return {
            **{f"{name}_total": total for name, total in totals.items()},
            **{f"{name}_avg": average.value for name, average in averages.items()},
            **snapshot_of(self),
            "acceptance_rate": _ratio(totals["accepted_draft_tokens"], totals["draft_tokens"]),
            "model_acceptance_rate": _ratio(totals["accepted_model_draft_tokens"], totals["model_draft_tokens"]),
            "avg_batch": _ratio(self.histograms.batch.sum, self.ticks_total, 3),
            "host_gap_share": _ratio(self._host_gap_total_ms, self._host_gap_total_ms + busy_ms),
            "logits_zero_copy_share": _ratio(self._logits_rows - self._copied_logits_rows, self._logits_rows),
            "bytes_per_token": round(self._bytes_moved / all_tokens) if all_tokens else None,
            "memory_bandwidth_share": _ratio(self._bytes_moved, (self._bytes_per_s or 0.0) * busy_ms / 1e3),
            "histograms": snapshot_of(self.histograms),
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
    save_failed_total: int = 0
    load_failed_total: int = 0
    stall_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50, 99))
    stall_max_ms: float | None = None
    prepare_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50))
    load_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50))
    verify_ms: RecentValues = attrs.field(factory=partial(RecentValues, 50))

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
