"""How many cells idle sequences may keep where the attention of every row scans the whole cache.

An idle cell then costs time in every step, and saves time only if its tokens are asked for again.  Scanning one cell for
as many rows as six times the model's width takes about as long as computing its token anew.  So tokens that nobody asks
for soon are not worth their cells.  Whether somebody will is not known in advance, but it can be learned:

- Tokens that were used again, or would have been if this limit had not evicted them, probably will be once more.  They
  stay until the engine has computed ``KEEP_ROWS`` rows without them being used.
- All other tokens of idle sequences share ``MIN_IDLE_CELLS``.

A sequence that a request continues stays as a whole.  Where only a system prompt is shared, that prompt stays.

So clients that send every prompt once cost little, and a client that comes back loses its prefix to this limit once at
most, also next to others that send theirs once.  The limit is the minimum plus the tokens that were used again.
Where sequence ids or cells run out, the longest idle sequence goes, as always, whether it was used again or not.

The memory of evicted sequences is that of ARC's ghost lists (Megiddo and Modha, 2003).  ARC moves one limit between
recent and frequent entries; it has no use here, because a larger cache costs ARC nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import attrs

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.engine_link.adapters import AdapterSet
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix

MAX_IDLE_FRACTION: Final = 0.25
"""Maximum fraction of a unified cache that idle allocations may hold."""

MIN_IDLE_CELLS: Final = 2048
"""Cells for idle tokens that nobody has used again; at most ``MAX_IDLE_FRACTION`` of the cache."""

KEEP_ROWS: Final = 65_536
"""Tokens that were used again lose their place when they are not used for this many rows.  With a model of 7B parameters, scanning
a cell for 24,576 rows costs as much as computing its token again.  The constant is larger, for a lost prefix delays one
request, and all requests share the cost of a scan."""

MAX_GHOSTS: Final = 64
"""Evicted sequences that are remembered."""


@attrs.frozen(eq=False)
class Ghost:
    """The tokens of a sequence that the limit evicted."""

    principal: str
    adapters: AdapterSet
    tokens: TokenIds
    used_at: int
    """``IdleLimit.n_rows`` when a request last used the tokens."""


class IdleLimit:
    """Decides which idle sequences are evicted, or cut, although the cache is not full.

    Args:
        n_cells: cells of the whole cache.
        min_cells: cells for tokens that nobody has used again.
        keep_rows: see ``KEEP_ROWS``.
    """

    def __init__(self, n_cells: int, *, min_cells: int = MIN_IDLE_CELLS, keep_rows: int = KEEP_ROWS) -> None:
        self.max_cells = int(MAX_IDLE_FRACTION * n_cells)
        """Upper bound of ``cells``."""
        self.min_cells = min(min_cells, self.max_cells)
        """Lower bound of ``cells``."""
        self.cells = self.min_cells
        """Cells that idle sequences may hold, without those that must be saved first."""
        self.n_rows = 0
        """Rows that the engine has computed; the caller adds them."""
        self.max_ghost_tokens = n_cells
        """Tokens that are remembered."""
        self._keep_rows = keep_rows
        self._ghosts: list[Ghost] = []
        """The longest idle first."""

    @property
    def ghosts(self) -> Collection[Ghost]:
        """The evicted sequences that are remembered."""
        return self._ghosts

    def victims(self, idle: Iterable[Allocation]) -> list[Allocation]:
        """Adjust the limit, and choose the sequences that must be cut to the tokens that were used again.

        Args:
            idle: all idle allocations, the longest idle first.
        """
        n_reused, others = 0, []
        for allocation in idle:
            if allocation.n_reused and self.n_rows - allocation.used_at > self._keep_rows:
                allocation.n_reused = 0
            if allocation.needs_save:  # saving would copy the state in the middle of others' steps
                continue
            n_reused += allocation.n_reused
            if allocation.reserved > allocation.n_reused:
                others.append(allocation)
        self.cells = min(self.min_cells + n_reused, self.max_cells)
        return [others[n] for n in excess([other.reserved - other.n_reused for other in others], self.min_cells)]

    def remember(self, allocation: Allocation) -> None:
        """Remember ``allocation``, which this limit cuts or evicts, as a ghost."""
        if len(allocation.tokens) <= self.max_cells:  # a longer one would not stay anyway
            self._ghosts.append(
                Ghost(allocation.principal, allocation.adapters, allocation.tokens.copy(), allocation.used_at)
            )
        n_tokens = sum([len(ghost.tokens) for ghost in self._ghosts])
        n_old = 0
        for ghost in self._ghosts:
            is_old = self.n_rows - ghost.used_at > self._keep_rows
            if not is_old and len(self._ghosts) - n_old <= MAX_GHOSTS and n_tokens <= self.max_ghost_tokens:
                break
            n_tokens -= len(ghost.tokens)
            n_old += 1
        del self._ghosts[:n_old]

    def reused(self, source: Allocation, n_shared: int) -> None:
        """Record that a request uses the first ``n_shared`` tokens of ``source``, which is idle."""
        source.n_reused, source.used_at = max(source.n_reused, n_shared), self.n_rows

    def began(self, allocation: Allocation, n_shared: int) -> None:
        """Record that a request begins.

        If an evicted sequence had more of its prompt than the cache has, tokens of the request count as used again.

        Args:
            allocation: of the request; not a private one.
            n_shared: prompt tokens that it gets from the cache.
        """
        prompt = allocation.tokens[:-1]
        best, most = None, n_shared + MIN_SHARED_TOKENS - 1
        for ghost in self._ghosts:
            is_its_own = ghost.principal == allocation.principal and ghost.adapters == allocation.adapters
            if is_its_own and len(ghost.tokens) > most and self.n_rows - ghost.used_at <= self._keep_rows:
                n = common_prefix(prompt, ghost.tokens)
                if n > most:
                    best, most = ghost, n
        if best is not None:
            expected = expected_tokens(allocation, len(best.tokens), most)
            allocation.n_reused = max(allocation.n_reused, expected)
            if expected > most:
                self._ghosts.remove(best)

    def forget(self, tokens: TokenIds, principal: str) -> None:
        """Forget the ghosts of ``principal`` with which ``tokens`` begin."""
        self._ghosts = [
            ghost
            for ghost in self._ghosts
            if ghost.principal != principal or common_prefix(ghost.tokens, tokens) < len(ghost.tokens)
        ]


def expected_tokens(allocation: Allocation, n_before: int, n_shared: int) -> int:
    """How many tokens of a request will probably be used again.

    The request begins with ``n_shared`` of the ``n_before`` tokens of an earlier sequence.  With half of these tokens or
    more it continues a conversation, and all of its tokens count.  With fewer, only the shared ones count, such as a
    system prompt.
    """
    return allocation.reserved if 2 * n_shared >= n_before else n_shared


def excess(sizes: Sequence[int], limit: float) -> list[int]:
    """The positions of the sizes to remove so that the sum of the others is at most ``limit``.

    Those that exceed the limit alone go first, then the first ones.
    """
    removed = [n for n, size in enumerate(sizes) if size > limit]
    left = sum([size for size in sizes if size <= limit])
    for n, size in enumerate(sizes):
        if left <= limit:
            break
        if size <= limit:
            removed.append(n)
            left -= size
    return removed
