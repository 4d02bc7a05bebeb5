"""How many cells idle sequences may keep where the attention of every row scans the whole cache.

An idle cell then costs time in every step, and saves time only if its tokens are asked for again.  Scanning one cell for
as many rows as six times the model's width takes about as long as computing its token anew.  So tokens that nobody asks
for soon are not worth their cells.  Whether somebody will is not known in advance, but it can be learned:

- A sequence that was used again, or would have been if this limit had not evicted it, probably will be once more.  It
  stays until the engine has computed ``KEEP_ROWS`` rows without it being used.
- All other idle sequences share ``MIN_IDLE_CELLS``.

So clients that send every prompt once cost little, and a client that comes back loses its prefix once at most, also next
to others that send theirs once.  The limit follows: it is the minimum and the cells of sequences that were used again.

The memory of evicted sequences is that of ARC's ghost lists (Megiddo and Modha, 2003).  ARC moves one limit between
recent and frequent entries; it has no use here, because a larger cache costs ARC nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import attrs

from uma_trio.kv.adapters import AdapterSet
from uma_trio.kv.allocation import Allocation
from uma_trio.kv.prefix import MIN_SHARED_TOKENS, Tokens, common_prefix

MAX_IDLE_FRACTION: Final = 0.25
"""Maximum fraction of a unified cache that idle allocations may hold."""

MIN_IDLE_CELLS: Final = 2048
"""Cells for idle sequences that nobody has used again; at most ``MAX_IDLE_FRACTION`` of the cache."""

KEEP_ROWS: Final = 65_536
"""A sequence that was used again loses its place after this many rows of others.  For a model of 7B parameters, 24,576
rows cost as much as the tokens; the rest is for the request that would wait for them, while all share the scans."""

MAX_GHOSTS: Final = 64
"""Evicted sequences that are remembered."""


@attrs.frozen(eq=False)
class Ghost:
    """The tokens of a sequence that the limit evicted."""

    principal: str
    adapters: AdapterSet
    tokens: Tokens
    used_at: int
    """``IdleLimit.n_rows`` when it became idle."""


class IdleLimit:
    """Decides which idle sequences go before the cache is full.

    Args:
        n_cells: cells of the whole cache.
        min_cells: cells for sequences that nobody has used again.
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
        """Adjust the limit, and choose the sequences that must go.

        Args:
            idle: all idle allocations, the longest idle first.
        """
        n_reused, others = 0, []
        for allocation in idle:
            if allocation.is_reused and self.n_rows - allocation.used_at > self._keep_rows:
                allocation.is_reused = False
            if allocation.needs_save:  # saving would copy the state in the middle of others' steps
                continue
            if allocation.is_reused:
                n_reused += allocation.reserved
            else:
                others.append(allocation)
        self.cells = min(self.min_cells + n_reused, self.max_cells)
        return excess(others, self.min_cells)

    def evicted(self, allocation: Allocation) -> None:
        """Remember ``allocation``, which was evicted because of this limit."""
        if len(allocation.tokens) <= self.max_cells:  # a longer one would not stay anyway
            self._ghosts.append(Ghost(allocation.principal, allocation.adapters, allocation.tokens, allocation.used_at))
        n_tokens = sum([len(ghost.tokens) for ghost in self._ghosts])
        n_old = 0
        for ghost in self._ghosts:
            is_old = self.n_rows - ghost.used_at > self._keep_rows
            if not is_old and len(self._ghosts) - n_old <= MAX_GHOSTS and n_tokens <= self.max_ghost_tokens:
                break
            n_tokens -= len(ghost.tokens)
            n_old += 1
        del self._ghosts[:n_old]

    def missed(self, allocation: Allocation, n_shared: int) -> bool:
        """Whether a sequence that was evicted had more of a request's prompt than the cache has; forgets that sequence.

        Args:
            allocation: that of the request, which is not private.
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
            self._ghosts.remove(best)
        return best is not None

    def forget(self, tokens: Tokens, principal: str) -> None:
        """Forget what ``tokens`` of ``principal`` begin with."""
        self._ghosts = [
            ghost
            for ghost in self._ghosts
            if ghost.principal != principal or common_prefix(ghost.tokens, tokens) < len(ghost.tokens)
        ]


def excess(idle: Collection[Allocation], limit: float) -> list[Allocation]:
    """The allocations to evict so that the others hold at most ``limit`` cells.

    Those that exceed the limit alone go first, then the longest idle.

    Args:
        idle: the longest idle first.
    """
    victims = [allocation for allocation in idle if allocation.reserved > limit]
    left = sum([allocation.reserved for allocation in idle]) - sum([allocation.reserved for allocation in victims])
    for allocation in idle:
        if left <= limit:
            break
        if allocation.reserved <= limit:
            victims.append(allocation)
            left -= allocation.reserved
    return victims
