"""The daemon: four nested lifetimes, and the signals that end them.

    process > model > connections > listener

Each lifetime ends before the one around it.  To drain, the server closes the listener, sets a deadline for the
connections, and then ends the model.

Source: docs/ARCHITECTURE.md, "Lifetimes".
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import structlog
import trio

import uma_trio
from uma_trio.aici.link import RuntimeStart
from uma_trio.aici.supervisor import SupervisedRuntime
from uma_trio.config import MB, Config, Limits
from uma_trio.daemon import listener
from uma_trio.daemon.connection import Connection
from uma_trio.daemon.gateway import Gateway, listening
from uma_trio.daemon.notifier import Notifier
from uma_trio.daemon.perf_log import PerfLog, perf_log
from uma_trio.daemon.storage import open_storage, state_dir
from uma_trio.daemon.uploads import Uploads
from uma_trio.engine.fitting import open_engine
from uma_trio.engine.link import Launcher, ProcessLauncher, ThreadLauncher
from uma_trio.errors import TooManyConnections, UmaError
from uma_trio.models.loaded import LoadedModel, model_path, open_model
from uma_trio.protocol.codec import server_codec
from uma_trio.protocol.messages import Failure, Health, HealthCheck
from uma_trio.service import ModelRegistry, ModelService

log = structlog.get_logger("uma_trio.daemon")

Progress = Callable[[float], None]

MIN_FREE_MEMORY: Final = 0.02
"""Below this share of the machine's memory, the server counts as not ready: the kernel may soon end a process."""


class Server:
    """Serves the clients of one socket.

    Args:
        models: their services run while ``run`` does.
        perf: the perf log, for the metrics; ``None`` if there is none.
        gateway: drained together with the connections; ``None`` without HTTP.
    """

    def __init__(
        self, config: Config, models: ModelRegistry, perf: PerfLog | None = None, gateway: Gateway | None = None
    ) -> None:
        self.config = config
        self.limits: Limits = config.limits
        self.models = models
        self.draining = False
        self.uploads = Uploads(config.limits.max_controller_bytes)
        self.queries = trio.Lock()
        """Held by the connection that makes an event of the answer to a query."""
        self._perf = perf
        self._gateway = gateway
        self._connections: set[Connection] = set()
        self._n_accepted = 0
        self._refused: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._connection_scope = trio.CancelScope()
        self._listener_scope = trio.CancelScope()

    def snapshot(self) -> dict[str, Any]:
        """The metrics, as docs/METRICS.md describes them.  Never waits for a step of an engine."""
        return {
            **self.models.get(None).snapshot(),
            "rejected_total": dict(self._refused),
            "connections": len(self._connections),
            "send_queue_bytes": sum(connection.waiting_bytes for connection in self._connections),
            "pid": os.getpid(),
            "version": uma_trio.__version__,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "draining": self.draining,
            "perf_log_dropped_total": self._perf.dropped if self._perf is not None else None,
            "gateway": self._gateway.snapshot() if self._gateway is not None else None,
        }

    def health(self, id: str | None) -> Health:
        """Whether another request can be served now, and why not.  Never waits for a step of an engine."""
        draining = HealthCheck(
            name="draining", ok=not self.draining, reason="the server is shutting down" if self.draining else "no"
        )
        checks = [*chain.from_iterable(service.health() for service in self.models), _memory_check(), draining]
        return Health(ready=all(check.ok for check in checks), checks=checks, id=id)

    def record_refusal(self, error: UmaError) -> None:
        """Count a refused request or connection."""
        self._refused[error.code] += 1

    async def run(self, sock: socket.socket) -> None:
        """Serve on the listening ``sock`` until drained or cancelled.  Closes ``sock``."""
        models_scope = trio.CancelScope(shield=True)  # models must outlive the connections
        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True):  # a cancelled start would wait for the task of the model forever
                for service in self.models:
                    await nursery.start(self._run_model, service, models_scope)
            try:
                with self._connection_scope:
                    async with trio.open_nursery() as connections:
                        with self._listener_scope, sock:
                            await listener.accept_forever(sock, self._serve_client, connections)
            finally:
                with trio.CancelScope(shield=True):  # cancelled requests are freed within one step
                    for service in self.models:
                        await service.wait_idle()
                if trio.current_effective_deadline() > -math.inf:  # there was no second signal
                    with trio.move_on_after(self.limits.drain_timeout_s, shield=True):
                        for service in self.models:
                            await service.save_everything()
                models_scope.cancel()

    async def _run_model(
        self, service: ModelService, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        with scope:
            await service.run(task_status)

    def drain(self) -> None:
        """Accept no more connections and requests; running requests have ``drain_timeout_s`` to finish.  Does not wait."""
        if self.draining:
            return
        self.draining = True
        for service in self.models:
            service.drain()
        self._listener_scope.cancel()
        if self._gateway is not None:
            self._gateway.drain()
        self._connection_scope.deadline = trio.current_time() + self.limits.drain_timeout_s
        for connection in self._connections:
            connection.leave()

    def stop(self) -> None:
        """End all requests and engines at once."""
        for service in self.models:
            service.stop()

    async def _serve_client(self, sock: socket.socket) -> None:
        codec = server_codec(
            self.config.listen.protocol,
            max_frame_bytes=self.limits.max_frame_bytes,
            chat=self.models.get(None).has_chat_template,
        )
        try:
            if len(self._connections) >= self.limits.max_connections:
                error = TooManyConnections(f"{len(self._connections)} connections are open")
                error.retry_after_ms = self.models.get(None).retry_after_ms()
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
    path: Path,
    *,
    on_progress: Progress | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Load the model and serve it on the Unix socket ``path`` until SIGINT or SIGTERM.

    The first signal drains; the second one stops at once.  SIGUSR1 writes a metrics snapshot.  SIGHUP lets the gateway read
    its tenants again; but from a terminal that was closed it drains, as SIGTERM does.  A service manager that started the
    daemon is notified when it serves and when it stops.

    Args:
        path: not used if systemd passes a socket.
        on_progress: called with the loaded share of the model, from 0 to 1.
        task_status: started when the socket accepts clients.

    Returns:
        Whether the daemon was drained; False after a second signal.

    Raises:
        SocketPathError: the path cannot be used.
        HttpAddressError: the gateway cannot listen at its address.
        ModelError: the model cannot be loaded.
    """
    stop = trio.CancelScope()
    notifier = Notifier(os.environ)
    passed = listener.take_passed(os.environ)
    if passed is not None:
        path = Path(passed.getsockname())
    with (
        passed or contextlib.nullcontext(),
        listener.claimed(path) if passed is None else listener.locked(path),
        listening(config) as http_socket,
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) as signals,
    ):
        async with trio.open_nursery() as process:
            handler = _SignalHandler(config, path, stop, notifier)
            process.start_soon(handler.run, signals)
            process.start_soon(notifier.ping_forever)
            gateway = None
            if http_socket is not None:
                gateway = Gateway(config, http_socket, path)
                handler.gateway = gateway
                process.start_soon(gateway.run)
            notifier.report("STATUS=loading the model")
            launcher = make_launcher(config, process)
            async with open_model(config, launcher, on_progress, handler.should_load) as model:
                # a signal after the last look at should_load; from here on, the server is there when the next one is handled
                if model is not None and handler.should_load():
                    with stop:
                        await _serve_loaded(config, path, passed, model, handler, gateway, task_status)
            process.cancel_scope.cancel()
    return not stop.cancel_called


def make_launcher(config: Config, nursery: trio.Nursery) -> Launcher:
    """Return a launcher for the configured mode: child processes, or threads of this process.

    Args:
        nursery: for the tasks that watch the engines; it must outlive them.
    """
    if config.engine.mode == "process":
        return ProcessLauncher(nursery)
    return ThreadLauncher(nursery, open_engine)


def make_runtime(config: Config, model: LoadedModel) -> SupervisedRuntime | None:
    """Return the runtime of a model's controllers, as configured; ``None`` if there are to be none."""
    if config.aici.enabled == "disabled":
        return None
    info = model.info
    start = RuntimeStart(
        config.aici,
        model_path(config.model.model),
        folder=state_dir(config) / "aici",
        n_vocab=info.n_vocab,
        n_rows=info.n_seq_max,
        max_controller_bytes=config.limits.max_controller_bytes,
        expire_s=round(config.limits.request_timeout_s) + 1,
        llama_dir=config.model.llama_dir,
    )
    return SupervisedRuntime(start, max_tokens=info.n_ctx)


async def _serve_loaded(
    config: Config,
    path: Path,
    passed: socket.socket | None,
    model: LoadedModel,
    handler: _SignalHandler,
    gateway: Gateway | None,
    task_status: trio.TaskStatus[Server],
) -> None:
    info = model.info
    runtime = make_runtime(config, model)
    with perf_log(config, info) as perf, open_storage(config, model) as storage:
        service = ModelService(
            config,
            model,
            perf=perf,
            journal=storage.journal,
            files=storage.files,
            states=storage.states,
            runtime=runtime,
        )
        server = Server(config, ModelRegistry(service), perf, gateway)
        sock = passed or listener.bind(path, backlog=config.listen.backlog)
        handler.server = server
        for fact, fields in service.describe().items():
            log.info(fact, **fields)
        log.info(
            "serving",
            socket=str(path),
            http=gateway.url if gateway is not None else None,
            protocol=config.listen.protocol,
            engine=config.engine.mode,
            engine_pid=model.engine.link.pid,
        )
        handler.notifier.report("READY=1", f"STATUS=serving {service.name} on {path}")
        task_status.started(server)
        try:
            async with trio.open_nursery() as nursery:
                if runtime is not None:
                    nursery.start_soon(runtime.run)
                await server.run(sock)
                nursery.cancel_scope.cancel()
        finally:
            service.keep_learned_costs()
    log.info("stopped", **{key: server.snapshot()[key] for key in ("tokens_total", "requests_total", "uptime_s")})


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

    def __init__(self, config: Config, path: Path, stop: trio.CancelScope, notifier: Notifier) -> None:
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

    def _read_again(self) -> None:
        if self.gateway is None:
            log.info("SIGHUP has no effect without --http")
        else:
            log.info("the gateway reads its tenants again")
            self.gateway.read_again()

    async def run(self, signals: Any) -> None:
        """Handle ``signals`` until cancelled."""
        async for number in signals:
            if number == signal.SIGUSR1:
                await self._write_snapshot()
            elif number == signal.SIGHUP and not _was_closed(self._terminal):
                self._read_again()
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
                    self.server.drain()

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
