"""One client: reads its messages, runs its request, ends with it."""

from __future__ import annotations

import select
import socket
from typing import Any, Final, Literal, Protocol

import structlog
import trio

from uma_trio.config import Limits
from uma_trio.daemon.outbox import Outbox
from uma_trio.daemon.peers import user_of
from uma_trio.errors import (
    Busy,
    IdleTimeout,
    InternalError,
    RequestTimeout,
    ShuttingDown,
    TruncatedFrame,
    UmaError,
    WriteFailed,
)
from uma_trio.models.prompt import Prompt, PromptMaker
from uma_trio.protocol.codec import Codec
from uma_trio.protocol.messages import (
    Cancel,
    ClientMessage,
    Eos,
    Failure,
    Generate,
    Metrics,
    MetricsQuery,
    SessionQuery,
    Timings,
    Usage,
)
from uma_trio.runner import Job, Runner, Sink
from uma_trio.sessions import Sessions, Turn

log = structlog.get_logger("uma_trio.daemon")

READ_BYTES: Final = 64 * 1024
MOST_UNREAD_BYTES: Final = 256 * 1024
"""Of answers to queries and refusals, beyond what a stream may have waiting."""
HANGUP_POLL_S: Final = 0.05
"""How often a client that has shut down its sending side is asked whether it still listens."""


class House(Protocol):
    """What a connection needs of the server."""

    @property
    def runner(self) -> Runner: ...
    @property
    def prompts(self) -> PromptMaker: ...
    @property
    def sessions(self) -> Sessions: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def draining(self) -> bool: ...
    def snapshot(self) -> dict[str, Any]: ...


class Connection:
    """Serves one client on ``sock`` until it leaves, breaks the protocol, or falls silent for too long.

    One request at a time; each runs in its own cancel scope, and cancelling that scope is what the
    cancel event, a closed socket, a timeout and shutdown have in common.
    """

    def __init__(self, sock: socket.socket, codec: Codec, house: House, *, name: str) -> None:
        self._sock = sock
        self._codec = codec
        self._house = house
        self._limits = house.limits
        self._tenant = user_of(sock)
        self._log = log.bind(connection=name)
        self._outbox = Outbox(
            sock,
            codec.encode,
            max_bytes=self._limits.max_tx_bytes,
            write_timeout_s=self._limits.write_timeout_s,
            on_room=house.runner.wake,
        )
        self._request: Generate | None = None
        self._jobs: list[Job] = []
        """Its answers."""
        self._request_scope = trio.CancelScope()
        self._request_ended = trio.Event()
        self._reading = trio.CancelScope()
        self._leaving = False

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return self._request is not None

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
            self._house.runner.telemetry.rejected[WriteFailed.code] += 1
            self._log.warning("gave up on a client", reason=str(group.exceptions[0]))

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
                    self._request, self._request_scope = message, trio.CancelScope()
                    self._request_ended = trio.Event()
                    nursery.start_soon(self._run, message, self._request_scope)
            case Cancel():
                if self._request is not None and self._request.id == message.id:
                    self._request_scope.cancel()
            case MetricsQuery():
                self._outbox.send(Metrics(snapshot=self._house.snapshot(), id=message.id))
                self._leave_after(message)
            case SessionQuery():
                try:
                    self._outbox.send(await self._house.sessions.answer(message, self._tenant))
                except UmaError as error:
                    self._refuse(error, message)
                self._leave_after(message)

    def _leave_after(self, query: MetricsQuery | SessionQuery) -> None:
        if not query.keep_alive and not self.busy:
            self._leaving = True

    async def _answered(self) -> None:
        """Where the request's last event is sent but its task has not yet taken note: wait until it has.

        The client may have sent its next request the moment that it saw that event.  A checkpoint in any
        case: one read can hold thousands of messages.
        """
        await trio.lowlevel.checkpoint()
        if self._jobs and all(job.done.is_set() for job in self._jobs):
            await self._request_ended.wait()

    async def _outlive_half_close(self) -> None:
        """The client sends no more.  It may still read (``nc -U``): its request goes on until it hangs up."""
        hangup = select.poll()
        hangup.register(self._sock, 0)  # errors and hangups are always reported
        while self.busy and not hangup.poll(0):
            with trio.move_on_after(HANGUP_POLL_S):
                await self._request_ended.wait()

    async def _cancel_request(self) -> None:
        if self.busy:
            self._request_scope.cancel()
            await self._request_ended.wait()

    # -- the request ----------------------------------------------------------------------------

    async def _run(self, request: Generate, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._generate(request)
        finally:
            self._request, self._jobs = None, []
            self._request_ended.set()
            if not request.keep_alive or self._house.draining:
                self._leaving = True
            if self._leaving:
                self._reading.cancel()
            else:
                self._set_deadline()

    async def _generate(self, request: Generate) -> None:
        began = trio.current_time()
        try:
            if self._house.draining:
                raise ShuttingDown("the server is shutting down")
            deadline = began + self._limits.request_timeout_s
            if request.session_id is None:
                prompt = await self._prepare(request, began)
                await self._stream(request, prompt, self._outbox, deadline)
            else:
                await self._take_turn(request, began, deadline)
        except UmaError as error:
            self._refuse(error, request)
        except Exception:  # noqa: BLE001 - a defect of ours ends this request and nothing else
            self._log.exception("a request failed", request=request.id)
            self._refuse(InternalError("internal error; the server's log has the details"), request)

    async def _prepare(self, request: Generate, began: float) -> Prompt:
        try:
            return await self._house.prompts.make(request)
        except trio.Cancelled:
            for index in range(request.n) if request.n > 1 else (None,):
                self._outbox.send(_nothing_done(request, index, began))
            raise

    async def _take_turn(self, request: Generate, began: float, deadline: float) -> None:
        """A request of a session: its last event follows when what was said is on disk."""
        sessions = self._house.sessions
        try:
            turn = await sessions.begin(request, self._tenant, self._outbox)
        except trio.Cancelled:
            self._outbox.send(_nothing_done(request, None, began))
            raise
        try:
            await self._stream(request, turn.prompt, turn, deadline)
        finally:
            await self._end_turn(turn)

    async def _end_turn(self, turn: Turn) -> None:
        jobs, self._jobs = self._jobs, []  # it is done, but not yet answered
        with trio.CancelScope(shield=True):
            last = await self._house.sessions.end(turn, jobs[0] if jobs else None)
        if last is not None:
            self._outbox.send(last)

    async def _stream(self, request: Generate, prompt: Prompt, sink: Sink, deadline: float) -> None:
        durable = request.session_id is not None
        self._jobs = jobs = self._house.runner.submit_all(request, prompt, sink, tenant=self._tenant, durable=durable)
        self._log.debug("request", request=request.id, prompt_tokens=len(prompt.tokens))
        ending: UmaError | Literal["cancelled"] = "cancelled"
        try:
            with trio.move_on_at(deadline) as timer:
                for job in jobs:
                    await job.done.wait()
            if timer.cancelled_caught:
                ending = RequestTimeout(f"not done after {self._limits.request_timeout_s:g} s")
        finally:
            if self._house.draining and not self._request_scope.cancel_called:
                ending = ShuttingDown("the server is shutting down")
            for job in jobs:
                self._house.runner.cancel(job, ending)  # nothing to one that has ended

    def _refuse(self, error: UmaError, request: Generate | SessionQuery | None = None) -> None:
        if request is not None:
            error.request_id = request.id
        self._house.runner.telemetry.rejected[error.code] += 1
        self._log.info("refused", code=error.code, reason=str(error), request=error.request_id)
        self._outbox.send(Failure.of(error, metadata=getattr(request, "metadata", None)))


def _nothing_done(request: Generate, index: int | None, began: float) -> Eos:
    waited_ms = round(1e3 * (trio.current_time() - began), 3)
    return Eos(
        id=request.id,
        index=index,
        reason="cancelled",
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        timings=Timings(queue_ms=waited_ms, ttft_ms=None, total_ms=waited_ms, tokens_per_s=None),
        metadata=request.metadata,
    )
