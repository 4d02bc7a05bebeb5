"""Connects a client to the daemon's socket."""

from __future__ import annotations

import math
import os
import socket as sockets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from uma_trio.connect.errors import Loading, NoDaemon
from uma_trio.connect.reasons import belongs_to_another, explain
from uma_trio.protocol.address import FALLBACK_PATH, socket_path
from uma_trio.protocol.peer import user_id_of_peer

QUEUE_TIMEOUT_S: Final = 10.0
"""How long to retry while the daemon's queue of new connections is full."""
QUEUE_RETRY_S: Final = 0.01
START_RETRY_S: Final = 0.1
"""Interval between attempts while the daemon is starting."""

SocketPath = str | os.PathLike[str]


class Connector:
    """Attempts to connect until one succeeds or there is no reason to go on.  Never blocks or sleeps itself.

    Args:
        path: the daemon's socket; ``default_socket_path()`` if not given.
        wait_s: how long to wait for a daemon that does not run or still loads its model.  With ``None`` only a daemon that
            loads is awaited, for ``loading_timeout_s``.
        loading_timeout_s: how long to wait for a daemon that loads if ``wait_s`` is ``None``.
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
            NoDaemon: no daemon can be reached.
        """
        try:
            sock = _connect(self.path)
        except OSError as error:
            failure = explain(self.path, error)
            if not self._waits_for(failure, now):
                raise failure from None
            if self._on_loading is not None:
                self._on_loading(self.path)
                self._on_loading = None
            return START_RETRY_S
        if sock is not None:
            _check_owner(self.path, sock)
            return sock
        if self._queue_began is None:
            self._queue_began = now
        if now - self._queue_began > QUEUE_TIMEOUT_S:
            raise NoDaemon(f"the daemon at {self.path} accepts no connections", "uma-trio doctor looks for the reason")
        return QUEUE_RETRY_S

    def _waits_for(self, failure: NoDaemon, now: float) -> bool:
        if self._wait_s is None:
            return isinstance(failure, Loading) and now - self._began < self._loading_timeout_s
        return failure.may_appear and now - self._began < self._wait_s


def connect_blocking(
    path: SocketPath | None, *, wait_s: float | None = 0, loading_timeout_s: float = math.inf
) -> sockets.socket:
    """Connect, and sleep between the attempts of a ``Connector``.

    Raises:
        NoDaemon: no daemon can be reached.
    """
    connector = Connector(path, wait_s=wait_s, loading_timeout_s=loading_timeout_s, now=time.monotonic())
    while isinstance(outcome := connector.attempt(time.monotonic()), float):
        time.sleep(outcome)
    outcome.setblocking(True)
    return outcome


def can_connect(path: Path) -> bool:
    """Whether somebody listens at ``path``.  Does not block."""
    try:
        sock = _connect(path)
    except OSError:
        return False
    if sock is not None:  # otherwise the queue of new connections is full
        sock.close()
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
        NoDaemon: another user does, who would read the request.
    """
    owner = user_id_of_peer(sock) if os.fspath(path) == FALLBACK_PATH else None
    if owner not in (None, 0, os.geteuid()):
        sock.close()
        assert owner is not None
        raise belongs_to_another(path, owner)
