"""Ollama's API, with Ollama's client and with plain HTTP."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.gateway.conftest import Gateway
from tests.support.commands import invoke
from tests.support.profile import sampled
from tests.support.real_daemon import Daemon, missing, real_daemon
from uma_trio.client import Eos, Timings, ToolCall, Usage
from uma_trio.gateway.dialects.ollama.generate import Lines, chat_line

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(gateway: Gateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=gateway.url) as found:
        yield found


def test_a_whole_chat(client: ollama.Client) -> None:
    found = client.chat("embedded", CHAT)
    assert found.message.content == ANSWER
    assert found.done_reason == "stop"
    assert found.eval_count > 3
    assert found.total_duration > 0


def test_a_streamed_chat_has_the_same_text_in_pieces(client: ollama.Client) -> None:
    parts = list(client.chat("embedded:latest", CHAT, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 4


@pytest.mark.parametrize("stream", [False, True])
def test_generate_uses_the_chat_template(client: ollama.Client, stream: bool) -> None:
    found = client.generate("embedded", "What is the capital of France?", stream=stream)
    parts = list(found) if stream else [found]
    assert "".join(part.response for part in parts) == ANSWER


def test_generate_raw_continues_the_text(gateway: Gateway, client: ollama.Client) -> None:
    found = client.generate("embedded", "Once upon a time", raw=True, options={"num_predict": 8})
    assert found.response == gateway.daemon.ask(prompt="Once upon a time", max_tokens=8).text
    assert found.done_reason == "length"


def test_a_schema_and_json(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    found = client.chat("embedded", CHAT, format=schema)
    assert json.loads(found.message.content)["city"] in ("Paris", "Rome")


def test_log_probabilities(client: ollama.Client) -> None:
    found = client.chat("embedded", CHAT, logprobs=True, top_logprobs=2)
    assert "".join(each.token for each in found.logprobs) == ANSWER
    assert all(len(each.top_logprobs) == 2 for each in found.logprobs)


def test_options_reach_the_daemon_and_unknown_ones_are_named(gateway: Gateway) -> None:
    options = {"num_predict": 3, "num_ctx": 2048, "temperature": 0, "seed": -1, "mirostat": 2, "tfs_z": 1.0}
    with gateway.http() as http:
        found = http.post(
            "/api/chat", json={"model": "embedded", "messages": CHAT, "stream": False, "options": options}
        )
    assert found.json()["eval_count"] == 3
    assert found.json()["warnings"] == ["the option 'tfs_z' is not known and had no effect"]


def test_models_as_editors_ask_for_them(gateway: Gateway, client: ollama.Client) -> None:
    with gateway.http() as http:
        version = http.get("/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))
    (model,) = client.list().models
    assert model.model == "embedded:latest"
    assert model.details.quantization_level == "Q8_0"
    shown = client.show(model.model)
    assert shown.capabilities == ["completion", "tools", "vision", "embedding"]
    assert shown.modelinfo["llama.context_length"] == 4096
    (loaded,) = client.ps().models
    assert loaded.context_length == 4096


def test_calls_of_a_stream_come_in_a_line_before_the_last() -> None:
    usage, timings = Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_ms=0, total_ms=1)
    call = ToolCall(id="c1", name="weather", arguments={"city": "Lima"})
    eos = Eos(id="r", reason="tool_calls", usage=usage, timings=timings, tool_calls=[call])
    lines = Lines("embedded", chat_line, [], "r").render(eos).splitlines()
    calls, last = (ollama.ChatResponse.model_validate_json(line) for line in lines)
    assert (calls.done, last.done, last.done_reason) == (False, True, "stop")
    assert [(each.function.name, each.function.arguments) for each in calls.message.tool_calls] == [
        ("weather", {"city": "Lima"})
    ]
    assert last.message.tool_calls is None


def test_embeddings_are_those_of_the_socket(gateway: Gateway, client: ollama.Client) -> None:
    found = client.embed("embedded", ["A fox.", "Paris"])
    older = client.embeddings("embedded", "A fox.")
    with gateway.daemon.wire() as wire:
        wire.send(type="embed", id="e", input=["A fox.", "Paris"])
        answer = wire.receive()
    assert answer is not None
    assert [list(vector) for vector in found.embeddings] == [pytest.approx(each) for each in answer["embeddings"]]
    assert list(older.embedding) == pytest.approx(answer["embeddings"][0])
    assert found.prompt_eval_count == answer["usage"]["prompt_tokens"]


def test_what_is_not_offered_is_an_error_of_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no /api/push here; models are not uploaded"):
        client.push("llama3.2")


def test_a_header_names_the_session(gateway: Gateway) -> None:
    headers = {"x-session-id": "ollama-trip"}
    with gateway.http() as http:
        for _ in range(2):
            http.post("/api/chat", json={"model": "embedded", "messages": CHAT, "stream": False}, headers=headers)
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", id="s")
        names = [session["session_id"] for session in wire.receive()["sessions"]]
        [mine] = [name for name in names if name.startswith("ollama-trip:")]
    with gateway.daemon.wire() as wire:
        wire.send(type="sessions", action="close", session_id=mine, id="c")
        assert wire.receive()["event"] == "sessions"


def test_an_empty_request_asks_whether_the_model_is_there(client: ollama.Client) -> None:
    assert client.chat("embedded").done_reason == "load"
    assert client.generate("embedded").done_reason == "load"


@pytest.mark.parametrize("stream", sampled([False, True], 4))
@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [
        ("/api/chat", {"model": "no-such-model"}, 404),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, 400),
        ("/api/chat", {"format": "yaml"}, 400),
        ("/api/chat", {"think": "maybe"}, 400),
        ("/api/generate", {"prompt": "x", "keep_alive": "soon"}, 400),
        ("/api/embed", {"input": "x", "keep_alive": "5 minutes"}, 400),
        ("/api/embed", {"input": "x", "keep_alive": "..."}, 400),
        ("/api/chat", {"options": {"temperature": "hot"}}, 400),
        ("/api/chat", {"options": {"num_predict": "many"}}, 400),
        ("/api/chat", {"messages": [{"role": "user", "content": "fox " * 6000}]}, 400),
        ("/api/generate", {"model": "no-such-model", "prompt": "x"}, 404),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400),
        ("/api/show", {"model": "no-such-model"}, 404),
        ("/api/show", {"model": ""}, 400),
        ("/api/embed", {"model": "no-such-model", "input": "x"}, 404),
        ("/api/embed", {"input": "fox " * 20_000}, 400),
    ],
)
def test_refusals(gateway: Gateway, path: str, wrong: dict[str, Any], status: int, stream: bool) -> None:
    messages = {"messages": CHAT} if path == "/api/chat" else {}
    with gateway.http() as http:
        answer = http.post(path, json={"model": "embedded", **messages, "stream": stream, **wrong})
    assert answer.status_code == status, answer.text
    assert isinstance(answer.json()["error"], str)
    assert "[0-9]" not in answer.json()["error"], "no regular expressions"


def test_a_last_message_of_the_assistant_is_continued(client: ollama.Client) -> None:
    begun = {"role": "assistant", "content": "The capital of"}
    assert client.chat("embedded", [*CHAT, begun]).message.content == " France is Paris."


STOP = {"model": "embedded", "keep_alive": 0}


def state_of(daemon: Daemon) -> str:
    return str(daemon.metrics()["models"]["embedded"]["state"])


@pytest.mark.thorough
def test_keep_alive_0_unloads_for_an_administrator_alone_and_not_what_others_use(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"

    def key(name: str, *flags: str) -> dict[str, str]:
        said = invoke("keys", "create", name, *flags, "--file", file).stdout
        return {"authorization": f"Bearer {said.split()[-1]}"}

    boss = key("boss", "--admin")
    with real_daemon("--http", "0", "--http-keys", str(file), folder=tmp_path) as daemon:
        gateway = Gateway.of(daemon)

        def stop(headers: dict[str, str], **fields: object) -> str:
            with gateway.http(headers=headers) as http:
                answer = http.post("/api/generate", json={**STOP, **fields}).raise_for_status()
            return str(answer.json()["done_reason"])

        with gateway.http(headers=boss) as http:
            http.post("/api/chat", json={"model": "embedded", "messages": CHAT, "stream": False}).raise_for_status()
        assert (stop(boss), state_of(daemon)) == ("unload", "unloaded")
        assert (stop(boss, keep_alive="0s"), state_of(daemon)) == ("unload", "unloaded"), "it is not loaded for that"
        assert (stop(boss, keep_alive="5m"), state_of(daemon)) == ("load", "ready")
        daemon.ask(prompt="Hello", max_tokens=1)
        assert (stop(boss), state_of(daemon)) == ("stop", "ready"), "a client of the socket has used it"
        guest = key("guest")
        daemon.signal(signal.SIGHUP)
        daemon.wait_until(lambda _: _status(gateway, guest) == 200, "the new key is valid")
        assert (stop(guest), state_of(daemon)) == ("stop", "ready")
        with daemon.wire() as wire:
            wire.send(type="models", action="reload", model="embedded")
            assert wire.receive()
        assert (stop(boss), state_of(daemon)) == ("stop", "ready"), "there are several tenants"


def _status(gateway: Gateway, headers: dict[str, str]) -> int:
    with gateway.http(headers=headers) as http:
        return http.get("/v1/models").status_code


def test_keep_alive_0_on_this_machine_without_keys() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0") as daemon, Gateway.of(daemon).http() as http:
        body = {"model": "embedded", "messages": CHAT, "stream": False, "keep_alive": 0}
        assert http.post("/api/chat", json=body).json()["message"]["content"] == ANSWER
        assert state_of(daemon) == "ready", "a request with a prompt unloads nothing"
        for path, empty in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
            assert http.post("/api/chat", json={**body, "keep_alive": None}).json()["done"]
            assert http.post(path, json={**STOP, **empty}).json()["done_reason"] == "unload"
            assert state_of(daemon) == "unloaded"
