"""The list of models of OpenAI's API."""

from __future__ import annotations

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
    assert refused.value.body["code"] == "E_MODEL_NOT_FOUND"


def test_an_answer_names_the_model_also_if_the_request_does_not(gateway: Gateway) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}]})
    assert answer.json()["model"] == "embedded"
