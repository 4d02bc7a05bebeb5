"""Rankings over HTTP, in the forms of llama-server, Jina, Cohere and Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.gateway.conftest import Gateway
from tests.support.gpu import tolerance

ROUNDING = tolerance(1e-4, on_gpu=1e-2)
"""A score depends a little on which documents are computed together."""

QUERY = "How do I make pancakes?"
DOCUMENTS = ["Mix flour, milk and eggs.", "Lima is in Peru.", "", "A panda is a bear."]
PATHS = ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"]


def rank(gateway: Gateway, path: str = "/v1/rerank", status: int = 200, **fields: object) -> Any:
    with gateway.http() as client:
        body = {"query": QUERY, "documents": DOCUMENTS, **fields}
        answer = client.post(path, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def expected(ranking_gateway: Gateway) -> list[tuple[int, float]]:
    """Index and score of each document, by the socket."""

    async def main() -> list[tuple[int, float]]:
        async with ranking_gateway.daemon.client() as client:
            return [(each.index, each.score) for each in (await client.rerank(QUERY, DOCUMENTS)).results]

    return trio.run(main)


def pairs(results: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(each["index"], pytest.approx(each["relevance_score"], abs=ROUNDING)) for each in results]


@pytest.mark.parametrize("path", PATHS)
def test_llama_server_and_jina(ranking_gateway: Gateway, expected: list[tuple[int, float]], path: str) -> None:
    found = rank(ranking_gateway, path, model="reranker")
    assert pairs(found["results"]) == expected
    assert found.keys() == {"id", "object", "model", "results", "usage"}
    assert (found["object"], found["model"]) == ("list", "reranker")
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] > len(DOCUMENTS)
    assert all(each.keys() == {"index", "relevance_score"} for each in found["results"])


def test_only_the_best_with_their_texts(ranking_gateway: Gateway, expected: list[tuple[int, float]]) -> None:
    found = rank(ranking_gateway, top_n=2, return_documents=True, documents=[{"text": each} for each in DOCUMENTS])
    assert pairs(found["results"]) == expected[:2]
    assert [each["document"] for each in found["results"]] == [{"text": DOCUMENTS[n]} for n, _ in expected[:2]]
    assert found["usage"] == rank(ranking_gateway)["usage"], "all documents are computed"
    assert len(rank(ranking_gateway, top_n=1000)["results"]) == len(DOCUMENTS)


def test_cohere(ranking_gateway: Gateway, expected: list[tuple[int, float]]) -> None:
    found = rank(ranking_gateway, "/v2/rerank", model="reranker", top_n=3, max_tokens_per_doc=4096)
    assert pairs(found["results"]) == expected[:3]
    assert found["meta"]["api_version"] == {"version": "2"}
    assert found.keys() == {"id", "results", "meta", "warnings"}
    assert "max_tokens_per_doc" in found["warnings"][0]


def test_text_embeddings_inference(ranking_gateway: Gateway, expected: list[tuple[int, float]]) -> None:
    for return_text in (False, True):
        with ranking_gateway.http() as client:
            body = {"query": QUERY, "texts": DOCUMENTS, "return_text": return_text}
            found = client.post("/rerank", json=body).json()
        assert [(each["index"], pytest.approx(each["score"], abs=ROUNDING)) for each in found] == expected
        assert [each.get("text") for each in found] == [DOCUMENTS[n] if return_text else None for n, _ in expected]


@pytest.mark.parametrize(
    ("wrong", "parameter", "said"),
    [
        ({"documents": []}, "documents", "documents"),
        ({"documents": None}, "documents", "give documents"),
        ({"texts": ["x"]}, "documents", "give documents"),
        ({"documents": ["x"] * 2049}, "documents", "2048"),
        ({"documents": ["x", 1]}, "documents[1]", "documents"),
        ({"documents": [{"text": 1}]}, "documents[0].text", "text"),
        ({"query": None}, "query", "query"),
        ({"query": ""}, "query", "query"),
        ({"top_n": 0}, "top_n", "top_n"),
        ({"documents": ["x", "one two " * 600]}, "documents[1]", "with the query has"),
        ({"documents": None, "texts": ["one two " * 600]}, "texts[0]", "with the query has"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    ranking_gateway: Gateway, wrong: dict[str, object], parameter: str, said: str
) -> None:
    error = rank(ranking_gateway, status=400, **wrong)["error"]
    assert error["param"] == parameter
    assert said in error["message"]
    ranking_gateway.daemon.settled()


def test_a_model_that_generates_says_what_is_needed(gateway: Gateway) -> None:
    error = rank(gateway, status=400)["error"]
    assert error["param"] == "model"
    assert "does not rank documents. It generates text" in error["message"]


def test_a_reranker_says_what_it_does_instead(ranking_gateway: Gateway) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        "/api/chat": {"model": "reranker", "messages": [{"role": "user", "content": "hi"}]},
        "/v1/embeddings": {"input": "hi"},
        "/api/embed": {"model": "reranker", "input": "hi"},
    }
    with ranking_gateway.http() as client:
        for path, body in bodies.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "It ranks documents for a query: send it a rerank request" in answer.text
        models = client.get("/v1/models").json()["data"]
        assert models[0]["capabilities"] == ["rerank"]
        shown = client.post("/api/show", json={"model": "reranker"}).json()
        assert shown["capabilities"] == []
        assert shown["model_info"]["bert.context_length"] == 512
