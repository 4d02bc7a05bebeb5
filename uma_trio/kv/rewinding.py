"""How far back a sequence can go, and the checkpoints that it takes where its memory cannot be cut.

A memory that cannot be cut is put back to a checkpoint.  One is made where a request goes on with a sequence, that is at
the end of a turn, before its first token is fed.  The others are made while a prompt is read, which pauses for them:
where another request that waits for it will leave it, where it leaves what others began with, at some places inside a
long one, and shortly before its end.
"""

from __future__ import annotations

from uma_trio.kv.checkpoints import APART, BEFORE_END, EACH, halves, latest, least
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

    def plan(self, entry: Entry, begins: int, meets: int) -> None:
        """Decide where reading the prompt of ``entry`` is to pause.

        Args:
            begins: tokens of it that need not be read.
            meets: that it has in common with what some sequence was asked: a third one may have the same.
        """
        most, end = self._pool.marks.most, len(entry.tokens) - BEFORE_END
        if not most or entry.private:
            return
        meets = min(meets, end)
        inside = [] if entry.durable else halves(max(begins, meets), end)  # a conversation goes on at its end
        if len(self._pool.marks) + len(inside) >= most:
            inside = []  # nobody loses a checkpoint to one that may be of no use
        entry.pauses, last = (), begins
        for place in (meets, *inside, end):
            if place - last >= APART:
                entry.pauses, last = (*entry.pauses, place), place

    def next_pause(self, entry: Entry) -> int:
        """How many tokens of its prompt ``entry`` holds when reading is to pause; 0: it is read to its end."""
        return next((place for place in entry.pauses if place > entry.used), 0)

    def reach(self, entry: Entry, length: int, *, waits: bool) -> int:
        """How many of the first ``length`` tokens of ``entry``, which is busy, others can get.

        Args:
            waits: they wait until it has read them, and it pauses where that is needed; else what it holds counts.
        """
        if self.rewinds:
            return self.within(entry, length if waits else min(length, entry.used))
        there = self.back(entry, length)
        if not waits or entry.used > length or not self._pool.marks.most:
            return there
        will_be = (entry.until if entry.leader is not None else 0, *entry.pauses)
        there = max([there, *(place for place in will_be if entry.used < place <= length)])
        return length if length - there >= APART and len(entry.pauses) < EACH else there

    def promise(self, entry: Entry, length: int) -> None:
        """Somebody waits for ``entry`` to hold ``length`` tokens, as many as ``reach`` says: it pauses there."""
        if not self.rewinds and length > entry.used and length not in entry.pauses:
            others = [place for place in entry.pauses if not 0 < place - length < APART]
            entry.pauses = tuple(sorted([*others, length]))

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
