"""Every answer has the shape that the OpenAPI document says, streamed or whole, with all that a request may ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.gateway.conftest import Gateway
from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.endpoint import Endpoint

QUESTION = {"role": "user", "content": "What is the capital of France?"}
CHAT = {"messages": [QUESTION]}
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Lima"]}}, "required": ["city"]},
}
CALL = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
SCHEMA = {"name": "weather", "input_schema": TOOL["parameters"]}
OF_OLLAMA = {"model": "embedded", "tools": [{"function": TOOL}], "logprobs": True, "top_logprobs": 1}
UNKNOWN = {"nothing": 1}
RANK = {"query": "a", "documents": ["b", "c"]}
TELEMETRY = {"return_progress": True, "timings_per_token": True}
VERBOSE = {**TELEMETRY, "verbose": True}
SHORT = {"max_tokens": 3}
"""For prompts without a chat template, whose answers have no end."""
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [CHAT, {**CHAT, **CALL}, {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, **UNKNOWN}, {**CHAT, **VERBOSE}],
    "/v1/chat/completions/input_tokens": [CHAT, {**CHAT, **UNKNOWN}],
    "/v1/chat/completions/render": [CHAT, {**CHAT, **UNKNOWN}],
    "/v1/completions": [{"prompt": ["a", [5]], "n": 2, **SHORT}, {"prompt": "a", "logprobs": 1, **SHORT, **UNKNOWN}, {"prompt": "a", **SHORT, **VERBOSE}],
    "/v1/completions/render": [{"prompt": ["a", [5]]}],
    "/v1/embeddings": [{"input": ["a", [5]]}, {"input": "a", "encoding_format": "base64", **UNKNOWN}],
    "/v1/rerank": [RANK, {**RANK, "return_documents": True, **UNKNOWN}, {"query": "a", "texts": ["b"], "return_text": True}],
    "/v2/rerank": [RANK, {**RANK, "return_documents": True, **UNKNOWN}],
    "/v1/responses": [{"input": "Hi", **UNKNOWN}, {"input": "Hi", "tools": [{"type": "function", **TOOL}], "top_logprobs": 1}, {"input": "Hi", **TELEMETRY}],
    "/v1/responses/input_tokens": [{"input": "Hi"}],
    "/v1/responses/render": [{"input": "Hi"}],
    "/v1/conversations": [{}, {"metadata": {"a": "b"}, **UNKNOWN}],
    "/v1/messages": [{**CHAT, "max_tokens": 5, **UNKNOWN}, {**CHAT, "max_tokens": 99, "tools": [SCHEMA], "tool_choice": {"type": "any"}}],
    "/v1/messages/count_tokens": [CHAT],
    "/api/chat": [{**CHAT, **OF_OLLAMA, **UNKNOWN}, {"model": "embedded"}],
    "/api/generate": [{"model": "embedded", "prompt": "Hi", **UNKNOWN}, {"model": "embedded"}],
    "/api/embed": [{"model": "embedded", "input": ["a"], **UNKNOWN}],
    "/api/embeddings": [{"model": "embedded", "prompt": "a", **UNKNOWN}],
    "/api/show": [{"model": "embedded"}],
    "/api/pull": [{"model": "embedded", **UNKNOWN}],
    "/v1/models/load": [{"model": "embedded"}],
    "/v1/models/unload": [{"model": "embedded", **UNKNOWN}],
    "/v1/models/reload": [{"model": "embedded"}],
    "/tokenize": [{"content": "a b"}, CHAT, {"content": "a", "with_pieces": True}],
    "/detokenize": [{"tokens": [5]}],
    "/apply-template": [CHAT],
    "/completion": [{"prompt": "a", "n_predict": 3, "n_probs": 2, **UNKNOWN}, {"prompt": ["a", "b"], "n_predict": 3, "return_progress": True}],
    "/infill": [{"input_prefix": "a", "input_suffix": "b", "n_predict": 3, **UNKNOWN}],
    "/v1/generate": [{**CHAT, "logprobs": 1, "separate_reasoning": True, **UNKNOWN}, {"prompt": "a", "n": 2, "max_tokens": 3}],
    "/v1/tokenize": [{"text": "a"}, {"tokens": [5]}],
}  # fmt: skip
SAME = {"/completions": "/completion", "/chat/completions": "/v1/chat/completions", "/responses": "/v1/responses"}
SAME |= {
    f"/{api}/{last}": f"/v1/{api}/{last}"
    for api in ("chat/completions", "responses")
    for last in ("input_tokens", "render")
}
SAME["/conversations"] = "/v1/conversations"
SAME |= dict.fromkeys(("/rerank", "/reranking", "/v1/reranking"), "/v1/rerank")
SAME |= {f"/models/{action}": f"/v1/models/{action}" for action in ("load", "unload", "reload")}


GATEWAYS = {"/infill": "infill_gateway", "rerank": "ranking_gateway"}
"""Fixtures for paths that need another model."""


def gateway_of(endpoint: Endpoint, request: pytest.FixtureRequest) -> Gateway:
    found: Gateway = request.getfixturevalue(
        next((name for path, name in GATEWAYS.items() if path in endpoint.path), "gateway")
    )
    return found


def shaped(value: object, shapes: tuple[Any, ...]) -> bool:
    """Whether a value has one of these shapes."""
    errors = []
    for shape in shapes:
        try:
            msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            errors.append(str(error))
        else:
            return True
    raise AssertionError(f"{errors}: {value}")


def cases() -> Iterator[Any]:
    for endpoint in ENDPOINTS:
        name, marks = f"{endpoint.method} {endpoint.path}", [pytest.mark.thorough] * (endpoint.path in SAME)
        is_empty = "controllers" in endpoint.path or "{id}" in endpoint.path  # unless something was uploaded
        if endpoint.method == "GET" and endpoint.shapes and not is_empty:
            yield pytest.param(endpoint, None, id=name)
        for number, body in enumerate(REQUESTS.get(SAME.get(endpoint.path, endpoint.path), ())):
            yield pytest.param(endpoint, body, id=f"{name} {number}", marks=marks)


CASES = [*cases()]
STREAMED = [case for case in CASES if case.values[0].event_shape is not None]


@pytest.mark.parametrize(("endpoint", "body"), CASES)
def test_a_whole_answer(endpoint: Endpoint, body: dict[str, Any] | None, request: pytest.FixtureRequest) -> None:
    with gateway_of(endpoint, request).http() as client:
        path = endpoint.path.replace("{name:path}", "embedded")
        if body is None:
            answer = client.get(path)
        else:
            stream = {"stream": False} if endpoint.event_shape is not None else {}
            answer = client.post(path, json={**body, **stream})
    assert answer.status_code == 200, answer.text
    assert shaped(answer.json(), endpoint.shapes)


@pytest.mark.parametrize(("endpoint", "body"), STREAMED)
def test_a_streamed_answer(endpoint: Endpoint, body: dict[str, Any], request: pytest.FixtureRequest) -> None:
    with gateway_of(endpoint, request).http() as client:
        found = client.post(endpoint.path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith(("data: ", "{"))]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events
    assert all(shaped(event, (endpoint.event_shape,)) for event in events)


def test_every_endpoint_that_has_a_body_and_shapes_is_tried() -> None:
    wanted = {each.path for each in ENDPOINTS if each.body is not None and each.shapes}
    tried = {SAME.get(path, path) for path in wanted} & REQUESTS.keys()
    assert {SAME.get(path, path) for path in wanted} - tried == {
        *(f"/v1/session/{action}" for action in ("read", "fork", "rename", "close", "stop")),
        *("/v1/controllers/tags", "/api/create", "/v1/batches", "/v1/peer", "/v1/requests/{id}/steer"),
    }
