"""The Unix socket: who may use its path, and how clients come in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import structlog
import trio

log = structlog.get_logger("uma_trio.daemon")

MAX_PATH_BYTES: Final = 103
"""``sun_path`` holds 104 bytes on macOS and 108 on Linux, the closing NUL included."""

OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACK_OFF_S: Final = 0.1


class SocketPathError(Exception):
    """The socket cannot be where it was asked for; says why and what to do."""


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold ``path`` for this process alone; removes what a dead daemon left there.

    A lock file beside the socket decides between two daemons that start at the same moment; it stays,
    since removing it would let a third one in.

    Raises:
        SocketPathError: another daemon serves there, something that is no socket of ours is in the
            way, or the path is unusable.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketPathError(
            f"the socket's path has {len(os.fsencode(path))} bytes, {MAX_PATH_BYTES} is the most that "
            f"systems take: choose a shorter one with --socket ({path})"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SocketPathError(f"cannot use {path.parent}: {error.strerror}; choose another with --socket") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SocketPathError(f"another daemon serves on {path}; stop it, or choose another --socket") from None
        _remove_stale(path)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketPathError(f"{path} exists and is no socket; remove it, or choose another --socket")
    if found.st_uid != os.geteuid():
        raise SocketPathError(f"{path} is another user's; choose another --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            log.info("removed the socket that a dead daemon left", path=str(path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            raise SocketPathError(f"{path} is in use ({error.strerror or error}); choose another --socket") from None
        else:
            raise SocketPathError(f"another program serves on {path}; choose another --socket")


def bind(path: Path, *, backlog: int) -> socket.socket:
    """A listening socket at ``path``, readable and writable for its owner alone from its first moment.

    The mode comes from the process's umask while it binds, so no other thread may create files then.
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


async def accept_forever(
    listener: socket.socket, handler: Callable[[socket.socket], Awaitable[None]], nursery: trio.Nursery
) -> None:
    """Start ``handler(sock)`` in ``nursery`` for each client, until cancelled.

    ``handler`` owns the non-blocking socket, and must not raise.  Out of file descriptors: waits for
    some to be closed, and says so once.
    """
    starved = False
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise
            if not starved:
                log.error("cannot accept clients for now", reason=error.strerror)
            starved = True
            await trio.sleep(BACK_OFF_S)
            continue
        starved = False
        sock.setblocking(False)
        nursery.start_soon(handler, sock)
