"""``POST /api/chat`` and ``POST /api/generate`` of Ollama's API: lines of JSON, or one object."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from uma_trio.client import Eos, Event, Reasoning, Token
from uma_trio.gateway.answer import AnswerRenderer, json_line, json_response
from uma_trio.gateway.dialects.common.conversation import continues, conversation_fields
from uma_trio.gateway.dialects.common.shapes import iso_time, logprobs_of, probabilities
from uma_trio.gateway.dialects.common.tools import Tool, offered_tools
from uma_trio.gateway.dialects.ollama.dialect import OLLAMA, LineRenderer, find_model, model_name, ollama_name
from uma_trio.gateway.dialects.ollama.messages import (
    Images,
    KeepAlive,
    Message,
    chat_message,
    constraint_of,
    option_fields,
    with_images,
)
from uma_trio.gateway.dialects.ollama.shapes import AnswerMessage, ChatAnswer, Generated
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid
from uma_trio.gateway.guard import is_only_user
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS

DONE_REASONS: Final = {"tool_calls": "stop", "cancelled": "stop", "error": "stop"}
"""Where the protocol's reason has no counterpart in Ollama's API."""

UNLOADS: Final = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""Values of ``keep_alive`` that unload a model."""

Text = str | UnsetType
Calls = list[dict[str, Any]] | UnsetType
Line = Callable[..., ChatAnswer | Generated]
"""Makes an object of an answer of its text, its thinking, its calls, and the fields that all objects have."""


class Common(msgspec.Struct, kw_only=True):
    """Fields of both requests."""

    model: str
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    stream: bool = True
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """A text has no effect: the model reasons as it does."""
    keep_alive: KeepAlive = None
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
        return await _load(call, request, chat_line, warnings)
    tools = offered_tools(request.tools or (), warnings)
    messages = [chat_message(index, message) for index, message in enumerate(request.messages)]
    conversation = conversation_fields(messages, call.request.headers, session_id=request.session_id)
    return await _answer(
        call,
        request,
        chat_line,
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
        return await _load(call, request, _generated_line, warnings)
    if request.suffix:
        return await _answer(
            call, request, _generated_line, warnings, infill={"prefix": request.prompt, "suffix": request.suffix}
        )
    model = await find_model(call, request.model)
    if request.raw or ("chat" not in model.capabilities and not request.images):
        return await _answer(call, request, _generated_line, warnings, prompt=request.prompt)
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = [*system, {"role": "user", "content": with_images(request.prompt, request.images, "images")}]
    return await _answer(call, request, _generated_line, warnings, messages=messages)


async def _load(call: Call, request: Common, line: Line, warnings: list[str]) -> Response:
    """Load the model, or unload it if nobody else uses it."""
    model = await find_model(call, request.model)
    reason = "load"
    if UNLOADS.fullmatch(str(request.keep_alive)):
        if is_only_user(call.request.scope):
            model = await call.unless_disconnected(call.ask(lambda client: client.manage_model("release", model.name)))
        reason = "unload" if model.state == "unloaded" else "stop"
    elif model.state != "ready":
        await call.unless_disconnected(call.ask(lambda client: client.tokenize("", model=model.name)))
    name = ollama_name(model.name)
    return json_response(line("", model=name, created_at=iso_time(), done=True, done_reason=reason), warnings=warnings)


async def _answer(call: Call, request: Common, line: Line, warnings: list[str], **fields: Any) -> Response:
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
    lines = Lines(request.model, line, [*warnings, *option_warnings], call.id, has_thinking=request.think is not False)
    return await call.answers(fields, renderer=lines, is_streamed=request.stream)


def chat_line(text: str, thinking: Text = UNSET, tool_calls: Calls = UNSET, **fields: Any) -> ChatAnswer:
    """An object of ``/api/chat``."""
    return ChatAnswer(message=AnswerMessage(content=text, thinking=thinking, tool_calls=tool_calls), **fields)


def _generated_line(text: str, thinking: Text = UNSET, _: Calls = UNSET, **fields: Any) -> Generated:
    """An object of ``/api/generate``."""
    return Generated(response=text, thinking=thinking, **fields)


class Lines(LineRenderer[Event], AnswerRenderer):
    """Writes an answer as lines of JSON."""

    def __init__(
        self, model: str, line: Line, warnings: list[str], request_id: str, *, has_thinking: bool = True
    ) -> None:
        super().__init__(request_id)
        self._model = model
        self._line = line
        self._warnings = warnings
        self._has_thinking = has_thinking

    def render(self, event: Event) -> bytes:
        """A line for new text; for the end, a line with the calls if there are any, and the last line."""
        match event:
            case Eos():
                calls = b""
                if event.tool_calls:
                    calls = self._write("", tool_calls=_calls(event))
                return calls + json_line(self._last(event, UNSET))
            case Token() | Reasoning() if event.text or event.logprob is not None:
                one = logprobs_of(event)
                logprobs = UNSET if one is None else probabilities([one])
                if isinstance(event, Token):
                    return self._write(event.text, logprobs=logprobs)
                return self._write("", event.text if self._has_thinking else UNSET, logprobs=logprobs)
        return b""

    def _write(self, text: str, thinking: Text = UNSET, tool_calls: Calls = UNSET, **fields: Any) -> bytes:
        head = {"model": self._model, "created_at": iso_time(), "done": False}
        return json_line(self._line(text, thinking, tool_calls, **head, **fields))

    def whole(self, ends: Sequence[Eos]) -> object:
        """All in one object."""
        [eos] = ends
        return self._last(eos, _calls(eos))

    def _last(self, eos: Eos, tool_calls: Calls) -> object:
        return self._line(
            eos.text or "",
            eos.reasoning if eos.reasoning and self._has_thinking else UNSET,
            tool_calls,
            model=self._model,
            created_at=iso_time(),
            done=True,
            done_reason=DONE_REASONS.get(eos.reason, eos.reason),
            logprobs=UNSET if eos.logprobs is None else probabilities(eos.logprobs),
            warnings=self._warnings or UNSET,
            **durations(eos),
        )


def durations(eos: Eos) -> dict[str, Any]:
    """Counts and nanoseconds of the last object of an answer."""
    timings, usage = eos.timings, eos.usage
    first_ms = timings.ttft_ms if timings.ttft_ms is not None else timings.total_ms
    return {
        "total_duration": _ns(timings.total_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(max(0.0, first_ms - timings.queue_ms)),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(max(0.0, timings.total_ms - first_ms)),
    }


def _ns(ms: float) -> int:
    return round(1e6 * ms)


def _calls(eos: Eos) -> Calls:
    return [
        {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(eos.tool_calls or ())
    ] or UNSET


ENDPOINTS = (
    OLLAMA.post("/api/chat", chat, ChatRequest, ChatAnswer, event_shape=ChatAnswer),
    OLLAMA.post("/api/generate", generate, GenerateRequest, Generated, event_shape=Generated),
)
