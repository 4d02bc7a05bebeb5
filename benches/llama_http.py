"""llama-server under load: its own /completion over HTTP/1.1, streamed as server-sent events.

Written by hand over a trio stream, since a load generator that spends more on one server's events than on
the other's would measure itself.
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
"""``stop_type`` as uma-trio calls it."""


class Event(msgspec.Struct):
    """What is looked at of one event."""

    content: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int = 0
    """Of the prompt."""
    tokens_predicted: int = 0
    timings: EventTimings | None = None
    error: dict[str, object] | None = None


class EventTimings(msgspec.Struct):
    """Of the last event, likewise."""

    cache_n: int = 0
    """Tokens of the prompt that were in the slot already."""


class EventReader:
    """Cuts a chunked HTTP response into the payloads of its server-sent events.

    Knows bytes alone, and of HTTP no more than llama-server uses.
    """

    def __init__(self) -> None:
        self.ended = False
        """The last chunk has come."""
        self._head = True
        self._raw = b""
        self._body = b""

    def receive_data(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes; ``b""`` says that the server has closed.

        Raises:
            BrokenProtocol: it is another answer than 200, or it ends before its end.
        """
        self._raw += data
        if self._head and not self._read_head(closed=not data):
            return []
        self._read_chunks()
        if not data and not self.ended:
            raise BrokenProtocol("llama-server closed the connection in the middle of an answer")
        *events, self._body = self._body.split(b"\n\n")
        return [_payload(event) for event in events if event and not event.startswith(b":")]

    def _read_head(self, *, closed: bool) -> bool:
        head, complete, rest = self._raw.partition(b"\r\n\r\n")
        if complete and head.startswith(b"HTTP/1.1 200 "):
            self._head, self._raw = False, rest
            return True
        if closed:  # of an error the whole body tells why
            said = rest or head or b"nothing"
            raise BrokenProtocol(f"llama-server answered {said[:500].decode(errors='replace')}")
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
        raise BrokenProtocol(f"llama-server sent {event[:500].decode(errors='replace')}")
    return value


@attrs.frozen
class LlamaServer:
    """The one that listens at ``host:port``; a ``Transport``.

    Tokens inside a character come with the one that completes it, so there can be fewer events than tokens.
    """

    host: str
    port: int
    cache_prompt: bool = False
    """Use what its slots have computed."""

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[Connection]:
        """Each request opens a connection of its own: the server closes one that is idle for 5 seconds."""
        yield self

    async def ask(self, question: Question, on_token: OnToken) -> End:
        """Raw prompts only."""
        reader = EventReader()
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
        raise BrokenProtocol("llama-server ended an answer without its last event")

    async def open(self) -> trio.abc.Stream:
        """A new connection."""
        return await trio.open_tcp_stream(self.host, self.port)

    def _request(self, question: Question) -> bytes:
        assert question.raw, "llama-server is asked for raw prompts only"
        body = json.dumps(
            {
                "prompt": question.text,
                "n_predict": question.max_tokens,
                "ignore_eos": question.ignore_eos,
                "temperature": 0.0,
                "cache_prompt": self.cache_prompt,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def counters(self) -> None:
        """llama-server's counters are other ones."""
        return

    async def healthy(self) -> bool:
        """Whether it takes requests."""
        try:
            async with await self.open() as stream:
                await stream.send_all(
                    f"GET /health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode()
                )
                return bytes(await stream.receive_some(READ_BYTES)).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False
