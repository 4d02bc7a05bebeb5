"""Forks of running sequences.

In a unified cache, a copy of a sequence shares the cells of the tokens that it copies.  These cells are counted once:
forks hold a ``SharedPrefix`` together, and each reserves cells of its own for what follows.  Forks of forks make a tree of
prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator

from uma_trio.daemon.kv.allocation import Allocation, SharedPrefix
from uma_trio.daemon.kv.pool import Pool
from uma_trio.daemon.kv.truncation import Truncation


class Forks:
    """Copies the running sequences of ``pool``."""

    def __init__(self, pool: Pool, truncation: Truncation) -> None:
        self._pool = pool
        self._truncation = truncation
        self._shares = pool.memory.unified and truncation.can_truncate
        """A memory that cannot be truncated has a state for each sequence."""

    def cells_needed(self, source: Allocation, n: int, cells: int) -> int:
        """Cells for ``n`` copies of ``source``, with ``cells`` each."""
        return n * (cells - (source.n_tokens if self._shares else 0))

    def fork(self, source: Allocation, n: int, cells: int) -> list[Allocation] | None:
        """See ``KvCache.fork``."""
        if not self._pool.make_room(
            self.cells_needed(source, n, cells), keep=None, n_sequences=n, principal=source.principal
        ):
            return None
        length, forks = source.n_tokens, []
        shared = self._share(source) if self._shares and length else None
        for _ in range(n):
            fork = Allocation(
                source.tokens, cells, source.principal, source.adapters, source.rank, source.private, shared=shared
            )
            if shared is not None:
                for node in shared.path():
                    node.holders[fork] = None
            self._pool.admit(fork)
            if length:
                self._truncation.copy_prefix(source, fork, length)
            forks.append(fork)
        self._pool.changes += 1  # others that wait may be placed again
        return forks

    def _share(self, source: Allocation) -> SharedPrefix:
        """The prefix of all tokens that ``source`` holds."""
        if source.shared is None or source.n_shared < source.n_tokens:
            source.shared = SharedPrefix(source.n_tokens, source.shared, {source: None})
        return source.shared

    def backtrack(self, allocation: Allocation, length: int) -> bool:
        """See ``KvCache.backtrack``."""
        length = self._truncation.longest_within(allocation, length)
        more = allocation.n_shared - length
        if more > 0:
            if not self._pool.make_room(more, keep=None, n_sequences=0, principal=allocation.principal):
                return False
            self.part(allocation, length)
        self._truncation.truncate(allocation, length)
        return True

    def part(self, allocation: Allocation, length: int) -> None:
        """Let ``allocation`` share at most the first ``length`` tokens; it reserves cells for the others itself."""
        while (node := allocation.shared) is not None and node.length > length:
            self._pool.reserved += node.length - max(length, node.length - node.n_cells)
            if node.length - node.n_cells < length:
                node.parent = SharedPrefix(length, node.parent, dict(node.holders))
            allocation.shared = node.parent
            del node.holders[allocation]
            if len(node.holders) == 1:
                [last] = node.holders
                last.shared = node.parent

    def rejoin(self, allocation: Allocation) -> bool:
        """Copy what another fork has computed again; returns whether ``allocation`` may compute tokens itself."""
        assert allocation.shared is not None
        missing = [node for node in allocation.shared.path() if node.length > allocation.n_tokens]
        for node in missing:
            source = next((other for other in node.holders if other.n_tokens >= node.length), None)
            if source is not None:
                self._truncation.truncate(allocation, 0)
                self._truncation.copy_prefix(source, allocation, node.length)
                break
        return all(next(iter(node.holders)) is allocation for node in missing if node.length > allocation.n_tokens)

    def _prefixes(self) -> Iterator[SharedPrefix]:
        seen: set[SharedPrefix] = set()
        for allocation in self._pool.allocations.values():
            if allocation.shared is not None:
                new = [node for node in allocation.shared.path() if node not in seen]
                seen.update(new)
                yield from new

    def check_integrity(self) -> None:
        """Raise AssertionError unless prefixes and forks agree."""
        for node in self._prefixes():
            assert len(node.holders) > 1
            assert node.n_cells > 0
            assert all(node in other.shared.path() for other in node.holders if other.shared is not None)
            assert all(self._pool.has(other) and not other.is_idle and other.shared for other in node.holders)
        for allocation in self._pool.allocations.values():
            if allocation.shared is not None:
                assert all(allocation in node.holders for node in allocation.shared.path())
