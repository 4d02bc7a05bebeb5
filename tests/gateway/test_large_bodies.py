"""Bodies that are dear to decode, and what clients without a key can write into the log, with a real gateway.

``tests/pure/test_json_cost.py`` has what is refused, and ``benches/bodies.py`` how long others wait.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.gateway.conftest import Gateway, Raw
from tests.support.real_daemon import missing, real_daemon
from uma_trio.daemon.log_limit import MAX_ALIKE

USER = {"role": "user", "content": "hi"}
NUMBERS = "[" + ",".join(["1e300"] * 2000) + "]"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0", "--parallel", "4") as daemon:
        yield Gateway.of(daemon)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [], "metadata": @}'),
        ("/v1/completions", '{"prompt": @}'),
        ("/completion", '{"prompt": @}'),
        ("/v1/messages", '{"x": @}'),
        ("/v1/responses", '{"input": "a", "x": @}'),
        ("/api/chat", '{"options": {"x": @}}'),
        ("/v1/generate", '{"x": @}'),
        ("/v1/embeddings", '{"input": @}'),
    ],
)
def test_each_api_refuses_them_and_says_what_to_do(gateway: Gateway, path: str, body: str) -> None:
    with gateway.http() as client:
        found = client.post(path, content=body.replace("@", NUMBERS))
        assert found.status_code == 413
        assert "split the request" in found.text
        deep = client.post(path, content=body.replace("@", "[" * 500 + "]" * 500))
        assert deep.status_code == 400
        assert "nested too deeply" in deep.text


def test_arguments_of_calls_count_together(gateway: Gateway) -> None:
    def chat(*arguments: str) -> dict[str, object]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
        return {"messages": [USER, {"role": "assistant", "tool_calls": calls}, USER], "max_tokens": 1}

    few = json.dumps({"x": [[]] * 10_000})
    with gateway.http() as client:
        found = client.post("/v1/chat/completions", json=chat(*[few] * 7))
        assert found.status_code == 413
        assert found.json()["error"]["uma_code"] == "E_PROTO_TOO_MANY_VALUES"
        assert found.json()["error"]["param"] == "messages[1].tool_calls[5].function.arguments"
        deep = client.post("/v1/chat/completions", json=chat('{"a":' * 200 + "1" + "}" * 200))
        assert (deep.status_code, "nested too deeply" in deep.text) == (400, True)


def test_a_long_prompt_as_token_ids_reaches_the_model(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.post("/v1/completions", json={"prompt": [300] * 131_072, "max_tokens": 1})
        assert found.json()["error"]["code"] == "context_length_exceeded", "the model's own limit"


@pytest.mark.thorough
def test_a_vector_for_each_of_2048_texts(gateway: Gateway) -> None:
    with gateway.http() as client:
        answers = [
            client.post("/v1/embeddings", json={"input": ["fox"] * 2048, "encoding_format": form}).json()["data"]
            for form in ("float", "base64")
        ]
        assert [each["index"] for each in answers[0]] == list(range(2048))
        assert {type(each["embedding"]) for each in answers[0]} == {list}
        assert {type(each["embedding"]) for each in answers[1]} == {str}


def test_too_many_fields(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.post("/v1/completions", json={"prompt": "a", **{f"x{n}": 1 for n in range(2000)}})
        assert found.status_code == 400
        assert "it may have 1,024" in found.text


def test_requests_in_one_segment_whose_client_leaves_are_cancelled_without_a_traceback(gateway: Gateway) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    for sent in (2 * request, request + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        for _ in range(5):
            with Raw(gateway) as raw:
                raw.send(sent)
                raw.sock.shutdown(socket.SHUT_WR)
                raw.rest()
    gateway.daemon.settled()
    assert "Traceback" not in gateway.daemon.logs()


def test_requests_that_are_none_get_a_few_lines_in_the_log(gateway: Gateway) -> None:
    for _ in range(5 * MAX_ALIKE):
        with Raw(gateway) as raw:
            raw.send(b"nonsense\r\n\r\n")
            raw.rest()
    with gateway.http() as client:  # its line comes after theirs
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
    gateway.daemon.logged("refused")
    assert len(gateway.daemon.logged("Invalid HTTP request received.", MAX_ALIKE)) == MAX_ALIKE
