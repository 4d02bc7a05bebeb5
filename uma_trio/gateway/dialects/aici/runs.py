"""Runs of a controller, or of a plain prompt: ``POST /v1/run``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import attrs
import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from uma_trio.client import AnswerTree, Backtrack, ControllerOutput, Eos, Event, Failure, Fork, PrefillProgress, Token
from uma_trio.gateway.answer import Renderer, sse
from uma_trio.gateway.dialects.aici.dialect import AICI
from uma_trio.gateway.dialects.common.shapes import Object
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.controllers import StorageWrite

NO_CONTROLLER: Final = "none"
"""The controller of a run that continues ``controller_arg`` as a prompt."""

BACKTRACKED: Final = " ↩ "
"""Stands in the text where a controller has removed some."""

DONE: Final = b"data: [DONE]\n\n"

FINISH_REASONS: Final = {"stop": "aici-stop", "length": "length", "deadlock": "deadlock", "cancelled": "abort"}


class RunEvent(msgspec.Struct):
    """An event of a run.  The last one is the text ``[DONE]``."""

    object: str
    forks: list[Object] | UnsetType = UNSET
    usage: Object | UnsetType = UNSET


class RunRequest(msgspec.Struct):
    """A controller, and how to sample."""

    controller: str
    """Module id or tag; ``none``: continue ``controller_arg``."""
    controller_arg: Any = None
    model: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    max_tokens: int | None = None


async def run(call: Call) -> Response:
    """Run a controller, and stream the text of its forks."""
    request, _ = await call.read(RunRequest)
    steered = {"controller": request.controller, "controller_arg": request.controller_arg}
    fields = call.for_daemon(
        **(steered if request.controller != NO_CONTROLLER else {}),
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        max_tokens=request.max_tokens,
    )
    if request.controller == NO_CONTROLLER and isinstance(request.controller_arg, str):
        fields |= {"prompt": request.controller_arg, "progress": True}
    elif request.controller == NO_CONTROLLER:
        raise invalid("controller_arg must be a prompt if there is no controller", parameter="controller_arg")
    name = request.model or (await call.daemon.model()).name
    renderer = RunRenderer(name, has_controller=request.controller != NO_CONTROLLER)
    return call.stream_events(_whole_batches(call.daemon.generate(fields)), renderer)


async def _whole_batches(batches: AsyncIterator[list[Event]]) -> AsyncIterator[list[list[Event]]]:
    """Hand each batch on as one: its events make one frame."""
    async with aclosing(batches) as closing:  # type: ignore[type-var]
        async for batch in closing:
            yield [batch]


@attrs.define
class _ForkFrame:
    """What is new of one answer."""

    text: str = ""
    error: str = ""
    logs: str = ""
    storage: list[Any] = attrs.field(factory=list)
    finish_reason: str | None = None

    def fields(self, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index}
        if self.finish_reason is not None:
            fields["finish_reason"] = self.finish_reason
        return fields | {"text": self.text, "error": self.error, "logs": self.logs, "storage": self.storage}


class RunRenderer(Renderer[list[Event]]):
    """Writes the frames of a run: one for all events that have arrived together."""

    keep_alive_frame = b""
    """The clients of this API take a comment for an error."""

    def __init__(self, model: str, *, has_controller: bool) -> None:
        self._model = model
        self._has_controller = has_controller
        self._tree = AnswerTree()
        self._failed: set[int] = set()
        """Answers whose error has been written."""
        self._prompt_tokens = 0

    def begin(self) -> bytes:
        """The name of the run."""
        return sse(
            {
                "id": f"run-{uuid.uuid4()}",
                "object": "initial-run",
                "created": int(time.time()),
                "model": self._model,
            }
        )

    def render(self, event: list[Event]) -> bytes:
        """One frame with all that is new; nothing if no answer has changed."""
        frames: dict[int, _ForkFrame] = {}
        for event_of_batch in event:
            if isinstance(event_of_batch, PrefillProgress) and not self._has_controller:
                self._prompt_tokens = event_of_batch.prompt_tokens
            answer = self._tree.add(event_of_batch)
            if answer is not None:
                self._add(frames.setdefault(answer.index, _ForkFrame()), answer.index, event_of_batch)
        return self._write(frames)

    def fail(self, error: HttpError) -> bytes:
        """Ends all answers that have not ended."""
        left = [answer.index for answer in self._tree if not answer.is_done] if len(self._tree) else [0]
        frames = {index: _ForkFrame(error=self._error(index, error.message), finish_reason="fail") for index in left}
        return self._write(frames) + DONE

    def end(self) -> bytes:
        """The end of the stream."""
        return DONE

    def _add(self, frame: _ForkFrame, index: int, event: Event) -> None:
        match event:
            case Fork():
                frame.text += self._tree[index].text  # all of it: clients have no text of this index
            case Token():
                frame.text += event.text
            case Backtrack():
                frame.text += BACKTRACKED
            case ControllerOutput():
                frame.logs += event.logs or ""
                frame.storage += [_write_var(write) for write in event.storage or ()]
                if event.error:
                    frame.error += self._error(index, event.error)
            case Eos():
                plain_end = event.reason == "stop" and not self._has_controller
                frame.finish_reason = "eos" if plain_end else FINISH_REASONS.get(event.reason, "fail")
            case Failure():
                frame.error += self._error(index, event.message)
                frame.finish_reason = "fail"

    def _error(self, index: int, message: str) -> str:
        """The error of an answer, the first time."""
        if index in self._failed:
            return ""
        self._failed.add(index)
        return message

    def _write(self, frames: dict[int, _ForkFrame]) -> bytes:
        if not frames:
            return b""
        sampled = sum(answer.sampled_tokens for answer in self._tree)
        inserted = self._prompt_tokens + sum(answer.inserted_tokens for answer in self._tree)
        return sse(
            {
                "object": "run",
                "forks": [frames[index].fields(index) for index in sorted(frames)],
                "usage": {"sampled_tokens": sampled, "ff_tokens": inserted, "cost": 2 * sampled + inserted},
            }
        )


def _write_var(write: StorageWrite) -> dict[str, Any]:
    return {
        "WriteVar": {
            "name": write.name,
            "value": write.content.hex(),
            "op": write.op.capitalize(),
            "when_version_is": write.when_version_is,
        }
    }


ENDPOINTS = (AICI.post("/v1/run", run, RunRequest, event_shape=RunEvent, field_names={"prompt": "controller_arg"}),)
