"""The gateway's side of connections to the daemon, on a transport of asyncio, and a pool of them.

anyio's own Unix stream registers with the event loop for every read, which costs two system calls a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final, Self, cast

import anyio
import attrs
import sniffio
from anyio.abc import ByteStream, UNIXSocketStream

from uma_trio.client import Client, OpenStream, open_client
from uma_trio.config import Config

MAX_BUFFERED_BYTES: Final = 256 * 1024
"""Bytes that may wait here while the client of the gateway does not read.  With more, nothing is read from the daemon."""
IDLE_S: Final = 2.0
"""How long a connection may wait for its next request.  To open another one then costs little."""
MAX_IDLE: Final = 1 / 32
"""Idle connections, as a part of the daemon's ``max_connections``, which they count for."""


class DaemonStream(ByteStream, asyncio.Protocol):
    """A connected Unix socket as a byte stream."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._transport: asyncio.Transport
        self._chunks: deque[bytes] = deque()
        self._n_bytes = 0
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    @classmethod
    async def open(cls, sock: socket.socket) -> DaemonStream:
        """Take over a connected, non-blocking socket."""
        _, stream = await asyncio.get_running_loop().create_unix_connection(lambda: cls(sock), sock=sock)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._n_bytes += len(data)
        if self._n_bytes > MAX_BUFFERED_BYTES and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._read_the_rest()
        self._ended = True
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def _read_the_rest(self) -> None:
        """Read why the daemon closed the connection: after a failed write, asyncio reads no more."""
        with contextlib.suppress(OSError):
            while self._n_bytes < MAX_BUFFERED_BYTES and (data := self._sock.recv(65536)):
                self.data_received(data)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """All bytes that have arrived.

        Raises:
            anyio.EndOfStream: the daemon closed the connection.
        """
        while not self._chunks:
            if self._ended:
                raise anyio.EndOfStream
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._n_bytes = 0
        if self._is_paused and not self._ended:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def is_quiet(self) -> bool:
        """Whether the connection is open and nothing waits to be received.

        Asks the kernel too, which knows before the event loop does.
        """
        if self._chunks or self._ended or self._transport.is_closing():
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:  # reset by the daemon
            return False
        return False

    async def send(self, item: bytes) -> None:
        """Send all of ``item``.

        Raises:
            anyio.BrokenResourceError: the daemon closed the connection, and all that it sent was received.
        """
        if self._can_send():
            self._transport.write(item)

    async def send_fds(self, message: bytes, fds: Collection[int]) -> None:
        """Send some bytes with descriptors, before anything else of a request: the transport cannot send these.

        Raises:
            anyio.BrokenResourceError: as ``send``; or the daemon does not read what was sent before.
        """
        if self._can_send():
            try:
                socket.send_fds(self._sock, [message], [*fds])
            except OSError:
                raise anyio.BrokenResourceError from None

    def _can_send(self) -> bool:
        """Whether the connection is open.

        Raises:
            anyio.BrokenResourceError: see ``send``.
        """
        if self._ended and not self._chunks:  # otherwise they say why
            raise anyio.BrokenResourceError
        return not self._ended

    async def send_eof(self) -> None:
        """Send no more."""
        self._transport.write_eof()

    async def aclose(self) -> None:
        """Close the connection at once, which cancels what runs on it."""
        self._transport.abort()


@attrs.frozen
class _Idle:
    client: Client
    closing: contextlib.AsyncExitStack
    since: float


class ConnectionPool:
    """Opens connections to the daemon, and keeps those whose request has ended for the next one.

    A connection serves one request at a time.  It stays open only if nothing but the end of its request has arrived.

    Args:
        socket: the daemon's; ``None`` is the default path.
        max_idle: how many connections may wait.
        idle_s: how long each of them may wait.
    """

    def __init__(self, socket: Path | None, *, max_idle: int = 0, idle_s: float = IDLE_S) -> None:
        self._socket = socket
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._idle: deque[_Idle] = deque()
        """The newest is the last one, and the next one that is used."""
        self._closer: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """As the limits of the daemon allow it."""
        limits = config.limits
        max_idle = int(MAX_IDLE * limits.max_connections)
        return cls(config.listen.socket, max_idle=max_idle, idle_s=min(IDLE_S, limits.idle_timeout_s / 4))

    def connect(self, principal: str | None = None) -> contextlib.AbstractAsyncContextManager[Client]:
        """A new connection, which is closed afterwards.

        Args:
            principal: for queries.

        Raises:
            ClientError: the daemon cannot be reached.
        """
        return open_client(self._socket, open_stream=_open_stream(), principal=principal)

    @contextlib.asynccontextmanager
    async def connect_for_request(self) -> AsyncIterator[Client]:
        """A connection for one request with ``keep_alive``, which has ended when the context is left without an exception.
        Otherwise the connection is closed, which cancels the request.

        Raises:
            ClientError: the daemon cannot be reached.
        """
        client, closing = await self._take() or await self.open()
        async with closing:
            yield client
            if len(self._idle) < self._max_idle and client.is_quiet():
                self._keep(client, closing.pop_all())

    async def open(self) -> tuple[Client, contextlib.AsyncExitStack]:
        """A new connection, and what closes it.

        Raises:
            ClientError: the daemon cannot be reached.
        """
        closing = contextlib.AsyncExitStack()
        return await closing.enter_async_context(self.connect()), closing

    async def _take(self) -> tuple[Client, contextlib.AsyncExitStack] | None:
        """The newest idle connection.  Closes those to which the daemon has said something, such as that it stops."""
        while self._idle:
            idle = self._idle.pop()
            if idle.client.is_quiet():
                return idle.client, idle.closing
            await idle.closing.aclose()
        return None

    def _keep(self, client: Client, closing: contextlib.AsyncExitStack) -> None:
        self._idle.append(_Idle(client, closing, anyio.current_time()))
        if self._closer is None or self._closer.done():
            self._closer = asyncio.create_task(self._close_old())

    async def _close_old(self) -> None:
        """Close connections that have waited too long, until none waits."""
        try:
            while self._idle:
                left_s = self._idle[0].since + self._idle_s - anyio.current_time()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                else:
                    await self._idle.popleft().closing.aclose()
        finally:
            while self._idle:
                await self._idle.pop().closing.aclose()


def _open_stream() -> OpenStream:
    """The fastest kind of stream that there is for the event loop of the ASGI server."""
    is_asyncio = sniffio.current_async_library() == "asyncio"
    return DaemonStream.open if is_asyncio else UNIXSocketStream.from_socket
