"""Histograms with fixed bounds, in the shape that Prometheus adds up over time and over daemons."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any, Final

TOKEN_MS: Final = (0.5, 0.7, *(n * 10**power for power in range(4) for n in (1, 1.5, 2, 3, 5, 7)), 10_000)
"""Bounds for what happens in every tick."""

REQUEST_MS: Final = (*(n * 10**power for power in range(6) for n in (1, 2, 5)), 1_000_000)
"""Bounds for what happens once in a request: one millisecond to a quarter of an hour."""

SEQUENCES: Final = (*(1 << power for power in range(9)),)
"""1 to 256, which is the largest ``parallel``."""

TOKENS: Final = REQUEST_MS


class Histogram:
    """How many measurements since the start were at most each of ``bounds``.

    Args:
        bounds: ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bucket: above the bound before, and at most this one.  The last bucket has no bound."""
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``counts`` are cumulative."""
        *counts, count = accumulate(self._counts)
        return {"bounds": list(self.bounds), "counts": counts, "count": count, "sum": round(self._sum, 3)}
