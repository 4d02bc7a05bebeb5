"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

LOCAL_PEERCRED: Final = 1
"""macOS: the option of level 0 that gives a ``struct xucred`` (sys/un.h)."""


def user_of(sock: socket.socket) -> int:
    """The user id of the peer's process when it connected; -1 where the system does not tell."""
    try:
        if sys.platform == "linux":
            _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        return int(struct.unpack("II", sock.getsockopt(0, LOCAL_PEERCRED, 8))[1])
    except OSError:
        return -1
