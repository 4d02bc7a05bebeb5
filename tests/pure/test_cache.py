"""KV cache bookkeeping: reservation, reuse of what ended requests leave, eviction, adjacency; one case each."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.cases import all_cases
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
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import MAX_IDLE_FRACTION
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.engine_link.kv_ops import CopyPrefix, DropCheckpoint, KvOp, LoadState, SaveCheckpoint, SaveState, Truncate
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS

# -- reservation ----------------------------------------------------------------------------------------


def test_a_request_gets_all_its_cells_or_none() -> None:
    cache = KvCache(KvMemory(n_sequences=2, n_cells=100, cells_per_sequence=60))
    assert place(cache, tokens([1]), 60) == Got(0, 0)
    assert place(cache, tokens([2]), 41) is None
    assert place(cache, tokens([2]), 40) == Got(1, 0)
    release(cache, 0)
    assert place(cache, tokens([2]), 60) == Got(0, 0)
    assert cache.take_ops() == (Truncate(0),)


@all_cases("cells", [0, -1, 61])
def test_requests_that_can_never_fit_are_an_error(cells: int) -> None:
    with pytest.raises(ValueError, match="1 to 60"):
        KvCache(KvMemory(n_sequences=2, n_cells=100, cells_per_sequence=60)).allocate(Allocation(tokens([1]), cells))


def test_advancing_beyond_the_reserved_cells_fails() -> None:
    cache = make_cache()
    place(cache, tokens([1]), 10)
    advance(cache, 0, 10)
    with pytest.raises(AssertionError, match="11 of 10"):
        advance(cache, 0, 11)


@all_cases("keep", [None, tokens(SYSTEM)])
@all_cases("reused", [False, True])
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


def test_check_integrity_finds_a_leak() -> None:
    cache = make_cache()
    place(cache, tokens([1]), 10)
    cache._pool.reserved += 1
    with pytest.raises(AssertionError):
        cache.check_integrity()


# -- reuse of ended requests ----------------------------------------------------------------------------


def test_the_next_turn_of_a_chat_continues_in_place() -> None:
    cache = make_cache()
    first = done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert cache.statistics().cached_cells == len(first)
    assert place(cache, tokens(first, MORE), 300) == Got(0, len(first))
    assert cache.take_ops() == ()
    assert cache.statistics().cached_sequences == 0


def test_a_repeated_prompt_computes_one_token_for_its_logits() -> None:
    cache = make_cache()
    prompt = tokens(SYSTEM, HELLO)
    done(cache, prompt, ANSWER)
    assert place(cache, prompt, 200) == Got(0, len(prompt) - 1)
    assert cache.take_ops() == (Truncate(0, len(prompt) - 1),)


def test_a_rewritten_turn_keeps_the_tokens_before_it() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert place(cache, tokens(SYSTEM, HELLO, OTHER), 200) == Got(0, 100)
    assert cache.take_ops() == (Truncate(0, 100),)


def test_a_shared_system_prompt_is_copied_from_a_longer_conversation() -> None:
    """Continuing in place would lose more tokens than it shares."""
    cache = make_cache()
    long = done(cache, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert place(cache, tokens(SYSTEM, OTHER), 150) == Got(1, 50)
    assert cache.take_ops() == (CopyPrefix(0, 1, 50),)
    assert place(cache, tokens(long, OTHER), 300) == Got(0, len(long))


def test_without_room_for_a_copy_the_longer_conversation_is_truncated() -> None:
    cache = make_cache(n_sequences=1)
    done(cache, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert place(cache, tokens(SYSTEM, OTHER), 150) == Got(0, 50)
    assert cache.take_ops() == (Truncate(0, 50),)


def test_a_short_common_prefix_is_computed_again() -> None:
    cache = make_cache()
    done(cache, tokens([7] * (MIN_SHARED_TOKENS - 1), HELLO))
    assert place(cache, tokens([7] * (MIN_SHARED_TOKENS - 1), OTHER), 100) == Got(1, 0)
    done(cache, tokens([8] * MIN_SHARED_TOKENS, HELLO))
    assert place(cache, tokens([8] * MIN_SHARED_TOKENS, OTHER), 100) == Got(3, MIN_SHARED_TOKENS)


def test_the_longest_common_prefix_wins() -> None:
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


def test_a_private_request_reuses_and_keeps_nothing() -> None:
    cache = make_cache()
    held = done(cache, tokens(SYSTEM, HELLO))
    assert place(cache, held, 200, private=True) == Got(1, 0)
    advance(cache, 1, len(held))
    assert place(cache, tokens(held, MORE), 200) == Got(0, len(held))
    release(cache, 1, held)
    assert cache.statistics().cached_sequences == 0
    assert cache.take_ops() == (Truncate(1),)


def test_reuse_can_be_disabled() -> None:
    cache = make_cache(reuse=False)
    held = done(cache, tokens(SYSTEM, HELLO))
    assert cache.held() == {}
    place(cache, held, 200)
    advance(cache, 0, 100)
    assert place(cache, held, 200) == Got(1, 0)


def test_without_checkpoints_a_recurrent_memory_reuses_whole_sequences_only() -> None:
    cache = make_cache(can_truncate=False)
    held = done(cache, tokens(SYSTEM, HELLO), ANSWER)
    assert place(cache, tokens(SYSTEM, HELLO, OTHER), 200) == Got(1, 0)
    assert place(cache, held, 200) == Got(2, 0), "its last token would have to be removed"
    assert place(cache, tokens(held, MORE), 300) == Got(0, len(held))
    assert cache.take_ops() == ()


def test_rejected_drafts_leave_the_cache() -> None:
    cache = make_cache()
    place(cache, tokens(SYSTEM), 200)
    advance(cache, 0, 60)
    truncate(cache, 0, 53)
    assert cache.held() == {0: 53}
    advance(cache, 0, 58)
    release(cache, 0, tokens(SYSTEM, [1] * 5))
    assert cache.take_ops() == (Truncate(0, 53), Truncate(0, 55))
    assert cache.statistics().cached_cells == 55


# -- eviction -----------------------------------------------------------------------------------------------


def test_the_longest_idle_is_evicted_first_and_only_when_room_is_needed() -> None:
    cache = make_cache(n_sequences=4, n_cells=1000, cells_per_sequence=1000, unified=False)
    for part in (SYSTEM, HELLO, ANSWER):
        done(cache, tokens(part))
    assert place(cache, tokens(MORE), 800) == Got(3, 0), "850 cells are free"
    assert list(cache.held()) == [0, 1, 2]
    release(cache, 3)
    place(cache, tokens(HELLO, MORE), 150)  # continues sequence 1, which is then the last to become idle
    advance(cache, 1, 100)
    release(cache, 1, tokens(HELLO, MORE))
    cache.take_ops()
    place(cache, tokens(OTHER), 850)
    assert cache.take_ops() == (Truncate(0),)
    assert list(cache.held()) == [1, 2]


def test_nothing_is_evicted_unless_it_makes_enough_room() -> None:
    cache = make_cache(n_sequences=3, n_cells=300, cells_per_sequence=300, unified=False)
    done(cache, tokens(SYSTEM))
    place(cache, tokens(OTHER), 200)
    assert place(cache, tokens(HELLO), 101) is None
    assert cache.take_ops() == ()
    assert place(cache, tokens(HELLO), 100) is not None
    assert cache.take_ops() == (Truncate(0),)


def test_the_sequence_to_continue_is_not_evicted() -> None:
    cache = make_cache(n_sequences=8, n_cells=300, cells_per_sequence=300, unified=False)
    held = done(cache, tokens(SYSTEM, HELLO))
    done(cache, tokens(OTHER))
    assert place(cache, tokens(held, MORE), 300) == Got(0, 100)
    assert cache.take_ops() == (Truncate(1),)


def test_a_unified_cache_limits_idle_cells_while_requests_run() -> None:
    """Attention scans idle cells for every token.  Without running requests there is nothing to slow down."""
    cache = make_cache(n_sequences=64)
    for part in range(1, 60):
        done(cache, tokens(part))
    assert cache.statistics().cached_cells == 59 * 50
    place(cache, tokens(70), 51)
    cache.take_ops()
    assert cache.statistics().cached_cells == MAX_IDLE_FRACTION * 8000
    last = [place(cache, tokens(part, [1]), 51) for part in (19, 20)]
    assert [placement and placement.n_cached for placement in last] == [0, 50], "the longest idle was evicted"


def test_with_per_sequence_kv_idle_cells_are_not_limited() -> None:
    cache = make_cache(n_sequences=64, cells_per_sequence=125, unified=False)
    for part in range(1, 60):
        done(cache, tokens(part))
    assert cache.statistics().cached_cells == 59 * 50


def test_a_sequence_larger_than_the_limit_is_evicted_alone() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM))
    done(cache, tokens(range(2001)))
    assert cache.held() == {0: 50, 1: 2001}
    place(cache, tokens(70), 51)
    assert cache.take_ops() == (Truncate(1),)
    assert cache.held() == {0: 50}


# -- adjacency -----------------------------------------------------------------------------------------


def busy(cache: KvCache, n: int, cells: int = 100) -> list[int]:
    """Start ``n`` requests and return their sequence ids."""
    ids = []
    for _ in range(n):
        placement = place(cache, np.arange(20, dtype=np.int32), cells, private=True)
        assert placement is not None
        ids.append(settle(cache, placement.seq_id))
        advance(cache, ids[-1], 20)
    return ids


def test_a_request_starts_next_to_busy_sequences() -> None:
    cache = KvCache(KvMemory(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False))
    ids = busy(cache, 5)
    assert ids == [0, 1, 2, 3, 4]
    waiting = place(cache, np.arange(20, dtype=np.int32), 100, private=True)
    assert waiting is not None
    assert waiting.seq_id == 5
    release(cache, 2)
    assert settle(cache, 5) == 2, "the free id between busy ones"
    assert settle(cache, 2) == 2
    advance(cache, 2, 20)
    assert settle(cache, 2) == 2, "a sequence with tokens stays"
    cache.check_integrity()


@all_cases("n_busy", [1, 3])
def test_next_to_several_streams_an_idle_sequence_is_evicted(n_busy: int) -> None:
    """A gap between two streams costs little; between more, it costs more than computing the idle tokens again."""
    cache = KvCache(KvMemory(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False))
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


def test_in_a_unified_cache_requests_do_not_move() -> None:
    cache = KvCache(KvMemory(n_sequences=8, n_cells=800, cells_per_sequence=800))
    busy(cache, 5)
    placement = place(cache, np.arange(20, dtype=np.int32), 100, private=True)
    assert placement is not None
    release(cache, 2)
    assert settle(cache, placement.seq_id) == placement.seq_id


# -- operations -----------------------------------------------------------------------------------------


@all_cases(
    "op",
    [
        Truncate(3),
        CopyPrefix(0, 1, 50, checkpoint=7),
        SaveCheckpoint(0, 7),
        DropCheckpoint(7),
        SaveState(0, fd=5, offset=4096, n_bytes=100, checkpoints=((7, 20),)),
        LoadState(0, length=50, fd=5, offset=4096, n_bytes=100),
    ],
)
def test_operations_cross_a_process_boundary(op: KvOp) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(op), type=KvOp) == op
