"""``GET /v1/models`` and ``GET /v1/models/NAME`` of Anthropic's API.  OpenAI's has the same paths."""

from __future__ import annotations

from starlette.responses import Response

from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.anthropic.dialect import ANTHROPIC
from uma_trio.gateway.dialects.anthropic.shapes import ModelInfo, ModelInfoPage
from uma_trio.gateway.dialects.common.times import iso_time
from uma_trio.gateway.endpoint import Call
from uma_trio.protocol.answers import bare_name


async def list_models(call: Call) -> Response:
    """All models that are served, the default one first, and each of them with each of its adapters."""
    models = await call.ask(lambda client: client.models())
    data = [_model(name, model) for model in models for name in model.names]
    return json_response(ModelInfoPage(data=data, has_more=False, first_id=data[0].id, last_id=data[-1].id))


async def retrieve_model(call: Call) -> Response:
    """One model; all of them if the path ends before a name."""
    name: str = call.request.path_params["name"]
    if not name:
        return await list_models(call)
    [model] = await call.ask(lambda client: client.models(model=name))
    return json_response(_model(bare_name(name), model))


def _model(name: str, model: ModelDescription) -> ModelInfo:
    """A model with what one request may use."""
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=iso_time(int(model.created_at)),
        lifecycle="active",
        max_input_tokens=model.context_per_request,
        max_tokens=model.context_per_request,
    )


ENDPOINTS = tuple(
    endpoint
    for path in ("/v1/models", "/models")
    for endpoint in (
        ANTHROPIC.get(path, list_models, ModelInfoPage),
        ANTHROPIC.get(f"{path}/{{name:path}}", retrieve_model, ModelInfo),
    )
)
