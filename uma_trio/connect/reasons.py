"""Why no daemon can be reached at a path.

A daemon locks a file next to its socket before it loads the model, makes the socket when the model can answer, stops
listening when it drains, and unlocks the file when it has ended.  So the lock and the socket together tell a client what
the daemon does:

============  ===================  ====================================
lock          socket               the daemon
============  ===================  ====================================
locked        does not exist       loads its model
locked        refuses connections  is stopping
not locked    either               does not run
============  ===================  ====================================
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shlex
import stat
from pathlib import Path
from typing import Final

from uma_trio.connect.errors import Loading, NoDaemon
from uma_trio.protocol.address import GIVE_A_SHORTER_PATH, default_socket_path, lock_path, too_long

RUN_YOUR_OWN: Final = "run your own daemon with: uma-trio serve --socket PATH"
"""The remedy where the daemon of another user is in the way."""


def explain(path: Path, error: OSError) -> NoDaemon:
    """Build the error for a connection to ``path`` that failed with ``error``."""
    if reason := too_long(path):
        return NoDaemon(reason, GIVE_A_SHORTER_PATH)
    if error.errno in (errno.EACCES, errno.EPERM):
        return _no_permission(path)
    if error.errno == errno.ENOENT:
        if is_locked(path):
            return Loading(f"the daemon at {path} still loads its model", "try again when it is ready", may_appear=True)
        return NoDaemon(f"no daemon at {path}", _how_to_start(path), may_appear=True)
    if error.errno == errno.ECONNREFUSED:
        if not stat.S_ISSOCK(_mode(path)):
            return NoDaemon(f"{path} is not a socket, so no daemon is there", "give the path of a daemon's socket")
        if is_locked(path):
            return NoDaemon(
                f"the daemon at {path} is stopping and takes no new requests",
                f"when it has ended, {_how_to_start(path)}",
                may_appear=True,
            )
        return NoDaemon(
            f"no daemon at {path}, only the socket of one that has ended", _how_to_start(path), may_appear=True
        )
    return NoDaemon(f"no daemon at {path} ({error.strerror or error})", _how_to_start(path))


def belongs_to_another(path: Path, owner: int) -> NoDaemon:
    """Build the error for a socket at which the user ``owner`` listens."""
    return NoDaemon(f"{_user(owner)} listens at {path}, and would read your request", RUN_YOUR_OWN)


def is_locked(path: Path) -> bool:
    """Whether a daemon runs or loads its model.

    Takes the lock for a moment if none does; a daemon that starts meanwhile tries again.
    """
    try:  # whatever is at the path: a FIFO must not block, and only a regular file is a daemon's lock
        lock = os.open(lock_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return False
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _how_to_start(path: Path) -> str:
    """Says how to start a daemon that listens at ``path``."""
    where = "" if path == default_socket_path() else f" --socket {shlex.quote(str(path))}"
    return f"start one with: uma-trio serve{where}"


def _no_permission(path: Path) -> NoDaemon:
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return NoDaemon(f"you may not open the folder of {path}", RUN_YOUR_OWN)
    if owner == os.geteuid():
        return NoDaemon(
            f"you may not write to {path}, although it is yours", "run chmod 600 on it, or restart the daemon"
        )
    return NoDaemon(f"{path} belongs to {_user(owner)}, and only the owner of a socket can use it", RUN_YOUR_OWN)


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user id {uid}"


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0
