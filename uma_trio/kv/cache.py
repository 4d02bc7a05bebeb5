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

An idle sequence whose tokens are to outlive it (``durable``) is saved before its cells go to somebody else: it is
marked, and the request that needs them waits until it is saved or has been given up.  Where a saved state has more
of a prompt than any sequence, and loading is predicted to be faster than computing, the request waits for that.

A memory that cannot be cut is put back to a checkpoint.  One is made where a request goes on with a sequence, that is at
the end of a turn, before its first token is fed; and shortly before the end of a prompt, where reading pauses for it.

Pure bookkeeping: what is to be done to the engine's cache is returned as edits; saving and loading is done by whoever
asks for ``to_save`` and is told ``Placement.saved``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import attrs

from uma_trio.kv.checkpoints import APART, BEFORE_END, EACH, Checkpoint, Checkpoints, Marks, latest, least
from uma_trio.kv.edits import Copy, Edit, Forget, Mark, Remove
from uma_trio.kv.prefix import WORTH_SHARING, Tokens, common
from uma_trio.kv.shelf import Saved, Shelf

IDLE_SHARE: Final = 0.25
"""Most of a unified cache that idle sequences may hold: attention passes over their cells for every token."""


SHORT_SHARE: Final = 0.125
"""Room is running short when less than this share of the sequences or of the cells is free: what would have to be
saved before it can go is saved ahead of the request that needs its place."""


@attrs.define(eq=False)
class Entry:
    """One sequence in use, busy or idle.  To others a handle."""

    tenant: int
    rank: int
    """Nobody waits for a sequence of a greater one."""
    tokens: Tokens
    """Of a busy one its prompt; of an idle one all that it holds."""
    reserved: int
    private: bool
    """Neither shared nor kept."""
    durable: bool = False
    """To be saved before its cells go to somebody else."""
    used: int = 0
    floor: int = 0
    """Tokens of which none can be removed without all, where the memory can be rewound at all."""
    idle: bool = False
    idle_since: float = 0.0
    saved: bool = False
    """All that it holds is on the shelf, or was given up."""
    wanted: bool = False
    """Somebody waits for its cells."""
    forgotten: bool = False
    """Nothing of it is to be kept, also if it is being saved just now."""
    restores: bool = False
    """Waits for a saved state to be loaded."""
    leader: Entry | None = None
    """Holds less than is shared with it so far, and is waited for."""
    until: int = 0
    """Tokens shared with the leader."""
    points: Checkpoints = ()
    """Where it can go back to, of a memory that cannot be cut."""
    pause: int = 0
    """When it holds so many tokens a checkpoint is made; 0: never."""
    seq_id: int = -1


@attrs.frozen
class Placement:
    """A request has got a sequence."""

    seq_id: int
    held: int
    """Tokens of its prompt that the sequence holds."""
    waits: bool = False
    """For another sequence to hold what it shares with that one; see ``KvCache.followed``."""
    saved: Saved | None = None
    """Waits for this state to be loaded into its sequence; see ``KvCache.restored``."""
    entry: Entry | None = None
    """What to call it by then."""


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
    saved_states: int
    """On the shelf."""
    saved_bytes: int


class KvCache:
    """Hands out sequence ids with a number of cells.

    Args:
        n_sequences: ids are ``0`` to ``n_sequences - 1``.
        n_cells: of the whole cache.
        cells_per_sequence: the most that one sequence can have; ``n_cells`` where the cache is unified.
        unified: copies are bookkeeping, and idle sequences take others' room and time.
        rewinds: a sequence's last tokens can be removed; a recurrent memory cannot.
        checkpoints: that the engine keeps at most, of a memory that cannot; 0: its sequences go on whole or not at all.
        states_rewind: those of a loaded state can, too; of a sliding-window memory it holds the last window alone.
        reuse: whether tokens are shared and kept at all.
        worth_loading: (tokens that need not be computed, bytes of the state) -> whether loading is faster.
    """

    def __init__(
        self,
        *,
        n_sequences: int,
        n_cells: int,
        cells_per_sequence: int,
        unified: bool = True,
        rewinds: bool = True,
        checkpoints: int = 0,
        states_rewind: bool = True,
        reuse: bool = True,
        worth_loading: Callable[[int, int], bool] = lambda tokens, n_bytes: True,
    ) -> None:
        self._cells = n_cells
        self._cells_per_sequence = cells_per_sequence
        self._unified = unified
        self._rewinds = rewinds
        self._marks = Marks(0 if rewinds else checkpoints)
        self._reuse = reuse
        self._worth_loading = worth_loading
        self._states_rewind = rewinds and states_rewind
        self.shelf = Shelf(rewinds=self._states_rewind)
        self._free_ids = set(range(n_sequences))
        self._entries: dict[int, Entry] = {}
        self._idle: dict[int, Entry] = {}
        """Longest idle first."""
        self._idle_cells = 0
        self._saving: set[Entry] = set()
        """Those that are on their way to the shelf, although their cells may have gone."""
        self._followers: dict[int, Entry] = {}
        self._reserved = 0
        """By busy and idle ones."""
        self._edits: list[Edit] = []
        self.evicted_total = 0
        self.changes = 0
        """Rises when a request for which there was no room may find some."""
        # a copy between streams moves the whole of a sequence's share: some tokens are computed sooner
        self._worth_copying = WORTH_SHARING if unified else max(WORTH_SHARING, cells_per_sequence // 64)

    @property
    def largest(self) -> int:
        """Cells that one sequence could have if it were alone."""
        return min(self._cells, self._cells_per_sequence)

    # -- requests -------------------------------------------------------------------------------

    def place(
        self,
        prompt: Tokens,
        cells: int,
        *,
        tenant: int = 0,
        rank: int = 0,
        private: bool = False,
        durable: bool = False,
    ) -> Placement | None:
        """A sequence with room for ``cells``, or ``None`` while there is none.

        At least one token of the prompt is left to be computed: the logits after it are wanted.

        Args:
            prompt: ``[n]`` token ids, at least one.
            cells: for these and for what may be generated.
            tenant: only what was this one's is shared.
            rank: class; only a busy sequence of the same or a lesser one is waited for.
            private: share nothing with others, and keep nothing for them.
            durable: what it leaves behind is to be saved before it goes.

        Raises:
            ValueError: there never will be one: ``cells`` is more than ``largest``.
        """
        if not 0 < cells <= self.largest:
            raise ValueError(f"{cells} cells asked for; a sequence has 1 to {self.largest}")
        entry = Entry(tenant, rank, prompt, cells, private or not self._reuse, durable)
        source, shared = self._longest(entry)
        saved = self._better_saved(entry, shared)
        if saved is not None:
            return self._restoring(entry, saved)
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
            if self._loses(source, shared):
                source.wanted = True
                return None
            if not self._make_room(cells - source.reserved, spare=source, sequence=False):
                return None
            return self._take_over(source, shared, entry)
        return None

    def settle(self, seq_id: int) -> int:
        """Where the request that was given ``seq_id`` had better begin, now that it does: it is moved there."""
        entry = self._entries[seq_id]
        if self._unified or entry.used or entry.restores:
            return seq_id
        idle = [n for n, other in self._idle.items() if not self._must_be_saved(other)] if self._crowds else ()
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
        if cells == entry.pause:
            self._mark(entry)

    def pause(self, seq_id: int) -> int:
        """Where reading the prompt of ``seq_id`` is to pause: a step ends there.  0: nowhere."""
        entry = self._entries[seq_id]
        at = len(entry.tokens) - BEFORE_END
        entry.pause = at if self._marks.most and not entry.private and at - entry.used >= APART else 0
        return entry.pause

    def rewind(self, seq_id: int, length: int) -> None:
        """What ``seq_id`` holds beyond ``length`` tokens leaves the cache."""
        entry = self._entries[seq_id]
        if length < entry.used:
            self._edits.append(Remove(seq_id, length, self._mark_at(entry, length)))
            entry.used = length
            self._drop(entry, [point for point in entry.points if point.length > length])

    def end(self, seq_id: int, tokens: Tokens | None = None, *, at: float = 0.0) -> None:
        """The request has ended.

        Args:
            tokens: the first of what the sequence holds, to be kept for others; ``None`` keeps nothing.
            at: the present.
        """
        self.changes += 1
        entry = self._entries[seq_id]
        self._followers.pop(seq_id, None)
        kept = 0 if tokens is None or entry.private else self._within(entry, len(tokens))
        if tokens is None or kept < WORTH_SHARING:
            self._remove(entry)
            return
        tokens = tokens[:kept]
        self.rewind(seq_id, kept)
        self._reserved += len(tokens) - entry.reserved
        entry.tokens, entry.reserved, entry.idle, entry.leader = tokens, len(tokens), True, None
        entry.idle_since, entry.saved = at, False
        self._idle[seq_id] = entry
        self._idle_cells += entry.reserved

    def followed(self, stalled: Collection[int] = ()) -> list[tuple[int, int]]:
        """Those that need to wait for another sequence no longer: (sequence, tokens that it holds).

        To be called before each step, when what the step before feeds is booked.

        Args:
            stalled: sequences that do not advance; nobody waits for them.
        """
        left: dict[int, Entry] = {}
        """Their leaders are gone, or will not come to hold what was waited for."""
        ready = []
        for seq_id, entry in list(self._followers.items()):
            leader = entry.leader
            assert leader is not None
            there = self._there(leader)
            if not there or not self._comes_to(leader, entry, stalled):
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

    def _comes_to(self, leader: Entry, entry: Entry, stalled: Collection[int]) -> bool:
        """Whether ``leader`` has what ``entry`` waits for, or will have it."""
        if leader.used >= entry.until:
            return self._within(leader, entry.until) == entry.until
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
        for entry in self._entries.values():
            entry.used = entry.floor = 0
            if not entry.restores:  # its own are to be loaded yet
                self._drop(entry, entry.points)
        self._edits = [] if lost else [edit for edit in self._edits if isinstance(edit, Forget)]
        if not lost:
            self._edits += [Remove(seq_id) for seq_id in sorted([*self._entries, *self._free_ids])]

    # -- saved states ---------------------------------------------------------------------------

    def to_save(self, idle_before: float) -> Entry | None:
        """The idle sequence that is to be saved next: whose cells are waited for, then the longest idle.

        Args:
            idle_before: one that became idle before this; any one while room is running short.
        """
        unsaved = [
            entry
            for entry in self._idle.values()
            if self._must_be_saved(entry) and entry not in self._saving
        ]
        chosen = next((entry for entry in unsaved if entry.wanted), None)
        if chosen is None and unsaved and (self._is_short or unsaved[0].idle_since <= idle_before):
            chosen = unsaved[0]
        return chosen

    def save(self, entry: Entry) -> None:
        """``entry`` is on its way to the shelf: ``saved``, ``give_up`` or ``not_saved`` follows."""
        self._saving.add(entry)

    @property
    def somebody_waits(self) -> bool:
        """Cells are wanted that must be saved first."""
        return any(entry.wanted and self._must_be_saved(entry) for entry in self._idle.values())

    @property
    def has_unsaved(self) -> bool:
        """Some idle sequence is to be saved sooner or later."""
        return any(self._must_be_saved(entry) for entry in self._idle.values())

    def may_save(self, entry: Entry) -> bool:
        """Whether ``entry`` is still there, as it was."""
        return self._there(entry) and entry.idle

    def saved(self, entry: Entry, state: Saved) -> list[str]:
        """What ``entry`` holds, or held, is on the shelf as ``state``; names that leave it: see ``Shelf.add``."""
        self.changes += 1
        self._saving.discard(entry)
        entry.saved = True
        return [state.name] if entry.forgotten else self.shelf.add(state)

    def not_saved(self, entry: Entry) -> None:
        """``entry`` was needed before it could be saved."""
        self._saving.discard(entry)

    @property
    def is_saving(self) -> bool:
        """Something is on its way to the shelf."""
        return bool(self._saving)

    def give_up(self, entry: Entry) -> None:
        """``entry`` cannot be saved: its cells can go."""
        self.changes += 1
        self._saving.discard(entry)
        entry.saved = True

    def may_restore(self, entry: Entry) -> bool:
        """Whether ``entry`` is still there, and waits for its state."""
        return self._there(entry) and entry.restores

    def restored(self, entry: Entry, state: Saved | None) -> int | None:
        """The state that ``entry`` waited for is in its sequence, or (``None``) is not to be had.

        Returns:
            Tokens of the prompt that the sequence holds; ``None`` if its request has gone.
        """
        if not self.may_restore(entry):
            return None
        entry.restores = False
        if state is None:
            self._drop(entry, entry.points)
        else:
            entry.used = len(state.tokens)
            entry.floor = 0 if self._states_rewind else entry.used
            self.rewind(entry.seq_id, self._within(entry, common(entry.tokens[:-1], state.tokens)))
            self._mark(entry)
        return entry.used

    def restoring(self, entry: Entry, state: Saved) -> Checkpoints:
        """Those of ``state``'s checkpoints that are to be loaded with it into ``entry``, which waits for it."""
        if not self._there(entry):
            return ()
        shared = common(entry.tokens[:-1], state.tokens)
        points: list[Checkpoint] = []
        for length, _ in reversed(state.checkpoints):
            if length <= shared and len(points) < EACH and self._has_mark_for(entry):
                points.insert(0, self._marks.new(length))
        entry.points = tuple(points)
        return entry.points

    def forget(self, tokens: Tokens, *, tenant: int, needed: Callable[[Tokens], bool]) -> list[str]:
        """Idle sequences and saved states of the first of ``tokens`` go, if nobody needs them.

        Args:
            needed: whether a list of tokens is the beginning of something that goes on.

        Returns:
            Names of states that are on the shelf no longer.
        """
        for entry in {*self._idle.values(), *self._saving}:
            mine = entry.tenant == tenant and common(entry.tokens, tokens) == len(entry.tokens)
            if mine and not needed(entry.tokens):
                entry.forgotten = True
                if self.may_save(entry):
                    self._remove(entry)
        names = self.shelf.within(tokens, tenant=tenant, needed=needed)
        for name in names:
            self.shelf.discard(name)
        return names

    def _better_saved(self, entry: Entry, shared: int) -> Saved | None:
        """A state that is worth loading, if ``shared`` tokens can be had without."""
        if entry.private or not len(self.shelf):
            return None
        state, length = self.shelf.longest(entry.tokens[:-1], tenant=entry.tenant, most=entry.reserved)
        if state is None or length - shared < WORTH_SHARING or not self._worth_loading(length - shared, state.n_bytes):
            return None
        return state

    def _restoring(self, entry: Entry, state: Saved) -> Placement | None:
        if not self._make_room(entry.reserved, spare=None, sequence=True):
            return None
        self._admit(entry)
        entry.restores = True
        return Placement(entry.seq_id, 0, waits=True, saved=state, entry=entry)

    def _must_be_saved(self, entry: Entry) -> bool:
        return entry.durable and not entry.saved

    @property
    def _is_short(self) -> bool:
        n_sequences = len(self._free_ids) + len(self._entries)
        few = len(self._free_ids) < max(1.0, SHORT_SHARE * n_sequences)
        return few or self._cells - self._reserved < SHORT_SHARE * self._cells

    def _there(self, entry: Entry) -> bool:
        return self._entries.get(entry.seq_id) is entry

    # -- where a request starts -----------------------------------------------------------------

    def _longest(
        self, entry: Entry, *, stalled: Collection[int] = (), besides: Collection[int] = ()
    ) -> tuple[Entry | None, int]:
        """The sequence that shares the longest beginning with ``entry``'s prompt, and how much is of use.

        Args:
            stalled: nobody waits for these; what they hold is of use.
            besides: these are of none.
        """
        if entry.private:
            return None, 0
        prompt = entry.tokens[:-1]
        found: Entry | None = None
        best = (WORTH_SHARING, -1, False, 0)
        for other in self._entries.values():
            if other.tenant != entry.tenant or other.private or other is entry or other.seq_id in besides:
                continue
            if len(prompt) < best[0] or len(other.tokens) < best[0] or self._waits_for(other, entry):
                continue
            shared = common(prompt, other.tokens)
            if not other.idle and (other.rank > entry.rank or other.seq_id in stalled):
                shared = min(shared, other.used)
            shared = self._within(other, shared) if other.idle or self._rewinds else self._back(other, shared)
            # of equals one that need not be waited for, is free for the taking, and has little behind what is shared
            quality = (shared, min(shared, other.used), other.idle, -other.used)
            if quality > best:
                found, best = other, quality
        return found, best[0]

    def _within(self, entry: Entry, length: int) -> int:
        """To how many tokens what ``entry`` holds can be cut: ``length``, or fewer.  All of it, if that is no more."""
        if length >= entry.used or (self._rewinds and length >= entry.floor):
            return length
        return self._back(entry, length)

    def _back(self, entry: Entry, length: int) -> int:
        """How many tokens, ``length`` at most, the last fitting checkpoint of ``entry`` has."""
        point = latest(entry.points, length)
        return 0 if point is None else point.length

    def _waits_for(self, entry: Entry, other: Entry) -> bool:
        at: Entry | None = entry
        while at is not None:
            if at is other:
                return True
            at = at.leader
        return False

    def _may_take_over(self, source: Entry, shared: int) -> bool:
        """Whether what ``source`` holds behind the shared beginning may be lost."""
        return source.used - shared <= shared and not self._loses(source, shared)

    def _loses(self, source: Entry, shared: int) -> bool:
        """Whether more than a few tokens behind the shared beginning are nowhere else."""
        return source.used - shared >= WORTH_SHARING and self._must_be_saved(source)

    def _take_over(self, source: Entry, shared: int, entry: Entry) -> Placement:
        """``entry`` goes on with the sequence of ``source``, which is idle."""
        del self._idle[source.seq_id]
        self._idle_cells -= source.reserved
        self._reserved += entry.reserved - source.reserved
        entry.seq_id, entry.used, entry.floor = source.seq_id, source.used, source.floor
        entry.points, source.points = source.points, ()
        self._entries[entry.seq_id] = entry
        self.rewind(entry.seq_id, shared)
        self._mark(entry)
        return Placement(entry.seq_id, shared)

    def _branch(self, entry: Entry, source: Entry, shared: int) -> None:
        """``entry``, which holds nothing, gets what it shares with ``source``, now or later."""
        if shared < self._worth_copying:
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

    def _copy(self, source: Entry, entry: Entry, length: int) -> None:
        self._edits.append(Copy(source.seq_id, entry.seq_id, length, self._mark_at(source, length)))
        entry.used, entry.floor, entry.leader = length, source.floor, None
        entry.points = tuple([point for point in source.points if point.length <= length])
        self._marks.share(entry.points)

    # -- checkpoints ----------------------------------------------------------------------------

    def _mark(self, entry: Entry) -> None:
        """What ``entry`` holds when all edits and steps are done can be gone back to, if that is worth it."""
        last = entry.points[-1].length if entry.points else 0
        if entry.used - last < APART:
            return
        if len(entry.points) >= EACH:
            self._drop(entry, [least(entry.points)])
        if self._has_mark_for(entry):
            point = self._marks.new(entry.used)
            entry.points = (*entry.points, point)
            self._edits.append(Mark(entry.seq_id, point.mark))

    def _has_mark_for(self, entry: Entry) -> bool:
        """See that one more checkpoint can be kept: the longest idle sequence has one less, or ``entry`` itself."""
        while len(self._marks) >= self._marks.most:
            holder = next((other for other in [*self._idle.values(), entry] if other.points), None)
            if holder is None:
                return False
            self._drop(holder, [least(holder.points)])
        return True

    def _mark_at(self, entry: Entry, length: int) -> int | None:
        point = latest(entry.points, length)
        return point.mark if point is not None and point.length == length < entry.used else None

    def _drop(self, entry: Entry, points: Collection[Checkpoint]) -> None:
        """``entry`` goes back there no longer."""
        if points:
            entry.points = tuple([point for point in entry.points if point not in points])
            self._edits += [Forget(mark) for mark in self._marks.drop(points)]

    # -- room -----------------------------------------------------------------------------------

    def _admit(self, entry: Entry) -> None:
        """Give ``entry`` a sequence, the lowest, so that few sequences stay few; one is free."""
        entry.seq_id = min(self._free_ids)
        self._free_ids.remove(entry.seq_id)
        self._entries[entry.seq_id] = entry
        self._reserved += entry.reserved

    def _make_room(self, cells: int, *, spare: Entry | None, sequence: bool) -> bool:
        """Evict idle sequences, the longest idle first, until ``cells`` more can be reserved.

        Nobody is evicted if that would not do, or while one of them must be saved first.

        Args:
            spare: this one stays.
            sequence: an id is wanted as well.
        """
        missing = self._reserved + cells - self._cells
        wants_id = sequence and not self._free_ids
        able = [entry for entry in self._idle.values() if entry is not spare]
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

    def _trim(self) -> None:
        """Idle sequences hold their share at most; what is more than that by itself goes first.

        Not while nobody is served: then they slow nobody down.
        """
        if len(self._entries) == len(self._idle):
            return
        most = IDLE_SHARE * self._cells
        self._evict_each([entry for entry in self._idle.values() if entry.reserved > most])
        excess = self._idle_cells - most
        victims = []
        for entry in self._idle.values():
            if excess <= 0:
                break
            victims.append(entry)
            excess -= entry.reserved
        self._evict_each(victims)

    def _evict(self, victims: Collection[Entry]) -> bool:
        """All of them, or none while some must be saved."""
        unsaved = [entry for entry in victims if self._must_be_saved(entry)]
        for entry in unsaved:
            entry.wanted = True
        if not unsaved:
            self._evict_each(victims)
        return not unsaved

    def _evict_each(self, victims: Collection[Entry]) -> None:
        for entry in victims:
            if self._must_be_saved(entry):
                entry.wanted = True
            else:
                self.evicted_total += 1
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        """Give back the sequence and its cells.  Its tokens leave the cache with the next edits."""
        if entry.idle:
            del self._idle[entry.seq_id]
            self._idle_cells -= entry.reserved
        self._reserved -= entry.reserved
        del self._entries[entry.seq_id]
        self.changes += 1
        self._edits.append(Remove(entry.seq_id))
        self._drop(entry, entry.points)
        entry.restores = False
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
            saved_states=len(self.shelf),
            saved_bytes=self.shelf.n_bytes,
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
        assert not any(entry.idle and entry.restores for entry in entries.values())
        assert not any(entry.used for entry in entries.values() if entry.restores)
        assert not self._free_ids & set(entries)
        self._marks.check_integrity([entry.points for entry in entries.values()])
