"""The list of models of OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import anthropic
import openai
import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon
from uma_trio.models.packaged import EMBEDDED


def test_the_models_that_are_served(gateway: Gateway) -> None:
    [model] = gateway.openai().models.list()
    assert (model.id, model.object, model.owned_by) == ("embedded", "model", "uma-trio")
    assert model.created > 1e9
    assert gateway.openai().models.retrieve("embedded") == model


def test_a_path_that_ends_before_the_name_has_all_models(gateway: Gateway) -> None:
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        with gateway.http(headers=headers) as client:
            assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_a_model_that_is_not_served(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="this daemon serves embedded") as refused:
        gateway.openai().models.retrieve("org/gpt-0")
    assert refused.value.code == "model_not_found"


def test_an_answer_names_the_model_also_if_the_request_does_not(gateway: Gateway) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}]})
    assert answer.json()["model"] == "embedded"


def test_clients_of_anthropic_get_models_in_their_shape(gateway: Gateway) -> None:
    client = gateway.anthropic()
    [model] = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("embedded", "model", "active")
    assert model.created_at.year >= 2026
    assert model.max_input_tokens == gateway.openai().models.retrieve("embedded").model_dump()["context_length"]
    assert client.models.retrieve("embedded") == model
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("claude-0")
    assert refused.value.body["error"]["type"] == "not_found_error"
    with gateway.http(headers={"anthropic-version": "2023-06-01"}) as plain:
        assert plain.get("/v1/models").json().keys() == {"data", "has_more", "first_id", "last_id"}
        pages = [plain.get("/v1/models", params=query).json() for query in ({"limit": 1}, {"after_id": "embedded"})]
        assert [(page["first_id"], page["has_more"]) for page in pages] == [("embedded", False), (None, False)]
        for name, value in (("limit", "0"), ("limit", "x"), ("after_id", "nobody")):
            wrong = plain.get("/v1/models", params={name: value})
            assert (wrong.status_code, wrong.json()["error"]["message"].split(" ")[0]) == (400, name)
        assert plain.get("/v1/nothing").json()["type"] == "error"
        assert isinstance(plain.get("/api/nothing").json()["error"], str), "the paths of Ollama's API are its own"


def test_all_methods_of_a_path_are_named(gateway: Gateway) -> None:
    with gateway.http() as plain:
        assert plain.options("/v1/controllers/tags").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_model_is_loaded_when_it_is_asked_for_and_administrators_unload_it(tmp_path: Path) -> None:
    data = bytearray(EMBEDDED.read_bytes())
    data[-1] ^= 1
    (tmp_path / "b.gguf").write_bytes(data)
    file = tmp_path / "uma.yaml"
    file.write_text(
        f"model: {{ctx: 2048, parallel: 2}}\n"
        f"models: [embedded, {{model: {tmp_path / 'b.gguf'}, alias: [gpt], load: demand, idle_unload_s: 1h}}]\n"
    )
    with real_daemon("--config", str(file), "--http", "0", folder=tmp_path) as daemon:
        gateway = Gateway.of(daemon)

        def loaded() -> list[str]:
            return [model["name"] for model in client.get("/api/ps").json()["models"]]

        with gateway.http() as client:
            status = {each.id: each.model_dump()["status"]["value"] for each in gateway.openai().models.list()}
            assert status == {"embedded": "loaded", "b": "unloaded"}
            assert [model["name"] for model in client.get("/api/tags").json()["models"]] == [
                "embedded:latest",
                "b:latest",
            ]
            assert loaded() == ["embedded:latest"]
            assert client.get("/readyz").status_code == 200
            asked = {"model": "gpt", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = client.post("/v1/chat/completions", json=asked).json()
            assert "Paris" in answer["choices"][0]["message"]["content"]
            assert loaded() == ["embedded:latest", "b:latest"]
            assert client.get("/api/ps").json()["models"][1]["expires_at"] < "2300"
            assert gateway.openai().models.retrieve("gpt").model_dump()["parent"] == "b"
            assert 'uma_tokens_total{model="b"}' in client.get("/metrics").text
            unloaded = client.post("/v1/models/unload", json={"model": "b"}).json()
            assert (unloaded["success"], unloaded["model"]["status"]) == (True, {"value": "unloaded"})
            assert loaded() == ["embedded:latest"]
            assert client.post("/models/load", json={"model": "b"}).json()["model"]["status"] == {"value": "loaded"}
            assert client.post("/v1/models/reload", json={"model": "b"}).status_code == 200
            assert client.post("/v1/models/load", json={"model": "x"}).status_code == 404
            gone = client.post("/api/chat", json={"model": "b", "keep_alive": 0}).json()
            assert gone["done_reason"] == "unload"
            assert loaded() == ["embedded:latest"]
            assert client.post("/api/generate", json={"model": "b"}).json()["done_reason"] == "load"
            assert loaded() == ["embedded:latest", "b:latest"]
