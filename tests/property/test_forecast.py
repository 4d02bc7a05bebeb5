"""When requests start and end."""

from __future__ import annotations

import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.config import Scheduling
from uma_trio.daemon.policy import forecast as module
from uma_trio.daemon.policy.cost import CostModel, LinearModel
from uma_trio.daemon.policy.forecast import Arrivals, Load, Prediction, Speed, forecast

LINE = LinearModel((2.0, 10.0, 10.0, 0.1, 0.1))
"""2 ms a tick, 0.1 ms a prompt token, 1 ms a decode row, and a little for the context."""
FLAT = LinearModel((10.0, 0.0, 0.0, 0.0, 0.0))
"""Every tick takes 10 ms."""


def speed(model: LinearModel = LINE, **fields: object) -> Speed:
    return Speed(**{"cost": CostModel(model, model), "settings": Scheduling(), "max_tokens": 512, **fields})


def load(prefill: int = 100, answer: float = 50, cells: int = 200, context: int = 0) -> Load:
    return Load(
        prefill_tokens=prefill,
        answer_tokens=answer,
        context_tokens=context,
        cells=cells,
        due_ms=1000.0,
        target_itl_ms=200.0,
    )


def predict(running: list[Load], waiting: list[Load], places: int = 0, cells: int = 0) -> list[Prediction]:
    return forecast(running, waiting, free_sequences=places, cells=cells, speed=speed())


loads = st.builds(load, st.integers(0, 3000), st.floats(1, 300), st.integers(1, 3000), st.integers(0, 3000))
prompts = st.builds(load, st.integers(1, 3000), st.floats(1, 300), st.integers(1, 3000))


@given(st.lists(loads, max_size=6), st.lists(prompts, max_size=12), st.integers(0, 4), st.integers(0, 5000))
def test_each_starts_after_its_place_and_ends_after_its_start(
    running: list[Load], waiting: list[Load], places: int, cells: int
) -> None:
    found = predict(running, waiting, places, cells)
    assert len(found) == len(running) + len(waiting)
    assert [each.queue_position for each in found] == [0] * len(running) + [*range(1, len(waiting) + 1)]
    assert all(0 <= each.place_ms <= each.start_ms <= each.end_ms < 1e12 for each in found)
    placed = [each.place_ms for each in found[len(running) :]]
    assert placed == sorted(placed), "nobody gets a place before those in front"


@given(loads, prompts, st.integers(1, 6), st.integers(0, 20))
def test_behind_one_more_request_of_the_same_size_nobody_starts_earlier(
    first: Load, other: Load, n: int, n_waiting: int
) -> None:
    shorter = predict([first] * n, [other] * n_waiting)
    longer = predict([first] * n, [other] * (n_waiting + 1))
    assert longer[-1].place_ms >= max([each.place_ms for each in shorter[n:]], default=0.0)
    assert longer[-1].queue_position == n_waiting + 1


def test_ticks_of_equal_length_can_be_counted_by_hand() -> None:
    """One place: 5 tokens are left of the answer that runs, then 2 ticks of prefill, which give the first of 3 tokens."""
    model = speed(FLAT, max_tokens=50)
    decodes, waits = load(prefill=0, answer=5, context=10), load(prefill=100, answer=3)
    runs, first = forecast([decodes], [waits], free_sequences=0, cells=0, speed=model)
    assert (runs.place_ms, runs.start_ms, runs.end_ms) == (0, 0, 50)
    assert (first.place_ms, first.start_ms, first.end_ms) == (50, 70, 90)


def test_requests_that_are_expected_take_time_of_those_that_run_and_no_place_of_those_that_wait() -> None:
    decodes, waits = load(prefill=0, answer=200, context=10), load(prefill=100, answer=200)
    often = Arrivals(every_ms=100, load=load(prefill=500, answer=20))
    seldom = attrs.evolve(often, every_ms=1e9)

    def found(arrivals: Arrivals | None, places: int) -> list[Prediction]:
        return forecast([decodes], [waits], free_sequences=places, cells=10_000, speed=speed(), arrivals=arrivals)

    assert found(seldom, 4) == found(None, 4)
    assert found(often, 0)[0] == found(None, 0)[0], "they wait behind it"
    assert found(often, 0)[1].place_ms == found(None, 0)[1].place_ms
    for slower, alone in zip(found(often, 4), found(None, 4), strict=True):
        assert slower.place_ms == alone.place_ms
        assert slower.end_ms > 1.2 * alone.end_ms


def test_one_that_needs_more_cells_than_are_free_blocks_those_behind_it() -> None:
    large, small = load(cells=1000), load(cells=10)
    runs, first, second = predict([load(cells=500)], [large, small], places=4, cells=600)
    assert first.place_ms == runs.end_ms
    assert second.place_ms >= first.place_ms
    assert predict([load(cells=500)], [small, large], places=4, cells=600)[1].place_ms == 0


def test_what_is_beyond_the_last_phase_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    running, waiting = [load()] * 4, [load()] * 60
    whole = predict(running, waiting)
    monkeypatch.setattr(module, "MAX_PHASES", 60)
    short = predict(running, waiting)
    assert short[:8] == whole[:8]
    assert short[-1].place_ms == pytest.approx(whole[-1].place_ms, rel=0.3)


def test_the_work_is_bounded() -> None:
    """With a full queue, and contexts that all differ."""
    running = [load(prefill=0, answer=10 + n, context=n) for n in range(64)]
    waiting = [load(prefill=100 + n, answer=10 + n) for n in range(1000)]
    began = time.thread_time()
    predict(running, waiting)
    assert time.thread_time() - began < 0.25, "CPU seconds; it takes a twentieth"
