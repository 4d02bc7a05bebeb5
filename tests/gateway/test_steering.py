"""A running request is changed over HTTP, by the id of its response; the real engine answers."""

from __future__ import annotations

import re

import httpx
import msgspec
import pytest

from tests.gateway.conftest import Gateway
from uma_trio.gateway.dialects.native.shapes import SteeredAnswer

ASK = {"messages": [{"role": "user", "content": "Count from 1 to 900."}], "max_tokens": 2000, "ignore_eos": True}

ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)[\w-]+")
"""What an API calls its answer."""


def steer(client: httpx.Client, name: str, **changes: object) -> httpx.Response:
    return client.post(f"/v1/requests/{name}/steer", json=changes)


def test_text_is_appended_and_the_answer_ends(gateway: Gateway) -> None:
    with gateway.http() as client, client.stream("POST", "/v1/generate", json=ASK) as answer:
        name = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        while not next(lines).startswith("event: token"):
            pass
        done = steer(client, name, text=" and so on", stop="now")
        assert done.status_code == 200, done.text
        body = done.json()
        assert (body["request_id"], body["stop"]) == (name, "now")
        assert msgspec.convert(body, SteeredAnswer).inserted_tokens > 0
        rest = [*lines]
    texts = "".join(rest)
    assert '"reason":"stop"' in texts.replace(" ", "")
    with gateway.http() as client:
        assert steer(client, name, stop="now").status_code == 404, "it has ended"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK),
        ("/v1/completions", {"prompt": "Count from 1 to 900.", "max_tokens": 2000, "ignore_eos": True}),
        ("/v1/messages", {**ASK, "model": "embedded"}),
        ("/v1/responses", {"input": "Count from 1 to 900.", "max_output_tokens": 2000, "ignore_eos": True}),
    ],
)
def test_an_answer_is_named_by_its_own_id(gateway: Gateway, path: str, body: dict[str, object]) -> None:
    with gateway.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        while (found := ID.search(next(lines))) is None:
            pass
        done = steer(client, found[0], stop="now")
        assert (done.status_code, done.json().get("stop")) == (200, "now"), done.text
        assert found[0].endswith(done.json()["request_id"])
        for _ in lines:
            pass


def test_errors_name_the_remedy(gateway: Gateway) -> None:
    with gateway.http() as client:
        missing = steer(client, "nobody", stop="now")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "E_ANSWER_NOT_FOUND")
        nothing = steer(client, "nobody")
        assert (nothing.status_code, "at least one of" in nothing.text) == (400, True)
