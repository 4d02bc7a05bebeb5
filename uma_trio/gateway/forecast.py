"""Headers that say when a streamed answer is predicted to start and to end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, TypeVar

from uma_trio.client import Forecast

Item = TypeVar("Item")

POSITION: Final = "x-uma-queue-position"
ETA: Final = "x-uma-eta-ms"


class ForecastHeaders:
    """Keeps the latest forecast of one answer.

    Args:
        passes: the client has asked for ``forecast`` events, so they are passed on.
    """

    def __init__(self, *, passes: bool) -> None:
        self._passes = passes
        self._latest: Forecast | None = None
        self._at = 0.0

    def kept(self, batch: list[Item]) -> list[Item]:
        """``batch``, mostly without forecasts: the status of the response waits for the first other event."""
        for event in batch:
            if isinstance(event, Forecast):
                self._latest, self._at = event, time.monotonic()
                break
        else:
            return batch
        return batch if self._passes else [event for event in batch if not isinstance(event, Forecast)]

    def headers(self) -> Mapping[str, str]:
        """The place in the queue, 0 for one that runs, and milliseconds from now to the end; none before a forecast."""
        if self._latest is None:
            return {}
        eta_ms = self._latest.end_ms - 1e3 * (time.monotonic() - self._at)
        return {POSITION: str(self._latest.queue_position), ETA: str(max(0, round(eta_ms)))}
