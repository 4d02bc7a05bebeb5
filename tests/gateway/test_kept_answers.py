"""Answers that go on when their client leaves; and sessions of a gateway that asks other machines for no key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.gateway.conftest import TIMEOUT_S, Gateway
from tests.support.real_daemon import missing, real_daemon

QUESTION = {"role": "user", "content": "Count from 1 to 900."}
Events = list[tuple[str, dict[str, Any]]]


def events_of(answer: httpx.Response, last: str = "") -> Events:
    """The events of a stream; up to the first ``last``, after which the client leaves."""
    found, name = [], ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
            if name == last:
                break
    return found


def text_of(events: Events) -> str:
    return "".join(data["text"] for name, data in events if name == "token")


def begin(client: httpx.Client, session: str, last: str = "token", **fields: Any) -> Events:
    """Begin an answer, and leave after the first event named ``last``."""
    body = {"session_id": session, "messages": [QUESTION], "max_tokens": 2000, **fields}
    with client.stream("POST", "/v1/session/answer", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise AssertionError(answer.text)
        return events_of(answer, last)


def close(client: httpx.Client, session: str) -> None:
    client.post("/v1/session/close", json={"session_id": session}).raise_for_status()


def test_an_answer_goes_on_without_its_client_and_is_followed_from_its_beginning(gateway: Gateway) -> None:
    with gateway.http() as client:
        begin(client, "kept", max_tokens=60, ignore_eos=True)
        with client.stream("POST", "/v1/session/follow", json={"session_id": "kept"}) as answer:
            events = events_of(answer)
        read = client.post("/v1/session/read", json={"session_id": "kept"}).json()
        assert [name for name, _ in events[:2]] == ["request", "token"]
        assert events[0][1]["messages"] == [QUESTION]
        assert (events[-1][0], events[-1][1]["usage"]["completion_tokens"]) == ("eos", 60)
        assert read["messages"][1]["content"] == text_of(events)
        ended = client.post("/v1/session/follow", json={"session_id": "kept"})
        assert (ended.status_code, ended.json()["error"]["code"]) == (404, "E_GATEWAY_NO_ANSWER")
        close(client, "kept")


def test_an_answer_that_is_stopped_leaves_what_was_sent(gateway: Gateway) -> None:
    with gateway.http() as client:
        begin(client, "stopped", ignore_eos=True)
        with client.stream("POST", "/v1/session/follow", json={"session_id": "stopped"}) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line.startswith("event: token"))
            assert client.post("/v1/session/stop", json={"session_id": "stopped"}).json()["stopped"] is True
            last = [line for line in lines if line.startswith("data: ")][-1]
            assert json.loads(last[6:])["reason"] == "cancelled"
        gateway.daemon.settled()
        read = client.post("/v1/session/read", json={"session_id": "stopped"}).json()
        assert read["messages"][1]["content"]
        close(client, "stopped")


def test_refusals_have_a_status_and_leave_nothing_running(gateway: Gateway) -> None:
    with gateway.http() as client:
        for fields, status in (
            ({"max_tokens": -1}, 400),
            ({"messages": [QUESTION], "model": "no such"}, 404),
            ({"session_id": None}, 400),
            ({"stream": False}, 400),
        ):
            body = {"session_id": "refused", "messages": [QUESTION], **fields}
            assert client.post("/v1/session/answer", json=body).status_code == status, fields
        assert client.post("/v1/session/stop", json={"session_id": "refused"}).status_code == 404


def test_a_session_has_one_answer_at_a_time_and_then_another_one(gateway: Gateway) -> None:
    body = {"messages": [QUESTION], "session_id": "busy", "max_tokens": 5}
    with gateway.http() as client:
        begun = begin(client, "busy", ignore_eos=True, max_tokens=3000)[0][1]["request_id"]
        busy = client.post("/v1/session/answer", json=body)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "E_SESSION_BUSY")
        client.post("/v1/session/stop", json={"session_id": "busy"}).raise_for_status()
        assert begin(client, "busy", last="eos", max_tokens=5)[-1][1]["session"]["turns"] == 2
        close(client, "busy")
        gateway.daemon.settled()
        assert begun not in [each["answer_id"] for each in gateway.daemon.ask(type="answers").last["answers"]]


# -- other machines without a key --


def own_address() -> str | None:
    """An address of this machine that is not the loopback's."""
    addresses = [each for found in psutil.net_if_addrs().values() for each in found]
    return next(
        (each.address for each in addresses if each.family is socket.AF_INET and each.address[:4] != "127."), None
    )


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    """A gateway without keys that listens for other machines, and its address for them."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if (address := own_address()) is None:
        pytest.skip("needs an address besides the loopback's")
    folder: Path = tmp_path_factory.mktemp("open")
    flags = ("--http", "0.0.0.0:0", "--insecure", "--ctx", "4096", "--parallel", "2")
    with real_daemon(*flags, folder=folder) as daemon:
        port = urlsplit(daemon.http_url()).port
        yield Gateway(daemon, f"http://127.0.0.1:{port}"), f"http://{address}:{port}"


def test_another_machine_without_a_key_reads_no_sessions(open_gateway: tuple[Gateway, str]) -> None:
    gateway, elsewhere = open_gateway
    secret = {"role": "user", "content": "My name is Ada."}
    body = {"session_id": "diary", "messages": [secret], "max_tokens": 5, "stream": False}
    with gateway.http() as owner, httpx.Client(base_url=elsewhere, timeout=TIMEOUT_S) as stranger:
        owner.post("/v1/generate", json=body).raise_for_status()
        refused = stranger.get("/v1/sessions")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "E_GATEWAY_OWNER")
        assert "uma-trio keys create" in refused.json()["error"]["message"]
        for action in ("read", "close", "rename", "fork", "answer", "follow", "stop"):
            asked = stranger.post(f"/v1/session/{action}", json={"session_id": "diary", "title": "x", "new_id": "y"})
            assert asked.status_code == 403, action
        found = stranger.post("/v1/generate", json={**body, "messages": [QUESTION]}).json()
        assert found["session"]["turns"] == 1, "it has a session of its own under this name"
        read = owner.post("/v1/session/read", json={"session_id": "diary"}).json()
        assert [each["content"] for each in read["messages"] if each["role"] == "user"] == [secret["content"]]
