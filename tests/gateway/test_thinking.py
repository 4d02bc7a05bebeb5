"""Reasoning over HTTP: a real model that reasons, with the clients of Anthropic and of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon
from tests.support.thinking_model import ANSWER, QUESTION, REASONING, write_thinking_model

ASK: dict[str, Any] = {"model": "thinking", "max_tokens": 100, "messages": QUESTION}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("model")
    write_thinking_model(folder / "thinking.gguf")
    with real_daemon("--model", str(folder / "thinking.gguf"), "--http", "0", folder=folder) as daemon:
        yield Gateway.of(daemon)


def answer_of(gateway: Gateway, *, stream: bool, **fields: Any) -> Any:
    client = gateway.anthropic()
    if not stream:
        return client.messages.create(**ASK, **fields)
    with client.messages.stream(**ASK, **fields) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_that_goes_back(thinking: Gateway, stream: bool) -> None:
    found = answer_of(thinking, stream=stream, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking == REASONING
    assert found.content[0].signature
    assert found.content[1].text == ANSWER
    assert 0 < found.usage.output_tokens_details.thinking_tokens < found.usage.output_tokens
    chat: list[Any] = [*QUESTION, found.to_param(), *QUESTION]
    assert thinking.anthropic().messages.create(**{**ASK, "messages": chat}).content


def test_a_schema_is_for_the_text_and_not_for_the_thinking(thinking: Gateway) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    found = answer_of(thinking, stream=False, output_config={"format": form})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking == REASONING
    assert json.loads(found.content[1].text) == {"city": "Paris"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hidden", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_can_be_left_out(thinking: Gateway, hidden: dict[str, Any], stream: bool) -> None:
    found = answer_of(thinking, stream=stream, thinking=hidden)
    assert [block.type for block in found.content] == ["text"]
    assert found.content[0].text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_that_goes_back(thinking: Gateway, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "thinking", "include": ["reasoning.encrypted_content"], "store": False}
    client = thinking.openai()
    if stream:
        with client.responses.stream(input=QUESTION, **fields) as events:
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            found = events.get_final_response()
        assert "".join(deltas) == REASONING
    else:
        found = client.responses.create(input=QUESTION, **fields)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output[0].content[0].text == REASONING
    assert found.output_text == ANSWER
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    items = [*QUESTION, *(item.to_dict() for item in found.output), *QUESTION]
    assert client.responses.create(input=items, **fields).output_text
