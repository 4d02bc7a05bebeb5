"""The list of models of OpenAI's API."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.gateway.conftest import Gateway


def test_the_models_that_are_served(gateway: Gateway) -> None:
    [model] = gateway.openai().models.list()
    assert (model.id, model.object, model.owned_by) == ("embedded", "model", "uma-trio")
    assert model.created > 1e9
    assert gateway.openai().models.retrieve("embedded") == model


def test_a_model_that_is_not_served(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="there is embedded") as refused:
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
        assert plain.get("/v1/nothing").json()["type"] == "error"


def test_all_methods_of_a_path_are_named(gateway: Gateway) -> None:
    with gateway.http() as plain:
        assert plain.options("/v1/controllers/tags").headers["allow"] == "GET, HEAD, POST"
