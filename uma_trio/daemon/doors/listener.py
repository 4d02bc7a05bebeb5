"""The Unix socket: bind it, and accept clients."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from uma_trio.daemon.doors.claim import SocketPathError

log = structlog.get_logger("uma_trio.daemon")

OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACK_OFF_S: Final = 0.1
"""Delay before the next attempt to accept when the process or the system is out of file descriptors or memory."""


def bind(path: Path, *, backlog: int) -> socket.socket:
    """Create a non-blocking listening socket at ``path`` that only its owner can connect to.

    Sets the umask of the process while it binds, so no other thread should create files at that time.

    Args:
        backlog: connections that the kernel queues until they are accepted.

    Raises:
        SocketPathError: the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise SocketPathError(f"cannot bind {path}: {error.strerror}; choose another --socket") from None
    finally:
        os.umask(before)
    listener.setblocking(False)
    listener.listen(backlog)
    return listener


def accept_rest(
    listener: socket.socket, handler: Callable[[socket.socket], Awaitable[None]], nursery: trio.Nursery
) -> None:
    """Accept the clients that have connected already, as ``accept_forever`` does.  Does not wait."""
    with contextlib.suppress(OSError):  # there is none, or the process is out of file descriptors
        while True:
            sock, _ = listener.accept()
            sock.setblocking(False)
            nursery.start_soon(handler, sock)


async def accept_forever(
    listener: socket.socket, handler: Callable[[socket.socket], Awaitable[None]], nursery: trio.Nursery
) -> None:
    """Accept clients, and start ``handler(sock)`` in ``nursery`` for each, until cancelled.

    If the process is out of file descriptors, logs that once and tries again until one is free.

    Args:
        handler: gets a non-blocking socket, which it must close.  It must not raise.
    """
    out_of_files = False
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise
            if not out_of_files:
                log.error("cannot accept clients for now", reason=error.strerror)
            out_of_files = True
            await trio.sleep(BACK_OFF_S)
            continue
        out_of_files = False
        sock.setblocking(False)
        nursery.start_soon(handler, sock)
