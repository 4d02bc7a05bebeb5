"""Ranking of documents: ``POST /v1/rerank`` and its like.

llama-server, Jina and Cohere have the same request with answers that differ a little; Text Embeddings Inference has
``texts`` in place of ``documents``.  There are no tokens to stream, so an answer comes whole.

Source: the README of llama.cpp's server, and the API references of Jina, Cohere and Text Embeddings Inference.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from uma_trio import client
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.shapes import Shape, Warned
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.shapes import EmbeddingUsage
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid

MAX_DOCUMENTS: Final = 2048
"""Documents of one request, as in the socket protocol."""


class RankedText(Shape):
    """The text of a ranked document."""

    text: str


class RankedDocument(Shape):
    """A document of the request, by its place there.  ``document`` is for requests with ``return_documents``."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Warned, tag_field="object", tag="list"):
    """Documents, the best one first, as llama-server and Jina's API have it."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class RankingMeta(Shape):
    """What Cohere's API says of an answer."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereRanking(Warned):
    """Documents, the best one first, as Cohere's API has it."""

    id: str
    results: list[RankedDocument]
    meta: RankingMeta


class RankedIndex(Shape):
    """A document of the request, as the API of Text Embeddings Inference has it.  ``text`` is for ``return_text``."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class TextDocument(msgspec.Struct):
    """A document as an object, as in Jina's API."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """A query and documents."""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(max_length=MAX_DOCUMENTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_DOCUMENTS)] | None = None
    """Documents as in the API of Text Embeddings Inference, whose form the answer has then."""
    top_n: int | None = None
    """Answer with only this many of the best documents."""
    return_documents: bool = False
    """Whether the answer repeats the documents."""
    return_text: bool = False
    """The same for ``texts``."""
    model: str | None = None


async def rank(call: Call) -> Response:
    """Rank documents by how well they answer the query, as llama-server and Jina do."""
    request, warnings = await call.read(RerankRequest)
    texts = _documents(request)
    ranking = await _rank(call, request, texts)
    if request.texts is not None:
        return json_response(
            [
                RankedIndex(
                    index=result.index, score=result.score, text=texts[result.index] if request.return_text else UNSET
                )
                for result in ranking.results
            ]
        )
    body = Ranking(
        id=call.id,
        model=request.model or (await call.daemon.model()).name,
        results=_results(request, texts, ranking),
        usage=EmbeddingUsage.of(ranking.usage),
    )
    return json_response(body, warnings=warnings)


async def rank_for_cohere(call: Call) -> Response:
    """Rank documents, in the form of Cohere's second API."""
    request, warnings = await call.read(RerankRequest)
    texts = _documents(request)
    ranking = await _rank(call, request, texts)
    meta = RankingMeta(api_version={"version": "2"}, billed_units={"search_units": 1})
    body = CohereRanking(id=call.id, results=_results(request, texts, ranking), meta=meta)
    return json_response(body, warnings=warnings)


async def _rank(call: Call, request: RerankRequest, texts: list[str]) -> client.Ranking:
    fields = call.for_daemon(query=request.query, documents=texts, top_n=request.top_n, model=request.model)
    return await call.unless_disconnected(call.daemon.rerank(fields))


def _documents(request: RerankRequest) -> list[str]:
    """The documents of a request, under either name.

    Raises:
        HttpError: it has no documents, or has them twice.
    """
    if (request.documents is None) == (request.texts is None):
        raise invalid("give documents, a list of texts", parameter="documents")
    return [
        document if isinstance(document, str) else document.text
        for document in request.documents or request.texts or ()
    ]


def _results(request: RerankRequest, texts: list[str], ranking: client.Ranking) -> list[RankedDocument]:
    return [
        RankedDocument(
            index=result.index,
            relevance_score=result.score,
            document=RankedText(text=texts[result.index]) if request.return_documents else UNSET,
        )
        for result in ranking.results
    ]


ENDPOINTS = (
    *(
        OPENAI.post(
            path, rank, RerankRequest, Ranking, list[RankedIndex], field_names={"documents": ("documents", "texts")}
        )
        for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
    ),
    OPENAI.post("/v2/rerank", rank_for_cohere, RerankRequest, CohereRanking),
)
