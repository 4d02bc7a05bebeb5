"""Up to which cell a unified cache is used."""

from __future__ import annotations

import numpy as np

from tests.support.kv_cache import advance, make_cache, place, release
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit


def start(cache: KvCache, n: int, n_cells: int = 2000) -> int:
    """Compute ``n`` tokens of a new request, whose id it returns."""
    placement = place(cache, np.arange(n, dtype=np.int32), n_cells, private=True)
    assert placement is not None
    advance(cache, placement.seq_id, n)
    return placement.seq_id


def test_the_end_moves_down_when_what_is_there_ends() -> None:
    cache = make_cache()
    first, second, third = (start(cache, n) for n in (100, 200, 300))
    assert cache.cells_scanned() == 600
    release(cache, second)
    assert cache.cells_scanned() == 600, "a hole"
    advance(cache, first, 150)
    assert cache.cells_scanned() == 600, "which is filled"
    release(cache, third)
    assert cache.cells_scanned() == 150
    release(cache, first)
    assert cache.cells_scanned() == 0


def test_tokens_that_do_not_fit_into_holes_move_the_end_up() -> None:
    cache = make_cache()
    first, second = start(cache, 100), start(cache, 100)
    assert cache.cells_scanned() == 200
    release(cache, first)
    assert cache.cells_scanned() == 200
    third = start(cache, 150)
    assert cache.cells_scanned() == 250
    release(cache, third)
    assert cache.cells_scanned() == 200
    release(cache, second)
    assert cache.cells_scanned() == 0


def test_a_step_in_flight_gets_its_cells_before_those_of_an_ended_sequence_are_free() -> None:
    cache = make_cache()
    first, second = start(cache, 100), start(cache, 100)
    assert cache.cells_scanned() == 200
    release(cache, first)
    assert cache.cells_scanned(50) == 250, "50 rows of the second are being computed"
    cache.take_ops(in_flight=True)
    advance(cache, second, 150)
    assert cache.cells_scanned() == 250
    advance(cache, second, 160)
    assert cache.cells_scanned() == 250, "now the cells of the first are free"


def test_an_ended_sequence_at_the_end_is_not_scanned_by_the_step_that_removes_it() -> None:
    cache = make_cache()
    first = start(cache, 100)
    assert cache.cells_scanned() == 100
    second = start(cache, 100)
    assert cache.cells_scanned() == 200
    third = start(cache, 1)
    assert cache.cells_scanned() == 201
    release(cache, second)
    release(cache, third)
    assert cache.cells_scanned(0) == 100
    advance(cache, first, 101)
    cache.take_ops()
    assert cache.cells_scanned() == 202, "its row came before"


def test_the_rows_of_a_short_request_came_before_those_that_followed() -> None:
    cache = make_cache(idle_limit=IdleLimit(8000))
    first = start(cache, 100)
    assert cache.cells_scanned() == 100
    short = start(cache, 60)
    release(cache, short)
    cache.take_ops(in_flight=True)
    advance(cache, first, 110)
    assert cache.cells_scanned() == 170, "these were computed while the cells of the short one were in use"
    release(cache, first)
    assert cache.cells_scanned() == 0


def test_a_full_cache_is_followed_although_several_steps_passed() -> None:
    cache = make_cache()
    first = start(cache, 7000, 7000)
    assert cache.cells_scanned() == 7000
    release(cache, first)
    start(cache, 7500, 7500)
    assert cache.cells_scanned() == 7500
    cache.check_integrity()
