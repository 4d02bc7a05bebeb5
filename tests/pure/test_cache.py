"""KV cache bookkeeping: reservation, reuse of what ended requests leave, eviction, adjacency; one case each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kv_cache import (
    ANSWER,
    HELLO,
    MORE,
    OTHER,
    SYSTEM,
    Got,
    advance,
    allocation_of,
    done,
    make_cache,
    place,
    placed,
    release,
    settle,
    tokens,
    truncate,
)
from uma_trio.kv.cache import KvCache
from uma_trio.kv.ops import CopyPrefix, Truncate
from uma_trio.kv.pool import MAX_IDLE_FRACTION
from uma_trio.kv.prefix import MIN_SHARED_TOKENS

# -- reservation ----------------------------------------------------------------------------------------


def test_a_sequence_comes_only_with_all_its_room() -> None:
    cache = KvCache(n_sequences=2, n_cells=100, cells_per_sequence=60)
    assert place(cache, tokens([1]), 60) == Got(0, 0)
    assert place(cache, tokens([2]), 41) is None
    assert place(cache, tokens([2]), 40) == Got(1, 0)
    release(cache, 0)
    assert place(cache, tokens([2]), 60) == Got(0, 0)
    assert cache.take_ops() == (Truncate(0),)


@pytest.mark.parametrize("cells", [0, -1, 61])
def test_what_can_never_be_is_told_apart_from_what_must_wait(cells: int) -> None:
    with pytest.raises(ValueError, match="1 to 60"):
        KvCache(n_sequences=2, n_cells=100, cells_per_sequence=60).allocate(tokens([1]), cells)


def test_more_than_reserved_is_a_defect() -> None:
    cache = make_cache()
    place(cache, tokens([1]), 10)
    advance(cache, 0, 10)
    with pytest.raises(AssertionError, match="11 of 10"):
        advance(cache, 0, 11)


@pytest.mark.parametrize("keep", [None, tokens(SYSTEM)], ids=["removed", "kept"])
@pytest.mark.parametrize("reused", [False, True])
def test_an_allocation_ends_with_its_request(keep: np.ndarray | None, reused: bool) -> None:
    cache = make_cache()
    placed(cache, tokens(SYSTEM))
    ended = allocation_of(cache, 0)
    advance(cache, 0, 50)
    release(cache, 0, keep)
    if reused:
        assert placed(cache, tokens(SYSTEM, OTHER)).seq_id == 0
    for call in (
        lambda: cache.advance(ended, 1),
        lambda: cache.truncate(ended, 1),
        lambda: cache.next_pause(ended),
        lambda: cache.release(ended),
    ):
        with pytest.raises(KeyError, match="sequence 0"):
            call()


def test_only_tokens_that_the_sequence_holds_can_be_kept() -> None:
    cache = make_cache()
    placed(cache, tokens(SYSTEM))
    advance(cache, 0, 49)
    with pytest.raises(AssertionError, match="holds 49 tokens, not 50"):
        release(cache, 0, tokens(SYSTEM))


def test_check_integrity_sees_a_leak() -> None:
    cache = make_cache()
    place(cache, tokens([1]), 10)
    cache._pool.reserved += 1
    with pytest.raises(AssertionError):
        cache.check_integrity()


# -- one after another: what ended stays, and is gone on with -------------------------------------------


def test_a_chats_next_turn_goes_on_in_place() -> None:
    cache = make_cache()
    first = done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert cache.statistics().cached_cells == len(first)
    assert place(cache, tokens(first, MORE), 300) == Got(0, len(first))
    assert cache.take_ops() == ()
    assert cache.statistics().cached_sequences == 0


def test_an_answer_asked_for_again_needs_one_token_computed_for_its_logits() -> None:
    cache = make_cache()
    prompt = tokens(SYSTEM, HELLO)
    done(cache, prompt, ANSWER)
    assert place(cache, prompt, 200) == Got(0, len(prompt) - 1)
    assert cache.take_ops() == (Truncate(0, len(prompt) - 1),)


def test_a_turn_that_was_rewritten_loses_only_what_stood_behind() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert place(cache, tokens(SYSTEM, HELLO, OTHER), 200) == Got(0, 100)
    assert cache.take_ops() == (Truncate(0, 100),)


def test_a_shared_system_prompt_leaves_the_longer_conversation_alone() -> None:
    """It is copied, where to go on in place would lose more than it shares."""
    cache = make_cache()
    long = done(cache, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert place(cache, tokens(SYSTEM, OTHER), 150) == Got(1, 50)
    assert cache.take_ops() == (CopyPrefix(0, 1, 50),)
    assert place(cache, tokens(long, OTHER), 300) == Got(0, len(long))


def test_without_room_beside_it_the_longer_conversation_goes_after_all() -> None:
    cache = make_cache(n_sequences=1)
    done(cache, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert place(cache, tokens(SYSTEM, OTHER), 150) == Got(0, 50)
    assert cache.take_ops() == (Truncate(0, 50),)


def test_a_short_common_beginning_is_computed_again() -> None:
    cache = make_cache()
    done(cache, tokens([7] * (MIN_SHARED_TOKENS - 1), HELLO))
    assert place(cache, tokens([7] * (MIN_SHARED_TOKENS - 1), OTHER), 100) == Got(1, 0)
    done(cache, tokens([8] * MIN_SHARED_TOKENS, HELLO))
    assert place(cache, tokens([8] * MIN_SHARED_TOKENS, OTHER), 100) == Got(3, MIN_SHARED_TOKENS)


def test_the_longest_common_beginning_is_taken() -> None:
    cache = make_cache()
    for part in (MORE, OTHER):
        placement = place(cache, tokens(SYSTEM, HELLO, part), 150)
        assert placement is not None
        advance(cache, placement.seq_id, 150)
    release(cache, 0, tokens(SYSTEM, HELLO, MORE))
    release(cache, 1, tokens(SYSTEM, HELLO, OTHER))
    cache.take_ops()
    assert place(cache, tokens(SYSTEM, HELLO, OTHER, ANSWER), 200) == Got(1, 150)


def test_principals_share_nothing() -> None:
    cache = make_cache()
    held = done(cache, tokens(SYSTEM, HELLO), ANSWER, principal="a")
    assert place(cache, held, 200, principal="b") == Got(1, 0)
    assert place(cache, held, 200, principal="a") == Got(0, len(held) - 1)


def test_who_wants_nothing_cached_neither_takes_nor_leaves_anything() -> None:
    cache = make_cache()
    held = done(cache, tokens(SYSTEM, HELLO))
    assert place(cache, held, 200, private=True) == Got(1, 0)
    advance(cache, 1, len(held))
    assert place(cache, tokens(held, MORE), 200) == Got(0, len(held))
    release(cache, 1, held)
    assert cache.statistics().cached_sequences == 0
    assert cache.take_ops() == (Truncate(1),)


def test_reuse_switched_off() -> None:
    cache = make_cache(reuse=False)
    held = done(cache, tokens(SYSTEM, HELLO))
    assert cache.held() == {}
    place(cache, held, 200)
    advance(cache, 0, 100)
    assert place(cache, held, 200) == Got(1, 0)


def test_a_memory_that_cannot_forget_goes_on_with_whole_sequences_or_not_at_all() -> None:
    cache = make_cache(can_truncate=False)
    held = done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert place(cache, tokens(SYSTEM, HELLO, OTHER), 200) == Got(1, 0)
    assert place(cache, held, 200) == Got(2, 0), "its last token would have to be removed"
    assert place(cache, tokens(held, MORE), 300) == Got(0, len(held))
    assert cache.take_ops() == ()


def test_wrong_guesses_leave_the_cache() -> None:
    cache = make_cache()
    place(cache, tokens(SYSTEM), 200)
    advance(cache, 0, 60)
    truncate(cache, 0, 53)
    assert cache.held() == {0: 53}
    advance(cache, 0, 58)
    release(cache, 0, tokens(SYSTEM, [1] * 5))
    assert cache.take_ops() == (Truncate(0, 53), Truncate(0, 55))
    assert cache.statistics().cached_cells == 55


# -- room -----------------------------------------------------------------------------------------------


def test_the_longest_idle_goes_first_and_only_when_room_is_needed() -> None:
    cache = make_cache(n_sequences=4, n_cells=1000, cells_per_sequence=1000, unified=False)
    for part in (SYSTEM, HELLO, ANSWER):
        done(cache, tokens(part))
    assert place(cache, tokens(MORE), 800) == Got(3, 0), "850 cells are free"
    assert list(cache.held()) == [0, 1, 2]
    release(cache, 3)
    place(cache, tokens(HELLO, MORE), 150)  # goes on with 1, and is the latest when it ends
    advance(cache, 1, 100)
    release(cache, 1, tokens(HELLO, MORE))
    cache.take_ops()
    place(cache, tokens(OTHER), 850)
    assert cache.take_ops() == (Truncate(0),)
    assert list(cache.held()) == [1, 2]


def test_nobody_is_evicted_in_vain() -> None:
    cache = make_cache(n_sequences=3, n_cells=300, cells_per_sequence=300, unified=False)
    done(cache, tokens(SYSTEM))
    place(cache, tokens(OTHER), 200)
    assert place(cache, tokens(HELLO), 101) is None
    assert cache.take_ops() == ()
    assert place(cache, tokens(HELLO), 100) is not None
    assert cache.take_ops() == (Truncate(0),)


def test_who_is_gone_on_with_is_not_evicted_for_it() -> None:
    cache = make_cache(n_sequences=8, n_cells=300, cells_per_sequence=300, unified=False)
    held = done(cache, tokens(SYSTEM, HELLO))
    done(cache, tokens(OTHER))
    assert place(cache, tokens(held, MORE), 300) == Got(0, 100)
    assert cache.take_ops() == (Truncate(1),)


def test_a_unified_cache_keeps_a_share_of_its_cells_idle_at_most() -> None:
    """Attention passes over all of them for every token of everybody; while nobody is served, of nobody."""
    cache = make_cache(n_sequences=64)
    for part in range(1, 60):
        done(cache, tokens(part))
    assert cache.statistics().cached_cells == 59 * 50
    place(cache, tokens(70), 51)
    cache.take_ops()
    assert cache.statistics().cached_cells == MAX_IDLE_FRACTION * 8000
    last = [place(cache, tokens(part, [1]), 51) for part in (19, 20)]
    assert [placement and placement.n_cached for placement in last] == [0, 50], "the longest idle went"


def test_apart_sequences_are_in_nobodys_way() -> None:
    cache = make_cache(n_sequences=64, cells_per_sequence=125, unified=False)
    for part in range(1, 60):
        done(cache, tokens(part))
    assert cache.statistics().cached_cells == 59 * 50


def test_what_is_larger_than_that_share_goes_alone() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM))
    done(cache, tokens(range(2001)))
    assert cache.held() == {0: 50, 1: 2001}
    place(cache, tokens(70), 51)
    assert cache.take_ops() == (Truncate(1),)
    assert cache.held() == {0: 50}


# -- adjacency


def busy(cache: KvCache, n: int, cells: int = 100) -> list[int]:
    """``n`` requests that have begun."""
    ids = []
    for _ in range(n):
        placement = place(cache, np.arange(20, dtype=np.int32), cells, private=True)
        assert placement is not None
        ids.append(settle(cache, placement.seq_id))
        advance(cache, ids[-1], 20)
    return ids


def test_who_begins_takes_the_place_beside_busy_ones() -> None:
    cache = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False)
    ids = busy(cache, 5)
    assert ids == [0, 1, 2, 3, 4]
    waiting = place(cache, np.arange(20, dtype=np.int32), 100, private=True)
    assert waiting is not None
    assert waiting.seq_id == 5
    release(cache, 2)
    assert settle(cache, 5) == 2, "what has become free between others is taken"
    assert settle(cache, 2) == 2
    advance(cache, 2, 20)
    assert settle(cache, 2) == 2, "who holds something stays"
    cache.check_integrity()


@pytest.mark.parametrize("n_busy", [1, 3])
def test_beside_several_streams_an_idle_sequence_makes_room(n_busy: int) -> None:
    """Two streams apart cost little; more of them cost more than what one conversation has computed."""
    cache = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False)
    ids = busy(cache, n_busy + 1)
    kept = place(cache, np.arange(100, 150, dtype=np.int32), 100)
    assert kept is not None
    release(cache, ids[1])
    advance(cache, settle(cache, kept.seq_id), 50)
    seq_id = next(seq for seq, held in cache.held().items() if held == 50)
    assert seq_id == 1
    release(cache, 1, np.arange(100, 150, dtype=np.int32))
    coming = place(cache, np.arange(20, dtype=np.int32), 100, private=True)
    assert coming is not None
    assert (settle(cache, coming.seq_id) == 1) == (n_busy == 3)
    assert (cache.statistics().cached_sequences == 0) == (n_busy == 3)
    cache.check_integrity()


def test_in_a_shared_pool_it_does_not_matter() -> None:
    cache = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=800)
    busy(cache, 5)
    placement = place(cache, np.arange(20, dtype=np.int32), 100, private=True)
    assert placement is not None
    release(cache, 2)
    assert settle(cache, placement.seq_id) == placement.seq_id
