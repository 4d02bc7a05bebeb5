"""How far back a sequence can go, and the checkpoints that it takes where its memory cannot be cut.

A memory that cannot be cut is put back to a checkpoint.  One is made where a request goes on with a sequence, that is at
the end of a turn, before its first token is fed; and shortly before the end of a prompt, where reading pauses for it.
"""

from __future__ import annotations

from uma_trio.kv.checkpoints import APART, BEFORE_END, EACH, latest, least
from uma_trio.kv.edits import Copy, Mark, Remove
from uma_trio.kv.entry import Entry
from uma_trio.kv.pool import Pool


class Rewinding:
    """Cuts what sequences of ``pool`` hold, or puts them back.

    Args:
        rewinds: a sequence's last tokens can be removed; a recurrent memory cannot, and goes back to checkpoints.
        states_rewind: those of a loaded state can, too; of a sliding-window memory it holds the last window alone.
    """

    def __init__(self, pool: Pool, *, rewinds: bool, states_rewind: bool) -> None:
        self._pool = pool
        self.rewinds = rewinds
        self.states_rewind = rewinds and states_rewind

    def within(self, entry: Entry, length: int) -> int:
        """To how many tokens what ``entry`` holds can be cut: ``length``, or fewer.  All of it, if that is no more."""
        if length >= entry.used or (self.rewinds and length >= entry.floor):
            return length
        return self.back(entry, length)

    def back(self, entry: Entry, length: int) -> int:
        """How many tokens, ``length`` at most, the last fitting checkpoint of ``entry`` has."""
        point = latest(entry.points, length)
        return 0 if point is None else point.length

    def cut(self, entry: Entry, length: int) -> None:
        """What ``entry`` holds beyond ``length`` tokens, as many as ``within`` says, leaves the cache."""
        if length < entry.used:
            self._pool.edits.append(Remove(entry.seq_id, length, self._mark_at(entry, length)))
            entry.used = length
            self._pool.drop(entry, [point for point in entry.points if point.length > length])

    def copy(self, source: Entry, entry: Entry, length: int) -> None:
        """``entry``, which holds nothing, gets the first ``length`` tokens of ``source``, and what it can go back to."""
        self._pool.edits.append(Copy(source.seq_id, entry.seq_id, length, self._mark_at(source, length)))
        entry.used, entry.floor = length, source.floor
        entry.points = tuple([point for point in source.points if point.length <= length])
        self._pool.marks.share(entry.points)

    def loaded(self, entry: Entry, length: int) -> None:
        """A saved state of ``length`` tokens is in the sequence of ``entry``."""
        entry.used = length
        entry.floor = 0 if self.states_rewind else length

    def pause(self, entry: Entry) -> int:
        """Where reading the prompt of ``entry`` is to pause for a checkpoint; 0: nowhere."""
        at = len(entry.tokens) - BEFORE_END
        entry.pause = at if self._pool.marks.most and not entry.private and at - entry.used >= APART else 0
        return entry.pause

    def mark(self, entry: Entry) -> None:
        """What ``entry`` holds when all edits and steps are done can be gone back to, if that is worth it."""
        last = entry.points[-1].length if entry.points else 0
        if entry.used - last < APART:
            return
        if len(entry.points) >= EACH:
            self._pool.drop(entry, [least(entry.points)])
        point = self._pool.mark(entry, entry.used)
        if point is not None:
            entry.points = (*entry.points, point)
            self._pool.edits.append(Mark(entry.seq_id, point.mark))

    def _mark_at(self, entry: Entry, length: int) -> int | None:
        point = latest(entry.points, length)
        return point.mark if point is not None and point.length == length < entry.used else None
