"""The answers that have a place in the KV cache: what they find there, and what the next step can compute of them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import trio

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.daemon.policy import places
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.offload import Offloader
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.answers import SequenceInfo
from uma_trio.telemetry.metrics import Telemetry


def cache_for(info: ModelInfo, timings: StepTimings, *, reuse: bool) -> KvCache:
    """The bookkeeping of the KV cache that an engine has."""
    worth_copying = None
    if info.memory_bytes_per_s is not None:
        # each byte of the sequence is read and written
        copy_ms = 2e3 * info.n_ctx_seq * info.kv_bytes_per_token / info.memory_bytes_per_s
        worth_copying = partial(timings.worth_copying, copy_ms=copy_ms)
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
        worth_copying=worth_copying,
        clock=trio.current_time,
    )


class RunningSet:
    """The answers that have a place in the KV cache.

    Args:
        offloader: is asked to save what must go to make room, and to load what a prompt can use.
    """

    def __init__(self, cache: KvCache, offloader: Offloader, telemetry: Telemetry) -> None:
        self.cache = cache
        self.offloader = offloader
        self._telemetry = telemetry
        self._answers: dict[Allocation, Answer] = {}
        self._leaving: list[Allocation] = []
        """Answers that lose their places together, after the last copy of one of them."""
        self._n_copying = 0
        self._copies: dict[Allocation, SavedState] = {}
        """The copies that are complete."""

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())

    def __contains__(self, answer: Answer) -> bool:
        return answer.allocation in self._answers

    def by_seq_id(self) -> dict[int, Answer]:
        """The answers by the ids that a plan names them by."""
        return {allocation.seq_id: answer for allocation, answer in self._answers.items()}

    def allocate(self, answer: Answer) -> bool:
        """Reserve all the cells that ``answer`` can need, if there are as many."""
        place = answer.place
        new = self.cache.allocate(_allocation_of(answer), place.parked)
        if new is None:
            self.offloader.check_for_work()  # something may have to be saved to make room
            return False
        answer.allocation = allocation = new.allocation
        answer.state = State.PREFILL
        place.begin(trio.current_time())
        if place.was_preempted:
            answer.due_at = place.placed_at + answer.target_itl_ms / 1e3
        times = answer.times
        if times.admitted_at is None:
            times.admitted_at = place.placed_at
            self._telemetry.record_admission(1e3 * (times.admitted_at - times.arrived_at))
        self._answers[allocation] = answer
        if answer.record is not None:
            answer.record.attempt()
        if not place.was_preempted:
            answer.comparison = new.comparison
        if not new.waits:
            self._start_prefill(answer, new.n_cached)
        if new.saved is not None:
            self.offloader.swap_in(allocation, new.saved)
        if new.saved is place.parked:
            place.parked = None  # goes when it is loaded
        self.unpark(answer)
        return True

    def reusable(self, answer: Answer) -> int:
        """Tokens that ``answer``, which waits, would find in the KV cache or in a saved state now."""
        return self.cache.reusable(_allocation_of(answer))

    def share_prefix(self, answer: Answer) -> None:
        """Let ``answer``, of which nothing is computed, begin with what the KV cache has of its known tokens."""
        assert answer.allocation is not None
        self.cache.share_prefix(answer.allocation, _known_tokens(answer))
        if answer.n_computed:
            self._start_prefill(answer, answer.n_computed)
        else:
            answer.report_prefill(0)
        answer.go_on()

    def allocate_forks(self, answer: Answer, n: int) -> list[Allocation] | None:
        """Copy what ``answer`` has computed for ``n`` forks, if there is room for all of them."""
        assert answer.allocation is not None
        allocations = self.cache.fork(answer.allocation, n, answer.max_cells)
        if allocations is None:
            self.offloader.check_for_work()  # something may have to be saved to make room
        return allocations

    def begin_forks(self, forks: Sequence[Answer], allocations: Sequence[Allocation]) -> None:
        """Let ``forks`` run, in the places that were allocated for them."""
        for fork, allocation in zip(forks, allocations, strict=True):
            fork.allocation = allocation
            fork.place.begin(trio.current_time())
            self._answers[allocation] = fork
            fork.go_on()

    def why_no_fork(self, answer: Answer, n: int) -> str | None:
        """Why ``n`` forks of ``answer`` are not allowed, or can never have room; ``None``: they are, and can."""
        assert answer.allocation is not None
        if n >= self.cache.memory.n_sequences:
            return f"this daemon computes {self.cache.memory.n_sequences} sequences at a time (--parallel)"
        principal, most = answer.principal, answer.principal.max_requests
        now = sum([other.principal.name == principal.name for other in self])
        if most is not None and now + n > most:
            return f"{principal.name} has {now} answers in flight and may have {most}"
        cells = answer.allocation.reserved + self.cache.cells_to_fork(answer.allocation, n, answer.max_cells)
        n_cells = self.cache.memory.n_cells
        if cells > n_cells:
            return f"they could need {cells} cells of the KV cache, which has {n_cells}; ask with a smaller max_tokens"
        return None

    def begin_plan(self, in_flight: Container[Answer] = ()) -> tuple[list[Answer], list[Answer]]:
        """Bring all places up to date before a step is planned, and find what it can compute.

        Answers whose saved states are loaded now begin, and so do those whose leaders stall.  Each place notes what its
        answer has got back, and whether its client reads.

        Args:
            in_flight: the answers that a step in flight computes.

        Returns:
            Answers that the step can decode, and those that it can prefill; by sequence id.
        """
        for allocation, state in self.offloader.take_swapped_in():
            if self.cache.offload.restored(allocation, state):
                self._start_prefill(self._answers[allocation], allocation.n_tokens)
        decodes, prefills, stalled = [], [], []
        now = trio.current_time()
        for allocation in sorted(self._answers, key=attrgetter("seq_id")):
            answer = self._answers[allocation]
            if answer.state is State.FINISHED:
                continue
            place = answer.place
            if place.was_preempted:
                place.note_progress(now, answer.n_computed)
            if allocation in self._leaving:
                stalled.append(allocation.seq_id)
                continue
            has_room = answer.sink.has_room
            if has_room or answer in in_flight:  # its next token was not held up yet
                place.stalled_at = math.inf
            else:
                answer.times.paused = True
                place.stalled_at = min(place.stalled_at, now)
            goes_on = has_room and answer in in_flight and answer.control.may_run_ahead
            if not goes_on and not self._is_ready(answer):
                stalled.append(allocation.seq_id)  # it may wait long for its client or its controller
            elif answer.state is State.DECODE:
                decodes.append(answer)
            elif not answer.is_blocked:
                prefills.append(answer)
        if self.cache.has_followers:
            prefills += self._begin_followers(stalled)
        return decodes, prefills

    def _begin_followers(self, stalled: Sequence[int]) -> list[Answer]:
        """Let answers begin with what their leaders have computed, which is enough or stalls.

        Args:
            stalled: sequence ids.

        Returns:
            Those that can go on now.
        """
        ready = []
        for allocation in self.cache.followed(stalled):
            answer = self._answers[allocation]
            self._start_prefill(answer, allocation.n_tokens)
            if self._is_ready(answer):
                ready.append(answer)
        return ready

    def _is_ready(self, answer: Answer) -> bool:
        """Whether the next step may compute something of ``answer``, if no step in flight does."""
        if not answer.control.exists:
            return answer.sink.has_room
        assert answer.allocation is not None
        return answer.n_computable > answer.n_computed and self.cache.may_compute(answer.allocation)

    def _start_prefill(self, answer: Answer, n_cached: int) -> None:
        """``answer`` need not compute its first ``n_cached`` tokens."""
        if not answer.place.was_preempted:  # what it has computed itself is no reuse
            answer.n_cached = min(n_cached, len(answer.prompt.tokens)) if answer.n_replayed else n_cached
            self._telemetry.record_prefix_reuse(answer.n_cached)
        answer.report_prefill(n_cached)

    def release(self, answer: Answer, *, keep: bool) -> None:
        """Give the cells of ``answer`` back, which has finished or waits.

        Args:
            keep: what it computed stays in the KV cache for others while there is room.
        """
        assert answer.allocation is not None
        assert answer.state in (State.FINISHED, State.WAITING)
        tokens = answer.computed_tokens() if keep else None
        del self._answers[answer.allocation]
        self.cache.release(answer.allocation, tokens, at=trio.current_time())
        answer.allocation = None
        self.offloader.check_for_work()

    def capacity(self) -> places.Capacity:
        """What the KV cache has, and what of it is free."""
        kv = self.cache.statistics()
        n = self.cache.memory.n_sequences
        return places.Capacity(n, kv.cells, n - kv.sequences, kv.cells - kv.cells_reserved)

    def preempt(self, answers: Sequence[Answer]) -> list[Answer]:
        """Take the places of ``answers``, which no step in flight computes.

        What takes long to compute again is copied first; until then no step computes any of them.  While there is room,
        their tokens also stay in the KV cache.

        Returns:
            Those that have lost their places.  None yet if something is copied: call ``preempt_copied`` later.
        """
        for answer in answers:
            assert answer.allocation is not None
            self._leaving.append(answer.allocation)
            if self.offloader.worth_parking(answer.n_computed):
                self._n_copying += 1
                self.offloader.park(answer.allocation, answer.computed_tokens())
        return self.preempt_copied()

    @property
    def is_preempting(self) -> bool:
        """Whether answers are about to lose their places."""
        return bool(self._leaving)

    @property
    def is_copying(self) -> bool:
        """Whether answers lose their places as soon as they are copied."""
        return self._n_copying > 0

    def preempt_copied(self) -> list[Answer]:
        """The answers that lose their places now; none before all copies have ended."""
        for allocation, state in self.offloader.take_parked():
            self._n_copying -= 1
            if state is not None:
                self._copies[allocation] = state
        if self._n_copying or not self._leaving:
            return []
        leaving, copies, self._leaving, self._copies = self._leaving, self._copies, [], {}
        preempted = []
        for allocation in leaving:
            answer, copied = self._answers.get(allocation), copies.get(allocation)
            if answer is not None and answer.can_yield:
                self._preempt(answer, copied)
                preempted.append(answer)
            elif copied is not None:  # it has ended, or its controller is ready meanwhile
                self.offloader.unpark(copied)
        return preempted

    def _preempt(self, answer: Answer, copied: SavedState | None) -> None:
        assert answer.allocation is not None
        answer.place.end(trio.current_time(), answer.n_computed, copied)
        if copied is not None:
            answer.allocation.durable = False  # nobody waits for a second copy on disk
        answer.state = State.WAITING
        self.release(answer, keep=True)
        self._telemetry.preemptions_total += 1

    def unpark(self, answer: Answer) -> None:
        """Drop the copy of what ``answer`` held, if there is one."""
        if answer.place.parked is not None:
            self.offloader.unpark(answer.place.parked)
            answer.place.parked = None

    def describe(self) -> list[SequenceInfo]:
        """What the KV cache holds, by sequence id."""
        infos = [
            SequenceInfo(
                seq_id=allocation.seq_id,
                state="prefill" if answer.state is State.PREFILL else "decode",
                cells_used=allocation.n_tokens,
                cells_reserved=allocation.reserved,
                principal=allocation.principal,
                request_id=answer.request.id,
                session_id=answer.request.session_id,
                prompt_tokens=len(answer.prompt.tokens),
                completion_tokens=len(answer.tokens),
            )
            for allocation, answer in self._answers.items()
        ]
        infos += [
            SequenceInfo(
                seq_id=idle.seq_id,
                state="cached",
                cells_used=idle.n_tokens,
                cells_reserved=idle.reserved,
                principal=idle.principal,
            )
            for idle in self.cache.idle
        ]
        return sorted(infos, key=lambda info: info.seq_id)

    def restart(self) -> None:
        """The KV cache is lost: all answers are prefilled again from their tokens."""
        for answer in self:
            answer.place.lose(answer.n_computed)
        self.cache.clear(lost=True)
        for answer in self:
            answer.n_cached = 0
            if answer.state is not State.FINISHED:
                answer.state = State.PREFILL

    def check_integrity(self) -> None:
        """Raise AssertionError unless answers and KV cache agree."""
        self.cache.check_integrity()
        assert len(self) == self.cache.statistics().sequences
        for allocation, answer in self._answers.items():
            assert answer.allocation is allocation
            assert answer.state is not State.WAITING


def _allocation_of(answer: Answer) -> Allocation:
    """What ``answer`` needs of the KV cache, and which tokens it shares with others."""
    return Allocation(
        _known_tokens(answer),
        answer.max_cells,
        principal=answer.principal.name,
        adapters=answer.adapters,
        rank=answer.priority,
        private=not answer.request.cache_prompt,
        durable=answer.durable,
    )


def _known_tokens(answer: Answer) -> TokenIds:
    return np.concatenate([answer.prompt.tokens, np.asarray(answer.tokens, np.int32)])
