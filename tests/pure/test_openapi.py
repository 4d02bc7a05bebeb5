"""The OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from uma_trio.gateway.answer import POSITION
from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.endpoint import Call, Dialect, by_path
from uma_trio.gateway.errors import ETA
from uma_trio.gateway.openapi import document

GATEWAY = Path(__file__).parents[2] / "uma_trio" / "gateway"


def patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, each in schema.items():
            if name == "pattern" and isinstance(each, str):
                yield each
            yield from patterns(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from patterns(each)


def test_patterns_are_those_of_json_schema() -> None:
    found = {*patterns(document(ENDPOINTS))}
    assert "^[0-9a-f]{64}$" in found
    assert not [each for each in found if r"\Z" in each or r"\A" in each]


def refuses_warnings(schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return refuses_warnings(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return schema.get("additionalProperties") is False and "warnings" not in schema["properties"]


def test_each_answer_to_json_may_have_warnings() -> None:
    """An unknown field of a request has no effect, and the answer says so, whatever the endpoint."""
    found = document(ENDPOINTS)
    wrong = [
        endpoint.path
        for endpoint in ENDPOINTS
        if endpoint.body is not None
        for code, answer in found["paths"][endpoint.path][endpoint.method.lower()]["responses"].items()
        if code.startswith("2")
        for content in answer.get("content", {}).values()
        if refuses_warnings(content.get("schema", {}), found["components"]["schemas"])
    ]
    assert not wrong


def test_parameters_of_queries_are_documented() -> None:
    def parameters(path: str, method: str = "get") -> dict[str, Any]:
        found = document(ENDPOINTS)["paths"][path][method]["parameters"]
        return {each["name"]: each["schema"] for each in found if each["in"] == "query"}

    assert parameters("/v1/watch") == {
        "model": {"type": "string"},
        "interval_ms": {"type": "integer", "minimum": 50, "maximum": 60_000, "default": 250},
    }
    assert parameters("/v1/responses/{id}")["stream"] == {"type": "boolean", "default": False}
    limit = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1000}, {"type": "string"}]}
    assert parameters("/v1/models") == {
        "limit": limit,
        "after_id": {"type": "string"},
        "before_id": {"type": "string"},
    }, "those of Anthropic's API, which has the same path, do not bind other clients"
    assert parameters("/v1/models/{name}") == {}, "one model has no pages"
    assert set(parameters("/v1/controllers/{module_id}", "delete")) == {"owner"}


def test_headers_of_responses_are_documented() -> None:
    found = document(ENDPOINTS)
    responses = found["paths"]["/v1/generate"]["post"]["responses"]
    assert set(responses["200"]["headers"]) == {"x-request-id", POSITION, ETA}
    assert set(responses["404"]["headers"]) == {"x-request-id"}
    assert set(found["paths"]["/v1/models"]["get"]["responses"]["200"]["headers"]) == {"x-request-id"}
    assert found["components"]["headers"][POSITION]["schema"] == {"type": "integer"}


def test_all_parameters_of_queries_are_read_in_one_place() -> None:
    """There an assertion holds the endpoint to what the document says."""
    readers = [each.name for each in GATEWAY.rglob("*.py") if "query_params" in each.read_text()]
    assert readers == ["endpoint.py"]


def test_a_header_says_which_of_two_dialects_of_a_path_is_meant() -> None:
    """The first one has the requests without it."""

    async def answer(call: Call) -> Response:
        raise AssertionError

    plain = Dialect("plain", "Plain", lambda *_: "").get("/v1/models", answer, int)
    marked = Dialect("marked", "Marked", lambda *_: "", header="x-mark").get("/v1/models", answer, str)
    [both] = by_path([plain, marked])
    assert both.chosen_by([]).dialect.name == "plain"
    assert both.chosen_by(["x-mark"]).dialect.name == "marked"
    assert both.shapes == (int, str)
    with pytest.raises(ValueError, match="GET /v1/models has two endpoints"):
        by_path([marked, plain])
