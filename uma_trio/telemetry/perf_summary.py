"""What a run of the perf log comes to: latencies, where the time went, how good the predictions were.

Pure: a run in, plain numbers out.  docs/PERF_LOG.md says what each figure means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.telemetry.perf_format import Run
from uma_trio.telemetry.perf_records import Header, RequestRecord, TickRecord

Floats = npt.NDArray[np.float64]

LONGEST: Final = 10
"""Ticks that are shown one by one."""


@attrs.frozen
class Quantiles:
    """Of so many values; all ``None`` if there were none."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float] | Floats) -> Quantiles:
        """Linear between neighbours, as numpy has it; what is not a number was not measured."""
        found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
        found = found[~np.isnan(found)]
        if not len(found):
            return cls(0, None, None, None, None)
        return cls(len(found), *[round(float(value), 4) for value in np.percentile(found, (50, 95, 99, 100))])


@attrs.frozen(kw_only=True)
class Columns:
    """Ticks as arrays, one value a tick; NaN where nothing was measured."""

    t_s: Floats
    ms: Floats
    decode_ms: Floats
    sample_ms: Floats
    host_gap_ms: Floats
    predicted_ms: Floats
    streams: Floats
    prompts: Floats
    """How many."""
    prompt_tokens: Floats
    waiting: Floats

    @classmethod
    def of(cls, ticks: Sequence[TickRecord]) -> Columns:
        def column(values: Iterable[float | None]) -> Floats:
            return np.fromiter((np.nan if value is None else value for value in values), np.float64, len(ticks))

        return cls(
            t_s=column(tick.t_s for tick in ticks),
            ms=column(tick.ms for tick in ticks),
            decode_ms=column(tick.decode_ms for tick in ticks),
            sample_ms=column(tick.sample_ms for tick in ticks),
            host_gap_ms=column(tick.host_gap_ms for tick in ticks),
            predicted_ms=column(tick.predicted_ms for tick in ticks),
            streams=column(tick.streams for tick in ticks),
            prompts=column(len(tick.prompts) for tick in ticks),
            prompt_tokens=column(tick.prompt_tokens for tick in ticks),
            waiting=column(tick.waiting for tick in ticks),
        )

    @property
    def ends_s(self) -> Floats:
        return self.t_s + self.ms / 1e3


@attrs.frozen(kw_only=True)
class Shares:
    """Where the time from the first to the last record went; they add up to 1."""

    decode: float
    sample: float
    host_gap: float
    nothing_to_do: float

    @property
    def device_idle(self) -> float:
        """All but ``decode``."""
        return 1 - self.decode


@attrs.frozen(kw_only=True)
class Prediction:
    """How the cost model did on one kind of tick."""

    ticks: int
    median_error: float | None
    """Of |predicted - measured| / measured; so is ``p95_error``."""
    p95_error: float | None
    bias: float | None
    """All that was predicted over all that was measured, less 1: above 0 ticks were quicker than expected."""


@attrs.frozen(kw_only=True)
class Load:
    """The times to first token of requests that came while so many others were there."""

    least: int
    most: int
    ttft_ms: Quantiles


@attrs.frozen(kw_only=True)
class Summary:
    """A run in figures."""

    header: Header
    closed: bool
    """The daemon ended in order."""
    duration_s: float
    ticks: int
    decode_calls: int
    prompt_tokens: int
    """That were computed; what the cache held is not among them."""
    tokens: int
    """That were generated."""
    tokens_per_s: float
    average_batch: float | None
    """Sequences in a tick, streams and prompts."""
    itl_ms: Quantiles
    ttft_ms: Quantiles
    queue_ms: Quantiles
    """From a request's arrival to its sequence."""
    ttft_by_load: tuple[Load, ...]
    tick_ms: Quantiles
    decode_ms: Quantiles
    sample_ms: Quantiles
    host_gap_ms: Quantiles
    shares: Shares | None
    alone: Prediction
    """Of ticks that held streams only."""
    mixed: Prediction
    """Of ticks that held a prompt."""
    drafted: int
    accepted: int
    requests: Mapping[str, int]
    """By how they ended."""
    asked_tokens: int
    """Of the prompts of all requests that were admitted."""
    cached_tokens: int
    """Those of them that the cache held already."""
    bandwidth_share: Quantiles
    dropped: int
    longest: tuple[TickRecord, ...]
    cut: str | None
    """Why the rest of the run could not be read, if so."""


def summarise(run: Run) -> Summary:
    """The figures of ``run``; a run without ticks has those that it can have."""
    ticks, requests = run.ticks, run.requests
    columns = Columns.of(ticks)
    duration_s = _duration_s(columns, requests)
    tokens = sum(tick.tokens for tick in ticks)
    admitted = [request for request in requests if request.admitted_s is not None]
    with_prompts = columns.prompts > 0
    return Summary(
        header=run.header,
        closed=run.trailer is not None,
        duration_s=duration_s,
        ticks=len(ticks),
        decode_calls=sum(tick.n_decodes for tick in ticks),
        prompt_tokens=sum(tick.prompt_tokens for tick in ticks),
        tokens=tokens,
        tokens_per_s=round(tokens / duration_s, 3) if duration_s > 0 else 0.0,
        average_batch=round(float(np.mean(columns.streams + columns.prompts)), 3) if ticks else None,
        itl_ms=Quantiles.of(itl_ms(requests)),
        ttft_ms=Quantiles.of(request.ttft_ms for request in requests if request.ttft_ms is not None),
        queue_ms=Quantiles.of(1e3 * ((request.admitted_s or 0.0) - request.arrived_s) for request in admitted),
        ttft_by_load=_ttft_by_load(columns, requests),
        tick_ms=Quantiles.of(columns.ms),
        decode_ms=Quantiles.of(columns.decode_ms),
        sample_ms=Quantiles.of(columns.sample_ms),
        host_gap_ms=Quantiles.of(columns.host_gap_ms),
        shares=_shares(columns, duration_s),
        alone=_prediction(columns, ~with_prompts),
        mixed=_prediction(columns, with_prompts),
        drafted=sum(tick.drafted for tick in ticks),
        accepted=sum(tick.accepted for tick in ticks),
        requests=dict(Counter(request.reason for request in requests).most_common()),
        asked_tokens=sum(request.prompt_tokens for request in admitted),
        cached_tokens=sum(request.cached_tokens for request in admitted),
        bandwidth_share=Quantiles.of(tick.bandwidth_share for tick in ticks if tick.bandwidth_share is not None),
        dropped=run.trailer.dropped if run.trailer is not None else 0,
        longest=tuple(sorted(ticks, key=lambda tick: -tick.ms)[:LONGEST]),
        cut=run.cut,
    )


def itl_ms(requests: Iterable[RequestRecord]) -> Floats:
    """All inter-token latencies of ``requests``."""
    found = [np.asarray(request.itl_ms, dtype=np.float64) for request in requests if len(request.itl_ms)]
    return np.concatenate(found) if found else np.array([])


def load_at(columns: Columns, arrived_s: Floats) -> Floats:
    """How many requests were served or waited when one came at ``arrived_s``.

    Those of the tick that was under way, or had just ended: where the next one began without a pause for
    want of work.  Else 0.
    """
    if not len(columns.t_s):
        return np.zeros(len(arrived_s))
    before = np.searchsorted(columns.t_s, arrived_s, side="right") - 1
    under_way = arrived_s <= columns.ends_s[before]
    gap_after = np.append(columns.host_gap_ms[1:], np.nan)
    busy = (before >= 0) & (under_way | ~np.isnan(gap_after[before]))
    there = columns.streams + columns.prompts + columns.waiting
    return np.where(busy, there[before], 0.0)


def prediction_errors(columns: Columns) -> Floats:
    """(predicted - measured) / measured of each tick; NaN where nothing was predicted or nothing took time."""
    measured = np.where(columns.ms > 0, columns.ms, np.nan)
    return (columns.predicted_ms - measured) / measured


def _duration_s(columns: Columns, requests: Sequence[RequestRecord]) -> float:
    """From the first thing that was recorded to the last."""
    begins = [*columns.t_s[:1].tolist(), *(request.arrived_s for request in requests)]
    ends = [*columns.ends_s[-1:].tolist(), *(request.ended_s for request in requests)]
    return round(max(ends) - min(begins), 6) if begins else 0.0


def _shares(columns: Columns, duration_s: float) -> Shares | None:
    parts = [float(np.nansum(each)) / 1e3 for each in (columns.decode_ms, columns.sample_ms, columns.host_gap_ms)]
    whole = max(duration_s, sum(parts))
    if whole <= 0:
        return None
    decode, sample, host_gap = (round(part / whole, 4) for part in parts)
    rest = max(0.0, round(1 - decode - sample - host_gap, 4))
    return Shares(decode=decode, sample=sample, host_gap=host_gap, nothing_to_do=rest)


def _prediction(columns: Columns, which: npt.NDArray[np.bool_]) -> Prediction:
    errors = prediction_errors(columns)
    which = which & ~np.isnan(errors)
    if not which.any():
        return Prediction(ticks=0, median_error=None, p95_error=None, bias=None)
    median, p95 = np.percentile(np.abs(errors[which]), (50, 95))
    bias = columns.predicted_ms[which].sum() / columns.ms[which].sum() - 1
    return Prediction(
        ticks=int(which.sum()),
        median_error=round(float(median), 4),
        p95_error=round(float(p95), 4),
        bias=round(float(bias), 4),
    )


def _ttft_by_load(columns: Columns, requests: Sequence[RequestRecord]) -> tuple[Load, ...]:
    """For none, one, 2 to 3, 4 to 7 and so on others."""
    answered = [request for request in requests if request.ttft_ms is not None]
    loads = load_at(columns, np.array([request.arrived_s for request in answered]))
    ttft_ms = np.array([request.ttft_ms for request in answered], dtype=np.float64)
    bins = np.ceil(np.log2(loads + 1)).astype(int)  # 0, 1, 2-3, 4-7
    return tuple(
        Load(
            least=1 << at - 1 if at else 0,
            most=(1 << at) - 1,
            ttft_ms=Quantiles.of(ttft_ms[bins == at]),
        )
        for at in sorted(set(bins.tolist()))
    )
