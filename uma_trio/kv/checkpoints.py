"""What sequences of a memory that cannot be cut can go back to.

A recurrent state stands for all tokens before it and knows no earlier one.  So a copy of it is kept here and there, a
*checkpoint*: small beside keys and values, which are cut as always.

Pure bookkeeping: the engine keeps the copies themselves, by number.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, TypeAlias

import attrs

APART: Final = 64
"""Tokens between two checkpoints of a sequence at least; fewer are soon computed again."""

EACH: Final = 8
"""Most checkpoints of a sequence."""

BEFORE_END: Final = 8
"""Tokens of a prompt behind its last checkpoint: the last one is computed again where an answer is asked for again, and
what a chat template puts before an answer may be another thing in the next turn."""

INSIDE: Final = 3
"""Most checkpoints that are made inside a prompt in case that others leave it there."""

FAR_APART: Final = 256
"""Tokens between these at least: to copy a state takes time, and nobody may ever want it."""


@attrs.frozen
class Checkpoint:
    """The state of a sequence after so many tokens."""

    length: int
    mark: int
    """What the engine calls it."""


Checkpoints: TypeAlias = tuple[Checkpoint, ...]
"""Of one sequence, by length."""


def latest(points: Checkpoints, length: int) -> Checkpoint | None:
    """The last one that has ``length`` tokens at most."""
    found = None
    for point in points:
        if point.length <= length:
            found = point
    return found


def least(points: Checkpoints) -> Checkpoint:
    """The one to go first, of at least one: the oldest, but rather not the first, where most begin alike."""
    return points[1] if len(points) > 2 else points[0]


def halves(start: int, end: int) -> list[int]:
    """Places in a stretch of a prompt of which nobody knows how far others will begin like it.

    Each halves what is left.  So who goes another way ``n`` tokens before the end has some ``n`` of those before that to
    compute again at most, if that is no less than an eighth of the stretch: what has much in common is had cheaply.
    """
    found: list[int] = []
    while len(found) < INSIDE and end - start >= 2 * FAR_APART:
        start += (end - start) // 2
        start -= start % APART  # kernels like round numbers of rows
        found.append(start)
    return found


class Marks:
    """Numbers of checkpoints, some of which several sequences can go back to.

    Args:
        most: that there are at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._holders: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._holders)

    def new(self, length: int) -> Checkpoint:
        """One more, of one sequence."""
        self._next += 1
        self._holders[self._next] = 1
        return Checkpoint(length, self._next)

    def share(self, points: Iterable[Checkpoint]) -> None:
        """One more sequence has these."""
        for point in points:
            self._holders[point.mark] += 1

    def drop(self, points: Iterable[Checkpoint]) -> list[int]:
        """A sequence has these no longer; numbers of those that none has."""
        gone = []
        for point in points:
            self._holders[point.mark] -= 1
            if not self._holders[point.mark]:
                del self._holders[point.mark]
                gone.append(point.mark)
        return gone

    def check_integrity(self, held: Iterable[Checkpoints]) -> None:
        """These are what all sequences have, or AssertionError."""
        holders: dict[int, int] = {}
        for points in held:
            assert len(points) <= EACH
            assert all(one.length < other.length for one, other in pairwise(points))
            for point in points:
                holders[point.mark] = holders.get(point.mark, 0) + 1
        assert holders == self._holders
        assert len(holders) <= self.most
