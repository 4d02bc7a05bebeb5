"""Counters, averages and percentiles."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.telemetry.histogram import REQUEST_MS, SEQUENCES, TOKEN_MS, TOKENS, Histogram
from uma_trio.telemetry.metrics import Average, RecentValues, Telemetry
from uma_trio.telemetry.principals import MAX_PRINCIPALS, OTHER, PrincipalMetrics

numbers = st.floats(0, 1e6)


@given(st.lists(numbers, max_size=60), st.integers(1, 20))
def test_recent_keeps_the_last_ones(values: list[float], size: int) -> None:
    recent = RecentValues(size)
    for value in values:
        recent.add(value)
        recent.percentiles(0, 50, 100)
    found = recent.percentiles(0, 50, 100)
    if not values:
        assert found == [None, None, None]
    else:
        kept = values[-size:]
        assert found == [round(float(value), 3) for value in np.percentile(kept, [0, 50, 100])]


def test_percentiles_of_known_numbers() -> None:
    recent = RecentValues()
    for value in range(101):
        recent.add(float(value))
    assert recent.percentiles(50, 95, 99, 100) == [50.0, 95.0, 99.0, 100.0]
    assert recent.percentiles() == []


@given(st.lists(numbers, max_size=30))
def test_average(values: list[float]) -> None:
    average = Average()
    for value in values:
        average.add(value)
    if not values:
        assert average.value is None
    else:
        assert average.value is not None
        assert math.isclose(average.value, sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-3)


def test_a_new_one_has_measured_nothing() -> None:
    snapshot = Telemetry().snapshot()
    assert snapshot["tokens_total"] == snapshot["decode_calls_total"] == 0
    assert snapshot["requests_total"] == snapshot["rejected_total"] == {}
    measured = {key for key, value in snapshot.items() if value is None}
    assert measured == {
        key
        for key in snapshot
        if key.endswith(("_ms", "_ms_avg", "_share", "_rate", "_per_token", "_p50", "_p90")) or key == "avg_batch"
    }


def test_ticks_add_up() -> None:
    telemetry = Telemetry()
    telemetry.record_step(n_sequences=3, n_prompt_tokens=0, n_tokens=3, decode_ms=10, sample_ms=1)
    telemetry.record_step(n_sequences=2, n_prompt_tokens=30, n_tokens=2, n_calls=4, decode_ms=20, sample_ms=2)
    telemetry.rejected["E_PROTO_BUSY"] += 1
    for gap in (10.0, 20.0, 30.0):
        telemetry.inter_token_ms.add(gap)
    snapshot = telemetry.snapshot()
    assert (snapshot["ticks_total"], snapshot["decode_calls_total"]) == (2, 5)
    assert snapshot["avg_batch"] == 2.5
    assert snapshot["prompt_tokens_total"] == 30
    assert (snapshot["decode_ms_avg"], snapshot["sample_ms_avg"]) == (15.0, 1.5)
    assert (snapshot["inter_token_p50_ms"], snapshot["inter_token_p99_ms"]) == (20.0, 29.8)
    assert snapshot["rejected_total"] == {"E_PROTO_BUSY": 1}


def test_a_snapshot_is_a_copy() -> None:
    telemetry = Telemetry()
    before = telemetry.snapshot()
    telemetry.requests["stop"] += 1
    assert before["requests_total"] == {}
    assert Telemetry().snapshot()["requests_total"] == {}


@given(st.lists(numbers, max_size=60), st.sampled_from([TOKEN_MS, REQUEST_MS, SEQUENCES, TOKENS]))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float], bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    found = histogram.snapshot()
    assert found["bounds"] == sorted(bounds)
    assert found["counts"] == [sum(value <= bound for value in values) for bound in bounds]
    assert found["count"] == len(values)
    assert math.isclose(found["sum"], sum(values), rel_tol=1e-9, abs_tol=1e-3)


def test_principals_beyond_the_limit_share_a_name() -> None:
    principals = PrincipalMetrics()
    for n in range(2 * MAX_PRINCIPALS):
        principals.of(f"tenant-{n}").tokens_total += 1
        principals.of("tenant-0").tokens_total += 1
    found = principals.snapshot(["tenant-1", "tenant-100", "tenant-101", "tenant-1000"])
    assert len(found) == MAX_PRINCIPALS + 1
    assert found["tenant-0"]["tokens_total"] == 2 * MAX_PRINCIPALS + 1
    assert found["tenant-1"] == {
        "requests_total": 0,
        "tokens_total": 1,
        "prompt_tokens_total": 0,
        "cached_tokens_total": 0,
        "running": 1,
    }
    assert (found[OTHER]["tokens_total"], found[OTHER]["running"]) == (MAX_PRINCIPALS, 3)
