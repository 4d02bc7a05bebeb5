"""Requests with a controller that are answered with events from a script, for tests of doors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio

from uma_trio.daemon.requests import Generation
from uma_trio.daemon.service import ModelService
from uma_trio.errors import UmaError
from uma_trio.protocol.events import Eos
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings, Usage

TIMINGS = Timings(queue_ms=0.0, ttft_ms=1.0, total_ms=2.0)


def eos(index: int, reason: str = "stop", *, sampled: int = 0, inserted: int = 0) -> Eos:
    usage = Usage(
        prompt_tokens=1, completion_tokens=sampled + inserted, sampled_tokens=sampled, inserted_tokens=inserted
    )
    return Eos(id="", index=index, reason=reason, usage=usage, timings=TIMINGS)  # type: ignore[arg-type]


def play(monkeypatch: pytest.MonkeyPatch, *script: Sequence[ServerEvent] | UmaError) -> list[Generate]:
    """Answer all requests for text from now on with ``script``, the events of each step together; returns the list of
    the requests."""
    found: list[Generate] = []

    async def serve(self: Generation, service: ModelService) -> None:
        found.append(self.request)
        for step in script:
            if isinstance(step, UmaError):
                raise step
            await trio.sleep(0.01)
            for event in step:
                self._sink.send(attrs.evolve(event, id=self.request.id))

    monkeypatch.setattr(Generation, "_serve", serve)
    return found
