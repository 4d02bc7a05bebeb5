"""The OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.openapi import document


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
