"""The page about the API: every endpoint of the OpenAPI document is on it, and nothing comes from elsewhere."""

from __future__ import annotations

import html

import pytest

from tests.gateway.conftest import Gateway
from uma_trio.gateway import reference_page
from uma_trio.gateway.reference_page import groups_of, type_of


def test_every_operation_is_on_the_page(gateway: Gateway) -> None:
    with gateway.http() as http:
        page = http.get("/docs")
        api = http.get("/openapi.json").json()
        style = http.get("/docs/style.css")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    for path, operations in api["paths"].items():
        if path == "/openapi.json":
            continue
        for method, operation in operations.items():
            assert f'id="{operation["operationId"]}"' in page.text, (method, path)
            assert html.escape(operation["summary"]).replace("&#x27;", "&#39;") in page.text, (method, path)


def test_a_request_has_its_fields_with_types_and_descriptions(gateway: Gateway) -> None:
    with gateway.http() as http:
        groups = groups_of(http.get("/openapi.json").json())
    [chat] = [each for each in groups["OpenAI"] if each["path"] == "/v1/chat/completions"]
    takes = {each["name"]: each for each in chat["takes"]}
    assert takes["messages"]["is_required"]
    assert takes["top_k"]["type"] == "integer"
    assert takes["top_k"]["description"]
    assert {each["name"] for each in chat["gives"]} >= {"id", "choices", "usage"}
    [stored] = [each for each in groups["OpenAI"] if each["path"] == "/v1/responses/{id}" and each["method"] == "GET"]
    shown = {each["name"]: (each["type"], each["is_required"]) for each in stored["parameters"]}
    assert shown == {"id": ("string", True), "stream": ("boolean", False), "starting_after": ("integer", False)}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "integer"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/a.b.Tool"}}, "array of Tool"),
        ({"enum": ["low", "high"]}, "'low' or 'high'"),
        ({"default": None}, "anything"),
        ({"type": ["string", "number"]}, "string or number"),
    ],
)
def test_a_schema_in_words(schema, words) -> None:
    assert type_of(schema) == words


def test_what_endpoints_say_cannot_become_markup(monkeypatch) -> None:
    operation = {
        "operationId": "x",
        "summary": "<script>alert(1)</script>",
        "description": "a < b",
        "tags": ["openai"],
        "responses": {"200": {"content": {}}},
    }
    api = {"paths": {"/x": {"get": operation}}, "components": {"schemas": {}}}
    monkeypatch.setattr(reference_page, "document", lambda endpoints: api)
    found = reference_page._render([]).decode()
    assert "&lt;script&gt;alert(1)" in found
    assert "<script" not in found
