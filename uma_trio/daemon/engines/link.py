"""The daemon's side of an engine: start it, send it steps, receive what it computed, notice when it dies.

An engine runs in a process of its own, so that an ``abort()`` in the library costs a pause and nothing else.  For tests
and for embedding the same worker runs in a thread; the link is the same socket pair.
"""

from __future__ import annotations

import array
import contextlib
import logging
import math
import os
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import trio

from uma_trio.daemon.engines.process import EngineProcess
from uma_trio.engine_link.interrupts import Interrupts, new_file
from uma_trio.engine_link.kv_ops import LoadState, SaveState
from uma_trio.engine_link.masks import MaskFile
from uma_trio.engine_link.messages import (
    DOES_NOT_OPEN,
    MAX_FDS,
    NO_MEMORY,
    AttachInterrupts,
    AttachMasks,
    Decoder,
    DefineGrammar,
    EngineDied,
    EngineError,
    FromDaemon,
    FromEngine,
    LoadError,
    LoadFailed,
    LoadProgress,
    MasksReady,
    ModelInfo,
    Opening,
    Ready,
    Revoke,
    SetThreads,
    Start,
    StepFailed,
    StepInput,
    StepOutput,
    SubmittedStep,
    encode,
)

log = logging.getLogger("uma_trio.engine")

READ_BYTES: Final = 1 << 16
WATCH_S: Final = 0.25
"""Interval between looks at an engine that does not answer."""

EXIT_S: Final = 5.0
"""How long an engine that was asked to end may take before it is killed."""

EXIT_REASON_TIMEOUT_S: Final = 1.0
"""How long to wait for the exit status and the last lines of an engine whose socket has closed."""

KILLED: Final = "SIGKILL"
"""How the end of an engine reads that the kernel ended for lack of memory."""

MIN_GRAMMARS: Final = 64
"""An engine keeps this many grammars, or two per sequence if that is more.  It bounds their memory."""


def _is_about_memory(death: str) -> bool:
    """Whether an engine ended because memory was short."""
    return KILLED in death or NO_MEMORY.search(death) is not None


class Process(Protocol):
    """Where a worker runs."""

    pid: int | None
    """Process id; ``None`` if the worker is a thread of this process."""

    def kill(self) -> None:
        """End it at once, whatever it does."""

    async def wait(self) -> str:
        """Wait for its end; returns how it ended."""

    def usage(self) -> dict[str, float]:
        """Resident memory in bytes and CPU time in seconds; empty for a thread."""


class KnownGrammars:
    """The grammars that an engine knows, the most recently used one last."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def use(self, key: str, source: str, n_sequences: int) -> DefineGrammar | None:
        """What to send before a step that names the grammar; ``None`` if the engine knows it.

        The least recently used one is replaced.  It is in neither step in flight, because there is room for two per
        sequence.
        """
        is_known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if is_known:
            return None
        is_full = len(self._keys) > max(MIN_GRAMMARS, 2 * n_sequences)
        return DefineGrammar(key, source, self._keys.popitem(last=False)[0] if is_full else None)


class EngineLink:
    """A running engine.  Not for several tasks at once.

    Args:
        sock: connected to the worker; closed here.
        process: where the worker runs.
    """

    ready: Ready
    """What the engine reported when its model was loaded; set by ``load``."""

    def __init__(self, sock: socket.socket, process: Process) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._process = process
        self._decoder = Decoder("engine")
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._interrupts: Interrupts | None = None
        """Flags of its steps; opened by ``load``."""
        self._grammars = KnownGrammars()
        self._masks: MaskFile | None = None
        self._socket_closed = False
        self.ended = trio.Event()
        """Set when the engine has ended; by then ``reason`` says how."""
        self.reason = ""

    @property
    def info(self) -> ModelInfo:
        return self.ready.info

    @property
    def pid(self) -> int | None:
        """Process id of the engine; ``None`` if it runs in a thread."""
        return self._process.pid

    async def run(self) -> None:
        """Watch the engine until it ends.  To be started once, in a nursery that outlives the link."""
        try:
            self.reason = await self._process.wait()
        finally:  # also if this task is cancelled, or ``aclose`` would wait for ever
            self.reason = self.reason or "it is not watched any more"
            self.ended.set()

    async def load(
        self,
        start: Start,
        on_progress: Callable[[float], None],
        should_continue: Callable[[], bool],
        hang_timeout_s: float = math.inf,
    ) -> bool:
        """Have the model loaded; ``run`` must have been started.

        Args:
            on_progress: called with the loaded share in [0, 1].
            should_continue: asked every ``WATCH_S``; False gives up.
            hang_timeout_s: longest time from opening a library file until its code has run.

        Returns:
            Whether the model is loaded; otherwise loading was given up, and the engine has ended.

        Raises:
            LoadError: the model cannot be loaded, or the engine died of it.
        """
        loaded = False
        opening, waited_s = None, 0.0
        try:
            self._send(start)
            while should_continue():
                messages: list[FromEngine] = []
                with trio.move_on_after(WATCH_S):
                    messages = await self.receive()
                waited_s = 0.0 if messages else waited_s + WATCH_S
                if opening is not None and waited_s >= hang_timeout_s:
                    remedy = f"{DOES_NOT_OPEN}; on a slow disk raise engine_hang_timeout_s"
                    raise LoadError(f"{opening} hangs while it is loaded, for {hang_timeout_s:g} s", remedy)
                for message in messages:
                    match message:
                        case Opening():
                            opening = message.path
                        case LoadProgress():
                            opening = None
                            on_progress(message.progress)
                        case LoadFailed():
                            raise LoadError(message.reason, message.remedy, is_about_memory=message.is_about_memory)
                        case Ready():
                            self.ready = message
                            self._attach_interrupts()
                            loaded = True
                            return True
            return False
        except EngineDied as death:
            raise LoadError(str(death), is_about_memory=_is_about_memory(str(death))) from death
        finally:
            if not loaded:
                self.kill()
                await self.aclose()

    def _attach_interrupts(self) -> None:
        fd = new_file()
        try:
            self._interrupts = Interrupts(fd)
            self._send(AttachInterrupts(), [fd])
        finally:
            os.close(fd)

    # -- steps ----------------------------------------------------------------------------------

    def submit(self, step: SubmittedStep) -> None:
        """Send a step; does not wait.  The engine computes steps in the order of their submission."""
        assert self._interrupts is not None
        self._interrupts.clear(step.number)
        fds = [op.fd for op in step.ops if isinstance(op, SaveState | LoadState)]
        chunks = [item for inputs in step.calls for item in inputs if isinstance(item, StepInput)]
        fds += [rows.fd for chunk in chunks for rows in chunk.media]
        self._send(step, fds)

    def define_grammar(self, key: str, source: str) -> None:
        """Make a grammar known to the engine; call it before each step that names the grammar."""
        message = self._grammars.use(key, source, self.info.n_seq_max)
        if message is not None:
            self._send(message)

    def set_threads(self, n_threads: int) -> None:
        """Have the engine compute with this many threads from the next step on."""
        self._send(SetThreads(n_threads))

    def revoke(self, number: int) -> None:
        """Ask the engine not to begin step ``number``, or to interrupt it if it gives way; it answers ``Revoked`` then."""
        assert self._interrupts is not None
        self._interrupts.set(number)
        self._send(Revoke(number))

    def end_passes(self, number: int) -> None:
        """Have step ``number`` end after the pass that computes, or after its first one."""
        assert self._interrupts is not None
        self._interrupts.set(number)

    def attach_masks(self, file: MaskFile) -> None:
        """Have the engine read the masks of controllers there; call it before each step that waits for masks."""
        if file is not self._masks:
            self._masks = file
            self._send(AttachMasks(file.n_rows, file.n_vocab), [file.fd])

    def masks_ready(self, number: int, rows: Mapping[int, int]) -> None:
        """Tell the engine that the masks of controllers for step ``number`` are there.

        Args:
            rows: where each one is, by the key of its sample.  Nothing is sampled for other keys.
        """
        self._send(MasksReady(number, rows))

    async def receive(self) -> list[FromEngine]:
        """The next messages of the engine, at least one.

        Raises:
            EngineDied: it has ended.
        """
        while True:
            if self._unsent:
                await self._flush()
            await trio.lowlevel.wait_readable(self._sock)
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._socket_closed = True
                raise EngineDied(await self._exit_reason())
            if messages := self._decoder.feed(data):
                return messages

    async def compute(self, step: SubmittedStep) -> StepOutput:
        """Submit one step and wait for its output.

        Raises:
            EngineError: the step failed.
            EngineDied: the engine has ended.
        """
        self.submit(step)
        [answer] = await self.receive()
        if isinstance(answer, StepFailed):
            raise EngineError(answer.reason)
        assert isinstance(answer, StepOutput)
        return answer

    # -- how it is ------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether steps can be sent; not if the engine has died."""
        return self.reason == "" and not self._socket_closed

    def usage(self) -> dict[str, float]:
        """Resident memory in bytes and CPU time in seconds, where the engine is a process of its own."""
        return self._process.usage()

    # -- the end --------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the engine at once, whatever it does."""
        self._process.kill()

    async def aclose(self) -> None:
        """Ask the engine to end, and wait for that; one that does not is killed.  ``run`` must have been started."""
        with trio.CancelScope(shield=True):
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
            self._discard_unsent()
            with trio.move_on_after(EXIT_S):
                await self.ended.wait()
            if not self.ended.is_set():
                self.kill()
                await self.ended.wait()
            if self._interrupts is not None:
                self._interrupts.close()

    async def _exit_reason(self) -> str:
        with trio.move_on_after(EXIT_REASON_TIMEOUT_S, shield=True):
            await self.ended.wait()
        return self.reason or "it closed its socket"

    # -- sending --------------------------------------------------------------------------------

    def _send(self, message: FromDaemon, fds: Sequence[int] = ()) -> None:
        data, duplicates = encode(message), [os.dup(fd) for fd in fds]
        while (
            len(duplicates) > MAX_FDS
        ):  # one sendmsg carries MAX_FDS descriptors and needs a byte; a message has enough
            self._unsent.append((data[:1], duplicates[:MAX_FDS]))
            data, duplicates = data[1:], duplicates[MAX_FDS:]
        self._unsent.append((data, duplicates))
        self._send_some()

    def _send_some(self) -> None:
        """Send what the socket takes at once; descriptors go with the first byte of their part of a message."""
        while self._unsent:
            data, fds = self._unsent.popleft()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], ancillary)
            except BlockingIOError:
                self._unsent.appendleft((data, fds))
                return
            except OSError:  # the engine has died; ``receive`` says so
                self._unsent.appendleft((data, fds))
                self._discard_unsent()
                return
            for fd in fds:
                os.close(fd)
            if sent < len(data):
                self._unsent.appendleft((data[sent:], ()))
                return

    def _discard_unsent(self) -> None:
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()

    async def _flush(self) -> None:
        """Send the rest.  A computing engine does not read the socket.  If its answer comes first, stop: the rest is sent later."""
        async with trio.open_nursery() as nursery:

            async def end_when_readable() -> None:
                await trio.lowlevel.wait_readable(self._sock)
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_when_readable)
            while self._unsent:
                await trio.lowlevel.wait_writable(self._sock)
                self._send_some()
            nursery.cancel_scope.cancel()


class Launcher(Protocol):
    """Starts engines."""

    def launch(self, model: str) -> EngineLink:
        """Start an engine that has no model yet.

        Args:
            model: the name that ``ps`` and the log show.
        """


# -- in a process of its own -----------------------------------------------------------------------


class ProcessLauncher:
    """Starts each engine in a child process with an interpreter of its own.

    Args:
        nursery: for the tasks that watch the children.
        module: what the child runs; see ``EngineProcess.start``.
        prestarted: a process for the first engine, already started.
    """

    def __init__(
        self, nursery: trio.Nursery, module: str = "uma_trio.engine", prestarted: EngineProcess | None = None
    ) -> None:
        self._nursery = nursery
        self._module = module
        self._prestarted = prestarted

    def launch(self, model: str) -> EngineLink:
        """See ``Launcher``.  Blocks for some milliseconds."""
        process, self._prestarted = self._prestarted or EngineProcess.start(self._module), None
        sock, child = process.take()
        child.extra = {"model": model}
        link = EngineLink(sock, child)
        self._nursery.start_soon(link.run)
        return link


# -- in a thread -----------------------------------------------------------------------------------


class ThreadLauncher:
    """Starts each engine in a thread of this process: for tests, and for programs that embed the daemon.

    Args:
        nursery: for the tasks that watch the threads.
        open_engine: loads a model; see ``worker.OpenEngine``.
    """

    def __init__(self, nursery: trio.Nursery, open_engine: Any) -> None:
        self._nursery = nursery
        self._open_engine = open_engine

    def launch(self, model: str) -> EngineLink:
        """See ``Launcher``."""
        ours, theirs = socket.socketpair()
        link = EngineLink(ours, WorkerThread(theirs, self._open_engine))
        self._nursery.start_soon(link.run)
        return link


class WorkerThread:
    """A worker in a thread."""

    pid: int | None = None

    def __init__(self, sock: socket.socket, open_engine: Any) -> None:
        from uma_trio.engine.worker import Worker

        self._trio = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._sock = sock
        self._worker = Worker(sock, open_engine)
        self._thread = threading.Thread(target=self._run, name="uma-trio engine", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        if self._worker.engine is not None:
            self._worker.engine.abort()
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> str:
        await self._ended.wait()
        return "the engine thread has ended"

    def usage(self) -> dict[str, float]:
        return {}

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception:
            log.exception("the engine thread failed")
        finally:
            with contextlib.suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(self._ended.set)
