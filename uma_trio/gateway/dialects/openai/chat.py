"""``POST /v1/chat/completions`` of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta
from starlette.responses import Response

from uma_trio.client import Eos, Event, Reasoning, Token, ToolCall, ToolCallDelta
from uma_trio.gateway.answer import sse
from uma_trio.gateway.dialects.common.conversation import (
    NO_REASONING,
    conversation_fields,
    reasoning_kwargs,
    without_noise,
)
from uma_trio.gateway.dialects.common.shapes import logprobs_of, probabilities
from uma_trio.gateway.dialects.common.tools import TOOL_NAMES, Tool
from uma_trio.gateway.dialects.openai.chunks import Chunks, finish_reason
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.extras import Extras, describe, head_of, render_prompt
from uma_trio.gateway.dialects.openai.messages import Message, chat_messages, template_fields, tool_fields
from uma_trio.gateway.dialects.openai.prompt_tokens import prompt_endpoints
from uma_trio.gateway.dialects.openai.resumable import ResumableChunks, last_position
from uma_trio.gateway.dialects.openai.sampling import SamplingFields, adapters_of
from uma_trio.gateway.dialects.openai.shapes import (
    AnswerMessage,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
)
from uma_trio.gateway.dialects.openai.shapes import Call as WholeCall
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS


class ChatRequest(SamplingFields, kw_only=True):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's and llama-server's: the answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """vLLM's and llama-server's: the answer is a new message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's and llama-server's: variables for the chat template."""
    reasoning_effort: str | None = None
    """Such as ``low``; ``none`` is no reasoning.  Others have an effect with templates that know them."""

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template."""
        return {**reasoning_kwargs(self.reasoning_effort), **(self.chat_template_kwargs or {})} or None

    def fields(self) -> dict[str, Any]:
        """As for all; no effort is no reasoning, unless there is a budget for it."""
        fields = super().fields()
        if self.reasoning_effort == NO_REASONING and fields.get("reasoning_budget") is None:
            fields["reasoning_budget"] = 0
        return fields


async def complete_chat(call: Call) -> Response:
    """Answer a chat, streamed or whole."""
    request, warnings = await call.read(ChatRequest)
    if not request.messages:
        raise invalid("messages is empty; send at least one", parameter="messages")
    sampling = request.fields()
    n = sampling.get("n") or 1
    chat = conversation_fields(
        chat_messages(request.messages),
        call.request.headers if n == 1 else {},
        session_id=request.session_id,
        cache_key=request.prompt_cache_key if n == 1 else None,
    )
    template = template_fields(request, chat["messages"])
    tools = tool_fields(request.tools, request.tool_choice, warnings)
    position = last_position(call.request.headers) if request.is_resumable else None
    name = call.id if position is None else position.answer_id
    head = await head_of(call, f"chatcmpl-{name}", request.model)
    description = None
    if request.verbose or call.config.http.verbose:
        chat = {**await call.daemon.with_pictures(chat)}
        offered = {} if tools["tool_choice"] == "none" else {"tools": tools["tools"]}
        prompt = await render_prompt(call, model=request.model, messages=chat["messages"], **template, **offered)
        description = await describe(call, request, sampling, [prompt])
    extras = Extras(request, description)
    fields = call.for_daemon(
        **sampling,
        adapters=await adapters_of(call, request),
        **chat,
        **template,
        **tools,
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        separate_reasoning=True,
        **extras.fields,
    )
    renderer = ChatChunks(head, call.id, extras, n=n, has_usage=request.includes_usage, warnings=warnings)
    if not (request.stream and request.is_resumable):
        return await call.answers(fields, renderer=renderer, is_streamed=request.stream)
    if position is not None:
        await call.ask(lambda client: client.answers("read", answer_id=name))  # or 404
        return call.stream_events(call.daemon.attach(name), ResumableChunks(renderer, name, position.number))
    fields |= {"detached": True, "admit_now": True}
    events = call.daemon.generate_stored(fields, goes_on=True)
    return call.stream_events(events, ResumableChunks(renderer, name))


async def _prompt(call: Call) -> tuple[list[int], list[str]]:
    request, warnings = await call.read(ChatRequest)
    messages = without_noise(chat_messages(request.messages))
    tools = tool_fields(request.tools, request.tool_choice, warnings)
    prompt = await call.tokenize_chat(
        model=request.model,
        messages=messages,
        tools=None if tools["tool_choice"] == "none" else tools["tools"],
        **template_fields(request, messages),
    )
    return prompt.tokens, warnings


def whole_calls(calls: Sequence[ToolCall]) -> list[WholeCall]:
    """The calls of an answer."""
    encode = msgspec.json.encode
    return [
        WholeCall(id=call.id, function=CalledFunction(name=call.name, arguments=encode(call.arguments).decode()))
        for call in calls
    ]


def call_delta(event: ToolCallDelta) -> CallDelta:
    """A part of a call: id and name in the first one, arguments in the others."""
    function = FunctionDelta(arguments=event.arguments or "")
    if event.name is None:
        return CallDelta(index=event.call, function=function)
    function.name = event.name
    return CallDelta(index=event.call, function=function, id=event.call_id, type="function")


class ChatChunks(Chunks):
    """Writes chat completions."""

    shape, whole_shape = ChatChunk, ChatCompletion

    def begin(self) -> bytes:
        """The role of each answer."""
        delta = Delta(role="assistant", content="")
        choices = [ChunkChoice(index=index, delta=delta, finish_reason=None) for index in range(self._n)]
        first = sse(self._chunk(choices[:1], {"warnings": self._warnings or UNSET}))
        return first + b"".join(sse(self._chunk([choice])) for choice in choices[1:])

    def choice(self, event: Event) -> ChunkChoice:
        """What is new of an answer."""
        choice = ChunkChoice(index=getattr(event, "index", None) or 0, delta=Delta(), finish_reason=None)
        match event:
            case Token():
                choice.delta.content = event.text
            case Reasoning():
                choice.delta.reasoning_content = event.text
            case ToolCallDelta():
                choice.delta.tool_calls = [call_delta(event)]
            case Eos():
                choice.finish_reason = finish_reason(event)
        if isinstance(event, Token | Reasoning) and (one := logprobs_of(event)) is not None:
            choice.logprobs = ChatLogprobs(content=probabilities([one]))
        return choice

    def whole_choice(self, event: Eos) -> ChatChoice:
        """All of an answer."""
        message = AnswerMessage(
            content=None if event.tool_calls and not event.text else event.text or "",
            refusal=None,
            reasoning_content=event.reasoning or UNSET,
            tool_calls=whole_calls(event.tool_calls) if event.tool_calls else UNSET,
        )
        logprobs = None if event.logprobs is None else ChatLogprobs(content=probabilities(event.logprobs))
        return ChatChoice(
            index=event.index or 0, message=message, logprobs=logprobs, finish_reason=finish_reason(event)
        )


ENDPOINTS = (
    OPENAI.post(
        "/v1/chat/completions",
        complete_chat,
        ChatRequest,
        ChatCompletion,
        event_shape=ChatChunk,
        field_names={**TOOL_NAMES, "answer_id": "Last-Event-ID"},
        is_batched=True,
    ),
    *prompt_endpoints("/v1/chat/completions", _prompt, ChatRequest, TOOL_NAMES),
)
