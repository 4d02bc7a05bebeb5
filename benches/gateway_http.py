"""A client for /v1/completions of uma-trio's HTTP gateway, as lean as the one for llama-server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import attrs
import msgspec
import trio
from llama_http import READ_BYTES, EventReader

from uma_trio.client import BrokenProtocol
from uma_trio.demo.load import Connection, Daemon, End, OnToken
from uma_trio.demo.recording import Question
from uma_trio.demo.scorecard import Counters


class Choice(msgspec.Struct):
    """The fields of a choice that are used."""

    text: str = ""
    finish_reason: str | None = None


class Details(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Counts of the last event."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: Details = msgspec.field(default_factory=Details)


class Event(msgspec.Struct):
    """The fields of an event that are used."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, object] | None = None


@attrs.frozen
class Gateway:
    """The gateway of a daemon; a ``Transport``."""

    host: str
    port: int
    daemon: Daemon
    """Its socket, for the counters."""
    cache_prompt: bool = False
    """Allow prefix reuse."""
    speculate: bool = True
    """Allow draft tokens."""

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[Connection]:
        """Each request opens its own connection, as with llama-server."""
        yield self

    async def ask(self, question: Question, on_token: OnToken) -> End:
        """Stream one answer to a raw prompt."""
        reader = EventReader("the gateway")
        decoder = msgspec.json.Decoder(Event)
        reason = ""
        usage = None
        async with await trio.open_tcp_stream(self.host, self.port) as stream:
            await stream.send_all(self._request(question))
            while not reader.ended:
                for payload in reader.receive_data(bytes(await stream.receive_some(READ_BYTES))):
                    if payload == b"[DONE]":
                        continue
                    event = decoder.decode(payload)
                    if event.error is not None:
                        raise BrokenProtocol(f"the gateway answered {event.error}")
                    usage = event.usage or usage
                    for choice in event.choices:
                        reason = choice.finish_reason or reason
                        if choice.text:
                            on_token(choice.text)
        if usage is None:
            raise BrokenProtocol("the last event of an answer is missing")
        return End(
            reason=reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )

    def _request(self, question: Question) -> bytes:
        assert question.raw, "only raw prompts"
        body = json.dumps(
            {
                "prompt": question.text,
                "max_tokens": question.max_tokens,
                "ignore_eos": question.ignore_eos,
                "temperature": 0.0,
                "cache_prompt": self.cache_prompt,
                "speculate": self.speculate,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def counters(self) -> Counters:
        """Those of the daemon."""
        return await self.daemon.counters()
