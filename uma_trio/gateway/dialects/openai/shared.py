"""What the endpoints of OpenAI's API share: errors, sampling parameters, messages, tools, usage, log probabilities.

Source: the OpenAI API reference; vLLM's and llama-server's names for parameters that OpenAI's API does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from uma_trio.client import Eos
from uma_trio.config.lists import MAX_ADAPTERS
from uma_trio.errors import (
    AdapterNotFound,
    BadRequest,
    ContextTooSmall,
    InvalidJson,
    MaxTokensTooLarge,
    ModelNotFound,
    PromptTooLarge,
    TooManyValues,
)
from uma_trio.gateway.dialects.contents import SEEING_ROLES, Picture, content_of, picture_of_url
from uma_trio.gateway.dialects.conversation import continues
from uma_trio.gateway.dialects.fields import fields_of, names_of, with_fields_of
from uma_trio.gateway.dialects.openai.constraints import CONSTRAINT_NAMES, Constrained
from uma_trio.gateway.dialects.openai.shapes import CompletionDetails, PromptDetails, Usage
from uma_trio.gateway.endpoint import Call, Dialect
from uma_trio.gateway.errors import HttpError, invalid, refused_json
from uma_trio.gateway.limits import QUOTA
from uma_trio.protocol.chat import MAX_MESSAGES
from uma_trio.protocol.json_cost import JsonCost
from uma_trio.protocol.messages import to_fields
from uma_trio.protocol.requests import MAX_BIASES

FINISH_REASONS: Final = {"cancelled": "stop", "error": "stop"}
"""Where the protocol's reason has no counterpart in OpenAI's API."""


INVALID_REQUEST: Final = "invalid_request_error"
"""The ``type`` of most errors that are up to the client."""

CODES: Final = {
    "E_GATEWAY_KEY": "invalid_api_key",
    "E_GATEWAY_METHOD": "method_not_supported",
    "E_GATEWAY_NOT_FOUND": "unknown_url",
    MaxTokensTooLarge.code: "invalid_value",
    BadRequest.code: "invalid_value",
    ContextTooSmall.code: "context_length_exceeded",
    PromptTooLarge.code: "context_length_exceeded",
    ModelNotFound.code: "model_not_found",
}
"""OpenAI's codes for our own."""


def error_type(error: HttpError) -> str:
    """The ``type`` that OpenAI's API gives such an error."""
    match error.status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "insufficient_quota" if error.code == QUOTA else "rate_limit_error"
        case 503:
            return "service_unavailable_error"
    return INVALID_REQUEST if error.status < 500 else "server_error"


def error_code(error: HttpError) -> str:
    """The ``code`` that OpenAI's API gives such an error; our own, if it has none."""
    match error.status:
        case 429:
            return "insufficient_quota" if error.code == QUOTA else "rate_limit_exceeded"
        case 503:
            return "server_is_overloaded"
    return CODES.get(error.code, error.code if error.status < 500 else "server_error")


def error_body(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error response, and the data of an error in a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error),
            "param": error.parameter,
            "code": error_code(error),
            "uma_code": error.code,
            "request_id": request_id,
        }
    }


class ImageUrl(msgspec.Struct):
    """Where a picture is."""

    url: str
    detail: Any = None
    """Has no effect: the projector decides how many tokens a picture has."""


class InputAudio(msgspec.Struct):
    """Sound."""

    data: str
    """The file as base64."""
    format: str = ""
    """Has no effect: the file says whether it is WAV, MP3 or FLAC."""


class ContentPart(msgspec.Struct):
    """A part of a message: a text, a picture or sound."""

    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None
    """A data URL, or an object with it; only a picture has one."""
    input_audio: InputAudio | None = None
    """Only sound has it."""


class FunctionCall(msgspec.Struct):
    """The function that a tool call names."""

    name: str
    arguments: str = ""
    """JSON text."""


class ToolCall(msgspec.Struct):
    """A call that the model has made earlier."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer; ``reasoning`` is another spelling."""
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_MESSAGES)] | None = None
    function_call: FunctionCall | None = None
    """A single call, from the time before ``tool_calls``."""
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(msgspec.Struct):
    """What a stream contains."""

    include_usage: bool = False
    resumable: bool = False
    """Chunks have ids, after which another request can go on; only of chat completions."""


FIELD_NAMES: Final = {
    **CONSTRAINT_NAMES,
    **names_of("openai"),
    "logprobs": ("top_logprobs", "n_probs", "logprobs"),
    "session_id": ("session_id", "prompt_cache_key"),
    "infill": "suffix",
    "chat_template_kwargs": ("chat_template_kwargs", "reasoning_effort", "reasoning"),
}
"""What fields of the socket protocol are called in requests of OpenAI's API, of vLLM and of llama-server."""

OPENAI: Final = Dialect("openai", error_body, FIELD_NAMES)


class Lora(msgspec.Struct):
    """An adapter of the model by its number, as llama-server names it."""

    id: int
    scale: float = 1.0


@with_fields_of("openai")
class Sampling(Constrained, kw_only=True):
    """Fields of a request that chat and plain completions share.  Bounds are those of the socket protocol."""

    model: str | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    lora: Annotated[list[Lora], Meta(max_length=MAX_ADAPTERS)] | None = None
    """LoRA adapters by their numbers, as in llama-server; those that it does not name are not used."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    """llama-server's: report in a stream how far the prefill is."""
    timings_per_token: bool = False
    """llama-server's: report timings with each event of a stream, and not only at its end."""
    verbose: bool = False
    """llama-server's: describe the request and its answer as ``__verbose``."""
    session_id: str | None = None
    """The session that this conversation is, as ``prompt_cache_key`` but with exactly this name."""
    prompt_cache_key: str | None = None
    """Names the client's own session; see ``gateway.dialects.conversation``."""
    user: Any = None
    """This and the next five have no effect, and need none."""
    metadata: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def is_resumable(self) -> bool:
        """Whether a stream goes on without its client, who can come back to it."""
        return self.stream_options is not None and self.stream_options.resumable

    def fields(self) -> dict[str, Any]:
        """These fields in the socket protocol.

        More ``max_tokens`` than there is room for count as no limit, here and in all dialects but Starling's: clients
        often have a large number in their settings, and an answer that fills the context says so.
        """
        given = {"model": self.model, "logit_bias": self.logit_bias, "constraint": self.constraint}
        return {**given, "fit_max_tokens": True, **fields_of(self, "openai")}


async def adapters_of(call: Call, request: Sampling) -> list[dict[str, Any]] | None:
    """The adapters that ``request`` chooses by their numbers, as in the socket protocol; ``None``: none.

    Raises:
        HttpError: the model has no such adapter.
    """
    if not request.lora:
        return None
    model = await call.daemon.model(request.model)
    found = []
    for number, each in enumerate(request.lora):
        if not 0 <= each.id < len(model.adapters):
            there = f"{len(model.adapters)} adapters" if model.adapters else "no adapters (--adapter NAME=FILE)"
            message = f"lora names the adapter {each.id}; {model.name} has {there}"
            raise HttpError(AdapterNotFound.http_status, AdapterNotFound.code, message, parameter=f"lora[{number}].id")
        found.append({"name": model.adapters[each.id].name, "scale": each.scale})
    return found


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages of the socket protocol.

    Raises:
        HttpError: one contains something other than texts and pictures, or nothing.
    """
    cost = JsonCost()
    return [_chat_message(index, message, cost) for index, message in enumerate(messages)]


def _chat_message(index: int, message: Message, cost: JsonCost) -> dict[str, Any]:
    """A message of the socket protocol.

    Args:
        cost: of the arguments of all calls.

    Raises:
        HttpError: it contains something other than texts and pictures, or nothing.
    """
    if message.content is None and message.role in ("system", "developer", "user"):
        raise invalid(f"a message of role {message.role} needs content", parameter=f"messages[{index}].content")
    fields: dict[str, Any] = {
        "role": "tool" if message.role == "function" else message.role,
        "content": _content(message.content, message.role, f"messages[{index}].content"),
        "reasoning": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name if message.role in ("tool", "function") else None,
    }
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [*calls, ToolCall(message.function_call)]
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{position}",
                "name": call.function.name,
                "arguments": arguments_of(
                    call.function.arguments, f"messages[{index}].tool_calls[{position}].function.arguments", cost
                ),
            }
            for position, call in enumerate(calls)
        ]
    return {name: value for name, value in fields.items() if value is not None}


class Templated(Protocol):
    """A request whose chat the template renders."""

    continue_final_message: bool | None
    add_generation_prompt: bool | None

    @property
    def template_kwargs(self) -> dict[str, Any] | None: ...


def template_fields(request: Templated, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of the socket protocol that say how the chat template ends a chat, and its variables.

    As in llama-server, the answer continues a last message that is a text of the assistant, if the client says nothing
    else.

    Raises:
        HttpError: the answer would be a new message and continue the last one.
    """
    goes_on, adds = request.continue_final_message, request.add_generation_prompt
    if goes_on and adds:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true; leave one of them out",
            parameter="continue_final_message",
        )
    if goes_on is None and not adds:
        goes_on = continues(messages)
    given = {
        "continue_final_message": goes_on or None,
        "add_generation_prompt": adds,
        "chat_template_kwargs": request.template_kwargs,
    }
    return {name: value for name, value in given.items() if value is not None}


def _content(content: str | list[ContentPart] | None, role: str, parameter: str) -> str | list[dict[str, Any]]:
    """The content of a message in the socket protocol.

    Raises:
        HttpError: a part is neither text nor a picture, or a picture is where none may be.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([_part(part, role, f"{parameter}[{n}]") for n, part in enumerate(content)], "")


def _part(part: ContentPart, role: str, parameter: str) -> str | Picture:
    if part.type == "image_url" and part.image_url is not None and role in SEEING_ROLES:
        if isinstance(part.image_url, str):
            return picture_of_url(part.image_url, f"{parameter}.image_url")
        return picture_of_url(part.image_url.url, f"{parameter}.image_url.url")
    if part.type == "input_audio" and part.input_audio is not None and role in SEEING_ROLES:
        return Picture(f"{parameter}.input_audio.data", part.input_audio.data, type="audio")
    if part.text is None:
        kinds = "text, pictures as image_url, or sound as input_audio" if role in SEEING_ROLES else "text"
        raise invalid(f"content of type {part.type!r} is not supported here; send {kinds}", parameter=parameter)
    return part.text


def arguments_of(text: str, parameter: str, cost: JsonCost) -> dict[str, Any]:
    """Arguments of a call as an object: they are JSON text on the wire, and templates need the object.

    Args:
        cost: of all texts of a request that are decoded like this.

    Raises:
        HttpError: they are something else, or have too many values.
    """
    try:
        cost.add(text.encode("utf-8", "surrogatepass"))
    except (InvalidJson, TooManyValues) as error:
        raise refused_json(error, parameter=parameter) from None
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid("arguments must be the text of a JSON object", parameter=parameter)
    return found


def session_fields(session_id: str | None, prompts: Sequence[object]) -> dict[str, Any]:
    """The fields of the socket protocol for the session of a prompt.

    Raises:
        HttpError: several prompts would be one session.
    """
    if session_id is not None and len(prompts) > 1:
        raise invalid("a session has one prompt at a time", parameter="session_id")
    return {} if session_id is None else {"session_id": session_id, "history": "replace"}


def usage_of(ends: Sequence[Eos], n: int) -> Usage:
    """The usage of all answers of a request.  A prompt counts once; it has ``n`` answers, which follow each other."""
    all_of, firsts = [eos.usage for eos in ends], [eos.usage for eos in ends[::n]]
    prompt, completion = sum(each.prompt_tokens for each in firsts), sum(each.completion_tokens for each in all_of)
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(each.cached_tokens for each in firsts)),
    )
    if any(each.reasoning_tokens is not None for each in all_of):
        reasoning = sum(each.reasoning_tokens or 0 for each in all_of)
        usage.completion_tokens_details = CompletionDetails(reasoning_tokens=reasoning)
    if any(each.energy_j is not None for each in all_of):
        usage.energy_j = round(sum(each.energy_j or 0.0 for each in all_of), 3)
    if (explanation := firsts[0].explanation) is not None:
        usage.explanation = {
            name: value for name, value in to_fields(explanation).items() if name not in ("event", "id")
        }
    return usage


def finish_reason(eos: Eos) -> str:
    """Why an answer ended, in OpenAI's words."""
    return FINISH_REASONS.get(eos.reason, eos.reason)
