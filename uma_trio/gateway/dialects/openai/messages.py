"""Chats of OpenAI's API in the socket protocol: messages with texts, pictures, sound and calls, and the tools to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from uma_trio.errors import InvalidJson, TooManyValues
from uma_trio.gateway.dialects.common.contents import SEEING_ROLES, Picture, content_of, picture_of_url
from uma_trio.gateway.dialects.common.conversation import continues
from uma_trio.gateway.dialects.common.tools import Tool, offered_tools
from uma_trio.gateway.errors import invalid, json_refusal
from uma_trio.protocol.chat import MAX_MESSAGES
from uma_trio.protocol.json_cost import JsonCost

CHOICES: Final = "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}"


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
        raise json_refusal(error, parameter=parameter) from None
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid("arguments must be the text of a JSON object", parameter=parameter)
    return arguments


def tool_fields(
    tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None, warnings: list[str]
) -> dict[str, Any]:
    """The fields of the socket protocol; adds a warning for each tool that is skipped.

    Raises:
        HttpError: the choice is not possible.
    """
    offered = offered_tools(tools or (), warnings)
    if isinstance(choice, dict):
        allowed, choice = _choice(choice)
        if allowed is not None:
            offered = [tool for tool in offered if tool["name"] in allowed]
    elif choice not in (None, "auto", "none", "required"):
        raise invalid(f"tool_choice must be {CHOICES}", parameter="tool_choice")
    return {"tools": offered or None, "tool_choice": choice}


def _choice(choice: dict[str, Any]) -> tuple[frozenset[str] | None, str | dict[str, str]]:
    """The names of the tools that may be called, ``None`` for all, and the choice of the socket protocol."""
    match choice:
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return None, {"name": name}
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as tools},
        }:
            names = [_allowed_name(tool) for tool in tools]
            return frozenset(name for name in names if name is not None), mode
    raise invalid(f"tool_choice must be {CHOICES}", parameter="tool_choice")


def _allowed_name(tool: Any) -> str | None:
    match tool:
        case {"function": {"name": str() as name}} | {"name": str() as name}:
            return name
    return None
