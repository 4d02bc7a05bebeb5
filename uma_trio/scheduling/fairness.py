"""Whose prompt is read next: by class, then by least-served tenant, then in rounds of bursts.

A tenant's *service* is the tokens it was given, generated ones counting twice.  The least-served tenant
that has something to read goes next; a tenant that comes, or comes back after a while, starts where the
least-served one is, so that nobody saves up service while away.

Neither order may make anybody wait for ever: who was passed over often enough gets a burst first.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): virtual token counters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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

Group: TypeAlias = "tuple[Priority, int]"
"""A tenant's prompts of one class."""


@attrs.frozen
class Turn:
    """Where a group's round of bursts stands."""

    last: int = -1
    """The sequence that got tokens last."""
    begun: int = 0
    """Tokens of a burst of its that a tick cut off, to be completed first; 0 if it was whole."""
    passed_over: int = 0
    """Ticks with prompts in a row in which the group got less than a turn: a burst, or all of a tick."""


@attrs.frozen
class Service:
    """What tenants were given, and whose turn is next."""

    tenants: Mapping[int, float] = attrs.field(factory=dict)
    """Tenant -> weighted tokens.  Of those that have something to do, since they came."""
    turns: Mapping[Group, Turn] = attrs.field(factory=dict)
    """Of the groups that had prompts in the last division."""

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
    """Cut ``tokens`` off the endless round of bursts: what each of ``prompts`` gets.

    A short new prompt is not kept waiting by a long one, and of two long ones of a tenant neither is ever
    more than a burst ahead.  A higher class takes all it can use first, and so does the tenant that was
    served least, but others are passed over only so many ticks in a row.

    Args:
        tokens: at least 1.  All of them are given, unless the prompts have fewer.

    Nobody waits for ever: with ``g`` groups of at most ``p`` prompts, and ``tokens`` never below ``m``,
    a prompt gets some in ``(LOWER_CLASS_WAITS + g) * (1 + (p - 1) * ceil(burst / min(burst, m)))``
    divisions.
    """
    if len(prompts) == 1:
        slot, n = prompts[0], min(tokens, prompts[0].pending)
        after = attrs.evolve(service, turns={(slot.priority, slot.tenant): Turn(slot.seq_id)})
        return [(slot, n)], after.given({slot.tenant: n * PROMPT_TOKEN})
    division = _Division(prompts, tokens, service, burst)
    overdue = [group for group in division.groups.values() if group.passed_over >= LOWER_CLASS_WAITS]
    for group in sorted(overdue, key=lambda group: -group.passed_over):
        if division.left >= division.turn:
            division.give([group], most=division.turn)
    for priority in sorted({priority for priority, _ in division.groups}):
        of_class = [group for (p, _), group in division.groups.items() if p == priority]
        division.give(of_class, most=division.left)
    return [(slot, division.given[slot.seq_id]) for slot in prompts if slot.seq_id in division.given], division.after()


class _Group:
    """A group's round while tokens are divided."""

    def __init__(self, tenant: int, turn: Turn) -> None:
        self.tenant = tenant
        self.last, self.begun, self.passed_over = turn.last, turn.begun, turn.passed_over
        self.queue: list[Slot] = []
        """Whose turn is next, and after; without those that have all of their tokens."""
        self.got = 0

    def in_turn(self) -> None:
        """Sort the queue: a burst that was cut off, then those after it in the round."""
        first = self.last if self.begun else self.last + 1
        self.queue.sort(key=lambda slot: (slot.seq_id < first, slot.seq_id))
        if self.queue and self.queue[0].seq_id != self.last:
            self.begun = 0  # who was cut off has gone

    def after(self, turn: int) -> Turn:
        return Turn(self.last, self.begun, 0 if self.got >= turn else self.passed_over + 1)


class _Division:
    """One division under way."""

    def __init__(self, prompts: Sequence[Slot], tokens: int, service: Service, burst: int) -> None:
        self.left = tokens
        self.turn = min(burst, tokens)
        self.given: dict[int, int] = {}
        self.groups: dict[Group, _Group] = {}
        self._burst = burst
        self._service = service
        nothing = Turn()
        for slot in prompts:
            key = (slot.priority, slot.tenant)
            group = self.groups.get(key)
            if group is None:
                group = self.groups[key] = _Group(slot.tenant, service.turns.get(key, nothing))
            group.queue.append(slot)
        for group in self.groups.values():
            group.in_turn()
        self._counters = {group.tenant: service.of(group.tenant) for group in self.groups.values()}

    def give(self, groups: Sequence[_Group], *, most: int) -> None:
        """Bursts to ``groups``, least-served tenant first, ``most`` tokens in all."""
        able = [group for group in groups if group.queue]
        while most > 0 and able:
            group = min(able, key=lambda group: self._counters[group.tenant]) if len(able) > 1 else able[0]
            slot = group.queue[0]
            rest = slot.pending - self.given.get(slot.seq_id, 0)
            alone = len(able) == 1 and len(group.queue) == 1
            whole = rest if alone else min(rest, self._burst - group.begun)
            n = min(whole, most)
            most -= n
            self.left -= n
            self.given[slot.seq_id] = self.given.get(slot.seq_id, 0) + n
            self._counters[group.tenant] += n * PROMPT_TOKEN
            group.got += n
            group.last = slot.seq_id
            if n < whole and not alone:
                group.begun += n
                return
            group.begun = 0
            group.queue.pop(0)
            if n < rest:
                group.queue.append(slot)
            elif not group.queue:
                able.remove(group)

    def after(self) -> Service:
        """What is left for the next division."""
        turns = {key: group.after(self.turn) for key, group in self.groups.items()}
        return attrs.evolve(self._service, turns=turns).with_counters(self._counters)
