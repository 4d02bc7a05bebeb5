"""The daemon, as the gateway sees it: connections to its socket, and errors as HTTP statuses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from uma_trio.client import Client, ClientError, Eos, Event, open_client
from uma_trio.gateway.errors import from_client_error


@attrs.frozen
class Daemon:
    """Where the daemon listens.  Each request has a connection of its own, and closing it cancels the request."""

    socket: Path | None
    """``None`` is the default path."""

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A connection.

        Raises:
            HttpError: the daemon cannot be reached, or what was done with the connection failed.
        """
        try:
            async with open_client(self.socket) as client:
                yield client
        except ClientError as error:
            raise from_client_error(error) from None

    async def generate(self, fields: Mapping[str, Any]) -> AsyncIterator[list[Event]]:
        """Send a request and yield its events, those together that have arrived together.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        async with self.connect() as client:
            async for batch in client.generate_batches(**fields):
                yield batch

    async def complete(self, fields: Mapping[str, Any]) -> list[Eos]:
        """Send a request without streaming, and return the last events of its answers by ``index``.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        async with self.connect() as client:
            return await client.choices(**fields)

    async def metrics(self) -> dict[str, Any]:
        """One snapshot of docs/METRICS.md.

        Raises:
            HttpError: the daemon cannot be reached.
        """
        async with self.connect() as client:
            return await client.metrics()
