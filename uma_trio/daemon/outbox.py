"""What one client has still to read.

An event goes straight to the kernel where the socket takes it; no task is woken for a token.  What
does not fit waits here, and only then a writer task arms the socket for writing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

from uma_trio.errors import WriteFailed
from uma_trio.protocol.messages import ServerEvent


class Outbox:
    """The sending side of one connection; the ``Sink`` of its requests.

    Args:
        sock: non-blocking, connected.  Stays the caller's to close.
        encode: event -> bytes of the connection's protocol.
        max_bytes: with so many waiting, ``has_room`` is false.
        write_timeout_s: the client must take something within this.
        on_room: called when ``has_room`` turns true again.
    """

    def __init__(
        self,
        sock: socket.socket,
        encode: Callable[[ServerEvent], bytes],
        *,
        max_bytes: int,
        write_timeout_s: float,
        on_room: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._encode = encode
        self._max_bytes = max_bytes
        self._write_timeout_s = write_timeout_s
        self._on_room = on_room
        self._waiting = bytearray()
        self._filled = trio.Event()
        self._emptied = trio.Event()
        self._gone = False

    @property
    def waiting_bytes(self) -> int:
        """What the client has not taken, and the kernel neither."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < self._max_bytes

    def send(self, event: ServerEvent) -> None:
        """Pass ``event`` on, never waiting.  A client that has gone gets nothing more."""
        if self._gone:
            return
        data = self._encode(event)
        sent = 0 if self._waiting else self._send_now(data)
        if sent < len(data):
            self._waiting += memoryview(data)[sent:]
            self._filled.set()

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # reset or closed by the peer: the reader sees it too, and ends the connection
            self._gone = True
            self._waiting.clear()
            self._emptied.set()
            return len(data)

    async def run(self) -> None:
        """Write what waits, until cancelled.

        Raises:
            WriteFailed: the client took nothing for ``write_timeout_s``.
        """
        while True:
            await self._filled.wait()
            while self._waiting:
                with trio.move_on_after(self._write_timeout_s) as patience:
                    await trio.lowlevel.wait_writable(self._sock)
                if patience.cancelled_caught:
                    raise WriteFailed(
                        f"the client read nothing for {self._write_timeout_s:g} s; {len(self._waiting)} bytes wait"
                    )
                full = not self.has_room
                del self._waiting[: self._send_now(self._waiting)]
                if full and self.has_room:
                    self._on_room()
            self._filled = trio.Event()
            self._emptied.set()
            self._emptied = trio.Event()

    async def flush(self) -> None:
        """Until the kernel has everything, or the client has gone.  ``run`` must be running."""
        if self._waiting:
            await self._emptied.wait()
