"""Models, as the APIs of OpenAI and Anthropic have them at the same paths."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.endpoint import Answer, Call
from uma_trio.protocol.answers import bare_name


def retriever(list_models: Answer, shape: Callable[[str, ModelDescription], object]) -> Answer:
    """What answers a path that ends with the name of a model."""

    async def retrieve_model(call: Call) -> Response:
        """One model; all of them if the path ends before a name."""
        name: str = call.request.path_params["name"]
        if not name:
            return await list_models(call)
        [model] = await call.ask(lambda client: client.models(model=name))
        return json_response(shape(bare_name(name), model))

    return retrieve_model
