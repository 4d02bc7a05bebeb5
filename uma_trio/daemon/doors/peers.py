"""The principal at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
from typing import Final

from uma_trio.principal import ANONYMOUS, UNIX_USER, Principal
from uma_trio.protocol.peer import user_id_of_peer

OWN_PRINCIPAL: Final = f"{UNIX_USER}{os.geteuid()}"
"""Name of the principal for the user who runs the daemon."""


def principal_of(sock: socket.socket) -> Principal:
    """The principal for the Unix user at the other end of ``sock``; ``ANONYMOUS`` if the system does not report it."""
    uid = user_id_of_peer(sock)
    return ANONYMOUS if uid is None else Principal(f"{UNIX_USER}{uid}")
