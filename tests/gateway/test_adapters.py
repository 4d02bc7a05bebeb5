"""LoRA adapters in a whole daemon: over the socket, over HTTP, on the command line, and after a crash of the engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import Gateway
from tests.support.commands import run_process
from tests.support.random_adapters import random_adapter
from tests.support.real_daemon import missing, real_daemon
from uma_trio.models.packaged import EMBEDDED

QUESTION = {"role": "user", "content": "Tell me a story about a fox."}
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def adapting() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    one, two = random_adapter(EMBEDDED, 9, strength=0.8), random_adapter(EMBEDDED, 5, strength=0.6)
    adapters = [f"--adapter=one={one}", f"--adapter=two={two}"]
    with real_daemon(*adapters, "--parallel", "8", "--ctx", "16384", "--http", "0") as daemon:
        yield Gateway.of(daemon)


def text(gateway: Gateway, **fields: object) -> str:
    """The answer over the socket."""
    answer = gateway.daemon.ask(id="t", messages=[QUESTION], temperature=0, max_tokens=24, ignore_eos=True, **fields)
    assert answer.reason == "length", answer.last
    return answer.text


@pytest.fixture(scope="module")
def texts(adapting: Gateway) -> dict[str, str]:
    """What the answers with each adapter begin with, as far as each token is much more likely than any other: next to other
    rows, or after a reused prefix, a row has other last bits."""
    named = {"": [], "one": [{"name": "one"}], "half": [{"name": "one", "scale": 0.5}], "two": [{"name": "two"}]}
    found = {name: text(adapting, adapters=adapters) for name, adapters in named.items()}
    found["one"] = found["one"][:20]
    assert len(set(found.values())) == 4
    return found


def test_adapters_are_listed(adapting: Gateway) -> None:
    models = adapting.openai().models.list().data
    assert [model.id for model in models] == ["embedded", "embedded:one", "embedded:two"]
    assert [model.model_dump().get("parent") for model in models] == [None, "embedded", "embedded"]
    assert adapting.openai().models.retrieve("embedded:two").id == "embedded:two"
    assert [model.id for model in adapting.anthropic().models.list()] == [model.id for model in models]
    with adapting.http() as client:
        listed = client.get("/lora-adapters").json()
    assert [(each["id"], each["path"], each["scale"]) for each in listed] == [(0, "one", 1.0), (1, "two", 1.0)]


def test_every_way_to_choose_an_adapter_gives_the_same_answer(adapting: Gateway, texts: dict[str, str]) -> None:
    client = adapting.openai()

    def chat(model: str = "embedded", **extra: object) -> str:
        options = {"ignore_eos": True, **extra}
        answer = client.chat.completions.create(
            model=model, messages=[QUESTION], temperature=0, max_tokens=24, extra_body=options
        )
        assert answer.model == model
        return answer.choices[0].message.content or ""

    assert chat().startswith(texts[""])
    assert chat("embedded:one").startswith(texts["one"])
    assert chat(lora=[{"id": 0, "scale": 1.0}]).startswith(texts["one"])
    assert chat(lora=[{"id": 0, "scale": 0.5}]).startswith(texts["half"])
    assert chat(lora=[{"id": 0, "scale": 0.0}, {"id": 1}]).startswith(texts["two"])
    assert chat("embedded:two").startswith(texts["two"])
    assert chat(lora=[{"id": 0, "scale": 0.0}]).startswith(texts[""])
    with adapting.http() as plain:
        fields = {"messages": [QUESTION], "ignore_eos": True, "stream": False, **GREEDY}
        answer = plain.post("/v1/generate", json={**fields, "adapters": [{"name": "two"}]}).json()
        assert answer["text"].startswith(texts["two"])
        ollama = {"model": "embedded:two", "messages": [QUESTION], "stream": False, "options": {"temperature": 0}}
        answer = plain.post("/api/chat", json=ollama).json()
        assert answer["message"]["content"][:10] == texts["two"][:10]


def test_unknown_adapters_are_refused_with_what_there_is(adapting: Gateway) -> None:
    client = adapting.openai()
    with pytest.raises(openai.NotFoundError, match="no model 'embedded:three'"):
        client.chat.completions.create(model="embedded:three", messages=[QUESTION])
    with pytest.raises(openai.NotFoundError, match="the adapter 2; embedded has 2 adapters") as refused:
        client.chat.completions.create(model="embedded", messages=[QUESTION], extra_body={"lora": [{"id": 2}]})
    assert refused.value.param == "lora[0].id"
    answer = adapting.daemon.ask(id="t", messages=[QUESTION], adapters=[{"name": "three"}])
    assert answer.code == "E_MODEL_NO_ADAPTER"
    assert "it has one, two" in answer.last["message"]
    answer = adapting.daemon.ask(id="t", messages=[QUESTION], adapters=[{"name": "one", "scale": 17}])
    assert answer.code == "E_PROTO_BAD_REQUEST"


def test_on_the_command_line(adapting: Gateway, texts: dict[str, str]) -> None:
    socket = str(adapting.daemon.socket)

    def ask(*flags: str) -> str:
        done = run_process(
            "ask", "--socket", socket, "--temp", "0", "--max-tokens", "24", "--json", "--no-stream", *flags,
            str(QUESTION["content"]),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout.splitlines()[-1])["text"])

    assert ask("--adapter", "one").startswith(texts["one"])
    assert ask("--adapter", "one=0.5").startswith(texts["half"])
    assert ask("--adapter", "one=0").startswith(texts[""])
    done = run_process("ask", "--socket", socket, "--adapter", "one=x", "Hello")
    assert done.returncode == 2
    assert "'one=x' is not NAME or NAME=SCALE" in done.stderr


def test_a_constraint_speculation_and_several_answers_go_with_adapters(adapting: Gateway) -> None:
    one = [{"name": "one"}]
    answer = adapting.daemon.ask(
        id="t", messages=[QUESTION], temperature=0, adapters=one, constraint={"choice": ["red", "blue"]}
    )
    assert answer.text in ("red", "blue")
    fields = {"prompt": "1 2 3 1 2 3 1 2 3 1 2", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    two = [{"name": "two"}]
    plain = adapting.daemon.ask(id="t", adapters=two, speculate=False, **fields)
    assert adapting.daemon.ask(id="t", adapters=two, speculate=True, **fields).ids == plain.ids
    logged = adapting.daemon.ask(id="t", adapters=one, n=2, stream=False, logprobs=1, **fields)
    assert logged.reason == "length"


@pytest.mark.thorough
def test_after_a_crash_of_the_engine_answers_go_on_with_their_adapters(
    adapting: Gateway, texts: dict[str, str]
) -> None:
    sets = {"": [], "one": [{"name": "one"}], "half": [{"name": "one", "scale": 0.5}], "two": [{"name": "two"}]}
    found: dict[str, str] = {}
    began = {name: threading.Event() for name in sets}

    def ask(name: str) -> None:
        with adapting.daemon.wire(timeout_s=120) as wire:
            fields = {"messages": [QUESTION], "temperature": 0, "max_tokens": 400, "ignore_eos": True}
            wire.send(id=name or "plain", adapters=sets[name], **fields)
            parts = []
            while (event := wire.receive()) is not None and event["event"] == "token":
                parts.append(event["text"])
                began[name].set()
            found[name] = "".join(parts)

    threads = [threading.Thread(target=ask, args=[name]) for name in sets]
    before = adapting.daemon.metrics()["engine"]
    for thread in threads:
        thread.start()
    assert all(event.wait(60) for event in began.values())
    os.kill(before["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    for name, answer in found.items():
        assert answer.startswith(texts[name])
    ends = time.monotonic() + 60
    while adapting.daemon.metrics()["engine"]["restarts_total"] == before["restarts_total"]:
        assert time.monotonic() < ends


def test_a_session_that_changes_its_adapters_is_prefilled_again(adapting: Gateway) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "session_id": "s"}
    one = [{"name": "one"}]

    def cached(prompt: str, adapters: list[dict[str, str]]) -> int:
        answer = adapting.daemon.ask(id="t", prompt=prompt, adapters=adapters, **fields)
        return int(answer.last["usage"]["cached_tokens"])

    assert cached(" ".join(["fox"] * 100), one) == 0
    assert cached("and", one) >= 100
    assert cached("then", []) == 0
    assert cached("again", []) >= 100


@pytest.mark.thorough
def test_doctor_checks_adapters(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(random_adapter(EMBEDDED).read_bytes()[:1000])
    good = random_adapter(EMBEDDED)
    config = tmp_path / "uma.yaml"
    config.write_text(f"model:\n  adapters: [{{name: a, path: {good}}}, {{name: b, path: {broken}}}]\n")
    done = run_process("doctor", "--json", "--config", str(config), "--socket", str(tmp_path / "s"))
    found = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "adapter"]
    assert [each["verdict"] for each in found] == ["ok", "problem"]
    assert "rank 4" in found[0]["message"]
    assert "cannot load the adapter b" in found[1]["message"]
    done = run_process("serve", "--config", str(config), "--socket", str(tmp_path / "s"))
    assert done.returncode == 1
    assert "cannot load the adapter b" in done.stderr
    assert "Traceback" not in done.stderr
