"""What clients of llama-server and vLLM use next to OpenAI's API: health, tokens of texts, rendered chats.

The two servers have the same paths with different fields.  Requests may have either, and answers have both.

Source: the README of llama.cpp's server, and vLLM's page on its OpenAI-compatible server.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import TokenList
from uma_trio.gateway.answer import encode_items, json_response
from uma_trio.gateway.dialects.common.conversation import without_noise
from uma_trio.gateway.dialects.common.shapes import Shape, Warned
from uma_trio.gateway.dialects.common.tools import TOOL_NAMES, Tool
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.messages import Message, chat_messages, template_fields, tool_fields
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid
from uma_trio.gateway.guard import draining
from uma_trio.gateway.health import health_of_daemon
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS

TOKENS_PER_PIECE: Final = 4096
"""Tokens that are encoded in one piece, with their texts."""


class Health(Shape):
    """The daemon answers."""

    status: Literal["ok"]


class Piece(Shape):
    """A token, and its text; its bytes if they are no whole characters."""

    id: int
    piece: str | list[int]


class Tokens(Warned):
    """Tokens of a text or of a chat, with their texts if the request says ``with_pieces``."""

    tokens: list[int | Piece]
    count: int


class Detokenized(Warned):
    """The text of tokens, under two names."""

    content: str
    prompt: str


class Rendered(Warned):
    """A chat as the text that the model sees."""

    prompt: str


async def health(call: Call) -> Response:
    """The daemon answers, and does not stop.  How busy it is does not matter: ``/readyz`` says that."""
    if call.is_draining:
        raise draining()
    await health_of_daemon(call)
    return json_response(Health(status="ok"))


class TemplateFields(msgspec.Struct, kw_only=True):
    """How the chat template renders a chat."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    """Whether the chat ends with the beginning of an answer."""
    continue_final_message: bool | None = None
    """Whether it ends in the last message, which is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template."""
        return self.chat_template_kwargs


class TokenizeRequest(TemplateFields, kw_only=True):
    """A text, or a chat."""

    content: str | None = None
    """llama-server's name of the text."""
    prompt: str | None = None
    """vLLM's."""
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special: bool | None = None
    """llama-server's; its default is ``False``."""
    add_special_tokens: bool | None = None
    """vLLM's; its default is ``True``."""
    parse_special: bool = True
    with_pieces: bool = False
    """llama-server's: report each token of a text with what it spells."""


async def tokenize(call: Call) -> Response:
    """The tokens of a text or of a chat."""
    request, warnings = await call.read(TokenizeRequest)
    text = request.prompt if request.content is None else request.content
    if (text is None) == (request.messages is None):
        raise invalid("give a text as content or prompt, or messages")
    if text is None:
        prompt = await _render(call, request, request.messages or [], warnings)
    else:
        given = request.add_special_tokens if request.add_special is None else request.add_special
        add_special = request.content is None if given is None else given
        fields: dict[str, Any] = {
            "add_special": add_special,
            "parse_special": request.parse_special,
            "with_bytes": request.with_pieces,
            "model": request.model,
        }
        prompt = await call.ask(lambda client: client.tokenize(text, **fields), counts=True)
    tokens: list[Any] = prompt.tokens
    if prompt.bytes is not None:
        with_piece = partial(_with_piece, prompt.tokens, prompt.bytes)
        tokens = await encode_items(call.large_work, range(len(tokens)), with_piece, per_piece=TOKENS_PER_PIECE)
    return json_response(Tokens(tokens=tokens, count=len(tokens)), warnings=warnings)


def _with_piece(tokens: Sequence[int], spelled: Sequence[list[int]], n: int) -> Piece:
    """Token ``n`` with its text, or with its bytes if these are not whole characters."""
    try:
        return Piece(id=tokens[n], piece=bytes(spelled[n]).decode())
    except UnicodeDecodeError:
        return Piece(id=tokens[n], piece=spelled[n])


class DetokenizeRequest(msgspec.Struct):
    """Tokens."""

    tokens: list[int]
    model: str | None = None


async def detokenize(call: Call) -> Response:
    """The text of tokens: ``content`` for clients of llama-server, ``prompt`` for those of vLLM."""
    request, warnings = await call.read(DetokenizeRequest)
    text = await call.ask(lambda client: client.detokenize(request.tokens, model=request.model), counts=True)
    return json_response(Detokenized(content=text, prompt=text), warnings=warnings)


class TemplateRequest(TemplateFields, kw_only=True):
    """A chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


async def apply_template(call: Call) -> Response:
    """The text that the chat template makes of a chat."""
    request, warnings = await call.read(TemplateRequest)
    rendered = await _render(call, request, request.messages, warnings)
    return json_response(Rendered(prompt=rendered.text or ""), warnings=warnings)


async def _render(call: Call, request: TemplateFields, messages: list[Message], warnings: list[str]) -> TokenList:
    given = without_noise(chat_messages(messages))
    offered = tool_fields(request.tools, None, warnings)["tools"]
    template = template_fields(request, given)
    return await call.tokenize_chat(model=request.model, messages=given, tools=offered, **template)


ENDPOINTS = (
    OPENAI.get("/health", health, Health, needs_key=False),
    OPENAI.get("/v1/health", health, Health, needs_key=False),
    OPENAI.post(
        "/tokenize", tokenize, TokenizeRequest, Tokens, field_names={"text": ("content", "prompt"), **TOOL_NAMES}
    ),
    OPENAI.post("/detokenize", detokenize, DetokenizeRequest, Detokenized),
    OPENAI.post("/apply-template", apply_template, TemplateRequest, Rendered, field_names=TOOL_NAMES),
)
