"""A subscriber of KV events, as a router is one: it rebuilds which prefixes there are from the messages alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv_events.publisher import KvEventPublisher

BLOCK = 16
HERE = "tcp://127.0.0.1:0"
PATIENCE_S = 60

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


class Subscriber:
    """Receives what is published, in a thread of the test.

    Args:
        loses: whether the message with this number is lost.
    """

    def __init__(self, address: str, replay: str, loses=lambda number: False) -> None:
        self.known, self._loses, self._context = Rebuilt(), loses, zmq.Context()
        self.replays = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(address)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)

    def receive_until(self, expected: Blocks) -> None:
        """Receive messages until they lead to ``expected``."""
        until = time.monotonic() + PATIENCE_S
        while self.known.next_number is None or self.known.blocks != expected:
            assert time.monotonic() < until, (self.known.blocks - expected, expected - self.known.blocks)
            if self._sub.poll(50):
                topic, number, payload = self._sub.recv_multipart()
                assert topic == b""
                if not self._loses(int.from_bytes(number, "big")):
                    self._receive(int.from_bytes(number, "big"), payload)
            else:
                self._ask(self.known.next_number or 0)  # the last ones may be among those that it lost

    def _receive(self, number: int, payload: bytes) -> None:
        if self.known.receive(number, payload):
            self._ask(self.known.next_number or 0)

    def _ask(self, start: int) -> None:
        self.replays += 1
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(1e3 * PATIENCE_S)
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return
            assert not self.known.receive(int.from_bytes(number, "big"), payload), "a replay leads to the current state"

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def publishing_to(*, loses=lambda number: False) -> Iterator[tuple[KvEventPublisher, Subscriber]]:
    publisher = KvEventPublisher(HERE, HERE)
    subscriber = Subscriber(*publisher.addresses, loses)
    try:
        yield publisher, subscriber
    finally:
        subscriber.close()
        publisher.close()
