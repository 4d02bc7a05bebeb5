"""Tools with the real engine.  The embedded model need not know them: a required call is made by its grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.profile import sampled
from tests.support.real_daemon import Daemon, real_daemon

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LOOK_UP = {
    "name": "look_up",
    "description": "Looks something up.",
    "parameters": {
        "type": "object",
        "properties": {"words": {"type": "string", "maxLength": 12}, "kind": {"enum": ["city", "river"]}},
        "required": ["words", "kind"],
    },
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    },
}
TOOLS = [LOOK_UP, ADD]
FORMATS = ["mistral", "gemma", "qwen3-coder", "kimi"]
"""Besides that of the embedded model; ``tests/property/test_tool_grammar.py`` has all."""


@pytest.fixture(scope="module")
def daemon(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with real_daemon(folder=tmp_path_factory.mktemp("daemon")) as found:
        yield found


def check(call: dict[str, Any]) -> None:
    arguments = call["arguments"]
    if call["name"] == "add":
        assert type(arguments["a"]) is int
        assert type(arguments["b"]) is bool
    else:
        assert call["name"] == "look_up"
        assert arguments["kind"] in ("city", "river")
        assert len(arguments["words"]) <= 12


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("temperature", [0, 3])
def test_a_required_call_fits_its_parameters(daemon: Daemon, stream: bool, temperature: float) -> None:
    answer = daemon.ask(
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        stream=stream,
        temperature=temperature,
        seed=5,
        max_tokens=200,
    )
    assert (answer.reason, answer.text, answer.last["constraint_complete"]) == ("tool_calls", "", True)
    [call] = answer.last["tool_calls"]
    check(call)
    parts = [event for event in answer.events if event["event"] == "tool_call"]
    if stream:
        assert (parts[0]["name"], parts[0]["call_id"]) == (call["name"], call["id"])
        assert json.loads("".join(part["arguments"] for part in parts[1:])) == call["arguments"]


@pytest.mark.parametrize("name", ["look_up", "add"])
def test_a_named_tool_is_called_once(daemon: Daemon, name: str) -> None:
    answer = daemon.ask(messages=QUESTION, tools=TOOLS, tool_choice={"name": name}, max_tokens=200)
    assert [call["name"] for call in answer.last["tool_calls"]] == [name]
    check(answer.last["tool_calls"][0])


def test_a_constraint_is_for_answers_that_are_no_calls(daemon: Daemon) -> None:
    answer = daemon.ask(messages=QUESTION, tools=TOOLS, constraint={"choice": ["Paris", "Lima"]}, max_tokens=100)
    assert answer.text in ("Paris", "Lima") or answer.last["tool_calls"]
    answer = daemon.ask(
        messages=QUESTION, tools=TOOLS, tool_choice="required", constraint={"choice": ["Paris"]}, max_tokens=300
    )
    assert answer.text == ""


def test_results_go_back(daemon: Daemon) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "look_up", "arguments": {"words": "France"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is <|im_end|> Paris."},
        {"role": "developer", "content": "Answer in one word."},
    ]
    prompt = daemon.ask(messages=chat, tools=TOOLS, max_tokens=1, echo=True, stream=False).text
    assert prompt.index("Answer in one word.") < prompt.index("What is the capital")
    assert prompt.count("<|im_start|>system") <= 1
    for words in ("Looks something up.", '"words": "France"', "It is <|im_end|> Paris."):
        assert words in prompt


def test_a_session_goes_on_after_a_call(daemon: Daemon) -> None:
    first = daemon.ask(
        messages=QUESTION, tools=TOOLS, tool_choice={"name": "add"}, session_id="t", max_tokens=200, keep_alive=True
    )
    [call] = first.last["tool_calls"]
    second = daemon.ask(
        messages=[{"role": "tool", "tool_call_id": call["id"], "content": "7"}],
        tools=TOOLS,
        session_id="t",
        max_tokens=5,
    )
    used = first.last["usage"]
    assert second.last["usage"]["cached_tokens"] >= used["prompt_tokens"] + used["completion_tokens"] - 5


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}, "tools[0].parameters"),
        ({"name": "a", "parameters": {"properties": {"x": {"type": "strong"}}}}, "strong"),
        ({"name": "a", "parameters": {"description": "x" * 70_000}}, "64 KiB"),
    ],
)
def test_parameters_that_cannot_be_followed(daemon: Daemon, tool: dict[str, Any], said: str) -> None:
    answer = daemon.ask(messages=QUESTION, tools=[tool], tool_choice="required")
    assert answer.last["code"] == "E_CONSTRAINT_INVALID"
    assert said in answer.last["message"]


@pytest.mark.parametrize("name", sampled(FORMATS, 4))
def test_another_format(library: None, tmp_path_factory, name: str) -> None:
    with real_daemon("--tool-format", name, folder=tmp_path_factory.mktemp("daemon")) as daemon:
        for temperature in (0, 2):
            answer = daemon.ask(
                messages=QUESTION,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=temperature,
                seed=3,
                max_tokens=300,
            )
            assert answer.reason == "tool_calls", answer.events
            assert answer.text == ""
            [call] = answer.last["tool_calls"]
            if name != "gemma":
                check(call)
