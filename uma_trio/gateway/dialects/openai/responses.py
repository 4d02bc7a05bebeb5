"""``POST /v1/responses`` of OpenAI's API.

A request has the whole conversation, or continues a stored response or a conversation: see ``stored_responses``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta
from starlette.responses import Response

from uma_trio.gateway.answer import json_response
from uma_trio.gateway.batches.store import new_id
from uma_trio.gateway.dialects.common.conversation import (
    NO_REASONING,
    conversation_fields,
    reasoning_kwargs,
    session_of,
    without_noise,
)
from uma_trio.gateway.dialects.common.fields import fields_of, names_of, with_fields_of
from uma_trio.gateway.dialects.common.tools import Function
from uma_trio.gateway.dialects.common.tools import Tool as ChatTool
from uma_trio.gateway.dialects.openai.constraints import ResponseFormat, constraint_of_format
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.dialects.openai.messages import tool_fields
from uma_trio.gateway.dialects.openai.prompt_tokens import prompt_endpoints
from uma_trio.gateway.dialects.openai.response_events import ResponseEvents
from uma_trio.gateway.dialects.openai.response_items import Conversation, Item, has_files
from uma_trio.gateway.dialects.openai.shapes import (
    ResponseEvent,
    ResponseHead,
    ResponseObject,
)
from uma_trio.gateway.dialects.openai.stored_responses import (
    EARLIER_NAMES,
    StoredHead,
    find_earlier,
    fork,
    whole,
)
from uma_trio.gateway.dialects.openai.stored_responses import ENDPOINTS as STORED_ENDPOINTS
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS

INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool, which takes a text."""


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call.  Functions and custom tools are supported; others are skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Has no effect."""


class Format(msgspec.Struct, kw_only=True):
    """What the answer must look like."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Has no effect: answers always follow the schema."""


class TextSettings(msgspec.Struct):
    """What the text of an answer looks like."""

    format: Format | None = None
    verbosity: str | None = None
    """Has no effect."""


class ReasoningSettings(msgspec.Struct):
    """How the model reasons, if its chat template lets that be chosen."""

    effort: str | None = None
    summary: str | None = None
    """Has no effect: reasoning is never summarised."""


class Input(msgspec.Struct, kw_only=True):
    """What a request contains whether it is answered or only counted."""

    input: str | Annotated[list[Item], Meta(max_length=4 * MAX_MESSAGES)] | None = None
    """Required, unless something that is stored goes on."""
    instructions: str | None = None
    """Begins the conversation, as a system message."""
    model: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None

    def names_earlier(self) -> bool:
        """Whether it continues something that is stored."""
        return self.previous_response_id is not None or self.conversation is not None

    def new_input(self) -> str | Sequence[Item]:
        """What it adds to the conversation.

        Raises:
            HttpError: nothing, and there is no earlier conversation.
        """
        if self.input is None and not self.names_earlier():
            raise invalid("input is missing; give a text or a list of items", parameter="input")
        return () if self.input is None else self.input

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template."""
        return reasoning_kwargs(self.reasoning.effort if self.reasoning else None) or None


@with_fields_of("responses")
class ResponsesRequest(Input, kw_only=True):
    """A request for the next items of a conversation."""

    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    session_id: str | None = None
    """The session that this conversation is.  Not of OpenAI's API."""
    prompt_cache_key: str | None = None
    """Names the client's own session; see ``dialects.common.conversation``."""
    return_progress: bool = False
    """llama-server's: report in a stream how far the prefill is."""
    timings_per_token: bool = False
    """llama-server's: report timings with each piece of a stream, and not only at its end."""
    store: bool | None = None
    background: bool | None = None
    prompt: Any = None
    metadata: dict[str, Any] | None = None
    """This is echoed, and the next six have no effect, and need none."""
    client_metadata: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    user: Any = None


async def respond(call: Call) -> Response:
    """Answer a conversation, streamed, whole, or in the background."""
    request, warnings = await call.read(ResponsesRequest)
    _check(request, warnings)
    if request.background and call.daemon.is_background:
        raise invalid("background does not go with a batch, which waits for its answers", parameter="background")
    named = session_of(call.request.headers, session_id=request.session_id, cache_key=request.prompt_cache_key)
    if _is_stored(request, named, is_row=call.daemon.is_background):
        return await _respond_stored(call, request, warnings)
    conversation = Conversation(request.instructions, request.new_input())
    extras = Extras(request)
    fields, sampling = _fields(call, request, conversation, warnings)
    fields |= conversation_fields(
        conversation.messages,
        call.request.headers,
        session_id=request.session_id,
        cache_key=request.prompt_cache_key,
    )
    fields = call.for_daemon(**fields, **extras.fields)
    head = response_head(f"resp_{call.id}", request, await _model(call, request), sampling, warnings)
    events = ResponseEvents(head, call.id, extras, custom_tools=_custom_tools(request), seals=_seals(request))
    return await call.answers(fields, renderer=events, is_streamed=request.stream)


def _is_stored(request: ResponsesRequest, session: str | None, *, is_row: bool) -> bool:
    """Whether the response is stored: by default, unless the client has a session of its own, or wants or sends what is not kept.

    Args:
        is_row: the request is a row of a batch, whose results are kept anyway.
    """
    if request.store is not None:
        return request.store
    is_needed = request.background or request.names_earlier()
    others = is_row or session is not None or has_files(request.new_input())
    return bool(is_needed) or not (others or request.return_progress or request.timings_per_token)


async def _respond_stored(call: Call, request: ResponsesRequest, warnings: list[str]) -> Response:
    name, model = new_id("resp_"), await _model(call, request)
    past = await find_earlier(call, request.previous_response_id, request.conversation, request.model)
    conversation = Conversation(request.instructions, request.new_input(), () if past is None else past.messages)
    fields, sampling = _fields(call, request, conversation, warnings)
    session = name if past is None or past.session is None else past.session
    head = response_head(name, request, model, sampling, warnings)
    head.store, head.background = True, bool(request.background)
    head.previous_response_id = request.previous_response_id
    head.conversation = None if session == name else {"id": session}
    stored = StoredHead(head=head, session=session, custom_tools=sorted(_custom_tools(request)), seals=_seals(request))
    if past is not None and past.fork_of is not None:
        await fork(call, past.fork_of, name, request.model)
    fields = call.for_daemon(
        **fields,
        messages=list(without_noise(conversation.messages)),
        session_id=session,
        history="replace",
        id=name,
        detached=True,
        admit_now=not request.background,
        client_state=stored.encode(),
    )
    if request.background:
        await call.daemon.detach(fields)
        if request.stream:
            return call.stream_events(call.daemon.attach(name), stored.events())
        return json_response(stored.events().response("queued"))
    if request.stream:
        return call.stream_events(call.daemon.generate_stored(fields), stored.events())
    return json_response(await call.unless_disconnected(whole(call.daemon.generate_stored(fields), stored.events())))


def _fields(
    call: Call, request: ResponsesRequest, conversation: Conversation, warnings: list[str]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Fields for the daemon without the conversation itself, and the sampling parameters among them."""
    tools = _tool_fields(request, warnings)
    warnings += conversation.warnings
    if conversation.messages[-1]["role"] == "assistant" and "tool_calls" not in conversation.messages[-1]:
        warnings.append("the answer is a new message after the last one, which is the assistant's")
    has_logprobs = request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or ())
    form = request.text and request.text.format
    sampling = fields_of(request, "responses")
    fields = {
        "model": request.model,
        **tools,
        "fit_max_tokens": True,
        **sampling,
        "logprobs": (request.top_logprobs or 0) if has_logprobs else None,
        "constraint": constraint_of_format(_chat_format(form)) if form else None,
        "chat_template_kwargs": request.template_kwargs,
        "separate_reasoning": True,
        "reasoning_budget": 0 if request.reasoning and request.reasoning.effort == NO_REASONING else None,
    }
    return fields, sampling


async def _model(call: Call, request: ResponsesRequest) -> str:
    return request.model or (await call.daemon.model()).name


def _custom_tools(request: ResponsesRequest) -> frozenset[str]:
    return frozenset(tool.name for tool in request.tools or () if tool.type == "custom" and tool.name)


def _seals(request: ResponsesRequest) -> bool:
    return "reasoning.encrypted_content" in (request.include or ())


async def _prompt(call: Call) -> tuple[list[int], list[str]]:
    request, warnings = await call.read(Input)
    past = await find_earlier(call, request.previous_response_id, request.conversation, request.model)
    conversation = Conversation(request.instructions, request.new_input(), () if past is None else past.messages)
    messages = without_noise(conversation.messages)
    tools = _tool_fields(request, warnings)["tools"]
    tokenized = await call.tokenize_chat(
        model=request.model, messages=messages, tools=tools, chat_template_kwargs=request.template_kwargs
    )
    return tokenized.tokens, [*warnings, *conversation.warnings]


def _check(request: ResponsesRequest, warnings: list[str]) -> None:
    """Refuse what cannot be done, and add warnings about what is left out."""
    if request.store is False and (request.background or request.names_earlier()):
        name = "background" if request.background else "previous_response_id and conversation"
        raise invalid(f"store: false does not go with {name}", parameter="store")
    if request.prompt is not None:
        raise invalid("prompt names a stored template, and there are none here; send its text", parameter="prompt")
    if request.truncation == "auto":
        warnings.append("truncation had no effect: a conversation that is too long is refused")


def _tool_fields(request: Input, warnings: list[str]) -> dict[str, Any]:
    offered = [_chat_tool(number, tool) for number, tool in enumerate(request.tools or ())]
    choice = request.tool_choice
    match choice:
        case {"type": "custom", "name": str(name)}:
            choice = {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": names}:
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    fields = tool_fields(offered, choice, warnings)
    return {**fields, "parallel_tool_calls": request.parallel_tool_calls}


def _chat_tool(number: int, tool: Tool) -> ChatTool:
    """A tool as chat completions have it."""
    if tool.type not in ("function", "custom"):
        return ChatTool(tool.type)
    if tool.name is None:
        raise invalid(f"a tool of type {tool.type!r} needs a name", parameter=f"tools[{number}].name")
    parameters = INPUT if tool.type == "custom" else tool.parameters
    return ChatTool("function", Function(tool.name, tool.description, parameters))


def _chat_format(form: Format) -> ResponseFormat:
    """A format as chat completions have it."""
    if form.type == "json_schema":
        if form.schema is None:
            raise invalid("a format of type 'json_schema' needs a schema", parameter="text.format.schema")
        return ResponseFormat("json_schema", json_schema={"schema": form.schema})
    if form.type not in ("text", "json_object"):
        raise invalid("type must be 'text', 'json_object' or 'json_schema'", parameter="text.format.type")
    return ResponseFormat(form.type)


def response_head(
    name: str, request: ResponsesRequest, model: str, sampling: Mapping[str, Any], warnings: list[str]
) -> ResponseHead:
    """The head of a response that is not stored."""
    text = request.text or TextSettings()
    tools = [tool for tool in request.tools or () if tool.type in ("function", "custom")]
    shown = msgspec.to_builtins
    return ResponseHead(
        id=name,
        object="response",
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        tools=shown(tools),
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        max_output_tokens=sampling.get("max_tokens"),
        temperature=sampling.get("temperature"),
        top_p=sampling.get("top_p"),
        top_logprobs=request.top_logprobs,
        reasoning=shown(request.reasoning or ReasoningSettings()),
        text={"format": shown(text.format) or {"type": "text"}, "verbosity": text.verbosity},
        metadata=request.metadata or {},
        prompt_cache_key=request.prompt_cache_key,
        truncation="disabled",
        store=False,
        background=False,
        previous_response_id=None,
        conversation=None,
        warnings=warnings or UNSET,
    )


ENDPOINTS: Final[Sequence[Endpoint]] = (
    OPENAI.post(
        "/v1/responses",
        respond,
        ResponsesRequest,
        ResponseObject,
        event_shape=ResponseEvent,
        field_names={**names_of("responses"), **EARLIER_NAMES},
        is_batched=True,
    ),
    *prompt_endpoints("/v1/responses", _prompt, Input, EARLIER_NAMES),
    *STORED_ENDPOINTS,
)
