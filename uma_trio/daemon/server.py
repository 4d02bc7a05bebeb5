"""The daemon: four nested lifetimes, and the signals that end them.

    process > models > detached answers > connections > listener

Each lifetime ends before the one around it.  To drain, the server closes the listener, sets a deadline for the
connections, and then ends the models.

Source: docs/ARCHITECTURE.md, "Lifetimes".
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import psutil
import structlog
import trio

import uma_trio
from uma_trio.config import MB, Config, ConfigError, Limits
from uma_trio.daemon.detached.answers import DetachedAnswers
from uma_trio.daemon.doors import listener
from uma_trio.daemon.doors.claim import Claim
from uma_trio.daemon.doors.connection import Connection
from uma_trio.daemon.doors.frame_room import FrameRoom, room_bytes
from uma_trio.daemon.doors.uploads import Uploads
from uma_trio.daemon.engines.link import Launcher, ProcessLauncher, ThreadLauncher
from uma_trio.daemon.engines.process import EngineProcess
from uma_trio.daemon.gateway_process import Gateway, listening
from uma_trio.daemon.kv_events.publisher import kv_events
from uma_trio.daemon.loading import CurrentPerfLog, Opener, specs_of
from uma_trio.daemon.notifier import Notifier
from uma_trio.daemon.registry import ModelRegistry
from uma_trio.daemon.storage import open_answers
from uma_trio.daemon.unlocked import stop_when_unlocked
from uma_trio.errors import BadRequest, ErrorWithRemedy, ShuttingDown, TooManyConnections, UmaError
from uma_trio.files import state_folder
from uma_trio.hub.environment import find_model_locations
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol.answers import Health, HealthCheck
from uma_trio.protocol.codec import server_codec
from uma_trio.protocol.events import Failure
from uma_trio.protocol.lease import OfferQuery, SessionOffer
from uma_trio.protocol.peer import OWN_PRINCIPAL, principal_of

log = structlog.get_logger("uma_trio.daemon")

Progress = Callable[[float], None]

MIN_FREE_MEMORY: Final = 0.02
"""Below this share of the machine's memory, the server counts as not ready: the kernel may soon end a process."""


class Server:
    """Serves the clients of one socket.

    Args:
        models: they are running while ``run`` does.
        perf: the perf log, for the metrics; ``None`` if there is none.
        gateway: drained together with the connections; ``None`` without HTTP.
        detached: answers that outlive their connections; ``None``: they end with the server.
    """

    def __init__(
        self,
        config: Config,
        models: ModelRegistry,
        perf: CurrentPerfLog | None = None,
        gateway: Gateway | None = None,
        detached: DetachedAnswers | None = None,
    ) -> None:
        self.config = config
        self.limits: Limits = config.limits
        self.models = models
        self.detached = detached or DetachedAnswers(config, models)
        self.draining = False
        self.uploads = Uploads(config.limits.max_controller_bytes)
        self.frame_room = FrameRoom(room_bytes(config.limits.max_frame_bytes))
        self.large_work = LargeWork(trio.Lock(), trio.sleep)
        """Decoding large messages, and making the events of answers to queries."""
        self._perf = perf
        self._gateway = gateway
        self._connections: set[Connection] = set()
        self._n_accepted = 0
        self._refused: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._leaving = trio.Event()
        self._hand_over_s = config.limits.drain_hand_over_s if config.http.peers else 0.0
        self._handed_over = trio.Event()
        self._connection_scope = trio.CancelScope()
        self._listener_scope = trio.CancelScope()

    def snapshot(self, model: str | None = None) -> dict[str, Any]:
        """The metrics, as docs/METRICS.md describes them.  Never waits for a step of an engine.

        Args:
            model: whose figures come first; ``None``: those of the default model.

        Raises:
            ModelNotFound: there is no such model.
        """
        return {
            **self.models.snapshot(model),
            "rejected_total": dict(self._refused),
            "connections": len(self._connections),
            "send_queue_bytes": sum(connection.waiting_bytes for connection in self._connections),
            "pid": os.getpid(),
            "version": uma_trio.__version__,
            "state_dir": str(state_folder(self.config.sessions.state_dir).absolute()),
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "draining": self.draining,
            "perf_log_dropped_total": self._perf.dropped if self._perf is not None else None,
            "gateway": self._gateway.snapshot() if self._gateway is not None else None,
        }

    def health(self, id: str | None) -> Health:
        """Whether another request can be served now, and why not.  Never waits for a step of an engine."""
        draining = HealthCheck(
            name="draining", ok=not self.draining, reason=str(ShuttingDown()) if self.draining else "no"
        )
        checks = [*self.models.health(), _memory_check(), draining]
        return Health(ready=all(check.ok for check in checks), checks=checks, id=id)

    def record_refusal(self, error: UmaError) -> None:
        """Count a refused request or connection."""
        self._refused[error.code] += 1

    async def run(self, sock: socket.socket, *, is_passed: bool = False) -> None:
        """Serve on the listening ``sock`` until drained or cancelled.  Closes ``sock``.

        Args:
            is_passed: somebody else goes on listening there, and serves the clients that were not accepted.
        """
        try:
            with sock:
                async with trio.open_nursery() as answers:
                    await answers.start(self.detached.run)
                    answers.start_soon(self._drain_after_notice)
                    with self._connection_scope:
                        async with trio.open_nursery() as connections:
                            with sock:
                                with self._listener_scope:
                                    await self.detached.wait_for_suspect()
                                    await listener.accept_forever(sock, self._serve_client, connections)
                                if not is_passed:
                                    listener.accept_rest(sock, self._serve_client, connections)
                    self.detached.close()
                    answers.cancel_scope.cancel()
        finally:
            if self._gateway is not None:
                self._gateway.end()
            with trio.CancelScope(shield=True):  # cancelled requests are freed within one step
                await self.models.wait_idle()
            if trio.current_effective_deadline() > -math.inf:  # there was no second signal
                with trio.move_on_after(self.limits.drain_timeout_s, shield=True):
                    await self.models.save_everything()

    def leave(self) -> None:
        """Say in ``/health`` that the daemon stops, and drain after ``drain_notice_s``, and after peers have taken sessions
        over; without HTTP at once.  Does not wait."""
        if self._gateway is None or not (self.limits.drain_notice_s or self._hand_over_s):
            self.drain()
            return
        self._gateway.drain()
        self._leaving.set()

    async def _drain_after_notice(self) -> None:
        await self._leaving.wait()
        await trio.sleep(self.limits.drain_notice_s)
        with trio.move_on_after(self._hand_over_s):
            await self._handed_over.wait()
        self.drain()

    def offer(self, query: OfferQuery) -> SessionOffer:
        """The next session that another daemon may take over, because this one stops.

        Raises:
            BadRequest: it does not stop.
        """
        if not self._leaving.is_set():
            raise BadRequest("the daemon does not stop, so its sessions stay", field="type")
        if query.end:
            self._handed_over.set()
        session = None if query.end else self.models.next_offer()
        if session is None:
            return SessionOffer(id=query.id)
        principal = None if session.principal == OWN_PRINCIPAL else session.principal
        return attrs.evolve(session, principal=principal, id=query.id)

    def drain(self) -> None:
        """Accept no more connections and requests; running requests have ``drain_timeout_s`` to finish.  Does not wait."""
        if self.draining:
            return
        self.draining = True
        self.models.drain()
        self.detached.close()
        self._listener_scope.cancel()
        if self._gateway is not None:
            self._gateway.drain()
        self._connection_scope.deadline = trio.current_time() + self.limits.drain_timeout_s
        for connection in self._connections:
            connection.leave()

    def stop(self) -> None:
        """End all requests and engines at once."""
        self.models.stop()

    def _refusal(self, sock: socket.socket) -> UmaError | None:
        """Why a new connection cannot be served; ``None`` if it can."""
        if self.draining:
            return ShuttingDown()
        if self._may_connect(sock):
            return None
        default = self.models.loaded()
        retry_after_ms = None if default is None else default.scheduler.retry_after_ms()
        return TooManyConnections(f"{len(self._connections)} connections are open", retry_after_ms=retry_after_ms)

    def _may_connect(self, sock: socket.socket) -> bool:
        """Whether another connection may be open: one user who opens many leaves half of them to others."""
        principal, n_free = principal_of(sock).name, self.limits.max_connections - len(self._connections)
        if principal == OWN_PRINCIPAL:
            return n_free > 0
        return sum([connection.peer == principal for connection in self._connections]) < n_free

    async def _serve_client(self, sock: socket.socket) -> None:
        codec = server_codec(
            self.config.listen.protocol,
            max_frame_bytes=self.limits.max_frame_bytes,
            chat=self.models.has_chat_template,
        )
        try:
            if (error := self._refusal(sock)) is not None:
                self.record_refusal(error)
                sock.send(codec.encode(Failure.of(error)))
                return
            self._n_accepted += 1
            connection = Connection(sock, codec, self, name=f"c{self._n_accepted}")
            self._connections.add(connection)
            try:
                await connection.serve()
            finally:
                self._connections.discard(connection)
        except OSError as error:  # the client closed before it could be refused
            log.debug("a client left early", reason=str(error))
        except Exception:  # a bug ends this connection only
            log.exception("a connection failed with a bug of the server")
        finally:
            trio.lowlevel.notify_closing(sock)
            sock.close()


def _memory_check() -> HealthCheck:
    memory = psutil.virtual_memory()
    free, total = memory.available // MB, memory.total // MB
    reason = f"{free} MB of the machine's {total} MB are free"
    return HealthCheck(name="memory", ok=free >= MIN_FREE_MEMORY * total, reason=reason)


async def serve(
    config: Config,
    claim: Claim,
    *,
    read_again: Callable[[], Config] | None = None,
    on_progress: Progress | None = None,
    engine_process: EngineProcess | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Load the models and serve them on the Unix socket that was claimed, until SIGINT or SIGTERM.

    The first signal drains; the second one stops at once.  SIGUSR1 writes a metrics snapshot.  SIGHUP reads the list of
    models again, and lets the gateway read its tenants again; but from a terminal that was closed it drains, as SIGTERM
    does.  A service manager that started the daemon is notified when it serves and when it stops.

    Args:
        read_again: returns the settings as they are now.  Blocks, and raises what a person can mend.
        on_progress: called with the loaded share of the model, from 0 to 1.
        engine_process: for the first model; has been started already.
        task_status: started when the socket accepts clients.

    Returns:
        Whether the daemon was drained; False after a second signal.

    Raises:
        SocketPathError: the socket cannot be bound.
        HttpAddressError: the gateway cannot listen at its address.
        KvEventsError: KV events cannot be published.
        ModelError: the model cannot be loaded.
    """
    stop = trio.CancelScope()
    notifier = Notifier(os.environ)
    path, passed = claim.path, claim.passed
    if claim.was_stale:
        log.info("removed the socket of a dead daemon", path=str(path))
    with (
        listening(config) as http_socket,
        kv_events(config) as publisher,
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) as signals,
    ):
        async with trio.open_nursery() as process:
            handler = _SignalHandler(config, path, stop, notifier, read_again)
            process.start_soon(handler.run, signals)
            process.start_soon(notifier.ping_forever)
            if config.operations.stop_when_unlocked is not None:
                process.start_soon(stop_when_unlocked, config.operations.stop_when_unlocked)
            gateway = None
            if http_socket is not None:
                gateway = Gateway(config, http_socket, path)
                handler.gateway = gateway
                process.start_soon(gateway.run)
            notifier.report("STATUS=loading the model")
            specs = specs_of(config)
            locations = find_model_locations(os.environ, config.model.models_dir, is_offline=True)
            opener = Opener(config, make_launcher(config, process, engine_process), specs[0].name, locations, publisher)
            models = ModelRegistry(specs, opener, config, owner=OWN_PRINCIPAL)
            async with models.running():
                # a signal after the last look at should_load; from here on, the server is there when the next one is handled
                if await models.start(on_progress, handler.should_load) and handler.should_load():
                    with stop:
                        await _serve_loaded(config, path, passed, models, opener, handler, gateway, task_status)
            process.cancel_scope.cancel()
    return not stop.cancel_called


def make_launcher(config: Config, nursery: trio.Nursery, first: EngineProcess | None = None) -> Launcher:
    """Return a launcher for the configured mode: child processes, or threads of this process.

    Args:
        nursery: for the tasks that watch the engines; it must outlive them.
        first: see ``ProcessLauncher``.
    """
    if config.engine.mode == "process":
        return ProcessLauncher(nursery, prestarted=first)
    from uma_trio.engine.open_fitted import open_engine  # code of the engine, which only this mode has in the daemon

    return ThreadLauncher(nursery, open_engine)


async def _serve_loaded(
    config: Config,
    path: Path,
    passed: socket.socket | None,
    models: ModelRegistry,
    opener: Opener,
    handler: _SignalHandler,
    gateway: Gateway | None,
    task_status: trio.TaskStatus[Server],
) -> None:
    sock = passed or listener.bind(path, backlog=config.listen.backlog)
    with open_answers(config) as folder:
        server = Server(config, models, opener.perf, gateway, DetachedAnswers(config, models, folder))
        handler.server = server
        default = models.loaded()
        log.info(
            "serving",
            socket=str(path),
            http=gateway.url if gateway is not None else None,
            protocol=config.listen.protocol,
            engine=config.engine.mode,
            engine_pid=None if default is None else default.engine_pid,
            models=models.names if len(models.names) > 1 else None,
        )
        handler.notifier.report("READY=1", f"STATUS=serving {', '.join(models.names)} on {path}")
        task_status.started(server)
        if gateway is not None:
            gateway.models_serve()
        await server.run(sock, is_passed=passed is not None)
        if gateway is not None:
            await gateway.wait_end()
    log.info("stopped", **{key: server.snapshot().get(key) for key in ("tokens_total", "requests_total", "uptime_s")})


def _terminal() -> int | None:
    """A file descriptor of the terminal that the daemon was started in; ``None`` if there was none."""
    return next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)


def _was_closed(terminal: int | None) -> bool:
    if terminal is None:
        return False
    try:
        os.tcgetpgrp(terminal)
    except OSError:
        return True
    return False


class _SignalHandler:
    """Acts on signals: the first one drains the server, the second one stops it."""

    def __init__(
        self,
        config: Config,
        path: Path,
        stop: trio.CancelScope,
        notifier: Notifier,
        read_again: Callable[[], Config] | None = None,
    ) -> None:
        self._read_settings = read_again
        self.notifier = notifier
        self._config = config
        self._folder = config.operations.snapshot_dir or path.parent
        self._stop = stop
        self._is_ending = False
        self._terminal = _terminal()
        self.server: Server | None = None
        self.gateway: Gateway | None = None

    def should_load(self) -> bool:
        """Whether loading should continue: there was no signal yet."""
        return not self._is_ending

    async def _read_again(self) -> None:
        """SIGHUP: the gateway reads its tenants again, and the registry the list of models."""
        if self.gateway is not None:
            log.info("the gateway reads its tenants again")
            self.gateway.read_again()
        if self._read_settings is None or self.server is None:
            return
        try:
            config = await trio.to_thread.run_sync(self._read_settings)
            specs = specs_of(config)
        except (ConfigError, ErrorWithRemedy, OSError) as error:
            log.error("the models stay as they are: the settings cannot be read", reason=str(error))
            return
        log.info("reading the list of models again", models=[spec.name for spec in specs])
        self.server.models.update(specs)

    async def run(self, signals: Any) -> None:
        """Handle ``signals`` until cancelled."""
        async for number in signals:
            if number == signal.SIGUSR1:
                await self._write_snapshot()
            elif number == signal.SIGHUP and not _was_closed(self._terminal):
                await self._read_again()
            elif self._stop.cancel_called:
                continue
            elif self._is_ending:
                log.warning("stopping at once", signal=signal.Signals(number).name)
                self._stop.cancel()
                if self.server is not None:
                    self.server.stop()
            else:
                self._is_ending = True
                self.notifier.report("STOPPING=1", "STATUS=draining")
                log.info(
                    "draining; a second signal stops at once",
                    signal=signal.Signals(number).name,
                    timeout_s=self._config.limits.drain_timeout_s,
                )
                if self.server is not None:
                    self.server.leave()

    async def _write_snapshot(self) -> None:
        if self.server is None:
            log.warning("cannot write a metrics snapshot while the model is loading")
            return
        stamp = datetime.datetime.now().strftime("%Y%m%dT%H%M%S.%f")
        target = self._folder / f"uma-metrics-{stamp}.json"
        data = msgspec.json.format(msgspec.json.encode(self.server.snapshot())) + b"\n"
        try:
            await trio.to_thread.run_sync(_write_file, target, data)
        except OSError as error:
            log.error("cannot write the metrics snapshot", path=str(target), reason=error.strerror)
        else:
            log.info("wrote a metrics snapshot", path=str(target))


def _write_file(target: Path, data: bytes) -> None:
    temporary = target.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:  # the disk is full
        temporary.unlink(missing_ok=True)
        raise
