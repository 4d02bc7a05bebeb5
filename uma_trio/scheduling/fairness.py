"""Whose prompt is read next: by class, then by least-served tenant, then by when its first token is due.

A tenant's *service* is the tokens it was given, generated ones counting twice.  The least-served tenant
that has something to read goes next; a tenant that comes, or comes back after a while, starts where the
least-served one is, so that nobody saves up service while away.

A tenant's own prompts are read one after the other, for read in turns they would all end at the end.  Those
that a burst completes go before the others.

None of these orders may make anybody wait for ever: who was passed over often enough gets a burst first.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): virtual token counters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

if TYPE_CHECKING:
    from uma_trio.scheduling.policy import Priority, Slot

PROMPT_TOKEN: Final = 1.0
GENERATED_TOKEN: Final = 2.0

RISES_AFTER_S: Final = 30.0
"""A request that waits in the queue rises by a class each time that so long has passed."""

LOWER_CLASS_WAITS: Final = 8
"""Ticks with prompts that a class, or a tenant within one, is passed over for others.  Then it is its turn,
after those alone that have waited as long."""

ROUND: Final = 32
"""Of so many ticks that read a group's prompts the last begins with a burst of the next one in rotation."""

DUE_S: Final = attrgetter("due_s")
SEQ_ID: Final = attrgetter("seq_id")

Group: TypeAlias = "tuple[Priority, int]"
"""A tenant's prompts of one class."""


@attrs.frozen
class Turn:
    """What a group had of late."""

    last: int = -1
    """The sequence that the last turn in rotation went to."""
    served: int = 0
    """Ticks since then in which the group got anything."""
    passed_over: int = 0
    """Ticks with prompts in a row in which the group got less than a turn: a burst, or all of a tick."""


NEW: Final = Turn()


@attrs.frozen
class Service:
    """What tenants were given, and whose turn is next."""

    tenants: Mapping[int, float] = attrs.field(factory=dict)
    """Tenant -> weighted tokens.  Of those that have something to do, since they came."""
    turns: Mapping[Group, Turn] = attrs.field(factory=dict)
    """Of the groups that the last division left something to read."""

    away: Mapping[int, float] = attrs.field(factory=dict)
    """The same of those that have nothing to do now and were given more than the least served one of the others."""

    def of(self, tenant: int) -> float:
        """What ``tenant`` counts as having been given.

        Of one that comes, or comes back, it is a trifle less than the least served one has, so that it
        goes next; or what it had when it went, if that is more.
        """
        found = self.tenants.get(tenant)
        if found is not None:
            return found
        had = self.away.get(tenant, -math.inf)
        return max(had, math.nextafter(min(self.tenants.values(), default=0.0), -math.inf))

    def decoded(self, streams: Sequence[Slot]) -> Service:
        """After a token for each of ``streams``."""
        if not streams:
            return self
        counts: dict[int, int] = {}
        for slot in streams:
            counts[slot.tenant] = counts.get(slot.tenant, 0) + 1
        return self.given({tenant: GENERATED_TOKEN * n for tenant, n in counts.items()})

    def given(self, more: Mapping[int, float]) -> Service:
        """After ``more`` service, by tenant."""
        return self.with_counters({tenant: self.of(tenant) + amount for tenant, amount in more.items()})

    def with_counters(self, counters: Mapping[int, float]) -> Service:
        """With ``counters`` of some tenants, which are there."""
        away = {t: s for t, s in self.away.items() if t not in counters} if self.away else self.away
        return Service({**self.tenants, **counters}, self.turns, away)

    def arrived(self, tenant: int, waiting: Collection[int]) -> Service:
        """``tenant``, which had nothing that waited, has now: it starts no lower than any of ``waiting``.

        A tenant with one slow stream falls behind those that read prompts, but that is no claim: it asked
        for no more.

        Args:
            waiting: the other tenants that have requests in the queue or prompts to be read.
        """
        least = min([self.of(other) for other in waiting], default=0.0)
        return self.with_counters({tenant: max(self.of(tenant), least)})

    def without(self, tenant: int) -> Service:
        """``tenant`` has nothing to do any more.

        What it was given beyond the least served one counts when it comes back before that one has
        caught up: or whoever sends all requests at once, again and again, would be forgiven each time.
        """
        tenants = {t: s for t, s in self.tenants.items() if t != tenant}
        least = min(tenants.values(), default=math.inf)
        away = {t: s for t, s in {**self.away, tenant: self.of(tenant)}.items() if s > least}
        return Service(tenants, self.turns, away)


def rank(slot: Slot, waited_s: float, service: Service) -> tuple[int, float]:
    """What the queue for a sequence is ordered by, the least first: class, then the tenant's service.

    Args:
        waited_s: since the request came; a class higher for each ``RISES_AFTER_S`` of it.
    """
    risen = int(waited_s / RISES_AFTER_S)
    return max(0, slot.priority - risen), service.of(slot.tenant)


def divide(
    prompts: Sequence[Slot], tokens: int, service: Service, *, burst: int
) -> tuple[list[tuple[Slot, int]], Service]:
    """What each of ``prompts`` gets of ``tokens``.

    A higher class takes all it can use first.  Of one class the tenant that was served least is next, a burst
    at a time, or with all that is left if only one has something to read.  But others are passed over only so
    many divisions in a row.

    Of a group's prompts those that a burst completes are read first and the others after them, both by when
    their first tokens are due, each as far as it goes before the next.  But every ``ROUND``-th division in which
    the group gets anything begins with a burst of the next one in rotation.

    Args:
        tokens: at least 1.  All of them are given, unless the prompts have fewer.

    Nobody waits for ever.  Of ``g`` groups at a time each is served in at least one of
    ``w = LOWER_CLASS_WAITS + g`` divisions; alone in each, so ``w = 1``.  A prompt whose group has prompts on
    ``p`` sequences while it waits gets some in ``ROUND * p * w`` divisions.
    """
    by_key: defaultdict[Group, list[Slot]] = defaultdict(list)
    for slot in sorted(sorted(prompts, key=SEQ_ID), key=DUE_S):  # quicker than one sort by pairs
        by_key[slot.priority, slot.tenant].append(slot)
    groups = [
        _Group(*key, own, service.turns.get(key, NEW), sum([slot.pending for slot in own]))
        for key, own in by_key.items()
    ]
    counters = {group.tenant: service.of(group.tenant) for group in groups}
    _give(groups, tokens, counters, burst)
    shares: list[tuple[Slot, int]] = []
    turns: dict[Group, Turn] = {}
    for group in groups:
        own, turn = group.read(burst, whole=min(burst, tokens))
        shares += own
        if group.wanted:
            turns[group.priority, group.tenant] = turn
    return shares, attrs.evolve(service.with_counters(counters), turns=turns)


@attrs.define(eq=False)
class _Group:
    """One group while tokens are divided."""

    priority: Priority
    tenant: int
    prompts: list[Slot]
    """By when their first tokens are due."""
    turn: Turn
    wanted: int
    """Tokens that they could still use."""
    got: int = 0

    def take(self, most: int) -> int:
        """As many as it wants, of ``most``."""
        n = min(most, self.wanted)
        self.wanted -= n
        self.got += n
        return n

    def read(self, burst: int, whole: int) -> tuple[Iterable[tuple[Slot, int]], Turn]:
        """What each of its prompts gets of what it got, and where it stands then; a turn is ``whole`` tokens."""
        last, served = self.turn.last, self.turn.served
        passed_over = 0 if self.got >= whole else self.turn.passed_over + 1
        if not self.got:
            return (), Turn(last, served, passed_over)
        given: dict[Slot, int] = {}
        left, served = self.got, served + 1
        if served == ROUND:
            slot = min([slot for slot in self.prompts if slot.seq_id > last] or self.prompts, key=SEQ_ID)
            given[slot] = min(left, burst, slot.pending)
            left -= given[slot]
            last, served = slot.seq_id, 0
        short = (slot for slot in self.prompts if slot.pending <= burst)
        long = (slot for slot in self.prompts if slot.pending > burst)
        for slot in chain(short, long):
            if not left:
                break
            had = given.get(slot, 0)
            if n := min(left, slot.pending - had):
                given[slot] = had + n
                left -= n
        return given.items(), Turn(last, served, passed_over)


def _give(groups: Sequence[_Group], tokens: int, counters: dict[int, float], burst: int) -> None:
    """Divide ``tokens`` among ``groups``, and book them on ``counters``."""
    left, whole = tokens, min(burst, tokens)
    overdue = [group for group in groups if group.turn.passed_over >= LOWER_CLASS_WAITS]
    for group in sorted(overdue, key=lambda group: -group.turn.passed_over):
        if left >= whole:
            n = group.take(whole)
            left -= n
            counters[group.tenant] += n * PROMPT_TOKEN
    for priority in sorted({group.priority for group in groups}):
        able = [group for group in groups if group.priority == priority and group.wanted]
        heap = [(counters[group.tenant], group.tenant, group) for group in able]
        heapify(heap)
        while left and heap:
            counter, tenant, group = heap[0]
            n = group.take(min(left, burst) if len(heap) > 1 else left)
            left -= n
            counters[tenant] = counter + n * PROMPT_TOKEN
            if group.wanted:
                heapreplace(heap, (counters[tenant], tenant, group))
            else:
                heappop(heap)
