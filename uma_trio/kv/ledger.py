"""Sequences and KV cells: who has reserved what.

A request gets a sequence only together with room for its whole prompt and all tokens that it may
generate.  So "the cache is full" is an answer to one request before it starts, and never a failure of
those that run.
"""

from __future__ import annotations

import heapq

import attrs


@attrs.define
class _Entry:
    reserved: int
    used: int = 0


@attrs.frozen
class LedgerStatistics:
    """How full the cache is."""

    sequences: int
    """Sequences in use."""
    cells_reserved: int
    cells_used: int
    cells: int
    """KV cells that there are."""


class Ledger:
    """Hands out sequence ids with a number of cells.

    Args:
        n_sequences: ids are ``0`` to ``n_sequences - 1``.
        n_cells: of the whole cache.
        cells_per_sequence: the most that one sequence can have; ``n_cells`` where the cache is unified.
    """

    def __init__(self, *, n_sequences: int, n_cells: int, cells_per_sequence: int) -> None:
        self._cells = n_cells
        self._cells_per_sequence = cells_per_sequence
        self._free_ids = list(range(n_sequences))
        self._entries: dict[int, _Entry] = {}
        self._reserved = 0

    @property
    def largest(self) -> int:
        """Cells that one sequence could have if it were alone."""
        return min(self._cells, self._cells_per_sequence)

    def reserve(self, cells: int) -> int | None:
        """A sequence with room for ``cells``, or ``None`` while there is none.

        Raises:
            ValueError: there never will be one: ``cells`` is more than ``largest``.
        """
        if not 0 < cells <= self.largest:
            raise ValueError(f"{cells} cells asked for; a sequence has 1 to {self.largest}")
        if not self._free_ids or self._reserved + cells > self._cells:
            return None
        seq_id = heapq.heappop(self._free_ids)  # the lowest, so that few sequences stay few
        self._entries[seq_id] = _Entry(cells)
        self._reserved += cells
        return seq_id

    def use(self, seq_id: int, cells: int) -> None:
        """``cells`` more tokens of ``seq_id`` go into the cache."""
        entry = self._entries[seq_id]
        entry.used += cells
        if entry.used > entry.reserved:
            raise AssertionError(f"sequence {seq_id} uses {entry.used} of {entry.reserved} reserved cells")

    def forget(self, seq_id: int) -> None:
        """The cache no longer holds anything of ``seq_id``; its reservation stays."""
        self._entries[seq_id].used = 0

    def release(self, seq_id: int) -> None:
        """Give back the sequence and its cells.  Its tokens must be out of the cache before it is used again."""
        self._reserved -= self._entries.pop(seq_id).reserved
        heapq.heappush(self._free_ids, seq_id)

    def statistics(self) -> LedgerStatistics:
        used = sum(entry.used for entry in self._entries.values())
        return LedgerStatistics(len(self._entries), self._reserved, used, self._cells)

    def check_integrity(self) -> None:
        """Everything adds up, or AssertionError."""
        assert self._reserved == sum(entry.reserved for entry in self._entries.values()) <= self._cells
        assert all(0 <= entry.used <= entry.reserved for entry in self._entries.values())
        assert not set(self._free_ids) & set(self._entries)
        assert len(self._free_ids) == len(set(self._free_ids))
