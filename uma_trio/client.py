"""Client of the socket protocol, for asyncio, trio and plain blocking code.

Async code opens a connection::

    async with open_client() as client:
        async for event in client.generate(prompt="Tell me a story", max_tokens=200):
            match event:
                case Token(text=text):
                    print(text, end="", flush=True)
                case Eos(usage=usage):
                    print(f"\\n{usage.completion_tokens} tokens")

Scripts and notebooks call ``ask`` or ``stream``, which are also attributes of the package::

    answer = uma_trio.ask("What is the capital of France?")

Closing the connection cancels the running request in the daemon.  Leaving the ``async with`` block closes it, by
cancellation too, and so does leaving a loop over ``stream``.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import socket as sockets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import anyio
import anyio.abc
import attrs

from uma_trio.connect.connector import Connector, SocketPath, connect_blocking
from uma_trio.connect.errors import BrokenProtocol, ClientError, Loading, NoDaemon
from uma_trio.errors import ProtocolError
from uma_trio.protocol.answer_tree import AnswerTree, ControlledAnswer
from uma_trio.protocol.answers import (
    Activity,
    AnswerInfo,
    AnswerList,
    Health,
    Metrics,
    ModelDescription,
    ModelList,
    SessionInfo,
    SessionList,
    Steered,
    TokenList,
    Transcript,
)
from uma_trio.protocol.chat import ToolCall
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.controllers import (
    Backtrack,
    ControllerModule,
    ControllerOutput,
    Controllers,
    ControllerTag,
    Fork,
)
from uma_trio.protocol.events import (
    Embeddings,
    Eos,
    Failure,
    Forecast,
    Inserted,
    LoadProgress,
    Logprobs,
    PrefillProgress,
    RankedDocument,
    Ranking,
    Reasoning,
    Token,
    ToolCallDelta,
    UnknownEvent,
)
from uma_trio.protocol.field_errors import did_you_mean
from uma_trio.protocol.framing import HEADER_BYTES
from uma_trio.protocol.lease import SessionLease, SessionOffer
from uma_trio.protocol.messages import Event, ServerEvent
from uma_trio.protocol.payload import Encoding
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.sealed_memory import can_pass, passed
from uma_trio.protocol.usage import Explanation, FinishReason, Timings, Usage

__all__ = [
    "Activity",
    "Answer",
    "AnswerInfo",
    "AnswerTree",
    "Backtrack",
    "BrokenProtocol",
    "Client",
    "ClientError",
    "ControlledAnswer",
    "ControllerModule",
    "ControllerOutput",
    "ControllerTag",
    "Controllers",
    "Embeddings",
    "Eos",
    "Event",
    "Explanation",
    "Failure",
    "Forecast",
    "Fork",
    "Health",
    "Inserted",
    "LoadProgress",
    "Loading",
    "Metrics",
    "ModelDescription",
    "NoDaemon",
    "PrefillProgress",
    "RankedDocument",
    "Ranking",
    "Reasoning",
    "ServerError",
    "SessionInfo",
    "SessionLease",
    "SessionList",
    "SessionOffer",
    "Token",
    "TokenList",
    "ToolCall",
    "ToolCallDelta",
    "Transcript",
    "UnknownEvent",
    "ask",
    "open_client",
    "run",
    "stream",
]

READ_BYTES: Final = 64 * 1024
PART_BYTES: Final = 192 * 1024
"""Bytes of a controller in one message.  As base64, a message fits into a frame of 256 KiB."""
LOADING_TIMEOUT_S: Final = 600.0
"""How long ``ask`` and ``stream`` wait for a daemon that loads its model."""
FIELDS: Final = tuple(field.name for field in attrs.fields(Generate))
"""What a request can have."""
OpenStream = Callable[[sockets.socket], Awaitable[anyio.abc.ByteStream]]


@runtime_checkable
class PassesFiles(Protocol):
    """A stream that can send descriptors, such as those of Unix sockets."""

    async def send_fds(self, message: bytes, fds: Collection[int]) -> None:
        """Send ``message`` with descriptors."""


@runtime_checkable
class KnowsArrivals(Protocol):
    """A stream that knows, without waiting, whether something has arrived."""

    def is_quiet(self) -> bool:
        """Whether the connection is open and nothing waits to be received."""


Messages = Sequence[Mapping[str, Any]]
AnswerEvent = TypeVar("AnswerEvent", bound=ServerEvent)
Part = TypeVar("Part", AnswerList, Controllers, Embeddings, SessionList, TokenList, Transcript)
"""Events of which an answer may have several: all but the last one have ``more``."""


class ServerError(ClientError):
    """The daemon answered with an error event; docs/PROTOCOL-REFERENCE.md lists the codes."""

    def __init__(self, event: Failure) -> None:
        super().__init__(f"{event.code}: {event.message}")
        self.code = event.code
        self.event = event
        self.answers: AnswerTree | None = None
        """Only from ``run``: the answers with their texts and logs, as far as they had come."""


@attrs.frozen(kw_only=True)
class Answer:
    """A complete answer.  ``str(answer)`` is its text."""

    text: str
    reasoning: str | None
    """The model's reasoning before the answer, if there is some and the request has ``separate_reasoning``."""
    reason: FinishReason
    """Why it ended: ``stop``, ``tool_calls`` or ``length``."""
    tool_calls: list[ToolCall] | None
    usage: Usage
    timings: Timings
    seed: int | None
    """``None`` if nothing was drawn at random."""
    logprobs: list[Logprobs] | None
    session: SessionInfo | None

    def __str__(self) -> str:
        return self.text


class Client:
    """One connection to the daemon, opened with ``open_client``.  It runs one request at a time."""

    def __init__(
        self,
        stream: anyio.abc.ByteStream,
        *,
        encoding: Encoding = Encoding.JSON,
        principal: str | None = None,
        passes_files: bool = False,
    ) -> None:
        """
        Args:
            passes_files: whether the daemon takes descriptors from this process.
        """
        self._stream = stream
        self._passes_files = passes_files
        self._principal = principal
        self._codec = ClientCodec(encoding)
        self._ids = itertools.count(1)

    async def send(self, fields: Mapping[str, Any]) -> None:
        """Send one message as it is; large ``data`` that is bytes as descriptors, if the daemon takes them.

        Raises:
            BrokenProtocol: the daemon closed the connection.
        """
        try:
            with passed(fields, taken=self._passes_files) as (message, descriptors):
                data = self._codec.encode(dict(message))
                if descriptors and isinstance(self._stream, PassesFiles):
                    await self._stream.send_fds(data[:HEADER_BYTES], descriptors)
                    data = data[HEADER_BYTES:]
                await self._stream.send(data)
        except anyio.BrokenResourceError:
            raise BrokenProtocol("the daemon closed the connection") from None

    async def receive(self) -> Event | None:
        """Wait for the next event; ``None`` when the daemon has closed the connection.

        Raises:
            BrokenProtocol: the daemon sent something that is not an event.
        """
        while (event := self.next_event()) is None:
            try:
                self._codec.receive_data(await self._stream.receive(READ_BYTES))
            except anyio.EndOfStream:
                self._codec.receive_data(b"")
                return self.next_event()
            except anyio.BrokenResourceError as error:
                raise BrokenProtocol(str(error) or "the connection broke") from None
        return event

    def next_event(self) -> Event | None:
        """The next event that has arrived already; ``None`` if there is none.  Does not wait.

        Raises:
            BrokenProtocol: the daemon sent something that is not an event.
        """
        try:
            return self._codec.next_event()
        except ProtocolError as error:
            raise BrokenProtocol(str(error)) from None

    def is_quiet(self) -> bool:
        """Whether the connection is open, and all that the daemon sent was received.  Never, if the stream cannot say."""
        return not self._codec.mid_event and isinstance(self._stream, KnowsArrivals) and self._stream.is_quiet()

    async def generate(self, **fields: Any) -> AsyncIterator[Event]:
        """Send a request and yield its events until all its answers have ended.

        The daemon closes the connection afterwards, unless the request has ``keep_alive=True``.

        Args:
            fields: the request, as in docs/PROTOCOL-REFERENCE.md.  A missing ``id`` is generated, and ``logit_bias`` may have
                integers as keys.

        Raises:
            TypeError: a request has no such field.
            ServerError: the daemon answered with an error.  With ``n`` above 1, events of other answers may follow;
                ``receive`` returns them.  With a controller, the error of one answer is an event like others, and is
                raised only if no answer has ended well.
            BrokenProtocol: the connection ended before the answer.
        """
        async with contextlib.aclosing(self.generate_batches(**fields)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def generate_batches(self, **fields: Any) -> AsyncGenerator[list[Event], None]:
        """Like ``generate``, but yields lists: all events that have arrived together.

        Raises:
            ServerError: the daemon answered with an error.  It comes after the events before it have been yielded.
        """
        _check_fields(fields)
        return self._batches(_Request(fields, f"r{next(self._ids)}"))

    async def _batches(self, request: _Request) -> AsyncGenerator[list[Event], None]:
        with contextlib.suppress(BrokenProtocol):  # a daemon that closed the connection may have sent the reason
            await self.send(request.fields)
        while not request.done:
            batch: list[Event] = []
            event = await self.receive()
            try:
                while True:
                    if request.accept(event):
                        batch.append(event)
                    if request.done or (event := self.next_event()) is None:
                        break
            except ClientError:
                if batch:
                    yield batch
                raise
            if batch:
                yield batch

    async def complete(self, **fields: Any) -> Eos:
        """Send a request without streaming and return its ``eos``, which has the whole text."""
        return (await self.choices(**fields))[0]

    async def choices(self, **fields: Any) -> list[Eos]:
        """Send a request without streaming and return the ``eos`` of each of its ``n`` answers, by ``index``."""
        ends = [event async for event in self.generate(stream=False, **fields) if isinstance(event, Eos)]
        return sorted(ends, key=lambda eos: eos.index or 0)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request.  Its ``eos`` with reason ``cancelled`` follows."""
        await self.send({"event": "cancel", "id": request_id})

    async def detach(self, **fields: Any) -> AnswerInfo:
        """Send a request that the daemon answers on its own, and return what it is called: see ``attach``.

        Args:
            fields: the request.  A missing ``id`` is random, because it names the answer.

        Raises:
            TypeError: a request has no such field.
            ServerError: the daemon answered with an error.
        """
        _check_fields(fields)
        fields = {"id": secrets.token_hex(8), "detached": True, **fields}
        return (await self._ask(_Request(fields, "").fields, AnswerList)).answers[0]

    async def attach(self, id: str, *, after: int = 0, **fields: Any) -> AsyncIterator[Event]:
        """Yield the events of a detached answer until it has ended.  Leaving early changes nothing of the answer.

        Args:
            id: of its request.
            after: only events with a higher ``number``.
            fields: those of an attach query.

        Raises:
            ServerError: there is no such answer, or it ended with an error.
            BrokenProtocol: the connection ended before the answer.
        """
        async with contextlib.aclosing(self.attach_batches(id, after=after, **fields)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def attach_batches(self, id: str, *, after: int = 0, **fields: Any) -> AsyncGenerator[list[Event], None]:
        """Like ``attach``, but yields lists: all events that have arrived together.

        Raises:
            ServerError: it comes after the events before it have been yielded.
        """
        query = _Request(self._query({"type": "attach", "after": after, **fields}), id)
        return self._batches(query)

    async def answers(
        self, action: Literal["list", "read", "cancel", "delete"] = "list", **fields: Any
    ) -> list[AnswerInfo]:
        """List, describe, cancel or delete detached answers; ``fields`` are those of an answers query.

        Raises:
            ServerError: the daemon answered with an error.
        """
        events = await self._ask_all({"type": "answers", "action": action, **fields}, AnswerList)
        return [answer for event in events for answer in event.answers]

    async def steer(self, request_id: str, **changes: Any) -> Steered:
        """Change a running answer of another connection, or a detached one; ``changes`` are those of a steer query.

        Raises:
            ServerError: the daemon answered with an error.
        """
        return await self._ask({"type": "steer", "request_id": request_id, **changes}, Steered)

    async def explain(self, request_id: str, **fields: Any) -> Explanation:
        """Ask which tokens of a request's prompt were computed although an earlier one began alike, and why.

        Raises:
            ServerError: the daemon answered with an error.
        """
        return await self._ask({"type": "explain", "request_id": request_id, **fields}, Explanation)

    async def sessions(self, action: str = "list", **fields: Any) -> list[SessionInfo]:
        """List, describe, close or fork sessions; ``fields`` are those of a session query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
        """
        events = await self._ask_all({"type": "sessions", "action": action, **fields}, SessionList)
        return [session for event in events for session in event.sessions]

    async def transcript(self, session_id: str, **fields: Any) -> Transcript:
        """Return the whole content of a session; ``fields`` are those of a session query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
        """
        query = {"type": "sessions", "action": "read", "session_id": session_id, **fields}
        parts = await self._ask_all(query, Transcript)
        messages = [message for part in parts for message in part.messages]
        text = None if parts[0].text is None else "".join(part.text or "" for part in parts)
        return attrs.evolve(parts[-1], messages=messages, text=text)

    async def lease(self, action: str, session_id: str, **fields: Any) -> SessionLease:
        """Ask about or change the lease of a session; ``fields`` are those of a ``LeaseQuery``.  The connection stays open,
        and claims end with it.

        Raises:
            ServerError: the daemon answered with an error.
        """
        query = {"type": "lease", "action": action, "session_id": session_id, "keep_alive": True, **fields}
        return await self._ask(query, SessionLease)

    async def next_offer(self, *, end: bool = False) -> SessionOffer:
        """Ask a daemon that stops for a session that another one may take over.

        Args:
            end: no more are wanted.

        Raises:
            ServerError: the daemon answered with an error.
        """
        return await self._ask({"type": "offer", "keep_alive": True, "end": end}, SessionOffer)

    async def tokenize(self, text: str | None = None, *, messages: Messages | None = None, **fields: Any) -> TokenList:
        """Return the tokens of a text, with their positions in it, or those of a chat as a request would prefill it.

        Args:
            fields: further fields of a tokenize query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
        """
        given = {"text": text} if messages is None else {"messages": messages}
        return TokenList.joined(await self._ask_all({"type": "tokenize", **given, **fields}, TokenList))

    async def detokenize(self, tokens: Sequence[int], **fields: Any) -> str:
        """Return the text of ``tokens``; ``fields`` are those of a tokenize query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
        """
        parts = await self._ask_all({"type": "tokenize", "tokens": [*tokens], **fields}, TokenList)
        return TokenList.joined(parts).text or ""

    async def models(self, **fields: Any) -> list[ModelDescription]:
        """Return what the daemon serves, the default model first; ``fields`` are those of a models query.

        Raises:
            ServerError: the daemon answered with an error.
        """
        return (await self._ask({"type": "models", **fields}, ModelList)).models

    async def manage_model(
        self, action: Literal["load", "unload", "release", "reload"], model: str, **fields: Any
    ) -> ModelDescription:
        """Load, unload, release or reload a model, and return it as it is then.  Only for the user who runs the daemon.

        Raises:
            ServerError: the daemon answered with an error.
        """
        [description] = (
            await self._ask({"type": "models", "action": action, "model": model, **fields}, ModelList)
        ).models
        return description

    async def health(self, **fields: Any) -> Health:
        """Return whether the daemon could serve another request now, and why not; ``fields`` are those of a health query.

        Raises:
            ServerError: the daemon answered with an error.
        """
        return await self._ask({"type": "health", **fields}, Health)

    async def embed(self, input: Sequence[str | Sequence[int]], **fields: Any) -> Embeddings:
        """Return the embeddings of texts, or of lists of tokens, in their order.

        Args:
            fields: further fields of a request for embeddings in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
            BrokenProtocol: the connection ended before the answer, or the request was cancelled.
        """
        texts = [text if isinstance(text, str | list) else [*text] for text in input]
        events = await self._ask_all({"type": "embed", "input": texts, **fields}, Embeddings)
        return attrs.evolve(events[-1], embeddings=[embedding for event in events for embedding in event.embeddings])

    async def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> Ranking:
        """Rank documents by how well they answer ``query``, and return them with their scores, the best one first.

        Args:
            fields: further fields of a request to rank in docs/PROTOCOL-REFERENCE.md, such as ``top_n``.

        Raises:
            ServerError: the daemon answered with an error.
            BrokenProtocol: the connection ended before the answer, or the request was cancelled.
        """
        return await self._ask({"type": "rerank", "query": query, "documents": [*documents], **fields}, Ranking)

    async def controller_tags(self, **fields: Any) -> list[ControllerTag]:
        """Return the tags of the controllers that the client can run, the most recently changed first.

        Args:
            fields: those of a controllers query.

        Raises:
            ServerError: the daemon answered with an error.
        """
        events = await self._ask_all({"type": "controllers", **fields}, Controllers)
        return [tag for event in events for tag in event.tags or ()]

    async def controller_modules(self, **fields: Any) -> list[ControllerModule]:
        """Return the client's modules, also those without a tag, the most recently used first; an administrator gets all.

        Args:
            fields: further fields of a controllers query, such as ``owner``.

        Raises:
            ServerError: the daemon answered with an error.
        """
        events = await self._ask_all({"type": "controllers", "action": "modules", **fields}, Controllers)
        return [module for event in events for module in event.modules or ()]

    async def delete_controller(
        self, module_id: str | None = None, tags: Sequence[str] | None = None, **fields: Any
    ) -> list[str]:
        """Delete a module with its tags, or tags alone, and return what is gone.  Give one of the two.

        Args:
            fields: further fields of a controllers query, such as ``owner``.

        Raises:
            ServerError: there is no such module or tag, or it is somebody else's.
        """
        named = {"module_id": module_id} if tags is None else {"tags": [*tags]}
        query = {"type": "controllers", "action": "delete", **named, **fields}
        return (await self._ask(query, Controllers)).deleted or []

    async def upload_controller(self, binary: bytes, **fields: Any) -> Controllers:
        """Store a Wasm module, and return its ``module_id`` and sizes.

        Args:
            fields: further fields of a controllers query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: it is not a controller, or the daemon takes none.
        """
        n_parts = max(1, -(-len(binary) // PART_BYTES))
        query = {"type": "controllers", "action": "upload", "of": n_parts, **fields}
        for part in range(n_parts):
            piece = binary[part * PART_BYTES : (part + 1) * PART_BYTES]
            is_last = part == n_parts - 1
            more = {} if is_last else {"keep_alive": True}
            content = base64.b64encode(piece).decode()
            answer = await self._ask({**query, "part": part, "binary": content, **more}, Controllers)
        return answer

    async def tag_controller(self, module_id: str, tags: Sequence[str], **fields: Any) -> list[ControllerTag]:
        """Give a stored module more names, and return them.

        Args:
            fields: further fields of a controllers query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: a name is not valid or not allowed, or there is no such module.
        """
        query = {"type": "controllers", "action": "tag", "module_id": module_id, "tags": [*tags], **fields}
        return (await self._ask(query, Controllers)).tags or []

    async def _ask(self, query: Mapping[str, Any], expected: type[AnswerEvent]) -> AnswerEvent:
        """Send a query that is answered with one event, and return that."""
        with contextlib.suppress(BrokenProtocol):  # a daemon that closed the connection may have sent the reason
            await self.send(self._query(query))
        return await self._expect(expected)

    async def _ask_all(self, query: Mapping[str, Any], expected: type[Part]) -> list[Part]:
        """Send a query whose answer may come in several events, and return these."""
        events = [await self._ask(query, expected)]
        while events[-1].more:
            events.append(await self._expect(expected))
        return events

    def _query(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The query of these fields without those that are ``None``, with the connection's principal if it names none."""
        return {name: value for name, value in {"principal": self._principal, **fields}.items() if value is not None}

    async def _expect(self, expected: type[AnswerEvent]) -> AnswerEvent:
        """Wait for the next event, which is an ``expected`` one or an error."""
        match event := await self.receive():
            case Failure():
                raise ServerError(event)
            case None:
                raise BrokenProtocol("the daemon closed the connection")
            case _ if isinstance(event, expected):
                return event
        raise BrokenProtocol(f"expected {expected.__name__}, got {event!r}")

    async def metrics(self, **fields: Any) -> dict[str, Any]:
        """Return one snapshot, as docs/METRICS.md describes it; ``fields`` are those of a metrics query."""
        return dict((await self._ask({"type": "metrics", **fields}, Metrics)).snapshot)

    async def watch(self, **fields: Any) -> AsyncIterator[Activity]:
        """Yield what the daemon does, once every ``interval_ms``, until the daemon stops.

        The connection serves nothing else meanwhile; closing it ends the watch.

        Args:
            fields: those of a watch query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            ServerError: the daemon answered with an error.
        """
        await self.send({"type": "watch", **fields})
        while (event := await self.receive()) is not None:
            match event:
                case Activity():
                    yield event
                case Failure():
                    raise ServerError(event)
                case _:
                    raise BrokenProtocol(f"expected an event of a watch, got {event!r}")


class _Request:
    """One request on a connection, and which of its answers have ended."""

    def __init__(self, fields: Mapping[str, Any], default_id: str) -> None:
        self.fields: dict[str, Any] = {"id": default_id, **fields}
        if isinstance(bias := fields.get("logit_bias"), Mapping):
            self.fields["logit_bias"] = {str(token): value for token, value in bias.items()}
        n = fields.get("n", 1)
        self._answers_left = n if isinstance(n, int) and n > 0 else 1  # the daemon refuses any other
        self._has_controller = fields.get("controller") is not None
        self._has_answer = False
        self._has_begun = False

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return self._answers_left <= 0

    def accept(self, event: Event | None) -> TypeGuard[Event]:
        """Return whether ``event`` belongs to this request; an event without an id does.

        Raises:
            ServerError: it is an error.
            BrokenProtocol: it is ``None``, because the connection has ended.
        """
        if event is None and not self._has_begun:
            raise BrokenProtocol(
                "the daemon has closed the connection: it serves one request, and more only if each has keep_alive=True"
            )
        if event is None:
            raise BrokenProtocol("the daemon closed the connection in the middle of an answer")
        self._has_begun = True
        if event.id not in (None, self.fields["id"]):
            return False
        match event:
            case Failure() if self._has_controller and event.index is not None:
                self._answers_left -= 1
                if self.done and not self._has_answer:
                    raise ServerError(event)
            case Failure():
                raise ServerError(event)
            case Eos():
                self._has_answer = True
                self._answers_left = 0 if event.index is None else self._answers_left - 1
            case Fork():
                self._answers_left += 1
        return True


def _check_fields(fields: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """
    Args:
        others: further names that a function takes.

    Raises:
        TypeError: a request has no such field.
    """
    for name in fields:
        if name not in FIELDS:
            meant = did_you_mean(name, (*FIELDS, *others)) or "; docs/PROTOCOL-REFERENCE.md lists them"
            raise TypeError(f"a request has no field {name!r}{meant}")


@contextlib.asynccontextmanager
async def open_client(
    path: SocketPath | None = None,
    *,
    encoding: Literal["json", "cbor"] = "json",
    wait_s: float | None = 0,
    on_loading: Callable[[Path], None] | None = None,
    open_stream: OpenStream = anyio.abc.UNIXSocketStream.from_socket,
    principal: str | None = None,
) -> AsyncIterator[Client]:
    """Connect to the daemon.  Works under asyncio and trio.

    Args:
        path: the daemon's socket; ``default_socket_path()`` if not given.
        wait_s: how long to wait for a daemon that does not run or still loads its model.  ``None``: as long as it
            loads, and not at all if there is none.
        on_loading: called once with the socket's path when there is a wait.
        open_stream: makes a stream of the connected, non-blocking socket.
        principal: for queries that name none.  Only the user who runs the daemon may act for another one.

    Raises:
        Loading: the daemon still loads its model.
        NoDaemon: no daemon can be reached there.
    """
    connector = Connector(path, wait_s=wait_s, now=anyio.current_time(), on_loading=on_loading)
    while isinstance(outcome := connector.attempt(anyio.current_time()), float):  # noqa: ASYNC110 - a process starts
        await anyio.sleep(outcome)
    async with await open_stream(outcome) as connection:
        passes_files = isinstance(connection, PassesFiles) and can_pass(outcome)
        yield Client(connection, encoding=Encoding(encoding), principal=principal, passes_files=passes_files)


def ask(
    prompt: str | Messages,
    *,
    raw: bool = False,
    socket: SocketPath | None = None,
    wait_s: float | None = None,
    **fields: Any,
) -> Answer:
    """Send a request, block until it is answered, and return the answer.

    For scripts and notebooks.  Needs no event loop and works inside a running one, which it blocks.

    Args:
        prompt: a question, or a chat as a list of messages with ``role`` and ``content``.
        raw: continue ``prompt`` as it is, without the chat template.
        socket: the daemon's socket; ``default_socket_path()`` if not given.
        wait_s: how long to wait for a daemon that does not run or still loads its model.  ``None``: while it loads, for
            at most ``LOADING_TIMEOUT_S``, and not at all if there is none.
        fields: further fields of the request, as in docs/PROTOCOL-REFERENCE.md.

    Raises:
        TypeError: a request has no such field.
        ValueError: ``prompt`` is empty.
        NoDaemon: no daemon can be reached at the socket.
        ServerError: the daemon answered with an error.
        BrokenProtocol: the connection ended before the answer.
    """
    if fields.get("n", 1) != 1:
        raise ValueError("ask() returns one answer; use stream() or Client.choices() for several")
    *_, eos = stream(prompt, raw=raw, socket=socket, wait_s=wait_s, **fields, stream=False)
    assert isinstance(eos, Eos)
    return Answer(
        text=eos.text or "",
        reasoning=eos.reasoning,
        reason=eos.reason,
        tool_calls=eos.tool_calls,
        usage=eos.usage,
        timings=eos.timings,
        seed=eos.seed,
        logprobs=eos.logprobs,
        session=eos.session,
    )


def stream(
    prompt: str | Messages,
    *,
    raw: bool = False,
    socket: SocketPath | None = None,
    wait_s: float | None = None,
    **fields: Any,
) -> Iterator[Event]:
    """Send a request and yield its events until all its answers have ended.  Blocks while it waits for an event.

    Leaving the loop early closes the connection, and that cancels the request.  Arguments and errors are those of
    ``ask``.
    """
    if "messages" in fields:
        raise TypeError("a chat is the first argument, in place of the question")
    _check_fields(fields, ("raw", "socket", "wait_s"))
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("nothing to ask: the prompt is empty")
    if isinstance(prompt, str) and not raw:
        prompt = [{"role": "user", "content": prompt}]
    yield from _events({"prompt" if raw else "messages": prompt, **fields}, socket, wait_s)


def run(
    controller: str, arg: Any = None, *, socket: SocketPath | None = None, wait_s: float | None = None, **fields: Any
) -> AnswerTree:
    """Run a controller, block until all its answers have ended, and return them.

    ``run("jsctrl", program)[0].text`` is the text of the first answer.  An answer whose controller failed has a
    ``failure``; ``eos.reason`` says why any other ended, such as ``deadlock``.  Other arguments and errors are those of ``ask``.

    Args:
        controller: module id or tag.
        arg: what the controller gets, such as a program: a text, or any other JSON value.

    Raises:
        ServerError: the daemon refused, or no answer ended well.  Its ``answers`` are those so far.
    """
    _check_fields(fields, ("socket", "wait_s"))
    tree = AnswerTree()
    try:
        for event in _events({"controller": controller, "controller_arg": arg, **fields}, socket, wait_s):
            tree.add(event)
    except ServerError as error:
        tree.add(error.event)
        error.answers = tree
        raise
    return tree


def _send(sock: sockets.socket, codec: ClientCodec, fields: Mapping[str, Any]) -> None:
    """``Client.send``, blocking."""
    with passed(fields, taken=can_pass(sock)) as (message, descriptors):
        data = codec.encode(dict(message))
        if descriptors:
            sockets.send_fds(sock, [data[:HEADER_BYTES]], descriptors)
            data = data[HEADER_BYTES:]
        sock.sendall(data)


def _events(fields: Mapping[str, Any], socket: SocketPath | None, wait_s: float | None) -> Iterator[Event]:
    """Send a request and yield its events, blocking."""
    request = _Request(fields, "r1")
    codec = ClientCodec()
    with connect_blocking(socket, wait_s=wait_s, loading_timeout_s=LOADING_TIMEOUT_S) as sock:
        try:
            with contextlib.suppress(BrokenPipeError):  # a daemon that closed the connection may have sent the reason
                _send(sock, codec, request.fields)
            while not request.done:
                while (event := codec.next_event()) is None and (data := sock.recv(READ_BYTES)):
                    codec.receive_data(data)
                if request.accept(event):
                    yield event
        except (ProtocolError, ConnectionError) as error:
            raise BrokenProtocol(str(error)) from None
