"""Reservation and eviction of sequences, cells and checkpoints.

Every request reserves its cells before it starts.  Ended requests leave idle allocations.  The pool evicts the longest
idle one first; with per-sequence KV, one whose sequence id lies between busy ones.  An idle allocation that must be
saved first stays until it is saved, marked ``cells_wanted``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import attrs

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.checkpoints import Checkpoint, CheckpointIds, least_useful
from uma_trio.daemon.kv.idle_limit import MAX_IDLE_FRACTION, IdleLimit, excess
from uma_trio.daemon.kv.lost_prefixes import LostPrefixes
from uma_trio.engine_link.kv_ops import DropCheckpoint, KvOp, SaveCheckpoint, Truncate
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.usage import LossCause

LOW_ROOM_FRACTION: Final = 0.125
"""The pool is low when less than this fraction of its sequences or cells is free.  Idle allocations are then saved
ahead of the request that needs their cells."""


@attrs.frozen(kw_only=True)
class KvMemory:
    """The engine's memory for keys and values, and what can be done with it."""

    n_sequences: int
    """Number of sequence ids, ``0`` to ``n_sequences - 1``."""
    n_cells: int
    """Cells of the whole cache."""
    cells_per_sequence: int
    """Maximum number of cells of one sequence; ``n_cells`` if the cache is unified."""
    unified: bool = True
    """All sequences share the cells.  Copies are then free, but idle cells may slow down attention."""
    can_truncate: bool = True
    """The last tokens of a sequence can be removed.  A recurrent memory cannot; it needs checkpoints."""
    max_checkpoints: int = 0
    """Maximum number of checkpoints that the engine keeps for a memory that cannot be truncated.  With 0, such a memory reuses
    whole sequences only."""
    state_can_truncate: bool = True
    """The last tokens of a loaded state can be removed, too.  A sliding-window memory's states hold the last window only."""


class Pool:
    """Owns all allocations and collects the operations for the engine.

    Args:
        idle_limit: counts the rows that tell how long an allocation was idle; ``KvCache`` applies it.
        clock: the current time, for ``lost``.
    """

    def __init__(
        self, memory: KvMemory, idle_limit: IdleLimit | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.memory = memory
        self.idle_limit = idle_limit
        self.lost = LostPrefixes(clock)
        """What left the KV cache lately."""
        self.allocations: dict[int, Allocation] = {}
        """All allocations by sequence id."""
        self.idle: dict[int, Allocation] = {}
        """Idle allocations by sequence id, the longest idle first."""
        self.reserved = 0
        """Cells of busy and idle allocations."""
        self.idle_cells = 0
        self.checkpoint_ids = CheckpointIds(0 if memory.can_truncate else memory.max_checkpoints)
        self.ops: list[KvOp] = []
        """Operations for the engine's next step, in order."""
        self.evicted_total = 0
        self.changes = 0
        """Increases whenever a request that found no room should try again."""
        self._free_ids = set(range(memory.n_sequences))

    @property
    def largest(self) -> int:
        """Maximum number of cells that a request can reserve in an empty cache."""
        return min(self.memory.n_cells, self.memory.cells_per_sequence)

    @property
    def is_low(self) -> bool:
        """Few sequences or cells are free; see ``LOW_ROOM_FRACTION``."""
        few = len(self._free_ids) < max(1.0, LOW_ROOM_FRACTION * self.memory.n_sequences)
        return few or self.memory.n_cells - self.reserved < LOW_ROOM_FRACTION * self.memory.n_cells

    def has(self, allocation: Allocation) -> bool:
        """Whether ``allocation`` still owns its sequence."""
        return self.allocations.get(allocation.seq_id) is allocation

    # -- life of an allocation ------------------------------------------------------------------

    def admit(self, allocation: Allocation) -> None:
        """Give ``allocation`` the lowest free sequence id; the caller has made room for it."""
        allocation.seq_id = min(self._free_ids)
        self._free_ids.remove(allocation.seq_id)
        self.allocations[allocation.seq_id] = allocation
        self.reserved += allocation.own_cells

    def make_idle(self, allocation: Allocation, tokens: TokenIds, at: float) -> None:
        """Keep ``allocation``, whose request ended at time ``at`` and which holds ``tokens``, while there is room."""
        self.reserved += len(tokens) - allocation.reserved
        allocation.tokens, allocation.reserved, allocation.is_idle, allocation.leader = tokens, len(tokens), True, None
        allocation.idle_since, allocation.save_settled = at, False
        allocation.n_reused, allocation.n_uncut = min(allocation.n_reused, len(tokens)), len(tokens)
        allocation.used_at = 0 if self.idle_limit is None else self.idle_limit.n_rows
        self.idle[allocation.seq_id] = allocation
        self.idle_cells += allocation.reserved

    def shorten(self, allocation: Allocation) -> None:
        """Free the cells that ``allocation``, which is idle and was truncated, no longer needs."""
        n_freed = allocation.reserved - allocation.n_tokens
        allocation.tokens, allocation.reserved = allocation.tokens[: allocation.n_tokens], allocation.n_tokens
        self.reserved -= n_freed
        self.idle_cells -= n_freed
        self.changes += 1

    def hand_over(self, source: Allocation, allocation: Allocation) -> None:
        """Give the sequence of ``source``, which is idle, to ``allocation`` with all its tokens and checkpoints."""
        del self.idle[source.seq_id]
        self.idle_cells -= source.reserved
        self.reserved += allocation.reserved - source.reserved
        allocation.seq_id, allocation.truncation_floor = source.seq_id, source.truncation_floor
        allocation.take_cells(source)
        allocation.checkpoints, source.checkpoints = source.checkpoints, ()
        self.allocations[allocation.seq_id] = allocation

    def remove(self, allocation: Allocation) -> None:
        """Free the sequence and its cells.  The engine removes the tokens at the start of its next step."""
        if allocation.is_idle:
            del self.idle[allocation.seq_id]
            self.idle_cells -= allocation.reserved
        self.reserved -= allocation.own_cells
        del self.allocations[allocation.seq_id]
        self.changes += 1
        self.ops.append(Truncate(allocation.seq_id))
        self.drop_checkpoints(allocation, allocation.checkpoints)
        allocation.awaits_state = False
        self._free_ids.add(allocation.seq_id)

    def clear(self, *, lost: bool) -> None:
        """Start over after a failed step: busy allocations hold no tokens, idle ones are removed.

        Args:
            lost: the engine's cache is empty.  If false, the engine removes all tokens in its next step.
        """
        for allocation in list(self.idle.values()):
            self.lost.remember(allocation, "engine")
            self.remove(allocation)
        for allocation in self.allocations.values():
            allocation.truncation_floor = 0
            allocation.resize(0)
            if not allocation.awaits_state:  # otherwise its checkpoints are still to be loaded
                self.drop_checkpoints(allocation, allocation.checkpoints)
        self.ops[:] = [] if lost else [op for op in self.ops if isinstance(op, DropCheckpoint)]
        if not lost:
            self.ops += [Truncate(seq_id) for seq_id in sorted([*self.allocations, *self._free_ids])]

    # -- adjacency ------------------------------------------------------------------------------

    def settle(self, allocation: Allocation) -> None:
        """Move ``allocation``, which holds no tokens, to the sequence id with the most busy neighbours."""
        idle = [n for n, other in self.idle.items() if not other.needs_save] if self._prefers_neighbours else ()
        best = max([allocation.seq_id, *sorted(self._free_ids), *idle], key=self._n_busy_neighbours)
        if best != allocation.seq_id:
            if best in self.idle:
                self._evict([self.idle[best]], allocation.principal)
            self._free_ids.remove(best)
            self._free_ids.add(allocation.seq_id)
            del self.allocations[allocation.seq_id]
            self.allocations[best] = allocation
            allocation.seq_id = best

    @property
    def _prefers_neighbours(self) -> bool:
        """Adjacent busy sequences are worth more than the tokens of idle ones.

        With per-sequence KV, llama.cpp decodes adjacent sequence ids together.  Four streams of a Q8_0 model on a CPU
        took 14 ms together and 31 ms one by one.
        """
        return not self.memory.unified and len(self.allocations) - len(self.idle) > 2

    def _n_busy_neighbours(self, seq_id: int) -> int:
        neighbours = [self.allocations.get(seq_id - 1), self.allocations.get(seq_id + 1)]
        return sum([other is not None and not other.is_idle and other.n_tokens > 0 for other in neighbours])

    # -- eviction -------------------------------------------------------------------------------

    def make_room(self, cells: int, *, keep: Allocation | None, n_sequences: int, principal: str) -> bool:
        """Evict idle allocations, the longest idle first, until ``cells`` more can be reserved.

        Evicts nothing if that would not be enough, or while one of the victims must be saved first.

        Args:
            keep: never evict this one.
            n_sequences: this many free sequence ids are needed as well.
            principal: of the request that needs the room.

        Returns:
            Whether there is room now.
        """
        missing = self.reserved + cells - self.memory.n_cells
        missing_ids = n_sequences - len(self._free_ids)
        candidates = [allocation for allocation in self.idle.values() if allocation is not keep]
        if self._prefers_neighbours:
            candidates.sort(key=lambda allocation: -self._n_busy_neighbours(allocation.seq_id))
        victims = []
        for allocation in candidates:
            if missing <= 0 and missing_ids <= 0:
                break
            victims.append(allocation)
            missing -= allocation.reserved
            missing_ids -= 1
        if missing > 0 or missing_ids > 0:
            return False
        return self._evict(victims, principal)

    def trim_idle(self) -> None:
        """Evict idle allocations until they hold at most ``MAX_IDLE_FRACTION`` of the cells.

        First evicts sequences that exceed the limit alone.
        """
        limit = MAX_IDLE_FRACTION * self.memory.n_cells
        if self.idle_cells > limit:
            idle = list(self.idle.values())
            self.evict_each([idle[n] for n in excess([allocation.reserved for allocation in idle], limit)])

    def _evict(self, victims: Collection[Allocation], principal: str) -> bool:
        """Evict all ``victims`` for ``principal``, or none while some must be saved; returns whether they are gone."""
        unsaved = [allocation for allocation in victims if allocation.needs_save]
        for allocation in unsaved:
            allocation.cells_wanted = True
        if not unsaved:
            self.evict_each(victims, "room", principal)
        return not unsaved

    def evict_each(
        self, victims: Collection[Allocation], cause: LossCause = "limit", principal: str | None = None
    ) -> None:
        """Evict ``victims``, and mark those that must be saved first.

        Args:
            principal: who needs the place; ``None`` if nobody does.
        """
        for allocation in victims:
            if allocation.needs_save:
                allocation.cells_wanted = True
            else:
                self.evicted_total += 1
                self.lost.remember(allocation, cause, principal)
                self.remove(allocation)

    # -- checkpoints ----------------------------------------------------------------------------

    def new_checkpoint(self, allocation: Allocation, length: int) -> Checkpoint | None:
        """Return a number for a new checkpoint of ``allocation``.

        At the limit this drops a checkpoint of the longest idle allocation that has one, or else of ``allocation``.

        Returns:
            ``None`` if busy allocations hold all checkpoints.
        """
        while len(self.checkpoint_ids) >= self.checkpoint_ids.max_checkpoints:
            holder = next((other for other in [*self.idle.values(), allocation] if other.checkpoints), None)
            if holder is None:
                return None
            self.drop_checkpoints(holder, [least_useful(holder.checkpoints)])
        return self.checkpoint_ids.new(length)

    def drop_checkpoints(self, allocation: Allocation, checkpoints: Collection[Checkpoint]) -> None:
        """Remove ``checkpoints`` from ``allocation``; the engine drops those that no other allocation has."""
        if checkpoints:
            allocation.checkpoints = tuple(
                [checkpoint for checkpoint in allocation.checkpoints if checkpoint not in checkpoints]
            )
            self.ops += [DropCheckpoint(number) for number in self.checkpoint_ids.drop(checkpoints)]

    def is_pending(self, checkpoint: Checkpoint) -> bool:
        """Whether the engine has yet to save ``checkpoint``: no step has run since its sequence reached this length."""
        return any(isinstance(op, SaveCheckpoint) and op.checkpoint == checkpoint.id for op in self.ops)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up."""
        allocations = self.allocations
        everyone = allocations.values()
        shared = {node for allocation in everyone if allocation.shared for node in allocation.shared.path()}
        own = sum(allocation.own_cells for allocation in everyone)
        assert self.reserved == own + sum(node.n_cells for node in shared) <= self.memory.n_cells
        assert all(0 <= allocation.n_tokens <= allocation.reserved <= self.largest for allocation in everyone)
        assert all(allocation.seq_id == seq_id for seq_id, allocation in allocations.items())
        assert self.idle == {seq_id: allocation for seq_id, allocation in allocations.items() if allocation.is_idle}
        assert self.idle_cells == sum(allocation.reserved for allocation in self.idle.values())
        assert all(allocation.n_tokens == len(allocation.tokens) for allocation in self.idle.values())
        assert not any(allocation.private for allocation in self.idle.values())
        assert not any(allocation.is_idle and allocation.awaits_state for allocation in everyone)
        assert not any(allocation.n_tokens for allocation in everyone if allocation.awaits_state)
        assert not self._free_ids & set(allocations)
        self.checkpoint_ids.check_integrity([allocation.checkpoints for allocation in everyone])
