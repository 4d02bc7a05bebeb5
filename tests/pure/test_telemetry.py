"""Counters, averages and percentiles."""

import math

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.telemetry.measures import REQUEST_MS, SEQUENCES, TOKEN_MS, TOKENS, Average, Histogram, RecentValues
from uma_trio.telemetry.metrics import MAX_PRINCIPALS, OTHER, PrincipalMetrics, Telemetry
from uma_trio.telemetry.perf_records import TickRecord

numbers = st.floats(0, 1e6)


@given(st.lists(numbers, max_size=60), st.integers(1, 20))
def test_recent_keeps_the_last_ones(values: list[float], size: int) -> None:
    recent = RecentValues(size=size)
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
    assert snapshot["requests_total"] == {}
    assert "rejected_total" not in snapshot, "it would hide the daemon's in `uma-trio metrics --model`"
    measured = {key for key, value in snapshot.items() if value is None}
    assert measured == {
        key
        for key in snapshot
        if key.endswith(("_ms", "_ms_avg", "_share", "_rate", "_per_token", "_p50", "_p90")) or key == "avg_batch"
    }


def test_ticks_add_up() -> None:
    telemetry = Telemetry()
    telemetry.count_tick(TickRecord(start_s=0, decode_seq_ids=[1, 2, 3], tokens=3, decode_ms=10, sample_ms=1))
    mixed = TickRecord(start_s=1, decode_seq_ids=[1], prefill_chunks=[(2, 30)], tokens=2, decode_calls=4, decode_ms=20)
    telemetry.count_tick(msgspec.structs.replace(mixed, sample_ms=2, predicted_ms=11))
    telemetry.count_tick(TickRecord(start_s=2, decode_calls=0, embedding_ms=5, host_gap_ms=1))
    for gap in (10.0, 20.0, 30.0):
        telemetry.record_inter_token(gap)
    snapshot = telemetry.snapshot()
    assert (snapshot["ticks_total"], snapshot["decode_calls_total"]) == (2, 5)
    assert snapshot["avg_batch"] == 2.5
    assert snapshot["prompt_tokens_total"] == 30
    assert (snapshot["decode_ms_avg"], snapshot["sample_ms_avg"]) == (15.0, 1.5)
    assert (snapshot["inter_token_p50_ms"], snapshot["inter_token_p99_ms"]) == (20.0, 29.8)
    assert (snapshot["mixed_ticks_total"], snapshot["mixed_tick_error_p50"]) == (1, 0.5)
    assert snapshot["host_gap_p50_ms"] is None, "a tick without llama_decode is not counted"


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
