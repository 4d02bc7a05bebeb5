"""Sends a client what the daemon does, for as long as it wants to know: the data of the dashboard."""

from __future__ import annotations

import contextlib
from typing import Any, Final, Protocol

import trio

from uma_trio.daemon.doors.outbox import Outbox
from uma_trio.daemon.registry import ModelRegistry
from uma_trio.daemon.service import ModelService
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol.answers import Activity, Health
from uma_trio.protocol.queries import WatchQuery
from uma_trio.telemetry.perf_records import RecentRecords

MAX_SESSIONS: Final = 32
"""Sessions in an event."""


class Watched(Protocol):
    """The part of the daemon that is watched."""

    @property
    def models(self) -> ModelRegistry: ...
    @property
    def large_work(self) -> LargeWork: ...
    def snapshot(self, model: str | None = None) -> dict[str, Any]: ...
    def health(self, id: str | None) -> Health: ...


class Watch:
    """Sends an event at each interval.

    An event is made when the client has read the ones before, so a client that reads slowly gets fewer, and misses
    records.  It never slows a tick down.
    """

    def __init__(self, query: WatchQuery, daemon: Watched, outbox: Outbox) -> None:
        self.request = query
        self._daemon = daemon
        self._outbox = outbox
        self._scope = trio.CancelScope()

    @property
    def is_answered(self) -> bool:
        """Whether it has been cancelled, although ``run`` has perhaps not returned yet."""
        return self._scope.cancel_called

    def cancel(self) -> None:
        """Send no more events."""
        self._scope.cancel()

    async def run(self) -> None:
        """Send events until cancelled."""
        began = trio.current_time()
        records = RecentRecords(began)
        watched: ModelService | None = None
        with self._scope, contextlib.ExitStack() as recording:
            while True:
                service = self._daemon.models.watched(self.request.model)
                if service is not watched:  # it was loaded, reloaded or unloaded
                    recording.close()
                    if service is not None:
                        recording.enter_context(service.recording(records))
                    watched = service
                next_at = trio.current_time() + self.request.interval_ms / 1e3
                await self._outbox.shrink_to(0)
                async with self._daemon.large_work.part():
                    self._outbox.send(self._event(records, trio.current_time() - began, service))
                await trio.sleep_until(next_at)

    def _event(self, recent: RecentRecords, at_s: float, service: ModelService | None) -> Activity:
        records, dropped = recent.take()
        return Activity(
            at_s=round(at_s, 6),
            metrics={
                name: value for name, value in self._daemon.snapshot(self.request.model).items() if value is not None
            },
            checks=self._daemon.health(None).checks,
            sequences=[] if service is None else service.scheduler.describe_sequences(),
            sessions=[] if service is None else service.sessions.latest(MAX_SESSIONS),
            records=records,
            dropped_records=dropped,
            id=self.request.id,
        )
