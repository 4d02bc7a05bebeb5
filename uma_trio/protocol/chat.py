"""Messages of a chat, tools that a model may call, and the bounds of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec
from msgspec import Meta

from uma_trio.errors import BadRequest
from uma_trio.protocol.types import Name
from uma_trio.protocol.usage import Generation

MAX_MESSAGES: Final = 1024
"""Messages of a chat, and parts of a message."""
MAX_PICTURES: Final = 64
"""Pictures of a chat."""
MAX_MEDIA_BYTES: Final = 32 << 20
"""Bytes of the file of a picture or of sound."""
MAX_TOOLS: Final = 512
"""Tools of a request."""

MAX_TOOL_CALLS: Final = 128
"""Tool calls of one message, and of one answer."""

MAX_TOOL_NAME_CHARS: Final = 128

MAX_TOOL_DEPTH: Final = 48
"""Nesting of objects and lists in a tool's ``parameters`` and in a call's ``arguments``, themselves included."""

ToolName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}\Z")]
"""No character that a template or a call format gives a meaning to."""
TemplateVariable = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}\Z")]
TemplateWord = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}\Z")]
"""No character of which a control token could be made."""
TemplateKwargs = Annotated[dict[TemplateVariable, bool | int | TemplateWord], Meta(max_length=16)]
TEMPLATE_VARIABLES: Final = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that the daemon sets."""


@attrs.frozen(kw_only=True)
class ContentPart:
    """A part of a message's content: a text, a picture or sound."""

    type: Literal["text", "image", "audio"] = "text"
    text: str | None = None
    """The text, if it is one."""
    data: Annotated[bytes, Meta(max_length=MAX_MEDIA_BYTES)] | None = None
    """The file of a picture, such as PNG or JPEG, or of sound, such as WAV; in JSON as base64."""


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call of a tool, made by the model."""

    name: ToolName
    arguments: dict[str, Any]
    id: Name | None = None
    """Chosen by the daemon.  ``None`` is allowed in the messages of a client."""


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """``developer`` means the same as ``system``.  ``tool`` is the result of a tool call."""
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    """``None`` only in a message of the assistant that has ``tool_calls``."""
    reasoning: str | None = None
    """Reasoning before ``content``; only of the assistant.  The chat template decides what the model sees of it."""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    """Calls after ``content``; only of the assistant."""
    tool_call_id: Name | None = None
    """Which call the message answers; only of a tool."""
    name: Name | None = None
    """Who speaks; for a tool, its name."""
    generation: Generation | None = attrs.field(default=None, eq=False)
    """How the daemon generated the message; only of the assistant.  The model does not see it."""

    @property
    def text(self) -> str:
        """``content`` as one text, without its pictures and sound."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    @property
    def n_pictures(self) -> int:
        """How many pictures, and files of sound, ``content`` has."""
        return sum(part.type != "text" for part in self.content) if isinstance(self.content, list) else 0

    @property
    def picture_bytes(self) -> int:
        """Bytes of those files together."""
        return sum(len(part.data or b"") for part in self.content) if isinstance(self.content, list) else 0


def message_fields(message: ChatMessage) -> dict[str, Any]:
    """A message as a request in JSON has it."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


@attrs.frozen(kw_only=True)
class Tool:
    """A function of the client that the model may call."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = attrs.field(factory=dict)
    """JSON schema of the arguments, which are an object.  Empty: any object."""


@attrs.frozen(kw_only=True)
class NamedTool:
    """The tool that an answer must call."""

    name: ToolName


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """
    Raises:
        BadRequest: a message has a field that its role does not have, or lacks its content.
    """
    for n, message in enumerate(messages):
        place, role = f"messages[{n}]", message.role
        if message.content is None and not (role == "assistant" and message.tool_calls):
            raise BadRequest(
                f"{place} lacks content; only a message of the assistant with tool_calls may have none", field=place
            )
        if message.tool_calls and role != "assistant":
            field = f"{place}.tool_calls"
            raise BadRequest(f"{field}: only messages of the assistant have them; this is of role {role}", field=field)
        if message.tool_call_id is not None and role != "tool":
            field = f"{place}.tool_call_id"
            raise BadRequest(f"{field}: only messages of role tool have it; this is of role {role}", field=field)
        if message.generation is not None and role != "assistant":
            field = f"{place}.generation"
            raise BadRequest(f"{field}: only messages of the assistant have it; this is of role {role}", field=field)
        for i, call in enumerate(message.tool_calls or ()):
            check_json(call.arguments, f"{place}.tool_calls[{i}].arguments", MAX_TOOL_DEPTH)
        if isinstance(message.content, list):
            _check_parts(message.content, role, f"{place}.content")
    check_picture_count(messages)


def _check_parts(parts: Sequence[ContentPart], role: str, place: str) -> None:
    for i, part in enumerate(parts):
        field = f"{place}[{i}]"
        has, lacks = ("text", "data") if part.type == "text" else ("data", "text")
        if getattr(part, has) is None or getattr(part, lacks) is not None:
            offered = has if has == "text" else 'data or "descriptor": true'
            raise BadRequest(f"{field}: a part of type {part.type} has {offered}, and no {lacks}", field=field)
        if part.type != "text" and role not in ("user", "tool"):
            raise BadRequest(
                f"{field}: only messages of role user or tool have pictures or sound; this is of {role}", field=field
            )


def check_picture_count(messages: Iterable[ChatMessage]) -> None:
    """
    Raises:
        BadRequest: the messages together have more than ``MAX_PICTURES`` pictures.
    """
    n_pictures = sum(message.n_pictures for message in messages)
    if n_pictures > MAX_PICTURES:
        raise BadRequest(
            f"the chat has {n_pictures} pictures; at most {MAX_PICTURES} are allowed: leave out the oldest",
            field="messages",
        )


def check_final_message(messages: Sequence[ChatMessage] | None) -> None:
    """
    Raises:
        BadRequest: the last message is not one that an answer can continue.
    """
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise BadRequest(
            "continue_final_message continues a text of the assistant: end messages with one of role assistant, "
            "without tool_calls",
            field="continue_final_message",
        )


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """
    Raises:
        BadRequest: two tools have the same name, parameters are not a JSON schema, or ``choice`` is not possible.
    """
    names = {tool.name for tool in tools}
    for n, tool in enumerate(tools):
        field = f"tools[{n}].parameters"
        check_json(tool.parameters, field, MAX_TOOL_DEPTH)
        if tool.parameters.get("type", "object") != "object":
            raise BadRequest(f"{field}: the type must be object; arguments are an object", field=field)
    if len(names) < len(tools):
        twice = next(tool.name for n, tool in enumerate(tools) if tool.name in {earlier.name for earlier in tools[:n]})
        raise BadRequest(f"tools has {twice!r} twice; each tool needs a name of its own", field="tools")
    if isinstance(choice, NamedTool) and choice.name not in names:
        raise BadRequest(
            f"tool_choice names {choice.name!r}, which is not among the request's tools", field="tool_choice"
        )
    if choice == "required" and not tools:
        raise BadRequest("tool_choice is required, but the request has no tools", field="tool_choice")


def check_template_kwargs(given: TemplateKwargs) -> None:
    """
    Raises:
        BadRequest: one of them is set by the daemon.
    """
    for name in given:
        if name in TEMPLATE_VARIABLES:
            raise BadRequest(f"chat_template_kwargs cannot set {name}; the daemon does", field="chat_template_kwargs")


def check_json(value: Any, name: str, max_depth: int, max_bytes: int | None = None) -> None:
    """Require a value that is small and shallow, and that both encodings can carry.

    Looks at the set of types at each depth, as there may be half a million values.

    Args:
        max_bytes: of its JSON.

    Raises:
        BadRequest: calls the value ``name``.
    """
    if max_bytes is not None and (size := len(msgspec.json.encode(value))) > max_bytes:
        raise BadRequest(f"{name} has {size} bytes as JSON; the limit is {max_bytes}", field=name)
    level: list[Any] = [value if isinstance(value, dict | list) else [value]]
    for _ in range(max_depth):
        items = [
            *chain.from_iterable(container.values() if type(container) is dict else container for container in level)
        ]
        kinds = set(map(type, items))
        ints, floats = (
            items if kinds == {kind} else [number for number in items if type(number) is kind] if kind in kinds else []
            for kind in (int, float)
        )
        if bytes in kinds or not all(map(math.isfinite, floats)):
            raise BadRequest(f"{name} must be valid JSON: no bytes, no NaN, no Infinity", field=name)
        if ints and not -(2**63) <= min(ints) <= max(ints) < 2**64:
            raise BadRequest(f"{name} has an integer of more than 64 bits", field=name)
        if kinds.isdisjoint((dict, list)):
            return
        level = [item for item in items if type(item) in (dict, list)]
    raise BadRequest(f"{name} is nested more than {max_depth} deep", field=name)
