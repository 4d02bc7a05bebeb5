"""Files that a client passes as descriptors next to its messages: they are received, checked, read and closed.

A descriptor is read as soon as it has come, within the bounds of a message, so a client holds none of the daemon's.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Generator
from typing import Final

from uma_trio.errors import BadRequest, FrameTooLarge
from uma_trio.protocol import sealed_memory
from uma_trio.protocol.chat import MAX_MEDIA_BYTES, MAX_PICTURES
from uma_trio.protocol.messages import ClientMessage
from uma_trio.protocol.passed_files import MAX_BYTES

ROOM_BYTES: Final = socket.CMSG_SPACE(MAX_PICTURES * array.array("i").itemsize)
"""Room for the descriptors that come with one read; the kernel closes others."""


class PassedFiles:
    """Receives from one client.

    Args:
        taken: whether descriptors are taken.  Otherwise the kernel closes them before the daemon has them.  To close
            one can wait for its maker, so only the user who runs the daemon may pass any.
        files: where they are put, in the order in which they came.
    """

    def __init__(self, sock: socket.socket, files: list[bytes], *, taken: bool) -> None:
        self._sock = sock
        self._files = files
        self._taken = taken and sealed_memory.EXISTS
        self._descriptors: list[int] = []
        self._n_lost = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the files that no message has taken."""
        return sum(map(len, self._files))

    @property
    def arrived(self) -> bool:
        """Whether there is something to read."""
        return bool(self._descriptors or self._n_lost)

    def receive(self, n_bytes: int) -> bytes:
        """``recv`` of the socket; keeps the descriptors that come with these bytes."""
        if not self._taken:
            return self._sock.recv(n_bytes)
        data, ancillary, flags, _ = self._sock.recvmsg(n_bytes, ROOM_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
                self._descriptors += descriptors
        self._n_lost += bool(flags & socket.MSG_CTRUNC)
        return data

    def reading(self, take_room: Callable[[int], None]) -> Generator[None, None, None]:
        """Read what has arrived, a file at a time.

        Args:
            take_room: takes room for so many bytes, which are those of all files that wait for their message.

        Raises:
            BadRequest, FrameTooLarge: a descriptor is not of sealed memory, or they are too many or too large.
            QueueFull: there is no room.
        """
        if self._n_lost or len(self._files) + len(self._descriptors) > MAX_PICTURES:
            raise BadRequest(
                f"not all descriptors could be taken: at most {MAX_PICTURES} come with a message, and a connection whose "
                "daemon has too many open files gets fewer"
            )
        while self._descriptors:
            size = sealed_memory.size_of(self._descriptors[0])
            if size > MAX_MEDIA_BYTES:
                raise FrameTooLarge(f"a descriptor has {size} bytes; the limit is {MAX_MEDIA_BYTES}")
            if (together := self.n_bytes + size) > MAX_BYTES:
                raise FrameTooLarge(f"the descriptors of a message have {together} bytes; the limit is {MAX_BYTES}")
            take_room(together)
            self._files.append(os.pread(self._descriptors[0], size, 0))
            os.close(self._descriptors.pop(0))
            yield

    def check_all_taken(self, message: ClientMessage) -> None:
        """
        Args:
            message: the last one that came with them.

        Raises:
            BadRequest: files are left; carries the ``id`` of the message.
        """
        if self._files:
            error = BadRequest(f"descriptors that no part of the message names: {len(self._files)}")
            error.request_id = message.id
            raise error

    def close(self) -> None:
        """Close what has not been read."""
        while self._descriptors:
            os.close(self._descriptors.pop())
