"""A trio client of the socket protocol: for the command line, the benches, the notebooks and the tests.

    async with open_client() as client:
        async for event in client.generate(prompt="Tell me a story", max_tokens=200):
            if event["event"] == "token":
                print(event["text"], end="")

Leaving the ``async with`` in whatever way, cancellation included, cancels a request that still runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import trio

from uma_trio.daemon.listener import default_path
from uma_trio.errors import ProtocolError
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.payload import Encoding

READ_BYTES: Final = 64 * 1024
CONNECT_S: Final = 10.0
"""How long a client tries to get in where many others want to."""

Event = dict[str, Any]


class ClientError(Exception):
    """A request had no proper end."""


class NoServer(ClientError):
    """Nobody serves at the path."""


class ServerError(ClientError):
    """The server answered with an error event; ``code`` as in docs/PROTOCOL.md."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(f"{event.get('code')}: {event.get('message')}")
        self.code = event.get("code")
        self.event = event


class BrokenProtocol(ClientError):
    """The server sent what it may not send, or left in the middle of an answer."""


class Client:
    """One connection.  One request at a time; use ``open_client`` to get one."""

    def __init__(self, stream: trio.abc.Stream, *, encoding: Encoding = Encoding.JSON) -> None:
        self._stream = stream
        self._codec = ClientCodec(encoding)
        self._ids = itertools.count(1)

    async def send(self, fields: Mapping[str, Any]) -> None:
        """Send one message as it is."""
        try:
            await self._stream.send_all(self._codec.encode(dict(fields)))
        except trio.BrokenResourceError:
            raise BrokenProtocol("the server closed the connection") from None

    async def receive(self) -> Event | None:
        """The next event; ``None`` when the server has closed the connection.

        Raises:
            BrokenProtocol: the server sent something that is no event.
        """
        try:
            while (event := self._codec.next_event()) is None:
                data = await self._stream.receive_some(READ_BYTES)
                self._codec.receive_data(bytes(data))
                if not data:
                    return self._codec.next_event()
        except (ProtocolError, trio.BrokenResourceError) as error:
            raise BrokenProtocol(str(error) or "the connection broke") from None
        return event

    async def generate(self, **fields: Any) -> AsyncIterator[Event]:
        """Send a request and yield its events up to and including ``eos``, of each answer if it asks for several.

        Args:
            fields: as in docs/PROTOCOL.md; ``id`` is made up if it is not given, and ``logit_bias`` may have numbers
                for keys.

        Raises:
            ServerError: the server answered with an error.  Events of other answers may still come.
            BrokenProtocol: the answer did not come to its end.
        """
        fields.setdefault("id", f"r{next(self._ids)}")
        if isinstance(bias := fields.get("logit_bias"), Mapping):
            fields["logit_bias"] = {str(token): value for token, value in bias.items()}
        left: int = fields.get("n", 1)
        with contextlib.suppress(BrokenProtocol):  # a server that closed has perhaps said why; that is read below
            await self.send(fields)
        while (event := await self.receive()) is not None:
            if event.get("id", fields["id"]) != fields["id"]:
                continue
            if event.get("event") == "error":
                raise ServerError(event)
            yield event
            if event.get("event") == "eos":
                left = left - 1 if "index" in event else 0
                if left <= 0:
                    return
        raise BrokenProtocol("the server closed the connection in the middle of an answer")

    async def complete(self, **fields: Any) -> Event:
        """The ``eos`` event of a request that is not streamed; its ``text`` is the whole answer."""
        return (await self.choices(**fields))[0]

    async def choices(self, **fields: Any) -> list[Event]:
        """The same of each of ``n`` answers, in the order of their ``index``."""
        ends = [event async for event in self.generate(stream=False, **fields)]
        return sorted(ends, key=lambda eos: int(eos.get("index", 0)))

    async def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; its ``eos`` with reason ``cancelled`` follows."""
        await self.send({"event": "cancel", "id": request_id})

    async def sessions(self, action: str = "list", **fields: Any) -> list[Event]:
        """What the server remembers: see ``SessionQuery`` in docs/PROTOCOL.md for the fields.

        Raises:
            ServerError: the server answered with an error.
        """
        await self.send({"type": "sessions", "action": action, **fields})
        event = await self.receive()
        if event is not None and event.get("event") == "error":
            raise ServerError(event)
        if event is None or event.get("event") != "sessions":
            raise BrokenProtocol(f"asked for sessions, got {event!r}")
        found: list[Event] = event["sessions"]
        return found

    async def metrics(self) -> Event:
        """One snapshot; docs/METRICS.md explains it.  The server closes the connection afterwards."""
        await self.send({"type": "metrics"})
        event = await self.receive()
        if event is None or event.get("event") != "metrics":
            raise BrokenProtocol(f"asked for metrics, got {event!r}")
        return event


@contextlib.asynccontextmanager
async def open_client(
    path: str | os.PathLike[str] | None = None, *, encoding: Literal["json", "cbor"] = "json"
) -> AsyncIterator[Client]:
    """A connection to the daemon at ``path``, or where it is by default.

    Raises:
        NoServer: nobody serves there.
    """
    where = Path(path) if path is not None else default_path(os.environ)
    try:
        stream = await _connect(where)
    except OSError as error:
        raise NoServer(f"no daemon at {where} ({error.strerror or error}); start one with: uma-trio serve") from None
    async with stream:
        yield Client(stream, encoding=Encoding(encoding))


async def _connect(where: Path) -> trio.SocketStream:
    """Where more clients come than the daemon's ``backlog`` holds, the next ones try again.

    A Unix socket is connected at once or not at all (EAGAIN).  ``trio.open_unix_socket`` takes that for
    "under way", as it would be with TCP, and hands out a stream without a peer.
    """
    until = trio.current_time() + CONNECT_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.connect(os.fspath(where))
            return trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        except BlockingIOError:
            sock.close()
            if trio.current_time() > until:
                raise
        except BaseException:
            sock.close()
            raise
        await trio.sleep(0.01)
