"""The requests that Open WebUI 0.12.4 sends, as it was seen to send them, over its connections to OpenAI's and Ollama's APIs.

Its own tools, 24 KB of them, are here the first two.  Its tasks (title, tags, follow-ups) differ in their text only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Gateway

QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."
TASK = (
    "### Task:\nGenerate a concise title summarizing the chat history.\n### Output:\n"
    'JSON format: { "title": "your concise title here" }\n### Chat History:\n<chat_history>\n'
    "USER: What is the capital of France?\nASSISTANT: \n</chat_history>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_timestamp",
            "description": "Get the current Unix timestamp in seconds.",
            "parameters": {"properties": {}, "type": "object"},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculate_timestamp",
            "description": 'Get the current Unix timestamp.\nExamples: "last week" = weeks_ago=1',
            "parameters": {
                "properties": {"days_ago": {"default": 0, "description": "Number of days ago", "type": "integer"}},
                "type": "object",
            },
        },
    },
]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    """As its server asks: with a key that means nothing."""
    with gateway.http() as client:
        client.headers["Authorization"] = "Bearer none"
        yield client


def chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_its_lists_of_models(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["embedded"]
    [model] = client.get("/api/tags", headers={"Content-Type": "application/json"}).json()["models"]
    assert (model["name"], model["model"]) == ("embedded:latest", "embedded:latest")
    assert [each["model"] for each in client.get("/api/ps").json()["models"]] == ["embedded:latest"]
    assert client.get("/api/version").json()["version"]


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_chat_over_openais_api(client: httpx.Client, tools: list[Any]) -> None:
    body = {"stream": True, "model": "embedded", "messages": [QUESTION], **({"tools": tools} if tools else {})}
    *events, done = chunks(client, "/v1/chat/completions", body)
    deltas = [json.loads(each)["choices"][0]["delta"] for each in events]
    assert done == "[DONE]"
    if not tools:  # with them it may call one
        assert "".join(each.get("content") or "" for each in deltas) == ANSWER
    task = {"model": "embedded", "messages": [{"role": "user", "content": TASK}], "stream": False, "max_tokens": 1000}
    assert client.post("/v1/chat/completions", json=task).json()["choices"][0]["message"]["content"]


def test_a_chat_over_ollamas_api(client: httpx.Client) -> None:
    lines = chunks(client, "/api/chat", {"model": "embedded:latest", "messages": [QUESTION], "stream": True})
    events = [json.loads(each) for each in lines]
    assert "".join(each["message"]["content"] for each in events) == ANSWER
    assert [each["done"] for each in events[-2:]] == [False, True]
    task = {"model": "embedded:latest", "messages": [{"role": "user", "content": TASK}], "stream": False}
    found = client.post("/api/chat", json={**task, "options": {"num_predict": 1000}}).json()
    assert found["message"]["content"]
    assert "warnings" not in found
