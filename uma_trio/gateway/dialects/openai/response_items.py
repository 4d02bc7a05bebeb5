"""The items of OpenAI's Responses API: a conversation as a list of messages, reasoning, calls and their results.

Source: the OpenAI API reference, and the types of OpenAI's Python client.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from uma_trio.gateway.dialects.common.contents import Picture, content_of, picture_of_url
from uma_trio.gateway.dialects.common.parts import Part
from uma_trio.gateway.dialects.openai.messages import arguments_of
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.json_cost import JsonCost

SEALED: Final = "uma-trio:"
"""Begins ``encrypted_content`` that comes from here.  It is not encrypted: it says what the client knows anyway."""

ORDER: Final = ("reasoning", "content", "tool_calls")
"""What a message of the assistant has, in this order."""

ROLES: Final = ("user", "assistant", "system", "developer")
PARAGRAPH: Final = "\n\n"
"""Between the parts of a message to the model."""


class Item(msgspec.Struct, kw_only=True):
    """An item of a conversation.  Which fields it has depends on ``type``."""

    type: str = "message"
    role: str | None = None
    content: Any = None
    """What a message or reasoning says: a text, or parts."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """The JSON text of a ``function_call``."""
    input: str | None = None
    """The text of a ``custom_tool_call``."""
    output: Any = None
    """What a tool has returned: a text, or parts."""
    summary: Any = None
    encrypted_content: str | None = None


FILES: Final = ("input_image", "input_audio")
"""Types of parts that are pictures or sound."""


def has_files(items: str | Sequence[Item]) -> bool:
    """Whether some item has a picture or sound."""
    if isinstance(items, str):
        return False
    contents = [content for item in items for content in (item.content, item.output) if isinstance(content, list)]
    return any(isinstance(part, dict) and part.get("type") in FILES for content in contents for part in content)


class Conversation:
    """The items of a request, as messages of the socket protocol.

    Reasoning, text and calls that follow each other are one message of the assistant.

    Args:
        earlier: messages of earlier requests, between the instructions and the items.

    Raises:
        HttpError: something is not supported.
    """

    def __init__(
        self, instructions: str | None, items: str | Sequence[Item], earlier: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._cost = JsonCost()
        self._tools: dict[str, str] = {}
        """Name of the tool that each call names."""
        if instructions:
            self.messages.append({"role": "system", "content": instructions})
        for message in earlier:
            self.messages.append(message)
            self._tools |= {call["id"]: call["name"] for call in message.get("tool_calls", ()) if call.get("id")}
        if isinstance(items, str):
            self.messages.append({"role": "user", "content": items})
        else:
            for index, item in enumerate(items):
                self._add(item, f"input[{index}]")
        if not self.messages:
            raise invalid("input is empty; send a text or items", parameter="input")

    def _add(self, item: Item, place: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, place)
            case "reasoning":
                if text := _reasoning(item, place):
                    self._assistant("reasoning")["reasoning"] = text
            case "function_call" | "custom_tool_call":
                self._add_call(item, place)
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(item, place)
            case "item_reference":
                raise invalid("items are not stored by their ids; send the item itself", parameter=place)
            case _:
                self.warnings.append(f"{place} was skipped: items of type {item.type!r} are not supported")

    def _add_message(self, item: Item, place: str) -> None:
        if item.role not in ROLES:
            raise invalid(f"role must be one of {', '.join(ROLES)}", parameter=f"{place}.role")
        if item.role == "assistant":
            self._assistant("content")["content"] = _text(item.content, f"{place}.content", "")
        else:
            content = _content(item.content, f"{place}.content", sees=item.role == "user")
            self.messages.append({"role": item.role, "content": content})

    def _add_call(self, item: Item, place: str) -> None:
        if not item.call_id or not item.name:
            raise invalid(f"a {item.type} needs call_id and name", parameter=place)
        if item.type == "custom_tool_call":
            arguments = {"input": item.input or ""}
        else:
            arguments = arguments_of(item.arguments or "", f"{place}.arguments", self._cost)
        self._tools[item.call_id] = item.name
        calls = self._assistant("tool_calls").setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "name": item.name, "arguments": arguments})

    def _add_result(self, item: Item, place: str) -> None:
        if not item.call_id:
            raise invalid(f"a {item.type} needs the call_id of its call", parameter=place)
        message = {
            "role": "tool",
            "content": _content(item.output, f"{place}.output", sees=True),
            "tool_call_id": item.call_id,
        }
        if name := self._tools.get(item.call_id):
            message["name"] = name
        self.messages.append(message)

    def _assistant(self, field: str) -> dict[str, Any]:
        """The message of the assistant to which ``field`` belongs: the last one, if it has only what comes earlier."""
        later = () if field == "tool_calls" else ORDER[ORDER.index(field) :]
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in later):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _reasoning(item: Item, place: str) -> str:
    """The reasoning of an item; empty if only another server can read it."""
    if text := _text(item.content, f"{place}.content", ""):
        return text
    if item.encrypted_content and item.encrypted_content.startswith(SEALED):
        try:
            return base64.b64decode(item.encrypted_content.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise invalid("encrypted_content is damaged", parameter=f"{place}.encrypted_content") from None
    return ""


def _content(content: Any, parameter: str, *, sees: bool) -> str | list[dict[str, Any]]:
    """A content that may have pictures and sound, in the socket protocol; texts only unless ``sees``."""
    if not sees or not isinstance(content, list):
        return _text(content, parameter, PARAGRAPH)
    return content_of([_part(part, f"{parameter}[{number}]") for number, part in enumerate(content)], PARAGRAPH)


def _part(part: Any, parameter: str) -> str | Picture:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return picture_of_url(url, f"{parameter}.image_url")
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return Picture(f"{parameter}.input_audio.data", data, type="audio")
        case {"type": "input_image"}:
            raise invalid(
                "an input_image needs image_url with a data URL; no files are stored here", parameter=parameter
            )
    return _text_of(part, parameter)


def _text(content: Any, parameter: str, between: str) -> str:
    """The text of a content: a text or a list of parts."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return between.join(_text_of(part, f"{parameter}[{number}]") for number, part in enumerate(content))
    raise invalid("content is a text or a list of parts", parameter=parameter)


def _text_of(part: Any, parameter: str) -> str:
    match part:
        case {"text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)}:
            raise invalid(f"content of type {kind!r} is not supported; send text", parameter=parameter)
    raise invalid("a part of a content needs type and text", parameter=parameter)


def seal(text: str) -> str:
    """Reasoning for ``encrypted_content``: clients that do not send plain reasoning back send this."""
    return SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def custom_input(part: Part) -> str:
    """The text for a custom tool, out of the arguments of its call."""
    try:
        arguments = msgspec.json.decode(part.text)
    except (msgspec.DecodeError, RecursionError):
        return part.text
    return arguments["input"] if isinstance(arguments, dict) and isinstance(arguments.get("input"), str) else part.text
