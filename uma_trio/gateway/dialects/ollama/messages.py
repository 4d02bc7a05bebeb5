"""Requests of Ollama's API in the socket protocol: options, formats, messages.

Source: Ollama's API reference (docs/api.md of its repository) and the types of its Python client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from uma_trio.gateway.dialects.common.contents import SEEING_ROLES, Picture, content_of
from uma_trio.gateway.endpoint import without_effect
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.chat import MAX_PICTURES
from uma_trio.protocol.field_errors import WORDS
from uma_trio.protocol.parameters import ROWS

OPTIONS: Final = {name: row for row in ROWS for name in row.names_in("ollama")}
"""The fields that are options in Ollama's API."""

OF_THE_DAEMON: Final = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "use_mlock", "low_vram", "numa"}
)
"""Options that load a model in Ollama.  Here they belong to ``uma-trio serve``, so they have no effect."""

_NUMBER: Final = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_DURATION: Final = rf"^[-+]?({_NUMBER}|({_NUMBER}(ns|us|µs|μs|ms|s|m|h))+)\Z"
KeepAlive = (
    float
    | Annotated[str, Meta(max_length=32, pattern=_DURATION, extra={WORDS: "a duration such as '5m' or '1h30m'"})]
    | None
)
"""How long a model stays: seconds, or a duration as Go writes it, such as ``5m``.  A text of seconds is taken as well."""

Images = Annotated[list[str], Meta(max_length=MAX_PICTURES)]
"""Files of pictures as base64."""


class FunctionCall(msgspec.Struct):
    """The function that a tool call names."""

    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct):
    """A call that the model has made earlier."""

    function: FunctionCall
    id: str | None = None


class Message(msgspec.Struct):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def option_fields(options: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Fields of the socket protocol for ``options``, and a warning for each that is not known."""
    fields: dict[str, Any] = {}
    unknown = []
    for name, value in (options or {}).items():
        if value is None or name in OF_THE_DAEMON:
            continue
        if row := OPTIONS.get(name):
            any_will_do = row.minus_one is None and isinstance(value, int) and value < 0
            fields[row.name] = None if any_will_do else row.from_client(value)
        else:
            unknown.append(name)
    return fields, without_effect(unknown, "option")


def constraint_of(format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The constraint for ``format``: ``json``, or a JSON schema.

    Raises:
        HttpError: it is neither.
    """
    match format:
        case None | "":
            return None
        case "json":
            return {"json_object": True}
        case dict():
            return {"json_schema": format}
    raise invalid("format must be 'json' or a JSON schema", parameter="format")


def chat_message(index: int, message: Message) -> dict[str, Any]:
    """A message of the socket protocol.

    Raises:
        HttpError: it has images, and is not of the user or of a tool.
    """
    if message.images and message.role not in SEEING_ROLES:
        raise invalid("only messages of role user or tool have images", parameter=f"messages[{index}].images")
    fields: dict[str, Any] = {
        "role": message.role,
        "content": with_images(message.content or "", message.images, f"messages[{index}].images"),
        "reasoning": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{position}",
                "name": call.function.name,
                "arguments": call.function.arguments,
            }
            for position, call in enumerate(message.tool_calls)
        ]
    return {name: value for name, value in fields.items() if value is not None}


def with_images(text: str, images: Sequence[str] | None, parameter: str) -> str | list[dict[str, Any]]:
    """A content of the socket protocol.  Images come before the text, as in Ollama.

    Raises:
        HttpError: an image is a data URL.
    """
    if not images:
        return text
    pictures = [_picture(data, f"{parameter}[{n}]") for n, data in enumerate(images)]
    return content_of([*pictures, *([text] if text else [])], "")


def _picture(data: str, parameter: str) -> Picture:
    if data.startswith("data:"):
        raise invalid(
            f"{parameter} is a data URL: leave out what is before the base64, such as data:image/png;base64,",
            parameter=parameter,
        )
    return Picture(parameter, data)
