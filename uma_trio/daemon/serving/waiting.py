"""The answers that wait for a place in the KV cache: who gets the next one, and who loses it to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from operator import itemgetter
from typing import Final

import trio

from uma_trio.daemon.kv.cache import CacheStatistics
from uma_trio.daemon.policy import fairness, places
from uma_trio.daemon.policy.view import Priority
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.principals import Principals
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.errors import KvFull, QueueFull
from uma_trio.protocol.answers import HealthCheck

PREEMPT_AFTER_S: Final = 0.5
"""An answer loses its place to a waiting one if its client has not read for this long."""


class WaitingQueue:
    """Requests that wait for KV cells, in the order of arrival.

    An answer loses its place to a request that waits if its client does not read, or if its principal has more than its
    share of the places (``daemon/policy/places.py``).  When there is a place again, it goes on from its copy in memory, or is
    prefilled again from its tokens.

    Args:
        max_length: more are refused, unless their principal has less than its share of the queue.
    """

    def __init__(self, running: RunningSet, principals: Principals, max_length: int) -> None:
        self._cache = running.cache
        self._running = running
        self._principals = principals
        self._max_length = max_length
        self._answers: list[Answer] = []
        self._preempts_for: Answer | None = None
        """For which answers lost their places, or are about to."""
        self._keeps_room_for: Answer | None = None
        """The answer whose forks wait for room."""
        self._blocked: tuple[Answer, int] | None = None
        """The first in line found no room when the cache was as it is."""

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers)

    @property
    def may_admit(self) -> bool:
        """Whether something has changed for the first in line."""
        return bool(self._answers) and (self._blocked is None or self._blocked[1] != self._cache.changes)

    def health(self) -> list[HealthCheck]:
        """Whether another request may wait, if it must, and whether those that wait do so for KV cells."""
        n_waiting, kv = len(self._candidates), self._cache.statistics()
        full = n_waiting >= self._max_length and (n_waiting > 0 or kv.sequences >= self._cache.memory.n_sequences)
        short = n_waiting > 0 and kv.sequences < self._cache.memory.n_sequences  # one is free: cells are missing
        return [
            HealthCheck(name="queue", ok=not full, reason=f"{n_waiting} of {self._max_length} requests wait"),
            HealthCheck(name="memory", ok=not short, reason=_describe_cells(kv)),
        ]

    def enter(self, answers: Sequence[Answer]) -> None:
        """Let each of ``answers`` run, or wait; all of them or none.

        Raises:
            QueueFull, KvFull: too many wait already.
        """
        for n, answer in enumerate(answers):
            if self._answers or not self._allocate(answer):
                if not self._may_wait(answer):
                    refusal = self._full()
                    for entered in answers[:n]:
                        if entered in self._running:
                            entered.state = State.WAITING
                            self._running.release(entered, keep=False)
                        else:
                            self._answers.remove(entered)
                    raise refusal
                self._answers.append(answer)

    def _may_wait(self, answer: Answer) -> bool:
        """Whether the queue has room for ``answer``: a principal may have its share of a queue that others have filled."""
        if len(self._answers) < self._max_length:
            return True
        principal = answer.principal
        present = {other.principal.name: other.principal.weight for other in chain(self._running, self._answers)}
        present[principal.name] = principal.weight
        if len(present) == 1:
            return False
        own = sum([other.principal.name == principal.name for other in self._answers])
        return own < max(1.0, self._max_length * principal.weight / sum(present.values()))

    def _full(self) -> QueueFull | KvFull:
        """The error for a request that cannot even wait."""
        waiting = f"{len(self._answers)} requests wait already"
        kv = self._cache.statistics()
        if kv.sequences < self._cache.memory.n_sequences:  # a sequence is free, so cells are what is missing
            return KvFull(f"{_describe_cells(kv)}; {waiting}")
        return QueueFull(waiting)

    def remove(self, answer: Answer) -> None:
        """Remove ``answer``, which no longer waits."""
        self._answers.remove(answer)
        self._running.unpark(answer)

    @property
    def _candidates(self) -> list[Answer]:
        """The answers that could run if there were room."""
        return [answer for answer in self._answers if answer.sink.has_room]

    # -- who gets the next place ----------------------------------------------------------------

    def _first(self, *, background: bool = True) -> Answer | None:
        """The answer that gets the next place.

        Args:
            background: whether it may be of this class.
        """
        candidates = [
            candidate for candidate in self._candidates if background or candidate.priority is not Priority.BACKGROUND
        ]
        if not candidates:  # in most steps
            return None
        now, holders = trio.current_time(), {running.principal.name for running in self._running}
        return min(candidates, key=lambda candidate: self._rank(candidate, now, holders))

    def in_order(self) -> list[Answer]:
        """All that wait, in the order in which they get places if nothing changes; those whose clients do not read last."""
        now, holders = trio.current_time(), {running.principal.name for running in self._running}

        def rank(answer: Answer) -> tuple[bool, bool, bool, float, int]:
            return not answer.sink.has_room, *self._rank(answer, now, holders)

        ranked = []
        for answer in sorted(self._answers, key=rank):
            ranked.append((rank(answer), answer))
            holders.add(answer.principal.name)  # those behind it go after others that hold none
        return [answer for _, answer in sorted(ranked, key=itemgetter(0))]

    def admit(self, *, may_preempt: bool) -> list[Answer]:
        """Admit waiting answers while there is room.

        Principals that hold no place go first, then the least served one; within a principal, class and arrival decide.
        Requests of class ``background`` go last.  The first in line blocks the others until it fits, and waiting raises
        the class: no request is overtaken for ever.  Only places of ``background`` are taken by others before.

        Args:
            may_preempt: no step is in flight, so answers can lose their places.

        Returns:
            The answers that lost their places.
        """
        preempted = self._return_to_queue(self._running.preempt_copied())
        while (first := self._first()) is not None:
            if self._admit_one(first):
                continue
            if first.priority is Priority.BACKGROUND and self._running.capacity().has_spare:
                other = self._first(background=False)
                if other is not None and self._admit_one(other):
                    continue
            claimant, victims, due_at = self._claim(first)
            if not may_preempt or due_at > trio.current_time():
                break
            self._preempts_for = claimant
            preempted += self._return_to_queue(self._running.preempt(victims))
        if may_preempt:
            preempted += self._return_to_queue(self._running.preempt(self._spare_victims()))
        return preempted

    def _admit_one(self, answer: Answer) -> bool:
        """Admit ``answer`` if there is room; does not look again while nothing has changed."""
        if self._blocked != (answer, self._cache.changes) and self._allocate(answer):
            self._answers.remove(answer)
            return True
        self._blocked = (answer, self._cache.changes)
        return False

    def _allocate(self, answer: Answer) -> bool:
        """Give ``answer`` a place, if there is room that is not for others."""
        if self._is_behind_forks(answer) or self._is_left_to_others(answer):
            return False
        return self._running.allocate(answer)

    def keep_room(self, answer: Answer | None) -> None:
        """Keep all room that becomes free for forks of ``answer``, before the requests of its principal that wait.

        Other principals go before the forks as long as they have a smaller share of the places.

        Args:
            answer: ``None``: no forks wait.
        """
        if self._keeps_room_for is not None and answer is None:
            self._cache.try_again()
        self._keeps_room_for = answer

    def _is_behind_forks(self, answer: Answer) -> bool:
        """Whether room that becomes free is for forks, and not for ``answer``."""
        parent = self._keeps_room_for
        return parent is not None and not places.goes_before(
            self._claimant(answer), parent.principal.name, self._places(), self._running.capacity()
        )

    def _is_left_to_others(self, answer: Answer) -> bool:
        """Whether the room that ``answer``, of class ``background``, would take is kept for requests of other classes."""
        if answer.priority is not Priority.BACKGROUND:
            return False
        claimant = self._claimant(answer)
        capacity = self._running.capacity()
        left = places.capacity_for(claimant, self._places(), capacity)
        return left != capacity and (left.free_sequences < 1 or left.free_cells < claimant.cells)

    # -- who loses its place to it --------------------------------------------------------------

    @property
    def preempts_at(self) -> float:
        """When a running answer will lose its place, on trio's clock; infinite if none will."""
        first = self._first()
        if self._spare_victims():
            return -math.inf
        return math.inf if first is None else self._claim(first)[2]

    def _claim(self, first: Answer) -> tuple[Answer, list[Answer], float]:
        """The next answer that takes places, mostly ``first``, which is next in line; those that lose them, and when.

        A ``background`` request that has waited long goes first, and takes places from nobody.  Then those of other
        classes need not wait for it: places of ``background`` are theirs.
        """
        victims, due_at = self._victims(first)
        if not victims and first.priority is Priority.BACKGROUND:
            other = self._first(background=False)
            if other is not None:
                return other, *self._victims(other)
        return first, victims, due_at

    def _victims(self, answer: Answer) -> tuple[list[Answer], float]:
        """Choose the answers that lose their places to ``answer``, which waits, and when they do.

        These are the answer whose client has not read for the longest time, or answers of class ``background``, or of
        principals above their shares.

        Returns:
            No answers and infinity if ``answer`` waits until a place becomes free, which one may soon.
        """
        if self._running.is_preempting:
            return [], math.inf
        stalled = min(
            [running for running in self._running if _is_stalled(running)],
            key=lambda running: running.place.stalled_at,
            default=None,
        )
        choice = ([stalled], stalled.place.stalled_at + PREEMPT_AFTER_S) if stalled is not None else ([], math.inf)
        is_background = answer.priority is Priority.BACKGROUND
        if all(
            running.principal.name == answer.principal.name
            and (is_background or running.priority is not Priority.BACKGROUND)
            for running in self._running
        ):
            return choice
        claim = places.claim(self._claimant(answer), self._places(), self._running.capacity())
        if claim is None or claim.due_s >= choice[1]:
            return choice
        running = [*self._running]
        return [running[index] for index in claim.victims], claim.due_s

    def _spare_victims(self) -> list[Answer]:
        """The ``background`` answer that gives up its place for the next request, if that delays nobody's first token.

        None if other requests wait already: these choose for themselves.
        """
        if self._running.is_preempting or any(waiting.priority is not Priority.BACKGROUND for waiting in self._answers):
            return []
        others = [running for running in self._running if running.priority is not Priority.BACKGROUND]
        if len(self._running) - len(others) < 2 or any(running.state is State.PREFILL for running in others):
            return []
        claim = places.claim_spare(self._places(), self._running.capacity())
        running = [*self._running]
        return [] if claim is None else [running[index] for index in claim.victims]

    def _places(self) -> list[places.Place]:
        """What the running answers hold, in their order."""
        return [self._held_by(answer) for answer in self._running]

    def _return_to_queue(self, preempted: list[Answer]) -> list[Answer]:
        """Let ``preempted`` wait before all that came after them, once the request that needs their places has these."""
        if preempted and self._preempts_for is not None:
            if self._preempts_for in self._candidates:
                self._admit_one(self._preempts_for)
            self._preempts_for = None
        self._answers[:0] = preempted
        return preempted

    def _claimant(self, answer: Answer) -> places.Claimant:
        principal = answer.principal
        return places.Claimant(
            principal=principal.name,
            weight=principal.weight,
            priority=answer.priority,
            cells=answer.max_cells,
            service=self._principals.service.counter(principal.name),
        )

    def _held_by(self, answer: Answer) -> places.Place:
        allocation, principal = answer.allocation, answer.principal
        assert allocation is not None
        return places.Place(
            principal=principal.name,
            weight=principal.weight,
            priority=answer.priority,
            cells=allocation.own_cells,
            n_tokens=allocation.n_tokens,
            service=self._principals.service.counter(principal.name),
            turn_ends_s=answer.place.turn_ends_at(is_suspended=answer.control.is_suspended),
            can_yield=answer.can_yield,
        )

    def _rank(self, answer: Answer, now: float, holders: Set[str]) -> tuple[bool, bool, float, int]:
        """Sort key: the first one gets the next place.

        Args:
            holders: principals that hold places.
        """
        waited_s, name = now - answer.place.queued_at, answer.principal.name
        return fairness.rank(answer.priority, name, waited_s, self._principals.service, holds_place=name in holders)


def _is_stalled(answer: Answer) -> bool:
    is_plain = answer.state is State.DECODE and not answer.control.exists
    return is_plain and answer.place.stalled_at < math.inf and not answer.sink.has_room


def _describe_cells(kv: CacheStatistics) -> str:
    """How full the KV cache is, for people: a cell is reserved long before it holds a token."""
    return f"running requests reserve {kv.cells_reserved} of {kv.cells} KV cells and use {kv.cells_used}"
