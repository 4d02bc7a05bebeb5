"""The summary of a run, against figures that were worked out by hand."""

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.perf_runs import HEADER, simulated
from uma_trio.telemetry.perf_records import (
    BeforePasses,
    Divided,
    RequestRecord,
    Run,
    Summed,
    TickRecord,
    Trailer,
    check_passes,
)
from uma_trio.telemetry.perf_summary import load_at, prediction_errors, summarise

TICKS = [
    # the first tick: two decodes, predicted exactly
    TickRecord(start_s=1.000, decode_seq_ids=(0, 1), tokens=2, predicted_ms=11.0, decode_ms=10.0, sample_ms=1.0, memory_bandwidth_share=0.5),
    # 1 ms later, with a prefill of 30 tokens; predicted a tenth too short
    TickRecord(
        start_s=1.012, decode_seq_ids=(0, 1), prefill_chunks=((2, 30),), tokens=2, predicted_ms=19.8, decode_ms=20.0, sample_ms=2.0, host_gap_ms=1.0, queue_depth=1
    ),
    # the prefill ends, two of four draft tokens are accepted; predicted a fifth too long
    TickRecord(
        start_s=1.035, decode_seq_ids=(0, 1), prefill_chunks=((2, 10),), tokens=5, draft_tokens=4, accepted_draft_tokens=2, decode_calls=2, predicted_ms=36.0, decode_ms=29.0,
        sample_ms=1.0, host_gap_ms=1.0, queue_depth=1, memory_bandwidth_share=0.7,
    ),
    # after an idle time, and not predicted
    TickRecord(start_s=1.965, decode_seq_ids=(3,), tokens=1, decode_ms=34.0, sample_ms=1.0),
]  # fmt: skip

REQUESTS = [
    RequestRecord(
        id="a", arrived_s=0.9, admitted_s=0.95, first_token_s=1.0, finished_s=1.5, prompt_tokens=100, cached_tokens=60, completion_tokens=4,
        finish_reason="stop", inter_token_ms=[10.0, 20.0, 30.0],
    ),
    RequestRecord(id="b", arrived_s=1.02, admitted_s=1.02, first_token_s=1.065, finished_s=1.5, prompt_tokens=40, completion_tokens=2, finish_reason="stop", inter_token_ms=[40.0]),
    RequestRecord(id="c", arrived_s=1.9, admitted_s=1.95, first_token_s=2.0, finished_s=2.9, prompt_tokens=60, completion_tokens=1, finish_reason="length"),
    RequestRecord(id="d", arrived_s=1.95, finished_s=2.0, prompt_tokens=500, finish_reason="E_LIMIT_QUEUE"),
]  # fmt: skip

RUN = Run(header=HEADER, ticks=TICKS, requests=REQUESTS, trailer=Trailer(dropped_records=3))


def quantiles(n: int, *values: float | None) -> dict[str, Any]:
    return {"n": n} | dict(zip(("p50", "p95", "p99", "max"), values, strict=True))


def test_the_figures_of_a_small_run() -> None:
    found = summarise(RUN)
    assert (found["ticks"], found["decode_calls"], found["tokens"], found["prompt_tokens"]) == (4, 5, 10, 40)
    assert found["duration_s"] == 2.0  # from a's arrival to c's end
    assert found["tokens_per_s"] == 5.0
    assert found["avg_batch"] == (2 + 3 + 3 + 1) / 4
    assert found["latency_ms"]["inter_token"] == quantiles(4, 25.0, 38.5, 39.7, 40.0)
    assert found["latency_ms"]["ttft"]["n"] == 3
    assert found["latency_ms"]["ttft"]["p50"] == 100.0
    assert found["latency_ms"]["queue"] == quantiles(3, 50.0, 50.0, 50.0, 50.0)
    assert (found["latency_ms"]["tick"]["p50"], found["latency_ms"]["tick"]["max"]) == (26.0, 35.0)
    assert (found["latency_ms"]["decode"]["max"], found["latency_ms"]["sample"]["max"]) == (34.0, 2.0)
    assert found["latency_ms"]["host_gap"] == quantiles(2, 1.0, 1.0, 1.0, 1.0)
    assert (found["draft_tokens"], found["accepted_draft_tokens"]) == (4, 2)
    assert (found["cached_tokens"], found["cache_hit_rate"]) == (60, 60 / 200)  # d was never admitted
    assert found["acceptance_rate"] == 0.5
    assert found["requests"] == {"stop": 2, "length": 1, "E_LIMIT_QUEUE": 1}
    assert found["memory_bandwidth_share"] == 0.6
    assert (found["dropped_records"], found["closed"], found["unreadable_lines"]) == (3, True, 0)
    assert [tick["start_s"] for tick in found["longest_ticks"]] == [1.965, 1.035, 1.012, 1.0]


def test_where_the_time_went() -> None:
    # of 2 s: 93 ms llama_decode, 5 ms sampling, 2 ms between ticks
    shares = summarise(RUN)["time_share"]
    assert shares == {"decode": 0.0465, "sample": 0.0025, "host_gap": 0.001, "idle": 0.95}


def test_errors_of_predictions() -> None:
    found = summarise(RUN)["prediction_error"]
    assert found["decode_only"] == {**quantiles(1, 0.0, 0.0, 0.0, 0.0), "bias": 0.0}
    # |-0.1| and 0.2: the median is 0.15, and 95 % of the way from one to the other is 0.195; 55.8 ms of 52
    assert found["prefill"] == {**quantiles(2, 0.15, 0.195, 0.199, 0.2), "bias": round(55.8 / 52 - 1, 4)}
    assert np.isnan(prediction_errors(TICKS)[3])


@all_cases(
    ("at_s", "load"),
    [
        (0.5, 0),  # before the first tick
        (1.005, 2),  # during a tick
        (1.0115, 2),  # between two consecutive ticks
        (1.02, 4),  # two decodes, one prefill, one queued
        (1.04, 4),
        (1.07, 0),  # in the idle time
        (1.97, 1),
        (2.0, 1),  # at its end
        (2.5, 0),  # after the last tick
    ],
)
def test_load_on_arrival(at_s: float, load: int) -> None:
    assert load_at(TICKS, np.array([at_s])).tolist() == [load]


def loads(run: Run) -> dict[str, Any]:
    """Quantiles by the name of a load."""
    found = summarise(run)["latency_ms"]
    return {name.removeprefix("ttft_load_"): row for name, row in found.items() if name.startswith("ttft_load_")}


def test_time_to_first_token_by_load() -> None:
    # a and c met an idle daemon, b met four others
    found = loads(RUN)
    assert list(found) == ["0", "4_to_7"]
    assert found["0"] == quantiles(2, 100.0, 100.0, 100.0, 100.0)
    assert (found["4_to_7"]["n"], found["4_to_7"]["p50"]) == (1, 45.0)


@given(st.integers(0, 1000))
def test_every_load_is_in_one_bin(load: int) -> None:
    tick = TickRecord(start_s=0.0, decode_seq_ids=tuple(range(load)), decode_ms=1000.0)
    request = RequestRecord(id="r", arrived_s=0.5, first_token_s=0.6, finished_s=1.0, finish_reason="stop")
    [name] = loads(Run(header=HEADER, ticks=[tick], requests=[request]))
    least, _, most = name.partition("_to_")
    assert int(least) <= load <= int(most or least)


def test_an_empty_run() -> None:
    found = summarise(Run(header=HEADER))
    assert [found[key] for key in ("ticks", "tokens", "duration_s", "tokens_per_s")] == [0, 0, 0.0, None]
    nothing = quantiles(0, None, None, None, None)
    assert found["latency_ms"]["inter_token"] == found["latency_ms"]["ttft"] == found["latency_ms"]["tick"] == nothing
    assert (found["time_share"], found["avg_batch"], found["closed"]) == (None, None, False)
    assert found["longest_ticks"] == []
    assert loads(Run(header=HEADER)) == {}
    unknown = {**nothing, "bias": None}
    assert found["prediction_error"] == {"decode_only": unknown, "prefill": unknown}


def test_ticks_without_requests_and_requests_without_ticks() -> None:
    assert summarise(attrs.evolve(RUN, requests=[]))["duration_s"] == pytest.approx(1.0)
    assert loads(attrs.evolve(RUN, ticks=[]))["0"]["n"] == 3


@given(st.integers(1, 50))
def test_shares_add_up_and_tokens_too(seed: int) -> None:
    run = simulated(seed, requests=8, base_ms=3.0)
    found = summarise(run)
    assert sum(found["time_share"].values()) == pytest.approx(1.0, abs=1e-3)
    assert 0 <= found["time_share"]["decode"] <= 1
    completed = sum(request.completion_tokens for request in run.requests)
    assert found["tokens"] == completed + found["accepted_draft_tokens"]
    assert sum(row["n"] for row in loads(run).values()) == len(run.requests)
    computed = sum(max(1, request.prompt_tokens - request.cached_tokens) for request in run.requests)
    assert found["prompt_tokens"] == computed
    assert len(found["longest_ticks"]) == min(10, len(run.ticks))


def test_a_step_of_several_passes_has_one_gap_and_one_copy() -> None:
    step = TickRecord(start_s=1.0, n_passes=4, decode_calls=4, tokens=4, decode_ms=8.0, host_gap_ms=1.0, copy_ms=2.0)
    passes = step.each_pass()
    assert [each.start_s for each in passes] == pytest.approx([1.0, 1.002, 1.004, 1.006])
    assert [(each.host_gap_ms, each.copy_ms) for each in passes] == [(1.0, 2.0), *[(None, None)] * 3]
    assert [each.tokens for each in passes] == [1] * 4


def test_a_pass_has_its_share_of_each_sum() -> None:
    passes = TickRecord(start_s=1.0, n_passes=3, late_masks=4, forced_tokens=1, running=5, predicted_ms=6.0).each_pass()
    assert sum(each.late_masks for each in passes) == 4
    assert sum(each.forced_tokens for each in passes) == 1
    assert [(each.running, each.predicted_ms) for each in passes] == [(5, 2.0)] * 3


def test_each_field_of_a_tick_says_what_a_pass_has_of_it() -> None:
    class Tick(TickRecord, tag="other"):
        new_tokens: Summed[int] = 0
        new_ms: Divided[BeforePasses[float]] = 0.0

    with pytest.raises(TypeError, match="what each pass has of new_tokens, new_ms"):
        check_passes(Tick)
