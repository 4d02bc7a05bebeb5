"""A scheduler over a fake engine in virtual time, and clients that keep their events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import numpy as np
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine
from tests.support.serving import settings, token_to_bytes
from tests.support.state_files import MemoryFiles, at_once
from uma_trio.daemon.prompts.media import PlacedRows
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.offload import InThread
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.store.answer_log import Change
from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos, Failure, Token
from uma_trio.protocol.requests import Generate


@attrs.define(eq=False)
class Client:
    """The sink of one request.  It keeps all events; ``has_room`` is whether the client reads."""

    prompt: list[int]
    events: list[Any] = attrs.field(factory=list)
    has_room: bool = True
    answer: Answer = attrs.field(init=False)
    _came: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set by the next event."""

    def send(self, *events: Any) -> None:
        self.events += events
        self._came.set()

    async def reached(self, n_tokens: int = 1) -> float:
        """Wait until it has so many tokens; returns the seconds."""
        began = trio.current_time()
        with trio.fail_after(100):
            while len(self.tokens) < n_tokens:
                self._came = trio.Event()
                await self._came.wait()
        return trio.current_time() - began

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token) and not event.echo]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def last(self) -> Any:
        return self.events[-1]

    @property
    def reason(self) -> str:
        """``stop``, ``length``, ``cancelled``, or the code of an error."""
        assert isinstance(self.last, Eos | Failure)
        return self.last.reason if isinstance(self.last, Eos) else self.last.code

    @property
    def cached(self) -> int:
        n: int = self.last.usage.cached_tokens
        return n


@attrs.define
class Log:
    """Keeps the tokens of a detached answer in memory."""

    known: list[int] = attrs.field(factory=list)
    mu: float | None = None
    changes: list[Change] = attrs.field(factory=list)
    n_attempts: int = 0

    def attempt(self) -> None:
        self.n_attempts += 1

    def add(self, tokens: Sequence[int], mu: float | None, changes: Sequence[Change]) -> None:
        self.known = [*self.known, *tokens]
        self.mu = mu
        self.changes = [*self.changes, *changes]

    async def kept(self, change: Change) -> None:
        assert change in self.changes


@attrs.define
class Harness:
    """Submits requests to a scheduler and checks its bookkeeping."""

    scheduler: Scheduler
    engine: FakeEngine
    n: int = 0

    def ask(
        self,
        prompt: Sequence[int],
        n: int = 8,
        *,
        principal: str = "uid:0",
        limit: ReasoningLimit | None = None,
        media: Sequence[PlacedRows] = (),
        log: Log | None = None,
        **fields: Any,
    ) -> Client:
        """Submit a request for ``n`` tokens; returns the client that gets its events.

        Args:
            log: of a detached answer, which goes on with what is there.
            limit: of its reasoning.
            media: tokens of the prompt that are rows.
        """
        self.n += 1
        client = Client(list(prompt))
        request = Generate(id=str(self.n), prompt="", max_tokens=n, **fields)
        tokens = Prompt(np.asarray(prompt, dtype=np.int32), "", reasoning_limit=limit, media=tuple(media))
        [client.answer] = self.scheduler.submit(
            PreparedRequest(request, tokens, client, Principal(principal), record=log)
        )
        return client

    async def answer(self, prompt: Sequence[int], n: int = 8, **fields: Any) -> Client:
        """Submit a request and wait for its end."""
        client = self.ask(prompt, n, **fields)
        await self.ended(client)
        return client

    async def ended(self, *clients: Client) -> None:
        with trio.fail_after(1000):
            for client in clients:
                await client.answer.done.wait()

    def read_on(self, client: Client) -> None:
        """Let a client that did not read go on."""
        client.has_room = True
        self.scheduler.wake()

    async def clean(self) -> None:
        """Wait until nothing runs, and check the bookkeeping against the engine."""
        with trio.fail_after(1000):
            await self.scheduler.wait_idle()
        self.scheduler.check_integrity()
        kv = self.scheduler.cache.statistics()
        assert (kv.sequences, kv.cells_reserved, kv.cells_used) == (0, 0, 0)
        assert self.engine.used_cells() == self.scheduler.cache.held()

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed since the start."""
        return self.scheduler.telemetry.prompt_tokens_total


@contextlib.asynccontextmanager
async def asking(
    engine: FakeEngine | None = None, files: MemoryFiles | None = None, in_thread: InThread = at_once, **values: Any
) -> AsyncIterator[Harness]:
    """A scheduler with settings by flat names; cancelled at the end.

    Args:
        files: where idle answers are saved; states that are there already can be loaded.
        in_thread: runs blocking calls.
    """
    engine = engine or FakeEngine()
    chosen = settings(**values)
    virtual = VirtualEngine(engine, settings=chosen.engine)
    scheduler = Scheduler(virtual, token_to_bytes, chosen, in_thread=in_thread)
    if files is not None:
        scheduler.offloader.open(files, files.scan())
    async with trio.open_nursery() as nursery:
        await nursery.start(scheduler.run)
        yield Harness(scheduler, engine)
        nursery.cancel_scope.cancel()
