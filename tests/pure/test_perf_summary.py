"""What a run comes to, against figures that were worked out by hand."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.perf_runs import HEADER, simulated
from uma_trio.telemetry.perf_format import Run
from uma_trio.telemetry.perf_records import RequestRecord, TickRecord, Trailer
from uma_trio.telemetry.perf_summary import (
    Columns,
    Load,
    Prediction,
    Quantiles,
    Shares,
    load_at,
    prediction_errors,
    summarise,
)

TICKS = [
    # nothing before it; two streams, predicted exactly
    TickRecord(t_s=1.000, seq_ids=(0, 1), tokens=2, predicted_ms=11.0, decode_ms=10.0, sample_ms=1.0, bandwidth_share=0.5),
    # 1 ms later, with 30 tokens of a prompt that does not end; a tenth less was predicted
    TickRecord(
        t_s=1.012, seq_ids=(0, 1), prompts=((2, 30),), tokens=2, predicted_ms=19.8, decode_ms=20.0, sample_ms=2.0, host_gap_ms=1.0, waiting=1
    ),
    # it ends, and two guesses of four were right; a fifth too much was predicted
    TickRecord(
        t_s=1.035, seq_ids=(0, 1), prompts=((2, 10),), tokens=5, drafted=4, accepted=2, n_decodes=2, predicted_ms=36.0, decode_ms=29.0,
        sample_ms=1.0, host_gap_ms=1.0, waiting=1, bandwidth_share=0.7,
    ),
    # after a pause, and not predicted
    TickRecord(t_s=1.965, seq_ids=(3,), tokens=1, decode_ms=34.0, sample_ms=1.0),
]  # fmt: skip

REQUESTS = [
    RequestRecord(
        id="a", arrived_s=0.9, admitted_s=0.95, first_token_s=1.0, ended_s=1.5, prompt_tokens=100, cached_tokens=60, completion_tokens=4,
        reason="stop", itl_ms=[10.0, 20.0, 30.0],
    ),
    RequestRecord(id="b", arrived_s=1.02, admitted_s=1.02, first_token_s=1.065, ended_s=1.5, prompt_tokens=40, completion_tokens=2, reason="stop", itl_ms=[40.0]),
    RequestRecord(id="c", arrived_s=1.9, admitted_s=1.95, first_token_s=2.0, ended_s=2.9, prompt_tokens=60, completion_tokens=1, reason="length"),
    RequestRecord(id="d", arrived_s=1.95, ended_s=2.0, prompt_tokens=500, reason="E_LIMIT_QUEUE"),
]  # fmt: skip

RUN = Run(header=HEADER, ticks=TICKS, requests=REQUESTS, trailer=Trailer(dropped=3))


def test_the_figures_of_a_small_run() -> None:
    found = summarise(RUN)
    assert (found.ticks, found.decode_calls, found.tokens, found.prompt_tokens) == (4, 5, 10, 40)
    assert found.duration_s == 2.0  # from a's arrival to c's end
    assert found.tokens_per_s == 5.0
    assert found.average_batch == (2 + 3 + 3 + 1) / 4
    assert found.itl_ms == Quantiles(4, 25.0, 38.5, 39.7, 40.0)
    assert found.ttft_ms.n == 3
    assert found.ttft_ms.p50 == 100.0
    assert found.queue_ms == Quantiles(3, 50.0, 50.0, 50.0, 50.0)
    assert (found.tick_ms.p50, found.tick_ms.max) == (26.0, 35.0)
    assert (found.decode_ms.max, found.sample_ms.max) == (34.0, 2.0)
    assert found.host_gap_ms == Quantiles(2, 1.0, 1.0, 1.0, 1.0)
    assert (found.drafted, found.accepted) == (4, 2)
    assert (found.asked_tokens, found.cached_tokens) == (200, 60)  # d never had a sequence
    assert found.requests == {"stop": 2, "length": 1, "E_LIMIT_QUEUE": 1}
    assert found.bandwidth_share.p50 == 0.6
    assert (found.dropped, found.closed, found.cut) == (3, True, None)
    assert [tick.t_s for tick in found.longest] == [1.965, 1.035, 1.012, 1.0]


def test_where_the_time_went() -> None:
    # of 2 s: 93 ms llama_decode, 5 ms choosing tokens, 2 ms between ticks
    shares = summarise(RUN).shares
    assert shares == Shares(decode=0.0465, sample=0.0025, host_gap=0.001, nothing_to_do=0.95)
    assert shares.device_idle == 1 - 0.0465


def test_how_far_off_predictions_were() -> None:
    found = summarise(RUN)
    assert found.alone == Prediction(ticks=1, median_error=0.0, p95_error=0.0, bias=0.0)
    # |-0.1| and 0.2: the median is 0.15, and 95 % of the way from one to the other is 0.195; 55.8 ms of 52
    assert found.mixed == Prediction(ticks=2, median_error=0.15, p95_error=0.195, bias=round(55.8 / 52 - 1, 4))
    assert np.isnan(prediction_errors(Columns.of(TICKS))[3])


@pytest.mark.parametrize(
    ("at_s", "load"),
    [
        (0.5, 0),  # before the first tick
        (1.005, 2),  # while it computes
        (1.0115, 2),  # between two that follow each other
        (1.02, 4),  # two streams, a prompt, one that waits
        (1.04, 4),
        (1.07, 0),  # in the pause
        (1.97, 1),
        (2.0, 1),  # as it ends
        (2.5, 0),  # behind the last one
    ],
)
def test_who_was_there_when_a_request_came(at_s: float, load: int) -> None:
    assert load_at(Columns.of(TICKS), np.array([at_s])).tolist() == [load]


def test_first_tokens_by_load() -> None:
    # a and c came to an idle daemon, b to four others
    nobody, some = summarise(RUN).ttft_by_load
    assert nobody == Load(least=0, most=0, ttft_ms=Quantiles(2, 100.0, 100.0, 100.0, 100.0))
    assert (some.least, some.most, some.ttft_ms.p50) == (4, 7, 45.0)


@given(st.integers(0, 1000))
def test_every_load_is_in_one_class(load: int) -> None:
    tick = TickRecord(t_s=0.0, seq_ids=tuple(range(load)), decode_ms=1000.0)
    request = RequestRecord(id="r", arrived_s=0.5, first_token_s=0.6, ended_s=1.0, reason="stop")
    [found] = summarise(Run(header=HEADER, ticks=[tick], requests=[request])).ttft_by_load
    assert found.least <= load <= found.most


def test_a_run_in_which_nothing_happened() -> None:
    found = summarise(Run(header=HEADER))
    assert (found.ticks, found.tokens, found.duration_s, found.tokens_per_s) == (0, 0, 0.0, 0.0)
    assert found.itl_ms == found.ttft_ms == found.tick_ms == Quantiles(0, None, None, None, None)
    assert (found.shares, found.average_batch, found.longest, found.ttft_by_load, found.closed) == (
        None,
        None,
        (),
        (),
        False,
    )
    assert found.alone == found.mixed == Prediction(ticks=0, median_error=None, p95_error=None, bias=None)


def test_ticks_without_requests_and_requests_without_ticks() -> None:
    assert summarise(attrs.evolve(RUN, requests=[])).duration_s == pytest.approx(1.0)
    assert summarise(attrs.evolve(RUN, ticks=[])).ttft_by_load[0].ttft_ms.n == 3


@given(st.integers(1, 50))
def test_shares_add_up_and_tokens_too(seed: int) -> None:
    run = simulated(seed, requests=8, base_ms=3.0)
    found = summarise(run)
    assert found.shares is not None
    assert sum(attrs.astuple(found.shares)) == pytest.approx(1.0, abs=1e-3)
    assert 0 <= found.shares.device_idle <= 1
    assert found.tokens == sum(request.completion_tokens for request in run.requests) + found.accepted
    assert sum(load.ttft_ms.n for load in found.ttft_by_load) == len(run.requests)
    assert found.prompt_tokens == sum(max(1, request.prompt_tokens - request.cached_tokens) for request in run.requests)
    assert len(found.longest) == min(10, len(run.ticks))
