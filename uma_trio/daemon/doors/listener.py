"""The Unix socket: claim its path and bind it, or take the one that systemd passes; accept clients."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Final

import structlog
import trio

from uma_trio.protocol.address import GIVE_A_SHORTER_PATH, lock_path, too_long

log = structlog.get_logger("uma_trio.daemon")

OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOCK_ATTEMPTS: Final = 20
LOCK_RETRY_S: Final = 0.01
"""A client that looks whether a daemon runs holds the lock for a moment."""

BACK_OFF_S: Final = 0.1
"""Delay before the next attempt to accept when the process or the system is out of file descriptors or memory."""


FIRST_PASSED_FD: Final = 3
"""The first socket that systemd passes: ``SD_LISTEN_FDS_START``."""
PASSED_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class SocketPathError(Exception):
    """The socket cannot be created at its path, or used.  The message has the reason and a remedy."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path.lock`` until the context ends.  Clients see by it that a daemon loads its model or serves.

    It decides between two daemons that start at the same time.  It is never removed, because a third daemon could then
    lock a new file while the second one holds the old one.

    Raises:
        SocketPathError: another daemon holds it, or the path cannot be used.
    """
    if reason := too_long(path):
        raise SocketPathError(f"{reason}; {GIVE_A_SHORTER_PATH}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(lock_path(path), flags, 0o600)
    except FileExistsError:
        raise SocketPathError(f"{path.parent} is not a folder; choose another path with --socket") from None
    except OSError as error:
        raise SocketPathError(
            f"cannot use the folder {path.parent} for the socket: {error.strerror}; choose another with --socket"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise SocketPathError(f"{lock_path(path)} is not a regular file: remove it, or choose another --socket")
        if not _take_lock(lock):
            raise SocketPathError(f"{_holder(lock)} serves on {path}; stop it, or choose another --socket")
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Reserve ``path`` for this process until the context ends, and remove the socket of a dead daemon.

    Blocks for at most a second, if another program listens at ``path`` and does not accept.

    Raises:
        SocketPathError: another daemon serves there, there is another kind of file or a socket of another user, or the
            path cannot be used.
    """
    with locked(path):
        _remove_stale(path)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _take_lock(lock: int) -> bool:
    """Lock the open file ``lock``; False if another daemon holds it."""
    for attempt in range(LOCK_ATTEMPTS):
        if attempt:
            time.sleep(LOCK_RETRY_S)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # a full disk: the error of the next daemon has no number
                os.ftruncate(lock, 0)
                os.pwrite(lock, b"%d\n" % os.getpid(), 0)
            return True
    return False


def _holder(lock: int) -> str:
    """The daemon that has locked the open file ``lock``, which has its process id."""
    pid = b""
    with contextlib.suppress(OSError):
        pid = os.pread(lock, 20, 0).strip()
    return f"another daemon (process {int(pid)})" if pid.isdigit() else "another daemon"


def _remove_stale(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketPathError(f"{path} exists and is not a socket; remove it, or choose another --socket")
    if found.st_uid != os.geteuid():
        raise SocketPathError(f"{path} belongs to another user; choose another --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            log.info("removed the socket of a dead daemon", path=str(path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            raise SocketPathError(f"{path} is in use ({error.strerror or error}); choose another --socket") from None
        else:
            raise SocketPathError(f"another program serves on {path}; choose another --socket")


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


def take_passed(environment: MutableMapping[str, str]) -> socket.socket | None:
    """Return the listening socket that systemd has opened for this process; ``None`` if there is none.

    The socket and its file belong to systemd: it keeps listening when the daemon ends, and starts the daemon again for
    the next client.  The variables are removed, because they do not concern the daemon's children.

    Raises:
        SocketPathError: systemd passed something other than one listening Unix stream socket.

    Source: sd_listen_fds(3).
    """
    pid, n_sockets, _ = (environment.pop(name, "") for name in PASSED_VARIABLES)
    if pid != str(os.getpid()) or not n_sockets.isdecimal() or n_sockets == "0":
        return None
    fix = "put one ListenStream= with a path into the .socket unit, as uma-trio service install does"
    if n_sockets != "1":
        raise SocketPathError(f"systemd passed {n_sockets} sockets, but the daemon serves one; {fix}")
    try:
        passed = socket.socket(fileno=FIRST_PASSED_FD)
    except OSError as error:
        raise SocketPathError(f"systemd passed no usable socket ({error.strerror}); {fix}") from None
    passed.set_inheritable(False)
    passed.setblocking(False)
    listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    has_path = passed.family == socket.AF_UNIX and isinstance(name := passed.getsockname(), str) and name
    if not has_path or passed.type != socket.SOCK_STREAM or not listens:
        passed.close()
        raise SocketPathError(f"systemd passed something other than a listening Unix stream socket; {fix}")
    return passed


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
