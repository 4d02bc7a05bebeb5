"""The gateway's side of a connection to the daemon, on a transport of asyncio.

anyio's own Unix stream registers with the event loop for every read, which costs two system calls a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Collection
from typing import Final, cast

import anyio
from anyio.abc import ByteStream

MAX_BUFFERED_BYTES: Final = 256 * 1024
"""Bytes that may wait here while the client of the gateway does not read.  With more, nothing is read from the daemon."""


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
