"""The daemon's side of a runtime process: start it, exchange messages with it, notice when it dies or hangs.

A thread waits for the messages of each channel, since nothing else can wait for a semaphore.  Everything else happens in
trio's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import attrs
import structlog
import trio

from uma_trio.aici_link.channel import MIB, BrokenChannel, Channel, Channels, ChannelTimeout, Layout, MessageTooLarge
from uma_trio.aici_link.messages import (
    Auth,
    BadMessage,
    Error,
    MainRequest,
    Ok,
    Ping,
    Pong,
    SideRequest,
    Tokens,
    VocabularySize,
    decode_answer,
    encode_request,
    readable_error,
    rid_of_answer,
)
from uma_trio.aici_link.shared_memory import new_prefix
from uma_trio.config import Aici
from uma_trio.engine_link.masks import ITEM_BYTES, MaskFile
from uma_trio.errors import ControllerFailed, ControllerNotFound, ControllerUnavailable
from uma_trio.processes.child_process import ChildProcess
from uma_trio.processes.interpreter import package_environment, python_module
from uma_trio.processes.parent_process import LOG_VARIABLE

T = TypeVar("T")

log = structlog.get_logger("uma_trio.aici")

LISTEN_S: Final = 0.5
"""Longest time that a thread of a link lives on after its runtime."""

WATCH_S: Final = 0.25
"""How often the watchdog looks at calls that are not answered."""

HANG_S: Final = 5.0
"""A call that takes so much longer than its limit means that the runtime hangs."""

START_S: Final = 60.0
"""Longest time from the start of a runtime to its first answer."""

SIDE_S: Final = 60.0
"""Longest time of a call on the side channel, on top of the limits for controllers; a module may have to be compiled."""

MIN_JSON_MIB: Final = 8

NO_MODULE: Final = re.compile(r"(tag|module) \S+ not found|invalid module_id|gh:|No such file")
"""How a runtime says that it has no such module."""


@attrs.frozen
class RuntimeStart:
    """What a runtime is started with."""

    settings: Aici
    model: Path
    """The GGUF whose vocabulary controllers see."""
    folder: Path
    """Where it keeps modules."""
    n_vocab: int
    """Tokens of the model."""
    n_rows: int
    """Most sequences in one step."""
    max_controller_bytes: int
    expire_s: int
    """How long a controller may wait for a sequence."""
    llama_dir: Path | None = None

    @property
    def layout(self) -> Layout:
        """Names and sizes of a new shared memory."""
        json_mib = max(MIN_JSON_MIB, self.max_controller_bytes * 4 // 3 // MIB + 2)  # an upload is base64
        return Layout(new_prefix(), json_mib, self.bias_bytes // MIB + 1, self.settings.futex)

    @property
    def bias_bytes(self) -> int:
        return self.n_rows * self.n_vocab * ITEM_BYTES

    def command(self, layout: Layout) -> list[str]:
        """The command line of the runtime, with the flags of the reference implementation."""
        settings = self.settings
        tokenizer = str(self.model.absolute()) if settings.tokenizer is None else settings.tokenizer
        flags = {
            "tokenizer": tokenizer,
            "json-size": layout.json_mib,
            "bin-size": layout.bin_mib,
            "name": layout.prefix,
            "wasm-max-forks": settings.max_forks,
            "wasm-max-memory": settings.max_memory_mb,
            "wasm-max-pre-step-time": settings.step_ms,
            "wasm-max-step-time": settings.step_ms,
            "wasm-max-init-time": settings.init_ms,
        }
        if settings.executable is not None:
            program = [str(settings.executable.absolute())]
        else:
            program = [*python_module("uma_trio"), "aicirt"]
            flags["uma-expire-s"] = self.expire_s
            flags["uma-folder"] = str(self.folder.absolute())
            flags["uma-max-modules"] = settings.max_modules_mb
            flags["uma-max-principal-modules"] = settings.max_principal_modules_mb
            if settings.skip_ms:
                flags["uma-skip-slow-ms"] = settings.skip_ms
            if self.llama_dir is not None:
                flags["llama-dir"] = str(self.llama_dir.absolute())
        words = [f"--{name}={value}" for name, value in flags.items()]
        return [*program, *words, "--server", *(["--futex"] if layout.futex else [])]


class RuntimeDied(Exception):
    """The runtime has ended, or was killed since it hung.  ``str`` says why."""


@attrs.define(eq=False)
class _Call(Generic[T]):
    """A message that the runtime has to answer."""

    limit_s: float
    answered: Callable[[bytes], None]
    lost: Callable[[], None]
    """Called when there will be no answer."""
    waited_s: float = 0.0


class RuntimeLink:
    """A running runtime.

    Args:
        start: what it is started with.
        channels: to it; closed here.
        process: where it runs.
    """

    masks: MaskFile
    """Where ``mid_process`` writes; set by ``shake_hands``."""

    def __init__(self, start: RuntimeStart, channels: Channels, process: ChildProcess) -> None:
        self._start = start
        self._channels = channels
        self._process = process
        self._main_call: _Call[Any] | None = None
        self._side_calls: dict[str, _Call[Any]] = {}
        self._rids = itertools.count()
        self._side_sender = trio.CapacityLimiter(1)
        self._side_lock = threading.Lock()
        """Held by the thread that sends; the channel is not closed meanwhile."""
        self._token = trio.lowlevel.current_trio_token()
        self._threads = [
            threading.Thread(target=self._listen, args=arguments, name=f"aici {name} channel", daemon=True)
            for name, *arguments in (
                ("main", channels.main, self._main_answered),
                ("side", channels.side, self._side_answered),
            )
        ]
        self._is_killed = False
        self.reason = ""
        """Why it cannot be used any more."""
        self.ended = trio.Event()
        """Set when it has ended, or is being killed; by then ``reason`` says why."""

    @classmethod
    async def launch(cls, start: RuntimeStart) -> RuntimeLink:
        """Start a process.  ``run`` must be started next.

        Raises:
            OSError: no such program, or no shared memory.
        """
        layout = start.layout
        channels = await trio.to_thread.run_sync(_create, start, layout)
        try:
            folder = await trio.to_thread.run_sync(_working_directory, start)
            process = ChildProcess(
                start.command(layout),
                name="runtime of controllers",
                logger="uma_trio.aici.runtime",
                environment={**package_environment(), LOG_VARIABLE: "1"},
                folder=folder,
                keep_stdout=True,
            )
        except BaseException:
            channels.unlink()
            channels.close()
            raise
        return cls(start, channels, process)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether somebody else has ended it by a SIGKILL, which is not its own fault."""
        return self._process.was_killed and not self._is_killed

    def usage(self) -> dict[str, float]:
        """Resident memory in bytes and CPU time in seconds."""
        return self._process.usage()

    async def run(self) -> None:
        """Watch the runtime until it ends."""
        for thread in self._threads:
            thread.start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                reason = await self._process.wait()
                nursery.cancel_scope.cancel()
            self._end(reason)
        finally:  # also if this task is cancelled
            self._end("the daemon ends")
            self._process.kill()
            self._channels.unlink()
            threading.Thread(target=self._close, name="aici end", daemon=True).start()

    def kill(self, reason: str) -> None:
        """End it at once, whatever it does; all calls fail."""
        self._end(reason)
        self._is_killed = True
        self._process.kill()

    def _end(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        self.ended.set()
        calls, self._main_call = [self._main_call, *self._side_calls.values()], None
        self._side_calls.clear()
        for call in calls:
            if call is not None:
                call.lost()

    # -- calls ----------------------------------------------------------------------------------

    async def shake_hands(self) -> None:
        """Wait until the runtime answers, and check that it has the vocabulary of the model.

        Raises:
            RuntimeDied: it has ended, or cannot be used.
        """
        await self._ask_main(Ping(), Pong)
        size = (await self._ask_main(Tokens(), VocabularySize)).vocab_size
        if not 0 < size <= self._start.n_vocab:
            self.kill(f"it has {size} tokens, and the model {self._start.n_vocab}; give it the model's vocabulary")
            raise RuntimeDied(self.reason)
        self.masks = MaskFile(self._channels.biases.fd, self._start.n_rows, size)

    async def _ask_main(self, request: MainRequest, kind: type[T]) -> T:
        answers: list[T] = []
        failures: list[str] = []
        done = trio.Event()

        def answered(answer: T) -> None:
            answers.append(answer)
            done.set()

        def failed(reason: str) -> None:
            failures.append(reason)
            done.set()

        self.exchange(request, kind, START_S, answered, failed)
        await done.wait()
        if failures:
            raise RuntimeDied(failures[0])
        return answers[0]

    def exchange(
        self,
        request: MainRequest,
        kind: type[T],
        limit_s: float,
        answered: Callable[[T], None],
        failed: Callable[[str], None],
    ) -> None:
        """Send a request on the main channel; does not wait.

        Args:
            limit_s: a longer wait means that the runtime hangs.
            answered: called with the answer, later.
            failed: called with the reason if the answer is an error, or when there will be none; perhaps at once.

        Raises:
            RuntimeError: the request before is not answered.
        """
        if self._main_call is not None:
            raise RuntimeError("the exchange before is not done")
        if self.reason:
            failed(self.reason)
            return

        def take(data: bytes) -> None:
            try:
                reply = decode_answer(data, kind)
            except BadMessage as error:
                self.kill(str(error))
                failed(self.reason)
                return
            if isinstance(reply, Ok):
                answered(reply.data)
            else:
                failed(reply.error)

        self._main_call = _Call(limit_s, take, lambda: failed(self.reason))
        try:
            self._channels.main.outgoing.send(
                encode_request(request), 0.0
            )  # the message before was taken, as it was answered
        except ChannelTimeout:
            self.kill("it has answered a message that it has not taken")
        except (MessageTooLarge, OSError) as error:
            self.kill(f"cannot send {type(request).__name__}: {error}")

    async def call(
        self,
        request: SideRequest,
        kind: type[T],
        auth: Auth | None,
        limit_s: float = 0.0,
        late: Callable[[], None] | None = None,
    ) -> T:
        """Ask on the side channel, and wait for the answer.

        Args:
            limit_s: how long the controller may take.
            late: called with an answer that comes after the caller was cancelled.

        Raises:
            ControllerNotFound: there is no such module or tag.
            ControllerFailed: the runtime refuses it, and says why.
            ControllerUnavailable: the runtime has ended, hangs, fails or answers nonsense.
        """
        rid = f"r{next(self._rids)}"
        answers: list[bytes] = []
        done = trio.Event()

        def answered(data: bytes) -> None:
            answers.append(data)
            done.set()

        call: _Call[T] = _Call(limit_s + SIDE_S, answered, done.set)
        if not self.reason:
            self._side_calls[rid] = call
            is_sent = False
            try:
                await self._send_side(request, rid, auth)
                is_sent = True
                await done.wait()
            except trio.Cancelled:
                if late is None or not is_sent:
                    self._side_calls.pop(rid, None)
                elif answers:
                    late()
                else:
                    call.answered = lambda data: late()
                raise
        if not answers:
            raise ControllerUnavailable(f"the runtime of controllers has ended: {self.reason}")
        try:
            reply = decode_answer(answers[0], kind)
        except BadMessage as error:
            raise ControllerUnavailable(f"the runtime of controllers: {error}") from None
        if isinstance(reply, Ok):
            return reply.data
        if isinstance(reply, Error) and NO_MODULE.match(reply.error):
            raise ControllerNotFound(reply.error, field="controller")
        if not isinstance(reply, Error) or not reply.is_user_error:
            raise ControllerUnavailable(f"the runtime of controllers: {reply.error}")
        raise ControllerFailed(readable_error(reply.error))

    async def _send_side(self, request: SideRequest, rid: str, auth: Auth | None) -> None:
        """Send it as soon as the runtime has taken the message before; gives up if the runtime ends.

        All in a thread: an upload may have megabytes.

        Raises:
            ControllerUnavailable: there is no room.
        """

        def send() -> None:
            data = encode_request(request, rid, auth)
            with self._side_lock:
                while not self.reason:
                    with contextlib.suppress(ChannelTimeout):
                        self._channels.side.outgoing.send(data, WATCH_S)
                        return

        try:
            await trio.to_thread.run_sync(send, limiter=self._side_sender)
        except (MessageTooLarge, OSError) as error:
            self._side_calls.pop(rid, None)
            raise ControllerUnavailable(f"the runtime of controllers: {error}") from None

    # -- answers --------------------------------------------------------------------------------

    def _listen(self, channel: Channel, answered: Callable[[bytes], None]) -> None:
        """Pass messages on to trio's thread.  Runs in a thread of its own."""
        with contextlib.suppress(trio.RunFinishedError):
            while not self.reason:
                try:
                    data = channel.incoming.receive(LISTEN_S)
                except ChannelTimeout:
                    continue
                except BrokenChannel as error:
                    self._token.run_sync_soon(self.kill, f"it writes {error}")
                    return
                self._token.run_sync_soon(answered, data)

    def _main_answered(self, data: bytes) -> None:
        call, self._main_call = self._main_call, None
        if call is not None:
            call.answered(data)
        elif not self.reason:
            self.kill("it answers what nobody has asked")

    def _side_answered(self, data: bytes) -> None:
        try:
            rid = rid_of_answer(data)
        except BadMessage as error:
            log.warning("the runtime of controllers answers nonsense", reason=str(error))
            return
        call = self._side_calls.pop(rid, None) if rid is not None else None
        if call is not None:  # otherwise the one who asked has gone
            call.answered(data)

    async def _watch(self) -> None:
        """Kill a runtime that hangs.

        Counts intervals and not wall time, so time in which the daemon itself was stopped does not count.
        """
        while True:
            await trio.sleep(WATCH_S)
            calls = [call for call in (self._main_call, *self._side_calls.values()) if call is not None]
            for call in calls:
                call.waited_s += WATCH_S
                if call.waited_s > call.limit_s + HANG_S:
                    self.kill(f"no answer for {call.waited_s:.0f} s")

    def _close(self) -> None:
        for thread in self._threads:
            thread.join()
        with self._side_lock:
            self._channels.close()


def _working_directory(start: RuntimeStart) -> Path:
    """Make the folder of the modules.  Our own runtime also works without it, for example on a full disk.

    Raises:
        OSError: it cannot be made, and the runtime is another one.
    """
    try:
        start.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(start.folder)
    except OSError as error:
        if start.settings.executable is not None:
            raise
        log.warning(
            "the folder of controllers cannot be used: only those that come with uma-trio run", reason=str(error)
        )
        return Path("/")
    return start.folder


def _create(start: RuntimeStart, layout: Layout) -> Channels:
    channels = layout.create()
    try:
        # the engine reads rows: pages without room would end it with SIGBUS
        channels.biases.reserve(0, start.bias_bytes)
    except BaseException:
        channels.unlink()
        channels.close()
        raise
    return channels
