"""Decides which running answers lose their places, so that a waiting principal gets its share, and when refused requests
should come back.

A place is a sequence id with reserved KV cells.  The share of a principal is dominant-resource fair: the larger one of
its fraction of all sequence ids and its fraction of all cells, divided by its weight.

Source: Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import attrs

from uma_trio.daemon.policy.fairness import MAX_LEAD
from uma_trio.daemon.policy.view import Priority

MIN_TURN_S: Final = 0.5
"""An answer keeps the only place of its principal for at least this long."""

LONGEST_WAIT_S: Final = 60.0
"""Clients of OpenAI's API do not honour longer waits."""


@attrs.frozen(kw_only=True)
class Place:
    """What a running answer holds."""

    principal: str
    weight: float
    priority: Priority
    cells: int
    n_tokens: int
    """Tokens to compute again if it loses its place."""
    service: float
    """Virtual tokens that its principal was given."""
    turn_ends_s: float
    """When it may lose its place even if that is the only one of its principal."""
    can_yield: bool = True
    """Whether it can lose its place now."""


@attrs.frozen(kw_only=True)
class Claimant:
    """The waiting request that is next."""

    principal: str
    weight: float
    priority: Priority
    cells: int
    service: float = -math.inf
    """Virtual tokens that its principal was given."""


@attrs.frozen
class Capacity:
    """What a model's KV cache has in total, and what of it is free."""

    sequences: int
    cells: int
    free_sequences: int
    free_cells: int

    @property
    def has_spare(self) -> bool:
        """Whether an average request would find a place."""
        return self.free_sequences >= 1 and self.free_cells >= self.cells // self.sequences

    def without_spare(self) -> Capacity:
        """What is free beyond such a place."""
        free_cells = max(0, self.free_cells - self.cells // self.sequences)
        return attrs.evolve(self, free_sequences=max(0, self.free_sequences - 1), free_cells=free_cells)


@attrs.frozen
class Claim:
    """Places that a waiting request may take."""

    victims: tuple[int, ...]
    """Indices of the answers that lose their places."""
    due_s: float
    """When they do."""


@attrs.define
class _Holder:
    """A principal and its places."""

    weight: float
    sequences: int = 0
    cells: int = 0

    def add(self, place: Place, n: int) -> None:
        """Count ``place`` ``n`` times more."""
        self.sequences += n
        self.cells += n * place.cells

    def share(self, kv: Capacity, place: Place | Claimant | None = None, n: int = 1) -> float:
        """Its weighted share, with ``n`` times ``place`` more."""
        sequences, cells = (0, 0) if place is None else (n, n * place.cells)
        return max((self.sequences + sequences) / kv.sequences, (self.cells + cells) / kv.cells) / self.weight


def _holders(places: Iterable[Place]) -> dict[str, _Holder]:
    holders: dict[str, _Holder] = {}
    for place in places:
        holders.setdefault(place.principal, _Holder(place.weight)).add(place, 1)
    return holders


def claim(claimant: Claimant, places: Sequence[Place], kv: Capacity) -> Claim | None:
    """Choose the answers that make room for ``claimant``.

    A principal takes a place from another one that was given more service (``MAX_LEAD``), and whose share is still as large
    as its own afterwards.  So two principals never take a place from each other in turns, and one whose requests are short
    may hold more places.  A principal that holds no place may take one from anybody: first from those that keep others, and
    the only place of a principal when its turn ends.

    The principal with the largest share loses a place.  Of its answers it is that of the lowest class, then the one that
    has the fewest tokens to compute again.

    A request of class ``background`` takes places from other ``background`` requests only.  Every other request takes the
    places of ``background`` requests first and at once, also those of its own principal.

    Args:
        places: of all running answers.

    Returns:
        ``None`` if ``claimant`` has to wait until a place becomes free.
    """
    kv, holders = capacity_for(claimant, places, kv), _holders(places)
    own = holders.setdefault(claimant.principal, _Holder(claimant.weight))
    holds_nothing, share_with_it = not own.sequences, own.share(kv, claimant)
    is_background = claimant.priority is Priority.BACKGROUND

    def gives_way(place: Place) -> bool:
        return place.priority is Priority.BACKGROUND and not is_background

    left = {
        index: place
        for index, place in enumerate(places)
        if place.can_yield
        and (place.principal != claimant.principal or gives_way(place))
        and (place.priority is Priority.BACKGROUND or not is_background)
    }
    victims: dict[int, Place] = {}
    while not _fits(claimant, victims.values(), kv):
        costs = [
            (_cost(place, holders[place.principal], kv, gives_way=gives_way(place)), index)
            for index, place in left.items()
            if gives_way(place)
            or holds_nothing
            or (
                place.service > claimant.service + MAX_LEAD
                and share_with_it <= holders[place.principal].share(kv, place, -1)
            )
        ]
        if not costs:
            return None
        _, index = min(costs)
        victims[index] = left.pop(index)
        holders[victims[index].principal].add(victims[index], -1)
    for index in [*victims]:  # a later one may have been large enough without it
        others = {other: place for other, place in victims.items() if other != index}
        if _fits(claimant, others.values(), kv):
            victims = others
    if not victims:
        return None
    left_over = {place.principal for index, place in enumerate(places) if index not in victims}
    turns = [
        victim.turn_ends_s for victim in victims.values() if victim.principal not in left_over and not gives_way(victim)
    ]
    return Claim(tuple(victims), max(turns, default=-math.inf))


def capacity_for(claimant: Claimant, places: Iterable[Place], kv: Capacity) -> Capacity:
    """What is free for ``claimant``: not the spare place, if it is of class ``background`` and others keep one."""
    keeps_spare = claimant.priority is Priority.BACKGROUND and _are_mixed(places)
    return kv.without_spare() if keeps_spare else kv


def claim_spare(places: Sequence[Place], kv: Capacity) -> Claim | None:
    """Choose the ``background`` answer that gives up its place in advance, for the next request of another class.

    While others run, such a request would wait for copies next to their tokens.  While none runs, copies are quick, so all places
    are for ``background`` then.  One ``background`` answer stays, so that this class goes on with few places, too.
    """
    held = [index for index, place in enumerate(places) if place.priority is Priority.BACKGROUND]
    left = [index for index in held if places[index].can_yield]
    if kv.has_spare or len(held) < 2 or not left or not _are_mixed(places):
        return None
    holders = _holders(places)
    costs = [(_cost(places[index], holders[places[index].principal], kv, gives_way=True), index) for index in left]
    return Claim((min(costs)[1],), -math.inf)


def _are_mixed(places: Iterable[Place]) -> bool:
    """Whether ``background`` answers run next to others."""
    return len({place.priority is Priority.BACKGROUND for place in places}) == 2


def goes_before(claimant: Claimant, principal: str, places: Sequence[Place], kv: Capacity) -> bool:
    """Whether ``claimant`` gets room that becomes free before ``principal``, which wants more.

    ``principal`` may just have lost its last place.
    """
    if claimant.principal == principal:
        return False
    holders = _holders(places)
    own, other = holders.get(claimant.principal), holders.get(principal)
    return own is None or other is None or own.share(kv, claimant) <= other.share(kv)


def _fits(claimant: Claimant, victims: Collection[Place], kv: Capacity) -> bool:
    """Whether there is room for ``claimant`` without ``victims``."""
    cells = kv.free_cells + sum([victim.cells for victim in victims])
    return kv.free_sequences + len(victims) >= 1 and cells >= claimant.cells


def _cost(place: Place, holder: _Holder, kv: Capacity, *, gives_way: bool) -> tuple[bool, float, float, int, int]:
    """Sort key of a place: the lowest one is taken first."""
    turn_ends_s = place.turn_ends_s if holder.sequences == 1 and not gives_way else -math.inf
    return not gives_way, turn_ends_s, -holder.share(kv), -place.priority, place.n_tokens


@attrs.define
class RetrySchedule:
    """When refused requests should be sent again: each at a moment of its own, as fast as there will be room for them.

    Without it, all that were refused together would come back together, and most of them would be refused again.
    """

    _last_s: float = -math.inf
    """The latest moment that a request was given."""

    def wait_s(self, now_s: float, first_s: float, interval_s: float) -> float:
        """How long the next refused request should wait.

        Args:
            first_s: time until there is room for the first one.
            interval_s: time between two requests that end.
        """
        at = min(max(now_s + first_s, self._last_s + interval_s), now_s + LONGEST_WAIT_S)
        self._last_s = at
        return at - now_s

    def clear(self) -> None:
        """Forget those that have not come back: there is room for everybody."""
        self._last_s = -math.inf
