"""A scheduler with controllers, over a fake engine and a fake runtime in virtual time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import numpy as np
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine
from tests.support.fake_runtime import FakeRuntime, Module
from tests.support.serving import settings, token_to_bytes
from tests.support.state_files import MemoryFiles, at_once
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.controllers.state import ControlledRequest
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.principal import Principal
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Fork
from uma_trio.protocol.events import Eos, Failure, Token
from uma_trio.protocol.requests import Generate

START = 7
"""The token with which every controlled answer begins."""


class Client:
    """A sink that follows the events of one request, as a client does, and checks them."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.open = True
        self.tokens: dict[int, list[int]] = {0: []}
        """Tokens of each answer."""
        self.texts: dict[int, str] = {0: ""}
        self.ends: dict[int, Any] = {}
        """The last event of each answer that has ended."""

    @property
    def has_room(self) -> bool:
        return self.open

    @property
    def reasons(self) -> dict[int, str]:
        return {index: end.reason if isinstance(end, Eos) else end.code for index, end in self.ends.items()}

    def send(self, *events: Any) -> None:
        for event in events:
            self._add(event)

    def _add(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, Fork):
            assert event.index not in self.tokens
            assert event.parent not in self.ends
            self.tokens[event.index] = [*self.tokens[event.parent]]
            self.texts[event.index] = self.texts[event.parent]
            return
        index = event.index or 0
        assert index in self.tokens, "an event of an answer that was not announced"
        assert index not in self.ends, "an event of an answer that has ended"
        match event:
            case Token():
                if event.token_id is not None:
                    self.tokens[index].append(event.token_id)
                self.texts[index] += event.text
            case Backtrack():
                assert 0 < event.tokens <= len(self.tokens[index])
                assert self.texts[index].endswith(event.text)
                del self.tokens[index][-event.tokens :]
                self.texts[index] = self.texts[index][: len(self.texts[index]) - len(event.text)]
            case Eos() | Failure():
                self.ends[index] = event
            case ControllerOutput():
                pass

    def outputs(self, index: int = 0) -> str:
        """What a controller has printed."""
        return "".join(
            event.logs or "" for event in self.events if isinstance(event, ControllerOutput) and event.index == index
        )


@attrs.frozen
class Controlling:
    scheduler: Scheduler
    engine: FakeEngine
    runtime: FakeRuntime

    async def control(
        self,
        module: str,
        client: Client,
        n: int = 20,
        argument: Any = None,
        principal: Principal = Principal("uid:0"),  # noqa: B008  (it is immutable)
        deadline_at: float = math.inf,
        **fields: Any,
    ) -> Any:
        """Begin a controlled answer; returns its answers."""
        name = fields.pop("id", f"r{len(self.runtime.calls)}-{module}")
        generation = await self.runtime.instantiate(name, module, argument, [START])
        request = Generate(id=name, controller=module, max_tokens=n, **fields)
        return self.scheduler.submit(
            PreparedRequest(
                request,
                Prompt(np.array([START], np.int32), ""),
                client,
                principal,
                controlled=ControlledRequest(name=name, generation=generation),
                deadline_at=deadline_at,
            )
        )

    def ask(self, prompt: list[int], client: Client, n: int = 20, **fields: Any) -> Any:
        """Begin an answer without a controller."""
        request = Generate(id=fields.pop("id", "plain"), prompt="", max_tokens=n, **fields)
        tokens = Prompt(np.asarray(prompt, np.int32), "")
        return self.scheduler.submit(PreparedRequest(request, tokens, client, Principal("uid:0")))[0]

    async def done(self, *requests: Any) -> None:
        """Wait for the ends of all answers of ``requests``, also of those that fork meanwhile."""
        with trio.fail_after(1000):
            for answers in requests:
                for answer in answers:
                    await answer.done.wait()

    async def clean(self) -> None:
        """Wait until nothing runs, and check that nothing is left."""
        with trio.fail_after(1000):
            await self.scheduler.wait_idle()
            await trio.sleep(0.1)
        self.scheduler.check_integrity()
        assert self.engine.used_cells() == self.scheduler.cache.held()
        assert self.scheduler.cache.statistics().cells_reserved == 0
        assert not self.runtime.live, "the runtime still has answers that have ended"
        assert not self.runtime.waiting, "the runtime still has controllers of requests that have ended"


@contextlib.asynccontextmanager
async def controlling(
    modules: Mapping[str, Module],
    engine: FakeEngine | None = None,
    runtime: FakeRuntime | None = None,
    files: MemoryFiles | None = None,
    **values: Any,
) -> AsyncIterator[Controlling]:
    """A running scheduler.

    Args:
        files: where idle answers are saved.
        values: configuration by flat names.
    """
    engine, runtime = engine or FakeEngine(), runtime or FakeRuntime(modules)
    scheduler = Scheduler(VirtualEngine(engine), token_to_bytes, settings(**values), in_thread=at_once, runtime=runtime)
    if files is not None:
        scheduler.offloader.open(files, ())
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        nursery.start_soon(scheduler.run)
        yield Controlling(scheduler, engine, runtime)
        nursery.cancel_scope.cancel()
