"""Which request kills the engine: after a crash, the answers of the fatal step are retried in halves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")

FATAL_CRASHES = 2
"""An answer is to blame if it was in this many fatal steps without progress in between, and alone in the last one."""


@attrs.define
class _Suspect:
    end: int
    """Tokens that it would have had in the KV cache after the fatal step; from there on it is above suspicion."""
    n_crashes: int = 1


class CrashBisection(Generic[T]):
    """Finds the answer that kills the engine, without knowing what an answer is.

    While there are suspects, only one group of them runs at a time.  A suspect that gets past the point of the crash is
    cleared.  With one culprit among ``n`` answers it takes about ``log2(n)`` further crashes to find it; a crash that was
    no answer's fault costs none.
    """

    def __init__(self) -> None:
        self._groups: list[list[T]] = []
        self._suspects: dict[T, _Suspect] = {}
        self.n_crashes = 0
        """Crashes since a step was completed."""

    @property
    def is_active(self) -> bool:
        """Whether there are suspects."""
        return bool(self._suspects)

    def current(self, able: Collection[T]) -> Collection[T]:
        """The answers that may run now: the first group with a member in ``able``.  Empty: all may run."""
        return next((group for group in self._groups if any(item in able for item in group)), ())

    def crashed(self, ends: Mapping[T, int]) -> T | None:
        """A step has killed the engine.

        Args:
            ends: for each answer in it, how many tokens it would have had in the KV cache after the step.

        Returns:
            The answer to blame, if that is clear now.  It is then no longer a suspect.
        """
        self.n_crashes += 1
        self._groups = [left for group in self._groups if (left := [item for item in group if item not in ends])]
        for item, end in ends.items():
            known = self._suspects.get(item)
            self._suspects[item] = (
                _Suspect(end) if known is None else _Suspect(max(end, known.end), known.n_crashes + 1)
            )
        items = list(ends)
        if len(items) == 1 and self._suspects[items[0]].n_crashes >= FATAL_CRASHES:
            del self._suspects[items[0]]
            return items[0]
        half = (len(items) + 1) // 2
        self._groups[:0] = [group for group in (items[:half], items[half:]) if group]
        return None

    def step_completed(self, ends: Mapping[T, int]) -> None:
        """A step was completed.

        Args:
            ends: for each answer in it, how many tokens it has in the KV cache now.
        """
        if ends:
            self.n_crashes = 0
        if self._suspects:
            for item, end in ends.items():
                suspect = self._suspects.get(item)
                if suspect is not None and end >= suspect.end:
                    self.discard(item)

    def discard(self, item: T) -> None:
        """``item`` is above suspicion, or has ended."""
        if self._suspects.pop(item, None) is not None:
            self._groups = [left for group in self._groups if (left := [other for other in group if other != item])]
