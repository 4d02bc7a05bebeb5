"""Runs several streams at once, one trio task each, and records when each token arrives.

A ``Transport`` is the server under load.  ``Daemon`` is the transport of uma-trio; the benches have others, to compare
with.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, Protocol

import attrs
import trio

from uma_trio.client import Client, Eos, Token, open_client
from uma_trio.demo.recording import Answer, Question, Stream, Track
from uma_trio.demo.scorecard import Counters

OnToken = Callable[[str], None]


@attrs.frozen(kw_only=True)
class End:
    """End of an answer, as the server reports it."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""


class Connection(Protocol):
    """One client's connection."""

    async def ask(self, question: Question, on_token: OnToken) -> End:
        """Stream one answer; call ``on_token(text)`` as soon as a token's event is decoded."""


class Transport(Protocol):
    """A server under load."""

    def connect(self, *, interactive: bool) -> AbstractAsyncContextManager[Connection]:
        """Open a connection, of priority ``interactive`` or ``normal``."""

    async def counters(self) -> Counters | None:
        """Read the server's counters; ``None`` if it has none."""


class Watcher(Protocol):
    """Callbacks while a load runs.  They run between tokens and must be quick."""

    def request_sent(self, track: Track) -> None:
        """The request of the last of ``track.answers`` was sent."""

    def token_received(self, track: Track) -> None:
        """The last of ``track.answers`` got one more token."""

    def answer_ended(self, track: Track) -> None:
        """The last of ``track.answers`` ended."""


class NullWatcher:
    """Ignores everything; a base class for watchers that need only some of the callbacks."""

    def request_sent(self, track: Track) -> None: ...
    def token_received(self, track: Track) -> None: ...
    def answer_ended(self, track: Track) -> None: ...


@attrs.frozen
class Daemon:
    """uma-trio over its socket."""

    path: str | os.PathLike[str]
    encoding: Literal["json", "cbor"] = "json"
    cache_prompt: bool = False
    """Off by default, because a reused prefix would hide the cost of prefill."""
    speculate: bool | None = None
    """Speculative decoding; ``None`` is the daemon's setting."""

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[Connection]:
        async with open_client(self.path, encoding=self.encoding) as client:
            yield self.over(client, interactive=interactive)

    def over(self, client: Client, *, interactive: bool) -> Connection:
        """Use a client that is connected already."""
        options = {"cache_prompt": self.cache_prompt, "speculate": self.speculate}
        return _DaemonConnection(client, "interactive" if interactive else "normal", options)

    async def snapshot(self) -> dict[str, Any]:
        """Read one metrics snapshot."""
        async with open_client(self.path, encoding=self.encoding) as client:
            return await client.metrics()

    async def counters(self) -> Counters:
        return Counters.of(await self.snapshot())


@attrs.frozen
class _DaemonConnection:
    client: Client
    priority: str
    options: Mapping[str, Any]

    async def ask(self, question: Question, on_token: OnToken) -> End:
        async for event in self.client.generate(**self._request(question)):
            if isinstance(event, Token):
                on_token(event.text)
        assert isinstance(event, Eos)  # generate() ends with eos or raises
        return End(
            reason=event.reason,
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
        )

    def _request(self, question: Question) -> dict[str, Any]:
        asked: dict[str, Any] = (
            {"prompt": question.text} if question.raw else {"messages": [{"role": "user", "content": question.text}]}
        )
        if question.json_schema is not None:
            asked["constraint"] = {"json_schema": question.json_schema}
        return {
            **asked,
            "max_tokens": question.max_tokens,
            "ignore_eos": question.ignore_eos,
            "temperature": question.temperature,
            "seed": question.seed,
            "keep_alive": True,
            "slo": {"priority": self.priority},
            **self.options,
        }


async def together(
    streams: Sequence[Stream],
    transport: Transport,
    *,
    head_start: int = 0,
    every_s: float = 0.0,
    watchers: Sequence[Watcher] = (),
) -> list[Track]:
    """Run all streams at once and return their tracks, in the order of ``streams``.

    The first error cancels all streams.

    Args:
        head_start: the long prompts start when every interactive stream has this many tokens.
        every_s: interval in seconds between the starts of long prompts; 0 starts them together.
    """
    tracks = [Track(stream=stream) for stream in streams]
    started = _HeadStart([track for track in tracks if track.stream.interactive], head_start)
    async with trio.open_nursery() as nursery:
        n_long = itertools.count()
        for track in tracks:
            interactive = track.stream.interactive
            ready = None if interactive else partial(_arrival, started.reached, every_s * next(n_long))
            nursery.start_soon(_drive, track, transport, (started, *watchers), ready)
    return tracks


async def _arrival(reached: trio.Event, delay_s: float) -> None:
    await reached.wait()
    await trio.sleep(delay_s)


async def one_by_one(streams: Sequence[Stream], transport: Transport) -> list[Track]:
    """Run the streams one after another, each with the server to itself."""
    tracks = [Track(stream=stream) for stream in streams]
    for track in tracks:
        await _drive(track, transport, (), None)
    return tracks


async def _drive(
    track: Track,
    transport: Transport,
    watchers: Sequence[Watcher],
    ready: Callable[[], Awaitable[None]] | None,
) -> None:
    async with transport.connect(interactive=track.stream.interactive) as connection:
        if ready is not None:
            await ready()
        for question in track.stream.questions:
            await _ask(connection, question, track, watchers)


async def _ask(connection: Connection, question: Question, track: Track, watchers: Sequence[Watcher]) -> None:
    answer = Answer(question=question, sent_s=trio.current_time())
    track.answers.append(answer)

    def on_token(text: str) -> None:
        answer.token_s.append(trio.current_time())
        answer.texts.append(text)
        for watcher in watchers:
            watcher.token_received(track)

    for watcher in watchers:
        watcher.request_sent(track)
    end = await connection.ask(question, on_token)
    answer.reason = end.reason
    answer.prompt_tokens, answer.completion_tokens = end.prompt_tokens, end.completion_tokens
    answer.cached_tokens = end.cached_tokens
    for watcher in watchers:
        watcher.answer_ended(track)


class _HeadStart(NullWatcher):
    """Sets ``reached`` when each of ``tracks`` has ``n_tokens`` tokens, or has ended with fewer."""

    def __init__(self, tracks: Sequence[Track], n_tokens: int) -> None:
        self.reached = trio.Event()
        self._tracks = tracks
        self._n_tokens = n_tokens
        self._look()

    def token_received(self, track: Track) -> None:
        if not self.reached.is_set():
            self._look()

    answer_ended = token_received

    def _look(self) -> None:
        if all(track.n_tokens >= self._n_tokens or track.finished for track in self._tracks):
            self.reached.set()
