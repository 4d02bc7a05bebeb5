"""Requests with a controller that are answered with events from a script, for tests of doors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from uma_trio.daemon.service import Generation, ModelService
from uma_trio.daemon.serving.sequence import EventSink
from uma_trio.errors import UmaError
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos, Timings, Usage
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate

TIMINGS = Timings(queue_ms=0.0, ttft_ms=1.0, total_ms=2.0)


def eos(index: int, reason: str = "stop", *, sampled: int = 0, inserted: int = 0) -> Eos:
    usage = Usage(
        prompt_tokens=1, completion_tokens=sampled + inserted, sampled_tokens=sampled, inserted_tokens=inserted
    )
    return Eos(id="", index=index, reason=reason, usage=usage, timings=TIMINGS)  # type: ignore[arg-type]


class ScriptedGeneration(Generation):
    """Sends the events of a script, those of one step together."""

    script: Sequence[Sequence[ServerEvent] | UmaError] = ()
    requests: list[Generate]

    async def run(self) -> None:
        self.requests.append(self.request)
        for step in self.script:
            if isinstance(step, UmaError):
                raise step
            await trio.sleep(0.01)
            for event in step:
                self._sink.send(attrs.evolve(event, id=self.request.id))


def play(service: ModelService, *script: Sequence[ServerEvent] | UmaError) -> list[Generate]:
    """Answer all requests of ``service`` from now on with ``script``; returns the list of the requests."""
    found: list[Generate] = []
    cls = type("Scripted", (ScriptedGeneration,), {"script": script, "requests": found})

    def answering(
        request: Generate, principal: Principal, sink: EventSink, *, began: float, scope: trio.CancelScope
    ) -> Generation:
        made: Generation = cls(service, request, principal, sink, began, scope)
        return made

    service.answering = answering  # type: ignore[method-assign, assignment]
    return found
