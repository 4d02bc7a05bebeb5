"""The native API: the socket protocol over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway

PROMPT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
ANSWER = "The capital of France is Paris."


def events_of(text: str) -> list[dict[str, Any]]:
    """The server-sent events of a body."""
    found = []
    for block in text.split("\n\n"):
        if block:
            event, data = block.split("\n")
            found.append({"event": event.removeprefix("event: "), **json.loads(data.removeprefix("data: "))})
    return found


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream", "application/x-ndjson", "application/json"])
def test_a_stream_has_the_events_of_the_socket(gateway: Gateway, accept: str) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/generate", json=PROMPT, headers={"Accept": accept})
    if "json" in accept:
        assert answer.headers["content-type"] == "application/x-ndjson"
        events = [json.loads(line) for line in answer.text.splitlines()]
    else:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
    over_socket = gateway.daemon.ask(**PROMPT)
    assert [event["event"] for event in events] == [event["event"] for event in over_socket.events]
    assert [event.get("token_id") for event in events[:-1]] == over_socket.ids
    assert events[-1]["request_id"] == answer.headers["x-request-id"]


def test_a_whole_answer(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.post("/v1/generate", json={**PROMPT, "stream": False}).json()
    assert found["text"] == ANSWER
    assert found["reason"] == "stop"
    assert found["usage"]["completion_tokens"] > 3


def test_stop_may_hold_texts_and_tokens(gateway: Gateway) -> None:
    with gateway.http() as client:
        token = client.post("/v1/tokenize", json={"text": " capital", "add_special": False}).json()["tokens"][0]
        by_token = client.post("/v1/generate", json={**PROMPT, "stream": False, "stop": ["zzz", token]}).json()
        by_text = client.post("/v1/generate", json={**PROMPT, "stream": False, "stop": [" of", 0]}).json()
    assert by_token["text"] == "The"
    assert by_text["text"] == "The capital"


def test_tokens_and_offsets_and_back(gateway: Gateway) -> None:
    text = "Hello there, café 🦊!"
    with gateway.http() as client:
        found = client.post("/v1/tokenize", json={"text": text, "add_special": False}).json()
        back = client.post("/v1/tokenize", json={"tokens": found["tokens"]}).json()
    assert back["text"] == text
    assert len(found["offsets"]) == len(found["tokens"])
    assert found["offsets"] == sorted(found["offsets"])
    assert found["offsets"][0] == 0


def test_a_session_goes_on_and_is_closed(gateway: Gateway) -> None:
    with gateway.http() as client:
        options = {"session_id": "over-http", "stream": False, "max_tokens": 5}
        first = client.post("/v1/generate", json={"prompt": "Once upon a time", **options}).json()
        second = client.post("/v1/generate", json={"prompt": " and", **options}).json()
        assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        assert client.post("/v1/session/close", json={"session_id": "over-http"}).json()["closed"] is True
        gone = client.post("/v1/session/close", json={"session_id": "over-http"})
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "E_SESSION_NOT_FOUND"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {}),
        ("/v1/generate", {"prompt": 3}),
        ("/v1/generate", {"messages": 3}),
        ("/v1/generate", {"prompt": "x", "stream": 3}),
        ("/v1/generate", {"prompt": "x", "n": 99}),
        ("/v1/generate", {"prompt": "x", "n": 0}),
        ("/v1/generate", {"prompt": "x", "n": {}}),
        ("/v1/generate", {"prompt": "x", "stop": [1], "stop_token_ids": 5}),
        ("/v1/generate", {"prompt": [10**12]}),
        ("/v1/tokenize", {}),
        ("/v1/tokenize", {"text": "x", "tokens": [1]}),
        ("/v1/tokenize", {"tokens": [10**6]}),
        ("/v1/tokenize", {"tokens": [-1]}),
        ("/v1/session/close", {}),
        ("/v1/session/close", {"session_id": ""}),
    ],
)
def test_wrong_requests(gateway: Gateway, path: str, body: dict[str, object]) -> None:
    with gateway.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


def test_who_asks_is_not_chosen_by_the_client(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.post("/v1/generate", json={**PROMPT, "stream": False, "principal": "root", "id": "x"}).json()
    assert found["text"] == ANSWER
    assert len(found["warnings"]) == 2


def test_what_has_no_effect_is_named_also_by_the_daemon(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with gateway.http() as client:
        body = {"messages": messages, "max_tokens": 3, "temprature": 1, "stream": False}
        unknown, new_message = client.post("/v1/generate", json=body).json()["warnings"]
        assert "did you mean temperature?" in unknown
        assert "continue_final_message" in new_message
        chosen = client.post("/v1/generate", json={**body, "continue_final_message": False}).json()["warnings"]
        assert chosen == [unknown]
        items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        assert "is a new message" in client.post("/v1/responses", json={"input": items}).json()["warnings"][0]


def test_every_endpoint_names_parameters_that_it_does_not_know(gateway: Gateway) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies = {
        "/v1/messages/count_tokens": chat,
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/v1/chat/completions/input_tokens": chat,
        "/v1/chat/completions/render": chat,
        "/v1/tokenize": {"text": "Hi"},
        "/tokenize": {"content": "Hi"},
        "/detokenize": {"tokens": [5]},
        "/apply-template": chat,
        "/api/show": {"model": "embedded"},
        "/api/chat": {"model": "embedded"},
        "/api/generate": {"model": "embedded"},
        "/v1/models/load": {"model": "embedded"},
    }
    with gateway.http() as client:
        for path, body in bodies.items():
            assert "'colour'" in client.post(path, json={**body, "colour": 1}).json()["warnings"][0], path
