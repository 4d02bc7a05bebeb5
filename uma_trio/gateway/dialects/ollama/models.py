"""What Ollama's clients ask about models: ``/api/version``, ``/api/tags``, ``/api/show``, ``/api/ps``."""

from __future__ import annotations

import hashlib
import time
from typing import Any, Final

import msgspec
from starlette.responses import Response

from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.shapes import iso_time
from uma_trio.gateway.dialects.ollama.dialect import OLLAMA, find_model, ollama_name, require_name
from uma_trio.gateway.dialects.ollama.shapes import Details, Listed, ModelTags, Shown, Version
from uma_trio.gateway.endpoint import Call
from uma_trio.protocol.answers import ModelDescription

FOREVER: Final = "2318-01-01T00:00:00Z"
"""When a model that stays loaded is unloaded."""

API_VERSION: Final = "0.12.0"
"""The version of Ollama's API that is spoken here.  Editors compare it, and some refuse old ones."""

CAPABILITIES: Final = {
    "completion": "completion",
    "infill": "insert",
    "tools": "tools",
    "reasoning": "thinking",
    "embedding": "embedding",
    "vision": "vision",
}
"""Capabilities of a model, in Ollama's words."""


class ShowRequest(msgspec.Struct):
    """Names a model; ``name`` is the older spelling."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


async def version(call: Call) -> Response:
    """The version of Ollama's API."""
    return json_response(Version(version=API_VERSION))


async def tags(call: Call) -> Response:
    """All models."""
    models = await call.ask(lambda client: client.models())
    listed = [_entry(model, modified_at=iso_time(model.created_at)) for model in models]
    return json_response(ModelTags(models=listed))


async def list_running(call: Call) -> Response:
    """Models that are loaded."""
    models = await call.ask(lambda client: client.models())
    listed = [
        _entry(
            model,
            expires_at=FOREVER if model.unloads_in_s is None else iso_time(time.time() + model.unloads_in_s),
            size_vram=0,
            context_length=model.context_per_request,
        )
        for model in models
        if model.state == "ready"
    ]
    return json_response(ModelTags(models=listed))


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


def _entry(model: ModelDescription, **more: Any) -> Listed:
    name, digest = ollama_name(model.name), digest_of(model)
    return Listed(name=name, model=name, size=model.size_bytes, digest=digest, details=details_of(model), **more)


async def show(call: Call) -> Response:
    """What is known about one model.  The context is that of a request, which may be less than the trained one."""
    request, warnings = await call.read(ShowRequest)
    model = await find_model(call, require_name(request.model or request.name))
    return json_response(
        Shown(
            modelfile=f"FROM {model.name}",
            parameters="",
            template=model.chat_template or "",
            details=details_of(model),
            model_info={
                "general.architecture": model.architecture,
                "general.parameter_count": model.n_parameters,
                f"{model.architecture}.context_length": model.context_per_request,
                f"{model.architecture}.embedding_length": model.embedding_length,
            },
            capabilities=[CAPABILITIES[capability] for capability in model.capabilities if capability in CAPABILITIES],
            modified_at=iso_time(model.created_at),
        ),
        warnings=warnings,
    )


ENDPOINTS = (
    OLLAMA.get("/api/version", version, Version),
    OLLAMA.get("/api/tags", tags, ModelTags),
    OLLAMA.get("/api/ps", list_running, ModelTags),
    OLLAMA.post("/api/show", show, ShowRequest, Shown),
)
