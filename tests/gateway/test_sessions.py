"""Sessions over HTTP: which fields and headers name one in each API, and what a request with such a name does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.support.profile import sampled

SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
AGAIN = {"role": "user", "content": "And what is the capital of Peru?"}


@attrs.frozen
class Api:
    """How clients of an API send a conversation, and find the text of the answer."""

    path: str
    name: str

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        match self.name:
            case "anthropic":
                return {"model": "embedded", "max_tokens": 50, "system": "Be kind.", "messages": messages[1:]}
            case "responses":
                return {"input": messages}
        return {"model": "embedded", "messages": messages}

    def text(self, answer: httpx.Response) -> str:
        found = answer.json()
        match self.name:
            case "openai":
                text: str = found["choices"][0]["message"]["content"]
            case "responses":
                text = found["output"][0]["content"][0]["text"]
            case "anthropic":
                text = found["content"][0]["text"]
            case _:
                text = found["message"]["content"]
        return text


APIS = [
    Api("/v1/chat/completions", "openai"),
    Api("/v1/responses", "responses"),
    Api("/v1/messages", "anthropic"),
    Api("/api/chat", "ollama"),
]
BY = {
    "field": lambda name: ({"session_id": name}, {}),
    "header": lambda name: ({}, {"x-session-id": name}),
    "header of Claude Code": lambda name: ({}, {"x-claude-code-session-id": name}),
}


def sessions(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", id="q")
        event = wire.receive()
    assert event is not None
    return [each for each in event["sessions"] if each["session_id"].partition(":")[0] == name]


def transcript(gateway: Gateway, name: str) -> list[tuple[str, str]]:
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", action="read", session_id=name, id="q")
        event = wire.receive()
    assert event is not None
    return [(each["role"], each["content"]) for each in event["messages"]]


@pytest.mark.parametrize("by", sampled(BY, 3))
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_whole_conversation_replaces_what_its_session_has(gateway: Gateway, api: Api, by: str) -> None:
    name = f"{api.name} {by}"
    fields, headers = BY[by](name)
    messages = [SYSTEM, QUESTION]
    with gateway.http() as client:
        for turns in (1, 2):
            answer = client.post(api.path, json={**api.body(messages), **fields, "stream": False}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "warnings" not in answer.json()
            messages = [*messages, {"role": "assistant", "content": api.text(answer)}, AGAIN]
            [found] = sessions(gateway, name)
            assert (found["turns"], found["durable"]) == (turns, True)
            assert transcript(gateway, found["session_id"]) == [
                (each["role"], each["content"]) for each in messages[:-1]
            ]
            exact = found["session_id"] == name
            assert exact == (by == "field")
        edited = [SYSTEM, AGAIN]
        client.post(api.path, json={**api.body(edited), **fields, "stream": False}, headers=headers).raise_for_status()
        assert transcript(gateway, found["session_id"])[:-1] == [(each["role"], each["content"]) for each in edited]
        closed = client.post("/v1/session/close", json={"session_id": found["session_id"]})
    assert closed.json()["closed"] is True
    assert not sessions(gateway, name)


def test_a_cache_key_names_a_session_for_each_system_prompt(gateway: Gateway) -> None:
    with gateway.http() as client:
        for system in ("Be kind.", "Be brief.", "Be kind."):
            body = {"messages": [{**SYSTEM, "content": system}, QUESTION], "prompt_cache_key": "key"}
            client.post("/v1/chat/completions", json=body).raise_for_status()
    assert sorted(each["turns"] for each in sessions(gateway, "key")) == [1, 2]


def test_in_the_native_api_a_request_continues_its_session_as_over_the_socket(gateway: Gateway) -> None:
    with gateway.http() as client:
        for turns, message in enumerate((QUESTION, AGAIN), 1):
            body = {"messages": [message], "session_id": "native", "stream": False}
            found = client.post("/v1/generate", json=body, headers={"x-session-id": "no effect"}).json()
            assert found["session"]["turns"] == turns
        assert [role for role, _ in transcript(gateway, "native")] == ["user", "assistant", "user", "assistant"]
        client.post("/v1/generate", json={**body, "history": "replace"}).raise_for_status()
    assert len(transcript(gateway, "native")) == 2
    assert not sessions(gateway, "no effect")


def test_sessions_are_listed_read_forked_renamed_and_closed(gateway: Gateway) -> None:
    with gateway.http() as client:
        body = {"messages": [QUESTION], "session_id": "made", "stream": False}
        ended = client.post("/v1/generate", json=body).json()
        answer = ended["text"]
        read = client.post("/v1/session/read", json={"session_id": "made"}).json()
        assert [(each["role"], each["content"]) for each in read["messages"]] == [
            ("user", QUESTION["content"]),
            ("assistant", answer),
        ]
        question, reply = (each["generation"] for each in read["messages"])
        assert question is None
        assert reply["reason"] == ended["reason"]
        for kind in ("usage", "timings"):
            assert {name: value for name, value in reply[kind].items() if value is not None} == ended[kind]
        again = {**body, "messages": [{**QUESTION, "generation": reply}]}
        assert client.post("/v1/generate", json=again).status_code == 400
        assert read["session"]["title"] == QUESTION["content"]
        forked = client.post("/v1/session/fork", json={"session_id": "made", "new_id": "copy"})
        assert forked.json()["session"]["session_id"] == "copy"
        renamed = client.post("/v1/session/rename", json={"session_id": "copy", "title": "Ein Titel"})
        assert renamed.json()["session"]["title"] == "Ein Titel"
        found = client.get("/v1/sessions", params={"contains": "ein TITEL", "model": "embedded"}).json()["sessions"]
        assert [(each["session_id"], each["turns"]) for each in found] == [("copy", 1)]
        assert client.get("/v1/sessions", params={"contains": "\0"}).json()["sessions"] == []
        assert client.get("/v1/sessions", params={"model": "no such"}).status_code == 404
        for name in ("made", "copy"):
            client.post("/v1/session/close", json={"session_id": name}).raise_for_status()
        assert client.post("/v1/session/read", json={"session_id": "made"}).status_code == 404


@pytest.fixture
def busy(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[str]:
    """A session whose request runs.  Each test has its own, since one is busy until it is on disk."""
    name = request.node.name
    with gateway.daemon.wire() as wire:
        wire.send(id="r", messages=[QUESTION], session_id=name, max_tokens=3000, ignore_eos=True)
        assert wire.receive()["event"] == "token"  # type: ignore[index]
        yield name
    gateway.daemon.settled()


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_busy_session_is_no_error_for_a_whole_conversation(gateway: Gateway, busy: str, api: Api) -> None:
    with gateway.http() as client:
        answer = client.post(api.path, json={**api.body([SYSTEM, QUESTION]), "session_id": busy, "stream": False})
        assert answer.status_code == 200
        assert api.text(answer)
        refused = client.post("/v1/generate", json={"messages": [QUESTION], "session_id": busy, "max_tokens": 5})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "E_SESSION_BUSY")


def test_a_session_has_one_answer(gateway: Gateway) -> None:
    body = {"messages": [QUESTION], "n": 2, "max_tokens": 3}
    with gateway.http() as client:
        for fields, headers in (({}, {"x-session-id": "several"}), ({"prompt_cache_key": "several"}, {})):
            found = client.post("/v1/chat/completions", json={**body, **fields}, headers=headers)
            assert len(found.json()["choices"]) == 2
        refused = client.post("/v1/chat/completions", json={**body, "session_id": "several"})
    assert refused.status_code == 400
    assert "n must be 1 with session_id" in refused.text
    assert not sessions(gateway, "several")


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_a_session_of_one_plain_prompt(gateway: Gateway, path: str) -> None:
    with gateway.http() as client:
        for turns in (1, 2):
            body = {"prompt": "Once upon a time", "max_tokens": 4, "session_id": path}
            client.post(path, json=body).raise_for_status()
            assert [each["turns"] for each in sessions(gateway, path)] == [turns]
        refused = client.post(path, json={**body, "prompt": ["Once", "Twice"]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "session_id"


@pytest.mark.parametrize("name", ["", "x" * 257, 5, None])
def test_names_that_are_none(gateway: Gateway, name: object) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [QUESTION], "session_id": name})
    if name is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "session_id"
