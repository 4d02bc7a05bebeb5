"""Connects a client to the daemon's socket, finds out why that fails, and asks one question.

A daemon locks a file next to its socket before it loads the model, makes the socket when the model can answer, stops to
listen when it drains, and unlocks the file when it has ended.  So the lock and the socket together tell a client what
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

import contextlib
import errno
import fcntl
import json
import math
import os
import pwd
import shlex
import socket as sockets
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.errors import ErrorWithRemedy, ProtocolError
from uma_trio.protocol.address import (
    FALLBACK_PATH,
    GIVE_A_SHORTER_PATH,
    default_socket_path,
    lock_path,
    socket_path,
    too_long,
)
from uma_trio.protocol.framing import FrameReader, frame
from uma_trio.protocol.peer import user_id_of_peer

QUEUE_TIMEOUT_S: Final = 10.0
"""How long to retry while the daemon's queue of new connections is full."""
QUEUE_RETRY_S: Final = 0.01
START_RETRY_S: Final = 0.1
"""Interval between attempts while the daemon is starting."""

MAX_ANSWER_BYTES: Final = 4 << 20
"""Largest event of an answer that ``query`` reads."""
READ_BYTES: Final = 1 << 16

SocketPath = str | os.PathLike[str]


class ClientError(Exception):
    """A request did not end with ``eos``."""


class BrokenProtocol(ClientError):
    """The daemon violated the protocol, or closed the connection before the end of an answer."""


class NoServer(ErrorWithRemedy, ClientError):
    """No daemon can be reached at the path, which the reason names.

    Args:
        may_come: whether a daemon may be reachable there later without a change of anything else.
    """

    def __init__(self, reason: str, remedy: str, *, may_come: bool = False) -> None:
        super().__init__(reason, remedy)
        self.may_come = may_come


class Loading(NoServer):
    """The daemon at the path still loads its model."""


class Connector:
    """Attempts to connect until one succeeds or there is no reason to go on.  Never blocks or sleeps itself.

    Args:
        path: the daemon's socket; ``default_socket_path()`` if not given.
        wait_s: how long to wait for a daemon that does not run or still loads its model.  ``None``: as long as it
            loads, and not at all if there is none.
        loading_timeout_s: how long to wait for a daemon that loads, if ``wait_s`` sets no limit.
        now: the time, on the caller's monotonic clock.
        on_loading: called once with the path when there is a wait.
    """

    def __init__(
        self,
        path: SocketPath | None,
        *,
        wait_s: float | None,
        loading_timeout_s: float = math.inf,
        now: float,
        on_loading: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = socket_path(path)
        self._wait_s = wait_s
        self._loading_timeout_s = loading_timeout_s
        self._began = now
        self._queue_began: float | None = None
        self._on_loading = on_loading

    def attempt(self, now: float) -> sockets.socket | float:
        """Connect.

        Returns:
            A connected, non-blocking socket, or the seconds after which to try again.

        Raises:
            NoServer: no daemon can be reached.
        """
        try:
            found = _connect(self.path)
        except OSError as error:
            failure = explain(self.path, error)
            if not self._waits_for(failure, now):
                raise failure from None
            if self._on_loading is not None:
                self._on_loading(self.path)
                self._on_loading = None
            return START_RETRY_S
        if found is not None:
            _check_owner(self.path, found)
            return found
        if self._queue_began is None:
            self._queue_began = now
        if now - self._queue_began > QUEUE_TIMEOUT_S:
            raise NoServer(f"the daemon at {self.path} accepts no connections", "uma-trio doctor looks for the reason")
        return QUEUE_RETRY_S

    def _waits_for(self, failure: NoServer, now: float) -> bool:
        if self._wait_s is None:
            return isinstance(failure, Loading) and now - self._began < self._loading_timeout_s
        return failure.may_come and now - self._began < self._wait_s


def connect_blocking(
    path: SocketPath | None, *, wait_s: float | None = 0, loading_timeout_s: float = math.inf
) -> sockets.socket:
    """Connect, and sleep between the attempts of a ``Connector``.

    Raises:
        NoServer: no daemon can be reached.
    """
    connector = Connector(path, wait_s=wait_s, loading_timeout_s=loading_timeout_s, now=time.monotonic())
    while isinstance(found := connector.attempt(time.monotonic()), float):
        time.sleep(found)
    found.setblocking(True)
    return found


def can_connect(path: Path) -> bool:
    """Whether somebody listens at ``path``.  Does not block."""
    try:
        found = _connect(path)
    except OSError:
        return False
    if found is not None:  # otherwise the queue of new connections is full
        found.close()
    return True


def _connect(path: Path) -> sockets.socket | None:
    """Connect a non-blocking socket; ``None`` if the daemon's queue of new connections is full.

    A Unix socket connects at once or fails with EAGAIN.  Both ``trio`` and ``asyncio`` take EAGAIN for a connection in
    progress, as with TCP, and would return a stream without a peer.
    """
    sock = sockets.socket(sockets.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
    except BlockingIOError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def _check_owner(path: Path, sock: sockets.socket) -> None:
    """Check who listens at the default path in a folder where everybody may create files.

    Raises:
        NoServer: another user does, who would read the request.
    """
    owner = user_id_of_peer(sock) if os.fspath(path) == FALLBACK_PATH else None
    if owner not in (None, 0, os.geteuid()):
        sock.close()
        assert owner is not None
        raise NoServer(f"{_user(owner)} listens at {path}, and would read your request", OWN)


def _start(path: Path) -> str:
    """How to start a daemon that listens at ``path``."""
    where = "" if path == default_socket_path() else f" --socket {shlex.quote(str(path))}"
    return f"start one with: uma-trio serve{where}"


def explain(path: Path, error: OSError) -> NoServer:
    """Build the error for a connection to ``path`` that failed with ``error``."""
    if reason := too_long(path):
        return NoServer(reason, GIVE_A_SHORTER_PATH)
    if error.errno in (errno.EACCES, errno.EPERM):
        return _no_permission(path)
    if error.errno == errno.ENOENT:
        if is_locked(path):
            return Loading(f"the daemon at {path} still loads its model", "try again when it is ready", may_come=True)
        return NoServer(f"no daemon at {path}", _start(path), may_come=True)
    if error.errno == errno.ECONNREFUSED:
        if not stat.S_ISSOCK(_mode(path)):
            return NoServer(f"{path} is not a socket, so no daemon is there", "give the path of a daemon's socket")
        if is_locked(path):
            return NoServer(
                f"the daemon at {path} is stopping and takes no new requests",
                f"when it has ended, {_start(path)}",
                may_come=True,
            )
        return NoServer(f"no daemon at {path}, only the socket of one that has ended", _start(path), may_come=True)
    return NoServer(f"no daemon at {path} ({error.strerror or error})", _start(path))


OWN: Final = "run your own daemon with: uma-trio serve --socket PATH"


def _no_permission(path: Path) -> NoServer:
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return NoServer(f"you may not open the folder of {path}", OWN)
    if owner == os.geteuid():
        return NoServer(
            f"you may not write to {path}, although it is yours", "run chmod 600 on it, or restart the daemon"
        )
    return NoServer(f"{path} belongs to {_user(owner)}, and only the owner of a socket can use it", OWN)


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


def query(path: SocketPath | None, message: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """Send ``message`` as framed JSON and return the events of its answer, of which all but the last have ``more``.  Blocks.

    Args:
        path: the daemon's socket; ``default_socket_path()`` if not given.

    Raises:
        NoServer: no daemon can be reached there.
        TimeoutError: there was no answer in ``timeout_s`` seconds.
        BrokenProtocol: the other side does not answer as a daemon does.
    """
    until = time.monotonic() + timeout_s
    frames = FrameReader(max_frame_bytes=MAX_ANSWER_BYTES)
    events: list[dict[str, Any]] = []
    with connect_blocking(path) as sock:
        try:
            sock.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError):  # a daemon that closed the connection may have sent the reason
                sock.sendall(frame(json.dumps(message).encode()))
            while not events or events[-1].get("more"):
                while (payload := frames.next_payload()) is None:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError
                    sock.settimeout(left_s)
                    data = sock.recv(READ_BYTES)
                    frames.receive_data(data)
                    if not data:
                        raise BrokenProtocol("the server closed the connection without an answer")
                event = json.loads(payload)
                if not isinstance(event, dict):
                    raise BrokenProtocol("the answer is not an object")
                events.append(event)
        except (ConnectionError, ProtocolError, ValueError) as error:
            raise BrokenProtocol(str(error)) from None
    return events
