"""Models by name in the commands that load one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import pytest

from tests.support.hub_server import FakeHub
from tests.support.model_home import Home
from tests.support.random_adapters import random_adapter
from tests.support.real_daemon import missing, real_daemon
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

NAME = "acme/Tiny-GGUF:Q8_0"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_serve_downloads_what_is_not_here_and_clients_see_the_name(
    hub: FakeHub, home: Home, model: bytes, tmp_path: Path
) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    assert home.run("models", "alias", "tiny", NAME).returncode == 0
    with real_daemon("--model", "tiny", folder=tmp_path, environment=home.environment) as daemon:
        assert "Paris" in daemon.ask(messages=QUESTION, model="tiny").text
        socket = str(daemon.socket)
        (listed,) = home.listed(UMA_SOCKET=socket)
        assert (listed["name"], listed["aliases"], listed["is_served"]) == (NAME, ["tiny"], True)
        refused = home.run("models", "remove", "--yes", "tiny", UMA_SOCKET=socket)
        assert refused.returncode == 1
        assert f"a daemon serves {NAME}; stop it first" in refused.stderr
    assert len(hub.file_requests()) == 1


@pytest.mark.thorough
def test_an_alias_of_this_machine_is_a_name_in_every_door(home: Home, tmp_path: Path) -> None:
    """One that is made while the daemon runs, and a model of this machine that is not served says how to serve it."""
    with real_daemon(
        "--http",
        "0",
        "--no-on-demand",
        "--ctx",
        "2048",
        "--parallel",
        "2",
        folder=tmp_path,
        environment=home.environment,
    ) as daemon:
        socket, messages = str(daemon.socket), {"messages": QUESTION}
        with httpx.Client(base_url=daemon.http_url(), timeout=60) as client:

            def answers(model: str) -> list[httpx.Response]:
                posts = {
                    "/v1/chat/completions": messages,
                    "/v1/messages": {**messages, "max_tokens": 3},
                    "/v1/responses": {"input": "Hi"},
                    "/v1/embeddings": {"input": "Hi"},
                    "/completion": {"prompt": "Hi", "n_predict": 2},
                    "/tokenize": {"content": "Hi"},
                    "/api/chat": {"keep_alive": -1},
                    "/api/show": {},
                    "/v1/models/load": {},
                }
                found = [client.post(path, json={"model": model, **body}) for path, body in posts.items()]
                return [*found, client.get(f"/v1/models/{model}")]

            def watch_status(model: str) -> int:
                with client.stream("GET", "/v1/watch", params={"model": model}) as answer:
                    return answer.status_code

            assert {answer.status_code for answer in answers("small")} == {404}
            assert home.run("models", "alias", "small", "embedded").returncode == 0
            assert {answer.status_code for answer in answers("small")} == {200}
            assert client.get("/v1/models/small").json()["parent"] == "embedded"
            assert watch_status("small") == 200
            for answer in answers("embedded-draft"):
                assert "--on-demand" in answer.text
            assert watch_status("embedded-draft") == 404
        metrics = home.run("metrics", "--model", "small", "--json", UMA_SOCKET=socket)
        assert json.loads(metrics.stdout)["model"] == "embedded"
        refused = home.run("metrics", "--model", "embedded-draft", UMA_SOCKET=socket)
        assert (refused.returncode, "--on-demand" in refused.stderr) == (2, True)


@pytest.mark.thorough
def test_an_adapter_of_the_hub_is_downloaded_and_is_no_model(hub: FakeHub, home: Home, tmp_path: Path) -> None:
    hub.add("acme/Story-LoRA-GGUF", {"story-lora-F16.gguf": random_adapter(EMBEDDED, strength=1.0).read_bytes()})
    name = "acme/Story-LoRA-GGUF:F16"
    flags = ("--adapter", f"story={name}", "--ctx", "2048", "--parallel", "2")
    with real_daemon(*flags, folder=tmp_path, environment=home.environment) as daemon:
        plain = daemon.ask(messages=QUESTION, temperature=0, max_tokens=20)
        adapted = daemon.ask(messages=QUESTION, temperature=0, max_tokens=20, adapters=[{"name": "story"}])
        assert "Paris" in plain.text != adapted.text
    assert len(hub.file_requests()) == 1
    refused = home.run("serve", "--model", name)
    assert refused.returncode == 1
    assert "it is an adapter, and not a model" in refused.stderr


@pytest.mark.thorough
def test_a_model_of_ollama_is_served_where_it_is(hub: FakeHub, home: Home, model: bytes, tmp_path: Path) -> None:
    digest = hashlib.sha256(model).hexdigest()
    folder = home.folder / ".ollama" / "models"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"sha256-{digest}").write_bytes(model)
    config = json.dumps({"model_format": "gguf", "file_type": "Q8_0"}).encode()
    config_digest = hashlib.sha256(config).hexdigest()
    (folder / "blobs" / f"sha256-{config_digest}").write_bytes(config)
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "digest": f"sha256:{config_digest}",
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.ollama.image.model",
                        "digest": f"sha256:{digest}",
                        "size": len(model),
                    },
                    {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{config_digest}"},
                ],
            }
        )
    )
    with real_daemon("--model", "tiny", "--http", "0", folder=tmp_path, environment=home.environment) as daemon:
        assert "Paris" in daemon.ask(messages=QUESTION, model="tiny").text
        shown = httpx.post(f"{daemon.http_url()}/api/show", json={"model": "tiny:latest"}, timeout=60)
        assert shown.status_code == 200, shown.text
        (described,) = home.listed(UMA_SOCKET=str(daemon.socket))
        assert (described["name"], described["origin"], described["is_served"]) == ("tiny:latest", "Ollama", True)
    assert home.files() == []
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    pulled = home.run("pull", NAME, "--json")
    assert json.loads(pulled.stdout)["origin"] == "Ollama", "the hub has the same content"
    assert home.files() == []
    removed = home.run("models", "remove", "--yes", "tiny")
    assert removed.returncode == 1
    assert "ollama rm tiny:latest" in removed.stderr


@pytest.mark.thorough
def test_other_commands_take_a_name(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    missing_yet = home.run("tokenize", "--model", NAME, "hello")
    assert missing_yet.returncode == 1
    assert f"uma-trio pull {NAME}" in missing_yet.stderr
    assert home.run("pull", NAME).returncode == 0
    named = home.run("tokenize", "--model", "tiny", "hello")
    assert named.stdout == home.run("tokenize", "hello").stdout != ""
    report = json.loads(home.run("doctor", "--model", "tiny", "--json").stdout)
    models = [check for check in report["checks"] if check["name"] == "model"]
    assert [check["verdict"] for check in models] == ["ok"]
    assert "Tiny-Q8_0.gguf" in models[0]["message"]
    report = json.loads(home.run("doctor", "--model", "nothing/there:Q8_0", "--json").stdout)
    assert [check["fix"] for check in report["checks"] if check["name"] == "model"] == [
        "download it with: uma-trio pull nothing/there:Q8_0"
    ]
    trie = home.folder / "trie.bin"
    saved = home.run("aicirt", "--tokenizer", "tiny", "--save-tokenizer", str(trie))
    assert saved.returncode == 0, saved.stderr
    assert trie.stat().st_size > 0


def test_a_model_of_this_machine_is_loaded_on_demand(hub: FakeHub, home: Home, model: bytes, tmp_path: Path) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    assert home.run("pull", NAME).returncode == 0
    path = next(home.models.rglob("*.gguf"))
    flags = ("--model", "embedded", "--ctx", "2048", "--parallel", "2")
    with real_daemon(*flags, folder=tmp_path, environment=home.environment) as daemon:
        socket = str(daemon.socket)
        assert daemon.ask(prompt="x", model=str(path)).code == "E_MODEL_NOT_FOUND"  # a client names no paths
        assert daemon.ask(prompt="x", model="nothing/there:Q8_0").code == "E_MODEL_NOT_FOUND"
        listed = json.loads(home.run("models", "--json", UMA_SOCKET=socket).stdout)
        states = {each["name"]: each["state"] for each in listed}
        assert states == {"embedded": "ready", "embedded-draft": None, NAME: "unloaded"}
        assert f"{NAME}  " in (table := home.run("models", UMA_SOCKET=socket).stdout)
        assert [line.split()[-1] for line in table.splitlines() if NAME in line] == ["unloaded"]
        assert "Paris" in daemon.ask(messages=QUESTION, model="tiny", max_tokens=20).text
        assert daemon.metrics()["models"][NAME]["state"] == "ready"
        assert NAME in home.run("models", UMA_SOCKET=socket).stdout
        unloaded = home.run("models", "unload", "tiny", "--socket", socket)
        assert f"{NAME} is unloaded" in unloaded.stderr
        loaded = home.run("models", "load", "tiny", "--socket", socket)
        assert f"{NAME} is ready" in loaded.stderr
        assert home.run("models", "reload", "tiny", "--socket", socket).returncode == 0
        failed = home.run("models", "load", "nothing", "--socket", socket)
        assert (failed.returncode, "E_MODEL_NOT_FOUND" in failed.stderr) == (1, True)


@pytest.mark.thorough
def test_a_tenant_has_only_what_the_daemon_is_configured_with(
    hub: FakeHub, home: Home, model: bytes, tmp_path: Path
) -> None:
    """What the user who runs the daemon has loaded is not for others, in any API, unless a setting says so."""
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    assert home.run("pull", NAME).returncode == 0
    keys = tmp_path / "keys.yaml"
    key = home.run("keys", "create", "a", "--file", str(keys)).stdout.split()[-1]
    flags = ("--http", "0", "--http-keys", str(keys), "--ctx", "2048", "--parallel", "2")
    for more, status, listed in (((), 404, ["embedded"]), (("--on-demand",), 200, ["embedded", NAME])):
        (folder := tmp_path / str(status)).mkdir()
        with real_daemon(*flags, *more, folder=folder, environment=home.environment) as daemon:
            assert "Paris" in daemon.ask(messages=QUESTION, model="tiny").text
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=daemon.http_url(), timeout=60, headers=headers) as client:
                names = [each["id"] for each in client.get("/v1/models").json()["data"]]
                tags = [each["model"] for each in client.get("/api/tags").json()["models"]]
                assert names == [tag.removesuffix(":latest") for tag in tags] == listed
                for path, body in (
                    ("/v1/chat/completions", {"messages": QUESTION}),
                    ("/api/chat", {"messages": QUESTION}),
                    ("/api/show", {}),
                    ("/tokenize", {"content": "Hi"}),
                    ("/v1/embeddings", {"input": "Hi"}),
                ):
                    assert client.post(path, json={"model": "embedded", **body}).status_code == 200
                    for name in (NAME, "tiny"):
                        answer = client.post(path, json={"model": name, **body})
                        assert (answer.status_code, "--on-demand" in answer.text) == (status, status == 404), path
                assert client.get(f"/v1/models/{NAME}").status_code == status
