"""Answers of OpenAI's Responses API: the numbered events of a stream, and whole responses."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from uma_trio.client import Eos, Event, PrefillProgress
from uma_trio.gateway.answer import sse
from uma_trio.gateway.dialects.common.parts import Part, PartRenderer
from uma_trio.gateway.dialects.common.shapes import probabilities
from uma_trio.gateway.dialects.openai.dialect import error_code
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.dialects.openai.response_items import custom_input, seal
from uma_trio.gateway.dialects.openai.shapes import ResponseHead, ResponseObject, ResponseStatus
from uma_trio.gateway.errors import LOST, HttpError
from uma_trio.protocol.events import Logprobs

ID_PREFIX: Final = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseEvents(PartRenderer):
    """Writes a response as server-sent events.  Each has a number.

    Args:
        head: what the response repeats of its request.
        extras: further fields of events.
        custom_tools: names of the tools that take a text in place of arguments.
        seals: whether reasoning comes as ``encrypted_content`` too.
        after: events up to this number are not written, because the client has them.
        is_stored: the stream can be resumed.  It just ends, without a last event, when the daemon is lost.
    """

    def __init__(
        self,
        head: ResponseHead,
        request_id: str,
        extras: Extras,
        *,
        custom_tools: frozenset[str],
        seals: bool,
        after: int = -1,
        is_stored: bool = False,
    ) -> None:
        super().__init__()
        self._head = head
        self._request_id = request_id
        self._extras = extras
        self._more: dict[str, Any] = {}
        """What ``extras`` say of the event that is being written."""
        self._custom_tools = custom_tools
        self._seals = seals
        self._after = after
        self._is_stored = is_stored
        self._number = 2  # those before are for begin()

    def begin(self) -> bytes:
        """The response without its output.  The first events may have been rendered before."""
        response = msgspec.structs.replace(self.response("in_progress"), output=[], usage=None)
        names = ("response.created", "response.in_progress")
        return b"".join(
            sse({"type": name, "sequence_number": number, "response": response}, name)
            for number, name in enumerate(names)
            if number > self._after
        )

    def render(self, event: Event) -> bytes:
        """What the client gets for one event."""
        self._more = self._extras.of(event)
        written = super().render(event)
        if isinstance(event, PrefillProgress) and self._more:
            return self._event("response.in_progress", response=self.response("in_progress"), **self._more)
        return written

    def render_begin(self, part: Part) -> bytes:
        """An item that is still empty."""
        added = self._item_event("response.output_item.added", part, item=self.item(part, "in_progress"))
        match part.kind:
            case "reasoning":
                return added + self._content_event("response.content_part.added", part, part=_reasoning_text(part))
            case "text":
                return added + self._content_event("response.content_part.added", part, part=_output_text(part))
            case "call":
                return added

    def render_piece(self, part: Part, text: str, logprobs: Logprobs | None) -> bytes:
        """The next piece of an item."""
        match part.kind:
            case "reasoning":
                return self._content_event("response.reasoning_text.delta", part, delta=text, **self._more)
            case "text":
                shown = probabilities([logprobs] if logprobs is not None else [])
                return self._content_event("response.output_text.delta", part, delta=text, logprobs=shown, **self._more)
            case "call" if part.name in self._custom_tools:
                return b""  # its input is known when its arguments are complete
            case "call":
                return self._item_event("response.function_call_arguments.delta", part, with_id=True, delta=text)

    def render_end(self, part: Part) -> bytes:
        """The end of an item, with all of it."""
        done = b""
        match part.kind:
            case "reasoning":
                done = self._content_event("response.reasoning_text.done", part, text=part.text)
                done += self._content_event("response.content_part.done", part, part=_reasoning_text(part))
            case "text":
                shown = probabilities(part.logprobs)
                done = self._content_event("response.output_text.done", part, text=part.text, logprobs=shown)
                done += self._content_event("response.content_part.done", part, part=_output_text(part))
            case "call" if part.name in self._custom_tools:
                name, text = "response.custom_tool_call_input", custom_input(part)
                done = self._item_event(f"{name}.delta", part, with_id=True, delta=text)
                done += self._item_event(f"{name}.done", part, with_id=True, input=text)
            case "call":
                name = "response.function_call_arguments.done"
                done = self._item_event(name, part, with_id=True, arguments=part.text)
        return done + self._item_event("response.output_item.done", part, item=self.item(part, self._status(part)))

    def render_last(self, eos: Eos) -> bytes:
        """The whole response."""
        status = _status_of(eos)
        name = "incomplete" if status == "cancelled" else status
        return self._event(f"response.{name}", response=self.complete(eos), **self._extras.of(eos))

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        if self._is_stored and error.kind in LOST:
            return b""
        message = f"{error.message} ({error.code}, request {self._request_id})"
        if error.retry_after_ms is not None:  # clients find the wait by these words
            message += f"; try again in {error.retry_after_ms} ms"
        return self._event("response.failed", response=self.failure(error, message))

    def failure(self, error: HttpError, message: str | None = None) -> ResponseObject:
        """The response of an answer that has ended with ``error``."""
        failure = {"code": error_code(error), "message": message or error.message}
        return msgspec.structs.replace(self.response("failed"), error=failure)

    def complete(self, eos: Eos) -> ResponseObject:
        """The response of an answer that has ended."""
        return self.response(_status_of(eos))

    def response(self, status: ResponseStatus) -> ResponseObject:
        """The response with the items that have been written."""
        eos = self.eos
        return ResponseObject(
            **msgspec.structs.asdict(self._head),
            status=status,
            output=[self.item(part, self._status(part)) for part in self.parts],
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=None if eos is None else _usage(eos),
        )

    def item(self, part: Part, status: ResponseStatus) -> dict[str, Any]:
        """One item of the output."""
        fields: dict[str, Any] = {"id": self._id(part), "status": status}
        is_done = status != "in_progress"
        match part.kind:
            case "reasoning":
                sealed = seal(part.text) if self._seals and is_done else None
                content = [_reasoning_text(part)] if is_done else []
                return {**fields, "type": "reasoning", "summary": [], "content": content, "encrypted_content": sealed}
            case "text":
                content = [_output_text(part)] if is_done else []
                return {**fields, "type": "message", "role": "assistant", "content": content}
            case "call":
                fields |= {"call_id": part.call_id, "name": part.name}
                if part.name in self._custom_tools:
                    return {**fields, "type": "custom_tool_call", "input": custom_input(part) if is_done else ""}
                return {**fields, "type": "function_call", "arguments": part.text}

    def _status(self, part: Part) -> ResponseStatus:
        """Whether an item was cut: only the last one can be."""
        was_cut = part is self.parts[-1] and self.eos is not None and self.eos.reason == "length"
        return "incomplete" if was_cut or not part.is_complete else "completed"

    def _id(self, part: Part) -> str:
        return f"{ID_PREFIX[part.kind]}_{self._request_id}_{part.position}"

    def _content_event(self, name: str, about: Part, **fields: Any) -> bytes:
        return self._item_event(name, about, with_id=True, content_index=0, **fields)

    def _item_event(self, name: str, about: Part, *, with_id: bool = False, **fields: Any) -> bytes:
        item_id = {"item_id": self._id(about)} if with_id else {}
        return self._event(name, **item_id, output_index=about.position, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self._after:
            return b""
        return sse({"type": name, "sequence_number": number, **fields}, name)


def _status_of(eos: Eos) -> ResponseStatus:
    statuses: dict[str, ResponseStatus] = {"length": "incomplete", "cancelled": "cancelled"}
    return statuses.get(eos.reason, "completed")


def _reasoning_text(part: Part) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": part.text}


def _output_text(part: Part) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": probabilities(part.logprobs)}


def _usage(eos: Eos) -> dict[str, Any]:
    usage = eos.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
