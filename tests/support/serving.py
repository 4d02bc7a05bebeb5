"""The real daemon, listeners and connections included, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

from tests.support.fake_engine import FakeEngine, VirtualThread
from uma_trio import config
from uma_trio.client import Client, open_client
from uma_trio.daemon import listener
from uma_trio.daemon.server import Server
from uma_trio.models.prompt import Prompt, checked_size
from uma_trio.scheduling.cost import CostModel


@attrs.define
class FakePrompts:
    """A token for each byte, with 100 added so that none is EOG."""

    limits: config.Limits

    async def make(self, request: Any) -> Prompt:
        await trio.lowlevel.checkpoint()
        checked_size(request, self.limits)
        text = request.prompt if request.messages is None else "|".join(m.content for m in request.messages)
        return Prompt(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + 100, text)


def piece(token: int) -> bytes:
    """The fake model's tokens read as numbers."""
    return b"" if token == 0 else f"{token} ".encode()


@attrs.frozen
class FakeModel:
    engine: FakeEngine
    prompts: FakePrompts
    cost: CostModel = attrs.field(factory=CostModel)

    def piece(self, token: int) -> bytes:
        return piece(token)


@attrs.frozen
class Serving:
    """A running server and how to reach it."""

    server: Server
    engine: FakeEngine
    path: Path
    nursery: trio.Nursery

    def client(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
        return open_client(self.path, **options)

    async def settled(self) -> None:
        """Until nothing runs, and the books say that nothing is held."""
        with trio.fail_after(1000):
            while self.server.runner.jobs() or self.server.snapshot()["sessions"]:
                await trio.sleep(0.01)
            await self.server.runner.wait_idle()
        self.server.runner.check_integrity()
        kv = self.server.runner.cache.statistics()
        assert (kv.sequences, kv.cells_reserved, kv.cells_used) == (0, 0, 0)
        assert self.engine.used_cells() == self.server.runner.cache.held()
        assert self.server.snapshot()["outbox_bytes"] == 0


def settings(**values: Any) -> config.Config:
    """A configuration, by flat names."""
    return config.load(flags=values)


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine | None = None, **values: Any) -> AsyncIterator[Serving]:
    """A server on a socket of its own, cancelled at the end."""
    engine = engine or FakeEngine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "uma.sock")
        chosen = settings(**values)
        model = FakeModel(engine, FakePrompts(chosen.limits))
        server = Server(chosen, model, VirtualThread(engine))
        with listener.claimed(path):
            sock = listener.bind(path, backlog=16)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run, sock)
                yield Serving(server, engine, path, nursery)
                nursery.cancel_scope.cancel()
