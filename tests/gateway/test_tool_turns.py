"""Tools over several turns, with the clients of Anthropic and of OpenAI's Responses API, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"words": {"type": "string", "maxLength": 12}, "kind": {"enum": ["city", "river"]}},
    "required": ["words", "kind"],
}
NOW = {"type": "object", "properties": {}}


def check(arguments: Any) -> None:
    assert arguments["kind"] in ("city", "river")
    assert len(arguments["words"]) <= 12


@pytest.mark.parametrize("stream", [False, True])
def test_with_anthropics_client(gateway: Gateway, stream: bool) -> None:
    client = gateway.anthropic()
    tools: list[Any] = [
        {"name": "look_up", "description": "Looks something up.", "input_schema": SCHEMA},
        {"name": "now", "input_schema": NOW},
    ]

    def ask(messages: list[Any], choice: dict[str, Any]) -> Any:
        fields = {"model": "embedded", "max_tokens": 200, "tools": tools, "messages": messages, "tool_choice": choice}
        if not stream:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            seen = list(events)
            blocks = [event.content_block for event in seen if event.type == "content_block_start"]
            assert all(block.input == {} for block in blocks if block.type == "tool_use")
            return events.get_final_message()

    messages = QUESTION
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
    ):
        answer = ask(messages, choice)
        assert answer.stop_reason == "tool_use"
        [call] = [block for block in answer.content if block.type == "tool_use"]
        if call.name == "look_up":
            check(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Paris"}]}
        messages = [*messages, answer.to_param(), {"role": "user", "content": [result]}]
    assert answer.usage.cache_read_input_tokens > 0, "the first turn"
    last = ask(messages, {"type": "none"})
    assert last.stop_reason == "end_turn"
    assert [block.type for block in last.content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_with_openais_client_for_responses(gateway: Gateway, stream: bool) -> None:
    client = gateway.openai()
    tools: list[Any] = [
        {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True},
        {"type": "function", "name": "now", "parameters": NOW, "strict": False},
    ]

    def ask(items: list[Any], choice: Any) -> Any:
        fields = {"model": "embedded", "tools": tools, "input": items, "tool_choice": choice, "store": False}
        fields |= {"parallel_tool_calls": False, "max_output_tokens": 200}
        if not stream:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as events:
            texts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            found = events.get_final_response()
        assert "".join(texts) == "".join(item.arguments for item in found.output if item.type == "function_call")
        return found

    items = QUESTION
    for choice in ("required", {"type": "function", "name": "look_up"}):
        answer = ask(items, choice)
        assert answer.status == "completed"
        [call] = [item for item in answer.output if item.type == "function_call"]
        if call.name == "look_up":
            check(json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Paris"}
        items = [*items, *(item.to_dict() for item in answer.output), result]
    assert answer.usage.input_tokens_details.cached_tokens > 0, "the first turn"
    last = ask(items, "none")
    assert [item.type for item in last.output] == ["message"]


def test_a_custom_tool_gets_a_text(gateway: Gateway) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    *_, last = gateway.openai().responses.create(
        model="embedded",
        input=QUESTION,
        tools=[{"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar}],
        tool_choice={"type": "custom", "name": "apply_patch"},
        max_output_tokens=60,
        stream=True,
    )
    call = last.response.output[0]
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    assert isinstance(call.input, str)
