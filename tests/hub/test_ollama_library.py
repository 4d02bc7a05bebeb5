"""Models that Ollama's own client pulls, copies and deletes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import ollama
import pytest
import structlog

from tests.support.commands import invoke
from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home
from tests.support.real_daemon import Daemon, missing, real_daemon
from uma_trio.config import Config
from uma_trio.gateway.dialects.ollama import library
from uma_trio.gateway.errors import HttpError

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

NAME = "hf.co/acme/Tiny-GGUF:Q8_0"
SERVED = "acme/Tiny-GGUF:Q8_0"
FILE = "hub/acme/Tiny-GGUF/Tiny-Q8_0.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def daemon(home: Home, tmp_path: Path) -> Iterator[Daemon]:
    flags = ("--http", "0", "--on-demand", "--ctx", "2048", "--parallel", "1")
    with real_daemon(*flags, folder=tmp_path, environment=home.environment) as found:
        yield found


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    found = ollama.Client(host=daemon.http_url(), timeout=120)
    yield found
    found._client.close()


def names(client: ollama.Client) -> set[str]:
    return {str(model.model) for model in client.list().models}


def test_from_pull_to_delete(hub: FakeHub, home: Home, model: bytes, client: ollama.Client) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    lines = [*client.pull(NAME, stream=True)]
    assert [line.status for line in (lines[0], *lines[-3:])] == [
        *("pulling manifest", "verifying sha256 digest", "writing manifest", "success"),
    ]
    files = [line for line in lines if line.digest]
    assert {line.digest for line in files} == {files[0].digest}
    assert (files[-1].completed, files[-1].total) == (len(model), len(model))
    assert (home.models / FILE).read_bytes() == model
    assert SERVED in names(client)
    assert "Paris" in str(client.chat(NAME, QUESTION).message.content), "it is served at once"
    n_requests = len(hub.file_requests())
    assert client.pull(NAME).status == "success"
    assert len(hub.file_requests()) == n_requests, "it is here already"

    client.copy(SERVED, "small")
    assert client.create("other", from_="small").status == "success"
    assert "Paris" in str(client.chat("small", QUESTION).message.content)
    client.delete("other")
    client.delete("small")
    assert home.files() == ["aliases.json", FILE, f"{FILE}.json"], "only the further names are gone"
    client.delete(SERVED)
    assert home.files() == ["aliases.json"], "nobody else has used it, so it was unloaded"
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete(SERVED)
    assert caught.value.status_code == 404


@pytest.mark.thorough
def test_what_somebody_else_uses_is_not_deleted(
    hub: FakeHub, home: Home, model: bytes, client: ollama.Client, daemon: Daemon
) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    client.pull(NAME)
    with daemon.wire() as wire:
        wire.send(id="r", prompt="Once", model=SERVED, max_tokens=2000, ignore_eos=True)
        assert wire.receive()
        with pytest.raises(ollama.ResponseError, match="is loaded") as caught:
            client.delete(SERVED)
    assert caught.value.status_code == 409
    assert (home.models / FILE).exists()


@pytest.mark.thorough
def test_a_client_that_leaves_ends_its_download_and_the_next_one_resumes(
    hub: FakeHub, home: Home, model: bytes, client: ollama.Client, daemon: Daemon
) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    arrived, goes_on = threading.Event(), threading.Event()
    half = len(model) // 2
    hub.faults.append(Fault(cut_after=half, hold=(arrived, goes_on)))
    with httpx.stream("POST", f"{daemon.http_url()}/api/pull", json={"model": NAME}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert "pulling manifest" in next(lines)
        assert arrived.wait(60)
    goes_on.set()
    assert client.pull(NAME).status == "success"
    assert (home.models / FILE).read_bytes() == model


REFUSED = [
    ("/api/pull", {"model": "llama3.2"}, 404),
    ("/api/pull", {"model": "acme/Nothing-GGUF"}, 400),
    ("/api/pull", {"model": "https://example.com/a.gguf"}, 400),
    ("/api/pull", {"model": "/etc/passwd.gguf"}, 400),
    ("/api/pull", {}, 400),
    ("/api/copy", {"source": "nobody", "destination": "b"}, 404),
    ("/api/copy", {"source": "/etc/passwd.gguf", "destination": "b"}, 400),
    ("/api/copy", {"source": "embedded", "destination": "../b"}, 400),
    ("/api/create", {"model": "a", "from": "embedded", "system": "Be brief."}, 400),
    ("/api/create", {"model": "a"}, 400),
]
"""Path, body and status."""


@pytest.mark.thorough
def test_refusals(daemon: Daemon) -> None:
    for path, body, status in REFUSED:
        answer = httpx.post(f"{daemon.http_url()}{path}", json=body, timeout=60)
        assert answer.status_code == status, (path, body, answer.text)
        assert isinstance(answer.json()["error"], str)


@pytest.mark.thorough
def test_the_package_keeps_its_own_models(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the package"):
        client.delete("embedded")
    assert client.pull("embedded").status == "success"


@pytest.mark.thorough
def test_only_administrators_change_models(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def key(name: str, *flags: str) -> dict[str, str]:
        said = invoke("keys", "create", name, *flags, "--file", file).stdout
        return {"authorization": f"Bearer {said.split()[-1]}"}

    boss, guest = key("boss", "--admin"), key("guest")
    flags = ("--http", "0", "--http-keys", str(file))
    with (
        real_daemon(*flags, folder=tmp_path, environment=home.environment) as daemon,
        httpx.Client(base_url=daemon.http_url(), timeout=60) as http,
    ):
        for method, path, body in (
            ("POST", "/api/pull", {"model": "embedded"}),
            ("POST", "/api/copy", {"source": "embedded", "destination": "small"}),
            ("POST", "/api/create", {"model": "small", "from": "embedded"}),
            ("DELETE", "/api/delete", {"model": "small"}),
        ):
            assert http.request(method, path, json=body, headers=guest).status_code == 403
            assert http.request(method, path, json=body, headers=boss).status_code == 200


def test_the_log_says_how_a_process_ended_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULE", "uma_trio.nothing")
    call: Any = SimpleNamespace(config=Config())
    with structlog.testing.capture_logs() as logged, pytest.raises(HttpError) as error:
        anyio.run(library._all, library._run(call, action="pull", model="a"))
    assert error.value.status == 500
    [line] = logged
    assert (line["event"], line["code"]) == ("the process that changes models failed", 1)
