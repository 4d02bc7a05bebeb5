"""What breaks clients of OpenAI's API most often with local servers.  Each test is numbered by how often, worst first."""

from __future__ import annotations

import json

import openai
import pytest

from tests.gateway.conftest import Gateway
from uma_trio.client import Eos, Timings, Token, ToolCall, ToolCallDelta, Usage
from uma_trio.gateway.dialects.openai.chat import ChatChunks
from uma_trio.gateway.dialects.openai.extras import Extras

HEAD = {"id": "c", "created": 1, "model": "m", "system_fingerprint": "b1"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(gateway: Gateway, *messages: dict[str, object], **fields: object) -> openai.types.chat.ChatCompletion:
    found = gateway.openai().chat.completions.create(model="embedded", messages=messages or [QUESTION], **fields)
    assert isinstance(found, openai.types.chat.ChatCompletion)
    return found


def chunks(*events: object) -> list[dict[str, object]]:
    """The data of a stream of these events."""
    renderer = ChatChunks(HEAD, "r", Extras(), n=1, has_usage=False, warnings=[])
    written = renderer.begin() + b"".join(map(renderer.render, events)) + renderer.end()
    lines = [line.removeprefix(b"data: ") for line in written.split(b"\n") if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def eos(**fields: object) -> Eos:
    usage, timings = Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_ms=0, total_ms=1)
    return Eos(id="r", usage=usage, timings=timings, **fields)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_1_system_messages_may_be_anywhere(gateway: Gateway, role: str) -> None:
    instruction = {"role": role, "content": "Answer in English."}
    first = chat(gateway, instruction, {"role": "system", "content": "Be kind."}, QUESTION)
    last = chat(
        gateway, {"role": "system", "content": "Answer in English."}, QUESTION, {**instruction, "content": "Be kind."}
    )
    assert first.choices[0].message.content == last.choices[0].message.content
    assert first.usage.prompt_tokens == last.usage.prompt_tokens


@pytest.mark.parametrize("arguments", ['{"city": "Lima"}', "{}", ""])
def test_2_arguments_of_calls_in_the_history_are_texts(gateway: Gateway, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "19 degrees"},
    ]
    assert chat(gateway, QUESTION, *history, QUESTION, tools=[WEATHER]).choices[0].message.content


def test_2_arguments_that_are_no_object_are_refused(gateway: Gateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "[1"}}
    with pytest.raises(openai.BadRequestError, match="JSON object") as refused:
        chat(gateway, QUESTION, {"role": "assistant", "tool_calls": [call]})
    assert refused.value.body["param"] == "messages[1].tool_calls[0].function.arguments"


def test_3_deltas_of_calls_have_an_index_and_the_first_has_id_and_name() -> None:
    events = [
        ToolCallDelta(id="r", call=0, call_id="c1", name="weather"),
        ToolCallDelta(id="r", call=0, arguments='{"city": '),
        ToolCallDelta(id="r", call=0, arguments='"Lima"}'),
        ToolCallDelta(id="r", call=1, call_id="c2", name="time"),
        ToolCallDelta(id="r", call=1, arguments="{}"),
    ]
    calls = [
        ToolCall(id="c1", name="weather", arguments={"city": "Lima"}),
        ToolCall(id="c2", name="time", arguments={}),
    ]
    _, *deltas, last = [chunk["choices"][0] for chunk in chunks(*events, eos(reason="tool_calls", tool_calls=calls))]
    assert [delta["delta"]["tool_calls"] for delta in deltas] == [
        [{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"city": '}}],
        [{"index": 0, "function": {"arguments": '"Lima"}'}}],
        [{"index": 1, "id": "c2", "type": "function", "function": {"name": "time", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": "{}"}}],
    ]
    assert last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("spelling", ["reasoning_content", "reasoning"])
def test_4_reasoning_is_taken_back_in_both_spellings(gateway: Gateway, spelling: str) -> None:
    answer = {"role": "assistant", "content": ANSWER, spelling: "Easy."}
    assert chat(gateway, QUESTION, answer, QUESTION).choices[0].message.content


def test_5_a_call_that_fails_to_parse_is_text() -> None:
    begun = ToolCallDelta(id="r", call=0, call_id="c1", name="weather")
    *_, text, last = chunks(begun, Token(id="r", text="<tool_call>oops"), eos(reason="stop"))
    assert text["choices"][0]["delta"] == {"content": "<tool_call>oops"}
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["any", {"type": "function"}, {"type": "function", "function": {"name": "unknown"}}, "required", {}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_7_a_tool_choice_that_is_not_possible_is_refused(gateway: Gateway, choice: object, stream: bool) -> None:
    tools = {} if choice == "required" else {"tools": [WEATHER]}
    with pytest.raises(openai.BadRequestError, match="tool_choice") as refused:
        gateway.openai().chat.completions.create(
            model="embedded", messages=[QUESTION], tool_choice=choice, stream=stream, **tools
        )
    assert str(refused.value.param).startswith("tool_choice")


def test_8_tools_of_unknown_types_are_skipped_with_a_warning(gateway: Gateway) -> None:
    found = chat(
        gateway, tools=[{"type": "web_search"}, WEATHER, {"type": "custom", "custom": {"name": "x"}}, {"role": 5}]
    )
    assert found.choices[0].finish_reason
    assert [warning.split(" ")[0] for warning in found.warnings] == ["tools[0]", "tools[2]", "tools[3]"]
    assert found.warnings[2] == "tools[3] was skipped: it has no function"


def test_9_a_changing_header_does_not_cost_the_cached_prefix(gateway: Gateway) -> None:
    rules = "You are a helpful program that answers questions about countries and their capitals. " * 4
    header = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch={};\n"
    found = [
        chat(gateway, {"role": "system", "content": header.format(f"7{n}fea") + rules}, QUESTION) for n in range(2)
    ]
    usage = found[1].usage
    assert usage.prompt_tokens == found[0].usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_10_the_usage_says_how_much_was_cached(gateway: Gateway) -> None:
    question = {"role": "user", "content": "Which of the planets has the largest number of moons, and why? " * 4}
    found = [chat(gateway, question, max_tokens=4).usage for _ in range(2)]
    assert found[1].prompt_tokens_details.cached_tokens == found[1].prompt_tokens - 1


def test_11_a_model_says_how_much_context_a_request_has(gateway: Gateway) -> None:
    model = gateway.openai().models.retrieve("embedded").model_dump()
    room = model["context_length"]
    assert room == model["max_model_len"] == model["meta"]["n_ctx"] > 0
    usage = chat(gateway, max_tokens=room + 1).usage
    assert usage.total_tokens < room
    long = {"messages": [{"role": "user", "content": "one two three " * room}]}
    with gateway.http() as client:
        refused = client.post("/v1/generate", json={**long, "max_tokens": 1})
    assert f"maximum context length is {room} tokens" in refused.text


def test_12_a_prompt_that_is_too_long_is_refused_and_not_cut(gateway: Gateway) -> None:
    room = gateway.openai().models.retrieve("embedded").model_dump()["context_length"]
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        chat(gateway, {"role": "user", "content": "one two three " * room})
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_15_the_usage_of_a_stream_comes_on_request_with_no_choices(gateway: Gateway) -> None:
    create = gateway.openai().chat.completions.create
    without = list(create(model="embedded", messages=[QUESTION], stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in without)
    options = {"include_usage": True}
    *others, last = create(model="embedded", messages=[QUESTION], stream=True, stream_options=options)
    assert (last.choices, last.usage.total_tokens > 0) == ([], True)
    assert all(chunk.usage is None and chunk.choices for chunk in others)


# -- sessions ------------------------------------------------------------------------------------------


async def test_a_client_that_sends_everything_each_time_has_a_durable_session(gateway: Gateway) -> None:
    messages: list[dict[str, object]] = [{"role": "system", "content": "Be kind."}]
    for n, question in enumerate(("What is the capital of Peru?", "And of Chile?"), 1):
        messages.append({"role": "user", "content": question})
        answer = chat(gateway, *messages, extra_headers={"x-session-id": "whole"}).choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        async with gateway.daemon.client() as client:
            [found] = [each for each in await client.sessions() if each.session_id.startswith("whole:")]
        assert (found.turns, found.durable) == (n, True)
    async with gateway.daemon.client() as client:
        said = (await client.transcript(found.session_id)).messages
    assert [(each.role, each.text) for each in said] == [(each["role"], each["content"]) for each in messages]


def test_conversations_at_the_same_time_may_have_one_cache_key(gateway: Gateway) -> None:
    create = gateway.openai().chat.completions.create
    fields = {"model": "embedded", "messages": [QUESTION], "prompt_cache_key": "busy"}
    with create(**fields, stream=True) as stream:
        next(stream)
        assert create(**fields).choices[0].message.content == ANSWER
        assert create(**fields, n=2).choices[1].message.content == ANSWER
