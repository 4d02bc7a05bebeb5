"""Which cells of a unified cache llama.cpp uses, to know up to which one attention scans.

Attention scans all cells up to the highest one in use.  llama.cpp gives each new token the lowest free cell, so removed
sequences leave holes, which later tokens fill.  The end of the used cells moves down only when those in use there are
removed.

Source: ``find_slot``, ``seq_rm`` and ``get_n_kv`` in ``src/llama-kv-cache.cpp``.  No sequence loses cells to a sliding
window here: such a model has another cache with all tokens, which this describes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from uma_trio.daemon.kv.allocation import Allocation, CellRun, cells_by_run

MAX_BEHIND: Final = 16
"""Tokens of an ended sequence that may be left out: the rows that followed took cells after theirs."""

Cells: TypeAlias = npt.NDArray[np.intp]
"""``[n]`` numbers of cells."""


class CellMap:
    """Follows the sequences of a unified cache with ``n_cells`` cells."""

    def __init__(self, n_cells: int) -> None:
        self._is_used = np.zeros(n_cells, dtype=np.bool_)
        self._cells: dict[CellRun, array[int]] = {}
        """The cells of each run, by position."""
        self._leaving: list[Cells] = []
        """Cells in use that the next step frees, when the rows of the step in flight have got theirs."""
        self._n_used = 0
        self._end = 0
        """One more than the highest cell in use; 0 if none is."""
        self._first_free = 0
        """All cells below are in use."""

    def scanned(self, n_in_flight: int = 0) -> int:
        """Cells that the attention of the next step scans, without those of its own rows.

        Args:
            n_in_flight: rows of the step in flight, which the sequences do not count yet.
        """
        n_used, end = self._n_used + n_in_flight, self._end
        if not self._leaving or n_used > end:
            return min(max(n_used, end), len(self._is_used))
        staying = self._is_used[:end].copy()
        for cells in self._leaving:
            staying[cells] = False
        return max(_end_of(staying), n_used - sum(map(len, self._leaving)))

    def n_behind(self, allocation: Allocation) -> int:
        """Tokens of ``allocation`` that have no cells here yet."""
        return sum([end - run.start - len(self._cells.get(run, ())) for run, end in allocation.runs()])

    def follow(self, allocations: Iterable[Allocation], *, in_flight: bool) -> None:
        """Give cells to the tokens that steps have computed since the last call, then free those of removed tokens.

        Args:
            allocations: by sequence id, since a step has its rows in that order.
            in_flight: a step is being computed.  Its rows, which the allocations do not count yet, get their cells
                before those of removed tokens are free.
        """
        lengths = cells_by_run(allocations)
        by_one: list[array[int]] = []
        grown: list[tuple[int, array[int]]] = []
        removed: list[Cells] = []
        for run, n in lengths.items():
            cells = self._cells.get(run)
            if cells is None:
                cells = self._cells[run] = array("i")
            change = n - len(cells)
            if change == 1:
                by_one.append(cells)
            elif change > 0:
                grown.append((change, cells))
            elif change < 0:
                removed.append(np.array(cells[n:], dtype=np.intp))
                del cells[n:]
        if len(self._cells) > len(lengths):
            for run in self._cells.keys() - lengths.keys():
                removed.append(np.array(self._cells.pop(run), dtype=np.intp))
        removed = [cells for cells in removed if len(cells)]
        n_grown = len(by_one) + sum([n for n, _ in grown])
        if self._n_used + n_grown > len(self._is_used):  # several steps: the later ones use cells of removed tokens
            self._leaving += removed
            removed = []
            self._free_leaving()
        if n_grown:
            self._grow(by_one, grown)
        if n_grown or not in_flight:
            self._free_leaving()
        self._leaving += removed
        if not in_flight:
            self._free_leaving()

    def _grow(self, by_one: list[array[int]], grown: list[tuple[int, array[int]]]) -> None:
        """Add the lowest free cells: one to each of ``by_one``, then to each of ``grown`` the number next to it."""
        n = len(by_one) + sum([n for n, _ in grown])
        holes = self._first_free + np.flatnonzero(~self._is_used[self._first_free : self._end])[:n]
        numbers = np.concatenate([holes, np.arange(self._end, self._end + n - len(holes))])
        self._is_used[numbers] = True
        self._n_used += n
        self._first_free = int(numbers[-1]) + 1
        self._end = max(self._end, self._first_free)
        free, start = numbers.tolist(), len(by_one)
        for cells, number in zip(by_one, free, strict=False):
            cells.append(number)
        for n, cells in sorted(grown, key=lambda growth: growth[0]):  # a step has streams first, then prompts
            cells.extend(free[start : start + n])
            start += n

    def _free_leaving(self) -> None:
        for cells in self._leaving:
            self._is_used[cells] = False
            self._n_used -= len(cells)
            self._first_free = min(self._first_free, int(cells.min()))
        if self._leaving:
            self._end = _end_of(self._is_used[: self._end])
            self._leaving.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up."""
        cells = [cell for held in self._cells.values() for cell in held]
        cells += [int(cell) for leaving in self._leaving for cell in leaving]
        assert sorted(cells) == np.flatnonzero(self._is_used).tolist()
        assert self._n_used == len(cells)
        assert self._end == max(cells, default=-1) + 1
        assert self._is_used[: self._first_free].all()


def _end_of(is_used: npt.NDArray[np.bool_]) -> int:
    """The number of cells up to the last one in use."""
    return len(is_used) - int(is_used[::-1].argmax()) if is_used.any() else 0
