"""Which sequences wait and which run: who gets a place in the KV cache, and what it finds there."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Container, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np
import trio

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import CacheStatistics, KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.daemon.scheduling import fairness, places
from uma_trio.daemon.scheduling.fairness import Service
from uma_trio.daemon.scheduling.timings import StepTimings
from uma_trio.daemon.scheduling.view import Priority
from uma_trio.daemon.serving.offload import Offloader
from uma_trio.daemon.serving.sequence import Sequence, State
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.errors import KvFull, QueueFull
from uma_trio.protocol.answers import HealthCheck, SequenceInfo
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


NO_SERVICE: Final = Service()

PREEMPT_AFTER_S: Final = 0.5
"""A sequence loses its place to a waiting one if its client has not read for this long."""


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
        self._keeps_room_for: Sequence | None = None
        """The sequence whose forks wait for room."""
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
        if self._is_behind_forks(sequence) or self._is_left_to_others(sequence):
            return False
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

    def keep_room(self, sequence: Sequence | None) -> None:
        """Keep all room that becomes free for forks of ``sequence``, before the requests of its principal that wait.

        Other principals go before the forks as long as they have a smaller share of the places.

        Args:
            sequence: ``None``: no forks wait.
        """
        if self._keeps_room_for is not None and sequence is None:
            self.cache.try_again()
        self._keeps_room_for = sequence

    def _is_behind_forks(self, sequence: Sequence) -> bool:
        """Whether room that becomes free is for forks, and not for ``sequence``."""
        parent = self._keeps_room_for
        return parent is not None and not places.goes_before(
            self._claimant(sequence, NO_SERVICE), parent.principal.name, self._places(NO_SERVICE), self.room()
        )

    def _is_left_to_others(self, sequence: Sequence) -> bool:
        """Whether the room that ``sequence``, of class ``background``, would take is kept for requests of other classes."""
        if sequence.priority is not Priority.BACKGROUND:
            return False
        claimant = self._claimant(sequence, NO_SERVICE)
        room = self.room()
        left = places.room_for(claimant, self._places(NO_SERVICE), room)
        return left != room and (left.free_sequences < 1 or left.free_cells < claimant.cells)

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

    def claim(self, sequence: Sequence, service: Service) -> tuple[list[Sequence], float]:
        """Choose the sequences that lose their places to ``sequence``, which waits, and when they do.

        That is the sequence whose client has not read for the longest time, or those of class ``background``, or those of
        principals above their shares.

        Returns:
            No sequences and infinity if ``sequence`` waits until a place becomes free, which one may soon.
        """
        if self._leaving:
            return [], math.inf
        stalled = min(
            [each for each in self if _is_stalled(each)], key=lambda each: each.place.stalled_at, default=None
        )
        found = ([stalled], stalled.place.stalled_at + PREEMPT_AFTER_S) if stalled is not None else ([], math.inf)
        is_background = sequence.priority is Priority.BACKGROUND
        if all(
            each.principal.name == sequence.principal.name
            and (is_background or each.priority is not Priority.BACKGROUND)
            for each in self
        ):
            return found
        claim = places.claim(self._claimant(sequence, service), self._places(service), self.room())
        if claim is None or claim.due_s >= found[1]:
            return found
        running = [*self]
        return [running[index] for index in claim.victims], claim.due_s

    def claim_spare(self, service: Service) -> list[Sequence]:
        """The ``background`` sequence that gives up its place for the next request, if that delays nobody's first token."""
        others = [each for each in self if each.priority is not Priority.BACKGROUND]
        if self._leaving or len(self) - len(others) < 2 or any(each.state is State.PREFILL for each in others):
            return []
        claim = places.claim_spare(self._places(service), self.room())
        running = [*self]
        return [] if claim is None else [running[index] for index in claim.victims]

    def _claimant(self, sequence: Sequence, service: Service) -> places.Claimant:
        principal = sequence.principal
        return places.Claimant(
            principal=principal.name,
            weight=principal.weight,
            priority=sequence.priority,
            cells=sequence.max_cells,
            service=service.counter(principal.name),
        )

    def _places(self, service: Service) -> list[places.Place]:
        """What the sequences hold, in their order."""
        return [
            places.Place(
                principal=each.principal.name,
                weight=each.principal.weight,
                priority=each.priority,
                cells=allocation.own_cells,
                n_tokens=allocation.n_tokens,
                service=service.counter(each.principal.name),
                turn_ends_s=each.place.turn_ends_at(is_suspended=each.control.is_suspended),
                can_yield=each.can_yield,
            )
            for allocation, each in self._sequences.items()
        ]

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


def _is_stalled(sequence: Sequence) -> bool:
    is_plain = sequence.state is State.DECODE and not sequence.control.exists
    return is_plain and sequence.place.stalled_at < math.inf and not sequence.sink.has_room


class WaitingQueue:
    """Requests that wait for KV cells, in the order of arrival.

    A sequence loses its place to a request that waits if its client does not read, or if its principal has more than its
    share of the places (``daemon/scheduling/places.py``).  When there is a place again, it goes on from its copy in memory, or is
    prefilled again from its tokens.

    Args:
        max_length: more are refused, unless their principal has less than its share of the queue.
    """

    def __init__(self, running: RunningSet, max_length: int) -> None:
        self._cache = running.cache
        self._running = running
        self._max_length = max_length
        self._sequences: list[Sequence] = []
        self._claimant: Sequence | None = None
        """For which sequences lost their places, or are about to."""
        self._blocked: tuple[Sequence, int] | None = None
        """The first in line found no room when the cache was as it is."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def may_admit(self) -> bool:
        """Whether something has changed for the first in line."""
        return bool(self._sequences) and (self._blocked is None or self._blocked[1] != self._cache.changes)

    def health(self) -> list[HealthCheck]:
        """Whether another request may wait, if it must, and whether those that wait do so for KV cells."""
        n_waiting, kv = len(self._candidates), self._cache.statistics()
        full = n_waiting >= self._max_length and (n_waiting > 0 or kv.sequences >= self._cache.memory.n_sequences)
        short = (
            n_waiting > 0 and kv.sequences < self._cache.memory.n_sequences
        )  # a sequence is free, so cells are what is missing
        return [
            HealthCheck(name="queue", ok=not full, reason=f"{n_waiting} of {self._max_length} requests wait"),
            HealthCheck(name="memory", ok=not short, reason=describe_cells(kv)),
        ]

    def enter(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let each of ``sequences`` run, or wait; all of them or none.

        Raises:
            QueueFull, KvFull: too many wait already.
        """
        for n, sequence in enumerate(sequences):
            if self._sequences or not self._running.allocate(sequence):
                if not self._may_wait(sequence):
                    refusal = self._full()
                    for entered in sequences[:n]:
                        if entered in self._running:
                            self._running.release(entered, keep=False)
                        else:
                            self._sequences.remove(entered)
                    raise refusal
                self._sequences.append(sequence)

    def _may_wait(self, sequence: Sequence) -> bool:
        """Whether the queue has room for ``sequence``: a principal may have its share of a queue that others have filled."""
        if len(self._sequences) < self._max_length:
            return True
        principal = sequence.principal
        present = {each.principal.name: each.principal.weight for each in chain(self._running, self._sequences)}
        present[principal.name] = principal.weight
        if len(present) == 1:
            return False
        own = sum([each.principal.name == principal.name for each in self._sequences])
        return own < max(1.0, self._max_length * principal.weight / sum(present.values()))

    def remove(self, sequence: Sequence) -> None:
        """Remove ``sequence``, which no longer waits."""
        self._sequences.remove(sequence)
        self._running.unpark(sequence)

    @property
    def _candidates(self) -> list[Sequence]:
        """The sequences that could run if there were room."""
        return [each for each in self._sequences if each.sink.has_room]

    def _claim(self, first: Sequence, service: Service) -> tuple[Sequence, list[Sequence], float]:
        """The next sequence that takes places, mostly ``first``, which is next in line; those that lose them, and when.

        A ``background`` request that has waited long goes first, and takes places from nobody.  Then those of other
        classes need not wait for it: places of ``background`` are theirs.
        """
        victims, due_at = self._running.claim(first, service)
        if not victims and first.priority is Priority.BACKGROUND:
            other = self._first(service, background=False)
            if other is not None:
                return other, *self._running.claim(other, service)
        return first, victims, due_at

    def _first(self, service: Service, *, background: bool = True) -> Sequence | None:
        """The sequence that gets the next place.

        Args:
            background: whether it may be of this class.
        """
        found = [each for each in self._candidates if background or each.priority is not Priority.BACKGROUND]
        if not found:  # in most steps
            return None
        holders = {each.principal.name for each in self._running}
        now = trio.current_time()
        return min(found, key=lambda each: _rank(each, now, service, holds_place=each.principal.name in holders))

    def in_order(self, service: Service) -> list[Sequence]:
        """All that wait, in the order in which they get places if nothing changes; those whose clients do not read last."""
        holders = {each.principal.name for each in self._running}
        now = trio.current_time()

        def rank(each: Sequence, *, holds_place: bool) -> tuple[bool, bool, bool, float, int]:
            return not each.sink.has_room, *_rank(each, now, service, holds_place=holds_place)

        def first_rank(each: Sequence) -> tuple[bool, bool, bool, float, int]:
            return rank(each, holds_place=each.principal.name in holders)

        found = []
        for each in sorted(self._sequences, key=first_rank):
            found.append((rank(each, holds_place=each.principal.name in holders), each))
            holders.add(each.principal.name)  # those behind it go after others that hold none
        return [each for _, each in sorted(found, key=itemgetter(0))]

    def preempts_at(self, service: Service) -> float:
        """When a running sequence will lose its place, on trio's clock; infinite if none will."""
        first = self._first(service)
        if self._claim_spare(service):
            return -math.inf
        return math.inf if first is None else self._claim(first, service)[2]

    def admit(self, service: Service, *, may_preempt: bool) -> list[Sequence]:
        """Admit waiting sequences while there is room.

        Principals that hold no place go first, then the least served one; within a principal, class and arrival decide.
        Requests of class ``background`` go last.  The first in line blocks the others until it fits, and waiting raises
        the class: no request is overtaken for ever.  Only places of ``background`` are taken by others before.

        Args:
            may_preempt: no step is in flight, so sequences can lose their places.

        Returns:
            The sequences that lost their places.
        """
        preempted = self._return_to_queue(self._running.preempt_copied())
        while (first := self._first(service)) is not None:
            if self._place(first):
                continue
            if first.priority is Priority.BACKGROUND and self._running.room().has_spare:
                other = self._first(service, background=False)
                if other is not None and self._place(other):
                    continue
            claimant, victims, due_at = self._claim(first, service)
            if not may_preempt or due_at > trio.current_time():
                break
            self._claimant = claimant
            preempted += self._return_to_queue(self._running.preempt(victims))
        if may_preempt:
            preempted += self._return_to_queue(self._running.preempt(self._claim_spare(service)))
        return preempted

    def _claim_spare(self, service: Service) -> list[Sequence]:
        """Who loses its place although nobody waits for it yet."""
        waits = any(each.priority is not Priority.BACKGROUND for each in self._sequences)
        return [] if waits else self._running.claim_spare(service)

    def _place(self, sequence: Sequence) -> bool:
        """Admit ``sequence`` if there is room; does not look again while nothing has changed."""
        if self._blocked != (sequence, self._cache.changes) and self._running.allocate(sequence):
            self._sequences.remove(sequence)
            return True
        self._blocked = (sequence, self._cache.changes)
        return False

    def _return_to_queue(self, preempted: list[Sequence]) -> list[Sequence]:
        """Let ``preempted`` wait before all that came after them, once the request that needs their places has these."""
        if preempted and self._claimant is not None:
            if self._claimant in self._candidates:
                self._place(self._claimant)
            self._claimant = None
        self._sequences[:0] = preempted
        return preempted

    def _full(self) -> QueueFull | KvFull:
        """The error for a request that cannot even wait."""
        waiting = f"{len(self._sequences)} requests wait already"
        kv = self._cache.statistics()
        if kv.sequences < self._cache.memory.n_sequences:  # a sequence is free, so cells are what is missing
            return KvFull(f"{describe_cells(kv)}; {waiting}")
        return QueueFull(waiting)


def _rank(sequence: Sequence, now: float, service: Service, *, holds_place: bool) -> tuple[bool, bool, float, int]:
    waited_s = now - sequence.place.queued_at
    return fairness.rank(sequence.priority, sequence.principal.name, waited_s, service, holds_place=holds_place)


def describe_cells(kv: CacheStatistics) -> str:
    """How full the KV cache is, for people: a cell is reserved long before it holds a token."""
    return f"running requests reserve {kv.cells_reserved} of {kv.cells} KV cells and use {kv.cells_used}"
