"""A client for /completion of llama-server: HTTP/1.1 with server-sent events.

Written directly over a trio stream.  A heavier HTTP client would spend more time on events of one server than on those
of the other, and so measure itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import attrs
import msgspec
import trio

from uma_trio.client import BrokenProtocol
from uma_trio.demo.load import Connection, End, OnToken
from uma_trio.demo.recording import Question

READ_BYTES = 64 * 1024

REASONS = {"limit": "length", "eos": "stop", "word": "stop"}
"""``stop_type`` of llama-server -> finish reason of uma-trio."""


class Event(msgspec.Struct):
    """The fields of an event that are used."""

    content: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int = 0
    """Prompt tokens."""
    tokens_predicted: int = 0
    timings: EventTimings | None = None
    error: dict[str, object] | None = None


class EventTimings(msgspec.Struct):
    """Timings of the last event."""

    cache_n: int = 0
    """Prompt tokens that were in the KV cache."""


class EventReader:
    """Splits a chunked HTTP response into the payloads of its server-sent events.

    Does no I/O, and knows only the part of HTTP that the servers under test use.

    Args:
        server: what errors call it.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.ended = False
        """The last chunk has arrived."""
        self._head = True
        self._raw = b""
        self._body = b""

    def receive_data(self, data: bytes) -> list[bytes]:
        """Return the payloads that ``data`` completes.

        Args:
            data: ``b""`` if the server has closed the connection.

        Raises:
            BrokenProtocol: the status is not 200, or the response is incomplete.
        """
        self._raw += data
        if self._head and not self._read_head(closed=not data):
            return []
        self._read_chunks()
        if not data and not self.ended:
            raise BrokenProtocol(f"{self._server} closed the connection in the middle of an answer")
        *events, self._body = self._body.split(b"\n\n")
        return [_payload(event) for event in events if event and not event.startswith(b":")]

    def _read_head(self, *, closed: bool) -> bool:
        head, complete, rest = self._raw.partition(b"\r\n\r\n")
        if complete and head.startswith(b"HTTP/1.1 200 "):
            self._head, self._raw = False, rest
            return True
        if closed:  # the body of an error has the reason
            body = rest or head or b"nothing"
            raise BrokenProtocol(f"{self._server} answered {body[:500].decode(errors='replace')}")
        return False

    def _read_chunks(self) -> None:
        at, raw = 0, self._raw
        while (end := raw.find(b"\r\n", at)) >= 0:
            size, start = int(raw[at:end], 16), end + 2
            if len(raw) < start + size + 2:
                break
            self._body += raw[start : start + size]
            self.ended = size == 0
            at = start + size + 2
        self._raw = raw[at:]


def _payload(event: bytes) -> bytes:
    field, _, value = event.partition(b": ")
    if field != b"data":
        raise BrokenProtocol(f"the server sent {event[:500].decode(errors='replace')}")
    return value


@attrs.frozen
class LlamaServer:
    """A llama-server that listens at ``host:port``; a ``Transport``.

    Tokens inside a character arrive with the one that completes it, so there can be fewer events than tokens.
    """

    host: str
    port: int
    cache_prompt: bool = False
    """Allow prefix reuse."""

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[Connection]:
        """Each request opens its own connection, since llama-server closes idle ones after 5 seconds."""
        yield self

    async def ask(self, question: Question, on_token: OnToken) -> End:
        """Stream one answer to a raw prompt."""
        reader = EventReader("llama-server")
        decoder = msgspec.json.Decoder(Event)
        async with await self.open() as stream:
            await stream.send_all(self._request(question))
            while not reader.ended:
                for payload in reader.receive_data(bytes(await stream.receive_some(READ_BYTES))):
                    event = decoder.decode(payload)
                    if event.error is not None:
                        raise BrokenProtocol(f"llama-server answered {event.error}")
                    if event.stop:
                        return End(
                            reason=REASONS.get(event.stop_type, event.stop_type),
                            prompt_tokens=event.tokens_evaluated,
                            completion_tokens=event.tokens_predicted,
                            cached_tokens=event.timings.cache_n if event.timings else 0,
                        )
                    on_token(event.content)
        raise BrokenProtocol("the last event of an answer is missing")

    async def open(self) -> trio.abc.Stream:
        """Open a connection."""
        return await trio.open_tcp_stream(self.host, self.port)

    def _request(self, question: Question) -> bytes:
        assert question.raw, "only raw prompts"
        fields = {
            "prompt": question.text,
            "n_predict": question.max_tokens,
            "ignore_eos": question.ignore_eos,
            "temperature": question.temperature,
            "seed": question.seed,
            "cache_prompt": self.cache_prompt,
            "stream": True,
        }
        if question.temperature > 0:
            fields["samplers"] = ["temperature"]  # and no cut of the distribution, which is our default
        if question.json_schema is not None:
            fields["json_schema"] = question.json_schema
        body = json.dumps(fields).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def counters(self) -> None:
        """llama-server has no such counters."""
        return

    async def healthy(self) -> bool:
        """Whether the server accepts requests."""
        try:
            async with await self.open() as stream:
                await stream.send_all(
                    f"GET /health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode()
                )
                return bytes(await stream.receive_some(READ_BYTES)).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False
