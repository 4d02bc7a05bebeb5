"""OpenAI's Responses API, with OpenAI's client and with plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Gateway

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASK: dict[str, Any] = {"model": "embedded", "input": QUESTION}
LONG = {"type": "array", "items": {"enum": ["fox"]}, "minItems": 1000}
"""A schema of answers that take a while."""


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [event["type"] for event in events] == [name.removeprefix("event: ") for name, _ in frames]
    return events


def streamed(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    with gateway.http() as client:
        answer = client.post("/v1/responses", json={**ASK, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


@pytest.mark.parametrize(
    "given",
    [
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ],
)
def test_a_whole_answer(gateway: Gateway, given: Any) -> None:
    found = gateway.openai().responses.create(model="embedded", input=given)
    assert found.output_text == ANSWER
    assert (found.object, found.status, found.model, found.error) == ("response", "completed", "embedded", None)
    assert [(item.type, item.status) for item in found.output] == [("message", "completed")]
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    counted = gateway.openai().responses.input_tokens.count(model="embedded", input=given)
    assert counted.input_tokens == usage.input_tokens


def test_a_streamed_answer_is_the_same_in_pieces(gateway: Gateway) -> None:
    with gateway.openai().responses.stream(**ASK) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert last.output_text == ANSWER
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert sum(event.type == "response.output_text.delta" for event in events) > 3


def test_the_events_of_a_stream_are_numbered_and_in_order(gateway: Gateway) -> None:
    events = streamed(gateway)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * names.count("output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[-1]["response"]["id"]}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(gateway: Gateway, stream: bool) -> None:
    if stream:
        *_, last = streamed(gateway, max_output_tokens=2)
        assert last["type"] == "response.incomplete"
        found = last["response"]
    else:
        found = gateway.openai().responses.create(**ASK, max_output_tokens=2).to_dict()
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["content"][0]["text"] == "The capital"


def test_instructions_are_the_system_message_and_the_cache_is_counted(gateway: Gateway) -> None:
    rules = "You know all countries and their capitals, and your answers are as short as possible."
    found = [gateway.openai().responses.create(**ASK, instructions=rules) for _ in range(2)]
    assert found[1].usage.input_tokens > gateway.openai().responses.create(**ASK).usage.input_tokens
    assert found[1].usage.input_tokens_details.cached_tokens > 0
    assert found[1].instructions == rules


def test_an_answer_that_follows_a_schema(gateway: Gateway) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "city", "schema": {**schema, "additionalProperties": False}}
    found = gateway.openai().responses.create(**ASK, text={"format": form})
    assert json.loads(found.output_text)["city"] in ("Paris", "Rome")
    assert found.text.format.name == "city"


def test_log_probabilities_are_the_same_streamed_and_whole(gateway: Gateway) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = gateway.openai().responses.create(**ASK, **fields).to_dict()["output"][0]["content"][0]["logprobs"]
    events = streamed(gateway, **fields)
    deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert "".join(each["token"] for each in whole) == ANSWER
    assert all(len(each["top_logprobs"]) == 2 for each in whole)
    assert [each["token"] for each in deltas] == [each["token"] for each in whole]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "parameter"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused(
    gateway: Gateway, wrong: dict[str, Any], parameter: str | None, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai().responses.create(**{**ASK, "stream": stream, **wrong})
    assert refused.value.param == parameter


def test_a_conversation_that_is_too_long_is_refused_and_not_cut(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai().responses.create(model="embedded", input="a b " * 50_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_what_has_no_effect_is_named(gateway: Gateway) -> None:
    extra = {"temprature": 1, "tools": [{"type": "web_search"}], "truncation": "auto"}
    with gateway.http() as client:
        warnings = client.post("/v1/responses", json={**ASK, **extra}).json()["warnings"]
    assert [warning.split(" ")[0] for warning in warnings] == ["the", "truncation", "tools[0]"]
    assert streamed(gateway, **extra)[0]["response"]["warnings"] == warnings


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(gateway: Gateway, stream: bool) -> None:
    long = {**ASK, "text": {"format": {"type": "json_schema", "name": "x", "schema": LONG}}}
    client = gateway.openai()
    if stream:
        with client.responses.create(**long, stream=True) as events:
            next(event for event in events if event.type == "response.output_text.delta")
    else:
        with pytest.raises(openai.APITimeoutError):
            client.responses.create(**long, timeout=0.5)
    gateway.daemon.settled()


def codex(*items: Any) -> dict[str, Any]:
    """A request with the fields that Codex sends."""
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    return {
        "model": "embedded",
        "instructions": "You are a coding agent, and you answer questions about countries too. " * 4,
        "input": items,
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": parameters},
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a-codex",
        "client_metadata": {"x-codex-installation-id": "0"},
        "text": {"verbosity": "low"},
    }


def test_the_requests_of_codex(gateway: Gateway) -> None:
    def says(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    first = [says("developer", "The sandbox is read-only."), says("user", "<environment/>"), says("user", QUESTION)]
    arguments = json.dumps({"command": ["ls"]})
    then = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        says("assistant", ANSWER),
        {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": "call_1", "id": None},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "call_2"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    ]
    usages = []
    for items in (first, [*first, *then]):
        with gateway.http(headers={"session_id": "019a-codex", "originator": "codex_cli_rs"}) as client:
            answer = client.post("/v1/responses", json=codex(*items))
        assert answer.status_code == 200, answer.text
        events = events_of(answer.text)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert events[-1]["type"] == "response.completed"
        assert [warning.split(" ")[0] for warning in events[0]["response"]["warnings"][:2]] == ["tools[2]", "tools[3]"]
        usages.append(events[-1]["response"]["usage"])
    assert usages[1]["input_tokens_details"]["cached_tokens"] > usages[0]["input_tokens"] - 20
