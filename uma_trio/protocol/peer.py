"""Which user is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

LOCAL_PEERCRED: Final = 1
"""macOS: option of level 0 that returns a ``struct xucred`` (sys/un.h)."""


def user_id_of_peer(sock: socket.socket) -> int | None:
    """User id that the peer's process had when it connected, or began to listen; ``None`` if the system does not say."""
    try:
        if sys.platform == "linux":
            _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        return int(struct.unpack("II", sock.getsockopt(0, LOCAL_PEERCRED, 8))[1])
    except OSError:
        return None
