"""Counts by principal, for as many principals as a page of metrics can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

MAX_PRINCIPALS: Final = 64
"""Principals with counts of their own; names come from outside."""

OTHER: Final = "other"
"""All principals together that came when there were ``MAX_PRINCIPALS``."""


@attrs.define
class PrincipalCounts:
    """What one principal was given since the start."""

    requests_total: int = 0
    tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0


class PrincipalMetrics:
    """Counts for the first ``MAX_PRINCIPALS`` principals by name, and for all others together."""

    def __init__(self) -> None:
        self._counts: dict[str, PrincipalCounts] = {}

    def of(self, name: str) -> PrincipalCounts:
        """The counts that ``name`` adds to."""
        counts = self._counts.get(name)
        return self._counts.setdefault(self._label(name), PrincipalCounts()) if counts is None else counts

    def _label(self, name: str) -> str:
        return name if name in self._counts or len(self._counts) < MAX_PRINCIPALS else OTHER

    def snapshot(self, running: Iterable[str]) -> dict[str, Any]:
        """Plain numbers by principal.

        Args:
            running: the principal of each running request.
        """
        for name in (names := [*running]):
            self.of(name)
        found = {name: {**attrs.asdict(counts, recurse=False), "running": 0} for name, counts in self._counts.items()}
        for name in names:
            found[self._label(name)]["running"] += 1
        return found
