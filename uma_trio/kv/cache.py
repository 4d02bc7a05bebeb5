"""The KV cache of one engine: which sequence a request gets, and what of its prompt is there already.

A request gets a sequence only together with room for its whole prompt and all tokens that it may
generate.  So "the cache is full" is an answer to one request before it starts, and never a failure of
those that run.  What a request leaves behind stays until its room is needed.

Pure bookkeeping: what is to be done to the engine's cache is returned as edits.  ``pool`` knows who holds what,
``sharing`` where prompts begin, ``rewinding`` how far back a sequence can go, ``saving`` what outlives its cells;
what happens to a request is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from uma_trio.kv.edits import Edit
from uma_trio.kv.entry import Entry
from uma_trio.kv.pool import Pool
from uma_trio.kv.prefix import WORTH_SHARING, Tokens
from uma_trio.kv.rewinding import Rewinding
from uma_trio.kv.saving import Saving
from uma_trio.kv.sharing import Sharing
from uma_trio.kv.shelf import Saved


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
        self._pool = Pool(
            n_sequences=n_sequences,
            n_cells=n_cells,
            cells_per_sequence=cells_per_sequence,
            unified=unified,
            checkpoints=0 if rewinds else checkpoints,
        )
        self._entries = self._pool.entries
        self._rewinding = Rewinding(self._pool, rewinds=rewinds, states_rewind=states_rewind)
        self._sharing = Sharing(self._pool, self._rewinding)
        self.saving = Saving(self._pool, self._rewinding, worth_loading)
        """For whoever saves and loads."""
        self.shelf = self.saving.shelf
        self._reuse = reuse

    @property
    def largest(self) -> int:
        """Cells that one sequence could have if it were alone."""
        return self._pool.largest

    @property
    def changes(self) -> int:
        """Rises when a request for which there was no room may find some."""
        return self._pool.changes

    @property
    def evicted_total(self) -> int:
        return self._pool.evicted_total

    # -- a request ------------------------------------------------------------------------------

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
        pool, sharing = self._pool, self._sharing
        entry = Entry(tenant, rank, prompt, cells, private or not self._reuse, durable)
        source, shared, meets = sharing.longest(entry)
        self._rewinding.plan(entry, shared, meets)
        state = self.saving.better(entry, shared)
        if state is not None:
            return self._place_to_restore(entry, state)
        idle = source if source is not None and source.idle else None
        if idle is not None and sharing.may_take_over(idle, shared):
            return self._take_over(entry, idle, shared)
        if pool.make_room(cells, spare=source, sequence=True):
            pool.admit(entry)
            if source is not None:
                sharing.branch(entry, source, shared)
            return Placement(entry.seq_id, entry.used, entry.leader is not None)
        if idle is None:
            return None
        if sharing.loses(idle, shared):  # it would have to go to make room
            idle.wanted = True
            return None
        return self._take_over(entry, idle, shared)

    def _take_over(self, entry: Entry, source: Entry, shared: int) -> Placement | None:
        if not self._pool.make_room(entry.reserved - source.reserved, spare=source, sequence=False):
            return None
        self._sharing.take_over(source, shared, entry)
        return Placement(entry.seq_id, shared)

    def _place_to_restore(self, entry: Entry, state: Saved) -> Placement | None:
        if not self._pool.make_room(entry.reserved, spare=None, sequence=True):
            return None
        self._pool.admit(entry)
        entry.restores = True
        return Placement(entry.seq_id, 0, waits=True, saved=state, entry=entry)

    def settle(self, seq_id: int) -> int:
        """Where the request that was given ``seq_id`` had better begin, now that it does: it is moved there."""
        entry = self._entries[seq_id]
        if not (self._pool.unified or entry.used or entry.restores):
            self._pool.settle(entry)
        return entry.seq_id

    def use(self, seq_id: int, cells: int) -> None:
        """The next step makes ``seq_id`` hold ``cells`` tokens in all."""
        entry = self._entries[seq_id]
        if cells > entry.reserved:
            raise AssertionError(f"sequence {seq_id} uses {cells} of {entry.reserved} reserved cells")
        entry.used = cells
        if cells in entry.pauses:
            self._rewinding.mark(entry)

    def pause(self, seq_id: int) -> int:
        """Tokens of its prompt at which reading ``seq_id`` is to pause next: a step ends there.  0: nowhere.

        Others that come may change that, until they are read.
        """
        return self._rewinding.next_pause(self._entries[seq_id])

    def rewind(self, seq_id: int, length: int) -> None:
        """What ``seq_id`` holds beyond ``length`` tokens leaves the cache."""
        self._rewinding.cut(self._entries[seq_id], length)

    def end(self, seq_id: int, tokens: Tokens | None = None, *, at: float = 0.0) -> None:
        """The request has ended.

        Args:
            tokens: the first of what the sequence holds, to be kept for others; ``None`` keeps nothing.
            at: the present.
        """
        entry = self._entries[seq_id]
        self._pool.changes += 1
        self._sharing.leave(entry)
        kept = 0 if tokens is None or entry.private else self._rewinding.within(entry, len(tokens))
        if tokens is None or kept < WORTH_SHARING:
            self._pool.remove(entry)
        else:
            self._rewinding.cut(entry, kept)
            self._pool.rest(entry, tokens[:kept], at)

    # -- those that wait ------------------------------------------------------------------------

    @property
    def has_followers(self) -> bool:
        """Some requests wait for another to compute what they share."""
        return bool(self._sharing.followers)

    def followed(self, stalled: Collection[int] = ()) -> list[tuple[int, int]]:
        """Those that need to wait for another sequence no longer: (sequence, tokens that it holds).

        To be called before each step, when what the step before feeds is booked.

        Args:
            stalled: sequences that do not advance; nobody waits for them.
        """
        return self._sharing.followed(stalled)

    def restored(self, entry: Entry, state: Saved | None) -> int | None:
        """See ``Saving.restored``."""
        return self.saving.restored(entry, state)

    # -- the engine's cache ---------------------------------------------------------------------

    @property
    def has_edits(self) -> bool:
        return bool(self._pool.edits)

    def take_edits(self) -> tuple[Edit, ...]:
        """What is to be done to the engine's cache before anything else is fed, once."""
        if self._pool.unified:
            self._pool.trim()
        edits = tuple(self._pool.edits)
        self._pool.edits.clear()
        return edits

    def clear(self, *, lost: bool = True) -> None:
        """Nobody knows what the engine's cache holds.  Busy sequences keep their reservations and hold nothing.

        Args:
            lost: it is empty; else all of it is removed with the next edits.
        """
        self._pool.lose(lost=lost)

    # -- what is told ---------------------------------------------------------------------------

    def held(self) -> dict[int, int]:
        """Tokens that the engine's cache holds when all edits and steps are done, by sequence."""
        return {seq_id: entry.used for seq_id, entry in sorted(self._entries.items()) if entry.used}

    def statistics(self) -> CacheStatistics:
        pool = self._pool
        busy = [entry for entry in self._entries.values() if not entry.idle]
        return CacheStatistics(
            sequences=len(busy),
            cells_reserved=pool.reserved - pool.idle_cells,
            cells_used=sum(entry.used for entry in busy),
            cells=pool.n_cells,
            cached_sequences=len(pool.idle),
            cached_cells=pool.idle_cells,
            saved_states=len(self.shelf),
            saved_bytes=self.shelf.n_bytes,
        )

    def check_integrity(self) -> None:
        """Everything adds up, or AssertionError."""
        self._pool.check_integrity()
        self._sharing.check_integrity()
