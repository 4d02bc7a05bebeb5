"""What is to be saved before its cells go, and which saved state a prompt had better wait for.

An idle sequence whose tokens are to outlive it (``durable``) is saved before its cells go to somebody else: it is
marked, and the request that needs them waits until it is saved or has been given up.  Where a saved state has more
of a prompt than any sequence, and loading is predicted to be faster than computing, the request waits for that.

Saving and loading is done by whoever asks for ``to_save`` and is told ``Placement.saved``.
"""

from __future__ import annotations

from collections.abc import Callable

from uma_trio.kv.checkpoints import EACH, Checkpoint, Checkpoints
from uma_trio.kv.entry import Entry
from uma_trio.kv.pool import Pool
from uma_trio.kv.prefix import WORTH_SHARING, Tokens, common
from uma_trio.kv.rewinding import Rewinding
from uma_trio.kv.shelf import Saved, Shelf


class Saving:
    """What of ``pool`` goes to the shelf, and comes back.

    Args:
        worth_loading: (tokens that need not be computed, bytes of the state) -> whether loading is faster.
    """

    def __init__(self, pool: Pool, rewinding: Rewinding, worth_loading: Callable[[int, int], bool]) -> None:
        self._pool = pool
        self._rewinding = rewinding
        self._worth_loading = worth_loading
        self.shelf = Shelf(rewinds=rewinding.states_rewind)
        self._saving: set[Entry] = set()
        """Those that are on their way to the shelf, although their cells may have gone."""

    # -- to the shelf ---------------------------------------------------------------------------

    def to_save(self, idle_before: float) -> Entry | None:
        """The idle sequence that is to be saved next: whose cells are waited for, then the longest idle.

        Args:
            idle_before: one that became idle before this; any one while room is running short.
        """
        unsaved = [entry for entry in self._pool.idle.values() if entry.unsaved and entry not in self._saving]
        chosen = next((entry for entry in unsaved if entry.wanted), None)
        if chosen is None and unsaved and (self._pool.is_short or unsaved[0].idle_since <= idle_before):
            chosen = unsaved[0]
        return chosen

    def save(self, entry: Entry) -> None:
        """``entry`` is on its way to the shelf: ``saved``, ``give_up`` or ``not_saved`` follows."""
        self._saving.add(entry)

    @property
    def somebody_waits(self) -> bool:
        """Cells are wanted that must be saved first."""
        return any(entry.wanted and entry.unsaved for entry in self._pool.idle.values())

    @property
    def has_unsaved(self) -> bool:
        """Some idle sequence is to be saved sooner or later."""
        return any(entry.unsaved for entry in self._pool.idle.values())

    @property
    def is_saving(self) -> bool:
        """Something is on its way to the shelf."""
        return bool(self._saving)

    def may_save(self, entry: Entry) -> bool:
        """Whether ``entry`` is still there, as it was."""
        return self._pool.has(entry) and entry.idle

    def saved(self, entry: Entry, state: Saved) -> list[str]:
        """What ``entry`` holds, or held, is on the shelf as ``state``; names that leave it: see ``Shelf.add``."""
        self.give_up(entry)
        return [state.name] if entry.forgotten else self.shelf.add(state)

    def not_saved(self, entry: Entry) -> None:
        """``entry`` was needed before it could be saved."""
        self._saving.discard(entry)

    def give_up(self, entry: Entry) -> None:
        """``entry`` cannot be saved: its cells can go."""
        self._pool.changes += 1
        self._saving.discard(entry)
        entry.saved = True

    def forget(self, tokens: Tokens, *, tenant: int, needed: Callable[[Tokens], bool]) -> list[str]:
        """Idle sequences and saved states of the first of ``tokens`` go, if nobody needs them.

        Args:
            needed: whether a list of tokens is the beginning of something that goes on.

        Returns:
            Names of states that are on the shelf no longer.
        """
        for entry in {*self._pool.idle.values(), *self._saving}:
            mine = entry.tenant == tenant and common(entry.tokens, tokens) == len(entry.tokens)
            if mine and not needed(entry.tokens):
                entry.forgotten = True
                if self.may_save(entry):
                    self._pool.remove(entry)
        names = self.shelf.within(tokens, tenant=tenant, needed=needed)
        for name in names:
            self.shelf.discard(name)
        return names

    # -- back from it ---------------------------------------------------------------------------

    def better(self, entry: Entry, shared: int) -> Saved | None:
        """A state that is worth loading for ``entry``, if ``shared`` tokens can be had without."""
        if entry.private or not len(self.shelf):
            return None
        state, length = self.shelf.longest(entry.tokens[:-1], tenant=entry.tenant, most=entry.reserved)
        if state is None or length - shared < WORTH_SHARING or not self._worth_loading(length - shared, state.n_bytes):
            return None
        return state

    def may_restore(self, entry: Entry) -> bool:
        """Whether ``entry`` is still there, and waits for its state."""
        return self._pool.has(entry) and entry.restores

    def restoring(self, entry: Entry, state: Saved) -> Checkpoints:
        """Those of ``state``'s checkpoints that are to be loaded with it into ``entry``, which waits for it."""
        if not self._pool.has(entry):
            return ()
        shared = common(entry.tokens[:-1], state.tokens)
        points: list[Checkpoint] = []
        for length, _ in reversed(state.checkpoints):
            if length <= shared and len(points) < EACH:
                point = self._pool.mark(entry, length)
                if point is not None:
                    points.insert(0, point)
        entry.points = tuple(points)
        return entry.points

    def restored(self, entry: Entry, state: Saved | None) -> int | None:
        """The state that ``entry`` waited for is in its sequence, or (``None``) is not to be had.

        Returns:
            Tokens of the prompt that the sequence holds; ``None`` if its request has gone.
        """
        if not self.may_restore(entry):
            return None
        entry.restores = False
        if state is None:
            self._pool.drop(entry, entry.points)
        else:
            self._rewinding.loaded(entry, len(state.tokens))
            kept = self._rewinding.within(entry, common(entry.tokens[:-1], state.tokens))
            self._rewinding.cut(entry, kept)
            self._rewinding.mark(entry)
        return entry.used
