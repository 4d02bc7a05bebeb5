"""What the endpoints of Ollama's API share: errors, names of models, options, messages, durations.

Source: Ollama's API reference (docs/api.md of its repository) and the types of its Python client.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from uma_trio.client import Eos
from uma_trio.gateway.answer import NDJSON
from uma_trio.gateway.dialects.contents import SEEING_ROLES, Picture, content_of
from uma_trio.gateway.dialects.fields import names_of
from uma_trio.gateway.dialects.ollama.shapes import Details
from uma_trio.gateway.dialects.openai.tools import TOOL_NAMES
from uma_trio.gateway.endpoint import Call, Dialect, without_effect
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.answers import ModelDescription
from uma_trio.protocol.chat import MAX_PICTURES
from uma_trio.protocol.parameters import ROWS

API_VERSION: Final = "0.12.0"
"""The version of Ollama's API that is spoken here.  Editors compare it, and some refuse old ones."""

LATEST: Final = ":latest"
"""The tag that Ollama adds to names without one."""

CAPABILITIES: Final = {
    "completion": "completion",
    "infill": "insert",
    "tools": "tools",
    "reasoning": "thinking",
    "embedding": "embedding",
    "vision": "vision",
}
"""Capabilities of a model, in Ollama's words."""

OPTIONS: Final = {name: row for row in ROWS for name in row.names_in("ollama")}
"""The fields that are options in Ollama's API."""

FIELD_NAMES: Final = {
    **names_of("ollama"),
    "infill": "suffix",
    "constraint": "format",
    "constraint.json_schema": "format",
    "logprobs": "top_logprobs",
    **TOOL_NAMES,
}
"""What fields of the socket protocol are called in Ollama's API."""

OF_THE_DAEMON: Final = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "use_mlock", "low_vram", "numa"}
)
"""Options that load a model in Ollama.  Here they belong to ``uma-trio serve``, so they have no effect."""

OLLAMA: Final = Dialect(
    "ollama",
    lambda error, request_id: {"error": error.message, "request_id": request_id},
    FIELD_NAMES,
    stream_type=NDJSON,
)


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


def model_name(name: str | None) -> str | None:
    """The daemon's name of a model; ``None`` for the default one."""
    return name.removesuffix(LATEST) if name else None


def ollama_name(name: str) -> str:
    """Ollama's name of a model: with a tag."""
    return name if ":" in name else f"{name}{LATEST}"


def digest_of(model: ModelDescription) -> str:
    """Stands for the hash of a model file, which nobody computes: of what is known about the model."""
    return hashlib.sha256(f"{model.name} {model.size_bytes} {model.n_parameters}".encode()).hexdigest()


def details_of(model: ModelDescription) -> Details:
    """The ``details`` of a model."""
    return Details(
        parent_model="",
        format="gguf",
        family=model.architecture,
        families=[model.architecture],
        parameter_size=_short_count(model.n_parameters),
        quantization_level=model.quantization or "unknown",
    )


def _short_count(n: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= size:
            return f"{n / size:.1f}{letter}"
    return str(n)


def iso_time(seconds: float | None = None) -> str:
    """A time as Ollama writes it; now, if none is given."""
    if seconds is None:
        return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


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


async def find_model(call: Call, name: str | None) -> ModelDescription:
    """What the daemon says about a model; the default one for ``None``.

    Raises:
        HttpError: there is no such model.
    """
    return (await call.ask(lambda client: client.models(model=model_name(name))))[0]
