"""Measured time of calls with a few decode rows, and how these split the rows of a tick into calls.

On a CPU some row counts suit the kernels much better than others: two streams of a Q4_0 model took 8.6 ms in one call
and 3.3 ms each in their own calls; six took 18.8 ms and five 12.7 ms.  A start measures the calls, and what ticks really
take corrects a split that does not pay.

Source: docs/design/scheduler.md, "How wide a call is".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import attrs

SPLIT_THRESHOLD: Final = 0.94
"""Decode rows are split only if the calls together take less than this share of one call.  Every call has its
overhead, and measurements have noise."""

FIRST_TRIAL: Final = 16
MAX_TRIAL_INTERVAL: Final = 1024
"""Ticks before the first comparison of a split with one call, and most ticks between two comparisons.  Comparisons become
rarer as long as they confirm the usual way."""

TRIAL_TICKS: Final = 4
"""Ticks of each kind that are compared.  The fastest counts: the first one after a change takes longer, since llama.cpp
plans its graph again."""

MAX_TRIAL_TICKS: Final = 16
"""A trial that takes more ticks is given up."""

MIN_SHARE: Final = 0.5
MAX_SHARE: Final = 1.5
SHARE_SMOOTHING: Final = 0.5
"""Bounds of what one comparison finds, and its weight: a hiccup is soon forgotten."""


@attrs.frozen
class SplitTrial:
    """Compares ticks in one call with ticks in several calls, for one number of decode rows.  Immutable.

    Now and then a few ticks are computed the other way, and compared with the usual ticks just before them.  These have
    nearly the same contexts, on a machine that is as busy.
    """

    share: float
    """What a tick in several calls takes, as a share of one call."""
    interval: int = FIRST_TRIAL
    """Usual ticks before the next trial."""
    n_ticks: int = 0
    """Ticks since the last trial."""
    usual_ms: tuple[float, ...] = ()
    """The last usual ticks."""
    other_ms: tuple[float, ...] = ()
    """Ticks of the trial that runs."""

    @property
    def is_split_usually(self) -> bool:
        return self.share < SPLIT_THRESHOLD

    @property
    def is_split_now(self) -> bool:
        """Whether the next tick should be in several calls."""
        tries = self.n_ticks >= self.interval and len(self.usual_ms) == TRIAL_TICKS
        return self.is_split_usually != tries

    def observed(self, is_split: bool, ms: float) -> SplitTrial:
        """Learn from the next tick."""
        usual, other = self.usual_ms, self.other_ms
        if is_split == self.is_split_usually:
            usual = (*usual, ms)[-TRIAL_TICKS:]
        else:
            other = (*other, ms)
        n = self.n_ticks + 1
        if n > self.interval + MAX_TRIAL_TICKS:  # others decide how these ticks are computed
            return SplitTrial(self.share, self.interval)
        if len(other) < TRIAL_TICKS or not usual:
            return SplitTrial(self.share, self.interval, n, usual, other)
        split_ms, whole_ms = (usual, other) if self.is_split_usually else (other, usual)
        measured = min(split_ms) / max(min(whole_ms), 1e-6)  # noise only makes a tick slower
        measured = min(max(measured, MIN_SHARE), MAX_SHARE)
        share = self.share + SHARE_SMOOTHING * (measured - self.share)
        confirms = (measured < SPLIT_THRESHOLD) == self.is_split_usually
        return SplitTrial(share, min(2 * self.interval, MAX_TRIAL_INTERVAL) if confirms else FIRST_TRIAL)

    def interrupted(self) -> SplitTrial:
        """Other ticks came in between, so the last ones are no longer comparable."""
        return attrs.evolve(self, usual_ms=(), other_ms=())


@attrs.frozen
class DecodeCallTimes:
    """Measured time of one ``llama_decode`` call with few decode rows and short contexts.

    Measured once, when the model is loaded.  Under load, the cost of attention cannot be separated from the cost of
    the rows, so the times are not updated online.  Instead, where they are a reason to split rows, ticks in several
    calls are compared with ticks in one call, and the faster way is kept.
    """

    ms: tuple[float, ...] = (0.0,)
    """Milliseconds by number of rows, without gaps.  The first entry, for no rows, is 0."""
    trials: Mapping[int, SplitTrial] = attrs.field(factory=dict)
    """By number of rows, of those that the measured times are a reason to split."""
    last_rows: int = 0
    """Rows of the last tick that was observed."""

    @property
    def max_rows(self) -> int:
        """The largest number of rows that was measured."""
        return len(self.ms) - 1

    def split(self, rows: int) -> tuple[int, ...]:
        """Split ``rows`` into the fastest sequence of calls, widest first.

        Returns:
            Rows of each call; a single call if splitting saves too little or ``rows`` was not measured.
        """
        if not 1 < rows <= self.max_rows:
            return (rows,)
        widths, share = _fastest_split(self.ms, rows)
        trial = self.trials.get(rows)
        is_split = share < SPLIT_THRESHOLD if trial is None else trial.is_split_now
        return widths if is_split else (rows,)

    def observed(self, rows: int, n_calls: int, ms: float) -> DecodeCallTimes:
        """Learn from a tick of this many decode rows and nothing else."""
        if not 1 < rows <= self.max_rows or (share := _fastest_split(self.ms, rows)[1]) >= SPLIT_THRESHOLD:
            return self if rows == self.last_rows else attrs.evolve(self, last_rows=rows)
        trial = self.trials.get(rows) or SplitTrial(max(share, MIN_SHARE))
        if rows != self.last_rows:
            trial = trial.interrupted()
        return DecodeCallTimes(self.ms, {**self.trials, rows: trial.observed(n_calls > 1, ms)}, rows)


@lru_cache(maxsize=64)
def _fastest_split(call_ms: tuple[float, ...], rows: int) -> tuple[tuple[int, ...], float]:
    """The fastest calls for ``rows``, widest first, and what they take as a share of one call."""
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # by number of rows: time and calls
    for n in range(1, rows + 1):
        best.append(
            min((best[n - width][0] + call_ms[width], (*best[n - width][1], width)) for width in range(1, n + 1))
        )
    split_ms, widths = best[rows]
    return tuple(sorted(widths, reverse=True)), split_ms / max(call_ms[rows], 1e-6)
