"""What measurements are kept in: distributions, recent values, means.  Each is plain numbers, without locks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Any, Final

import attrs
import numpy as np

WINDOW: Final = 4096
"""Number of measurements that percentiles cover: the last 40 seconds at 100 tokens a second."""


class RecentValues:
    """A ring of the last ``size`` measurements. Percentiles are computed on demand and cached.

    Args:
        levels: the percentiles that a snapshot has, each in [0, 100].
    """

    def __init__(self, *levels: int, size: int = WINDOW) -> None:
        self._levels = levels
        self._values = np.zeros(size, dtype=np.float64)
        self._count = 0
        self._cache: dict[tuple[float, ...], list[float | None]] = {}

    def add(self, value: float) -> None:
        self._values[self._count % len(self._values)] = value
        self._count += 1
        if self._cache:
            self._cache.clear()

    def percentiles(self, *levels: float) -> list[float | None]:
        """One value for each level in [0, 100]; ``None`` before the first measurement."""
        if levels not in self._cache:
            values = self._values[: self._count]
            percentiles = np.percentile(values, levels) if len(values) else [None] * len(levels)
            self._cache[levels] = [None if value is None else round(float(value), 3) for value in percentiles]
        return self._cache[levels]

    def snapshot(self, name: str) -> dict[str, float | None]:
        """The percentiles by name: ``ttft_p50_ms`` for ``ttft_ms``; 100 is the maximum."""
        unit = "_ms" if name.endswith("_ms") else ""
        names = [f"{name.removesuffix(unit)}_{'max' if n == 100 else f'p{n}'}{unit}" for n in self._levels]
        return dict(zip(names, self.percentiles(*self._levels), strict=True))


@attrs.define
class Average:
    """The mean of all measurements since the start."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """``None`` before the first measurement."""
        return round(self.total / self.count, 3) if self.count else None


# -- histograms, in the shape that Prometheus adds up over time and over daemons ------------------------

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
        self.sum = 0.0
        """The sum of all measurements."""

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; ``counts`` are cumulative."""
        *counts, count = accumulate(self._counts)
        return {"bounds": list(self.bounds), "counts": counts, "count": count, "sum": round(self.sum, 3)}


# -- all measurements of an object -----------------------------------------------------------------------


def snapshot_of(counts: attrs.AttrsInstance) -> dict[str, Any]:
    """Plain numbers by name, of the public fields of ``counts``; ``None`` for figures without a measurement."""
    numbers: dict[str, Any] = {}
    for field in attrs.fields(type(counts)):
        name, value = field.name, getattr(counts, field.name)
        if name.startswith("_"):
            continue
        if isinstance(value, RecentValues):
            numbers |= value.snapshot(name)
        elif isinstance(value, Average):
            numbers[f"{name}_avg"] = value.value
        elif isinstance(value, Counter):
            numbers[f"{name}_total"] = dict(value)
        elif isinstance(value, Histogram):
            numbers[name] = value.snapshot()
        elif value is None or isinstance(value, int | float):
            numbers[name] = value
    return numbers
