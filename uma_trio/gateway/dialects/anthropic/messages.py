"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens`` of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from uma_trio.client import Eos
from uma_trio.gateway.answer import PLACE, PreparedEvent, json_response, sse
from uma_trio.gateway.dialects.anthropic.chat import Chat, ChatMessages, tool_fields
from uma_trio.gateway.dialects.anthropic.dialect import ANTHROPIC, error_body
from uma_trio.gateway.dialects.anthropic.shapes import (
    AnswerMessage,
    MessageEvent,
    MessageUsage,
    OutputDetails,
    TokenCount,
)
from uma_trio.gateway.dialects.common.conversation import conversation_fields, without_noise
from uma_trio.gateway.dialects.common.fields import fields_of, with_fields_of
from uma_trio.gateway.dialects.common.parts import Part, PartRenderer
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError
from uma_trio.protocol.events import Logprobs
from uma_trio.protocol.usage import Usage

SIGNATURE: Final = "uma-trio"
"""All thinking blocks have it.  Clients send only blocks back that have one."""


@with_fields_of("anthropic")
class MessagesRequest(Chat, kw_only=True):
    """A request for the next message of a chat."""

    max_tokens: int
    """More than there is room for counts as no bound: clients always send a large number."""
    stream: bool = False
    metadata: Any = None
    """Has no effect: who asks is decided by the API key."""
    service_tier: Any = None
    """Has no effect."""
    session_id: str | None = None
    """The session that this conversation is.  Not of Anthropic's API."""


async def answer_messages(call: Call) -> Response:
    """Answer a chat, streamed or whole."""
    request, warnings = await call.read(MessagesRequest)
    chat = ChatMessages(request)
    tools, skipped = tool_fields(request)
    form = (request.output_config and request.output_config.format) or request.output_format
    fields = call.for_daemon(
        model=request.model,
        **conversation_fields(chat.messages, call.request.headers, session_id=request.session_id),
        continue_final_message=chat.is_begun,
        **tools,
        max_tokens=request.max_tokens,
        fit_max_tokens=True,
        **fields_of(request, "anthropic"),
        constraint={"json_schema": form.schema} if form else None,
        chat_template_kwargs=request.template_kwargs,
        separate_reasoning=True,
        reasoning_budget=request.thinking.budget if request.thinking else None,
        progress=request.stream or None,
    )
    head = {
        "id": f"msg_{call.id}",
        "role": "assistant",
        "model": request.model or (await call.daemon.model()).name,
        "warnings": [*warnings, *chat.warnings, *skipped] or UNSET,
    }
    has_reasoning = request.thinking is None or not request.thinking.is_hidden
    renderer = MessageEvents(head, call.id, request.max_tokens, has_reasoning=has_reasoning)
    return await call.answers(fields, renderer=renderer, is_streamed=request.stream)


async def count_tokens(call: Call) -> Response:
    """Count the tokens of a chat, as a request would prefill it."""
    request, warnings = await call.read(Chat)
    tools, skipped = tool_fields(request)
    chat = ChatMessages(request)
    prompt = await call.tokenize_chat(
        model=request.model,
        messages=without_noise(chat.messages),
        continue_final_message=chat.is_begun,
        tools=tools.get("tools"),
        chat_template_kwargs=request.template_kwargs,
    )
    return json_response(TokenCount(input_tokens=len(prompt.tokens)), warnings=[*warnings, *chat.warnings, *skipped])


def _block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        case "text":
            return {"type": "text", "text": part.text, "citations": None}
        case "call":
            arguments = msgspec.json.decode(part.text)
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _stop(eos: Eos, max_tokens: int) -> dict[str, Any]:
    reason = "end_turn"
    if eos.reason == "tool_calls":
        reason = "tool_use"
    elif eos.reason == "length":
        reason = "max_tokens" if eos.usage.completion_tokens >= max_tokens else "model_context_window_exceeded"
    elif eos.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": eos.stop}


def _usage(usage: Usage) -> MessageUsage:
    """Token counts.  The prompt is divided into what was in the KV cache and what was not."""
    thinking = usage.reasoning_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=UNSET if thinking is None else OutputDetails(thinking_tokens=thinking),
    )


class MessageEvents(PartRenderer):
    """Writes a message as server-sent events.

    Args:
        head: fields of the message.
        max_tokens: of the request.
        has_reasoning: whether it contains the reasoning.
    """

    keep_alive_frame = sse({"type": "ping"}, "ping")

    def __init__(self, head: dict[str, Any], request_id: str, max_tokens: int, *, has_reasoning: bool) -> None:
        super().__init__(has_reasoning=has_reasoning)
        self._head = head
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._piece: PreparedEvent
        """An event of the block that is written."""

    def begin(self) -> bytes:
        """The message without its content.  What of the prompt was in the KV cache is known at the end."""
        usage = _usage(Usage(prompt_tokens=self.prompt_tokens or 0, completion_tokens=0))
        message = AnswerMessage(**self._head, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=message) + self.keep_alive_frame

    def render_begin(self, part: Part) -> bytes:
        """A block that is still empty."""
        match part.kind:
            case "reasoning":
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": PLACE}
            case "text":
                block = {"type": "text", "text": ""}
                delta = {"type": "text_delta", "text": PLACE}
            case "call":
                block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": PLACE}
        name = "content_block_delta"
        self._piece = PreparedEvent({"type": name, "index": part.position, "delta": delta}, name)
        return _event("content_block_start", index=part.position, content_block=block)

    def render_piece(self, part: Part, text: str, logprobs: Logprobs | None) -> bytes:
        """The next piece of a block."""
        return self._piece.of(text)

    def render_end(self, part: Part) -> bytes:
        """The end of a block."""
        signature = b""
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signature = _event("content_block_delta", index=part.position, delta=delta)
        return signature + _event("content_block_stop", index=part.position)

    def render_last(self, eos: Eos) -> bytes:
        """Why the message ended, and the final usage."""
        return _event("message_delta", delta=_stop(eos, self._max_tokens), usage=_usage(eos.usage)) + _event(
            "message_stop"
        )

    def complete(self, eos: Eos) -> AnswerMessage:
        """The whole message."""
        content, stop = [*map(_block, self.parts)], _stop(eos, self._max_tokens)
        return AnswerMessage(**self._head, content=content, **stop, usage=_usage(eos.usage))

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return sse(error_body(error, self._request_id), "error")


def _event(name: str, **fields: Any) -> bytes:
    return sse({"type": name, **fields}, name)


ENDPOINTS: Final[Sequence[Endpoint]] = (
    ANTHROPIC.post("/v1/messages", answer_messages, MessagesRequest, AnswerMessage, event_shape=MessageEvent),
    ANTHROPIC.post("/v1/messages/count_tokens", count_tokens, Chat, TokenCount),
)
