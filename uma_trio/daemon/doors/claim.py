"""The path of the Unix socket, from the first moment of a daemon: claims it, or takes the socket that systemd passes.

On a busy machine the daemon's libraries take seconds to import, and clients are to see meanwhile that a daemon comes.  So
this module imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

import attrs

from uma_trio.protocol.address import GIVE_A_SHORTER_PATH, lock_path, too_long

LOCK_ATTEMPTS: Final = 20
LOCK_RETRY_S: Final = 0.01
"""A client that looks whether a daemon runs holds the lock for a moment."""

FIRST_PASSED_FD: Final = 3
"""The first socket that systemd passes: ``SD_LISTEN_FDS_START``."""
PASSED_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class SocketPathError(Exception):
    """The socket cannot be created at its path, or used.  The message has the reason and a remedy."""


@attrs.frozen
class Claim:
    """A path that belongs to this process."""

    path: Path
    passed: socket.socket | None = None
    """The listening socket that systemd has opened there."""
    was_stale: bool = False
    """Whether a dead daemon had left its socket there."""


@contextlib.contextmanager
def claim(path: Path, environment: MutableMapping[str, str]) -> Iterator[Claim]:
    """Claim ``path``, or the path of the socket that systemd passes, until the context ends.

    Raises:
        SocketPathError: see ``claimed`` and ``take_passed``.
    """
    passed = take_passed(environment)
    if passed is None:
        with claimed(path) as was_stale:
            yield Claim(path, was_stale=was_stale)
        return
    with passed:
        path = Path(passed.getsockname())
        with locked(path):
            yield Claim(path, passed)


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
def claimed(path: Path) -> Iterator[bool]:
    """Reserve ``path`` for this process until the context ends, and remove the socket of a dead daemon.

    Yields whether there was one.  Blocks for at most a second, if another program listens at ``path`` and does not accept.

    Raises:
        SocketPathError: another daemon serves there, there is another kind of file or a socket of another user, or the
            path cannot be used.
    """
    with locked(path):
        was_stale = _remove_stale(path)
        try:
            yield was_stale
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


def _remove_stale(path: Path) -> bool:
    """Remove the socket of a dead daemon; returns whether there was one."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketPathError(f"{path} exists and is not a socket; remove it, or choose another --socket")
    if status.st_uid != os.geteuid():
        raise SocketPathError(f"{path} belongs to another user; choose another --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return True
        except OSError as error:
            raise SocketPathError(f"{path} is in use ({error.strerror or error}); choose another --socket") from None
        else:
            raise SocketPathError(f"another program serves on {path}; choose another --socket")


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
