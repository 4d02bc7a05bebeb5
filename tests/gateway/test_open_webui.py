"""The requests that Open WebUI 0.12.4 sends, as it was seen to send them, over its connections to OpenAI's and Ollama's APIs.

Its own tools, 24 KB of them, are here the first two.  Its tasks (title, tags, follow-ups) differ in their text only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import ROOT

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


def test_an_answer_that_was_stopped_is_continued(client: httpx.Client) -> None:
    """It sends the beginning as the last message, and appends what it gets."""
    messages = [QUESTION, {"role": "assistant", "content": "The capital of "}]
    body = {"stream": True, "model": "embedded", "stream_options": {"include_usage": True}, "messages": messages}
    events = [json.loads(each) for each in chunks(client, "/v1/chat/completions", body)[:-1]]
    assert (
        "".join(each["delta"].get("content") or "" for event in events for each in event["choices"])
        == "France is Paris."
    )
    lines = chunks(client, "/api/chat", {"model": "embedded:latest", "messages": messages, "stream": True})
    assert "".join(json.loads(each)["message"]["content"] for each in lines) == "France is Paris."


def test_a_file_and_a_picture(client: httpx.Client) -> None:
    """It asks for embeddings of a file, then with a text from it, and about a picture."""
    judge = "The judge of Quudshomere is Una Baker."
    [found] = client.post("/v1/embeddings", json={"input": [judge], "model": "embedded"}).json()["data"]
    assert len(found["embedding"]) == 256
    source = f"<context>\n<source>{judge}</source>\n</context>\n\nWho is the judge of Quudshomere?"
    body = {"stream": True, "model": "embedded", "messages": [{"role": "user", "content": source}]}
    events = [json.loads(each) for each in chunks(client, "/v1/chat/completions", body)[:-1]]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == judge
    picture = base64.b64encode((ROOT / "docs" / "shapes.png").read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{picture}"}
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": url}]
    asked = {**body, "stream": False, "messages": [{"role": "user", "content": parts}]}
    found = client.post("/v1/chat/completions", json=asked).json()
    assert found["choices"][0]["message"]["content"] == "Two red circles."


def test_a_chat_over_ollamas_api(client: httpx.Client) -> None:
    lines = chunks(client, "/api/chat", {"model": "embedded:latest", "messages": [QUESTION], "stream": True})
    events = [json.loads(each) for each in lines]
    assert "".join(each["message"]["content"] for each in events) == ANSWER
    assert [each["done"] for each in events[-2:]] == [False, True]
    task = {"model": "embedded:latest", "messages": [{"role": "user", "content": TASK}], "stream": False}
    found = client.post("/api/chat", json={**task, "options": {"num_predict": 1000}}).json()
    assert found["message"]["content"]
    assert "warnings" not in found
