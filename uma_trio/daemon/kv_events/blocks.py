"""Which blocks of tokens are there, and the events that lead from one state to the next.

The daemon shares prefixes token by token; routers think in blocks.  A block is there while at least one sequence or
saved state holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
import xxhash

from uma_trio.daemon.kv.held_prefixes import HeldPrefix
from uma_trio.daemon.kv_events.wire import BLOCK_TOKENS, AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from uma_trio.engine_link.tokens import TokenIds, common_prefix

HASHES_AT_ONCE: Final = 64
"""Blocks between two calls of ``pause``: hashing them holds the GIL for about 0.1 ms."""

Root = tuple[str, str]
"""Principal and adapters: blocks of others are other blocks, because nobody shares with them."""


@attrs.define
class _Chain:
    """The blocks of one holder."""

    medium: Medium
    root: Root
    tokens: TokenIds
    hashes: list[int]


class BlockIndex:
    """The blocks that subscribers know of.

    Args:
        pause: called now and then while ``update`` computes, to let other threads run.
    """

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self._pause = pause
        self._chains: dict[object, _Chain] = {}
        self._n_holders: dict[tuple[Medium, int], int] = {}
        """Sequences and states that hold a block, for each one that is there."""

    def update(self, prefixes: Iterable[HeldPrefix]) -> list[Event]:
        """Make ``prefixes`` all that is there; returns the events that lead there."""
        gone, stored = dict(self._chains), list[Event]()
        dropped = Counter[tuple[Medium, int]]()
        chains: dict[object, _Chain] = {}
        for prefix in prefixes:
            chain, known = self._chain(prefix, gone.get(prefix.holder))
            chains[prefix.holder] = chain
            stored += self._hold(chain, known)
            before = gone.pop(prefix.holder, None)
            if before is not None:
                dropped.update([(before.medium, block_hash) for block_hash in before.hashes[known:]])
        for chain in gone.values():
            dropped.update([(chain.medium, block_hash) for block_hash in chain.hashes])
        self._chains = chains
        removed = self._drop(dropped)
        if removed and not self._n_holders:
            return [AllBlocksCleared()]
        return [*stored, *removed]

    def everything(self) -> list[Event]:
        """The events that lead from any state to this one."""
        events: list[Event] = [AllBlocksCleared()]
        stored = set[tuple[Medium, int]]()
        for chain in self._chains.values():
            new = [n for n, block_hash in enumerate(chain.hashes) if (chain.medium, block_hash) not in stored]
            if new:
                stored.update([(chain.medium, block_hash) for block_hash in chain.hashes])
                events.append(_stored(chain, new[0]))
            self._pause()
        return events

    def _chain(self, prefix: HeldPrefix, before: _Chain | None) -> tuple[_Chain, int]:
        """The blocks of ``prefix``, and how many of them ``before``, its earlier ones, has as well."""
        n = prefix.length // BLOCK_TOKENS
        root = (prefix.principal, prefix.adapters)
        medium: Medium = "DISK" if prefix.is_saved else "GPU"
        hashes: list[int] = []
        if before is not None and before.root == root and before.medium == medium:
            same = len(before.tokens)
            if before.tokens is not prefix.tokens:
                same = common_prefix(before.tokens, prefix.tokens)
            elif n == len(before.hashes):
                return before, n
            hashes = before.hashes[: min(n, same // BLOCK_TOKENS)]
        known = len(hashes)
        parent = hashes[-1] if hashes else xxhash.xxh3_64_intdigest("\0".join(root).encode())
        data = memoryview(prefix.tokens[: n * BLOCK_TOKENS].tobytes())
        width = prefix.tokens.itemsize * BLOCK_TOKENS
        for number in range(known, n):
            parent = xxhash.xxh3_64_intdigest(data[number * width : (number + 1) * width], seed=parent)
            hashes.append(parent)
            if number % HASHES_AT_ONCE == 0:
                self._pause()
        return _Chain(medium, root, prefix.tokens, hashes), known

    def _hold(self, chain: _Chain, known: int) -> Sequence[Event]:
        """Count ``chain`` as a holder of its blocks from ``known`` on; returns the event of those that are new."""
        first_new = None
        for number in range(known, len(chain.hashes)):
            key = chain.medium, chain.hashes[number]
            n_holders = self._n_holders.get(key, 0)
            if not n_holders and first_new is None:
                first_new = number
            self._n_holders[key] = n_holders + 1
        return [] if first_new is None else [_stored(chain, first_new)]

    def _drop(self, dropped: Counter[tuple[Medium, int]]) -> list[Event]:
        """Count fewer holders; returns the events of blocks that have none any more."""
        gone: dict[Medium, list[int]] = {}
        for key, n in dropped.items():
            self._n_holders[key] -= n
            if not self._n_holders[key]:
                del self._n_holders[key]
                gone.setdefault(key[0], []).append(key[1])
        return [BlockRemoved(hashes, medium) for medium, hashes in gone.items()]


def _stored(chain: _Chain, first: int) -> BlockStored:
    """The event of all blocks of ``chain`` from ``first`` on.  If a block is there, so are all before it."""
    return BlockStored(
        chain.hashes[first:],
        chain.hashes[first - 1] if first else None,
        chain.tokens[first * BLOCK_TOKENS : len(chain.hashes) * BLOCK_TOKENS].tolist(),
        BLOCK_TOKENS,
        None,
        chain.medium,
        chain.root[1] or None,
    )
