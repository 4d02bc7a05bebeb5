"""``POST /api/embed`` of Ollama's API, and the older ``/api/embeddings``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Embeddings
from uma_trio.gateway.answer import encode_vectors, json_response
from uma_trio.gateway.dialects.ollama.dialect import OLLAMA, model_name
from uma_trio.gateway.dialects.ollama.messages import KeepAlive
from uma_trio.gateway.dialects.ollama.shapes import Embedded, EmbeddedOne
from uma_trio.gateway.endpoint import Call
from uma_trio.protocol.requests import MAX_TEXTS


class EmbedRequest(msgspec.Struct, kw_only=True):
    """A request for the embeddings of texts."""

    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)]
    dimensions: int | None = None
    truncate: bool | None = None
    """Has no effect: a text that is too long is refused."""
    options: dict[str, Any] | None = None
    """Has no effect."""
    keep_alive: KeepAlive = None
    """Has no effect."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """A request for the embedding of one text."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    """Has no effect."""
    keep_alive: KeepAlive = None
    """Has no effect."""


async def embed(call: Call) -> Response:
    """A vector of length 1 for each text."""
    request, warnings = await call.read(EmbedRequest)
    began = time.monotonic_ns()
    texts = [request.input] if isinstance(request.input, str) else request.input
    embedded = await _embeddings(call, request.model, texts, dimensions=request.dimensions)
    vectors: Any = await encode_vectors(call.large_work, embedded.embeddings)
    body = Embedded(
        model=request.model,
        embeddings=vectors,
        total_duration=time.monotonic_ns() - began,
        load_duration=0,
        prompt_eval_count=embedded.usage.prompt_tokens,
    )
    return json_response(body, warnings=warnings)


async def embed_one(call: Call) -> Response:
    """A vector of length 1 for one text."""
    request, warnings = await call.read(EmbeddingRequest)
    embeddings = await _embeddings(call, request.model, [request.prompt])
    return json_response(EmbeddedOne(embedding=embeddings.embeddings[0]), warnings=warnings)


async def _embeddings(call: Call, model: str, texts: list[str], *, dimensions: int | None = None) -> Embeddings:
    fields = call.for_daemon(input=texts, model=model_name(model), dimensions=dimensions)
    return await call.unless_disconnected(call.daemon.embed(fields))


ENDPOINTS = (
    OLLAMA.post("/api/embed", embed, EmbedRequest, Embedded),
    OLLAMA.post("/api/embeddings", embed_one, EmbeddingRequest, EmbeddedOne, field_names={"input": "prompt"}),
)
