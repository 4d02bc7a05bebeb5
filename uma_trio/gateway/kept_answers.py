"""Answers that go on when their client leaves, so that a page that is reloaded can follow them again.

An answer is kept by the HTTP request that began it: the request ends when the answer does.  With the gateway's process the
kept answers end too; what was sent of them is in their sessions.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final

import anyio
import attrs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from uma_trio.client import Event, Forecast
from uma_trio.errors import SessionBusy, TooManyRequests
from uma_trio.gateway.errors import HttpError

MAX_OF_ONE: Final = 8
"""Kept answers of one principal at a time."""
ALONE_S: Final = 300.0
"""How long an answer goes on while nobody follows it."""
MAX_EVENTS: Final = 65536
"""Events of one answer, which are all in memory."""

Name = tuple[str, str]
"""A principal and the id of a session."""


@attrs.define
class KeptAnswer:
    """An answer with all of its events so far.

    Args:
        fields: the request for the daemon.
    """

    fields: Mapping[str, Any]
    _events: list[Event] = attrs.field(factory=list, init=False)
    _forecast: tuple[Forecast, float] | None = attrs.field(default=None, init=False)
    """The latest one, and when it came."""
    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _failure: HttpError | None = attrs.field(default=None, init=False)
    _has_ended: bool = attrs.field(default=False, init=False)
    _followers: int = attrs.field(default=0, init=False)
    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)

    def stop(self) -> None:
        """Cancel the answer.  Those who follow it see its events end without ``eos``."""
        self._scope.cancel()

    async def follow(self) -> AsyncIterator[list[Event]]:
        """All events from the first one on, until the answer ends.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        seen = 0
        self._followers += 1
        self._scope.deadline = math.inf
        try:
            while True:
                if seen < len(self._events):
                    found = self._events[seen:] if seen else self._so_far()
                    seen = len(self._events)
                    yield found
                elif self._failure is not None:
                    raise self._failure
                elif self._has_ended:
                    return
                else:
                    await self._changed.wait()
        finally:
            self._followers -= 1
            if not self._followers:
                self._scope.deadline = anyio.current_time() + ALONE_S

    def _so_far(self) -> list[Event]:
        """All events, but of the forecasts only the latest one, as it is now."""
        others: list[Event] = [event for event in self._events if not isinstance(event, Forecast)]
        if self._forecast is None:
            return others
        latest, came_at = self._forecast
        age_ms = 1e3 * (anyio.current_time() - came_at)
        start_ms, end_ms = (max(0.0, each - age_ms) for each in (latest.start_ms, latest.end_ms))
        return [attrs.evolve(latest, start_ms=start_ms, end_ms=end_ms), *others]

    async def run(self, events: AsyncIterator[list[Event]]) -> None:
        """Read the answer to its end, until it is stopped, or until nobody has followed it for ``ALONE_S``."""
        try:
            with self._scope:
                await self._read(events)
        finally:
            self._has_ended = True
            self._changed.set()

    async def _read(self, events: AsyncIterator[list[Event]]) -> None:
        try:
            async with aclosing(events) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    self._events += batch
                    for event in batch:
                        if isinstance(event, Forecast):
                            self._forecast = event, anyio.current_time()
                    self._changed.set()
                    self._changed = anyio.Event()
                    if len(self._events) > MAX_EVENTS:
                        message = (
                            f"the answer is longer than {MAX_EVENTS:,} events; its session has this much, continue it"
                        )
                        raise HttpError(413, "E_GATEWAY_ANSWER_TOO_LONG", message)
        except HttpError as error:
            self._failure = error


class KeptAnswers:
    """The kept answers of one gateway process."""

    def __init__(self) -> None:
        self._running: dict[Name, KeptAnswer] = {}

    def find(self, name: Name) -> KeptAnswer:
        """The answer of a session.

        Raises:
            HttpError: none runs.
        """
        found = self._running.get(name)
        if found is None:
            message = f"no kept answer of the session {name[1][:100]!r} is running; read the session"
            raise HttpError(404, "E_GATEWAY_NO_ANSWER", message)
        return found

    def begin(self, name: Name, fields: Mapping[str, Any]) -> KeptAnswer:
        """Make the answer to a request, to be run at once.

        Raises:
            HttpError: the session has one, or its principal has too many.
        """
        if name in self._running:
            message = "an answer of this session is running; follow it, stop it, or fork the session"
            raise HttpError(SessionBusy.http_status, SessionBusy.code, message)
        if sum(principal == name[0] for principal, _ in self._running) >= MAX_OF_ONE:
            message = f"{MAX_OF_ONE} kept answers run already; wait for one of them, or stop it"
            raise HttpError(TooManyRequests.http_status, TooManyRequests.code, message)
        self._running[name] = made = KeptAnswer(fields)
        return made

    async def run(self, name: Name, events: AsyncIterator[list[Event]]) -> None:
        """Run the answer that has begun under a name; see ``KeptAnswer.run``."""
        try:
            await self._running[name].run(events)
        finally:
            del self._running[name]


class KeepingResponse(Response):
    """Sends an answer, and runs it to its end, also when the client has left.

    Args:
        run: the answer.
        sent: what the client gets.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], sent: Response) -> None:
        super().__init__()
        self._run = run
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            await self._sent(scope, receive, send)
