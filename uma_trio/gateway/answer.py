"""Answers over HTTP: streamed while they are generated, or whole; cancelled when the client leaves."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, Final, Generic, TypeVar

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from uma_trio.client import Eos, Event, Forecast
from uma_trio.gateway.errors import ETA, HttpError, client_left
from uma_trio.gateway.request_state import RequestState
from uma_trio.processes.large_work import LargeWork

T = TypeVar("T")
Item = TypeVar("Item")
Rendered = TypeVar("Rendered", contravariant=True)

EVENT_STREAM: Final = "text/event-stream"
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"

COMMENT: Final = b": keep-alive\n\n"
"""A server-sent event that clients ignore."""

NOT_BUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers for proxies, which would hold a stream back."""

NUMBERS_PER_PIECE: Final = 64 * 1024
"""Numbers of vectors that are encoded at once: about 4 ms."""

ESCAPED: Final = {separator.encode(): b"\\u%04x" % ord(separator) for separator in "\x85\u2028\u2029"}
"""JSON allows these in strings, and clients that read lines of text end a line there."""

encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


def json_text(data: Any) -> bytes:
    """``data`` as JSON that is one line for every client."""
    text = encode(data)
    if not text.isascii():
        for separator, escaped in ESCAPED.items():
            text = text.replace(separator, escaped)
    return text


def json_line(data: Any) -> bytes:
    """``json_text`` with the end of the line."""
    return json_text(data) + b"\n"


def sse(data: Any, event: str | None = None) -> bytes:
    """A server-sent event whose data is JSON."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + json_line(data) + b"\n"


PLACE: Final = "\0text\0"


class PreparedEvent:
    """A server-sent event of which one text changes.  What is around the text is encoded once.

    Args:
        data: has ``PLACE`` where the text belongs.
    """

    def __init__(self, data: Any, event: str | None = None) -> None:
        self._before, _, self._after = sse(data, event).rpartition(encode(PLACE))

    def of(self, text: str) -> bytes:
        """The event with ``text``."""
        return self._before + json_text(text) + self._after


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, warnings: Sequence[str] = ()
) -> Response:
    """A response whose body is ``content`` as JSON.

    Args:
        warnings: become a field of ``content``, a ``Warned``, if there are any.
    """
    if warnings:
        content = msgspec.structs.replace(content, warnings=warnings)
    return Response(encode(content), status, headers, JSON)


async def encode_items(
    large_work: LargeWork, items: Sequence[Item], form: Callable[[Item], object], *, per_piece: int
) -> list[msgspec.Raw]:
    """Encode a list's items as JSON for ``json_response``, which only copies what is encoded.

    Args:
        form: what each item becomes.
        per_piece: items that are encoded at once, in a few milliseconds.
    """
    encoded = []
    for start in range(0, len(items), per_piece):
        async with large_work.part() if len(items) > per_piece else nullcontext():
            encoded += [msgspec.Raw(encode(form(item))) for item in items[start : start + per_piece]]
    return encoded


async def encode_vectors(
    large_work: LargeWork, vectors: Sequence[Sequence[float]], form: Callable[[Sequence[float]], object] = list
) -> list[msgspec.Raw]:
    """Encode vectors as ``encode_items``: 2,048 of 1,024 numbers would keep the event loop for 0.1 s."""
    longest = max(map(len, vectors), default=1)
    return await encode_items(large_work, vectors, form, per_piece=max(1, NUMBERS_PER_PIECE // longest))


class Renderer(ABC, Generic[Rendered]):
    """Writes the events of one streamed answer in the form of a dialect.  Pure.

    What it renders are events, or lists of events that belong into one frame.
    """

    media_type = EVENT_STREAM
    keep_alive_frame = COMMENT
    """Sent while there is nothing else to send; empty if the dialect has nothing that clients ignore."""

    def begin(self) -> bytes:
        """What comes before the first event.  Called when something is written, so events may have been rendered."""
        return b""

    @abstractmethod
    def render(self, event: Rendered) -> bytes:
        """What the client gets for one event; may be empty."""

    @abstractmethod
    def fail(self, error: HttpError) -> bytes:
        """An error after the stream has begun.  Nothing follows it."""

    def end(self) -> bytes:
        """What comes after the last event."""
        return b""


class AnswerRenderer(Renderer[Event]):
    """Writes an answer of the daemon, streamed or whole."""

    @abstractmethod
    def whole(self, ends: Sequence[Eos]) -> object:
        """What is encoded if nothing is streamed.

        Args:
            ends: the last events of all answers of a request, by ``index``.
        """


POSITION: Final = "x-uma-queue-position"


class ForecastHeaders:
    """Keeps the latest forecast of one answer, for headers that say when it is predicted to start and to end.

    Args:
        passes: the client has asked for ``forecast`` events, so they are passed on.
    """

    def __init__(self, *, passes: bool) -> None:
        self._passes = passes
        self._latest: Forecast | None = None
        self._at = 0.0
        self._has_started = False

    def keep(self, batch: list[Item]) -> list[Item]:
        """``batch``, mostly without forecasts: the status of the response waits for the first other event."""
        others = []
        for event in batch:
            if isinstance(event, Forecast):
                self._latest, self._at = event, time.monotonic()
            else:
                others.append(event)
        self._has_started = self._has_started or bool(others)
        return batch if self._passes else others

    def headers(self) -> Mapping[str, str]:
        """The place in the queue, 0 for one that runs, and milliseconds from now to the end; none before a forecast."""
        if self._latest is None:
            return {}
        eta_ms = self._latest.end_ms - 1e3 * (time.monotonic() - self._at)
        position = 0 if self._has_started else self._latest.queue_position
        return {POSITION: str(position), ETA: str(max(0, round(eta_ms)))}


class StreamedAnswer(Response, Generic[Item]):
    """Sends an answer while it is generated.

    The status waits for the first event, so a refusal has a status of its own, but no longer than ``keep_alive_s``: from
    then on the client gets comments, if the dialect has any.  Events that arrive together are sent in one write.  A client
    that reads slowly stops the reading from the daemon, which pauses the stream.

    Args:
        events: from ``Daemon.generate``, or made of that.  It is closed when the client leaves, and that cancels the request.
        refuse: builds the response for an error before the first event.
        forecasts: some of its events, which become headers.
    """

    def __init__(
        self,
        events: AsyncIterator[list[Item]],
        renderer: Renderer[Item],
        *,
        refuse: Callable[[HttpError], Response],
        keep_alive_s: float,
        forecasts: ForecastHeaders | None = None,
    ) -> None:
        super().__init__(None, 200, dict(NOT_BUFFERED), renderer.media_type)
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]
        self._events = events
        self._renderer = renderer
        self._refuse = refuse
        self._keep_alive_s = keep_alive_s
        self._forecasts = forecasts
        self._send: Send
        self._has_begun = False
        self._written_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer until its end, or until the client leaves.

        What is around the application only changes how a response begins, so pieces of the body go to the server directly.
        """
        self._send = RequestState.of(scope).server_send
        refusals: list[Response] = []

        async def stream() -> None:  # in a task of its own, so that a token need not wake all that is around this
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                refusals.extend(await self._stream(events, send))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream)
            await self._until_client_leaves(receive, send)
            tasks.cancel_scope.cancel()
        for refusal in refusals:
            await refusal(scope, receive, send)

    async def _stream(self, events: AsyncIterator[list[Item]], send: Send) -> list[Response]:
        render = self._renderer.render
        try:
            async for batch in events:
                if self._forecasts is not None and not (batch := self._forecasts.keep(batch)):
                    continue
                data = b"".join([render(event) for event in batch])
                if data or not self._has_begun:
                    await self._write(send, data)
            await self._write(send, self._renderer.end())
        except HttpError as error:
            if not self._has_begun:
                return [self._refuse(error)]
            await self._write(send, self._renderer.fail(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return []

    async def _write(self, send: Send, data: bytes) -> None:
        self._written_at = anyio.current_time()
        if not self._has_begun:
            self._has_begun = True
            if self._forecasts is not None:
                self.headers.update(self._forecasts.headers())
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            data = self._renderer.begin() + data
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _until_client_leaves(self, receive: Receive, send: Send) -> None:
        """Return when the client leaves.  Sends the status and comments while there is nothing else to send."""
        frame, self._written_at = self._renderer.keep_alive_frame, anyio.current_time()
        while True:
            due_at = self._written_at + self._keep_alive_s if frame or not self._has_begun else math.inf
            with anyio.CancelScope(deadline=due_at):
                await _disconnect(receive)
                return
            if anyio.current_time() >= self._written_at + self._keep_alive_s:
                await self._write(send, frame)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``.

    Raises:
        HttpError: the client left meanwhile, which cancels ``work``; or what ``work`` raises.
    """
    results: list[T] = []
    failure: HttpError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
        try:
            results.append(await work)
        except HttpError as error:  # leaving the group with it would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise client_left()
    return results[0]


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    await _disconnect(receive)
    scope.cancel()


async def _disconnect(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass  # the body has been read already
