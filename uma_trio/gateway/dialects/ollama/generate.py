"""``POST /api/chat`` and ``POST /api/generate`` of Ollama's API: lines of JSON, or one object."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import attrs
import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Eos, Event, Reasoning, Token
from uma_trio.gateway.answer import NDJSON, json_line, json_response
from uma_trio.gateway.dialects.conversation import continues, conversation_fields
from uma_trio.gateway.dialects.ollama.shapes import ChatAnswer, Generated
from uma_trio.gateway.dialects.ollama.shared import (
    OLLAMA,
    Images,
    Message,
    chat_message,
    constraint_of,
    durations,
    find_model,
    iso_time,
    model_name,
    ollama_name,
    option_fields,
    with_images,
)
from uma_trio.gateway.dialects.openai.tools import Tool, offered_tools
from uma_trio.gateway.dialects.parts import logprobs_body, logprobs_of
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.gateway.guard import is_only_user
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS

DONE_REASONS: Final = {"tool_calls": "stop", "cancelled": "stop", "error": "stop"}
"""Where the protocol's reason has no counterpart in Ollama's API."""

UNLOADS: Final = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""Values of ``keep_alive`` that unload a model."""

Shape = Callable[[Event], dict[str, Any]]
"""What an event, or a whole answer, contributes to an object of the answer."""


class Common(msgspec.Struct, kw_only=True):
    """Fields of both requests."""

    model: str
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    stream: bool = True
    think: bool | str | None = None
    keep_alive: str | float | None = None
    """0 without messages or a prompt unloads the model, for an administrator, if nobody else uses it.  Otherwise it has no
    effect: the settings of the model decide."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatRequest(Common, kw_only=True):
    """A request for the next message of a chat.  Without messages it asks whether the model is there."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    session_id: str | None = None
    """The session that this conversation is.  Not of Ollama's API."""


class GenerateRequest(Common, kw_only=True):
    """A request for the answer to one prompt.  Without a prompt it asks whether the model is there."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    """What stands after the answer, which fills the gap between the prompt and this."""
    template: str | None = None
    images: Images | None = None
    context: list[int] | None = None


async def chat(call: Call) -> Response:
    """Answer a chat."""
    request, warnings = await call.read(ChatRequest)
    if not request.messages:
        return await _loaded(call, request, {"message": {"role": "assistant", "content": ""}}, warnings)
    tools = offered_tools(request.tools or (), warnings)
    messages = [chat_message(index, message) for index, message in enumerate(request.messages)]
    conversation = conversation_fields(messages, call.request.headers, session_id=request.session_id)
    return await _answer(
        call,
        request,
        _chat,
        warnings,
        **conversation,
        continue_final_message=continues(messages) or None,  # as in Ollama
        tools=tools or None,
    )


async def generate(call: Call) -> Response:
    """Answer a prompt, through the chat template unless it is raw."""
    request, warnings = await call.read(GenerateRequest)
    for name in ("template", "context"):
        if getattr(request, name):
            raise invalid(f"{name} is not supported", parameter=name)
    if request.images and (request.raw or request.suffix):
        raise invalid("images go through the chat template: leave out raw and suffix", parameter="images")
    if not request.prompt and not request.suffix and not request.images:
        return await _loaded(call, request, {"response": ""}, warnings)
    if request.suffix:
        return await _answer(
            call, request, _generated, warnings, infill={"prefix": request.prompt, "suffix": request.suffix}
        )
    model = await find_model(call, request.model)
    if request.raw or ("chat" not in model.capabilities and not request.images):
        return await _answer(call, request, _generated, warnings, prompt=request.prompt)
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = [*system, {"role": "user", "content": with_images(request.prompt, request.images, "images")}]
    return await _answer(call, request, _generated, warnings, messages=messages)


async def _loaded(call: Call, request: Common, empty: dict[str, Any], warnings: list[str]) -> Response:
    """Load the model, or unload it if nobody else uses it."""
    model = await find_model(call, request.model)
    reason = "load"
    if UNLOADS.fullmatch(str(request.keep_alive)):
        if is_only_user(call.request.scope):
            model = await call.unless_disconnected(call.ask(lambda client: client.manage_model("release", model.name)))
        reason = "unload" if model.state == "unloaded" else "stop"
    elif model.state != "ready":
        await call.unless_disconnected(call.ask(lambda client: client.tokenize("", model=model.name)))
    head = {"model": ollama_name(model.name), "created_at": iso_time()}
    return json_response({**head, **empty, "done": True, "done_reason": reason}, warnings=warnings)


async def _answer(call: Call, request: Common, shape: Shape, warnings: list[str], **fields: Any) -> Response:
    options, option_warnings = option_fields(request.options)
    fields = call.for_daemon(
        **fields,
        **options,
        fit_max_tokens=True,
        model=model_name(request.model),
        constraint=constraint_of(request.format),
        separate_reasoning=True if "messages" in fields else None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    warnings = [*warnings, *option_warnings]
    if request.think is False:
        shape = _without_thinking(shape)
    if request.stream:
        return call.stream(fields, _Lines(request.model, shape, warnings, call.id))
    (eos,) = await call.unless_disconnected(call.daemon.complete(fields))
    return json_response(_last(request.model, shape(eos), eos, warnings))


def _last(model: str, shaped: dict[str, Any], eos: Eos, warnings: list[str]) -> dict[str, Any]:
    return {
        "model": model,
        "created_at": iso_time(),
        **shaped,
        "done": True,
        "done_reason": DONE_REASONS.get(eos.reason, eos.reason),
        **durations(eos),
        **({"warnings": warnings} if warnings else {}),
    }


def _chat(event: Event) -> dict[str, Any]:
    """The part of an object of ``/api/chat`` that one event, or a whole answer, decides."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    match event:
        case Token():
            message["content"] = event.text
        case Reasoning():
            message["thinking"] = event.text
        case Eos():
            message["content"] = event.text or ""
            if event.reasoning:
                message["thinking"] = event.reasoning
            if event.tool_calls:
                message["tool_calls"] = [
                    {"id": each.id, "function": {"index": index, "name": each.name, "arguments": each.arguments}}
                    for index, each in enumerate(event.tool_calls)
                ]
    return {"message": message, **_logprobs(event)}


def _generated(event: Event) -> dict[str, Any]:
    """The part of an object of ``/api/generate`` that one event, or a whole answer, decides."""
    message = _chat(event)["message"]
    thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
    return {"response": message["content"], **thinking, **_logprobs(event)}


def _logprobs(event: Event) -> dict[str, Any]:
    match event:
        case Token() | Reasoning() if (one := logprobs_of(event)) is not None:
            return {"logprobs": logprobs_body([one])}
        case Eos(logprobs=list(found)):
            return {"logprobs": logprobs_body(found)}
    return {}


def _without_thinking(shape: Shape) -> Shape:
    def shaped(event: Event) -> dict[str, Any]:
        found = shape(event)
        found.pop("thinking", None)
        found.get("message", {}).pop("thinking", None)
        return found

    return shaped


class _Lines:
    """Writes an answer as lines of JSON.  Clients parse every line, so there is nothing that keeps a connection alive."""

    media_type = NDJSON
    keep_alive_frame = b""

    def __init__(self, model: str, shape: Shape, warnings: list[str], request_id: str) -> None:
        self._model = model
        self._shape = shape
        self._warnings = warnings
        self._request_id = request_id

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def render(self, event: Event) -> bytes:
        """A line for new text; for the end, a line with the calls if there are any, and the last line."""
        match event:
            case Eos():
                calls = self._line(event) if event.tool_calls else b""
                last = attrs.evolve(event, tool_calls=None)
                return calls + json_line(_last(self._model, self._shape(last), last, self._warnings))
            case Token() | Reasoning() if event.text or event.logprob is not None:
                return self._line(event)
        return b""

    def _line(self, event: Event) -> bytes:
        head = {"model": self._model, "created_at": iso_time()}
        return json_line({**head, **self._shape(event), "done": False})

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return json_line(OLLAMA.error_body(error, self._request_id))

    def end(self) -> bytes:
        """Nothing: the last line says that it is the last."""
        return b""


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/chat",
        dialect=OLLAMA,
        answer=chat,
        shapes=(ChatAnswer,),
        event_shape=ChatAnswer,
        body=ChatRequest,
    ),
    Endpoint(
        method="POST",
        path="/api/generate",
        dialect=OLLAMA,
        answer=generate,
        shapes=(Generated,),
        event_shape=Generated,
        body=GenerateRequest,
    ),
)
