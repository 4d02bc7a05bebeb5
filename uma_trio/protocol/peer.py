"""Which user, and which principal, is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

from uma_trio.principal import ANONYMOUS, UNIX_USER, Principal

OWN_PRINCIPAL: Final = f"{UNIX_USER}{os.geteuid()}"
"""Name of the principal for the user who runs this process."""

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


def principal_of(sock: socket.socket) -> Principal:
    """The principal for the Unix user at the other end of ``sock``; ``ANONYMOUS`` if the system does not report it."""
    uid = user_id_of_peer(sock)
    return ANONYMOUS if uid is None else Principal(f"{UNIX_USER}{uid}")
