"""Snapshots of the daemon's metrics, shared by all requests that need one at the same time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import anyio

from uma_trio.client import BrokenProtocol, Client, ClientError, Failure, Metrics, ServerError, open_client
from uma_trio.gateway.errors import NO_DAEMON, NO_DAEMON_RETRY_MS, HttpError, from_client_error

TIMEOUT_S: Final = 1.0
"""A daemon that does not answer for so long counts as down."""

FRESH_S: Final = 0.1
"""A snapshot may be this old, so that many who ask at a time cost the daemon one question."""


class Snapshots:
    """Reads snapshots over a connection that stays open: they come also when the daemon accepts no more connections.

    Args:
        socket: the daemon's; ``None`` is the default path.
    """

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._lock = anyio.Lock()
        self._open: tuple[Client, contextlib.AsyncExitStack] | None = None
        self._last: dict[str, Any] | HttpError = {}
        self._read_at = -FRESH_S

    async def latest(self) -> dict[str, Any]:
        """A snapshot as docs/METRICS.md describes it.

        Raises:
            HttpError: the daemon does not answer.
        """
        async with self._lock:
            if anyio.current_time() - self._read_at >= FRESH_S:
                self._last = await self._read()
                self._read_at = anyio.current_time()
            if isinstance(self._last, HttpError):
                raise self._last
            return self._last

    async def _read(self) -> dict[str, Any] | HttpError:
        was_open = self._open is not None
        with anyio.move_on_after(TIMEOUT_S):
            try:
                try:
                    return await self._ask()
                except ClientError:
                    if not was_open:
                        raise
                    return await self._ask()  # the daemon had closed the connection, which nobody used for long
            except ClientError as error:
                return from_client_error(error)
        text = f"the daemon does not answer within {TIMEOUT_S:g} s"
        return HttpError(503, NO_DAEMON, text, retry_after_ms=NO_DAEMON_RETRY_MS)

    async def _ask(self) -> dict[str, Any]:
        """Ask over the connection, which stays open only if there is an answer.

        Raises:
            ClientError: there is none.
        """
        found, self._open = self._open, None
        client, connection = found or await self._connect()
        try:
            await client.send({"type": "metrics", "keep_alive": True})
            match event := await client.receive():
                case Metrics():
                    self._open = client, connection
                    return dict(event.snapshot)
                case Failure():
                    raise ServerError(event)
            raise BrokenProtocol(f"expected metrics, got {event!r}")
        finally:
            if self._open is None:
                with anyio.CancelScope(shield=True):
                    await connection.aclose()

    async def _connect(self) -> tuple[Client, contextlib.AsyncExitStack]:
        connection = contextlib.AsyncExitStack()
        return await connection.enter_async_context(open_client(self._socket)), connection
