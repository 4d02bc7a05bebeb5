"""KV offload decisions: which idle sequence to save next, and which saved state a request should load.

The cells of a ``durable`` idle allocation are not reused before it has been saved.  The request that needs them waits
until the allocation is saved or saving is given up.  A request waits for a saved state if the state has more of its
prompt than any sequence, and if loading is predicted to be faster than computing.

The caller moves the data: it saves what ``to_save`` returns and loads ``NewAllocation.saved``.
"""

from __future__ import annotations

from collections.abc import Callable

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.checkpoints import Checkpoint, Checkpoints
from uma_trio.daemon.kv.offload_index import OffloadIndex, SavedState
from uma_trio.daemon.kv.pool import Pool
from uma_trio.daemon.kv.truncation import Truncation
from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix


class OffloadPlanner:
    """Chooses what to swap out of ``pool`` and what to swap in.

    Args:
        worth_loading: (tokens that loading saves computing, bytes of the state) -> whether loading is faster.
    """

    def __init__(self, pool: Pool, truncation: Truncation, worth_loading: Callable[[int, int], bool]) -> None:
        self._pool = pool
        self._truncation = truncation
        self._worth_loading = worth_loading
        self.index = OffloadIndex(can_truncate=truncation.state_can_truncate)
        self._saving: set[Allocation] = set()
        """Allocations that are being saved; their cells may be gone already."""

    # -- swap out -------------------------------------------------------------------------------

    def to_save(self, idle_before: float) -> Allocation | None:
        """The idle allocation to save next, or ``None``.

        Allocations whose cells a request waits for come first, then the longest idle.

        Args:
            idle_before: save only what has been idle since before this time.  Ignored while the pool is low.
        """
        unsaved = [
            allocation
            for allocation in self._pool.idle.values()
            if allocation.needs_save and allocation not in self._saving
        ]
        chosen = next((allocation for allocation in unsaved if allocation.cells_wanted), None)
        if chosen is None and unsaved and (self._pool.is_low or unsaved[0].idle_since <= idle_before):
            chosen = unsaved[0]
        return chosen

    def unsaved_of(self, tokens: TokenIds, *, principal: str) -> list[Allocation]:
        """The idle allocations with a beginning of ``tokens`` that have yet to be saved."""
        return [
            allocation
            for allocation in self._pool.idle.values()
            if allocation.needs_save
            and allocation not in self._saving
            and allocation.principal == principal
            and common_prefix(allocation.tokens, tokens) == len(allocation.tokens)
        ]

    def begin_save(self, allocation: Allocation) -> None:
        """Mark ``allocation`` as being saved.  The caller ends that with ``saved``, ``give_up`` or ``cancel_save``."""
        self._saving.add(allocation)

    @property
    def blocks_requests(self) -> bool:
        """A request waits for cells that must be saved first."""
        return any(allocation.cells_wanted and allocation.needs_save for allocation in self._pool.idle.values())

    @property
    def has_unsaved(self) -> bool:
        """Some idle allocation has yet to be saved."""
        return any(allocation.needs_save for allocation in self._pool.idle.values())

    @property
    def is_saving(self) -> bool:
        """Some allocation is being saved."""
        return bool(self._saving)

    def may_save(self, allocation: Allocation) -> bool:
        """Whether ``allocation`` is still idle and in the cache."""
        return self._pool.has(allocation) and allocation.is_idle

    def saved(self, allocation: Allocation, state: SavedState) -> list[str]:
        """Record that ``allocation`` was saved as ``state``.

        Returns:
            Names of states to delete: those that ``state`` makes redundant, or ``state`` itself if it was forgotten.
        """
        self.give_up(allocation)
        return [state.name] if allocation.is_forgotten else self.index.add(state)

    def cancel_save(self, allocation: Allocation) -> None:
        """Record that ``allocation`` was used or removed before it could be saved."""
        self._saving.discard(allocation)

    def give_up(self, allocation: Allocation) -> None:
        """Record that ``allocation`` will not be saved.  Its cells can be reused."""
        self._pool.changes += 1
        self._saving.discard(allocation)
        allocation.save_settled = True

    def forget(self, tokens: TokenIds, *, principal: str, needed: Callable[[TokenIds], bool]) -> list[str]:
        """Remove idle allocations and saved states whose tokens are a prefix of ``tokens``.

        Args:
            needed: whether something else still needs these tokens.

        Returns:
            Names of the states that left the index.
        """
        for allocation in {*self._pool.idle.values(), *self._saving}:
            is_prefix = common_prefix(allocation.tokens, tokens) == len(allocation.tokens)
            if allocation.principal == principal and is_prefix and not needed(allocation.tokens):
                allocation.is_forgotten = True
                if self.may_save(allocation):
                    self._pool.remove(allocation)
        self._pool.lost.forget(tokens, principal)
        if self._pool.idle_limit is not None:
            self._pool.idle_limit.forget(tokens, principal)
        names = self.index.prefixes_of(tokens, principal=principal, needed=needed)
        for name in names:
            self.index.discard(name)
        return names

    # -- swap in --------------------------------------------------------------------------------

    def state_for(self, allocation: Allocation, n_shared: int) -> SavedState | None:
        """The state that ``allocation`` should load, or ``None``.

        Args:
            n_shared: prompt tokens that it can share with a sequence instead.
        """
        if allocation.private or not len(self.index):
            return None
        prompt = allocation.tokens[:-1]  # the last token is always computed, for its logits
        state, length = self.index.find(
            prompt,
            principal=allocation.principal,
            max_tokens=allocation.reserved,
            adapters=allocation.adapters.key,
        )
        gain = length - n_shared
        if state is None or gain < MIN_SHARED_TOKENS or not self._worth_loading(gain, state.n_bytes):
            return None
        return state

    def may_restore(self, allocation: Allocation) -> bool:
        """Whether ``allocation`` still waits for a saved state."""
        return self._pool.has(allocation) and allocation.awaits_state

    def begin_restore(self, allocation: Allocation, state: SavedState) -> Checkpoints:
        """Choose the checkpoints of ``state`` to load with it into ``allocation``, which waits for it.

        Returns:
            The chosen checkpoints with their new numbers; empty if the request has ended.
        """
        if not self._pool.has(allocation):
            return ()
        shared = common_prefix(allocation.tokens[:-1], state.tokens)
        checkpoints: list[Checkpoint] = []
        for length, _ in reversed(state.checkpoints):
            if length <= shared and len(checkpoints) < MAX_CHECKPOINTS:
                checkpoint = self._pool.new_checkpoint(allocation, length)
                if checkpoint is not None:
                    checkpoints.insert(0, checkpoint)
        allocation.checkpoints = tuple(checkpoints)
        return allocation.checkpoints

    def restored(self, allocation: Allocation, state: SavedState | None) -> bool:
        """Record that ``state`` is in the sequence of ``allocation``, or (``None``) that it cannot be loaded.

        Afterwards ``allocation`` holds the part of the state that its prompt begins with.

        Returns:
            Whether its request is still there.
        """
        if not self.may_restore(allocation):
            return False
        allocation.awaits_state = False
        if state is None:
            self._pool.drop_checkpoints(allocation, allocation.checkpoints)
        else:
            truncation = self._truncation
            truncation.state_loaded(allocation, len(state.tokens))
            shared = common_prefix(allocation.tokens[:-1], state.tokens)
            truncation.truncate(allocation, truncation.longest_within(allocation, shared))
            truncation.save_checkpoint(allocation)
        return True
