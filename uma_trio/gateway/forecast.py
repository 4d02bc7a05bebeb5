"""Headers that say when a streamed answer is predicted to start and to end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

import anyio

from uma_trio.client import Event, Forecast

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

    async def watch(self, events: AsyncIterator[list[Event]]) -> AsyncIterator[list[Event]]:
        """Pass ``events`` on, mostly without forecasts: the status of the response waits for the first other event."""
        async with aclosing(events) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Forecast):
                        self._latest, self._at = event, anyio.current_time()
                kept = [event for event in batch if self._passes or not isinstance(event, Forecast)]
                if kept:
                    yield kept

    def headers(self) -> Mapping[str, str]:
        """The place in the queue, 0 for one that runs, and milliseconds from now to the end; none before a forecast."""
        if self._latest is None:
            return {}
        eta_ms = self._latest.end_ms - 1e3 * (anyio.current_time() - self._at)
        return {POSITION: str(self._latest.queue_position), ETA: str(max(0, round(eta_ms)))}
