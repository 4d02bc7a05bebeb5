"""Which sequences wait and which run: who gets a place in the KV cache, and what it finds there."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import trio

from uma_trio.engine.messages import ModelInfo, TokenIds
from uma_trio.errors import KvFull, QueueFull
from uma_trio.kv.allocation import Allocation
from uma_trio.kv.cache import KvCache
from uma_trio.kv.idle_limit import IdleLimit
from uma_trio.offload import Offloader
from uma_trio.protocol.answers import HealthCheck, SequenceInfo
from uma_trio.scheduling import fairness
from uma_trio.scheduling.attention import AttentionScan
from uma_trio.scheduling.fairness import Service
from uma_trio.scheduling.retry_schedule import RetrySchedule
from uma_trio.scheduling.timings import StepTimings
from uma_trio.serving.sequence import Sequence, State
from uma_trio.telemetry import Telemetry


def cache_for(info: ModelInfo, timings: StepTimings, *, reuse: bool) -> KvCache:
    """The bookkeeping of the KV cache that an engine has."""
    return KvCache(
        n_sequences=info.n_seq_max,
        n_cells=info.n_ctx,
        cells_per_sequence=info.n_ctx_seq,
        unified=info.unified,
        can_truncate=info.can_truncate,
        max_checkpoints=info.max_checkpoints,
        state_can_truncate=info.state_can_truncate,
        reuse=reuse,
        idle_limit=IdleLimit(info.n_ctx) if info.attention_scan is AttentionScan.CACHE else None,
        worth_loading=timings.worth_loading,
    )


PREEMPT_AFTER_S: Final = 0.5
"""A sequence loses its place to a waiting one if its client has not read for this long."""


class RunningSet:
    """The sequences that have a place in the KV cache.

    Args:
        offloader: is asked to save what must go to make room, and to load what a prompt can use.
    """

    def __init__(self, cache: KvCache, offloader: Offloader, telemetry: Telemetry) -> None:
        self.cache = cache
        self._offloader = offloader
        self._telemetry = telemetry
        self._sequences: dict[Allocation, Sequence] = {}
        self._keeps_room = False

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
        if self._keeps_room:
            return False
        placement = self.cache.allocate(
            _known_tokens(sequence),
            sequence.max_cells,
            principal=sequence.principal.name,
            adapters=sequence.adapters,
            rank=sequence.priority,
            private=not sequence.request.cache_prompt,
            durable=sequence.durable,
        )
        if placement is None:
            self._offloader.check_for_work()  # something may have to be saved to make room
            return False
        sequence.allocation = allocation = placement.allocation
        sequence.state = State.PREFILL
        if sequence.admitted_at is None:
            sequence.admitted_at = trio.current_time()
            self._telemetry.record_admission(1e3 * (sequence.admitted_at - sequence.arrived_at))
        self._sequences[allocation] = sequence
        if not placement.waits:
            self._start_prefill(sequence, placement.n_cached)
        if placement.saved is not None:
            self._offloader.swap_in(allocation, placement.saved)
        return True

    def share_prefix(self, sequence: Sequence) -> None:
        """Let ``sequence``, of which nothing is computed, begin with what the KV cache has of its known tokens."""
        assert sequence.allocation is not None
        self.cache.share_prefix(sequence.allocation, _known_tokens(sequence))
        if sequence.n_computed:
            self._start_prefill(sequence, sequence.n_computed)
        sequence.go_on()

    def keep_room(self, *, for_forks: bool) -> None:
        """Whether all room that becomes free is kept for forks, so that no request in the queue gets it."""
        if self._keeps_room and not for_forks:
            self.cache.try_again()
        self._keeps_room = for_forks

    def allocate_forks(self, sequence: Sequence, n: int) -> list[Allocation] | None:
        """Copy what ``sequence`` has computed for ``n`` forks, if there is room for all of them."""
        assert sequence.allocation is not None
        allocations = self.cache.fork(sequence.allocation, n, sequence.max_cells)
        if allocations is None:
            self._offloader.check_for_work()  # something may have to be saved to make room
        return allocations

    def begin_forks(self, forks: Items[Sequence], allocations: Items[Allocation]) -> None:
        """Let ``forks`` run, in the places that were allocated for them."""
        for fork, allocation in zip(forks, allocations, strict=True):
            fork.allocation = allocation
            self._sequences[allocation] = fork
            fork.go_on()

    def why_no_fork(self, sequence: Sequence, n: int) -> str | None:
        """Why ``n`` forks of ``sequence`` are not allowed, or can never have room; ``None``: they are, and can."""
        assert sequence.allocation is not None
        if n >= self.cache.n_sequences:
            return f"this daemon computes {self.cache.n_sequences} sequences at a time (--parallel)"
        principal, most = sequence.principal, sequence.principal.max_requests
        now = sum([other.principal.name == principal.name for other in self])
        if most is not None and now + n > most:
            return f"{principal.name} has {now} answers in flight and may have {most}"
        cells = sequence.allocation.reserved + self.cache.cells_to_fork(sequence.allocation, n, sequence.max_cells)
        n_cells = self.cache.statistics().cells
        if cells > n_cells:
            return f"they could need {cells} cells of the KV cache, which has {n_cells}; ask with a smaller max_tokens"
        return None

    def settle(self, sequence: Sequence) -> None:
        """Move ``sequence``, of which nothing is computed or in flight, to the sequence id that suits best."""
        assert sequence.allocation is not None
        self.cache.settle(sequence.allocation)

    def ready(self, in_flight: Container[Sequence] = ()) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that the next step can decode, and those that it can prefill; by sequence id.

        Call it before each step is planned.

        Args:
            in_flight: the sequences that a step in flight computes.
        """
        for allocation, state in self._offloader.take_swapped_in():
            if self.cache.restored(allocation, state):
                self._start_prefill(self._sequences[allocation], allocation.n_tokens)
        decodes, prefills, stalled = [], [], []
        for allocation in sorted(self._sequences, key=lambda allocation: allocation.seq_id):
            sequence = self._sequences[allocation]
            if sequence.state is State.FINISHED:
                continue
            has_room = sequence.sink.has_room
            if not has_room and sequence not in in_flight:  # its next token was not held up yet
                sequence.paused = True
                sequence.stalled_at = min(sequence.stalled_at, trio.current_time())
            else:
                sequence.stalled_at = math.inf
            if sequence.control is not None:
                goes_on = sequence in in_flight and has_room and sequence.control.may_run_ahead
                if not goes_on and not self._is_ready(sequence):
                    stalled.append(allocation.seq_id)  # it may wait long for its controller
                    continue
            elif not has_room:
                stalled.append(allocation.seq_id)
                continue
            if sequence.state is State.DECODE:
                decodes.append(sequence)
            elif not sequence.is_blocked:
                prefills.append(sequence)
        if self.cache.has_followers:
            for allocation in self.cache.followed(stalled):
                sequence = self._sequences[allocation]
                self._start_prefill(sequence, allocation.n_tokens)
                if self._is_ready(sequence) if sequence.control is not None else sequence.sink.has_room:
                    prefills.append(sequence)
        return decodes, prefills

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the next step may compute something of ``sequence``, which has a controller."""
        assert sequence.allocation is not None
        return sequence.n_computable > sequence.n_computed and self.cache.may_compute(sequence.allocation)

    def _start_prefill(self, sequence: Sequence, n_cached: int) -> None:
        """``sequence`` need not compute its first ``n_cached`` tokens."""
        if not sequence.was_preempted:
            sequence.n_cached = n_cached
        self._telemetry.record_prefix_reuse(n_cached)

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
        self._offloader.check_for_work()

    def preemptible(self) -> Sequence | None:
        """The sequence whose client has not read for the longest time, if a request that waits may get its place.

        A controller may have shared its cells with forks, so its sequences keep their places.
        """
        stalled = [each for each in self if _is_stalled(each)]
        return min(stalled, key=lambda each: each.stalled_at, default=None)

    def preempt(self, sequence: Sequence) -> None:
        """Take the place of a preemptible sequence.  While there is room, its tokens stay in the KV cache."""
        self.release(sequence, keep=True)
        sequence.state, sequence.queued_at, sequence.stalled_at = State.WAITING, trio.current_time(), math.inf
        sequence.was_preempted = True
        self._telemetry.preemptions_total += 1

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
        self.cache.clear(lost=True)
        for sequence in self._sequences.values():
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


def _known_tokens(sequence: Sequence) -> TokenIds:
    return np.concatenate([sequence.prompt.tokens, np.asarray(sequence.tokens, np.int32)])


def _is_stalled(sequence: Sequence) -> bool:
    is_plain = sequence.state is State.DECODE and sequence.control is None
    return is_plain and sequence.stalled_at < math.inf and not sequence.sink.has_room


class WaitingQueue:
    """Requests that wait for KV cells, in the order of arrival.

    A sequence whose client does not read loses its place to a request that waits.  It is prefilled again from its tokens
    when its client has read, and there is a place.

    Args:
        max_length: more are refused.
        telemetry: knows how long requests take.
    """

    def __init__(
        self, cache: KvCache, running: RunningSet, telemetry: Telemetry, info: ModelInfo, max_length: int
    ) -> None:
        self._cache = cache
        self._running = running
        self._telemetry = telemetry
        self._n_sequences = info.n_seq_max
        self._max_length = max_length
        self._sequences: list[Sequence] = []
        self._retries = RetrySchedule()
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
        full = n_waiting >= self._max_length and (n_waiting > 0 or kv.sequences >= self._n_sequences)
        short = n_waiting > 0 and kv.sequences < self._n_sequences  # a sequence is free, so cells are what is missing
        return [
            HealthCheck(name="queue", ok=not full, reason=f"{n_waiting} of {self._max_length} requests wait"),
            HealthCheck(name="memory", ok=not short, reason=f"{kv.cells_reserved} of {kv.cells} KV cells are in use"),
        ]

    def enter(self, sequences: Items[Sequence]) -> None:
        """Let each of ``sequences`` run, or wait; all of them or none.

        Raises:
            QueueFull, KvFull: too many wait already.
        """
        if not self._sequences and not self._running:
            self._retries.clear()
        for n, sequence in enumerate(sequences):
            if self._sequences or not self._running.allocate(sequence):
                if len(self._sequences) >= self._max_length:
                    refusal = self._full()
                    for entered in sequences[:n]:
                        if entered in self._running:
                            self._running.release(entered, keep=False)
                        else:
                            self._sequences.remove(entered)
                    raise refusal
                self._sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove ``sequence``, which no longer waits."""
        self._sequences.remove(sequence)

    @property
    def _candidates(self) -> list[Sequence]:
        """The sequences that could run if there were room."""
        return [each for each in self._sequences if each.sink.has_room]

    @property
    def preempts_at(self) -> float:
        """When a sequence whose client does not read will lose its place, on trio's clock; infinite if none will."""
        stalled = self._running.preemptible() if self._candidates else None
        return math.inf if stalled is None else stalled.stalled_at + PREEMPT_AFTER_S

    def admit(self, service: Service) -> list[Sequence]:
        """Admit waiting sequences while there is room, in the order class, least served principal, arrival.

        The first in line blocks the others until it fits, and waiting raises the class: no request is overtaken for
        ever.

        Returns:
            The sequences that lost their places.
        """
        preempted: list[Sequence] = []
        while candidates := self._candidates:
            now = trio.current_time()
            first = min(
                candidates,
                key=lambda waiting: fairness.rank(waiting.view(), now - waiting.queued_at, service),
            )
            if self._blocked != (first, self._cache.changes) and self._running.allocate(first):
                self._sequences.remove(first)
                continue
            self._blocked = (first, self._cache.changes)
            if self.preempts_at > now:
                break
            stalled = self._running.preemptible()
            assert stalled is not None
            self._running.preempt(stalled)
            self._sequences.append(stalled)
            preempted.append(stalled)
        return preempted

    def _full(self) -> QueueFull | KvFull:
        """The error for a request that cannot even wait, with the time at which it may be sent again."""
        waiting = f"{len(self._sequences)} requests wait already"
        kv = self._cache.statistics()
        if kv.sequences < self._n_sequences:  # a sequence is free, so cells are what is missing
            error: QueueFull | KvFull = KvFull(f"{kv.cells_reserved} of {kv.cells} KV cells are in use, and {waiting}")
        else:
            error = QueueFull(waiting)
        error.retry_after_ms = self.retry_after_ms()
        return error

    def retry_after_ms(self) -> int | None:
        """When the next refused request may come back; ``None`` before the first request has ended.

        Requests take as long as the last ones did.  Those that wait go first, then those that were refused before.
        """
        served_ms = self._telemetry.served_ms.value
        if served_ms is None:
            return None
        at_a_time = max(1, len(self._running))
        turns = 1 + len(self._sequences) // at_a_time
        served_s = 1e-3 * served_ms
        return round(1e3 * self._retries.wait_s(trio.current_time(), turns * served_s, served_s / at_a_time))
