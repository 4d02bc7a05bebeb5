"""What a start measures of an engine."""

from __future__ import annotations

import itertools
import math

import attrs
import msgspec
import pytest

from tests.support.fake_engine import FakeEngine, VirtualLink
from uma_trio.daemon.engines.calibrate import CHECKED, CURVE_ROUNDS, N_MEASURED, calibrate
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.decode_split import DecodeCallTimes
from uma_trio.daemon.policy.row_curve import MIN_POINTS


def stairs_ms(prompt: int, decodes: int) -> float:
    """Tiles of 64 rows, where a call has prompt tokens."""
    return 5 + 5.0 * math.ceil((prompt + decodes) / 64) if prompt else 4 + 0.1 * decodes


@pytest.mark.parametrize("n_seq_max", [1, 4, 16])
async def test_stairs_are_measured_once(autojump_clock, n_seq_max):
    engine = FakeEngine(n_seq_max=n_seq_max, n_ctx=8192, cost_ms=stairs_ms)
    cost = await calibrate(VirtualLink(engine), budget_s=60)
    assert cost.knows_stairs
    assert engine.used_cells() == {}
    n_decodes = min(8, n_seq_max - 1)
    for rows in (32, 64, 96, 128, 256):
        assert cost.predict(Work(rows, 0, 0)) == pytest.approx(stairs_ms(rows, 0), rel=0.05)
        if n_decodes:
            work = Work(rows - n_decodes, n_decodes, 0)
            assert cost.predict(work) == pytest.approx(stairs_ms(rows, 0), rel=0.05)
            top = 64 * math.ceil(rows / 64) - n_decodes
            assert top - 1 <= cost.max_prefill_tokens(cost.predict(work) + 2, work) <= top
    n_steps = len(engine.steps)
    again = await calibrate(VirtualLink(engine), known=cost, budget_s=60)
    assert not any(step.ops and step.calls for step in engine.steps[n_steps:]), "no step of a curve"
    assert again.mixed.curves == cost.mixed.curves


async def test_per_sequence_kv_has_a_curve_of_prompts(autojump_clock):
    """Decodes are in calls of their own, so their rows are not in its tiles."""
    engine = FakeEngine(n_ctx=16 * 1024, n_seq_max=8, unified=False, cost_ms=stairs_ms)
    cost = await calibrate(VirtualLink(engine), budget_s=60)
    assert cost.mixed.curves is not None
    assert cost.mixed.curves.mixed is None
    for n in (64, 128, 256):
        both_ms = stairs_ms(n, 0) + stairs_ms(0, 3)
        assert cost.predict(Work(n, 3, 0, n_calls=2)) == pytest.approx(both_ms, rel=0.1)


async def test_where_the_cost_is_a_line_there_is_no_curve(autojump_clock):
    engine = FakeEngine(n_ctx=8192)
    cost = await calibrate(VirtualLink(engine), budget_s=60)
    assert cost.knows_stairs, "the next start need not look again"
    assert cost.mixed.curves is None
    assert cost.predict(Work(64, 4, 100)) == pytest.approx(5 + 6.4 + 2, rel=0.2)


@pytest.mark.parametrize(("token_ms", "most_rows"), [(10.0, 0), (2.0, 64)])
async def test_a_slow_engine_is_not_asked_for_row_counts_that_take_longer_still(autojump_clock, token_ms, most_rows):
    slow = FakeEngine(n_ctx=8192, cost_ms=lambda prompt, decodes: token_ms * prompt + decodes)
    await calibrate(VirtualLink(slow), budget_s=60)
    in_curves = [step for step in slow.steps if step.ops and step.calls]
    sizes = [sum(len(each.tokens) for call in step.calls for each in call) for step in in_curves]
    assert max(sizes, default=0) == most_rows


async def test_an_unsteady_engine_has_no_curve_and_is_soon_left_alone(autojump_clock):
    """No two of three steps take the same."""
    slower = itertools.cycle([1.0, 1.3, 1.7])
    engine = FakeEngine(n_ctx=8192, cost_ms=lambda prompt, decodes: next(slower) * stairs_ms(prompt, decodes))
    cost = await calibrate(VirtualLink(engine), budget_s=60)
    assert not cost.knows_stairs, "the next start looks again"
    assert cost.mixed.curves is None
    assert sum(bool(step.ops and step.calls) for step in engine.steps) == CURVE_ROUNDS * MIN_POINTS


async def test_a_device_that_records_calls_is_measured_without_recordings(autojump_clock):
    """The second of two like calls is recorded, which takes longer, and the third is repeated, which takes less."""
    latest: tuple[tuple[int, int], int] = ((0, 0), 0)

    def cost_ms(prompt: int, decodes: int) -> float:
        nonlocal latest
        times = latest[1] + 1 if latest[0] == (prompt, decodes) else 0
        latest = (prompt, decodes), times
        return stairs_ms(prompt, decodes) + {0: 0, 1: 4}.get(times, -2)

    for records in (True, False):
        engine = FakeEngine(n_ctx=8192, cost_ms=cost_ms)
        engine.info = msgspec.structs.replace(engine.info, records_calls=records)
        cost = await calibrate(VirtualLink(engine), budget_s=60)
        curves = cost.mixed.curves
        found = {} if curves is None or curves.mixed is None else {n: curves.mixed.at(n) for n in (64, 128, 192)}
        assert (found == {64: 10.0, 128: 15.0, 192: 20.0}) == records


@pytest.mark.parametrize("n_batch", [16, 32, 48, 64, 512])
async def test_an_engine_with_little_room_is_measured_as_far_as_it_goes(autojump_clock, n_batch):
    engine = FakeEngine(n_batch=n_batch, n_ctx=600, n_seq_max=4, cost_ms=stairs_ms)
    cost = await calibrate(VirtualLink(engine), known=CostModel(), budget_s=60)
    assert engine.used_cells() == {}
    assert cost.predict(Work(16, 1, 0)) > 0


async def test_the_first_step_of_each_size_may_take_long(autojump_clock):
    """A GPU loads a kernel when it is first used."""
    seen: set[tuple[int, int]] = set()

    def cost_ms(prompt: int, decodes: int) -> float:
        is_first = (prompt, decodes) not in seen
        seen.add((prompt, decodes))
        return stairs_ms(prompt, decodes) + 20 * (is_first and prompt > 0)

    cost = await calibrate(VirtualLink(FakeEngine(n_ctx=8192, cost_ms=cost_ms)), budget_s=60)
    assert cost.mixed.curves is not None
    assert cost.mixed.curves.mixed is not None
    assert {rows: cost.mixed.curves.mixed.at(rows) for rows in (64, 128, 192)} == {64: 10.0, 128: 15.0, 192: 20.0}


@pytest.mark.parametrize("begins", range(0, 60, 3))
async def test_a_slow_moment_is_no_reason_to_split_calls(autojump_clock, begins):
    """Each call has its price, so one call is always the fastest way."""
    n_steps = itertools.count()

    def cost_ms(prompt: int, decodes: int) -> float:
        slowness = 2.0 if begins <= next(n_steps) < begins + 6 else 1.0
        return slowness * (0.4 + 0.3 * decodes + 0.2 * prompt)

    cost = await calibrate(VirtualLink(FakeEngine(n_ctx=8192, n_seq_max=8, cost_ms=cost_ms)), budget_s=60)
    assert [cost.call_times.split(rows) for rows in range(1, 9)] == [(rows,) for rows in range(1, 9)]


async def test_calls_of_a_split_are_measured_behind_other_calls(autojump_clock):
    """The same call twice running is faster, since the graph is planned already.  Calls of a split are not the same."""
    last = 0

    def cost_ms(prompt: int, decodes: int) -> float:
        nonlocal last
        is_new, last = decodes != last, decodes
        return {1: 0.7, 2: 1.0, 3: 1.7, 4: 2.3}[decodes] + 0.3 * is_new if not prompt else 5.0

    engine = FakeEngine(n_ctx=8192, n_seq_max=4, cost_ms=lambda prompt, decodes: cost_ms(prompt, min(4, decodes)))
    cost = await calibrate(VirtualLink(engine), budget_s=60)
    assert cost.call_times.split(4) == (4,), "two calls of two take 2.6 ms"


async def test_call_times_of_two_starts_are_not_mixed(autojump_clock):
    """The earlier start was slower, and had time for more row counts."""
    known = CostModel(call_times=DecodeCallTimes((0.0, *[10.0 + rows for rows in range(1, 9)])))
    engine = FakeEngine(n_ctx=8192, n_seq_max=8, cost_ms=lambda prompt, decodes: 1.0 + decodes + prompt)
    cost = await calibrate(VirtualLink(engine), known=known, budget_s=0.0)
    assert [cost.call_times.split(rows) for rows in range(1, 9)] == [(rows,) for rows in range(1, 9)]


def line_ms(prompt: int, decodes: int) -> float:
    return 5 + 0.1 * prompt + decodes


async def measured(engine: FakeEngine, known: CostModel | None = None) -> CostModel:
    found = await calibrate(VirtualLink(engine), known=known, may_have_stairs=False, budget_s=60)
    assert engine.used_cells() == {}
    return found


async def test_what_is_known_is_not_measured_again(autojump_clock):
    engine = FakeEngine(n_ctx=8192, cost_ms=line_ms)
    known = await measured(engine)
    assert not any(step.ops and step.calls and step.calls[0] for step in engine.steps), "no curve was measured"
    n_steps = len(engine.steps)
    found = await measured(engine, known)
    assert len(engine.steps) - n_steps == len(CHECKED) + 1, "and one that empties the KV cache"
    assert found.predict(Work(64, 4, 100)) == pytest.approx(known.predict(Work(64, 4, 100)), rel=0.02)


@pytest.mark.parametrize("n_seq_max", [1, 2])
async def test_with_few_sequences_less_is_checked(autojump_clock, n_seq_max):
    engine = FakeEngine(n_ctx=8192, n_seq_max=n_seq_max, cost_ms=line_ms)
    known = await measured(engine)
    n_steps = len(engine.steps)
    await measured(engine, known)
    assert len(engine.steps) - n_steps == 4, "two prompts, a decode, and one that empties the KV cache"


async def test_on_a_busy_machine_what_is_known_is_kept_and_corrected(autojump_clock):
    known = await measured(FakeEngine(n_ctx=8192, cost_ms=line_ms))
    busy = FakeEngine(n_ctx=8192, cost_ms=lambda prompt, decodes: 3 * line_ms(prompt, decodes))
    found = await measured(busy, known)
    assert len(busy.steps) == len(CHECKED) + 1
    for rows in range(1, 9):
        assert found.call_times.split(rows) == known.call_times.split(rows)
    assert known.predict(Work(0, 4, 0)) < found.predict(Work(0, 4, 0)) < 3 * known.predict(Work(0, 4, 0))


async def test_what_was_learned_on_a_busy_machine_is_measured_again(autojump_clock):
    busy = FakeEngine(n_ctx=8192, cost_ms=lambda prompt, decodes: 3 * line_ms(prompt, decodes))
    known = await measured(busy)
    found = await measured(FakeEngine(n_ctx=8192, cost_ms=line_ms), known)
    assert found.call_times.ms[1:] == pytest.approx([ms / 3 for ms in known.call_times.ms[1:]])


async def started_again(engine: FakeEngine, known: CostModel, budget_s: float) -> int:
    """Start with ``known``; returns the number of steps."""
    await calibrate(VirtualLink(engine), known=known, may_have_stairs=False, budget_s=budget_s)
    assert engine.used_cells() == {}
    return len(engine.steps)


async def test_a_start_on_a_busy_machine_measures_no_more_than_it_checks(autojump_clock):
    """The start before was on a busy machine as well, and had no time for all widths: clients wait for neither."""

    def busy_ms(prompt: int, decodes: int) -> float:
        return 20 * line_ms(prompt, decodes)

    known = attrs.evolve(CostModel(), call_times=DecodeCallTimes((0.0, 120.0)))
    assert await started_again(FakeEngine(n_ctx=8192, cost_ms=busy_ms), known, 0.5) == len(CHECKED) + 1
    slower = attrs.evolve(CostModel(), call_times=DecodeCallTimes((0.0, *[4e3] * 8)))
    assert await started_again(FakeEngine(n_ctx=8192, cost_ms=busy_ms), slower, 0.5) == len(CHECKED) + 1


async def test_a_start_with_time_measures_what_the_one_before_had_no_time_for(autojump_clock):
    known = attrs.evolve(CostModel(), call_times=DecodeCallTimes((0.0, 120.0)))
    assert await started_again(FakeEngine(n_ctx=8192, cost_ms=line_ms), known, 60) > N_MEASURED
