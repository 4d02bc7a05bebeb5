"""What is special in Ollama's API: its errors, its names of fields and of models."""

from __future__ import annotations

from typing import Final

from uma_trio.gateway.answer import NDJSON, Rendered, Renderer, json_line
from uma_trio.gateway.dialects.common.fields import names_of
from uma_trio.gateway.dialects.common.tools import TOOL_NAMES
from uma_trio.gateway.endpoint import Call, Dialect
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.answers import ModelDescription

LATEST: Final = ":latest"
"""The tag that Ollama adds to names without one."""

FIELD_NAMES: Final = {
    **names_of("ollama"),
    "infill": "suffix",
    "constraint": "format",
    "constraint.json_schema": "format",
    "logprobs": "top_logprobs",
    **TOOL_NAMES,
}
"""What fields of the socket protocol are called in Ollama's API."""

OLLAMA: Final = Dialect(
    "ollama",
    "Ollama",
    lambda error, request_id: {"error": error.message, "request_id": request_id},
    FIELD_NAMES,
    stream_type=NDJSON,
    prefix="/api/",
    instead={
        "/api/blobs": "models are downloaded with /api/pull or uma-trio pull; /openapi.json lists the paths",
        "/api/push": "models are not uploaded; /openapi.json lists the paths",
    },
)


class LineRenderer(Renderer[Rendered]):
    """Writes lines of JSON.  Clients parse every line, so there is nothing that keeps a connection alive."""

    media_type = NDJSON
    keep_alive_frame = b""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return json_line(OLLAMA.error_body(error, self._request_id))


def model_name(name: str | None) -> str | None:
    """The daemon's name of a model; ``None`` for the default one."""
    return name.removesuffix(LATEST) if name else None


def require_name(name: str | None) -> str:
    """The daemon's name of a model.

    Raises:
        HttpError: none is given.
    """
    if not (known_name := model_name(name)):
        raise invalid("model is required", parameter="model")
    return known_name


def ollama_name(name: str) -> str:
    """Ollama's name of a model: with a tag."""
    return name if ":" in name else f"{name}{LATEST}"


async def find_model(call: Call, name: str | None) -> ModelDescription:
    """What the daemon says about a model; the default one for ``None``.

    Raises:
        HttpError: there is no such model.
    """
    return (await call.ask(lambda client: client.models(model=model_name(name))))[0]
