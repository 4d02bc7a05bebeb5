"""The daemon: four nested lifetimes, and what signals do to them.

    process > model > connections > listener

Each ends before the one around it, so draining needs no state: stop listening, give the connections a
deadline, then let go of the model.

Source: docs/ARCHITECTURE.md, "Lifetimes".
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import trio

from uma_trio.config import Config, Limits
from uma_trio.daemon import listener
from uma_trio.daemon.connection import Connection
from uma_trio.daemon.perf_log import PerfLog, perf_log
from uma_trio.daemon.storage import NO_STORAGE, Storage, open_storage
from uma_trio.engine.thread import EngineThread
from uma_trio.errors import TooManyConnections
from uma_trio.models import known_costs
from uma_trio.models.loaded import LoadedModel, load_model
from uma_trio.models.prompt import PromptMaker
from uma_trio.protocol.codec import server_codec
from uma_trio.protocol.messages import Failure
from uma_trio.runner import Runner
from uma_trio.runner.spiller import InThread
from uma_trio.sessions import Sessions

log = structlog.get_logger("uma_trio.daemon")

Progress = Callable[[float], None]


class Server:
    """One loaded model and its clients."""

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        thread: EngineThread,
        perf: PerfLog | None = None,
        memory: Storage = NO_STORAGE,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self.config = config
        self.limits: Limits = config.limits
        self.runner = Runner(model.engine, thread, model.piece, config, model.cost, perf, memory.files, in_thread)
        self.runner.cache.index.add_all(memory.states)
        self.prompts: PromptMaker = model.prompts
        self.sessions = Sessions(config, self.runner, model.prompts, memory.journal, in_thread=in_thread)
        self.sessions.recall()
        self.draining = False
        self._model = model
        self._perf = perf
        self._connections: set[Connection] = set()
        self._accepted = 0
        self._started_at = time.time()
        self._connection_scope = trio.CancelScope()
        self._listener_scope = trio.CancelScope()

    def snapshot(self) -> dict[str, Any]:
        """What a metrics query is answered with."""
        return {
            **self.runner.snapshot(),
            "connections": len(self._connections),
            "sessions": self.sessions.snapshot(),
            "send_queue_bytes": sum(connection.waiting_bytes for connection in self._connections),
            "uptime_s": round(time.time() - self._started_at, 1),
            "draining": self.draining,
            "perf_log_dropped_total": self._perf.dropped if self._perf is not None else None,
        }

    async def run(self, sock: socket.socket) -> None:
        """Serve on the listening ``sock``, which is closed here, until drained or cancelled."""
        runner_scope = trio.CancelScope(shield=True)  # it outlives the connections, whoever cancels them
        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True):  # else it would not be handed over, and be waited for for ever
                await nursery.start(self._run_runner, runner_scope)
            try:
                nursery.start_soon(self.sessions.sweep_forever)
                with self._connection_scope:
                    async with trio.open_nursery() as connections:
                        with self._listener_scope, sock:
                            await listener.accept_forever(sock, self._welcome, connections)
            finally:
                with trio.CancelScope(shield=True):  # what was cancelled is freed within one step
                    await self.runner.wait_idle()
                if trio.current_effective_deadline() > -math.inf:  # nobody insists, and the runner still runs
                    with trio.move_on_after(self.limits.drain_timeout_s, shield=True):
                        await self.sessions.mend()
                        await self.runner.states.save_everything()
                runner_scope.cancel()
                nursery.cancel_scope.cancel()

    async def _run_runner(self, scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await self.runner.run(task_status)

    def drain(self) -> None:
        """Take nothing new, let running requests end within ``drain_timeout_s``."""
        if self.draining:
            return
        self.draining = True
        self.runner.close()
        self._listener_scope.cancel()
        self._connection_scope.deadline = trio.current_time() + self.limits.drain_timeout_s
        for connection in self._connections:
            connection.leave()

    def abort(self) -> None:
        """Cut the step under way short; for one who will not wait."""
        self._model.engine.abort()

    async def _welcome(self, sock: socket.socket) -> None:
        codec = server_codec(self.config.listen.protocol, max_frame_bytes=self.limits.max_frame_bytes)
        try:
            if len(self._connections) >= self.limits.max_connections:
                error = TooManyConnections(f"{len(self._connections)} connections are open")
                self.runner.telemetry.rejected[error.code] += 1
                sock.send(codec.encode(Failure.of(error)))
                return
            self._accepted += 1
            connection = Connection(sock, codec, self, name=f"c{self._accepted}")
            self._connections.add(connection)
            try:
                await connection.serve()
            finally:
                self._connections.discard(connection)
        except OSError as error:  # it left before it was refused
            log.debug("a client left early", reason=str(error))
        except Exception:  # a handler's defect must not take the others down
            log.exception("a connection failed")
        finally:
            trio.lowlevel.notify_closing(sock)
            sock.close()


async def serve(
    config: Config,
    path: Path,
    *,
    on_progress: Progress | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Load the model, serve it on the Unix socket ``path``, until a signal ends it.

    Returns:
        Whether everything that ran came to its end; False after a second signal.

    Raises:
        SocketPathError: the path cannot be used.
        ModelError: the model cannot be loaded.
    """
    stop = trio.CancelScope()
    with listener.claimed(path), trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
        async with trio.open_nursery() as process:
            attendant = _Attendant(config, path, stop)
            process.start_soon(attendant.attend, signals)
            thread = EngineThread("uma-trio engine")
            try:
                model = await load_model(config, thread, on_progress, attendant.loading)
                if model is not None:
                    try:
                        with stop:
                            await _serve_loaded(config, path, model, thread, attendant, task_status)
                    finally:
                        with trio.CancelScope(shield=True):
                            await thread.run(model.engine.close)
            finally:
                thread.close()
            process.cancel_scope.cancel()
    return not stop.cancel_called


async def _serve_loaded(
    config: Config,
    path: Path,
    model: LoadedModel,
    thread: EngineThread,
    attendant: _Attendant,
    task_status: trio.TaskStatus[Server],
) -> None:
    facts = model.engine.facts
    with perf_log(config, facts) as perf, open_storage(config, model) as memory:
        server = Server(config, model, thread, perf, memory)
        sock = listener.bind(path, backlog=config.listen.backlog)
        attendant.server = server
        log.info(
            "serving",
            socket=str(path),
            model=facts.name,
            description=facts.description,
            ctx=facts.n_ctx,
            parallel=facts.n_seq_max,
            protocol=config.listen.protocol,
        )
        task_status.started(server)
        try:
            await server.run(sock)
        finally:
            tuning_cache.save_costs(model.cost_name, server.runner.pace.cost)
    log.info("stopped", **{key: server.snapshot()[key] for key in ("tokens_total", "requests_total", "uptime_s")})


class _Attendant:
    """Acts on signals: the first asks to end, the second insists."""

    def __init__(self, config: Config, path: Path, stop: trio.CancelScope) -> None:
        self._config = config
        self._folder = config.operations.snapshot_dir or path.parent
        self._stop = stop
        self._asked = False
        self.server: Server | None = None

    def loading(self) -> bool:
        """Whether loading should go on.  Called from the loading thread."""
        return not self._asked

    async def attend(self, signals: Any) -> None:
        async for number in signals:
            if number == signal.SIGUSR1:
                await self._write_snapshot()
            elif self._asked:
                log.warning("stopping at once", signal=signal.Signals(number).name)
                self._stop.cancel()
                if self.server is not None:
                    self.server.abort()
            else:
                self._asked = True
                log.info(
                    "draining; a second signal stops at once",
                    signal=signal.Signals(number).name,
                    at_most_s=self._config.limits.drain_timeout_s,
                )
                if self.server is not None:
                    self.server.drain()

    async def _write_snapshot(self) -> None:
        if self.server is None:
            log.warning("no snapshot: the model is still loading")
            return
        stamp = datetime.datetime.now().strftime("%Y%m%dT%H%M%S.%f")
        target = self._folder / f"uma-metrics-{stamp}.json"
        data = msgspec.json.format(msgspec.json.encode(self.server.snapshot())) + b"\n"
        try:
            await trio.to_thread.run_sync(_write_file, target, data)
        except OSError as error:
            log.error("cannot write the metrics snapshot", path=str(target), reason=error.strerror)
        else:
            log.info("metrics snapshot", path=str(target))


def _write_file(target: Path, data: bytes) -> None:
    temporary = target.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, target)
