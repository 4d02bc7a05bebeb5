"""The cost model: it finds what a device takes, follows it, and keeps its head."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.device import CPU, FLAT, GPU, QUICK, SLOW, Device, House, calibrated
from uma_trio.scheduling.cost import CONTEXT_STEP, SCALES, WORTH_CUTTING, CostModel, Line, Widths, Work

DEVICES = [CPU, GPU, QUICK, FLAT, SLOW]


def any_work(chance: random.Random) -> Work:
    return Work(
        chance.randrange(1, 512), chance.randrange(0, 32), chance.randrange(0, 20_000), chance.randrange(0, 8000)
    )


def learned(device: Device, ticks: int, line: Line | None = None, *, seed: int = 1) -> Line:
    chance = random.Random(seed)
    line = line or CostModel().mixed
    for _ in range(ticks):
        work = any_work(chance)
        line = line.observed(work, device.ms(work))
    return line


def with_noise(device: Device, noise: float) -> Device:
    return attrs.evolve(device, noise=noise, chance=random.Random(3))


def worst(line: Line, device: Device) -> float:
    """Largest share by which it is wrong over all kinds of ticks."""
    chance = random.Random(99)
    works = [any_work(chance) for _ in range(200)]
    return max(abs(line.predict(work) / device.exact_ms(work) - 1) for work in works)


# -- it finds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_without_noise_it_finds_the_coefficients(device: Device) -> None:
    found = [c / scale for c, scale in zip(learned(device, 400).coefficients, SCALES, strict=True)]
    assert found == pytest.approx([device.a + device.step, device.b, device.c, device.d, device.e], rel=0.02, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_under_noise_it_is_near(device: Device, noise: float) -> None:
    """Fifty ticks count: their mean is known to a few times noise / sqrt(50)."""
    line = learned(with_noise(device, noise), 400)
    chance = random.Random(7)
    works = [any_work(chance) for _ in range(200)]
    off = [abs(line.predict(work) / device.exact_ms(work) - 1) for work in works]
    assert statistics.mean(off) < 1.2 * noise


@pytest.mark.parametrize("device", DEVICES)
def test_the_error_is_what_noise_leaves(device: Device) -> None:
    """Mean |deviation| of a normal distribution is 0.8 of its standard deviation."""
    line = learned(with_noise(device, 0.05), 400)
    assert 0.025 < line.error < 0.08


def test_the_error_is_the_average_share_and_recent_ticks_count_most() -> None:
    line = Line((10.0, 0.0, 0.0, 0.0, 0.0)).observed(Work(0, 0, 0), 20.0)
    assert line.error == 0.5
    assert Line((10.0, 0.0, 0.0, 0.0, 0.0), error=0.2, seen=9).observed(Work(0, 0, 0), 8.0).error == pytest.approx(
        0.2 + 0.05 * (0.25 - 0.2)
    )
    assert learned(FLAT, 500).error < 1e-3


@pytest.mark.parametrize("device", [CPU, GPU, QUICK, FLAT])
def test_calibration_is_enough_for_a_first_guess(device: Device) -> None:
    cost = calibrated(device)
    for work in (Work(0, 1, 100), Work(0, 4, 400), Work(48, 2, 100), Work(96, 0, 0)):
        assert cost.predict(work) == pytest.approx(device.exact_ms(work), rel=0.3, abs=1)


# -- it follows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.0, 10.0])
@pytest.mark.parametrize("device", [CPU, GPU, FLAT])
def test_it_follows_a_device_that_changes_its_speed(device: Device, factor: float) -> None:
    changed = Device(*(factor * x for x in (device.a, device.b, device.c, device.d, device.e, device.step)))
    line = learned(changed, 300, learned(device, 300), seed=2)
    assert (
        statistics.mean(
            [
                abs(line.predict(w) / changed.exact_ms(w) - 1)
                for w in map(any_work, [random.Random(i) for i in range(50)])
            ]
        )
        < 0.1
    )


def test_it_follows_one_kind_of_tick_too() -> None:
    """Streams alone for a long time, then slower: nothing but the sum can be known, and is."""
    line, work = CostModel().alone, Work(0, 4, 1000)
    for _ in range(3_000):
        line = line.observed(work, 10.0)
    assert line.predict(work) == pytest.approx(10.0, rel=0.01)
    for _ in range(200):
        line = line.observed(work, 30.0)
    assert line.predict(work) == pytest.approx(30.0, rel=0.05)


# -- it keeps its head --------------------------------------------------------------------------------

works = st.builds(Work, st.integers(0, 8192), st.integers(0, 256), st.integers(0, 1 << 24))


@given(st.lists(st.tuples(works, st.one_of(st.floats(0, 1e7), st.sampled_from([0.0, 1e-9, 10_000.0]))), max_size=80))
def test_whatever_it_sees_it_stays_finite_and_not_negative(ticks: list[tuple[Work, float]]) -> None:
    cost = CostModel()
    for work, ms in ticks:
        cost = cost.observed(work, ms)
        for line in (cost.alone, cost.mixed):
            assert all(0 <= c < math.inf for c in line.coefficients)
            assert 0 <= line.error <= 4
        assert 0 <= cost.predict(work) < math.inf
        assert not math.isnan(cost.largest_prompt(100.0, work))


@pytest.mark.parametrize(
    "work", [Work(1, 0, 0), Work(64, 4, 2000), Work(512, 256, 1 << 20), Work(0, 1, 0), Work(0, 0, 0)]
)
def test_always_the_same_tick_and_then_another(work: Work) -> None:
    """What was not seen stays uncertain, within bounds; the first tick of another kind is learned at once."""
    line, chance = CostModel().mixed, random.Random(5)
    for _ in range(5_000):
        line = line.observed(work, 20 * (1 + 0.05 * chance.gauss(0, 1)))
    assert line.predict(work) == pytest.approx(20, rel=0.05)
    assert worst(learned(FLAT, 800, line), FLAT) < 0.05


def test_no_coefficient_below_0_spoils_what_was_seen() -> None:
    """Prompts fill the time that streams leave: the terms are tied together, and noise decides the rest."""
    house, lowest, off = House(with_noise(SLOW, 0.05)), 0.0, []
    for seq_id in range(4):
        house.decode(seq_id)
    for i in range(600):
        if i % 100 == 0:
            house.read(10 + i, math.inf)
            house.held.pop(10 + i - 200, None)
        chosen = house.tick()
        if house.cost.mixed.free:
            lowest = min(lowest, *house.cost.mixed.free)
        off.append(abs(chosen.predicted_ms / house.device.exact_ms(chosen.work) - 1))
    assert lowest < 0, "the case is not tried"
    assert statistics.mean(off) < 0.05


@pytest.mark.parametrize("ms", [1_000.0, 10_000.0, 100_000.0])
def test_one_hiccup_is_not_believed(ms: float) -> None:
    before = learned(with_noise(CPU, 0.03), 300)
    work = Work(64, 4, 1000)
    after = before.observed(work, ms)
    assert after.predict(work) < 1.2 * before.predict(work)
    assert after.error < before.error + 0.051
    chance = random.Random(8)
    works = [any_work(chance) for _ in range(100)]
    later = learned(with_noise(CPU, 0.03), 20, after)
    assert statistics.mean([abs(later.predict(work) / CPU.exact_ms(work) - 1) for work in works]) < 0.05


@pytest.mark.parametrize("ms", [1_000.0, 10_000.0])
@pytest.mark.parametrize("device", [CPU, GPU, SLOW])
def test_after_a_hiccup_prompts_go_on(device: Device, ms: float) -> None:
    """Ten ticks after it they are read at three quarters of the rate before, or more."""
    house = House(with_noise(device, 0.03))
    for seq_id in range(4):
        house.decode(seq_id)
    house.read(9, math.inf)
    rates = []
    for i in range(400):
        prompt = house.held[9]
        prompt.slot.context = min(prompt.slot.context, 2000)
        at, fed = house.now_s, prompt.fed
        if i == 200:
            house.device = Device(ms, 0, 0)
        house.tick()
        if i == 200:
            house.device = with_noise(device, 0.03)
        rates.append((prompt.fed - fed, house.now_s - at))
    before, after = rates[150:200], rates[211:261]
    rate = [sum(n for n, _ in part) / sum(s for _, s in part) for part in (before, after)]
    assert rate[1] >= 0.75 * rate[0]


# -- and back ---------------------------------------------------------------------------------------


@given(
    st.tuples(*[st.floats(0, 1e4)] * 5),
    st.floats(-1e4, 1e5),
    st.integers(0, 256),
    st.integers(0, 1 << 20),
)
def test_largest_prompt_is_the_inverse_of_predict(
    coefficients: tuple[float, ...], ms: float, decodes: int, context: int
) -> None:
    line = Line(coefficients)
    cost = CostModel(line, line)
    work = Work(77, decodes, context)
    n = cost.largest_prompt(ms, work)
    without = line.predict(Work(0, decodes, context))
    if abs(n) > 1e9:  # no tick is so large
        assert (n > 0) == (without <= ms)
        return
    fits = math.floor(n)
    slack = 1e-6 * (abs(ms) + without + coefficients[1])
    if fits >= 0:
        assert line.predict(Work(fits, decodes, context)) <= ms + slack
        assert line.predict(Work(fits + 1, decodes, context)) >= ms - slack
    else:
        assert without > ms - slack


def test_ticks_with_prompts_and_without_are_learned_apart() -> None:
    cost = CostModel().observed(Work(64, 4, 100), 50.0)
    assert cost.alone == CostModel().alone
    assert cost.observed(Work(0, 4, 100), 5.0).mixed == cost.mixed


# -- widths: how many rows one call takes best --------------------------------------------------------

measured = st.lists(st.floats(0.1, 50), min_size=1, max_size=8)


def partitions(n: int, largest: int) -> Iterator[tuple[int, ...]]:
    if n == 0:
        yield ()
    for width in range(min(n, largest), 0, -1):
        for rest in partitions(n - width, width):
            yield (width, *rest)


@given(measured)
def test_rows_are_cut_as_takes_least_or_not_at_all(ms: list[float]) -> None:
    widths, rows = Widths((0.0, *ms)), len(ms)
    chosen = widths.cut(rows)
    took = {cut: sum(ms[width - 1] for width in cut) for cut in partitions(rows, rows)}
    assert chosen in took, "the widest first, and all of them"
    if chosen == (rows,):
        assert min(took.values()) >= WORTH_CUTTING * ms[-1] * (1 - 1e-9)
    else:
        assert took[chosen] == pytest.approx(min(took.values()))
        assert took[chosen] < WORTH_CUTTING * ms[-1]


def test_to_cut_must_pay() -> None:
    assert Widths((0.0, 4.8, 10.0)).cut(2) == (2,), "96 % is noise"
    assert Widths((0.0, 4.6, 10.0)).cut(2) == (1, 1)


def test_a_cpu_that_takes_some_numbers_of_rows_better_than_others() -> None:
    """Two streams of a Q4_0 model took longer than one after the other; five not enough longer than four and one."""
    widths = Widths((0.0, 3.3, 8.6, 8.9, 9.2, 12.7, 18.8))
    assert [widths.cut(rows) for rows in range(1, 7)] == [(1,), (1, 1), (3,), (4,), (5,), (4, 1, 1)]


@pytest.mark.parametrize("rows", [0, 1, 4, 200])
def test_what_was_not_measured_stays_whole(rows: int) -> None:
    assert Widths((0.0, 1.0, 9.0, 9.0)).cut(rows) == (rows,)
    assert Widths().cut(rows) == (rows,)


def test_a_call_takes_what_its_rows_were_measured_to_and_what_it_reads() -> None:
    cost = CostModel(Line((5.0, 0.0, 10.0, 4.0, 0.0)), widths=Widths((0.0, 3.0, 9.0)))
    assert cost.of_rows(2, 0) == 9.0
    assert cost.of_rows(2, 5_000) == 11.0
    assert cost.of_rows(3, 5_000) == 5 + 3 + 2, "beyond what was measured it is the line"


def test_widths_stay_as_they_were_measured() -> None:
    cost = CostModel(widths=Widths((0.0, 3.0, 9.0)))
    for _ in range(100):
        cost = cost.observed(Work(0, 2, 100), 50.0).observed(Work(16, 2, 100), 80.0)
    assert cost.widths == Widths((0.0, 3.0, 9.0))


# -- calls of streams with contexts of unlike length --------------------------------------------------


def cost_of(widths: tuple[int, ...], contexts: list[int], cost: CostModel) -> float:
    """What calls of ``widths`` take where each row takes as long as the longest of its call."""
    ms, at = 0.0, 0
    for width in widths:
        steps = -(-max(contexts[at : at + width]) // CONTEXT_STEP)
        ms += cost.of_rows(width, 0) + cost.of_rows(0, steps * CONTEXT_STEP * width)
        at += width
    return ms


def all_cuts(n: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [at + 1 for at, cut in enumerate(cuts) if cut] + [n]
        yield tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def line_of(call: float, row: float, context: float) -> CostModel:
    """Milliseconds of a call, of a row, and of 256 tokens of context, in tenths and two digits: not rounded by the cache."""
    measured = (0.0, *(round(call + row * n, 1) for n in range(1, 9)))
    return CostModel(alone=Line((call, 0.0, 10 * row, context * 10_000 / CONTEXT_STEP, 0.0)), widths=Widths(measured))


@given(
    st.lists(st.integers(1, 9000), min_size=2, max_size=8),
    st.sampled_from([0.2, 0.5, 5.0]),
    st.sampled_from([0.1, 1.0, 2.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.7]),
)
def test_streams_are_cut_by_their_context_where_that_takes_least(
    contexts: list[int], call: float, row: float, context: float
) -> None:
    cost = line_of(call, row, context)
    cut = cost.cut(len(contexts), contexts)
    assert sum(cut) == len(contexts)
    least = min(cost_of(each, contexts, cost) for each in all_cuts(len(contexts)))
    whole = cost_of((len(contexts),), contexts, cost)
    assert cost_of(cut, contexts, cost) <= max(least, min(whole, least / WORTH_CUTTING)) + 1e-6


def test_a_long_one_is_not_computed_with_short_ones() -> None:
    cost = line_of(0.5, 0.2, 0.14)
    assert cost.cut(4, [100, 100, 100, 4000]) == (3, 1)
    assert cost.cut(5, [100, 100, 4000, 100, 100]) == (2, 1, 2)
    assert cost.cut(4, [4000, 4000, 4000, 4000]) == (4,)
    assert cost.cut(4) == (4,), "where the length of others does not matter"
    assert line_of(50.0, 0.2, 0.14).cut(4, [100, 100, 100, 4000]) == (4,), "a call is too dear"


def test_a_crowd_of_all_lengths_is_left_whole() -> None:
    cost = line_of(0.5, 0.2, 0.14)
    assert cost.cut(40, [300 * n for n in range(40)]) == (40,)
    assert cost.cut(40, [100] * 20 + [9000] * 20) == (20, 20)
