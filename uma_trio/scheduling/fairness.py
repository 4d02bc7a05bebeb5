"""Whose prompt is read next: by class, then by least-served tenant, then in rounds of bursts.

A tenant's *service* is the tokens it was given, generated ones counting twice.  The least-served tenant
that has something to read goes next; a tenant that comes back after a while starts where the least-served
one is, so that nobody saves up service while away.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): virtual token counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from uma_trio.scheduling.policy import Slot

PROMPT_TOKEN: Final = 1.0
GENERATED_TOKEN: Final = 2.0

LOWER_CLASS_WAITS: Final = 8
"""Ticks with prompts at most that a class is passed over for one above it."""


@attrs.frozen
class Service:
    """What tenants were given, and where the round of bursts stands."""

    tenants: Mapping[int, float] = attrs.field(factory=dict)
    """Tenant -> weighted tokens.  Of those that have something to do, since they came."""
    last: int = -1
    """The sequence that completed a burst last; one that a tick cut off goes on in the next."""
    begun: int = 0
    """Tokens of the burst that was cut off."""
    passed_over: int = 0
    """Ticks with prompts in a row in which only the highest class got something."""

    def of(self, tenant: int) -> float:
        """What ``tenant`` counts as having been given."""
        found = self.tenants.get(tenant)
        return min(self.tenants.values(), default=0.0) if found is None else found

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
        tenants = dict(self.tenants)
        for tenant, amount in more.items():
            tenants[tenant] = self.of(tenant) + amount
        return attrs.evolve(self, tenants=tenants)

    def without(self, tenant: int) -> Service:
        """``tenant`` has nothing to do any more: when it comes back it counts as the least-served one."""
        return attrs.evolve(self, tenants={t: s for t, s in self.tenants.items() if t != tenant})


def divide(
    prompts: Sequence[Slot], tokens: int, service: Service, *, burst: int
) -> tuple[list[tuple[Slot, int]], Service]:
    """Cut ``tokens`` off the endless round of bursts: what each of ``prompts`` gets.

    A short new prompt is not kept waiting by a long one, and of two long ones of a tenant neither is ever
    more than a burst ahead.  A higher class takes all it can use first, but a lower one is passed over
    only so many ticks in a row.
    """
    if len(prompts) == 1:
        slot, n = prompts[0], min(tokens, prompts[0].pending)
        after = attrs.evolve(service, last=slot.seq_id, begun=0, passed_over=0)
        return [(slot, n)], after.given({slot.tenant: n * PROMPT_TOKEN})
    classes = sorted({slot.priority for slot in prompts})
    round_ = _Round(service, tokens, burst)
    if len(classes) > 1 and service.passed_over >= LOWER_CLASS_WAITS:
        lower = [slot for slot in prompts if slot.priority != classes[0]]
        round_.give(lower, most=min(burst, tokens))
    for priority in classes:
        round_.give([slot for slot in prompts if slot.priority == priority], most=round_.left)
    given = [(slot, round_.given[slot.seq_id]) for slot in prompts if slot.seq_id in round_.given]
    waits = len(classes) > 1 and all(slot.priority == classes[0] for slot, _ in given)
    return given, round_.service(service.passed_over + 1 if waits else 0)


class _Round:
    """One division under way."""

    def __init__(self, service: Service, tokens: int, burst: int) -> None:
        self.left = tokens
        self.given: dict[int, int] = {}
        self._burst = burst
        self._service = service
        self._counters: dict[int, float] = {}
        self._last, self._begun = service.last, service.begun

    def give(self, prompts: Sequence[Slot], *, most: int) -> None:
        """Bursts to ``prompts`` in turn, least-served tenant first, ``most`` tokens in all."""
        queues: dict[int, deque[Slot]] = {}
        for slot in sorted(prompts, key=lambda slot: (slot.seq_id <= self._last, slot.seq_id)):
            if self.given.get(slot.seq_id, 0) < slot.pending:
                queues.setdefault(slot.tenant, deque()).append(slot)
                self._counters.setdefault(slot.tenant, self._service.of(slot.tenant))
        while most > 0 and queues:
            tenant = min(queues, key=self._counters.__getitem__)
            queue = queues[tenant]
            slot = queue.popleft()
            rest = slot.pending - self.given.get(slot.seq_id, 0)
            alone = not queue and len(queues) == 1
            whole = rest if alone else min(rest, self._burst - self._begun)
            n = min(whole, most)
            self.given[slot.seq_id] = self.given.get(slot.seq_id, 0) + n
            self._counters[tenant] += n * PROMPT_TOKEN
            self.left -= n
            most -= n
            if n < whole and not alone:
                self._begun += n
                return
            self._last, self._begun = slot.seq_id, 0
            if n < rest:
                queue.append(slot)
            if not queue:
                del queues[tenant]

    def service(self, passed_over: int) -> Service:
        """What is left for the next division."""
        tenants = {**self._service.tenants, **self._counters}
        return Service(tenants, self._last, self._begun, passed_over)
