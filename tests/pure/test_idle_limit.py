"""Which idle sequences stay where attention scans the whole cache."""

from __future__ import annotations

import numpy as np

from tests.support.cases import all_cases
from tests.support.kv_cache import advance, done, make_cache, place, release
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import MAX_GHOSTS, IdleLimit
from uma_trio.engine_link.adapters import AdapterSet

N_CELLS = 40_000
NOBODY = "nobody"


def limited(**options: object) -> KvCache:
    """A cache of 40,000 cells of which idle sequences keep 1,000 to 10,000, with one request that always runs."""
    limit = IdleLimit(N_CELLS, min_cells=1000, keep_rows=20_000)
    cache = make_cache(n_cells=N_CELLS, cells_per_sequence=N_CELLS, idle_limit=limit, **options)
    assert place(cache, text(0, 20), 2000, principal=NOBODY) is not None
    return cache


def limit_of(cache: KvCache) -> IdleLimit:
    assert cache._idle_limit is not None
    return cache._idle_limit


def text(number: int, n: int) -> np.ndarray:
    """``n`` tokens that no other number has."""
    return np.arange(100_000 * number, 100_000 * number + n, dtype=np.int32)


def ask(cache: KvCache, prompt: np.ndarray, **options: object) -> int:
    """Run a request to its end; returns the prompt tokens that it finds in the cache."""
    placement = place(cache, prompt, len(prompt) + 1, **options)
    assert placement is not None
    advance(cache, placement.seq_id, len(prompt))
    cache.take_ops()
    release(cache, placement.seq_id, prompt)
    cache.take_ops()
    cache.check_integrity()
    return placement.n_cached


def kept(cache: KvCache) -> int:
    return cache.statistics().cached_cells


def test_prompts_that_come_once_keep_the_minimum() -> None:
    cache = limited()
    for number in range(1, 60):
        assert ask(cache, text(number, 400)) == 0
        assert kept(cache) <= limit_of(cache).cells == 1000
    assert kept(cache) == 800


def test_a_conversation_loses_its_prefix_once_at_most_also_next_to_prompts_that_come_once() -> None:
    cache = limited()
    found = []
    for turn in range(6):
        found.append(ask(cache, text(1, 5000 + 200 * turn)))
        for other in range(3):
            assert ask(cache, text(2 + 3 * turn + other, 900)) == 0
    assert found == [0, 0, 5200, 5400, 5600, 5800]
    assert limit_of(cache).cells == 7000


def test_several_conversations_stay() -> None:
    cache = limited()
    for turn in range(5):
        found = [ask(cache, text(number, 2000 + 100 * turn)) for number in (1, 2, 3)]
        assert found == ([0, 0, 0] if turn < 2 else [1900 + 100 * turn] * 3)


def test_a_conversation_that_is_not_continued_leaves_and_is_learned_anew() -> None:
    cache = limited()
    ask(cache, text(1, 5000))
    ask(cache, text(1, 5000))
    assert kept(cache) == 5000
    for number in range(2, 30):
        ask(cache, text(number, 800))
    assert limit_of(cache).cells == 1000
    assert kept(cache) <= 1000
    assert ask(cache, text(1, 5000)) == 0
    for number in range(30, 60):
        ask(cache, text(number, 800))
    assert ask(cache, text(1, 5000)) == 0, "it comes back too rarely to be worth its cells"
    ask(cache, text(60, 800))
    assert ask(cache, text(1, 5000)) == 0
    assert ask(cache, text(1, 5000)) == 4999, "now it came back soon"


def test_nothing_leaves_while_no_request_runs() -> None:
    cache = make_cache(n_cells=N_CELLS, cells_per_sequence=N_CELLS, idle_limit=IdleLimit(N_CELLS, min_cells=1000))
    done(cache, text(1, 6000))
    done(cache, text(2, 6000))
    assert kept(cache) == 12_000
    assert ask(cache, text(1, 7000)) == 6000, "a request of the same client continues it before anything leaves"


def test_of_requests_with_one_system_prompt_this_prompt_stays() -> None:
    cache = limited()
    system = text(1, 1500)
    found = [ask(cache, np.concatenate([system, text(number, 3000)])) for number in range(2, 9)]
    assert found == [0, 0, 1500, 1500, 1500, 1500, 1500]
    assert kept(cache) == 1500


def test_a_conversation_whose_end_was_cut_loses_it_once() -> None:
    """Another request shares its system prompt before the conversation comes back."""
    cache = limited()
    ask(cache, text(1, 4000))
    assert ask(cache, np.concatenate([text(1, 1500), text(2, 3000)])) == 0
    assert kept(cache) == 1500
    assert ask(cache, text(1, 4500)) == 1500
    assert ask(cache, text(1, 5000)) == 4500


def test_a_conversation_from_which_another_branches_stays_as_a_whole() -> None:
    cache = limited()
    for n in (4000, 5000):
        ask(cache, text(1, n))
    assert kept(cache) == 5000
    assert ask(cache, np.concatenate([text(1, 1500), text(2, 3000)])) == 1500
    assert kept(cache) == 5000
    assert ask(cache, text(1, 5500)) == 5000


@all_cases(
    ("first", "second"),
    [
        ({"principal": "a"}, {"principal": "b"}),
        ({"adapters": AdapterSet(((0, 1.0),), "x")}, {}),
        ({"private": True}, {}),
        ({}, {"private": True}),
    ],
)
def test_sequences_that_may_not_be_shared_are_no_evidence(first: dict[str, object], second: dict[str, object]) -> None:
    cache = limited()
    ask(cache, text(1, 5000), **first)
    ask(cache, text(1, 5000), **second)
    assert limit_of(cache).cells == 1000
    assert kept(cache) == 0


def test_without_reuse_nothing_is_remembered() -> None:
    cache = limited(reuse=False)
    ask(cache, text(1, 5000))
    assert not limit_of(cache).ghosts


def test_the_memory_of_evicted_sequences_is_bounded() -> None:
    for n, most in ((1200, N_CELLS // 1200), (1001, MAX_GHOSTS)):
        limit = IdleLimit(N_CELLS if n == 1200 else 10 * N_CELLS, min_cells=1000, keep_rows=10**9)
        cache = make_cache(n_cells=10 * N_CELLS, cells_per_sequence=N_CELLS, idle_limit=limit)
        place(cache, text(0, 20), 2000)
        for number in range(1, 100):
            ask(cache, text(number, n))
        assert len(limit.ghosts) == most


def test_a_sequence_that_could_never_stay_is_not_remembered() -> None:
    cache = limited()
    ask(cache, text(1, N_CELLS // 4 + 1))
    assert not limit_of(cache).ghosts


def test_only_this_limit_remembers() -> None:
    cache = make_cache(n_cells=8000, cells_per_sequence=8000, idle_limit=IdleLimit(8000, min_cells=2000))
    done(cache, text(1, 1500))
    done(cache, text(2, 1500))
    ask(cache, text(3, 7500))
    assert cache.evicted_total == 2
    assert not limit_of(cache).ghosts
    cache.clear()
    assert not limit_of(cache).ghosts


def test_a_deleted_session_is_not_remembered() -> None:
    cache = limited()
    ask(cache, text(1, 5000))
    assert len(limit_of(cache).ghosts) == 1
    cache.offload.forget(text(1, 5000), principal="b", needed=lambda tokens: False)
    assert len(limit_of(cache).ghosts) == 1
    cache.offload.forget(text(1, 5000), principal="", needed=lambda tokens: False)
    assert not limit_of(cache).ghosts


def test_a_session_stays_until_it_is_saved() -> None:
    cache = limited()
    ask(cache, text(1, 5000), durable=True)
    [session] = cache.idle
    assert (kept(cache), session.cells_wanted) == (5000, False)
    ask(cache, text(2, 6000), durable=True)
    assert (kept(cache), session.cells_wanted) == (11_000, True), "more than a quarter"
    cache.offload.give_up(session)
    cache.take_ops()
    assert kept(cache) == 6000
