"""Reasoning over HTTP: a real model that reasons, with the clients of Anthropic and of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
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
    if hidden["type"] == "disabled":
        assert found.usage.output_tokens_details.thinking_tokens == 2, "the markers: the model begins to think anyway"
    else:
        assert found.content[0].text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_ends_with_its_budget(thinking: Gateway, stream: bool) -> None:
    found = answer_of(thinking, stream=stream, thinking={"type": "enabled", "budget_tokens": 2})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking == " ".join(REASONING.split()[:2])
    assert found.usage.output_tokens_details.thinking_tokens == 4, "two, and the markers"


@pytest.mark.parametrize(
    ("fields", "n_tokens"),
    [
        ({"thinking_budget_tokens": 2}, 2),
        ({"reasoning_budget_tokens": 2, "thinking_budget_tokens": 3}, 2),
        ({"thinking_budget_tokens": 0}, 0),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "none", "thinking_budget_tokens": 1}, 1),
        ({"thinking_budget_tokens": -1}, 4),
        ({"reasoning_effort": "low"}, 4),
    ],
    ids=str,
)
def test_the_budget_of_a_chat(thinking: Gateway, fields: dict[str, Any], n_tokens: int) -> None:
    found = thinking.openai().chat.completions.create(**ASK, extra_body=fields)
    message = found.choices[0].message.to_dict()
    assert str(message.get("reasoning_content") or "").split() == REASONING.split()[:n_tokens]
    assert message["content"]


def test_the_effort_none_is_no_reasoning(thinking: Gateway) -> None:
    found = thinking.openai().responses.create(model="thinking", input="Hello", reasoning={"effort": "none"})
    assert [item.type for item in found.output] == ["message"]


def test_a_budget_that_cannot_be_is_refused_in_the_words_of_the_client(thinking: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="thinking_budget_tokens"):
        thinking.openai().chat.completions.create(**ASK, extra_body={"thinking_budget_tokens": -2})
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens"):
        answer_of(thinking, stream=False, thinking={"type": "enabled", "budget_tokens": -2})


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
