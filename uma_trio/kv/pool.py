"""Who holds which of the sequences, cells and checkpoints that there are, and who goes to make room.

Everybody has what was promised: cells are reserved before a request starts.  What a request leaves behind is idle, and
the longest idle goes first.  What is to be saved before it goes stays, marked ``wanted``, until it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from uma_trio.kv.checkpoints import Checkpoint, Marks, least
from uma_trio.kv.edits import Edit, Forget, Remove
from uma_trio.kv.entry import Entry
from uma_trio.kv.prefix import Tokens

IDLE_SHARE: Final = 0.25
"""Most of a unified cache that idle sequences may hold: attention passes over their cells for every token."""

SHORT_SHARE: Final = 0.125
"""Room is running short when less than this share of the sequences or of the cells is free: what would have to be
saved before it can go is saved ahead of the request that needs its place."""


class Pool:
    """Hands out sequences, their cells, and numbers of checkpoints.

    Args:
        n_sequences: ids are ``0`` to ``n_sequences - 1``.
        n_cells: of the whole cache.
        cells_per_sequence: the most that one sequence can have.
        unified: all sequences share the cells.
        checkpoints: that there are at most.
    """

    def __init__(
        self, *, n_sequences: int, n_cells: int, cells_per_sequence: int, unified: bool, checkpoints: int
    ) -> None:
        self.n_cells = n_cells
        self.cells_per_sequence = cells_per_sequence
        self.unified = unified
        self.entries: dict[int, Entry] = {}
        self.idle: dict[int, Entry] = {}
        """Longest idle first."""
        self.reserved = 0
        """Cells, by busy and idle ones."""
        self.idle_cells = 0
        self.marks = Marks(checkpoints)
        self.edits: list[Edit] = []
        """What is to be done to the engine's cache, in order."""
        self.evicted_total = 0
        self.changes = 0
        """Rises when a request for which there was no room may find some."""
        self._free_ids = set(range(n_sequences))

    @property
    def largest(self) -> int:
        """Cells that one sequence could have if it were alone."""
        return min(self.n_cells, self.cells_per_sequence)

    @property
    def is_short(self) -> bool:
        """There is little room left."""
        n_sequences = len(self._free_ids) + len(self.entries)
        few = len(self._free_ids) < max(1.0, SHORT_SHARE * n_sequences)
        return few or self.n_cells - self.reserved < SHORT_SHARE * self.n_cells

    def has(self, entry: Entry) -> bool:
        """``entry`` still has its sequence."""
        return self.entries.get(entry.seq_id) is entry

    # -- from one to the next -------------------------------------------------------------------

    def admit(self, entry: Entry) -> None:
        """Give ``entry`` a sequence, the lowest, so that few sequences stay few; one is free."""
        entry.seq_id = min(self._free_ids)
        self._free_ids.remove(entry.seq_id)
        self.entries[entry.seq_id] = entry
        self.reserved += entry.reserved

    def rest(self, entry: Entry, tokens: Tokens, at: float) -> None:
        """``entry``, which holds ``tokens`` and was busy until the time ``at``, is kept while there is room."""
        self.reserved += len(tokens) - entry.reserved
        entry.tokens, entry.reserved, entry.idle, entry.leader = tokens, len(tokens), True, None
        entry.idle_since, entry.saved = at, False
        self.idle[entry.seq_id] = entry
        self.idle_cells += entry.reserved

    def hand_over(self, source: Entry, entry: Entry) -> None:
        """``entry`` gets the sequence of ``source``, which is idle, with all that it holds."""
        del self.idle[source.seq_id]
        self.idle_cells -= source.reserved
        self.reserved += entry.reserved - source.reserved
        entry.seq_id, entry.used, entry.floor = source.seq_id, source.used, source.floor
        entry.points, source.points = source.points, ()
        self.entries[entry.seq_id] = entry

    def remove(self, entry: Entry) -> None:
        """Give back the sequence and its cells.  Its tokens leave the cache with the next edits."""
        if entry.idle:
            del self.idle[entry.seq_id]
            self.idle_cells -= entry.reserved
        self.reserved -= entry.reserved
        del self.entries[entry.seq_id]
        self.changes += 1
        self.edits.append(Remove(entry.seq_id))
        self.drop(entry, entry.points)
        entry.restores = False
        self._free_ids.add(entry.seq_id)

    def lose(self, *, lost: bool) -> None:
        """Nobody knows what the engine's cache holds: busy ones hold nothing, and idle ones go.

        Args:
            lost: it is empty; else all of it is removed with the next edits.
        """
        for entry in list(self.idle.values()):
            self.remove(entry)
        for entry in self.entries.values():
            entry.used = entry.floor = 0
            if not entry.restores:  # its own are to be loaded yet
                self.drop(entry, entry.points)
        self.edits[:] = [] if lost else [edit for edit in self.edits if isinstance(edit, Forget)]
        if not lost:
            self.edits += [Remove(seq_id) for seq_id in sorted([*self.entries, *self._free_ids])]

    # -- side by side ---------------------------------------------------------------------------

    def settle(self, entry: Entry) -> None:
        """Move ``entry``, which holds nothing yet, to where it is best computed together with others."""
        idle = [n for n, other in self.idle.items() if not other.unsaved] if self._crowds else ()
        best: int = max([entry.seq_id, *sorted(self._free_ids), *idle], key=self._beside_busy)
        if best != entry.seq_id:
            if best in self.idle:
                self.remove(self.idle[best])
            self._free_ids.remove(best)
            self._free_ids.add(entry.seq_id)
            del self.entries[entry.seq_id]
            self.entries[best] = entry
            entry.seq_id = best

    @property
    def _crowds(self) -> bool:
        """Streams side by side are worth more than what idle sequences hold.

        Where each sequence has cells of its own, llama.cpp decodes those together whose ids follow each other; four
        streams of a Q8_0 model on a CPU took 14 ms together and 31 ms each by itself.
        """
        return not self.unified and len(self.entries) - len(self.idle) > 2

    def _beside_busy(self, seq_id: int) -> int:
        near = [self.entries.get(seq_id - 1), self.entries.get(seq_id + 1)]
        return sum([other is not None and not other.idle and other.used > 0 for other in near])

    # -- room -----------------------------------------------------------------------------------

    def make_room(self, cells: int, *, spare: Entry | None, sequence: bool) -> bool:
        """Evict idle sequences, the longest idle first, until ``cells`` more can be reserved.

        Nobody is evicted if that would not do, or while one of them must be saved first.

        Args:
            spare: this one stays.
            sequence: an id is wanted as well.
        """
        missing = self.reserved + cells - self.n_cells
        wants_id = sequence and not self._free_ids
        able = [entry for entry in self.idle.values() if entry is not spare]
        if self._crowds:
            able.sort(key=lambda entry: -self._beside_busy(entry.seq_id))
        victims = []
        for entry in able:
            if missing <= 0 and not wants_id:
                break
            victims.append(entry)
            missing -= entry.reserved
            wants_id = False
        if missing > 0 or wants_id:
            return False
        return self._evict(victims)

    def trim(self) -> None:
        """Idle sequences hold their share at most; what is more than that by itself goes first.

        Not while nobody is served: then they slow nobody down.
        """
        if len(self.entries) == len(self.idle):
            return
        most = IDLE_SHARE * self.n_cells
        self._evict_each([entry for entry in self.idle.values() if entry.reserved > most])
        excess = self.idle_cells - most
        victims = []
        for entry in self.idle.values():
            if excess <= 0:
                break
            victims.append(entry)
            excess -= entry.reserved
        self._evict_each(victims)

    def _evict(self, victims: Collection[Entry]) -> bool:
        """All of them, or none while some must be saved."""
        unsaved = [entry for entry in victims if entry.unsaved]
        for entry in unsaved:
            entry.wanted = True
        if not unsaved:
            self._evict_each(victims)
        return not unsaved

    def _evict_each(self, victims: Collection[Entry]) -> None:
        for entry in victims:
            if entry.unsaved:
                entry.wanted = True
            else:
                self.evicted_total += 1
                self.remove(entry)

    # -- checkpoints ----------------------------------------------------------------------------

    def mark(self, entry: Entry, length: int) -> Checkpoint | None:
        """A number for one more checkpoint of ``entry``: the longest idle has one less, or ``entry`` itself.

        Returns:
            ``None`` if all are busy ones'.
        """
        while len(self.marks) >= self.marks.most:
            holder = next((other for other in [*self.idle.values(), entry] if other.points), None)
            if holder is None:
                return None
            self.drop(holder, [least(holder.points)])
        return self.marks.new(length)

    def drop(self, entry: Entry, points: Collection[Checkpoint]) -> None:
        """``entry`` goes back there no longer."""
        if points:
            entry.points = tuple([point for point in entry.points if point not in points])
            self.edits += [Forget(mark) for mark in self.marks.drop(points)]

    def check_integrity(self) -> None:
        """Everything adds up, or AssertionError."""
        entries = self.entries
        assert self.reserved == sum(entry.reserved for entry in entries.values()) <= self.n_cells
        assert all(0 <= entry.used <= entry.reserved <= self.largest for entry in entries.values())
        assert all(entry.seq_id == seq_id for seq_id, entry in entries.items())
        assert self.idle == {seq_id: entry for seq_id, entry in entries.items() if entry.idle}
        assert self.idle_cells == sum(entry.reserved for entry in self.idle.values())
        assert all(entry.used == len(entry.tokens) for entry in self.idle.values())
        assert not any(entry.private for entry in self.idle.values())
        assert not any(entry.idle and entry.restores for entry in entries.values())
        assert not any(entry.used for entry in entries.values() if entry.restores)
        assert not self._free_ids & set(entries)
        self.marks.check_integrity([entry.points for entry in entries.values()])
