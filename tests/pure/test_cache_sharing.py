"""Prefix sharing between requests that run at the same time: one computes the prefix, the others wait for it."""

from __future__ import annotations

from tests.support.kv_cache import (
    BACKGROUND,
    LONG,
    NORMAL,
    OTHER,
    Got,
    advance,
    done,
    followed,
    make_cache,
    place,
    release,
    together,
    tokens,
)
from uma_trio.kv.ops import CopyPrefix, Truncate


def test_eight_that_arrive_together_compute_what_they_share_once() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    assert together(make_cache(), prompts) == (800 + 8, 9)


def test_eight_that_are_the_same_compute_it_once_but_for_the_last_token() -> None:
    assert together(make_cache(), [LONG] * 8) == (800 + 7, 9)


def test_where_copying_takes_time_one_a_step_is_copied() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    apart = {"cells_per_sequence": 1000, "unified": False}
    assert together(make_cache(**apart), prompts) == (800 + 8, 8 + 7)


def test_who_comes_while_the_first_is_half_read_waits_for_that_one() -> None:
    """And not for one that waits itself."""
    cache = make_cache()
    for i in range(3):
        assert place(cache, tokens(LONG, [i + 1]), 900) == Got(i, 0, waits=i > 0)
        advance(cache, 0, 100 * (i + 1))
    advance(cache, 0, 800)
    assert followed(cache) == [(1, 800), (2, 800)]


def test_who_comes_when_it_is_read_waits_for_nobody() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 850)
    assert place(cache, tokens(LONG, [9]), 900) == Got(3, 800)
    assert cache.take_ops() == (CopyPrefix(0, 3, 800),)


def test_those_that_wait_elect_one_when_the_first_is_cancelled() -> None:
    cache = make_cache()
    for i in range(8):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 300)
    release(cache, 0)
    assert followed(cache) == [(1, 0)]
    advance(cache, 1, 801)
    assert followed(cache) == [(i, 800) for i in range(2, 8)], "in one step, not one after another"


def test_one_that_stalls_gives_what_it_has_and_another_goes_on() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 300)
    assert followed(cache) == []
    assert followed(cache, stalled=[0]) == [(1, 300)]
    assert cache.take_ops() == (CopyPrefix(0, 1, 300),)
    advance(cache, 1, 801)
    assert followed(cache, stalled=[0]) == [(2, 800)]


def test_one_that_stalls_at_its_beginning_is_left() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    assert followed(cache, stalled=[0]) == [(1, 0)]
    advance(cache, 1, 801)
    assert followed(cache, stalled=[0]) == [(2, 800)]


def test_one_that_ends_with_its_first_token_is_copied_before_it_goes() -> None:
    """Although it is more than idle sequences may hold in all."""
    cache = make_cache(n_cells=1700, cells_per_sequence=1700)
    for i in range(2):
        place(cache, tokens(LONG, [i + 1]), 801)
    advance(cache, 0, 801)
    release(cache, 0, tokens(LONG, [1]))
    assert followed(cache) == [(1, 800)]
    assert cache.take_ops() == (CopyPrefix(0, 1, 800), Truncate(0))


def test_a_lower_class_is_not_waited_for() -> None:
    cache = make_cache()
    place(cache, LONG, 900, rank=BACKGROUND)
    advance(cache, 0, 300)
    assert place(cache, tokens(LONG, [1]), 900, rank=NORMAL) == Got(1, 300)
    assert place(cache, tokens(LONG, [2]), 900, rank=BACKGROUND).waits  # type: ignore[union-attr]


def test_when_the_engines_cache_is_lost_requests_stay_and_hold_nothing() -> None:
    """Whether it is empty or nobody knows what is left in it."""
    for lost, ops in ((True, ()), (False, tuple(map(Truncate, range(5))))):
        cache = make_cache(n_sequences=5)
        done(cache, tokens(OTHER))
        place(cache, LONG, 900)
        advance(cache, 1, 500)
        assert place(cache, LONG, 900) == Got(2, 0, waits=True)
        assert place(cache, tokens(LONG[:500], [1]), 900) == Got(3, 500)
        cache.clear(lost=lost)
        assert cache.take_ops() == ops
        assert cache.held() == {}
        assert cache.statistics().cells_reserved == 2700
        advance(cache, 1, 800)
        assert followed(cache) == [(2, 799)]
