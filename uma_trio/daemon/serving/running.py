"""The sequences that have a place in the KV cache: what they find there, and what the next step can compute of them."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Container, Iterator
from operator import attrgetter

import numpy as np
import trio

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.daemon.scheduling import places
from uma_trio.daemon.scheduling.timings import StepTimings
from uma_trio.daemon.serving.offload import Offloader
from uma_trio.daemon.serving.sequence import Sequence, State
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.answers import SequenceInfo
from uma_trio.telemetry.metrics import Telemetry


def cache_for(info: ModelInfo, timings: StepTimings, *, reuse: bool) -> KvCache:
    """The bookkeeping of the KV cache that an engine has."""
    return KvCache(
        KvMemory(
            n_sequences=info.n_seq_max,
            n_cells=info.n_ctx,
            cells_per_sequence=info.n_ctx_seq,
            unified=info.unified,
            can_truncate=info.can_truncate,
            max_checkpoints=info.max_checkpoints,
            state_can_truncate=info.state_can_truncate,
        ),
        reuse=reuse,
        idle_limit=IdleLimit(info.n_ctx) if info.attention_scan is AttentionScan.CACHE else None,
        worth_loading=timings.worth_loading,
        clock=trio.current_time,
    )


class RunningSet:
    """The sequences that have a place in the KV cache.

    Args:
        offloader: is asked to save what must go to make room, and to load what a prompt can use.
    """

    def __init__(self, cache: KvCache, offloader: Offloader, telemetry: Telemetry) -> None:
        self.cache = cache
        self.offloader = offloader
        self._telemetry = telemetry
        self._sequences: dict[Allocation, Sequence] = {}
        self._leaving: list[Allocation] = []
        """Sequences that lose their places together, after the last copy of one of them."""
        self._n_copying = 0
        self._copies: dict[Allocation, SavedState] = {}
        """The copies that are complete."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.allocation in self._sequences

    def by_seq_id(self) -> dict[int, Sequence]:
        """The sequences by the ids that a plan names them by."""
        return {allocation.seq_id: sequence for allocation, sequence in self._sequences.items()}

    def allocate(self, sequence: Sequence) -> bool:
        """Reserve all the cells that ``sequence`` can need, if there are as many."""
        place = sequence.place
        new = self.cache.allocate(_allocation_of(sequence), place.parked)
        if new is None:
            self.offloader.check_for_work()  # something may have to be saved to make room
            return False
        sequence.allocation = allocation = new.allocation
        sequence.state = State.PREFILL
        place.begin(trio.current_time())
        if place.was_preempted:
            sequence.due_at = place.placed_at + sequence.target_itl_ms / 1e3
        times = sequence.times
        if times.admitted_at is None:
            times.admitted_at = place.placed_at
            self._telemetry.record_admission(1e3 * (times.admitted_at - times.arrived_at))
        self._sequences[allocation] = sequence
        if sequence.log is not None:
            sequence.log.attempt()
        if not place.was_preempted:
            sequence.comparison = new.comparison
        if not new.waits:
            self._start_prefill(sequence, new.n_cached)
        if new.saved is not None:
            self.offloader.swap_in(allocation, new.saved)
        if new.saved is place.parked:
            place.parked = None  # goes when it is loaded
        self.unpark(sequence)
        return True

    def reusable(self, sequence: Sequence) -> int:
        """Tokens that ``sequence``, which waits, would find in the KV cache or in a saved state now."""
        return self.cache.reusable(_allocation_of(sequence))

    def share_prefix(self, sequence: Sequence) -> None:
        """Let ``sequence``, of which nothing is computed, begin with what the KV cache has of its known tokens."""
        assert sequence.allocation is not None
        self.cache.share_prefix(sequence.allocation, _known_tokens(sequence))
        if sequence.n_computed:
            self._start_prefill(sequence, sequence.n_computed)
        else:
            sequence.report_prefill(0)
        sequence.go_on()

    def allocate_forks(self, sequence: Sequence, n: int) -> list[Allocation] | None:
        """Copy what ``sequence`` has computed for ``n`` forks, if there is room for all of them."""
        assert sequence.allocation is not None
        allocations = self.cache.fork(sequence.allocation, n, sequence.max_cells)
        if allocations is None:
            self.offloader.check_for_work()  # something may have to be saved to make room
        return allocations

    def begin_forks(self, forks: abc.Sequence[Sequence], allocations: abc.Sequence[Allocation]) -> None:
        """Let ``forks`` run, in the places that were allocated for them."""
        for fork, allocation in zip(forks, allocations, strict=True):
            fork.allocation = allocation
            fork.place.begin(trio.current_time())
            self._sequences[allocation] = fork
            fork.go_on()

    def why_no_fork(self, sequence: Sequence, n: int) -> str | None:
        """Why ``n`` forks of ``sequence`` are not allowed, or can never have room; ``None``: they are, and can."""
        assert sequence.allocation is not None
        if n >= self.cache.memory.n_sequences:
            return f"this daemon computes {self.cache.memory.n_sequences} sequences at a time (--parallel)"
        principal, most = sequence.principal, sequence.principal.max_requests
        now = sum([other.principal.name == principal.name for other in self])
        if most is not None and now + n > most:
            return f"{principal.name} has {now} answers in flight and may have {most}"
        cells = sequence.allocation.reserved + self.cache.cells_to_fork(sequence.allocation, n, sequence.max_cells)
        n_cells = self.cache.memory.n_cells
        if cells > n_cells:
            return f"they could need {cells} cells of the KV cache, which has {n_cells}; ask with a smaller max_tokens"
        return None

    def settle(self, sequence: Sequence) -> None:
        """Move ``sequence``, of which nothing is computed or in flight, to the sequence id that suits best."""
        assert sequence.allocation is not None
        self.cache.settle(sequence.allocation)

    def begin_plan(self, in_flight: Container[Sequence] = ()) -> tuple[list[Sequence], list[Sequence]]:
        """Bring all places up to date before a step is planned, and find what it can compute.

        Sequences whose saved states are loaded now begin, and so do those whose leaders stall.  Each place notes what its
        sequence has got back, and whether its client reads.

        Args:
            in_flight: the sequences that a step in flight computes.

        Returns:
            Sequences that the step can decode, and those that it can prefill; by sequence id.
        """
        for allocation, state in self.offloader.take_swapped_in():
            if self.cache.offload.restored(allocation, state):
                self._start_prefill(self._sequences[allocation], allocation.n_tokens)
        decodes, prefills, stalled = [], [], []
        now = trio.current_time()
        for allocation in sorted(self._sequences, key=attrgetter("seq_id")):
            sequence = self._sequences[allocation]
            if sequence.state is State.FINISHED:
                continue
            place = sequence.place
            if place.was_preempted:
                place.note_progress(now, sequence.n_computed)
            if allocation in self._leaving:
                stalled.append(allocation.seq_id)
                continue
            has_room = sequence.sink.has_room
            if has_room or sequence in in_flight:  # its next token was not held up yet
                place.stalled_at = math.inf
            else:
                sequence.times.paused = True
                place.stalled_at = min(place.stalled_at, now)
            goes_on = has_room and sequence in in_flight and sequence.control.may_run_ahead
            if not goes_on and not self._is_ready(sequence):
                stalled.append(allocation.seq_id)  # it may wait long for its client or its controller
            elif sequence.state is State.DECODE:
                decodes.append(sequence)
            elif not sequence.is_blocked:
                prefills.append(sequence)
        if self.cache.has_followers:
            prefills += self._begin_followers(stalled)
        return decodes, prefills

    def _begin_followers(self, stalled: abc.Sequence[int]) -> list[Sequence]:
        """Let sequences begin with what their leaders have computed, which is enough or stalls.

        Args:
            stalled: sequence ids.

        Returns:
            Those that can go on now.
        """
        found = []
        for allocation in self.cache.followed(stalled):
            sequence = self._sequences[allocation]
            self._start_prefill(sequence, allocation.n_tokens)
            if self._is_ready(sequence):
                found.append(sequence)
        return found

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the next step may compute something of ``sequence``, if no step in flight does."""
        if not sequence.control.exists:
            return sequence.sink.has_room
        assert sequence.allocation is not None
        return sequence.n_computable > sequence.n_computed and self.cache.may_compute(sequence.allocation)

    def _start_prefill(self, sequence: Sequence, n_cached: int) -> None:
        """``sequence`` need not compute its first ``n_cached`` tokens."""
        if not sequence.place.was_preempted:  # what it has computed itself is no reuse
            sequence.n_cached = min(n_cached, len(sequence.prompt.tokens)) if sequence.n_replayed else n_cached
            self._telemetry.record_prefix_reuse(sequence.n_cached)
        sequence.report_prefill(n_cached)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Give the cells of ``sequence`` back.

        Args:
            keep: what it computed stays in the KV cache for others while there is room.
        """
        assert sequence.allocation is not None
        tokens = sequence.computed_tokens() if keep else None
        del self._sequences[sequence.allocation]
        self.cache.release(sequence.allocation, tokens, at=trio.current_time())
        sequence.allocation = None
        self.offloader.check_for_work()

    def room(self) -> places.Room:
        """What the KV cache has, and what of it is free."""
        kv = self.cache.statistics()
        n = self.cache.memory.n_sequences
        return places.Room(n, kv.cells, n - kv.sequences, kv.cells - kv.cells_reserved)

    def preempt(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Take the places of ``sequences``, which no step in flight computes.

        What takes long to compute again is copied first; until then no step computes any of them.  While there is room,
        their tokens also stay in the KV cache.

        Returns:
            Those that have lost their places.  None yet if something is copied: call ``preempt_copied`` later.
        """
        for sequence in sequences:
            assert sequence.allocation is not None
            self._leaving.append(sequence.allocation)
            if self.offloader.worth_parking(sequence.n_computed):
                self._n_copying += 1
                self.offloader.park(sequence.allocation, sequence.computed_tokens())
        return self.preempt_copied()

    @property
    def is_preempting(self) -> bool:
        """Whether sequences are about to lose their places."""
        return bool(self._leaving)

    @property
    def is_copying(self) -> bool:
        """Whether sequences lose their places as soon as they are copied."""
        return self._n_copying > 0

    def preempt_copied(self) -> list[Sequence]:
        """The sequences that lose their places now; none before all copies have ended."""
        for allocation, state in self.offloader.take_parked():
            self._n_copying -= 1
            if state is not None:
                self._copies[allocation] = state
        if self._n_copying or not self._leaving:
            return []
        leaving, copies, self._leaving, self._copies = self._leaving, self._copies, [], {}
        preempted = []
        for allocation in leaving:
            sequence, copied = self._sequences.get(allocation), copies.get(allocation)
            if sequence is not None and sequence.can_yield:
                self._preempt(sequence, copied)
                preempted.append(sequence)
            elif copied is not None:  # it has ended, or its controller is ready meanwhile
                self.offloader.unpark(copied)
        return preempted

    def _preempt(self, sequence: Sequence, copied: SavedState | None) -> None:
        assert sequence.allocation is not None
        sequence.place.end(trio.current_time(), sequence.n_computed, copied)
        if copied is not None:
            sequence.allocation.durable = False  # nobody waits for a second copy on disk
        self.release(sequence, keep=True)
        sequence.state = State.WAITING
        self._telemetry.preemptions_total += 1

    def unpark(self, sequence: Sequence) -> None:
        """Drop the copy of what ``sequence`` held, if there is one."""
        if sequence.place.parked is not None:
            self.offloader.unpark(sequence.place.parked)
            sequence.place.parked = None

    def describe(self) -> list[SequenceInfo]:
        """What the KV cache holds, by sequence id."""
        found = [
            SequenceInfo(
                seq_id=allocation.seq_id,
                state="prefill" if sequence.state is State.PREFILL else "decode",
                cells_used=allocation.n_tokens,
                cells_reserved=allocation.reserved,
                principal=allocation.principal,
                request_id=sequence.request.id,
                session_id=sequence.request.session_id,
                prompt_tokens=len(sequence.prompt.tokens),
                completion_tokens=len(sequence.tokens),
            )
            for allocation, sequence in self._sequences.items()
        ]
        found += [
            SequenceInfo(
                seq_id=idle.seq_id,
                state="cached",
                cells_used=idle.n_tokens,
                cells_reserved=idle.reserved,
                principal=idle.principal,
            )
            for idle in self.cache.idle
        ]
        return sorted(found, key=lambda each: each.seq_id)

    def restart(self) -> None:
        """The KV cache is lost: all sequences are prefilled again from their tokens."""
        for sequence in self:
            sequence.place.lose(sequence.n_computed)
        self.cache.clear(lost=True)
        for sequence in self:
            sequence.n_cached = 0
            if sequence.state is not State.FINISHED:
                sequence.state = State.PREFILL

    def check_integrity(self) -> None:
        """Raise AssertionError unless sequences and KV cache agree."""
        self.cache.check_integrity()
        assert len(self) == self.cache.statistics().sequences
        for allocation, sequence in self._sequences.items():
            assert sequence.allocation is allocation
            assert sequence.state is not State.WAITING


def _allocation_of(sequence: Sequence) -> Allocation:
    """What ``sequence`` needs of the KV cache, and which tokens it shares with others."""
    return Allocation(
        _known_tokens(sequence),
        sequence.max_cells,
        principal=sequence.principal.name,
        adapters=sequence.adapters,
        rank=sequence.priority,
        private=not sequence.request.cache_prompt,
        durable=sequence.durable,
    )


def _known_tokens(sequence: Sequence) -> TokenIds:
    return np.concatenate([sequence.prompt.tokens, np.asarray(sequence.tokens, np.int32)])
