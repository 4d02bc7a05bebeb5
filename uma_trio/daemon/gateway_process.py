"""The gateway, as the daemon sees it: a child process that is started again when it dies.

The daemon opens the listening socket and keeps it.  So a wrong address is an error before the model is loaded, and
connections that arrive while there is no gateway wait for the next one.  Soon after the models serve, another
gateway, the standby, has imported its libraries and waits: on a busy machine the imports take seconds.  If no gateway has
ever worked, the daemon gives up: it closes the socket, so that clients are refused, and serves the Unix socket alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import structlog
import trio

from uma_trio.config import Config
from uma_trio.processes.backoff import Backoff
from uma_trio.processes.child_process import ChildProcess
from uma_trio.protocol.address import InvalidAddress, http_address

log = structlog.get_logger("uma_trio.daemon")

MODULE: Final = "uma_trio.gateway"
STEADY_S: Final = 10.0
"""A gateway that has run for this time counts as working, so the next one is started at once."""
MAX_FAILED_STARTS: Final = 3
"""Gateways in a row that die before the first one works.  One that says why it cannot start is not tried again."""
END_S: Final = 5.0
"""How long a gateway may take to end.  All answers have been made by then, so only slow readers lose the rest of one."""
FIRST_STANDBY_S: Final = 5.0
"""From the moment in which the models serve to the start of the first standby."""
STANDBY_PAUSE_S: Final = 10.0
"""Before the next start of a standby that has died."""


class HttpAddressError(Exception):
    """The gateway cannot listen at its address.  The message has the reason and a remedy."""


@contextlib.contextmanager
def listening(config: Config) -> Iterator[socket.socket | None]:
    """The listening socket of the gateway, closed at the end; ``None`` if there is no HTTP.

    Raises:
        HttpAddressError: the address is not valid, is in use, or does not belong to this machine.
    """
    if config.http.listen is None:
        yield None
        return
    with _bind(config.http.listen, backlog=config.listen.backlog) as sock:
        yield sock


def _bind(address: str, *, backlog: int) -> socket.socket:
    try:
        host, port = http_address(address)
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except InvalidAddress as error:
        raise HttpAddressError(f"--http {error}") from None
    except OSError as error:
        raise HttpAddressError(f"--http {address}: the host is not known ({error.strerror}); use 127.0.0.1") from None
    family, kind, protocol, _, where = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise HttpAddressError(
            f"cannot serve HTTP at {address}: {os.strerror(error.errno or 0).lower()}; choose another --http"
        ) from None
    return sock


@attrs.define(eq=False)
class _Run:
    """A gateway process, from its start to its end."""

    process: ChildProcess
    ended: trio.Event = attrs.field(factory=trio.Event)
    reason: str = ""
    """How it has ended."""

    async def watch(self) -> None:
        try:
            self.reason = await self.process.wait()
        finally:
            self.process.kill()
            self.ended.set()


class Gateway:
    """Keeps a gateway process alive.

    Args:
        sock: where it listens.
        socket_path: where the daemon listens.
    """

    def __init__(self, config: Config, sock: socket.socket, socket_path: Path) -> None:
        settings = attrs.evolve(config, listen=attrs.evolve(config.listen, socket=socket_path.absolute()))
        self._settings = msgspec.json.encode(settings, enc_hook=str).decode()
        self._config = config
        self._sock = sock
        self._process: ChildProcess | None = None
        self._standby: _Run | None = None
        self._models_serve = trio.Event()
        self._first_standby_at = 0.0
        self._is_ending = False
        self._ended = trio.Event()
        self.restarts = 0
        host, port, *_ = sock.getsockname()
        scheme = "http" if config.http.tls_certificate is None else "https"
        self._url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def url(self) -> str | None:
        """Where clients find it; ``None`` if it cannot start."""
        return None if self._sock.fileno() < 0 else self._url

    async def run(self) -> None:
        """Run gateways until ``drain`` or cancelled, or until it is clear that none can start."""
        try:
            async with trio.open_nursery() as processes:
                await self._run(processes)
                processes.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def _run(self, processes: trio.Nursery) -> None:
        backoff, n_failed, has_worked = Backoff(first_s=0.1, max_s=10.0), 0, False
        while not self._is_ending:
            began = trio.current_time()
            run, self._standby = self._standby or self._start(processes), None
            self._process = process = run.process
            process.begin()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_standby, process, processes)
                await run.ended.wait()
                nursery.cancel_scope.cancel()
            if self._is_ending:
                return
            reason = process.cannot_start or run.reason
            has_worked, n_failed = has_worked or process.ready.is_set(), n_failed + 1
            if not has_worked and (process.cannot_start is not None or n_failed >= MAX_FAILED_STARTS):
                self._sock.close()
                self._process = None
                log.error("HTTP is not served, because the gateway cannot start", reason=reason)
                return
            worked = trio.current_time() - began > STEADY_S or process.was_killed
            backoff_s = backoff.after(worked=worked)
            log.error("the gateway died and is started again", reason=reason, next_in_s=backoff_s)
            await trio.sleep(backoff_s)
            self.restarts += 1

    def _start(self, processes: trio.Nursery) -> _Run:
        run = _Run(ChildProcess.of_module(MODULE, self._sock, self._settings, name="gateway"))
        processes.start_soon(run.watch)
        return run

    async def _keep_standby(self, serving: ChildProcess, processes: trio.Nursery) -> None:
        """Keep another process ready for its turn, once ``serving`` works: two starts would take each other's time."""
        await self._models_serve.wait()
        await serving.ready.wait()
        await trio.sleep_until(self._first_standby_at)
        while not self._is_ending:
            self._standby = run = self._start(processes)
            await run.ended.wait()
            self._standby = None
            reason = run.process.cannot_start or run.reason
            log.warning("the standby of the gateway died", reason=reason, next_in_s=STANDBY_PAUSE_S)
            await trio.sleep(STANDBY_PAUSE_S)

    def models_serve(self) -> None:
        """Keep a standby soon.  Before, its start would take the time of the models and of clients that have waited."""
        self._first_standby_at = trio.current_time() + FIRST_STANDBY_S
        self._models_serve.set()

    def read_again(self) -> None:
        """Let the gateway read the file of tenants again.  Answers go on."""
        if self._process is not None and self._process.ready.is_set():
            self._process.send_signal(signal.SIGHUP)

    def drain(self) -> None:
        """Say in ``/health`` that the daemon stops, and refuse new requests after the notice; requests that run go on.

        The gateway listens until ``end``, so that routers in front of it get an answer.
        """
        self._is_ending = True
        if self._process is not None and self._process.ready.is_set():
            self._process.send_signal(signal.SIGUSR1)
        else:
            self.end()

    def end(self) -> None:
        """Accept no more connections; requests that run may end."""
        self._is_ending = True
        self._sock.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    async def wait_end(self) -> None:
        """After ``end``: wait until the last answers are on their way to the clients, for ``END_S`` at most."""
        with trio.move_on_after(END_S):
            await self._ended.wait()

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        usage = self._process.usage() if self._process is not None else {}
        return {"pid": self._process.pid if self._process else None, "restarts_total": self.restarts, **usage}
