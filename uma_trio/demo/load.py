"""Drives several streams at once from one trio task each, and notes when every token came.

What is driven is a ``Transport``; ``Daemon`` is the one for uma-trio.  Another server to compare with is
another transport, and nothing else changes.
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
    """How an answer ended, as the server tells."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt; not computed for this one."""


class Connection(Protocol):
    """One client's."""

    async def ask(self, question: Question, on_token: OnToken) -> End:
        """Stream one answer; ``on_token(text)`` at the moment when a token's event was decoded."""


class Transport(Protocol):
    """A server under load."""

    def connect(self, *, interactive: bool) -> AbstractAsyncContextManager[Connection]: ...

    async def counters(self) -> Counters | None:
        """What it has counted; ``None`` if it does not tell."""


class Watcher(Protocol):
    """Told what happens.  Called between tokens: must be quick."""

    def asked(self, track: Track) -> None:
        """The last of ``track.answers`` was asked."""

    def told(self, track: Track) -> None:
        """The last of ``track.answers`` has one more token."""

    def answered(self, track: Track) -> None:
        """The last of ``track.answers`` has ended."""


class Unwatched:
    """Looks at nothing; for those who look at some of it."""

    def asked(self, track: Track) -> None: ...
    def told(self, track: Track) -> None: ...
    def answered(self, track: Track) -> None: ...


@attrs.frozen
class Daemon:
    """uma-trio over its socket."""

    path: str | os.PathLike[str]
    encoding: Literal["json", "cbor"] = "json"
    cache_prompt: bool = False
    """Share what was computed; not where reading is what is measured."""
    speculate: bool | None = None
    """Check guesses; ``None``: as the daemon is set."""

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[Connection]:
        async with open_client(self.path, encoding=self.encoding) as client:
            yield self.over(client, interactive=interactive)

    def over(self, client: Client, *, interactive: bool) -> Connection:
        """The same over a connection that is there already."""
        options = {"cache_prompt": self.cache_prompt, "speculate": self.speculate}
        return _DaemonConnection(client, "interactive" if interactive else "normal", options)

    async def snapshot(self) -> dict[str, Any]:
        """One metrics event."""
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
        return {
            **asked,
            "max_tokens": question.max_tokens,
            "ignore_eos": question.ignore_eos,
            "temperature": 0.0,
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
    """All streams at once; long prompts start when every interactive stream has ``head_start`` tokens.

    They start together, or one each ``every_s`` seconds.  The tracks have the order of ``streams``.  The first
    error ends all.
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
    """Each stream with the server to itself."""
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
        answer.pieces.append(text)
        for watcher in watchers:
            watcher.told(track)

    for watcher in watchers:
        watcher.asked(track)
    end = await connection.ask(question, on_token)
    answer.reason = end.reason
    answer.prompt_tokens, answer.completion_tokens = end.prompt_tokens, end.completion_tokens
    answer.cached_tokens = end.cached_tokens
    for watcher in watchers:
        watcher.answered(track)


class _HeadStart(Unwatched):
    """Sets ``reached`` when each of ``tracks`` has so many tokens, or has ended with fewer."""

    def __init__(self, tracks: Sequence[Track], n_tokens: int) -> None:
        self.reached = trio.Event()
        self._tracks = tracks
        self._n_tokens = n_tokens
        self._look()

    def told(self, track: Track) -> None:
        if not self.reached.is_set():
            self._look()

    answered = told

    def _look(self) -> None:
        if all(track.n_tokens >= self._n_tokens or track.finished for track in self._tracks):
            self.reached.set()
