"""The send queue of one connection.

Events go straight to the kernel if the socket accepts them, so that a token wakes no task.  The rest waits in a
buffer, which a writer task sends when the socket becomes writable.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

from uma_trio.errors import WriteFailed
from uma_trio.protocol.messages import ServerEvent


class Outbox:
    """The sending side of one connection; the ``EventSink`` of its requests.

    Args:
        sock: connected and non-blocking.  The caller closes it.
        encode: turns an event into bytes.
        max_bytes: bytes in the buffer from which on ``has_room`` is false.
        write_timeout_s: time within which the client must read some of the buffer.
        on_room: called when there is room again.
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
        self._shrunk = trio.Event()
        self._is_closed = False
        """The peer has closed its end."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the buffer; those in the kernel are not included."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether requests should produce more events."""
        return len(self._waiting) < self._max_bytes

    def send(self, *events: ServerEvent) -> None:
        """Send or buffer ``events``, in one write.  Never blocks.  Does nothing if the peer has closed its end."""
        if self._is_closed:
            return
        data = b"".join(map(self._encode, events))
        sent = 0 if self._waiting else self._send_now(data)
        if sent < len(data):
            self._waiting += memoryview(data)[sent:]
            self._filled.set()

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the peer has closed; the reading side sees that too and ends the connection
            self._is_closed = True
            self._waiting.clear()
            self._shrunk.set()
            return len(data)

    async def run(self) -> None:
        """Send what is in the buffer, until cancelled.

        Raises:
            WriteFailed: the client read nothing for ``write_timeout_s``.
        """
        while True:
            await self._filled.wait()
            while self._waiting:
                with trio.move_on_after(self._write_timeout_s) as timer:
                    await trio.lowlevel.wait_writable(self._sock)
                if timer.cancelled_caught:
                    raise WriteFailed(
                        f"the client read nothing for {self._write_timeout_s:g} s; {len(self._waiting)} bytes wait"
                    )
                full = not self.has_room
                del self._waiting[: self._send_now(self._waiting)]
                if full and self.has_room:
                    self._on_room()
                self._shrunk.set()
                self._shrunk = trio.Event()
            self._filled = trio.Event()

    async def shrink_to(self, n_bytes: int) -> None:
        """Wait until the buffer has at most ``n_bytes`` or the peer has closed its end.  ``run`` must be running."""
        while len(self._waiting) > n_bytes:
            await self._shrunk.wait()
