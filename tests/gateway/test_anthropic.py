"""Anthropic's API, with Anthropic's client and with plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.gateway.conftest import Gateway

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
ASK: dict[str, Any] = {"model": "embedded", "max_tokens": 100, "messages": QUESTION}
DRAFT = "https://json-schema.org/draft/2020-12/schema"
CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
LONG = {"type": "array", "items": {"enum": ["fox"]}, "minItems": 1000}
"""A schema of answers that take a while."""


def test_a_whole_answer(gateway: Gateway) -> None:
    found = gateway.anthropic().messages.create(**ASK)
    assert [block.type for block in found.content] == ["text"]
    assert found.content[0].text == ANSWER
    assert (found.type, found.role, found.model) == ("message", "assistant", "embedded")
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    assert found.usage.output_tokens > 3


def test_a_streamed_answer_is_the_same_in_pieces(gateway: Gateway) -> None:
    whole = gateway.anthropic().messages.create(**ASK)
    with gateway.anthropic().messages.stream(**ASK) as stream:
        events = list(stream)
        last = stream.get_final_message()
    assert [block.text for block in last.content] == [block.text for block in whole.content] == [ANSWER]
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert sum(event.type == "text" for event in events) > 3


def test_the_answer_continues_a_last_message_of_the_assistant(gateway: Gateway) -> None:
    client, start = gateway.anthropic(), ANSWER[:14]
    begun = {**ASK, "messages": [*QUESTION, {"role": "assistant", "content": start}]}
    assert start + client.messages.create(**begun).content[0].text == ANSWER
    with client.messages.stream(**begun) as stream:
        assert start + "".join(stream.text_stream) == ANSWER
    counted = client.messages.count_tokens(messages=begun["messages"], model="embedded")
    usage = client.messages.create(**begun).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_events_of_a_stream_and_their_order(gateway: Gateway) -> None:
    with gateway.http() as client:
        text = client.post("/v1/messages?beta=true", json={**ASK, "stream": True}).text
    events = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    assert all(json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ") for name, data in events)
    names = [name.removeprefix("event: ") for name, _ in events]
    n_deltas = names.count("content_block_delta")
    assert names == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * n_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]


def test_the_usage_says_what_was_in_the_cache_and_adds_up_to_the_prompt(gateway: Gateway) -> None:
    chat = {**ASK, "system": "You are a geographer who likes to be brief, and who knows all capitals by heart."}
    client = gateway.anthropic()
    client.messages.create(**chat)
    whole = client.messages.create(**chat).usage
    assert whole.cache_read_input_tokens > 0
    assert whole.cache_creation_input_tokens == 0
    n_prompt = client.messages.count_tokens(model="embedded", system=chat["system"], messages=QUESTION).input_tokens
    assert whole.input_tokens + whole.cache_read_input_tokens == n_prompt
    with client.messages.stream(**chat) as stream:
        start = next(event for event in stream if event.type == "message_start")
        assert start.message.usage.input_tokens == n_prompt
        last = stream.get_final_message().usage
    assert last.input_tokens + last.cache_read_input_tokens == n_prompt


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(gateway: Gateway, stream: bool) -> None:
    def ask(**fields: Any) -> tuple[str, str | None, str]:
        client = gateway.anthropic()
        if stream:
            with client.messages.stream(**{**ASK, **fields}) as answer:
                found = answer.get_final_message()
        else:
            found = client.messages.create(**{**ASK, **fields})
        return found.stop_reason, found.stop_sequence, found.content[0].text

    assert ask(max_tokens=2) == ("max_tokens", None, "The capital")
    assert ask(stop_sequences=["France", "Paris"]) == ("stop_sequence", "France", "The capital of ")
    assert ask(max_tokens=10**6) == ("end_turn", None, ANSWER), "there is no room for so many, and none is needed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "error", "kind"),
    [
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": []}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": "x" * 300_000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
        ({"model": "claude-0"}, anthropic.NotFoundError, "not_found_error"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, None),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [CALL]}]}, anthropic.BadRequestError, None),
    ],
)
def test_a_refusal_has_a_type_also_when_a_stream_was_asked_for(
    gateway: Gateway, wrong: dict[str, Any], error: type[anthropic.APIStatusError], kind: str | None, stream: bool
) -> None:
    with pytest.raises(error) as refused:
        gateway.anthropic().messages.create(**{**ASK, "stream": stream, **wrong})
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["type"] == (kind or "invalid_request_error")
    assert body["request_id"] == refused.value.request_id, "from the header request-id"


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(gateway: Gateway) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has"):
        gateway.anthropic().messages.create(**{**ASK, "messages": [{"role": "user", "content": "a b " * 50_000}]})


def test_max_tokens_is_required(gateway: Gateway) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/messages", json={"model": "embedded", "messages": QUESTION})
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]


def test_what_has_no_effect_is_named(gateway: Gateway) -> None:
    extra = {"temprature": 1, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    with gateway.http() as client:
        warnings = client.post("/v1/messages", json={**ASK, **extra}).json()["warnings"]
        text = client.post("/v1/messages", json={**ASK, **extra, "stream": True}).text
    assert "temprature" in warnings[0]
    assert "web_search_20250305" in warnings[1]
    assert json.loads(text.split("\n")[1].removeprefix("data: "))["message"]["warnings"] == warnings


def test_an_answer_that_follows_a_schema(gateway: Gateway) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    found = gateway.anthropic().messages.create(
        **ASK, output_config={"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    )
    assert json.loads(found.content[0].text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(gateway: Gateway, stream: bool) -> None:
    story = {**ASK, "max_tokens": 4000, "output_config": {"format": {"type": "json_schema", "schema": LONG}}}
    client = gateway.anthropic()
    if stream:
        with client.messages.stream(**story) as answer:
            next(iter(answer.text_stream))
    else:
        with pytest.raises(anthropic.APITimeoutError):
            client.messages.create(**story, timeout=0.5)
    gateway.daemon.settled()


def claude_code(turn: int, *messages: Any, **fields: Any) -> dict[str, Any]:
    """A request with the fields that Claude Code sends."""
    header = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=3{turn}ee5;"
    rules = "You answer questions about countries, and you use the tools that you have. " * 4
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {
        "model": "embedded",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": {**schema, "$schema": DRAFT}}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "user_0_account_0_session_0"},
        **fields,
    }


def reminded(words: str) -> dict[str, Any]:
    reminder = {"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"}
    return {"role": "user", "content": [reminder, {"type": "text", "text": words}]}


def test_the_requests_of_claude_code(gateway: Gateway) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    question = reminded(QUESTION[0]["content"])
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "/etc/hosts"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "127.0.0.1 localhost", "is_error": False}
    turns = [
        [question],
        [
            question,
            {"role": "assistant", "content": [{"type": "text", "text": ANSWER}, call]},
            {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "<total_tokens>9000 tokens left</total_tokens>"},
        ],
    ]
    usages = []
    for n, messages in enumerate(turns):
        body = claude_code(n, *messages)
        counted = gateway.anthropic().post(
            "/v1/messages/count_tokens?beta=true",
            body={name: body[name] for name in ("model", "system", "messages", "tools")},
            cast_to=anthropic.types.MessageTokensCount,
        )
        with gateway.http(headers=headers) as client:
            answer = client.post("/v1/messages?beta=true", json=body)
        assert answer.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if "data: " in line]
        assert "warnings" not in events[0]["message"]
        assert events[-1] == {"type": "message_stop"}
        usages.append(events[-2]["usage"])
        assert usages[n]["input_tokens"] + usages[n]["cache_read_input_tokens"] == counted.input_tokens
    first = usages[0]["input_tokens"] + usages[0]["cache_read_input_tokens"]
    assert usages[1]["cache_read_input_tokens"] > first - 20, "neither the header nor the last message costs the prefix"
