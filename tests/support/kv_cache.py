"""Requests to a ``KvCache``, addressed by sequence id, as tests describe them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import attrs
import numpy as np

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.engine_link.kv_ops import KvOp

BACKGROUND, NORMAL = 2, 1
SYSTEM, HELLO, ANSWER, MORE, OTHER = range(1, 6)
LONG = np.arange(3000, 3800, dtype=np.int32)


class Got(NamedTuple):
    """A ``NewAllocation``, with the sequence id in place of the allocation."""

    seq_id: int
    n_cached: int
    waits: bool = False


def tokens(*parts: int | Iterable[int]) -> np.ndarray:
    """Concatenate ``parts``; a number stands for a text of fifty tokens of its own."""
    found: list[int] = []
    for part in parts:
        found.extend(range(100 * part, 100 * part + 50) if isinstance(part, int) else part)
    return np.asarray(found, dtype=np.int32)


def make_cache(**options: object) -> KvCache:
    """A unified cache of 8 sequences and 8000 cells, changed by ``options``."""
    memory = {"n_sequences": 8, "n_cells": 8000, "cells_per_sequence": 8000}
    memory |= {name: options.pop(name) for name in attrs.fields_dict(KvMemory) if name in options}
    return KvCache(KvMemory(**memory), **options)  # type: ignore[arg-type]


def uncuttable(**options: object) -> KvCache:
    """``make_cache`` for a memory that needs checkpoints."""
    return make_cache(**{"can_truncate": False, "max_checkpoints": 64} | options)


def allocation_of(cache: KvCache, seq_id: int) -> Allocation:
    return cache._pool.allocations[seq_id]


def place(cache: KvCache, prompt: np.ndarray, cells: int, **options: object) -> Got | None:
    """Allocate."""
    parked = options.pop("parked", None)
    placement = cache.allocate(Allocation(prompt, cells, **options), parked)  # type: ignore[arg-type]
    return None if placement is None else Got(placement.allocation.seq_id, placement.n_cached, placement.waits)


def placed(cache: KvCache, prompt: np.ndarray, **options: object) -> Got:
    """Allocate room for the prompt alone, which there is."""
    found = place(cache, prompt, len(prompt), **options)
    assert found is not None
    return found


def advance(cache: KvCache, seq_id: int, n_tokens: int) -> None:
    cache.advance(allocation_of(cache, seq_id), n_tokens)


def next_pause(cache: KvCache, seq_id: int) -> int:
    return cache.next_pause(allocation_of(cache, seq_id))


def share_prefix(cache: KvCache, seq_id: int, known: np.ndarray) -> Got:
    """Begin with a prefix of what has become known."""
    allocation = allocation_of(cache, seq_id)
    cache.share_prefix(allocation, known)
    return Got(seq_id, allocation.n_tokens, allocation.leader is not None)


def settle(cache: KvCache, seq_id: int) -> int:
    """Settle, and return the new sequence id."""
    allocation = allocation_of(cache, seq_id)
    cache.settle(allocation)
    return allocation.seq_id


def backtrack(cache: KvCache, seq_id: int, length: int) -> bool:
    return cache.backtrack(allocation_of(cache, seq_id), length)


def truncate(cache: KvCache, seq_id: int, length: int) -> None:
    cache.truncate(allocation_of(cache, seq_id), length)


def release(cache: KvCache, seq_id: int, tokens: np.ndarray | None = None) -> None:
    cache.release(allocation_of(cache, seq_id), tokens)


def followed(cache: KvCache, stalled: Collection[int] = ()) -> list[tuple[int, int]]:
    """(sequence id, tokens that it holds) of each that no longer waits."""
    return [(allocation.seq_id, allocation.n_tokens) for allocation in cache.followed(stalled)]


def done(cache: KvCache, prompt: np.ndarray, answer: int | Iterable[int] = (), **options: object) -> np.ndarray:
    """Run a request to its end and return the tokens that it leaves in the cache."""
    held = tokens(prompt, answer)
    placement = place(cache, prompt, len(held) + 1, **options)
    assert placement is not None
    advance(cache, placement.seq_id, len(held))
    release(cache, placement.seq_id, held)
    cache.take_ops()
    return held


def asked(cache: KvCache, prompt: np.ndarray, answer: int | Iterable[int] = ()) -> tuple[int, tuple[KvOp, ...]]:
    """Run a request to its end, with pauses; returns the tokens that it reused and all operations."""
    held = tokens(prompt, answer)
    placement = place(cache, prompt, len(held) + 1)
    assert placement is not None
    ops: list[KvOp] = []
    while length := next_pause(cache, placement.seq_id):
        ops += cache.take_ops()
        advance(cache, placement.seq_id, length)
    ops += cache.take_ops()
    advance(cache, placement.seq_id, len(held))
    ops += cache.take_ops()
    release(cache, placement.seq_id, held)
    return placement.n_cached, (*ops, *cache.take_ops())


def pauses(cache: KvCache, seq_id: int) -> list[int]:
    """Prefill a request from now to its end; returns the lengths at which it pauses."""
    found = []
    while length := next_pause(cache, seq_id):
        found.append(length)
        advance(cache, seq_id, length)
    return found


def together(cache: KvCache, prompts: Iterable[np.ndarray], chunk: int = 100) -> tuple[int, int]:
    """Prefill requests that arrive at once, chunk by chunk; returns the number of computed tokens and of steps."""
    held: dict[int, int] = {}
    waiting, sizes = {}, {}
    for prompt in prompts:
        placement = placed(cache, prompt)
        (waiting if placement.waits else held)[placement.seq_id] = placement.n_cached
        sizes[placement.seq_id] = len(prompt)
    computed = steps = 0
    while waiting or any(held[seq_id] < sizes[seq_id] for seq_id in held):
        for seq_id, n in followed(cache):
            del waiting[seq_id]
            held[seq_id] = n
        cache.take_ops()
        for seq_id in held:
            n = min(chunk, (next_pause(cache, seq_id) or sizes[seq_id]) - held[seq_id])
            held[seq_id] += n
            advance(cache, seq_id, held[seq_id])
            computed += n
        steps += 1
    cache.check_integrity()
    return computed, steps
