"""One client connection: read messages, run one request at a time, send events."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable
from typing import Any, Final, Protocol

import attrs
import structlog
import trio

from uma_trio.config import Limits
from uma_trio.daemon.detached.answers import DetachedAnswers
from uma_trio.daemon.doors.attachment import Attachment
from uma_trio.daemon.doors.frame_room import FrameRoom, HeldFrames
from uma_trio.daemon.doors.outbox import Outbox
from uma_trio.daemon.doors.passed_files import PassedFiles
from uma_trio.daemon.doors.uploads import Upload, Uploads
from uma_trio.daemon.doors.watch import Watch
from uma_trio.daemon.registry import ModelRegistry
from uma_trio.daemon.requests import KINDS, ModelRequest
from uma_trio.daemon.service import ModelService
from uma_trio.errors import (
    BadRequest,
    Busy,
    IdleTimeout,
    InternalError,
    ShuttingDown,
    TruncatedFrame,
    UmaError,
    WriteFailed,
)
from uma_trio.principal import Principal
from uma_trio.processes.large_work import LARGE_BYTES, LargeWork
from uma_trio.protocol.answers import AnswerList, Health, Metrics, ModelList
from uma_trio.protocol.codec import Codec
from uma_trio.protocol.controllers import Controllers, ControllersQuery
from uma_trio.protocol.events import Failure
from uma_trio.protocol.lease import LeaseQuery, OfferQuery, SessionOffer
from uma_trio.protocol.messages import ClientMessage, Query, Request, ServerEvent
from uma_trio.protocol.peer import OWN_PRINCIPAL, principal_of
from uma_trio.protocol.queries import (
    AnswersQuery,
    AttachQuery,
    ExplainQuery,
    HealthQuery,
    MetricsQuery,
    ModelsQuery,
    SessionQuery,
    SteerQuery,
    TokenizeQuery,
    WatchQuery,
)
from uma_trio.protocol.requests import Cancel, Generate, PoolingRequest

log = structlog.get_logger("uma_trio.daemon")

READ_BYTES: Final = 64 * 1024
MAX_UNREAD_BYTES: Final = 256 * 1024
"""Answers to queries and errors that may wait for the client, in addition to ``max_tx_bytes``.

With more, the connection reads no further messages until the client has read some."""
HANGUP_POLL_S: Final = 0.05
"""Interval between checks whether a client that has shut down its sending side still reads."""


class ConnectionOwner(Protocol):
    """The part of the daemon that a connection uses."""

    @property
    def models(self) -> ModelRegistry: ...
    @property
    def detached(self) -> DetachedAnswers: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def draining(self) -> bool: ...
    @property
    def large_work(self) -> LargeWork: ...
    @property
    def uploads(self) -> Uploads: ...
    @property
    def frame_room(self) -> FrameRoom: ...
    def snapshot(self, model: str | None = None) -> dict[str, Any]: ...
    def health(self, id: str | None) -> Health: ...
    def offer(self, query: OfferQuery) -> SessionOffer: ...
    def record_refusal(self, error: UmaError) -> None: ...


class Connection:
    """Serves one client until it leaves, violates the protocol, or sends nothing for ``idle_timeout_s``.

    Requests run one at a time, each in its own cancel scope.  A cancel event, a closed socket, a timeout and a shutdown
    all cancel that scope.

    Args:
        sock: connected and non-blocking.  The caller closes it.
        codec: encodes and decodes messages; holds the state of this connection.
        name: identifies the connection in the log.
    """

    def __init__(self, sock: socket.socket, codec: Codec, owner: ConnectionOwner, *, name: str) -> None:
        self._sock = sock
        self._codec = codec
        self._owner = owner
        self._limits = owner.limits
        self._principal = principal_of(sock)
        self.peer = self._principal.name
        """The Unix user at the other end."""
        self._passed = PassedFiles(sock, codec.files, taken=self.peer == OWN_PRINCIPAL)
        self._log = log.bind(connection=name)
        self._outbox = Outbox(
            sock,
            codec.encode,
            max_bytes=self._limits.max_tx_bytes,
            write_timeout_s=self._limits.write_timeout_s,
            on_room=self._wake,
        )
        self._hangup = select.poll()
        self._hangup.register(sock, 0)  # poll always reports errors and hangups
        self._upload = Upload(owner.uploads)
        self._held = HeldFrames(owner.frame_room, self.peer)
        self._running: ModelRequest | Watch | Attachment | None = None
        self._request_ended = trio.Event()
        self._reading = trio.CancelScope()
        self._leaving = False
        self._claimed_at: set[ModelService] = set()
        """Where sessions were perhaps claimed."""

    def _wake(self) -> None:
        if isinstance(self._running, ModelRequest):
            self._running.wake()

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return self._running is not None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the client has not read and the kernel does not buffer."""
        return self._outbox.waiting_bytes

    async def serve(self) -> None:
        """Serve until the connection ends.  Raises only ``trio.Cancelled``; leaves the socket open."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._outbox.run)
                try:
                    await self._read_messages(nursery)
                except UmaError as error:
                    await self._cancel_request()
                    self._refuse(error)
                await self._cancel_request()
                nursery.cancel_scope.deadline = trio.current_time() + self._limits.write_timeout_s
                await self._outbox.shrink_to(0)
                nursery.cancel_scope.cancel()
        except* WriteFailed as group:
            failure = group.exceptions[0]
            assert isinstance(failure, WriteFailed)
            self._owner.record_refusal(failure)
            self._log.warning("closed the connection of a client that does not read", reason=str(failure))
        finally:
            self._upload.drop()
            for service in self._claimed_at:
                service.sessions.hand_over.release(self)
            self._held.close()
            self._passed.close()

    def leave(self) -> None:
        """End the connection as soon as no request is running, because the daemon stops.

        A client without a request gets the reason: its next one may be on its way.
        """
        self._leaving = True
        if isinstance(self._running, Watch):  # it has no end of its own
            self._running.cancel()
        if not self.busy:
            self._outbox.send(Failure.of(ShuttingDown()))
            self._reading.cancel()

    # -- reading --------------------------------------------------------------------------------

    async def _read_messages(self, nursery: trio.Nursery) -> None:
        while not (self._leaving and not self.busy):
            data = await self._receive()
            if data is None:
                continue
            if self._passed.arrived:
                await self._owner.large_work.run(self._passed.reading(self._held.arrive))
            self._codec.receive_data(data)
            self._take_room()
            while (message := await self._next_message()) is not None:
                self._frame_deadline = None  # the next bytes belong to another frame
                if not self._codec.mid_message:  # otherwise they may be the next message's
                    self._passed.check_all_taken(message)
                await self._wait_if_answered()
                if self._codec.queues_requests:
                    await self._wait_for_hangup()
                if self._client_has_gone:
                    return
                running = self._running
                await self._handle(message, nursery)
                self._held.handled(runs=self._running is not None and self._running is not running)
                self._take_room()
                await self._wait_for_reader()
            if not data:
                await self._wait_for_hangup()
                return

    def _take_room(self) -> None:
        """Take room for the frame that arrives and its files.  The codec refuses one that is larger than any may be.

        Raises:
            QueueFull: there is none.
        """
        if self._codec.arriving_bytes <= self._limits.max_frame_bytes:
            self._held.arrive(self._codec.arriving_bytes + self._passed.n_bytes)

    async def _next_message(self) -> ClientMessage | None:
        """Decode the next message; a large one in pieces."""
        if self._codec.next_bytes < LARGE_BYTES:
            return self._codec.next_message()
        return await self._owner.large_work.run(self._codec.decoding())

    async def _receive(self) -> bytes | None:
        """Receive bytes: ``b""`` at the end of the stream, ``None`` if the deadline or the state has changed."""
        with trio.CancelScope() as self._reading:
            self._set_deadline()
            if self._leaving and not self.busy:
                return None
            while True:
                await trio.lowlevel.wait_readable(self._sock)
                try:
                    return self._passed.receive(READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:  # reset by the peer
                    return b""
        if self._leaving or self._reading.deadline > trio.current_time():
            return None
        if self._codec.mid_message:
            raise TruncatedFrame(f"a frame was not complete after {self._limits.frame_timeout_s:g} s")
        raise IdleTimeout(f"nothing was sent for {self._limits.idle_timeout_s:g} s")

    def _set_deadline(self) -> None:
        """Set how long to wait for the next bytes: for the rest of a frame, or for the next message."""
        now = trio.current_time()
        if self._codec.mid_message:
            if self._frame_deadline is None:
                self._frame_deadline = now + self._limits.frame_timeout_s
            self._reading.deadline = self._frame_deadline
        else:
            self._frame_deadline = None
            self._reading.deadline = float("inf") if self.busy else now + self._limits.idle_timeout_s

    _frame_deadline: float | None = None

    async def _handle(self, message: ClientMessage, nursery: trio.Nursery) -> None:
        match message:
            case Generate(detached=False) | PoolingRequest() | WatchQuery() | AttachQuery():
                if self.busy:
                    self._refuse(Busy("another request is running on this connection"), message)
                elif not self._leaving or (self._codec.queues_requests and not self._owner.draining):
                    self._start(message, nursery)
            case Cancel():
                if self._running is not None and self._running.request.id == message.id:
                    self._running.cancel()
            case SteerQuery() if self.busy:  # the answer may wait long, and a cancel must get through
                nursery.start_soon(self._try_answer, message)
            case _:
                await self._try_answer(message)
                if not message.keep_alive and not self.busy:
                    self._leaving = True

    async def _try_answer(self, message: Query | Generate) -> None:
        """Answer ``message``, or refuse it."""
        try:
            await self._answer(message)
        except UmaError as error:
            self._refuse(error, message)

    async def _answer(self, query: Query | Generate) -> None:
        """Send the events that answer ``query``, or say that a detached request was accepted.

        Raises:
            UmaError: it cannot be answered.
        """
        principal, models = self._acting_for(query), self._owner.models
        match query:
            case MetricsQuery():
                events: Iterable[ServerEvent] = (
                    Metrics(snapshot=self._owner.snapshot(), id=query.id)
                    for _ in range(1)  # when it is sent
                )
            case ModelsQuery():
                events = [await self._answer_models(query, principal)]
            case HealthQuery():
                events = [self._owner.health(query.id)]
            case SessionQuery():
                async with models.use(query.model, principal.name, session=True) as service:
                    await self._send_each(await service.sessions.answer_query(query, principal.name))
                return
            case LeaseQuery() | OfferQuery() if self._principal.name != OWN_PRINCIPAL:
                raise BadRequest("only the user who runs the daemon may move sessions")
            case OfferQuery():
                events = [self._owner.offer(query)]
            case LeaseQuery():
                async with models.use(query.model, principal.name, session=True) as service:
                    self._claimed_at.add(service)
                    events = [await service.sessions.hand_over.answer(query, principal.name, self)]
            case AnswersQuery():
                events = await self._owner.detached.answer_query(query, principal.name)
            case SteerQuery():
                service, answer = models.answer_of(query.request_id, principal.name)
                events = [await service.steer(answer, query)]
            case ExplainQuery():
                async with models.use(query.model, principal.name) as service:
                    events = [attrs.evolve(service.scheduler.explain(query.request_id, principal.name), id=query.id)]
            case Generate():
                events = [AnswerList(answers=[await self._owner.detached.begin(query, principal)], id=query.id)]
            case TokenizeQuery():
                async with models.use(query.model, principal.name) as service:
                    events = (await service.prompts.tokenize(query, principal=principal.name)).divided()
            case ControllersQuery():
                wasm = None
                if query.action == "upload" and (wasm := self._upload.add(query)) is None:
                    events = [Controllers(id=query.id, received_bytes=self._upload.received_bytes)]
                else:
                    async with models.use(query.model, principal.name) as service:
                        is_admin = self._is_admin(query)
                        events = await service.answer_controllers(query, wasm, principal, is_admin=is_admin)
        await self._send_each(events)

    async def _answer_models(self, query: ModelsQuery, principal: Principal) -> ModelList:
        """List models or one of them, or load, unload, release or reload one.

        Raises:
            UmaError: it cannot be done.
        """
        models = self._owner.models
        if query.action == "list" or query.model is None:
            if query.model is None:
                descriptions = await models.descriptions(principal.name)
            else:
                descriptions = [await models.describe(query.model, principal.name)]
            is_own = self._principal.name == OWN_PRINCIPAL
            return ModelList(
                models=descriptions
                if is_own
                else [attrs.evolve(description, path=None) for description in descriptions],
                id=query.id,
            )
        if self._principal.name != OWN_PRINCIPAL or (query.principal is not None and query.action != "release"):
            raise BadRequest("only the user who runs the daemon may load, unload, release and reload models")
        if query.action == "release":
            return ModelList(models=[await models.release(query.model, principal.name)], id=query.id)
        actions = {"load": models.load, "unload": models.unload, "reload": models.reload}
        return ModelList(models=[await actions[query.action](query.model)], id=query.id)

    async def _send_each(self, events: Iterable[ServerEvent]) -> None:
        """Send the answer to a query.  Each event is made when the client has read enough of those before.

        Making one takes milliseconds.
        """
        left = iter(events)
        while not self._client_has_gone:
            await self._wait_for_reader()
            async with self._owner.large_work.part():
                event = next(left, None)
                if event is None:
                    return
                self._outbox.send(event)

    def _start(self, request: Request, nursery: trio.Nursery) -> None:
        """Serve ``request`` in a task of its own."""
        try:
            principal, models = self._acting_for(request), self._owner.models
            match request:
                case WatchQuery():
                    models.loaded(request.model)  # there must be such a model
                    self._check_may_watch()
                    self._running = Watch(request, self._owner, self._outbox)
                case AttachQuery():
                    most = self._limits.max_tx_bytes
                    answers = self._owner.detached
                    self._running = Attachment(request, answers, principal, self._outbox, max_waiting_bytes=most)
                case _:
                    self._running = KINDS[type(request)](models, request, principal, self._outbox)
        except UmaError as error:
            self._refuse(error, request)
            self._leaving = self._leaving or not request.keep_alive
            return
        self._request_ended = trio.Event()
        nursery.start_soon(self._run, self._running)

    def _is_admin(self, query: ControllersQuery) -> bool:
        """Whether an administrator asks: the user who runs the daemon, unless it acts for somebody else."""
        is_own = self._principal.name == OWN_PRINCIPAL
        if query.principal_is_admin and not is_own:
            raise BadRequest("only the user who runs the daemon may set principal_is_admin", field="principal_is_admin")
        return query.principal_is_admin or (is_own and query.principal is None)

    def _check_may_watch(self) -> None:
        if self._principal.name != OWN_PRINCIPAL:
            raise BadRequest("only the user who runs the daemon may watch it: it shows the requests of all others")

    def _acting_for(self, message: Request | Query) -> Principal:
        """The principal that a request or a query is made for.  A peer with the daemon's own user id may name another
        one, with its weight and its limit.

        Raises:
            BadRequest: a peer with another user id does so.
        """
        own = self._principal
        name = own.name if message.principal is None else message.principal
        acting_for = Principal(name)
        if isinstance(message, Generate | PoolingRequest):
            acting_for = Principal(name, message.principal_weight, message.principal_max_requests)
        if acting_for != own and own.name != OWN_PRINCIPAL:
            raise BadRequest(
                "only the user who runs the daemon may set principal, principal_weight and principal_max_requests",
                field="principal",
            )
        return acting_for

    async def _wait_if_answered(self) -> None:
        """Wait until the task of a request ends whose last event has been sent.

        A client may send its next request as soon as it sees that event.  Always executes a checkpoint, because one
        read can contain thousands of messages.
        """
        await trio.lowlevel.checkpoint()
        if self._running is not None and self._running.is_answered:
            await self._request_ended.wait()

    async def _wait_for_reader(self) -> None:
        """Wait while too many bytes wait for the client.  If it reads nothing, the outbox ends the connection."""
        await self._outbox.shrink_to(self._limits.max_tx_bytes + MAX_UNREAD_BYTES)

    async def _wait_for_hangup(self) -> None:
        """Wait until no request is running, or the client has gone.

        So a client can shut down its sending side and still read the answer, as ``nc -U`` does.
        """
        while self.busy and not self._client_has_gone:
            with trio.move_on_after(HANGUP_POLL_S):
                await self._request_ended.wait()

    @property
    def _client_has_gone(self) -> bool:
        """Whether the client has closed the connection: nobody will read an answer."""
        return bool(self._hangup.poll(0))

    async def _cancel_request(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await self._request_ended.wait()

    # -- the request ----------------------------------------------------------------------------

    async def _run(self, running: ModelRequest | Watch | Attachment) -> None:
        request = running.request
        try:
            await running.run()
        except UmaError as error:
            self._refuse(error, request)
        except Exception:  # noqa: BLE001 - a bug ends this request only
            self._log.exception("a request failed with a bug of the daemon", request=request.id)
            self._refuse(InternalError("internal error; the daemon's log has the details"), request)
        finally:
            self._running = None
            self._held.ended()
            self._request_ended.set()
            if not request.keep_alive or self._owner.draining:
                self._leaving = True
            if self._leaving:
                self._reading.cancel()
            else:
                self._set_deadline()

    def _refuse(self, error: UmaError, request: Request | PoolingRequest | Query | None = None) -> None:
        if request is not None:
            error.request_id = request.id
        self._owner.record_refusal(error)
        session, model = getattr(request, "session_id", None), getattr(request, "model", None)
        self._log.info("refused", id=error.request_id, session=session, model=model, code=error.code, reason=str(error))
        self._outbox.send(Failure.of(error, metadata=getattr(request, "metadata", None)))
