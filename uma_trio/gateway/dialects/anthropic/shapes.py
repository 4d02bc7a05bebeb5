"""Shapes of answers in Anthropic's API."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.common.shapes import Object, Shape, Warned


class OutputDetails(Shape):
    """More about the answer's tokens."""

    thinking_tokens: int


class MessageUsage(Shape):
    """Tokens of a message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET


class AnswerMessage(Warned, tag_field="type", tag="message"):
    """The answer of the model: blocks of the types ``thinking``, ``text`` and ``tool_use``."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """An event of a streamed message.  Its other fields depend on its type, which is also its name."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(Warned):
    """The tokens of a chat."""

    input_tokens: int


class ModelInfo(Shape, tag_field="type", tag="model"):
    """A model, and what one request may use."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelInfoPage(Shape):
    """All models, or a page of them."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
