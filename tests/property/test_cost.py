"""The cost model learns what a device takes, follows changes, and is robust against outliers."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from typing import Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.device import CPU, FLAT, GPU, QUICK, SLOW, Device, SimulatedServer, calibrated
from tests.support.profile import sampled
from uma_trio.daemon.policy.cost import (
    CONTEXT_ALIGNMENT,
    FEATURE_SCALES,
    MAX_MARGIN,
    MIN_MARGIN,
    CostModel,
    LinearModel,
    Work,
)
from uma_trio.daemon.policy.decode_split import FIRST_TRIAL, SPLIT_THRESHOLD, DecodeCallTimes

DEVICES = [CPU, GPU, QUICK, FLAT, SLOW]


def any_work(rng: random.Random) -> Work:
    return Work(rng.randrange(1, 512), rng.randrange(0, 32), rng.randrange(0, 20_000), rng.randrange(0, 8000))


def learned(device: Device, ticks: int, model: LinearModel | None = None, *, seed: int = 1) -> LinearModel:
    rng = random.Random(seed)
    model = model or CostModel().mixed
    for _ in range(ticks):
        work = any_work(rng)
        model = model.observed(work, device.ms(work))
    return model


def with_noise(device: Device, noise: float) -> Device:
    return attrs.evolve(device, noise=noise, rng=random.Random(3))


def worst(model: LinearModel, device: Device) -> float:
    """The largest relative error over all kinds of ticks."""
    rng = random.Random(99)
    works = [any_work(rng) for _ in range(200)]
    return max(abs(model.predict(work) / device.exact_ms(work) - 1) for work in works)


# -- learning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_without_noise_the_coefficients_are_found(device: Device) -> None:
    found = [c / scale for c, scale in zip(learned(device, 400).coefficients, FEATURE_SCALES, strict=True)]
    known = [device.a + device.step, device.b, device.c, device.d, device.e]
    assert found == pytest.approx(known, rel=0.02, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_with_noise_predictions_are_close(device: Device, noise: float) -> None:
    """About fifty ticks count, so their mean is known to a few times noise / sqrt(50)."""
    model = learned(with_noise(device, noise), 400)
    rng = random.Random(7)
    works = [any_work(rng) for _ in range(200)]
    off = [abs(model.predict(work) / device.exact_ms(work) - 1) for work in works]
    assert statistics.mean(off) < 1.2 * noise


@pytest.mark.parametrize("device", DEVICES)
def test_the_error_is_that_of_the_noise(device: Device) -> None:
    """Mean |deviation| of a normal distribution is 0.8 of its standard deviation."""
    model = learned(with_noise(device, 0.05), 400)
    assert 0.025 < model.error < 0.08


def test_the_error_is_a_mean_in_which_recent_ticks_count_most() -> None:
    model = LinearModel((10.0, 0.0, 0.0, 0.0, 0.0)).observed(Work(0, 0, 0), 20.0)
    assert model.error == 0.5
    assert LinearModel((10.0, 0.0, 0.0, 0.0, 0.0), error=0.2, n_observed=9).observed(
        Work(0, 0, 0), 8.0
    ).error == pytest.approx(0.2 + 0.05 * (0.25 - 0.2))
    assert learned(FLAT, 500).error < 1e-3


@pytest.mark.parametrize("device", [CPU, GPU, QUICK, FLAT])
def test_calibration_is_enough_for_a_first_estimate(device: Device) -> None:
    cost = calibrated(device)
    for work in (Work(0, 1, 100), Work(0, 4, 400), Work(48, 2, 100), Work(96, 0, 0)):
        assert cost.predict(work) == pytest.approx(device.exact_ms(work), rel=0.3, abs=1)


# -- following changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.0, 10.0])
@pytest.mark.parametrize("device", [CPU, GPU, FLAT])
def test_the_model_follows_a_device_that_changes_its_speed(device: Device, factor: float) -> None:
    changed = Device(*(factor * x for x in (device.a, device.b, device.c, device.d, device.e, device.step)))
    model = learned(changed, 300, learned(device, 300), seed=2)
    assert (
        statistics.mean(
            [
                abs(model.predict(w) / changed.exact_ms(w) - 1)
                for w in map(any_work, [random.Random(i) for i in range(50)])
            ]
        )
        < 0.1
    )


def test_the_model_follows_with_a_single_kind_of_tick() -> None:
    """The same decodes for a long time, then slower: only the total can be learned."""
    model, work = CostModel().decode_only, Work(0, 4, 1000)
    for _ in range(3_000):
        model = model.observed(work, 10.0)
    assert model.predict(work) == pytest.approx(10.0, rel=0.01)
    for _ in range(200):
        model = model.observed(work, 30.0)
    assert model.predict(work) == pytest.approx(30.0, rel=0.05)


# -- robustness --------------------------------------------------------------------------------

works = st.builds(Work, st.integers(0, 8192), st.integers(0, 256), st.integers(0, 1 << 24))


@given(st.lists(st.tuples(works, st.one_of(st.floats(0, 1e7), st.sampled_from([0.0, 1e-9, 10_000.0]))), max_size=80))
def test_whatever_is_observed_predictions_stay_finite_and_not_negative(ticks: list[tuple[Work, float]]) -> None:
    cost = CostModel()
    for work, ms in ticks:
        cost = cost.observed(work, ms)
        for model in (cost.decode_only, cost.mixed):
            assert all(0 <= c < math.inf for c in model.coefficients)
            assert 0 <= model.error <= 4
        assert 0 <= cost.predict(work) < math.inf
        assert not math.isnan(cost.max_prefill_tokens(100.0, work))


@pytest.mark.parametrize(
    "work", sampled([Work(1, 0, 0), Work(64, 4, 2000), Work(512, 256, 1 << 20), Work(0, 1, 0), Work(0, 0, 0)], 5)
)
def test_a_new_kind_of_tick_is_learned_after_thousands_of_equal_ticks(work: Work) -> None:
    """What was not observed stays uncertain, within bounds, so the first tick of another kind is learned at once."""
    model, rng = CostModel().mixed, random.Random(5)
    for _ in range(5_000):
        model = model.observed(work, 20 * (1 + 0.05 * rng.gauss(0, 1)))
    assert model.predict(work) == pytest.approx(20, rel=0.05)
    assert worst(learned(FLAT, 800, model), FLAT) < 0.05


def test_holding_coefficients_at_0_does_not_spoil_the_fit() -> None:
    """Prefill fills the time that decodes leave, so the features are correlated, and noise decides the coefficients."""
    server, lowest, off = SimulatedServer(with_noise(SLOW, 0.05)), 0.0, []
    for seq_id in range(4):
        server.decode(seq_id)
    for i in range(600):
        if i % 100 == 0:
            server.prefill(10 + i, math.inf)
            server.running.pop(10 + i - 200, None)
        chosen = server.tick()
        if server.cost.mixed.unconstrained:
            lowest = min(lowest, *server.cost.mixed.unconstrained)
        off.append(abs(chosen.predicted_ms / server.device.exact_ms(chosen.work) - 1))
    assert lowest < 0, "no coefficient was negative, so this tests nothing"
    assert statistics.mean(off) < 0.05


@pytest.mark.parametrize("ms", [1_000.0, 10_000.0, 100_000.0])
def test_one_outlier_is_not_believed(ms: float) -> None:
    before = learned(with_noise(CPU, 0.03), 300)
    work = Work(64, 4, 1000)
    after = before.observed(work, ms)
    assert after.predict(work) < 1.2 * before.predict(work)
    assert after.error < before.error + 0.051
    rng = random.Random(8)
    works = [any_work(rng) for _ in range(100)]
    later = learned(with_noise(CPU, 0.03), 20, after)
    assert statistics.mean([abs(later.predict(work) / CPU.exact_ms(work) - 1) for work in works]) < 0.05


@pytest.mark.parametrize("ms", [1_000.0, 10_000.0])
@pytest.mark.parametrize("device", [CPU, GPU, SLOW])
def test_prefill_continues_after_an_outlier(device: Device, ms: float) -> None:
    """Ten ticks later the prefill rate is at least three quarters of what it was."""
    server = SimulatedServer(with_noise(device, 0.03))
    for seq_id in range(4):
        server.decode(seq_id)
    server.prefill(9, math.inf)
    rates = []
    for i in range(400):
        prompt = server.running[9]
        prompt.n_context = min(prompt.n_context, 2000)
        at, done = server.now_s, prompt.n_prefilled
        if i == 200:
            server.device = Device(ms, 0, 0)
        server.tick()
        if i == 200:
            server.device = with_noise(device, 0.03)
        rates.append((prompt.n_prefilled - done, server.now_s - at))
    before, after = rates[150:200], rates[211:261]
    rate = [sum(n for n, _ in part) / sum(s for _, s in part) for part in (before, after)]
    assert rate[1] >= 0.75 * rate[0]


# -- the margin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.0, 0.01, 0.01), (0.001, 0.01, 0.012), (0.03, 0.02, 0.08), (0.3, 0.07, 0.1)]
)
def test_a_margin_is_what_nine_of_ten_ticks_need(noise: float, least: float, most: float) -> None:
    """1.3 standard deviations: at least one percent, and at most a tenth."""
    model = learned(with_noise(FLAT, noise), 1000)
    margins = [model.margin(ms) for ms in (20.0, 40.0)]  # most ticks of this device take that long
    assert all(least <= margin <= most for margin in margins)


def test_nothing_known_is_the_largest_margin() -> None:
    assert {CostModel().mixed.margin(ms) for ms in (-1.0, 0.0, 18.0, 100.0, math.inf)} == {MAX_MARGIN}


def test_ticks_of_other_durations_keep_their_margin() -> None:
    model, work = CostModel().mixed, Work(64, 4, 1000)
    for _ in range(200):
        model = model.observed(work, 20.0)
    assert model.margin(20.0) == model.margin(20.0 / (1 - MAX_MARGIN)) == MIN_MARGIN
    assert model.margin(100.0) == MAX_MARGIN


def test_one_tick_that_takes_ten_times_as_long_is_one_of_ten() -> None:
    model, work = CostModel().mixed, Work(64, 4, 1000)
    for n in range(400):
        model = model.observed(work, 200.0 if n % 100 == 50 else 20.0)
    assert model.margin(20.0) <= 2 * MIN_MARGIN


# -- the inverse ---------------------------------------------------------------------------------------


@given(
    st.tuples(*[st.floats(0, 1e4)] * 5),
    st.floats(-1e4, 1e5),
    st.integers(0, 256),
    st.integers(0, 1 << 20),
)
def test_max_prefill_tokens_is_the_inverse_of_predict(
    coefficients: tuple[float, ...], ms: float, decodes: int, context: int
) -> None:
    model = LinearModel(coefficients)
    cost = CostModel(model, model)
    work = Work(77, decodes, context)
    n = cost.max_prefill_tokens(ms, work)
    without = model.predict(Work(0, decodes, context))
    if abs(n) > 1e9:  # no tick is so large
        assert (n > 0) == (without <= ms)
        return
    fits = math.floor(n)
    slack = 1e-6 * (abs(ms) + without + coefficients[1])
    if fits >= 0:
        assert model.predict(Work(fits, decodes, context)) <= ms + slack
        assert model.predict(Work(fits + 1, decodes, context)) >= ms - slack
    else:
        assert without > ms - slack


def test_ticks_with_and_without_prefill_are_learned_separately() -> None:
    cost = CostModel().observed(Work(64, 4, 100), 50.0)
    assert cost.decode_only == CostModel().decode_only
    assert cost.observed(Work(0, 4, 100), 5.0).mixed == cost.mixed


# -- splitting rows into calls --------------------------------------------------------------------------

measured = st.lists(st.floats(0.1, 50), min_size=1, max_size=8)


def partitions(n: int, largest: int) -> Iterator[tuple[int, ...]]:
    if n == 0:
        yield ()
    for width in range(min(n, largest), 0, -1):
        for rest in partitions(n - width, width):
            yield (width, *rest)


@given(measured)
def test_rows_are_split_in_the_fastest_way_or_not_at_all(ms: list[float]) -> None:
    times, rows = DecodeCallTimes((0.0, *ms)), len(ms)
    chosen = times.split(rows)
    call_ms = {split: sum(ms[width - 1] for width in split) for split in partitions(rows, rows)}
    assert chosen in call_ms, "all rows, the widest call first"
    if chosen == (rows,):
        assert min(call_ms.values()) >= SPLIT_THRESHOLD * ms[-1] * (1 - 1e-9)
    else:
        assert call_ms[chosen] == pytest.approx(min(call_ms.values()))
        assert call_ms[chosen] < SPLIT_THRESHOLD * ms[-1]


def test_a_split_must_pay() -> None:
    assert DecodeCallTimes((0.0, 4.8, 10.0)).split(2) == (2,), "96 % is noise"
    assert DecodeCallTimes((0.0, 4.6, 10.0)).split(2) == (1, 1)


def test_some_row_counts_suit_a_cpu_better_than_others() -> None:
    """Measured with a Q4_0 model: two rows are faster as two calls; for five, four and one save too little."""
    times = DecodeCallTimes((0.0, 3.3, 8.6, 8.9, 9.2, 12.7, 18.8))
    assert [times.split(rows) for rows in range(1, 7)] == [(1,), (1, 1), (3,), (4,), (5,), (4, 1, 1)]


@pytest.mark.parametrize("rows", [0, 1, 4, 200])
def test_row_counts_that_were_not_measured_are_not_split(rows: int) -> None:
    assert DecodeCallTimes((0.0, 1.0, 9.0, 9.0)).split(rows) == (rows,)
    assert DecodeCallTimes().split(rows) == (rows,)


def test_a_call_takes_the_measured_time_of_its_rows_and_the_time_of_its_context() -> None:
    cost = CostModel(LinearModel((5.0, 0.0, 10.0, 4.0, 0.0)), call_times=DecodeCallTimes((0.0, 3.0, 9.0)))
    assert cost.decode_call_ms(2, 0) == 9.0
    assert cost.decode_call_ms(2, 5_000) == 11.0
    assert cost.decode_call_ms(3, 5_000) == 5 + 3 + 2, "beyond the measured row counts the linear model is used"


def test_call_times_are_not_updated_online() -> None:
    cost = CostModel(call_times=DecodeCallTimes((0.0, 3.0, 9.0)))
    for _ in range(100):
        cost = cost.observed(Work(0, 2, 100), 50.0).observed(Work(16, 2, 100), 80.0)
    assert cost.call_times.ms == (0.0, 3.0, 9.0)


def decode(
    cost: CostModel, whole_ms: float, split_ms: float, *, n_ticks: int, rows: int = 4
) -> tuple[CostModel, float]:
    """The cost model after some ticks of ``rows``, and the share of them that were in several calls.

    Each tick was planned before the one in front of it was complete.
    """
    planned, n_split = cost.split(rows), 0
    for n in range(n_ticks):
        widths, planned = planned, cost.split(rows)
        hiccup = 40.0 if n % 37 == 5 else 1.0
        is_split = len(widths) > 1
        n_split += is_split
        cost = cost.observed(Work(0, rows, 100 + n, n_calls=len(widths)), hiccup * (split_ms if is_split else whole_ms))
    return cost, n_split / n_ticks


MEASURED: Final = DecodeCallTimes((0.0, 0.7, 1.0, 1.6, 2.3))
"""The measured times are a reason to compute four rows in two calls."""


def test_a_split_that_was_measured_to_pay_and_does_not_is_given_up() -> None:
    """As with the embedded model: two calls of two rows take longer after each other than one after itself."""
    assert MEASURED.split(4) == (2, 2)
    cost, _ = decode(CostModel(call_times=MEASURED), whole_ms=3.2, split_ms=3.8, n_ticks=100)
    cost, split = decode(cost, whole_ms=3.2, split_ms=3.8, n_ticks=5_000)
    assert split < 0.02


@pytest.mark.parametrize("row_4_ms", [2.3, 3.0, 4.0])
def test_a_worse_measurement_is_corrected_soon_as_well(row_4_ms: float) -> None:
    cost = CostModel(call_times=DecodeCallTimes((0.0, 0.7, 1.0, 1.6, row_4_ms)))
    cost, _ = decode(cost, whole_ms=3.2, split_ms=3.8, n_ticks=130)
    assert cost.call_times.trials[4].is_split_usually is False


def test_a_split_that_pays_stays() -> None:
    cost, split = decode(CostModel(call_times=MEASURED), whole_ms=3.2, split_ms=2.6, n_ticks=5_000)
    assert split > 0.98
    assert cost.split(4) == (2, 2)


def test_a_split_comes_back_when_it_pays_again() -> None:
    cost, _ = decode(CostModel(call_times=MEASURED), whole_ms=3.2, split_ms=3.8, n_ticks=100)
    cost, _ = decode(cost, whole_ms=3.2, split_ms=2.2, n_ticks=5_000)
    assert decode(cost, whole_ms=3.2, split_ms=2.2, n_ticks=1_000)[1] > 0.98


def test_ticks_that_other_reasons_split_are_no_trial() -> None:
    """Because of gaps between sequence ids the ticks are in two calls, whatever the trial wants."""
    times = MEASURED
    for _ in range(200):
        times = times.observed(4, 2, 3.8)
    assert times.split(4) == (2, 2)


def test_ticks_before_others_are_not_compared() -> None:
    """Four streams with long contexts, then three, then four with short contexts."""
    times = MEASURED
    for _ in range(FIRST_TRIAL):
        times = times.observed(4, 2, 12.0)
    times = times.observed(3, 1, 6.0)
    for _ in range(200):
        times = times.observed(4, len(times.split(4)), 2.6 if len(times.split(4)) > 1 else 3.2)
    assert times.split(4) == (2, 2)


# -- splitting by context length ---------------------------------------------------------------------


def cost_of(widths: tuple[int, ...], contexts: list[int], cost: CostModel) -> float:
    """Time of calls of ``widths`` if attention is padded to the longest context of each call."""
    ms, at = 0.0, 0
    for width in widths:
        steps = -(-max(contexts[at : at + width]) // CONTEXT_ALIGNMENT)
        ms += cost.decode_call_ms(width, 0) + cost.decode_call_ms(0, steps * CONTEXT_ALIGNMENT * width)
        at += width
    return ms


def all_splits(n: int) -> Iterator[tuple[int, ...]]:
    for ends_here in itertools.product((False, True), repeat=n - 1):
        ends = [at + 1 for at, is_end in enumerate(ends_here) if is_end] + [n]
        yield tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def cost_model(call: float, row: float, context: float) -> CostModel:
    """A cost model from the milliseconds of a call, of a row, and of 256 tokens of context."""
    measured = (0.0, *(round(call + row * n, 1) for n in range(1, 9)))
    return CostModel(
        decode_only=LinearModel((call, 0.0, 10 * row, context * 10_000 / CONTEXT_ALIGNMENT, 0.0)),
        call_times=DecodeCallTimes(measured),
    )


@given(
    st.lists(st.integers(1, 9000), min_size=2, max_size=8),
    st.sampled_from([0.2, 0.5, 5.0]),
    st.sampled_from([0.1, 1.0, 2.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.7]),
)
def test_rows_are_split_by_context_where_that_is_fastest(
    contexts: list[int], call: float, row: float, context: float
) -> None:
    cost = cost_model(call, row, context)
    split = cost.split(len(contexts), contexts)
    assert sum(split) == len(contexts)
    least = min(cost_of(each, contexts, cost) for each in all_splits(len(contexts)))
    whole = cost_of((len(contexts),), contexts, cost)
    assert cost_of(split, contexts, cost) <= max(least, min(whole, least / SPLIT_THRESHOLD)) + 1e-6


def test_a_long_context_is_not_computed_with_short_ones() -> None:
    cost = cost_model(0.5, 0.2, 0.14)
    assert cost.split(4, [100, 100, 100, 4000]) == (3, 1)
    assert cost.split(5, [100, 100, 4000, 100, 100]) == (2, 1, 2)
    assert cost.split(4, [4000, 4000, 4000, 4000]) == (4,)
    assert cost.split(4) == (4,), "attention is not padded"
    assert cost_model(50.0, 0.2, 0.14).split(4, [100, 100, 100, 4000]) == (4,), "a call is too expensive"


def test_many_different_lengths_are_not_split() -> None:
    cost = cost_model(0.5, 0.2, 0.14)
    assert cost.split(40, [300 * n for n in range(40)]) == (40,)
    assert cost.split(40, [100] * 20 + [9000] * 20) == (20, 20)
