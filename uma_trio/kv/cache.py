"""Sequences and KV cells: who has reserved what, and whose tokens can serve another request.

A request gets a sequence only together with room for its whole prompt and all tokens that it may
generate.  So "the cache is full" is an answer to one request before it starts, and never a failure of
those that run.

What a request leaves behind stays until its room is needed.  A request whose prompt begins like a
sequence's tokens does not compute them again: it goes on where an idle sequence ends or branches off, gets a copy
of a busy one's beginning, or, where that one is still being read, waits for it.  Of all that only the owner, a
tenant, can see anything: how fast an answer comes would tell others what was asked.

Prefixes are found by comparing the prompt with each sequence, of which a context has 256 at most: 2 us for one
of 2,000 tokens, and no tree to be kept up with each token and each eviction.

Pure bookkeeping: what is to be done to the engine's cache is returned as edits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.kv.edits import Copy, Edit, Remove

Tokens: TypeAlias = npt.NDArray[np.int32]

WORTH_SHARING: Final = 16
"""Tokens; a shorter common beginning is computed again."""

IDLE_SHARE: Final = 0.25
"""Most of a unified cache that idle sequences may hold: attention passes over their cells for every token."""


@attrs.define(eq=False)
class _Entry:
    """One sequence in use, busy or idle."""

    tenant: int
    rank: int
    """Nobody waits for a sequence of a greater one."""
    tokens: Tokens
    """Of a busy one its prompt; of an idle one all that it holds."""
    reserved: int
    private: bool
    """Neither shared nor kept."""
    used: int = 0
    idle: bool = False
    leader: _Entry | None = None
    """Holds less than is shared with it so far, and is waited for."""
    until: int = 0
    """Tokens shared with the leader."""
    seq_id: int = -1


@attrs.frozen
class Placement:
    """A request has got a sequence."""

    seq_id: int
    held: int
    """Tokens of its prompt that the sequence holds."""
    waits: bool = False
    """For another sequence to hold what it shares with that one; see ``KvCache.followed``."""


@attrs.frozen
class CacheStatistics:
    """How full the cache is."""

    sequences: int
    """Sequences of running requests."""
    cells_reserved: int
    cells_used: int
    cells: int
    """KV cells that there are."""
    cached_sequences: int
    """Idle ones, kept for requests that begin alike."""
    cached_cells: int


class KvCache:
    """Hands out sequence ids with a number of cells.

    Args:
        n_sequences: ids are ``0`` to ``n_sequences - 1``.
        n_cells: of the whole cache.
        cells_per_sequence: the most that one sequence can have; ``n_cells`` where the cache is unified.
        unified: copies are bookkeeping, and idle sequences take others' room and time.
        rewinds: a sequence's last tokens can be removed; a recurrent or sliding-window memory cannot.
        reuse: whether tokens are shared and kept at all.
    """

    def __init__(
        self,
        *,
        n_sequences: int,
        n_cells: int,
        cells_per_sequence: int,
        unified: bool = True,
        rewinds: bool = True,
        reuse: bool = True,
    ) -> None:
        self._cells = n_cells
        self._cells_per_sequence = cells_per_sequence
        self._unified = unified
        self._rewinds = rewinds
        self._reuse = reuse
        self._free_ids = set(range(n_sequences))
        self._entries: dict[int, _Entry] = {}
        self._idle: dict[int, _Entry] = {}
        """Longest idle first."""
        self._idle_cells = 0
        self._followers: dict[int, _Entry] = {}
        self._reserved = 0
        """By busy and idle ones."""
        self._edits: list[Edit] = []
        # a copy between streams moves the whole of a sequence's share: some tokens are computed sooner
        self._worth_copying = WORTH_SHARING if unified else max(WORTH_SHARING, cells_per_sequence // 64)

    @property
    def largest(self) -> int:
        """Cells that one sequence could have if it were alone."""
        return min(self._cells, self._cells_per_sequence)

    # -- requests -------------------------------------------------------------------------------

    def place(
        self, prompt: Tokens, cells: int, *, tenant: int = 0, rank: int = 0, private: bool = False
    ) -> Placement | None:
        """A sequence with room for ``cells``, or ``None`` while there is none.

        At least one token of the prompt is left to be computed: the logits after it are wanted.

        Args:
            prompt: ``[n]`` token ids, at least one.
            cells: for these and for what may be generated.
            tenant: only what was this one's is shared.
            rank: class; only a busy sequence of the same or a lesser one is waited for.
            private: share nothing with others, and keep nothing for them.

        Raises:
            ValueError: there never will be one: ``cells`` is more than ``largest``.
        """
        if not 0 < cells <= self.largest:
            raise ValueError(f"{cells} cells asked for; a sequence has 1 to {self.largest}")
        entry = _Entry(tenant, rank, prompt, cells, private or not self._reuse)
        source, shared = self._longest(entry)
        if source is not None and source.idle and self._may_take_over(source, shared):
            if not self._make_room(cells - source.reserved, spare=source, sequence=False):
                return None
            return self._take_over(source, shared, entry)
        if self._make_room(cells, spare=source, sequence=True):
            self._admit(entry)
            if source is not None:
                self._branch(entry, source, shared)
            return Placement(entry.seq_id, entry.used, entry.leader is not None)
        if source is not None and source.idle:  # it would have to go to make room
            if not self._make_room(cells - source.reserved, spare=source, sequence=False):
                return None
            return self._take_over(source, shared, entry)
        return None

    def settle(self, seq_id: int) -> int:
        """Where the request that was given ``seq_id`` had better begin, now that it does: it is moved there."""
        entry = self._entries[seq_id]
        if self._unified or entry.used:
            return seq_id
        idle = self._idle if self._crowds else ()
        best: int = max([seq_id, *sorted(self._free_ids), *idle], key=self._beside_busy)
        if best != seq_id:
            if best in self._idle:
                self._remove(self._idle[best])
            self._free_ids.remove(best)
            self._free_ids.add(seq_id)
            entry.seq_id = best
            del self._entries[seq_id]
            self._entries[best] = entry
            if seq_id in self._followers:
                self._followers[best] = self._followers.pop(seq_id)
        return best

    @property
    def _crowds(self) -> bool:
        """Streams side by side are worth more than what idle sequences hold.

        Where each sequence has cells of its own, llama.cpp decodes those together whose ids follow each other; four
        streams of a Q8_0 model on a CPU took 14 ms together and 31 ms each by itself.
        """
        return not self._unified and len(self._entries) - len(self._idle) > 2

    def _beside_busy(self, seq_id: int) -> int:
        near = [self._entries.get(seq_id - 1), self._entries.get(seq_id + 1)]
        return sum([other is not None and not other.idle and other.used > 0 for other in near])

    def use(self, seq_id: int, cells: int) -> None:
        """The next step makes ``seq_id`` hold ``cells`` tokens in all."""
        entry = self._entries[seq_id]
        if cells > entry.reserved:
            raise AssertionError(f"sequence {seq_id} uses {cells} of {entry.reserved} reserved cells")
        entry.used = cells

    def rewind(self, seq_id: int, length: int) -> None:
        """What ``seq_id`` holds beyond ``length`` tokens leaves the cache."""
        entry = self._entries[seq_id]
        if length < entry.used:
            self._edits.append(Remove(seq_id, length))
            entry.used = length

    def end(self, seq_id: int, tokens: Tokens | None = None) -> None:
        """The request has ended.

        Args:
            tokens: the first of what the sequence holds, to be kept for others; ``None`` keeps nothing.
        """
        entry = self._entries[seq_id]
        self._followers.pop(seq_id, None)
        if tokens is None or entry.private or len(tokens) < WORTH_SHARING:
            self._remove(entry)
            return
        if len(tokens) < entry.used and not self._rewinds:  # the rest would have to be removed
            self._remove(entry)
            return
        self.rewind(seq_id, len(tokens))
        self._reserved += len(tokens) - entry.reserved
        entry.tokens, entry.reserved, entry.idle, entry.leader = tokens, len(tokens), True, None
        self._idle[seq_id] = entry
        self._idle_cells += entry.reserved

    def followed(self, stalled: Collection[int] = ()) -> list[tuple[int, int]]:
        """Those that need to wait for another sequence no longer: (sequence, tokens that it holds).

        To be called before each step, when what the step before feeds is booked.

        Args:
            stalled: sequences that do not advance; nobody waits for them.
        """
        left: dict[int, _Entry] = {}
        """Their leaders are gone, or will not come to hold what was waited for."""
        ready = []
        for seq_id, entry in list(self._followers.items()):
            leader = entry.leader
            assert leader is not None
            there = self._entries.get(leader.seq_id) is leader
            if not there or (leader.used < entry.until and not self._advances(leader, entry, stalled)):
                left[seq_id] = entry
            elif leader.used >= entry.until and not self._is_crowded:
                self._copy(leader, entry, entry.until)
                del self._followers[seq_id]
                ready.append((seq_id, entry.used))
        while left:  # the first goes on with what its leader had, and the others follow it
            seq_id, entry = next(iter(left.items()))
            source, shared = self._longest(entry, stalled=stalled, besides=left)
            del left[seq_id], self._followers[seq_id]
            entry.leader = None
            if source is not None:
                self._branch(entry, source, shared)
            if entry.leader is None:
                ready.append((seq_id, entry.used))
        return ready

    def _advances(self, leader: _Entry, entry: _Entry, stalled: Collection[int]) -> bool:
        return not leader.idle and leader.rank <= entry.rank and leader.seq_id not in stalled

    def take_edits(self) -> tuple[Edit, ...]:
        """What is to be done to the engine's cache before anything else is fed, once."""
        if self._unified:
            self._trim()
        edits = tuple(self._edits)
        self._edits.clear()
        return edits

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    @property
    def has_edits(self) -> bool:
        return bool(self._edits)

    def clear(self, *, lost: bool = True) -> None:
        """Nobody knows what the engine's cache holds.  Busy sequences keep their reservations and hold nothing.

        Args:
            lost: it is empty; else all of it is removed with the next edits.
        """
        for entry in list(self._idle.values()):
            self._remove(entry)
        self._edits.clear()
        for entry in self._entries.values():
            entry.used = 0
        if not lost:
            self._edits += [Remove(seq_id) for seq_id in sorted([*self._entries, *self._free_ids])]

    # -- where a request starts -----------------------------------------------------------------

    def _longest(
        self, entry: _Entry, *, stalled: Collection[int] = (), besides: Collection[int] = ()
    ) -> tuple[_Entry | None, int]:
        """The sequence that shares the longest beginning with ``entry``'s prompt, and how much is of use.

        Args:
            stalled: nobody waits for these; what they hold is of use.
            besides: these are of none.
        """
        if entry.private:
            return None, 0
        prompt = entry.tokens[:-1]
        found: _Entry | None = None
        best = (WORTH_SHARING, -1, False, 0)
        for other in self._entries.values():
            if other.tenant != entry.tenant or other.private or other is entry or other.seq_id in besides:
                continue
            if len(prompt) < best[0] or len(other.tokens) < best[0] or self._waits_for(other, entry):
                continue
            shared = _common(prompt, other.tokens)
            if not other.idle and (other.rank > entry.rank or other.seq_id in stalled):
                shared = min(shared, other.used)
            if not self._rewinds and not (other.idle and shared == other.used):
                continue
            # of equals one that need not be waited for, is free for the taking, and has little behind what is shared
            quality = (shared, min(shared, other.used), other.idle, -other.used)
            if quality > best:
                found, best = other, quality
        return found, best[0]

    def _waits_for(self, entry: _Entry, other: _Entry) -> bool:
        at: _Entry | None = entry
        while at is not None:
            if at is other:
                return True
            at = at.leader
        return False

    def _may_take_over(self, source: _Entry, shared: int) -> bool:
        """Whether what ``source`` holds behind the shared beginning may be lost."""
        return source.used - shared <= shared

    def _take_over(self, source: _Entry, shared: int, entry: _Entry) -> Placement:
        """``entry`` goes on with the sequence of ``source``, which is idle."""
        del self._idle[source.seq_id]
        self._idle_cells -= source.reserved
        self._reserved += entry.reserved - source.reserved
        entry.seq_id, entry.used = source.seq_id, source.used
        self._entries[entry.seq_id] = entry
        self.rewind(entry.seq_id, shared)
        return Placement(entry.seq_id, shared)

    def _branch(self, entry: _Entry, source: _Entry, shared: int) -> None:
        """``entry``, which holds nothing, gets what it shares with ``source``, now or later."""
        if shared < self._worth_copying or not self._rewinds:
            return
        if source.used < shared or self._is_crowded:
            entry.leader, entry.until = source, shared
            self._followers[entry.seq_id] = entry
        else:
            self._copy(source, entry, shared)

    @property
    def _is_crowded(self) -> bool:
        """A copy between streams takes its time: one a step, or everybody would wait for all of them."""
        return not self._unified and any(isinstance(edit, Copy) for edit in self._edits)

    def _copy(self, source: _Entry, entry: _Entry, length: int) -> None:
        self._edits.append(Copy(source.seq_id, entry.seq_id, length))
        entry.used, entry.leader = length, None

    # -- room -----------------------------------------------------------------------------------

    def _admit(self, entry: _Entry) -> None:
        """Give ``entry`` a sequence, the lowest, so that few sequences stay few; one is free."""
        entry.seq_id = min(self._free_ids)
        self._free_ids.remove(entry.seq_id)
        self._entries[entry.seq_id] = entry
        self._reserved += entry.reserved

    def _make_room(self, cells: int, *, spare: _Entry | None, sequence: bool) -> bool:
        """Evict idle sequences, the longest idle first, until ``cells`` more can be reserved.

        Nobody is evicted if that would not do.

        Args:
            spare: this one stays.
            sequence: an id is wanted as well.
        """
        kept = spare.reserved if spare is not None and spare.idle else 0
        others = len(self._idle) - (1 if kept else 0)
        if self._reserved + cells - (self._idle_cells - kept) > self._cells:
            return False
        if sequence and not self._free_ids and not others:
            return False
        while self._reserved + cells > self._cells or (sequence and not self._free_ids):
            self._evict_one(spare)
        return True

    def _trim(self) -> None:
        """Idle sequences hold their share at most; what is more than that by itself goes first."""
        most = IDLE_SHARE * self._cells
        for entry in [entry for entry in self._idle.values() if entry.reserved > most]:
            self._remove(entry)
        while self._idle_cells > most:
            self._evict_one()

    def _evict_one(self, spare: _Entry | None = None) -> None:
        """The longest idle; of those beside busy ones, where that matters."""
        able = [entry for entry in self._idle.values() if entry is not spare]
        self._remove(max(able, key=lambda entry: self._beside_busy(entry.seq_id)) if self._crowds else able[0])

    def _remove(self, entry: _Entry) -> None:
        """Give back the sequence and its cells.  Its tokens leave the cache with the next edits."""
        if entry.idle:
            del self._idle[entry.seq_id]
            self._idle_cells -= entry.reserved
        self._reserved -= entry.reserved
        del self._entries[entry.seq_id]
        self._edits.append(Remove(entry.seq_id))
        self._free_ids.add(entry.seq_id)

    # -- what is told ---------------------------------------------------------------------------

    def held(self) -> dict[int, int]:
        """Tokens that the engine's cache holds when all edits and steps are done, by sequence."""
        return {seq_id: entry.used for seq_id, entry in sorted(self._entries.items()) if entry.used}

    def statistics(self) -> CacheStatistics:
        busy = [entry for entry in self._entries.values() if not entry.idle]
        return CacheStatistics(
            sequences=len(busy),
            cells_reserved=self._reserved - self._idle_cells,
            cells_used=sum(entry.used for entry in busy),
            cells=self._cells,
            cached_sequences=len(self._idle),
            cached_cells=self._idle_cells,
        )

    def check_integrity(self) -> None:
        """Everything adds up, or AssertionError."""
        entries = self._entries
        assert self._reserved == sum(entry.reserved for entry in entries.values()) <= self._cells
        assert all(0 <= entry.used <= entry.reserved <= self.largest for entry in entries.values())
        assert all(entry.seq_id == seq_id for seq_id, entry in entries.items())
        assert self._idle == {seq_id: entry for seq_id, entry in entries.items() if entry.idle}
        assert self._idle_cells == sum(entry.reserved for entry in self._idle.values())
        assert all(entry.used == len(entry.tokens) for entry in self._idle.values())
        assert not any(entry.private for entry in self._idle.values())
        assert self._followers == {seq_id: entry for seq_id, entry in entries.items() if entry.leader is not None}
        assert not self._free_ids & set(entries)


def _common(a: Tokens, b: Tokens) -> int:
    """Tokens at the beginning that both have."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    at = int(differ.argmax())
    return at if differ[at] else n
