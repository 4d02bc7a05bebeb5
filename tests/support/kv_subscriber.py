"""A subscriber of KV events, as a router is one: it rebuilds which prefixes there are from the messages alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from uma_trio.daemon.kv.cache import KvCache

BLOCK = 16

Blocks = Counter[tuple[str, str, tuple[int, ...]]]
"""(medium, adapters, all tokens up to the end of a block): of how many principals there is one."""


class Rebuilt:
    """What a subscriber knows."""

    def __init__(self) -> None:
        self.next_number: int | None = None
        self._blocks: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}

    def receive(self, number: int, payload: bytes) -> bool:
        """Apply a message; returns whether those before it are missing, and it was therefore ignored."""
        _, events, _ = msgspec.msgpack.decode(payload)
        is_whole = events[0] == {"type": "AllBlocksCleared"}
        if number != self.next_number and not is_whole:
            return self.next_number is None or number > self.next_number
        self.apply(events)
        self.next_number = number + 1
        return False

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self._blocks.clear()
                case "BlockRemoved":
                    for block_hash in event["block_hashes"]:
                        del self._blocks[event["medium"], block_hash]
                case "BlockStored":
                    self._store(event)
                case other:
                    raise AssertionError(other)

    def _store(self, event: dict[str, Any]) -> None:
        hashes, parent, tokens = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        medium, adapters = event["medium"], event["lora_name"] or ""
        assert (event["block_size"], len(tokens)) == (BLOCK, BLOCK * len(hashes))
        before: tuple[int, ...] = () if parent is None else self._blocks[medium, parent][1]
        for number, block_hash in enumerate(hashes):
            assert (medium, block_hash) not in self._blocks, "stored twice"
            before = (*before, *tokens[BLOCK * number : BLOCK * (number + 1)])
            self._blocks[medium, block_hash] = adapters, before

    @property
    def blocks(self) -> Blocks:
        return Counter((medium, adapters, tokens) for (medium, _), (adapters, tokens) in self._blocks.items())


def held_by(cache: KvCache) -> Blocks:
    """What the prefix index of ``cache`` holds, in blocks."""
    found = set[tuple[str, str, str, tuple[int, ...]]]()
    for each in cache._pool.allocations.values():
        if not each.private:
            tokens = each.tokens[: each.n_tokens].tolist()
            found |= {("GPU", each.principal, each.adapters.key, prefix) for prefix in _prefixes(tokens)}
    for state in cache.index.states:
        found |= {("DISK", state.principal, state.adapters, prefix) for prefix in _prefixes(state.tokens.tolist())}
    return Counter((medium, adapters, tokens) for medium, _, adapters, tokens in found)


def _prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
