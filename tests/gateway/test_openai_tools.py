"""Tools of OpenAI's API.  The embedded model need not know them: a required call is made by its grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway

QUESTION = {"role": "user", "content": "How warm is it in Lima?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Lima", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


def ask(gateway: Gateway, *messages: dict[str, Any], **fields: Any) -> Any:
    chosen = {"model": "embedded", "messages": messages or [QUESTION], "tools": [TIME, WEATHER], "max_tokens": 200}
    return gateway.openai().chat.completions.create(**{**chosen, **fields})


@pytest.mark.parametrize("choice", [NAMED, ALLOWED])
def test_a_call_whole_and_streamed(gateway: Gateway, choice: dict[str, Any]) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    [whole] = ask(gateway, **fields).choices
    [call] = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Lima", "Rome")

    chunks = list(ask(gateway, **fields, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.index for delta in deltas] == [0] * len(deltas)
    assert (deltas[0].function.name, deltas[0].type) == ("weather", "function")
    assert deltas[0].id
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert json.loads(arguments) == json.loads(call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_result_of_a_call_goes_back(gateway: Gateway) -> None:
    message = ask(gateway, tool_choice=NAMED).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "19 degrees"}]}
    found = ask(gateway, QUESTION, message.model_dump(exclude_none=True), result, max_tokens=5)
    assert found.usage.prompt_tokens > ask(gateway, max_tokens=1).usage.prompt_tokens


def test_one_call_in_the_way_of_older_clients(gateway: Gateway) -> None:
    call = {"name": "weather", "arguments": '{"city": "Lima"}'}
    history = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "19 degrees"},
    ]
    with gateway.http() as client:
        body = {"messages": [QUESTION, *history], "tools": [WEATHER]}
        text = client.post("/apply-template", json=body).json()["prompt"]
    assert "19 degrees" in text
    assert "Lima" in text.partition("How warm")[2].partition("?")[2]


def test_with_the_choice_none_there_are_no_calls(gateway: Gateway) -> None:
    found = ask(gateway, tool_choice="none", max_tokens=20)
    assert found.choices[0].message.tool_calls is None
