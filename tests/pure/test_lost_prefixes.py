"""What is remembered of tokens that left the KV cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kv_cache import HELLO, LONG, MORE, OTHER, SYSTEM, done, make_cache, tokens, uncuttable
from uma_trio.daemon.kv import lost_prefixes
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.lost_prefixes import Comparison


def compare(cache: KvCache, prompt: np.ndarray, **options: object) -> Comparison:
    placement = cache.allocate(Allocation(prompt, len(prompt) + 1, **options))  # type: ignore[arg-type]
    assert placement is not None
    cache.release(placement.allocation)
    return placement.comparison


def test_a_prompt_is_compared_with_what_is_there() -> None:
    cache = make_cache()
    held = done(cache, tokens(SYSTEM, HELLO))
    found = compare(cache, tokens(SYSTEM, OTHER, HELLO))
    assert (found.n_common, found.lost) == (50, None)
    assert found.earlier is not None
    assert found.earlier.tolist() == held.tolist()
    assert compare(cache, tokens(SYSTEM, HELLO, MORE)).n_common == 100
    assert compare(cache, tokens(OTHER)).earlier is None
    assert compare(cache, tokens(SYSTEM, HELLO), principal="other").earlier is None
    assert compare(cache, tokens(SYSTEM, HELLO), private=True).earlier is None


def test_evicted_tokens_are_known_with_who_needed_their_place() -> None:
    now = 5.0
    cache = make_cache(n_sequences=1, clock=lambda: now)
    done(cache, tokens(SYSTEM, HELLO), principal="a")
    done(cache, tokens(OTHER), principal="b")
    now = 8.0
    lost = compare(cache, tokens(SYSTEM, HELLO, MORE), principal="a").lost
    assert lost is not None
    assert (lost.cause, lost.claimant, lost.at, len(lost.tokens)) == ("room", "b", 5.0, 100)
    assert compare(cache, tokens(SYSTEM, HELLO, MORE), principal="b").lost is None, "they are another's"


def test_tokens_of_a_conversation_that_another_one_went_on_from() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM, HELLO), MORE)
    done(cache, tokens(SYSTEM, HELLO, OTHER))
    found = compare(cache, tokens(SYSTEM, HELLO, MORE, OTHER))
    assert found.lost is not None
    assert (found.n_common, found.lost.cause) == (150, "continued")


def test_a_restart_of_the_engine_loses_all() -> None:
    cache = make_cache()
    done(cache, tokens(SYSTEM, HELLO))
    cache.clear(lost=True)
    lost = compare(cache, tokens(SYSTEM, HELLO)).lost
    assert lost is not None
    assert (lost.cause, lost.claimant) == ("engine", None)


def test_tokens_that_are_there_and_cannot_be_taken_have_an_obstacle() -> None:
    copies = {"unified": False, "cells_per_sequence": 4096}  # so fewer than 64 tokens are not worth a copy
    few = compare(with_conversation(make_cache(**copies)), tokens(SYSTEM, OTHER))
    assert (few.n_common, few.obstacle) == (50, "short")
    many = compare(with_conversation(make_cache(**copies)), tokens(SYSTEM, HELLO, OTHER))
    assert (many.n_common, many.obstacle) == (100, "computing"), "unless it is copied"
    recurrent = compare(with_conversation(uncuttable()), tokens(SYSTEM, OTHER))
    assert (recurrent.n_common, recurrent.obstacle) == (50, "checkpoint")


def test_a_prefix_is_copied_if_that_is_faster_than_to_compute_it() -> None:
    for is_worth, expected in ((True, 50), (False, 0)):
        asked: list[int] = []

        def worth_copying(n_tokens: int, asked: list[int] = asked, is_worth: bool = is_worth) -> bool:
            asked.append(n_tokens)
            return is_worth

        cache = make_cache(unified=False, cells_per_sequence=4096, worth_copying=worth_copying)
        with_conversation(cache)
        placement = cache.allocate(Allocation(tokens(SYSTEM, OTHER), 101))
        assert placement is not None
        assert (placement.n_cached, {*asked}) == (expected, {50})
        assert placement.comparison.obstacle == ("computing" if is_worth else "short")


def with_conversation(cache: KvCache) -> KvCache:
    """The cache, with a long conversation that begins with ``SYSTEM`` and ``HELLO``."""
    done(cache, tokens(SYSTEM, HELLO, MORE), LONG)
    return cache


def test_the_memory_is_bounded_and_forgets_closed_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_prefixes, "MAX_LOST", 3)
    monkeypatch.setattr(lost_prefixes, "MAX_LOST_TOKENS", 250)
    cache = make_cache(n_sequences=1)
    for part in range(10, 17):
        done(cache, tokens(part, part + 10))
    lost = cache._pool.lost
    assert len(lost) == 2
    assert compare(cache, tokens(15, 25)).n_common == 99
    assert compare(cache, tokens(10, 20)).n_common == 0
    lost.forget(tokens(15, 25, MORE), "")
    assert compare(cache, tokens(15, 25)).lost is None
