"""One client: reads its messages, runs its request, ends with it."""

from __future__ import annotations

import select
import socket
from typing import Any, Final, Protocol

import structlog
import trio

from uma_trio.config import Limits
from uma_trio.daemon.outbox import Outbox
from uma_trio.daemon.peers import OWN_PRINCIPAL, principal_of
from uma_trio.errors import (
    BadRequest,
    Busy,
    IdleTimeout,
    InternalError,
    TruncatedFrame,
    UmaError,
    WriteFailed,
)
from uma_trio.principal import Principal
from uma_trio.protocol.codec import Codec
from uma_trio.protocol.messages import (
    Cancel,
    ClientMessage,
    Failure,
    Generate,
    Metrics,
    MetricsQuery,
    SessionQuery,
)
from uma_trio.service import Generation, ModelRegistry

log = structlog.get_logger("uma_trio.daemon")

READ_BYTES: Final = 64 * 1024
MOST_UNREAD_BYTES: Final = 256 * 1024
"""Of answers to queries and refusals, beyond what a stream may have waiting."""
HANGUP_POLL_S: Final = 0.05
"""How often a client that has shut down its sending side is asked whether it still listens."""


class ConnectionOwner(Protocol):
    """What a connection needs of the server."""

    @property
    def models(self) -> ModelRegistry: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def draining(self) -> bool: ...
    def snapshot(self) -> dict[str, Any]: ...
    def record_refusal(self, error: UmaError) -> None: ...


class Connection:
    """Serves one client on ``sock`` until it leaves, breaks the protocol, or falls silent for too long.

    One request at a time; each runs in its own cancel scope, and cancelling that scope is what the
    cancel event, a closed socket, a timeout and shutdown have in common.
    """

    def __init__(self, sock: socket.socket, codec: Codec, owner: ConnectionOwner, *, name: str) -> None:
        self._sock = sock
        self._codec = codec
        self._owner = owner
        self._limits = owner.limits
        self._principal = principal_of(sock)
        self._log = log.bind(connection=name)
        self._outbox = Outbox(
            sock,
            codec.encode,
            max_bytes=self._limits.max_tx_bytes,
            write_timeout_s=self._limits.write_timeout_s,
            on_room=self._wake,
        )
        self._generation: Generation | None = None
        self._request_ended = trio.Event()
        self._reading = trio.CancelScope()
        self._leaving = False

    def _wake(self) -> None:
        if self._generation is not None:
            self._generation.service.wake()

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return self._generation is not None

    @property
    def waiting_bytes(self) -> int:
        return self._outbox.waiting_bytes

    async def serve(self) -> None:
        """Until the end of the connection.  Raises nothing but cancellation; the socket stays open."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._outbox.run)
                try:
                    await self._converse(nursery)
                except UmaError as error:
                    await self._cancel_request()
                    self._refuse(error)
                await self._cancel_request()
                nursery.cancel_scope.deadline = trio.current_time() + self._limits.write_timeout_s
                await self._outbox.flush()
                nursery.cancel_scope.cancel()
        except* WriteFailed as group:
            failure = group.exceptions[0]
            assert isinstance(failure, WriteFailed)
            self._owner.record_refusal(failure)
            self._log.warning("gave up on a client", reason=str(failure))

    def leave(self) -> None:
        """End the connection as soon as no request is running."""
        self._leaving = True
        if not self.busy:
            self._reading.cancel()

    # -- reading --------------------------------------------------------------------------------

    async def _converse(self, nursery: trio.Nursery) -> None:
        while not (self._leaving and not self.busy):
            data = await self._receive()
            if data is None:
                continue
            self._codec.receive_data(data)
            while (message := self._codec.next_message()) is not None:
                self._frame_deadline = None  # what is begun after it is another frame
                await self._answered()
                await self._act(message, nursery)
                if self.waiting_bytes > self._limits.max_tx_bytes + MOST_UNREAD_BYTES:
                    raise WriteFailed("the client asks faster than it reads")
            if not data:
                await self._outlive_half_close()
                return

    async def _receive(self) -> bytes | None:
        """Some bytes, ``b""`` at the end of the stream, ``None`` when woken to look again."""
        with trio.CancelScope() as self._reading:
            self._set_deadline()
            if self._leaving and not self.busy:
                return None
            while True:
                await trio.lowlevel.wait_readable(self._sock)
                try:
                    return self._sock.recv(READ_BYTES)
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
        """How long to wait for the next bytes, now that something has changed."""
        now = trio.current_time()
        if self._codec.mid_message:
            if self._frame_deadline is None:
                self._frame_deadline = now + self._limits.frame_timeout_s
            self._reading.deadline = self._frame_deadline
        else:
            self._frame_deadline = None
            self._reading.deadline = float("inf") if self.busy else now + self._limits.idle_timeout_s

    _frame_deadline: float | None = None

    async def _act(self, message: ClientMessage, nursery: trio.Nursery) -> None:
        match message:
            case Generate():
                if self.busy:
                    self._refuse(Busy("another request is running on this connection"), message)
                elif not self._leaving:
                    self._start(message, nursery)
            case Cancel():
                if self._generation is not None and self._generation.request.id == message.id:
                    self._generation.cancel()
            case MetricsQuery():
                self._outbox.send(Metrics(snapshot=self._owner.snapshot(), id=message.id))
                self._leave_after(message)
            case SessionQuery():
                try:
                    service = self._owner.models.get(None)
                    self._outbox.send(await service.answer_sessions(message, self._principal))
                except UmaError as error:
                    self._refuse(error, message)
                self._leave_after(message)

    def _start(self, request: Generate, nursery: trio.Nursery) -> None:
        """Serve ``request`` in a task of its own."""
        try:
            service = self._owner.models.get(request.model)
            principal = self._acting_for(request)
        except UmaError as error:
            self._refuse(error, request)
            self._leaving = self._leaving or not request.keep_alive
            return
        self._generation = service.generation(request, principal, self._outbox)
        self._request_ended = trio.Event()
        nursery.start_soon(self._run, self._generation)

    def _acting_for(self, request: Generate) -> Principal:
        """For whom the request is: a peer with the daemon's own user id may act for others.

        Raises:
            BadRequest: another peer names a principal.
        """
        if request.principal is None:
            return self._principal
        if self._principal.name != OWN_PRINCIPAL:
            raise BadRequest("only the user who runs the daemon may set principal")
        return Principal(request.principal)

    def _leave_after(self, query: MetricsQuery | SessionQuery) -> None:
        if not query.keep_alive and not self.busy:
            self._leaving = True

    async def _answered(self) -> None:
        """Where the request's last event is sent but its task has not yet taken note: wait until it has.

        The client may have sent its next request the moment that it saw that event.  A checkpoint in any
        case: one read can hold thousands of messages.
        """
        await trio.lowlevel.checkpoint()
        if self._generation is not None and self._generation.is_answered:
            await self._request_ended.wait()

    async def _outlive_half_close(self) -> None:
        """The client sends no more.  It may still read (``nc -U``): its request goes on until it hangs up."""
        hangup = select.poll()
        hangup.register(self._sock, 0)  # errors and hangups are always reported
        while self.busy and not hangup.poll(0):
            with trio.move_on_after(HANGUP_POLL_S):
                await self._request_ended.wait()

    async def _cancel_request(self) -> None:
        if self._generation is not None:
            self._generation.cancel()
            await self._request_ended.wait()

    # -- the request ----------------------------------------------------------------------------

    async def _run(self, generation: Generation) -> None:
        request = generation.request
        try:
            await generation.run()
        except UmaError as error:
            self._refuse(error, request)
        except Exception:  # noqa: BLE001 - a defect of ours ends this request and nothing else
            self._log.exception("a request failed", request=request.id)
            self._refuse(InternalError("internal error; the server's log has the details"), request)
        finally:
            self._generation = None
            self._request_ended.set()
            if not request.keep_alive or self._owner.draining:
                self._leaving = True
            if self._leaving:
                self._reading.cancel()
            else:
                self._set_deadline()

    def _refuse(self, error: UmaError, request: Generate | SessionQuery | None = None) -> None:
        if request is not None:
            error.request_id = request.id
        self._owner.record_refusal(error)
        self._log.info("refused", code=error.code, reason=str(error), request=error.request_id)
        self._outbox.send(Failure.of(error, metadata=getattr(request, "metadata", None)))
