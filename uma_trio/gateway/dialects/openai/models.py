"""``GET /v1/models`` and ``GET /v1/models/NAME`` of OpenAI's API, and what loads and unloads models."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.models import retriever
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.shapes import ManagedModel, Model, ModelMeta, ModelPage, ModelStatus
from uma_trio.gateway.endpoint import Call


async def list_models(call: Call) -> Response:
    """All models that are served, the default one first, and each of them with each of its adapters."""
    models = await call.ask(lambda client: client.models())
    named = [(name, model) for model in models for name in model.names]
    return json_response(ModelPage(data=[_model(*pair) for pair in named]))


def _model(name: str, model: ModelDescription) -> Model:
    """A model with what one request may use, under the names that clients look for.

    One with an adapter names the model itself as ``parent``, as with vLLM.
    """
    state = "loaded" if model.state == "ready" else model.state  # llama-server's word
    progress = UNSET if model.progress is None else model.progress
    return Model(
        id=name,
        created=int(model.created_at),
        owned_by="uma-trio",
        context_length=model.context_per_request,
        max_model_len=model.context_per_request,
        capabilities=model.capabilities,
        meta=ModelMeta(
            n_ctx=model.context_per_request,
            n_embd=model.embedding_length,
            n_params=model.n_parameters,
            size=model.size_bytes,
        ),
        status=ModelStatus(value=state, progress=progress),
        parent=UNSET if name == model.name else model.name,
    )


class ModelRequest(msgspec.Struct):
    """Names a model."""

    model: str


async def load(call: Call) -> Response:
    """Load a model.  The answer comes when it is loaded."""
    return await _manage(call, "load")


async def unload(call: Call) -> Response:
    """Unload a model when its requests have ended."""
    return await _manage(call, "unload")


async def reload(call: Call) -> Response:
    """Load a model again, with its file and its settings as they are now; no request is dropped."""
    return await _manage(call, "reload")


async def _manage(call: Call, action: Literal["load", "unload", "reload"]) -> Response:
    request, warnings = await call.read(ModelRequest)
    model = await call.unless_disconnected(
        call.ask(lambda client: client.manage_model(action, request.model, principal=None))
    )
    return json_response(ManagedModel(success=True, model=_model(model.name, model)), warnings=warnings)


ENDPOINTS = (
    OPENAI.get("/v1/models", list_models, ModelPage),
    OPENAI.get("/v1/models/{name:path}", retriever(list_models, _model), Model),
    *(
        OPENAI.post(f"/v1/models/{action}", answer, ModelRequest, ManagedModel, needs_admin=True)
        for action, answer in (("load", load), ("unload", unload), ("reload", reload))
    ),
)
