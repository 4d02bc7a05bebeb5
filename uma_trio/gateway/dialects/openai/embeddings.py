"""``POST /v1/embeddings`` of OpenAI's API."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec
from starlette.responses import Response

from uma_trio.gateway.answer import encode_vectors, json_response
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.prompts import Translation
from uma_trio.gateway.dialects.openai.shapes import Embedding, EmbeddingList, EmbeddingUsage
from uma_trio.gateway.endpoint import Call

MAX_TEXTS: Final = 2048
"""Texts of one request, as in OpenAI's API and in the socket protocol."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """A request for the embeddings of texts."""

    input: Any
    """A text, a list of texts, a list of token ids, or a list of texts and such lists.  llama-server's forms too."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: Any = None
    """Has no effect."""


async def embed(call: Call) -> Response:
    """Embed texts: a vector of length 1 for each."""
    request, warnings = await call.read(EmbeddingRequest)
    async with Translation(call, request.model, parse_special=False) as translation:
        texts = await translation.prompts(request.input, "input", most=MAX_TEXTS)
    fields = call.for_daemon(
        input=texts,
        model=request.model,
        dimensions=request.dimensions,
    )
    embedded = await call.unless_disconnected(call.daemon.embed(fields))
    vectors = await encode_vectors(
        call.large_work, embedded.embeddings, list if request.encoding_format == "float" else in_base64
    )
    body = EmbeddingList(
        data=[
            Embedding(index=index, embedding=cast(str, vector)) for index, vector in enumerate(vectors)
        ],  # encoded already
        model=request.model or (await call.daemon.model()).name,
        usage=EmbeddingUsage.of(embedded.usage),
    )
    return json_response(body, warnings=warnings)


def in_base64(vector: Sequence[float]) -> str:
    """Little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


ENDPOINTS = (OPENAI.post("/v1/embeddings", embed, EmbeddingRequest, EmbeddingList, is_batched=True),)
