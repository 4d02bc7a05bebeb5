"""What clients of llama-server and vLLM use next to OpenAI's API."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway.conftest import Gateway

CHAT = [{"role": "user", "content": "Hello there"}]
TEXT = "Hello there"


def post(gateway: Gateway, path: str, **body: object) -> httpx.Response:
    with gateway.http() as client:
        return client.post(path, json=body)


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(gateway: Gateway, path: str) -> None:
    with gateway.http() as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_text_becomes_tokens_and_text_again(gateway: Gateway) -> None:
    tokens = post(gateway, "/tokenize", content=TEXT).json()["tokens"]
    assert post(gateway, "/detokenize", tokens=tokens).json() == {"content": TEXT, "prompt": TEXT}


def test_special_tokens_are_added_as_in_llama_server_and_in_vllm(gateway: Gateway) -> None:
    bare = post(gateway, "/tokenize", content=TEXT).json()
    assert bare == post(gateway, "/tokenize", prompt=TEXT, add_special_tokens=False).json()
    assert bare["count"] == len(bare["tokens"])
    whole = post(gateway, "/tokenize", content=TEXT, add_special=True).json()
    assert whole == post(gateway, "/tokenize", prompt=TEXT).json()
    assert whole["tokens"] == post(gateway, "/v1/tokenize", text=TEXT).json()["tokens"]


def test_a_chat_is_rendered_as_a_request_would_be(gateway: Gateway) -> None:
    text = post(gateway, "/apply-template", messages=CHAT).json()["prompt"]
    assert TEXT in text
    tokens = post(gateway, "/tokenize", messages=CHAT).json()
    usage = post(gateway, "/v1/chat/completions", messages=CHAT, max_tokens=1).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": "a", "messages": CHAT}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
        ("/apply-template", {"messages": [{"role": "nobody", "content": "a"}]}),
    ],
)
def test_what_makes_no_sense_is_refused(gateway: Gateway, path: str, body: dict[str, object]) -> None:
    answer = post(gateway, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_an_unknown_model_is_refused(gateway: Gateway) -> None:
    assert post(gateway, "/tokenize", content="a", model="gpt-0").status_code == 404
