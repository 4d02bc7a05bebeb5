"""Measured time of ticks with prefill, by their rows.

A GPU computes rows in tiles, so the time is a staircase: on an H100 with a 7B model, rows 64 to 128 took 0.09 ms each,
and the 129th took 4 ms.  A line through that is wrong by more than what a tight target leaves.

Source: docs/design/scheduler.md, "Stairs".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import attrs

MIN_POINTS: Final = 4
"""With fewer row counts that were measured twice there is no curve."""

MAX_NOISE: Final = 0.1
"""A device that repeats itself less well has no curve."""

MIN_DEVIATION: Final = 0.03
"""A curve that is smooth within this share of its times has no stairs."""

STEEP: Final = 1.25
"""Between two measured row counts there is a stair if a row takes this many times as long as the rows before."""

MAX_TILE: Final = 16
"""Rows that the smallest tiles of kernels have, at most."""


@attrs.frozen
class RowCurve:
    """Time by rows, never falling.

    The curve is straight between two measured row counts, and after the last one.  If there is a stair between the two,
    all rows after the first one count as on the stair, because nobody knows where it begins.
    """

    rows: tuple[int, ...]
    """Measured row counts, ascending; at least two."""
    ms: tuple[float, ...]

    @classmethod
    def measured(cls, ms: Mapping[int, Sequence[float]]) -> RowCurve | None:
        """The curve through repeated measurements, by row count; ``None`` if they are too few, or differ too much.

        The time of a row count is the fastest measurement of it and of all larger ones.  A disturbance only makes a
        measurement slower, and fewer rows never take longer.
        """
        rows = sorted(n for n, measurements in ms.items() if min(measurements) > 0)
        if sum(len(ms[n]) > 1 for n in rows) < MIN_POINTS or noise(ms) > MAX_NOISE:
            return None
        fastest = accumulate([min(ms[n]) for n in reversed(rows)], min)
        return cls(tuple(rows), tuple(fastest)[::-1])

    def at(self, rows: int) -> float:
        """Milliseconds of a tick with ``rows``.  Fewer rows than were measured take as long as the fewest."""
        n = bisect_left(self.rows, rows)
        if not n or self.is_steep(n):
            return self.ms[n]
        return self.ms[n - 1] + (rows - self.rows[n - 1]) * self.slope(n)

    def slope(self, n: int) -> float:
        """Milliseconds of a row just before the ``n``-th measured row count; after the last one, those of the last half."""
        first, last = (n - 1, n) if n < len(self.rows) else (n // 2 - 1, n - 1)
        return (self.ms[last] - self.ms[first]) / (self.rows[last] - self.rows[first])

    def is_steep(self, n: int) -> bool:
        """Whether there is a stair somewhere between the ``n``-th measured row count and the one before."""
        if not 1 < n < len(self.rows):
            return False
        mean = (self.ms[n - 1] - self.ms[0]) / (self.rows[n - 1] - self.rows[0])
        return self.slope(n) > STEEP * mean

    def may_hide_a_stair(self, n: int) -> bool:
        """Whether there may be an unknown stair between the ``n``-th measured row count and the one before."""
        return n < len(self.rows) and (self.rows[n] - self.rows[n - 1] > MAX_TILE or self.is_steep(n))

    @property
    def deviation(self) -> float:
        """The largest distance from a parabola (rows of equal price, and their attention), as a share of the time."""
        left: Sequence[float] = self.ms
        basis: list[list[float]] = []
        for degree in range(3):  # Gram-Schmidt: what is left without a parabola
            vector = [(n / self.rows[-1]) ** degree for n in self.rows]
            for other in basis:
                vector = _without(vector, other)
            basis.append(vector)
            left = _without(left, vector)
        return max([abs(distance) / ms for distance, ms in zip(left, self.ms, strict=True)])


def _without(vector: Sequence[float], direction: Sequence[float]) -> list[float]:
    """``vector`` without its part in ``direction``; what is too short for a direction has none."""
    length = sum([d * d for d in direction])
    share = sum([v * d for v, d in zip(vector, direction, strict=True)]) / length if length > 1e-12 else 0.0
    return [v - share * d for v, d in zip(vector, direction, strict=True)]


def noise(ms: Mapping[int, Sequence[float]]) -> float:
    """By how much the two fastest measurements of a row count differ, as a share: the median of the row counts."""
    fastest = [
        sorted(measurements)[:2] for measurements in ms.values() if len(measurements) > 1 and min(measurements) > 0
    ]
    shares = sorted([second / first - 1 for first, second in fastest])
    return shares[len(shares) // 2]


@attrs.frozen
class PrefillCurves:
    """The curves of one KV layout."""

    prompt: RowCurve
    """Calls with prompt tokens alone."""
    mixed: RowCurve | None = None
    """Calls with decodes and prompt tokens, by both together; ``None`` if a tick computes them in different calls."""
    n_decodes: int = 0
    """How many decodes ``mixed`` was measured with."""

    def of(self, decode_rows: int) -> tuple[RowCurve, int, int]:
        """The curve for ticks with ``decode_rows``, how many of these it counts as rows, and how many it was measured with."""
        if decode_rows and self.mixed is not None:
            return self.mixed, decode_rows, self.n_decodes
        return self.prompt, 0, 0

    @property
    def has_stairs(self) -> bool:
        """Whether the measured curve is far from a smooth one."""
        return (self.mixed or self.prompt).deviation > MIN_DEVIATION
