"""What routers ask a worker, and the session that they name."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

import uma_trio
from tests.gateway.conftest import Gateway
from tests.support.commands import invoke
from tests.support.real_daemon import LONG_CTX, free_port, missing, real_daemon
from uma_trio.gateway.dialects.openai.routers import BLOCK_TOKENS, Loads

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = ["", "Hello there", "  two  spaces\n\tand 12345 numbers, don't they?", "naïve 你好 🙂 <|user|>\n", "x" * 500]


def load(gateway: Gateway) -> dict[str, Any]:
    with gateway.http() as client:
        answer = client.get("/v1/loads", params={"include": "core,disagg,queues,memory"}).raise_for_status()
    assert len(msgspec.json.decode(answer.content, type=Loads).loads) == answer.json()["dp_rank_count"] == 1
    found: dict[str, Any] = answer.json()["loads"][0]
    return found


def test_the_load_of_an_idle_worker(gateway: Gateway) -> None:
    gateway.daemon.wait_until(lambda found: found["running"] == found["queue_depth"] == 0, "nothing runs")
    found = load(gateway)
    assert found["num_running_reqs"] == found["num_waiting_reqs"] == found["num_waiting_uncached_tokens"] == 0
    assert (found["token_usage"], found["max_running_requests"]) == (0, 16)


def test_the_load_while_requests_run_and_wait() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--parallel", "1", "--ctx", "4096", "--kv-unified", "off", "--http", "0") as daemon:
        gateway = Gateway.of(daemon)
        with daemon.wire() as running, daemon.wire() as waiting:
            running.send(id="a", prompt="Once upon a time", max_tokens=3000, ignore_eos=True)
            assert running.receive()
            prompt = "hello " * 40
            with gateway.http() as client:
                n_tokens = client.post("/tokenize", json={"prompt": prompt}).json()["count"]
            waiting.send(id="b", prompt=prompt, max_tokens=8, ignore_eos=True)
            daemon.wait_until(lambda found: found["queue_depth"] == 1, "one waits")
            found = load(gateway)
            assert (found["num_running_reqs"], found["num_waiting_reqs"], found["num_total_reqs"]) == (1, 1, 2)
            assert found["num_waiting_uncached_tokens"] == n_tokens, "the prompt of the one that waits"
            assert 3000 <= found["num_used_tokens"] <= found["max_total_num_tokens"]
            assert found["token_usage"] == found["num_used_tokens"] / found["max_total_num_tokens"]
            assert (found["utilization"], found["max_running_requests"]) == (1, 1)
            assert found["gen_throughput"] > 0


def test_the_command_shows_several_daemons_and_says_which_does_not_answer(gateway: Gateway) -> None:
    gateway.daemon.wait_until(lambda found: found["running"] == found["queue_depth"] == 0, "nothing runs")
    nobody, other = f"http://127.0.0.1:{free_port()}", f"{gateway.url}/chat"
    found = invoke("metrics", "--all", f"{gateway.url},{nobody},{other}")
    _, own, silent, strange, together = [line.split() for line in found.stdout.splitlines()]
    assert (own[:4], silent[:2], strange[:2]) == ([gateway.url, "0", "0", "16"], [nobody, "-"], [other, "-"])
    assert together[:6] == ["all", "1", "of", "3", "0", "0"]
    assert (found.returncode, found.stderr.count("uma-trio metrics: http")) == (2, 2)
    found = invoke("metrics", "--json", "--all", gateway.url)
    assert (found.returncode, json.loads(found.stdout)["load"]["max_running_requests"]) == (0, 16)


def test_version_and_what_the_worker_takes(gateway: Gateway) -> None:
    with gateway.http() as client:
        assert client.get("/version").json() == {"version": uma_trio.__version__}
        info = client.get("/get_server_info").json()
        assert info == client.get("/server_info").json()
        [model, *_] = client.get("/v1/models").json()["data"]
    assert (info["block_size"], info["max_model_len"]) == (BLOCK_TOKENS, model["max_model_len"])
    assert (info["max_running_requests"], info["served_model_name"]) == (16, model["id"])


def test_a_router_gets_the_tokens_that_a_request_would_prefill(gateway: Gateway) -> None:
    """Also of a chat with tools, which ``/tokenize`` of vLLM leaves out, and of the first turn of a response."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    given = {"model": "embedded", "temperature": 0, "max_tokens": 4}
    chat = {**given, "messages": CHAT, "tools": [{"type": "function", "function": function}]}
    response = {"model": "embedded", "input": CHAT, "tools": [{"type": "function", **function}]}
    with gateway.http() as client:
        plain, offered = (
            client.post("/v1/chat/completions/render", json=body).raise_for_status().json()["token_ids"]
            for body in ({**given, "messages": CHAT}, chat)
        )
        assert plain == client.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
        usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
        assert len(offered) == usage["prompt_tokens"] > len(plain)
        assert client.post("/v1/responses/render", json=response).json() == {"token_ids": offered}
        text, spelled = "The capital of France is", {**given, "prompt": ["The capital of France is", plain]}
        found = client.post("/v1/completions/render", json=spelled).raise_for_status().json()
        assert [each["token_ids"] for each in found][1] == plain
        for prompt in (text, found[0]["token_ids"]):
            answer = client.post("/v1/completions", json={**given, "prompt": prompt}).json()
            assert answer["usage"]["prompt_tokens"] == len(found[0]["token_ids"])
        assert client.post("/v1/completions/render", json={"prompt": "a", "suffix": "b"}).status_code == 400


def test_a_worker_that_drains_says_so_and_finishes_what_runs() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0") as daemon:
        gateway = Gateway.of(daemon)
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with gateway.http() as client:
            assert client.get("/health").status_code == 200
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines)
                daemon.signal(signal.SIGTERM)
                while (health := httpx.get(f"{gateway.url}/health")).status_code == 200:
                    """The signal is on its way."""
                refused = httpx.post(f"{gateway.url}/v1/completions", json=body)
                ready = httpx.get(f"{gateway.url}/readyz")
                rest = [*lines]
        assert daemon.wait() == 0
        assert rest[-2] == "data: [DONE]", "nothing was cut"
    assert (health.status_code, health.json()["error"]["uma_code"]) == (503, "E_RUNTIME_SHUTDOWN")
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert int(refused.headers["retry-after"]) > 0
    assert (ready.status_code, ready.json()["checks"][0]["name"]) == (503, "draining")


@pytest.mark.thorough
def test_a_daemon_that_starts_and_drains_under_load_answers_or_says_when_to_ask_again() -> None:
    """No other status, such as the 404 of a model that is not known yet; and with a notice, no connection that breaks."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    port, seen, ended = free_port(), Counter[tuple[int, bool]](), threading.Event()
    begins_to_drain, broken = threading.Event(), list[httpx.TransportError]()

    def load() -> None:
        body = {"model": "embedded", "prompt": "Once upon a time", "max_tokens": 4}
        while not ended.is_set():
            stops = begins_to_drain.is_set()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.ConnectError:  # it does not listen yet, or any more
                    ended.wait(0.05)
                except httpx.TransportError as error:
                    broken.append(error)
                else:
                    seen[answer.status_code, "retry-after" in answer.headers] += 1
                    stops = stops or (answer.status_code == 503 and "shutting down" in answer.text)
            if stops:
                return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    with real_daemon(*LONG_CTX, "--http", str(port), "--drain-notice-s", "1.5") as daemon:
        gateway = Gateway.of(daemon)
        daemon.wait_until(lambda found: found["tokens_total"] > 80, "it is busy")
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        while httpx.get(f"{gateway.url}/health").status_code == 200:
            """The signal is on its way."""
        notice = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        begins_to_drain.set()
        assert daemon.wait() == 0
        assert 1.4 < time.monotonic() - began < 30
    ended.set()
    for thread in threads:
        thread.join(60)
    assert (notice.status_code, notice.headers["connection"]) == (200, "close"), "served, but not the next one"
    assert not broken
    assert {*seen} <= {(200, False), (503, True)}
    assert seen[200, False] >= 20


@pytest.mark.thorough
def test_the_gateway_sends_the_last_answers_before_it_ends() -> None:
    """The daemon has made them, and is about to end; their client reads slowly."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    request = {"messages": CHAT, "max_tokens": 3000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(request).encode()  # the answer is larger than what the system keeps for a slow client
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with real_daemon(*LONG_CTX, "--http", "0") as daemon, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", httpx.URL(Gateway.of(daemon).url).port))
        client.sendall(head.encode() + body)
        daemon.wait_until(lambda found: found["tokens_total"] >= 3000 and not found["running"], "it is answered")
        daemon.signal(signal.SIGTERM)
        time.sleep(1)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert daemon.wait() == 0
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert answer["usage"]["completion_tokens"] == 3000


@pytest.mark.parametrize("header", ["X-Session-Id", "X-SMG-Routing-Key"])
def test_a_header_names_the_session(gateway: Gateway, header: str) -> None:
    name = f"routed-{header.lower()}"
    with gateway.http(headers={header: name}) as client:
        for _ in range(2):
            client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4}).raise_for_status()
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", id="s")
        [mine] = [each for each in wire.receive()["sessions"] if each["session_id"].startswith(f"{name}:")]
    assert mine["turns"] == 2
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", action="close", session_id=mine["session_id"], id="c")
        assert wire.receive()["event"] == "sessions"


def test_the_vocabulary_as_a_file(gateway: Gateway) -> None:
    with gateway.http() as client:
        answer = client.get("/tokenizer.json").raise_for_status()
        again = client.get("/tokenizer.json", headers={"if-none-match": answer.headers["etag"]})
        assert client.get("/tokenizer.json", params={"model": "nobody"}).status_code == 404
        made = Tokenizer.from_str(answer.text)
        for text in TEXTS:
            assert made.encode(text).ids == client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert (again.status_code, again.content) == (304, b"")


def test_a_vocabulary_that_cannot_be_a_file(ranking_gateway: Gateway) -> None:
    with ranking_gateway.http() as client:
        answer = client.get("/tokenizer.json")
    assert answer.status_code == 501
    assert "only SentencePiece ('llama') and byte-level BPE ('gpt2')" in answer.json()["error"]["message"]
