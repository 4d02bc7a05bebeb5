"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

from uma_trio.principal import ANONYMOUS, Principal

LOCAL_PEERCRED: Final = 1
"""macOS: the option of level 0 that gives a ``struct xucred`` (sys/un.h)."""


OWN_PRINCIPAL: Final = f"uid:{os.geteuid()}"
"""The user who runs the daemon."""


def principal_of(sock: socket.socket) -> Principal:
    """The Unix user at the other end of ``sock``."""
    uid = _user_id(sock)
    return ANONYMOUS if uid is None else Principal(f"uid:{uid}")


def _user_id(sock: socket.socket) -> int | None:
    """The user id of the peer's process when it connected; ``None`` where the system does not say."""
    try:
        if sys.platform == "linux":
            _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        return int(struct.unpack("II", sock.getsockopt(0, LOCAL_PEERCRED, 8))[1])
    except OSError:
        return None
