"""The KV cache of one engine: which sequence a request gets, and how much of its prompt is already there.

A request reserves cells for its whole prompt and all tokens that it may generate.  A full cache therefore delays or
refuses a request before it starts, and never fails a running one.  The tokens of an ended request stay until their
cells are needed.

This is pure bookkeeping.  ``take_ops`` returns the operations for the engine, which runs them at the start of its next
step.  ``KvCache`` delegates: ``pool`` reserves and evicts, ``prefix_sharing`` reuses prefixes, ``truncation`` shortens
sequences, ``forks`` copies running ones, ``offload`` saves and loads states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import attrs

from uma_trio.daemon.kv.allocation import Allocation, count_cells
from uma_trio.daemon.kv.cell_map import MAX_BEHIND, CellMap
from uma_trio.daemon.kv.forks import Forks
from uma_trio.daemon.kv.held_prefixes import HeldPrefixes
from uma_trio.daemon.kv.idle_limit import IdleLimit, expected_tokens
from uma_trio.daemon.kv.lost_prefixes import Comparison
from uma_trio.daemon.kv.offload_index import OffloadIndex, SavedState
from uma_trio.daemon.kv.offload_planner import OffloadPlanner
from uma_trio.daemon.kv.pool import KvMemory, Pool
from uma_trio.daemon.kv.prefix_sharing import Match, PrefixSharing
from uma_trio.daemon.kv.truncation import Truncation
from uma_trio.engine_link.kv_ops import KvOp, Truncate
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix

NOTHING_ALIKE: Final = Comparison(0)


@attrs.frozen
class NewAllocation:
    """The sequence that a request got."""

    allocation: Allocation
    n_cached: int
    """Prompt tokens that the sequence already holds, or will when the next operations have run."""
    waits: bool = False
    """The request must not start yet: it waits for ``KvCache.followed``, or, if ``saved`` is set, for
    ``OffloadPlanner.restored``."""
    saved: SavedState | None = None
    """Load this state into the sequence, then call ``OffloadPlanner.restored``."""
    comparison: Comparison = NOTHING_ALIKE
    """How the prompt compares with what the cache has, and has lost."""


@attrs.frozen
class CacheStatistics:
    """Occupancy of the cache."""

    sequences: int
    """Sequences of running requests."""
    cells_reserved: int
    """Cells of running requests."""
    cells_used: int
    """Cells of running requests that hold a token."""
    cells: int
    """Cells of the whole cache."""
    cached_sequences: int
    """Idle sequences, kept for later requests with the same prefix."""
    cached_cells: int
    """Cells of idle sequences."""
    saved_states: int
    """States in the offload index."""
    saved_bytes: int
    """Total size of these states."""


class KvCache:
    """Allocates sequences and cells to requests.

    Args:
        reuse: share prefixes and keep the tokens of ended requests.
        idle_limit: how many cells idle sequences of a unified cache may keep.  For caches that attention scans as a
            whole; otherwise they keep ``MAX_IDLE_FRACTION`` of the cells.
        worth_loading: (tokens that loading saves computing, bytes of the state) -> whether loading is faster.
        worth_copying: as for ``PrefixSharing``.
        clock: the current time, to say when tokens were lost.
    """

    def __init__(
        self,
        memory: KvMemory,
        *,
        reuse: bool = True,
        idle_limit: IdleLimit | None = None,
        worth_loading: Callable[[int, int], bool] = lambda tokens, n_bytes: True,
        worth_copying: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.memory = memory
        self._pool = Pool(memory, idle_limit, clock)
        self._truncation = Truncation(self._pool)
        self._sharing = PrefixSharing(self._pool, self._truncation, worth_copying)
        self._forks = Forks(self._pool, self._truncation)
        self.offload = OffloadPlanner(self._pool, self._truncation, worth_loading)
        """What to save and what to load."""
        self.index: OffloadIndex = self.offload.index
        """The saved states."""
        self._reuse = reuse
        self._idle_limit = idle_limit
        self._cell_map = CellMap(memory.n_cells)

    @property
    def changes(self) -> int:
        """Increases whenever a request for which ``allocate`` returned ``None`` should try again."""
        return self._pool.changes

    def try_again(self) -> None:
        """Have requests that found no room try again."""
        self._pool.changes += 1

    @property
    def evicted_total(self) -> int:
        """Idle sequences that were removed to make room."""
        return self._pool.evicted_total

    # -- requests -------------------------------------------------------------------------------

    def allocate(self, allocation: Allocation, parked: SavedState | None = None) -> NewAllocation | None:
        """Reserve a sequence and its cells for ``allocation``, reusing as much of its prompt as possible.

        At least the last prompt token is left to compute, because sampling needs its logits.

        Args:
            allocation: of a request that has just come, and for which nothing is reserved.
            parked: what this request itself had computed before it lost its place; loaded if no sequence has as much.

        Returns:
            ``None`` if there is no room now.

        Raises:
            ValueError: an empty cache has fewer cells for a sequence, so there will never be room.
        """
        if not 0 < allocation.reserved <= self._pool.largest:
            raise ValueError(f"cannot reserve {allocation.reserved} cells; a sequence has 1 to {self._pool.largest}")
        allocation.private = allocation.private or not self._reuse
        match = self._sharing.find(allocation)
        new = self._allocate(allocation, match, parked)
        if new is None or allocation.private:
            return new
        return attrs.evolve(
            new, comparison=self._pool.lost.compare(allocation, match.nearest, match.n_in_common, match.obstacle)
        )

    def _allocate(self, allocation: Allocation, match: Match, parked: SavedState | None) -> NewAllocation | None:
        pool, sharing, cells = self._pool, self._sharing, allocation.reserved
        source, n_shared, n_in_common, *_ = match
        self._truncation.plan_pauses(allocation, n_shared, n_in_common)
        state = parked
        if parked is None or len(parked.tokens) - n_shared < MIN_SHARED_TOKENS:
            state = self.offload.state_for(allocation, n_shared)
        if state is not None:
            return self._allocate_for_state(allocation, state)
        idle = source if source is not None and source.is_idle else None
        if idle is not None and sharing.may_take_over(idle, n_shared):
            return self._take_over(allocation, idle, n_shared)
        if pool.make_room(cells, keep=source, n_sequences=1, principal=allocation.principal):
            pool.admit(allocation)
            self._record_reuse(allocation, source, n_shared)
            if source is not None:
                sharing.branch(allocation, source, n_shared)
            return NewAllocation(allocation, allocation.n_tokens, waits=allocation.leader is not None)
        if idle is None:
            return None
        if sharing.would_lose_unsaved(idle, n_shared):  # only this sequence could make room, and it must be saved first
            idle.cells_wanted = True
            return None
        return self._take_over(allocation, idle, n_shared)

    def reusable(self, allocation: Allocation) -> int:
        """Tokens of its prompt that ``allocation`` would not have to compute if it were allocated now."""
        allocation.private = allocation.private or not self._reuse
        n_shared = self._sharing.find(allocation).n_shared
        state = self.offload.state_for(allocation, n_shared)
        return n_shared if state is None else common_prefix(allocation.tokens[:-1], state.tokens)

    def _take_over(self, allocation: Allocation, source: Allocation, n_shared: int) -> NewAllocation | None:
        more = allocation.reserved - source.reserved
        if not self._pool.make_room(more, keep=source, n_sequences=0, principal=allocation.principal):
            return None
        if source.n_tokens > n_shared:
            self._pool.lost.remember(source, "continued", allocation.principal)
        self._record_reuse(allocation, source, n_shared)
        allocation.n_reused = max(allocation.n_reused, expected_tokens(allocation, source.n_uncut, n_shared))
        self._sharing.take_over(source, n_shared, allocation)
        return NewAllocation(allocation, n_shared)

    def _record_reuse(self, allocation: Allocation, source: Allocation | None, n_shared: int) -> None:
        """Record which tokens are used again, or would be if the limit had not evicted them, so that they stay longer."""
        limit = self._idle_limit
        if limit is None or allocation.private:
            return
        if source is not None and source.is_idle:
            limit.reused(source, n_shared)
        limit.began(allocation, n_shared)

    def _allocate_for_state(self, allocation: Allocation, state: SavedState) -> NewAllocation | None:
        if not self._pool.make_room(allocation.reserved, keep=None, n_sequences=1, principal=allocation.principal):
            return None
        self._pool.admit(allocation)
        self._record_reuse(allocation, None, 0)
        allocation.awaits_state = True
        return NewAllocation(allocation, 0, waits=True, saved=state)

    def share_prefix(self, allocation: Allocation, tokens: TokenIds) -> None:
        """Let a running sequence that holds nothing yet begin with a prefix of ``tokens`` that another one has.

        For tokens that have become known after ``allocate``: the first text of a controller.  From now on others may
        share them as they share a prompt.  Does nothing if the sequence holds tokens, or waits for some.

        Afterwards the sequence holds ``n_tokens``, or has a ``leader`` and waits for ``followed``.

        Args:
            tokens: ``[n]``, which begin with those of the prompt.
        """
        self._check(allocation)
        if allocation.n_tokens or allocation.leader is not None or allocation.awaits_state or allocation.n_shared:
            return
        allocation.tokens = tokens
        source, n_shared, n_in_common, *_ = self._sharing.find(allocation)
        self._truncation.plan_pauses(allocation, n_shared, n_in_common)
        self._record_reuse(allocation, source, n_shared)
        if source is not None:
            self._sharing.branch(allocation, source, n_shared)

    def lengths_below(self, limit: int) -> dict[int, int]:
        """Tokens that each sequence holds, by its id, without sequences that hold ``limit`` or more."""
        pool = self._pool
        lengths = dict.fromkeys(range(pool.memory.n_sequences), 0)
        lengths.update([(seq_id, allocation.n_tokens) for seq_id, allocation in pool.allocations.items()])
        return {seq_id: n for seq_id, n in lengths.items() if n < limit}

    def settle(self, allocation: Allocation) -> None:
        """Move ``allocation`` to the best free sequence id; ``allocation.seq_id`` may change.

        Call it right before the first step of the request.  Does nothing once the sequence holds tokens.
        """
        self._check(allocation)
        if not (self._pool.memory.unified or allocation.n_tokens or allocation.awaits_state):
            self._pool.settle(allocation)

    def advance(self, allocation: Allocation, n_tokens: int) -> None:
        """Record that the sequence holds ``n_tokens`` tokens in total after a completed step.

        Count rejected draft tokens too and ``truncate`` them afterwards: the engine has computed them.

        Raises:
            AssertionError: ``n_tokens`` exceeds the reserved cells.
        """
        self._check(allocation)
        if self._idle_limit is not None:
            self._idle_limit.n_rows += n_tokens - allocation.n_tokens
        allocation.resize(n_tokens)
        if n_tokens in allocation.pauses:
            self._truncation.save_checkpoint(allocation)

    def next_pause(self, allocation: Allocation) -> int:
        """Prompt length at which the next prefill step must end; 0 if there is none.

        The result changes when other requests arrive, so ask before each step.  No later step that feeds this sequence
        may be submitted before ``advance`` has recorded that length: the engine saves a checkpoint in between.
        """
        self._check(allocation)
        return self._truncation.next_pause(allocation)

    def truncate(self, allocation: Allocation, length: int) -> None:
        """Remove all tokens of the sequence after ``length``, such as rejected drafts."""
        self._check(allocation)
        self._truncation.truncate(allocation, length)

    def backtrack(self, allocation: Allocation, length: int) -> bool:
        """Remove all tokens after ``length``, and more where the memory cannot be truncated there.

        A sequence that goes back behind the point at which it forked no longer shares the cells after ``length``.

        Returns:
            Whether that was possible: it may take cells, and there is no room for them now.
        """
        self._check(allocation)
        if not self._forks.backtrack(allocation, length):
            return False
        allocation.tokens = allocation.tokens[:length]  # what follows is no longer what others may share
        allocation.pauses = tuple([pause for pause in allocation.pauses if pause <= length])
        return True

    def fork(self, allocation: Allocation, n: int, cells: int) -> list[Allocation] | None:
        """Copy a running sequence ``n`` times, with all tokens that it holds; all copies or none.

        In a unified cache the copies share the cells of these tokens.

        Args:
            cells: for the tokens of one copy, shared ones included.

        Returns:
            The copies; ``None`` if there is no room now.
        """
        self._check(allocation)
        return self._forks.fork(allocation, n, cells)

    def cells_to_fork(self, allocation: Allocation, n: int, cells: int) -> int:
        """Cells that ``fork`` needs; more than ``n_cells`` never fit, nor do more forks than sequences."""
        return self._forks.cells_needed(allocation, n, cells)

    def may_compute(self, allocation: Allocation) -> bool:
        """Whether the next step may compute tokens of the sequence.

        After the cache was lost, the first sequence with a shared prefix computes the prefix; the others get a copy.
        """
        return allocation.n_tokens >= allocation.n_shared or self._forks.rejoin(allocation)

    def holds(self, allocation: Allocation, n_tokens: int) -> bool:
        """Whether the request of ``allocation`` still runs, and holds ``n_tokens``."""
        return self._pool.has(allocation) and not allocation.is_idle and allocation.n_tokens == n_tokens

    def release(self, allocation: Allocation, tokens: TokenIds | None = None, *, at: float = 0.0) -> None:
        """End a request.

        If a submitted step still feeds the sequence, ``advance`` to the length after that step first.  Otherwise the
        tokens of the step stay in the engine's cache, unknown to this one.

        Args:
            tokens: the first tokens of the sequence, to keep for later requests; ``None`` keeps nothing.
            at: current time, for ``OffloadPlanner.to_save``.

        Raises:
            AssertionError: ``tokens`` is longer than the sequence.
        """
        self._check(allocation)
        if tokens is not None and len(tokens) > allocation.n_tokens:
            raise AssertionError(f"sequence {allocation.seq_id} holds {allocation.n_tokens} tokens, not {len(tokens)}")
        if self._idle_limit is not None and self._cell_map.n_behind(allocation) > MAX_BEHIND:
            self._follow_cells(in_flight=True)
        self._pool.changes += 1
        self._sharing.stop_waiting(allocation)
        if allocation.shared is not None:  # its tokens stay where its forks are
            tokens = None
            self._forks.part(allocation, 0)
        kept = 0 if tokens is None or allocation.private else self._truncation.longest_within(allocation, len(tokens))
        if tokens is None or kept < MIN_SHARED_TOKENS:
            self._pool.remove(allocation)
        else:
            self._truncation.truncate(allocation, kept)
            self._pool.make_idle(allocation, tokens[:kept], at)

    def _check(self, allocation: Allocation) -> None:
        """Raise KeyError unless a running request owns ``allocation``."""
        if allocation.is_idle or not self._pool.has(allocation):
            raise KeyError(f"no running request has sequence {allocation.seq_id}")

    # -- waiting requests -----------------------------------------------------------------------

    @property
    def has_followers(self) -> bool:
        """Some requests wait for another one to compute a shared prefix."""
        return bool(self._sharing.followers)

    def followed(self, stalled: Collection[int] = ()) -> list[Allocation]:
        """Return the allocations that no longer wait for another sequence; each holds ``n_tokens`` of its prompt.

        Call it before each step, after ``advance`` for the previous one.

        Args:
            stalled: ids of sequences that do not advance; nobody waits for them.
        """
        return self._sharing.followed(stalled)

    # -- operations for the engine --------------------------------------------------------------

    @property
    def has_ops(self) -> bool:
        """Operations for the engine are pending."""
        return bool(self._pool.ops)

    def take_ops(self, *, in_flight: bool = False) -> tuple[KvOp, ...]:
        """Return the operations since the last call.  The next step must carry them.

        Args:
            in_flight: a step is being computed; see ``cells_scanned``.
        """
        self._trim_idle()
        ops = tuple(self._pool.ops)
        self._pool.ops.clear()
        if self._idle_limit is not None and any(isinstance(op, Truncate) for op in ops):
            self._follow_cells(in_flight=in_flight)
        return ops

    def _trim_idle(self) -> None:
        """Evict idle sequences beyond their limits, unless no request runs: their cells then slow nobody down."""
        pool, limit, truncation = self._pool, self._idle_limit, self._truncation
        if not pool.memory.unified or not pool.idle or len(pool.allocations) == len(pool.idle):
            return
        if limit is not None:
            for allocation in pool.idle.values():
                if truncation.longest_within(allocation, allocation.n_reused) != allocation.n_reused:
                    allocation.n_reused = allocation.n_tokens  # it cannot be cut there
            for allocation in limit.victims(pool.idle.values()):
                limit.remember(allocation)
                if allocation.n_reused:
                    truncation.truncate(allocation, allocation.n_reused)
                    pool.shorten(allocation)
                else:
                    pool.evict_each([allocation])
        pool.trim_idle()

    def put_back(self, ops: Sequence[KvOp]) -> None:
        """Queue operations again that ``take_ops`` returned for a step that was not begun."""
        self._pool.ops[:0] = ops

    def clear(self, *, lost: bool = True) -> None:
        """Start over after a failed step: running requests keep their cells but hold no tokens.

        Args:
            lost: the engine's cache is empty.  If false, its content is unknown, and the next operations remove it.
        """
        self._pool.clear(lost=lost)

    # -- inspection -----------------------------------------------------------------------------

    def held(self) -> dict[int, int]:
        """Tokens in the engine's cache after all operations have run, by sequence id; empty sequences are left out."""
        allocations = sorted(self._pool.allocations.items())
        return {seq_id: allocation.n_tokens for seq_id, allocation in allocations if allocation.n_tokens}

    @property
    def idle(self) -> Collection[Allocation]:
        """Sequences of ended requests, kept for prefix reuse."""
        return self._pool.idle.values()

    def held_prefixes(self, step: int) -> HeldPrefixes:
        """Notices when the prefixes that others may share change by ``step`` tokens or more."""
        return HeldPrefixes(self._pool.allocations, self.index, step)

    def cells_scanned(self, n_in_flight: int | None = None) -> int:
        """Cells that attention scans in the next step, without those of its own rows, if it scans the whole cache.

        Attention scans all cells up to the highest one in use, freed cells below it included.  Call it before each
        step, after ``advance`` for the previous one and before ``take_ops``.  Idle sequences beyond their limit are
        evicted here already, so that their cells do not count.

        Args:
            n_in_flight: rows of the step in flight, which ``advance`` has not counted yet; ``None`` if none is.
        """
        self._trim_idle()
        self._follow_cells(in_flight=n_in_flight is not None)
        return self._cell_map.scanned(n_in_flight or 0)

    def _follow_cells(self, *, in_flight: bool) -> None:
        in_batch = [allocation for _, allocation in sorted(self._pool.allocations.items())]
        self._cell_map.follow(in_batch, in_flight=in_flight)

    def _n_cells(self, allocations: Collection[Allocation]) -> int:
        return (
            count_cells(allocations)
            if self._pool.memory.unified
            else sum([allocation.n_tokens for allocation in allocations])
        )

    def statistics(self) -> CacheStatistics:
        """Return the current occupancy."""
        pool = self._pool
        busy = [allocation for allocation in pool.allocations.values() if not allocation.is_idle]
        return CacheStatistics(
            sequences=len(busy),
            cells_reserved=pool.reserved - pool.idle_cells,
            cells_used=self._n_cells(busy),
            cells=pool.memory.n_cells,
            cached_sequences=len(pool.idle),
            cached_cells=pool.idle_cells,
            saved_states=len(self.index),
            saved_bytes=self.index.n_bytes,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up."""
        self._pool.check_integrity()
        self._sharing.check_integrity()
        self._forks.check_integrity()
        self._cell_map.check_integrity()
