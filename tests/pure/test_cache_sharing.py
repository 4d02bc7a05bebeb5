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
from uma_trio.engine_link.kv_ops import CopyPrefix, Truncate


def test_eight_concurrent_requests_compute_their_prefix_once() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    assert together(make_cache(), prompts) == (800 + 8, 9)


def test_eight_equal_requests_compute_only_their_last_token_each() -> None:
    assert together(make_cache(), [LONG] * 8) == (800 + 7, 9)


def test_with_per_sequence_kv_a_step_copies_once() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    per_sequence = {"cells_per_sequence": 1000, "unified": False}
    assert together(make_cache(**per_sequence), prompts) == (800 + 8, 8 + 7)


def test_requests_wait_for_the_first_one_during_its_prefill() -> None:
    """They do not wait for one that waits itself."""
    cache = make_cache()
    for i in range(3):
        assert place(cache, tokens(LONG, [i + 1]), 900) == Got(i, 0, waits=i > 0)
        advance(cache, 0, 100 * (i + 1))
    advance(cache, 0, 800)
    assert followed(cache) == [(1, 800), (2, 800)]


def test_after_the_prefill_nobody_waits() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 850)
    assert place(cache, tokens(LONG, [9]), 900) == Got(3, 800)
    assert cache.take_ops() == (CopyPrefix(0, 3, 800),)


def test_when_the_leader_is_cancelled_another_one_leads() -> None:
    cache = make_cache()
    for i in range(8):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 300)
    release(cache, 0)
    assert followed(cache) == [(1, 0)]
    advance(cache, 1, 801)
    assert followed(cache) == [(i, 800) for i in range(2, 8)], "in one step, not one after another"


def test_a_follower_takes_what_a_stalled_leader_has_and_continues() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    advance(cache, 0, 300)
    assert followed(cache) == []
    assert followed(cache, stalled=[0]) == [(1, 300)]
    assert cache.take_ops() == (CopyPrefix(0, 1, 300),)
    advance(cache, 1, 801)
    assert followed(cache, stalled=[0]) == [(2, 800)]


def test_nobody_waits_for_a_leader_that_stalls_without_tokens() -> None:
    cache = make_cache()
    for i in range(3):
        place(cache, tokens(LONG, [i + 1]), 900)
    assert followed(cache, stalled=[0]) == [(1, 0)]
    advance(cache, 1, 801)
    assert followed(cache, stalled=[0]) == [(2, 800)]


def test_a_leader_that_ends_is_copied_before_it_is_evicted() -> None:
    """It holds more than all idle sequences together may hold."""
    cache = make_cache(n_cells=1700, cells_per_sequence=1700)
    for i in range(2):
        place(cache, tokens(LONG, [i + 1]), 801)
    advance(cache, 0, 801)
    release(cache, 0, tokens(LONG, [1]))
    assert followed(cache) == [(1, 800)]
    assert cache.take_ops() == (CopyPrefix(0, 1, 800), Truncate(0))


def test_a_request_does_not_wait_for_a_lower_class() -> None:
    cache = make_cache()
    place(cache, LONG, 900, rank=BACKGROUND)
    advance(cache, 0, 300)
    assert place(cache, tokens(LONG, [1]), 900, rank=NORMAL) == Got(1, 300)
    assert place(cache, tokens(LONG, [2]), 900, rank=BACKGROUND).waits  # type: ignore[union-attr]


def test_after_a_failed_step_requests_keep_their_cells_but_no_tokens() -> None:
    """The engine's cache is empty, or its content is unknown."""
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
