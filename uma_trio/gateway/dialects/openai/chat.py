"""``POST /v1/chat/completions`` of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Eos, Event, PrefillProgress, Reasoning, Token, ToolCallDelta
from uma_trio.gateway.answer import COMMENT, EVENT_STREAM, PLACE, PreparedEvent, json_response, sse
from uma_trio.gateway.dialects.conversation import NO_REASONING, conversation_fields, reasoning_kwargs, without_noise
from uma_trio.gateway.dialects.llama.extras import Extras, describe, head_of, rendered
from uma_trio.gateway.dialects.openai.resumable import ResumableChunks, last_place
from uma_trio.gateway.dialects.openai.shapes import ChatChunk, ChatCompletion, InputTokens, PromptTokens
from uma_trio.gateway.dialects.openai.shared import (
    OPENAI,
    Message,
    Sampling,
    adapters_of,
    chat_messages,
    error_body,
    finish_reason,
    template_fields,
    usage_body,
)
from uma_trio.gateway.dialects.openai.tools import TOOL_NAMES, Tool, call_delta, tool_fields, whole_calls
from uma_trio.gateway.dialects.parts import logprobs_body, logprobs_of
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS


class ChatRequest(Sampling, kw_only=True):
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
        found = super().fields()
        if self.reasoning_effort == NO_REASONING and found.get("reasoning_budget") is None:
            found["reasoning_budget"] = 0
        return found

    def template_fields(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See ``openai.template_fields``."""
        return template_fields(
            messages,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.template_kwargs,
        )


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
    template = request.template_fields(chat["messages"])
    tools = tool_fields(request.tools, request.tool_choice, warnings)
    place = last_place(call.request.headers) if request.is_resumable else None
    name = call.id if place is None else place.answer_id
    head = {"id": f"chatcmpl-{name}", "created": int(time.time()), **await head_of(call, request.model)}
    description = None
    if request.verbose or call.config.http.verbose:
        offered = {} if tools["tool_choice"] == "none" else {"tools": tools["tools"]}
        prompt = await rendered(call, model=request.model, messages=chat["messages"], **template, **offered)
        description = await describe(call, request, head, sampling, [prompt] * n)
    extras = Extras(request, description)
    fields = call.for_daemon(
        **sampling,
        adapters=await adapters_of(call, request),
        **chat,
        **template,
        **tools,
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        constraint=request.constraint,
        separate_reasoning=True,
        **extras.fields,
    )
    if request.stream:
        renderer = ChatChunks(head, call.id, extras, n=n, usage=request.includes_usage, warnings=warnings)
        if not request.is_resumable:
            return call.stream(fields, renderer)
        if place is not None:
            await call.ask(lambda client: client.answers("read", answer_id=name))  # or 404
            return call.stream_events(call.daemon.attach(name), ResumableChunks(renderer, name, place.number))
        fields |= {"detached": True, "admit_now": True}
        events = call.daemon.generate_stored(fields, goes_on=True)
        return call.stream_events(events, ResumableChunks(renderer, name))
    ends = await call.unless_disconnected(call.daemon.complete(fields))
    return json_response({**_completion(head, ends, warnings), **extras.at_end(ends)})


async def count_input(call: Call) -> Response:
    """Count the tokens of a chat, as a request would prefill it."""
    tokens, warnings = await _prompt(call)
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)}, warnings=warnings)


async def render(call: Call) -> Response:
    """The tokens of a chat, as a request would prefill them."""
    tokens, warnings = await _prompt(call)
    return json_response({"token_ids": tokens}, warnings=warnings)


async def _prompt(call: Call) -> tuple[list[int], list[str]]:
    request, warnings = await call.read(ChatRequest)
    messages = without_noise(chat_messages(request.messages))
    tools = tool_fields(request.tools, request.tool_choice, warnings)
    found = await call.tokenize_chat(
        model=request.model,
        messages=messages,
        tools=None if tools["tool_choice"] == "none" else tools["tools"],
        **request.template_fields(messages),
    )
    return found.tokens, warnings


def _completion(head: dict[str, Any], ends: list[Eos], warnings: list[str]) -> dict[str, Any]:
    body = {
        **head,
        "object": "chat.completion",
        "choices": [_choice(eos) for eos in ends],
        "usage": usage_body(*ends),
    }
    return {**body, "warnings": warnings} if warnings else body


def _choice(eos: Eos) -> dict[str, Any]:
    content = None if eos.tool_calls and not eos.text else eos.text or ""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if eos.reasoning:
        message["reasoning_content"] = eos.reasoning
    if eos.tool_calls:
        message["tool_calls"] = whole_calls(eos.tool_calls)
    return {
        "index": eos.index or 0,
        "message": message,
        "logprobs": {"content": logprobs_body(eos.logprobs)} if eos.logprobs is not None else None,
        "finish_reason": finish_reason(eos),
    }


class ChatChunks:
    """Writes a chat completion as server-sent events.

    Args:
        head: fields of each chunk.
        extras: further fields of chunks.
        n: number of answers.
        usage: whether a last chunk has the usage.
        warnings: for the first chunk.
    """

    media_type = EVENT_STREAM
    keep_alive_frame = COMMENT

    def __init__(
        self, head: dict[str, Any], request_id: str, extras: Extras, *, n: int, usage: bool, warnings: list[str]
    ) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._request_id = request_id
        self._extras = extras
        self._n = n
        self._usage = usage
        self._warnings = warnings
        self._ends: list[Eos] = []
        self._prepared: dict[tuple[int, str], PreparedEvent] = {}

    def begin(self) -> bytes:
        """The role of each answer."""
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._n)]
        if self._warnings:
            chunks[0]["warnings"] = self._warnings
        return b"".join(map(sse, chunks))

    def render(self, event: Event) -> bytes:
        """One chunk for each event that has something new."""
        more = self._extras.of(event)
        match event:
            case Token():
                return self._delta(event, "content", more)
            case Reasoning():
                return self._delta(event, "reasoning_content", more)
            case ToolCallDelta():
                return sse(self._chunk(event.index or 0, {"tool_calls": [call_delta(event)]}))
            case PrefillProgress() if more:
                return sse({**self._chunk(event.index or 0, {}), **more})
            case Eos():
                self._ends.append(event)
                is_last = len(self._ends) == self._n and not self._usage
                at_end = self._extras.at_end(self._ends) if is_last else {}
                return sse({**self._chunk(event.index or 0, {}, finish_reason=finish_reason(event)), **at_end})
        return b""

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return sse(error_body(error, self._request_id))

    def end(self) -> bytes:
        """The usage, if it is wanted, and the mark of the end."""
        usage = b""
        if self._usage:
            at_end = self._extras.at_end(self._ends)
            usage = sse({**self._head, "choices": [], "usage": usage_body(*self._ends), **at_end})
        return usage + b"data: [DONE]\n\n"

    def _delta(self, event: Token | Reasoning, name: str, more: Mapping[str, Any]) -> bytes:
        if not event.text and event.logprob is None:
            return b""
        index = event.index or 0
        if event.logprob is None and not more:
            if (index, name) not in self._prepared:
                self._prepared[index, name] = PreparedEvent(self._chunk(index, {name: PLACE}))
            return self._prepared[index, name].of(event.text)
        chunk = self._chunk(index, {name: event.text})
        if (logprobs := logprobs_of(event)) is not None:
            chunk["choices"][0]["logprobs"] = {"content": logprobs_body([logprobs])}
        return sse({**chunk, **more})

    def _chunk(self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._usage else {})}


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        dialect=OPENAI,
        answer=complete_chat,
        shapes=(ChatCompletion,),
        event_shape=ChatChunk,
        body=ChatRequest,
        field_names=TOOL_NAMES,
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions/input_tokens",
        dialect=OPENAI,
        answer=count_input,
        shapes=(InputTokens,),
        body=ChatRequest,
        field_names=TOOL_NAMES,
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions/render",
        dialect=OPENAI,
        answer=render,
        shapes=(PromptTokens,),
        body=ChatRequest,
        field_names=TOOL_NAMES,
    ),
)
