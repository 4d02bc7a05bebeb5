"""``GET /v1/models`` and ``GET /v1/models/NAME`` of Anthropic's API.  OpenAI's has the same paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.anthropic.dialect import ANTHROPIC
from uma_trio.gateway.dialects.anthropic.shapes import ModelInfo, ModelInfoPage
from uma_trio.gateway.dialects.common.models import retriever
from uma_trio.gateway.dialects.common.shapes import iso_time
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid


class PageQuery(msgspec.Struct):
    """Which models are listed: those after or before one; all of them without ``limit``."""

    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    after_id: str | None = None
    before_id: str | None = None


async def list_models(call: Call) -> Response:
    """All models that are served, the default one first, and each of them with each of its adapters."""
    return await _page(call, call.query(PageQuery))


async def _list_all(call: Call) -> Response:
    return await _page(call, PageQuery())


async def _page(call: Call, query: PageQuery) -> Response:
    models = await call.ask(lambda client: client.models())
    data = [_model(name, model) for model in models for name in model.names]
    begin = 0 if query.after_id is None else _index(data, query.after_id, "after_id") + 1
    end = len(data) if query.before_id is None else _index(data, query.before_id, "before_id")
    limit = query.limit or len(data)
    is_backward = query.before_id is not None and query.after_id is None
    page = data[begin:end][-limit:] if is_backward else data[begin:end][:limit]
    has_more = len(page) < end - begin
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ModelInfoPage(data=page, has_more=has_more, first_id=first, last_id=last))


def _index(models: Sequence[ModelInfo], name: str, parameter: str) -> int:
    for index, model in enumerate(models):
        if model.id == name:
            return index
    raise invalid(f"{parameter} names no model that is served: {name[:200]!r}", parameter=parameter)


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
        ANTHROPIC.get(path, list_models, ModelInfoPage, query=PageQuery),
        ANTHROPIC.get(f"{path}/{{name:path}}", retriever(_list_all, _model), ModelInfo),
    )
)
