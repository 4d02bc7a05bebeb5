"""Up to which cell a unified cache is used."""

from __future__ import annotations

import numpy as np

from tests.support.kv_cache import advance, make_cache, place, release
from uma_trio.kv.cache import KvCache


def start(cache: KvCache, n: int) -> int:
    placement = place(cache, np.arange(n, dtype=np.int32), 2000, private=True)
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
