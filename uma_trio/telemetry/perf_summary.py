"""Summarises a run of the perf log: latencies, where the time went, how good the cost model's predictions were.

Pure: a run in, plain numbers out. docs/PERF_LOG.md explains each figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from uma_trio.telemetry.perf_records import RequestRecord, Run, TickRecord

Floats = npt.NDArray[np.float64]

N_LONGEST: Final = 10
LONGEST_FIELDS: Final = (
    *("start_s", "duration_ms", "predicted_ms"),
    *("n_decodes", "context_tokens", "queue_depth", "prefill_chunks"),
)


def summarise(run: Run) -> dict[str, Any]:
    """The figures of a run, as ``uma-trio perf report --json`` prints them. A figure without data is ``None``."""
    ticks, requests = [tick for tick in run.ticks if tick.decode_calls], run.requests
    admitted = [request for request in requests if request.admitted_s is not None]
    has_prefill = column(ticks, "n_prefills") > 0
    total = {
        name: sum(getattr(tick, name) for tick in ticks)
        for name in ("tokens", "prompt_tokens", "draft_tokens", "accepted_draft_tokens", "decode_calls")
    }
    cached_tokens = sum(request.cached_tokens for request in admitted)
    n_sequences = sum(tick.n_decodes + tick.n_prefills for tick in ticks)
    bandwidth = quantiles(column(ticks, "memory_bandwidth_share"))
    duration_s = _duration_s(run)
    return {
        "closed": run.trailer is not None,
        "dropped_records": run.trailer.dropped_records if run.trailer is not None else 0,
        "unreadable_lines": run.unreadable_lines,
        "duration_s": duration_s,
        "ticks": len(ticks),
        **total,
        "tokens_per_s": _ratio(total["tokens"], duration_s),
        "cached_tokens": cached_tokens,
        "cache_hit_rate": _ratio(cached_tokens, sum(request.prompt_tokens for request in admitted)),
        "acceptance_rate": _ratio(total["accepted_draft_tokens"], total["draft_tokens"]),
        "avg_batch": _ratio(n_sequences, len(ticks)),
        "memory_bandwidth_share": bandwidth["p50"],
        "header": msgspec.to_builtins(run.header),
        "requests": dict(Counter(request.finish_reason for request in requests)),
        "time_share": _time_share(run.ticks, duration_s),
        "latency_ms": {
            "inter_token": quantiles(inter_token_ms(requests)),
            "ttft": quantiles(column(requests, "ttft_ms")),
            **_ttft_by_load(run),
            "queue": quantiles(1e3 * (column(admitted, "admitted_s") - column(admitted, "arrived_s"))),
            "tick": quantiles(column(ticks, "duration_ms")),
            "decode": quantiles(column(ticks, "decode_ms")),
            "sample": quantiles(column(ticks, "sample_ms")),
            "host_gap": quantiles(column(ticks, "host_gap_ms")),
        },
        "prediction_error": {
            "decode_only": _prediction_error(ticks, ~has_prefill),
            "prefill": _prediction_error(ticks, has_prefill),
        },
        "longest_ticks": [
            {name: getattr(tick, name) for name in LONGEST_FIELDS}
            for tick in sorted(ticks, key=lambda tick: -tick.duration_ms)[:N_LONGEST]
        ],
    }


def column(records: Sequence[TickRecord] | Sequence[RequestRecord], name: str) -> Floats:
    """An attribute of each record as an array; NaN for ``None``."""
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def quantiles(values: Floats) -> dict[str, Any]:
    """Count, p50, p95, p99 and maximum. NaN counts as not measured."""
    measured = values[~np.isnan(values)]
    if not len(measured):
        return {"n": 0, "p50": None, "p95": None, "p99": None, "max": None}
    p50, p95, p99, top = [round(float(value), 4) for value in np.percentile(measured, (50, 95, 99, 100))]
    return {"n": len(measured), "p50": p50, "p95": p95, "p99": p99, "max": top}


def inter_token_ms(requests: Iterable[RequestRecord]) -> Floats:
    """The inter-token latencies of all requests, concatenated."""
    return np.concatenate([np.array([]), *[np.array(request.inter_token_ms) for request in requests]])


def load_at(ticks: Sequence[TickRecord], arrived_s: Floats) -> Floats:
    """The number of requests, running or queued, when another one arrived.

    Taken from the tick that was under way. Also from the one that had just ended, if the next one followed without
    idle time. Otherwise 0.
    """
    if not ticks:
        return np.zeros(len(arrived_s))
    before = np.searchsorted(column(ticks, "start_s"), arrived_s, side="right") - 1
    next_gap = np.append(column(ticks, "host_gap_ms")[1:], np.nan)
    is_busy = (before >= 0) & ((arrived_s <= column(ticks, "end_s")[before]) | ~np.isnan(next_gap[before]))
    load = column(ticks, "n_decodes") + column(ticks, "n_prefills") + column(ticks, "queue_depth")
    return np.where(is_busy, load[before], 0.0)


def prediction_errors(ticks: Sequence[TickRecord]) -> Floats:
    """(predicted - measured) / measured of each tick; NaN without a prediction or without a measured time."""
    measured = column(ticks, "duration_ms")
    measured[measured <= 0] = np.nan
    return (column(ticks, "predicted_ms") - measured) / measured


def _duration_s(run: Run) -> float:
    """Time from the first recorded event to the last."""
    begins = [tick.start_s for tick in run.ticks[:1]] + [request.arrived_s for request in run.requests]
    ends = [tick.end_s for tick in run.ticks[-1:]] + [request.finished_s for request in run.requests]
    return round(max(ends) - min(begins), 6) if begins else 0.0


def _time_share(ticks: Sequence[TickRecord], duration_s: float) -> dict[str, float] | None:
    """What fraction of the run went where. The fractions add up to 1."""
    names = ("decode", "sample", "host_gap")
    seconds = [float(np.nansum(column(ticks, f"{name}_ms"))) / 1e3 for name in names]
    total = max(duration_s, sum(seconds))
    if total <= 0:
        return None
    shares = {name: round(part / total, 4) for name, part in zip(names, seconds, strict=True)}
    return shares | {"idle": max(0.0, round(1 - sum(shares.values()), 4))}


def _prediction_error(ticks: Sequence[TickRecord], selected: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Relative errors of the cost model. A bias above 0 means that ticks were faster than predicted."""
    errors = prediction_errors(ticks)
    selected = selected & ~np.isnan(errors)
    sizes = quantiles(np.abs(errors[selected]))
    predicted, measured = (column(ticks, name)[selected].sum() for name in ("predicted_ms", "duration_ms"))
    return {**sizes, "bias": _ratio(predicted - measured, measured)}


def _ttft_by_load(run: Run) -> dict[str, Any]:
    """Time to first token by the number of other requests: 0, 1, 2 to 3, 4 to 7 and so on."""
    answered = [request for request in run.requests if request.ttft_ms is not None]
    bins = np.ceil(np.log2(load_at(run.ticks, column(answered, "arrived_s")) + 1)).astype(int)
    ttft_ms = column(answered, "ttft_ms")
    return {
        f"ttft_load_{1 << n - 1}_to_{(1 << n) - 1}" if n > 1 else f"ttft_load_{n}": quantiles(ttft_ms[bins == n])
        for n in sorted(set(bins.tolist()))
    }


def _ratio(part: float, total: float) -> float | None:
    return round(float(part / total), 4) if total else None
