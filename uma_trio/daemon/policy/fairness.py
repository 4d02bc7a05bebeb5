"""Divides prefill tokens among waiting prompts: by least-served principal, then by priority, then by deadline.

Classes order the prompts of one principal.  Only ``background`` counts among principals too: its requests go last in the
queue, and its prompts wait for others before they come here (``plan``).

Fairness between principals is VTC (virtual token counter).  Each principal has a counter, which rises with every
token that it is given: prefill tokens count once, generated tokens twice, and both are divided by the principal's
weight.  The principal with the lowest counter is served next.  A principal that arrives, or returns after a break,
starts at the lowest counter of the active ones, so nobody saves up service while idle.

Within a principal, prompts are not interleaved, since then all of them would finish last.  Prompts that fit into one
burst go first.  The others follow by deadline, and a prompt with less work before one with more (``WAIT_PER_WORK``).

No order starves anyone: a group that was skipped too often gets a burst before all others.

Source: Sheng et al., "Fairness in Serving Large Language Models" (2023; OSDI 2024).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import attrgetter
from typing import Final, TypeAlias

import attrs

from uma_trio.daemon.policy.view import Priority, SequenceView

PREFILL_TOKEN_COST: Final = 1.0
DECODE_TOKEN_COST: Final = 2.0

AGING_INTERVAL_S: Final = 30.0
"""A queued request rises by one priority class each time it has waited this long."""

MAX_LEAD: Final = 128.0
"""Virtual tokens by which a principal may be ahead of another one.  A returning principal does not wait for more than
these: it gets further ahead only while others ask for less than their share.  A principal that runs further ahead loses
places (``places.py``)."""

MAX_SKIPPED_TICKS: Final = 8
"""Prefill ticks in a row in which a group may be skipped.  Then the group gets a burst, after the groups that have
been skipped for longer."""

ROTATION_PERIOD: Final = 32
"""Once in this many ticks that serve a group, its first burst goes to the next prompt by sequence id, whatever the
deadlines: a prompt with a late deadline is not overtaken for ever."""

WAIT_PER_WORK: Final = 8.0
"""A prompt with less work goes before one that is due earlier, by at most this many times the difference of their work.
So the mean time to first token is short, and no prompt waits for many times as long as it takes alone."""

_SEQ_ID: Final = attrgetter("seq_id")

Group: TypeAlias = tuple[Priority, str]
"""The prompts of one principal in one priority class."""


@attrs.frozen
class GroupHistory:
    """What a group was given in recent ticks."""

    last_rotated_id: int = -1
    """Sequence that was served by the last rotation; -1 before the first rotation."""
    n_served: int = 0
    """Ticks since that rotation in which the group was given tokens."""
    n_skipped: int = 0
    """Prefill ticks in a row that gave the group less than a burst, or less than all tokens of a smaller tick."""


NO_HISTORY: Final = GroupHistory()


@attrs.frozen
class Service:
    """What each principal was given so far.  Immutable: every change returns a new value."""

    counters: Mapping[str, float] = attrs.field(factory=dict)
    """Virtual token counters of the active principals."""
    histories: Mapping[Group, GroupHistory] = attrs.field(factory=dict)
    """Histories of the groups whose prompts the last ``divide`` did not finish."""
    departed: Mapping[str, float] = attrs.field(factory=dict)
    """Counters of idle principals, as long as they are above the lowest counter of the active ones."""

    def counter(self, principal: str) -> float:
        """Virtual token counter of ``principal``.

        A new principal counts as slightly less served than the least-served active one, so it goes next.  A returning
        principal keeps its old counter if that is higher, up to ``MAX_LEAD``.
        """
        counter = self.counters.get(principal)
        if counter is not None:
            return counter
        lowest = min(self.counters.values(), default=0.0)
        old = self.departed.get(principal, -math.inf)
        return max(min(old, lowest + MAX_LEAD), math.nextafter(lowest, -math.inf))

    def decoded(self, views: Sequence[SequenceView], n: int = 1) -> Service:
        """Charge ``n`` generated tokens to each of ``views``."""
        if not views:
            return self
        costs: dict[str, float] = {}
        for view in views:
            costs[view.principal] = costs.get(view.principal, 0.0) + n * DECODE_TOKEN_COST / view.weight
        return self.charged(costs)

    def charged(self, costs: Mapping[str, float]) -> Service:
        """Raise the counter of each principal by its cost, in virtual tokens."""
        return self.with_counters({principal: self.counter(principal) + cost for principal, cost in costs.items()})

    def refunded(self, before: Service, after: Service) -> Service:
        """Take back what was charged between ``before`` and ``after``, for a tick that was not computed."""
        charged = {p: after.counters[p] - before.counter(p) for p in after.counters}
        counters = {p: counter - charged.get(p, 0.0) for p, counter in self.counters.items()}
        return Service(counters, before.histories, self.departed)

    def with_counters(self, counters: Mapping[str, float]) -> Service:
        """Set the counters of some principals, which are active from now on."""
        departed = {p: c for p, c in self.departed.items() if p not in counters} if self.departed else self.departed
        return Service({**self.counters, **counters}, self.histories, departed)

    def arrived(self, principal: str, waiting: Collection[str]) -> Service:
        """Raise the counter of ``principal`` to the lowest counter in ``waiting``.  Call it when a principal without
        waiting requests gets one.

        A principal with one slow stream falls far behind the principals whose prompts are in prefill.  That is no
        claim to extra service, because it did not ask for more.

        Args:
            waiting: the other principals with requests in the queue or prompts in prefill.
        """
        lowest = min([self.counter(other) for other in waiting], default=0.0)
        return self.with_counters({principal: max(self.counter(principal), lowest)})

    def without(self, principal: str) -> Service:
        """Make ``principal`` idle, because its last request has ended.

        Its counter is kept while it is above the lowest active one.  Otherwise a principal could send its requests in
        waves and start every wave with a clean counter.
        """
        counters = {p: c for p, c in self.counters.items() if p != principal}
        lowest = min(counters.values(), default=math.inf)
        idle = {**self.departed, principal: self.counter(principal)}
        return Service(counters, self.histories, {p: c for p, c in idle.items() if c > lowest})


def rank(
    priority: Priority, principal: str, waited_s: float, service: Service, *, holds_place: bool
) -> tuple[bool, bool, float, int]:
    """Sort key of a queued request, lowest first.

    ``background`` goes last, then principals that hold no place go first, then the least served one.  The other classes
    order the requests of one principal only, so no principal gets ahead of another by its choice of a class.

    Args:
        waited_s: seconds since the request arrived; they raise its class.
        holds_place: whether a request of ``principal`` runs.
    """
    risen = max(0, priority - int(waited_s / AGING_INTERVAL_S))
    return risen >= Priority.BACKGROUND, holds_place, service.counter(principal), risen


def divide(
    prefills: Sequence[SequenceView], tokens: int, service: Service, *, burst: int, token_s: float = 0.0
) -> tuple[list[tuple[SequenceView, int]], Service]:
    """Divide the prefill tokens of one tick among ``prefills``.

    The principal with the lowest counter is given a burst at a time, or all that is left if no other principal has
    prompts.  Of its prompts, those of higher classes take all that they can use.  A group that was skipped for ``MAX_SKIPPED_TICKS`` gets a burst before everything else.

    Within a group, prompts that fit into a burst go first and the others follow, both by deadline and work
    (``WAIT_PER_WORK``).  Each prompt gets all that it can use before the next one gets any.  Every
    ``ROTATION_PERIOD``-th division that serves the group begins with a burst for the next prompt by sequence id.

    Nobody starves.  Among ``g`` groups, each is served at least once in ``w = MAX_SKIPPED_TICKS + g`` divisions (a
    single group in each, ``w = 1``).  A prompt in a group that has prompts on ``p`` sequences advances within
    ``ROTATION_PERIOD * p * w`` divisions.

    Args:
        tokens: tokens to divide, at least 1.
        burst: tokens that a principal is given before the next one's turn.
        token_s: seconds that a prefill token takes; 0 orders by deadline alone.

    Returns:
        The prompts that advance, with their tokens, and the service after that.  All ``tokens`` are used unless the
        prompts have fewer pending.
    """
    by_key: defaultdict[Group, list[SequenceView]] = defaultdict(list)
    work_s = WAIT_PER_WORK * token_s
    for view in sorted(sorted(prefills, key=_SEQ_ID), key=lambda view: view.due_s + work_s * view.n_pending):
        by_key[view.priority, view.principal].append(view)
    groups = [
        _Group(*key, views, service.histories.get(key, NO_HISTORY), sum([view.n_pending for view in views]))
        for key, views in by_key.items()
    ]
    counters = {group.principal: service.counter(group.principal) for group in groups}
    _divide_among_groups(groups, tokens, counters, burst)
    given: list[tuple[SequenceView, int]] = []
    histories: dict[Group, GroupHistory] = {}
    for group in groups:
        own, history = group.divide(burst, full_turn=min(burst, tokens))
        given += own
        if group.n_wanted:
            histories[group.priority, group.principal] = history
    return given, attrs.evolve(service.with_counters(counters), histories=histories)


@attrs.define(eq=False)
class _Group:
    """One group during a division."""

    priority: Priority
    principal: str
    views: list[SequenceView]
    """By deadline and work."""
    history: GroupHistory
    n_wanted: int
    """Tokens that the group can still use."""
    n_given: int = 0

    def take(self, most: int, counters: dict[str, float]) -> int:
        """Give the group up to ``most`` tokens, charge its principal, and return how many it took."""
        n = min(most, self.n_wanted)
        self.n_wanted -= n
        self.n_given += n
        counters[self.principal] += n * PREFILL_TOKEN_COST / self.views[0].weight
        return n

    def divide(self, burst: int, full_turn: int) -> tuple[Iterable[tuple[SequenceView, int]], GroupHistory]:
        """Divide the group's tokens among its prompts.

        Args:
            full_turn: with fewer tokens than this the group counts as skipped.
        """
        last_rotated_id, n_served = self.history.last_rotated_id, self.history.n_served
        n_skipped = 0 if self.n_given >= full_turn else self.history.n_skipped + 1
        if not self.n_given:
            return (), GroupHistory(last_rotated_id, n_served, n_skipped)
        given: dict[SequenceView, int] = {}
        left, n_served = self.n_given, n_served + 1
        if n_served == ROTATION_PERIOD:
            view = min([view for view in self.views if view.seq_id > last_rotated_id] or self.views, key=_SEQ_ID)
            given[view] = min(left, burst, view.n_pending)
            left -= given[view]
            last_rotated_id, n_served = view.seq_id, 0
        short = (view for view in self.views if view.n_pending <= burst)
        long = (view for view in self.views if view.n_pending > burst)
        for view in chain(short, long):
            if not left:
                break
            already = given.get(view, 0)
            if n := min(left, view.n_pending - already):
                given[view] = already + n
                left -= n
        return given.items(), GroupHistory(last_rotated_id, n_served, n_skipped)


def _divide_among_groups(groups: Sequence[_Group], tokens: int, counters: dict[str, float], burst: int) -> None:
    """Give ``tokens`` to ``groups``, and charge ``counters``."""
    left, full_turn = tokens, min(burst, tokens)
    overdue = [group for group in groups if group.history.n_skipped >= MAX_SKIPPED_TICKS]
    for group in sorted(overdue, key=lambda group: -group.history.n_skipped):
        if left >= full_turn:
            left -= group.take(full_turn, counters)
    wanting: defaultdict[str, list[_Group]] = defaultdict(list)
    for group in sorted(groups, key=attrgetter("priority")):
        if group.n_wanted:
            wanting[group.principal].append(group)
    heap = [(counters[principal], principal) for principal in wanting]
    heapify(heap)
    while left and heap:
        _, principal = heap[0]
        own = wanting[principal]
        left -= own[0].take(min(left, burst) if len(heap) > 1 else left, counters)
        if not own[0].n_wanted:
            del own[0]
        if own:
            heapreplace(heap, (counters[principal], principal))
        else:
            heappop(heap)
