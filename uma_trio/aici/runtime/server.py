"""The runtime as the daemon sees it: a main channel, answered in order, and a side channel, answered in any order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import msgspec

from uma_trio.aici.runtime.answer_size import FRAME_BYTES, shorten_to_fit
from uma_trio.aici.runtime.host import WasmHost
from uma_trio.aici.runtime.interface import (
    BadModule,
    BadRequest,
    CannotCompile,
    ControllerError,
    ControllerTimeout,
    Limits,
    Vocabulary,
)
from uma_trio.aici.runtime.live_sequence import controller_error
from uma_trio.aici.runtime.module_store import ModuleStore, StoreError
from uma_trio.aici.runtime.sequences import Sequences
from uma_trio.aici.runtime.variables import Variables
from uma_trio.aici.runtime.waiting import WaitingControllers
from uma_trio.aici_link.channel import BrokenChannel, Channel, Channels, ChannelTimeout, MessageTooLarge
from uma_trio.aici_link.messages import (
    Auth,
    BadMessage,
    Empty,
    Error,
    GetModules,
    GetTags,
    Instantiate,
    JsonError,
    MakeModule,
    MidAnswer,
    MidProcess,
    ModuleList,
    NotJson,
    Ok,
    Ping,
    Pong,
    PostPreAnswer,
    PostPreProcess,
    ReceivedRequest,
    Removed,
    RemoveModule,
    RemoveTags,
    SetTags,
    Stop,
    TagList,
    Tokens,
    VocabularySize,
    decode_request,
    encode,
    rid_of_answer,
)

log = logging.getLogger(__name__)

LISTEN_S: Final = 1.0
"""Longest wait for a message, after which expired controllers are closed."""

SIDE_THREADS: Final = 8
MAX_SIDE_REQUESTS: Final = 64
"""Side-channel requests in progress at a time, uploads not counted; more wait in the channel."""
MAX_UPLOADS: Final = 8
"""Uploads at a time; one more is refused.

They compile one by one, and one that waits too long for its turn is refused, too."""


class UserError(Exception):
    """An error that the controller's author or user can fix."""


class Server:
    """Answers the requests of one daemon.

    Args:
        on_stop: ends the process; called in any thread when the daemon asks for it.
        expire_s: see ``WaitingControllers``.
        skip_slow_s: see ``Sequences``.
    """

    def __init__(
        self,
        channels: Channels,
        host: WasmHost,
        vocabulary: Vocabulary,
        limits: Limits,
        modules: ModuleStore,
        on_stop: Callable[[], NoReturn],
        expire_s: float,
        skip_slow_s: float | None = None,
    ) -> None:
        self._channels = channels
        self._host = host
        self._vocabulary = vocabulary
        self._limits = limits
        self._modules = modules
        self._on_stop = on_stop
        self._waiting = WaitingControllers(expire_s)
        self._sequences = Sequences(vocabulary.n_vocab, limits, self._waiting, channels.biases, skip_slow_s)
        self._side_sends = threading.Lock()
        self._side_room = threading.BoundedSemaphore(MAX_SIDE_REQUESTS)
        self._upload_room = threading.BoundedSemaphore(MAX_UPLOADS)

    def run(self) -> NoReturn:
        """Answer until the daemon says stop."""
        threading.Thread(target=self._run_side, name="side channel", daemon=True).start()
        channel = self._channels.main
        while True:
            data = self._receive(channel)
            if data is not None:
                try:
                    answer = self._answer(decode_request(data), self._answer_main_request)
                except BadMessage as error:
                    answer = _refusal(error)
                self._send(channel, answer)
            self._waiting.expire()

    def _run_side(self) -> NoReturn:
        with (
            ThreadPoolExecutor(SIDE_THREADS, "side request") as threads,
            ThreadPoolExecutor(MAX_UPLOADS, "upload") as upload_threads,
        ):
            while True:
                data = self._receive(self._channels.side)
                if data is None:
                    continue
                try:
                    received = decode_request(data)
                except BadMessage as error:
                    self._send_side(_refusal(error))
                    continue
                if not isinstance(received.request, MakeModule):
                    self._side_room.acquire()
                    threads.submit(self._serve_side, received, self._side_room)
                elif self._upload_room.acquire(blocking=False):
                    upload_threads.submit(self._serve_side, received, self._upload_room)
                else:
                    why = f"{MAX_UPLOADS} modules are being uploaded already; try again later"
                    self._send_side(encode(Error(why, rid=received.rid)))

    def _serve_side(self, received: ReceivedRequest, room: threading.BoundedSemaphore) -> None:
        try:
            self._send_side(self._answer(received, self._answer_side_request))
        except Exception:
            log.exception("side channel")
        finally:
            room.release()

    def _send_side(self, answer: bytes) -> None:
        with self._side_sends:
            self._send(self._channels.side, answer)

    def _receive(self, channel: Channel) -> bytes | None:
        """The next message; ``None`` if there is none for a while."""
        try:
            return channel.incoming.receive(LISTEN_S)
        except ChannelTimeout:
            return None
        except BrokenChannel as error:
            log.error("the daemon wrote %s", error)
            return b""  # decodes as invalid JSON, and is answered so

    def _send(self, channel: Channel, answer: bytes) -> None:
        """Write an answer as soon as the daemon has taken the one before."""
        while True:
            try:
                channel.outgoing.send(answer, LISTEN_S)
            except ChannelTimeout:  # the daemon may be busy; if it ends, this process does so, too
                continue
            except (MessageTooLarge, OSError) as error:
                log.error("cannot answer: %s", error)
                rid = rid_of_answer(answer)
                text = f"cannot answer: {error}; a larger --json-size may help"
                answer = encode(Error(text, rid=msgspec.UNSET if rid is None else rid))
                continue
            return

    def _answer(self, received: ReceivedRequest, do: Callable[[ReceivedRequest], Any]) -> bytes:
        try:
            return self._encoded(Ok(do(received), received.rid))
        except (UserError, BadModule, StoreError) as error:
            return encode(Error(str(error), is_user_error=True, rid=received.rid))
        except OSError as error:
            return encode(Error(error.strerror or str(error), rid=received.rid))
        except (CannotCompile, BadRequest) as error:
            return encode(Error(str(error), rid=received.rid))
        except Exception as error:  # a bug must not end the runtime
            log.exception("%s", type(received.request).__name__)
            return encode(Error(f"internal error: {error!r}", rid=received.rid))

    def _encoded(self, answer: Ok[Any]) -> bytes:
        """The answer as JSON.  If it does not fit into a message, the longest controllers' outputs are cut."""
        data = encode(answer)
        room = self._channels.main.outgoing.capacity
        if len(data) <= room or not isinstance(answer.data, PostPreAnswer | MidAnswer):
            return data
        fitting, gone = shorten_to_fit(answer.data, room - FRAME_BYTES)
        self._sequences.drop(gone)
        return encode(Ok(fitting, answer.rid))

    def _answer_main_request(self, received: ReceivedRequest) -> Any:
        match received.request:
            case Ping():
                return Pong()
            case Tokens():
                return VocabularySize(self._vocabulary.n_vocab)
            case PostPreProcess() as request:
                return self._sequences.post_pre(request)
            case MidProcess() as request:
                return self._sequences.mid(request)
            case Stop():
                self._on_stop()
        raise BadRequest("bad op")

    def _answer_side_request(self, received: ReceivedRequest) -> Any:
        auth = received.auth
        match received.request:
            case Ping():
                return Pong()
            case MakeModule(binary):
                return self._modules.add(binary, auth)
            case SetTags(module_id, tags):
                return TagList(self._modules.set_tags(module_id, tags, auth))
            case GetTags():
                return TagList(self._modules.tags(auth))
            case GetModules(owner):
                return ModuleList(self._modules.modules(auth, owner))
            case RemoveModule(module_id, owner):
                return Removed(self._modules.remove_module(module_id, auth, owner))
            case RemoveTags(tags, owner):
                return Removed(self._modules.remove_tags(tags, auth, owner))
            case Instantiate() as request:
                self._instantiate(request, auth)
                return Empty()
            case Stop():
                self._on_stop()
        raise BadRequest("bad op")

    def _instantiate(self, request: Instantiate, auth: Auth) -> None:
        prompt = request.prompt
        tokens = self._vocabulary.tokenize_prompt(prompt) if isinstance(prompt, str) else prompt
        if any(token >= self._vocabulary.n_vocab for token in tokens):
            raise BadRequest(f"a token of the prompt is not in [0, {self._vocabulary.n_vocab})")
        self._waiting.check_room()
        module = self._modules.open(request.module_id, auth)
        deadline = time.monotonic() + self._limits.max_init_ms / 1000
        controller = self._host.instantiate(module, request.argument, Variables())
        try:
            controller.start(tokens, deadline=deadline)
        except ControllerTimeout as error:
            logs = controller.take_logs()
            raise UserError(f"timeout: {error}" + (f"; it has printed:\n{logs}" if logs else "")) from None
        except ControllerError as error:
            raise UserError(controller_error("init", str(error), controller.take_logs())) from None
        except BaseException:
            controller.close()
            raise
        self._waiting.put(request.req_id, controller)


def _refusal(error: BadMessage) -> bytes:
    """The answer to a message that is not a request."""
    return encode(JsonError(str(error)) if isinstance(error, NotJson) else Error(str(error), rid=error.rid))
