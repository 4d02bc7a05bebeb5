"""Items of OpenAI's Responses API as messages of the socket protocol, and events as items."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.support.answers import ANSWER, CALLS, eos
from tests.support.cases import all_cases
from uma_trio.client import Event, Token
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.dialects.openai.response_events import ResponseEvents
from uma_trio.gateway.dialects.openai.response_items import Conversation, Item, has_files
from uma_trio.gateway.dialects.openai.responses import ResponsesRequest, response_head
from uma_trio.gateway.errors import ErrorKind, HttpError
from uma_trio.protocol.messages import parse

Fields = dict[str, Any]


def message(role: str, *texts: str) -> Fields:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def call(call_id: str, **arguments: Any) -> Fields:
    return {"type": "function_call", "call_id": call_id, "name": "shell", "arguments": json.dumps(arguments)}


def result(call_id: str, output: Any) -> Fields:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def conversation(*items: Fields, instructions: str | None = None) -> Conversation:
    found = Conversation(instructions, msgspec.convert(items, list[Item]))
    parse({"id": "r", "messages": found.messages})  # the daemon takes it
    return found


def test_instructions_and_messages() -> None:
    found = conversation(
        message("developer", "a", "b"),
        message("user", "c", "d"),
        message("assistant", "e", "f"),
        instructions="Be brief.",
    )
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\nd"},
        {"role": "assistant", "content": "ef"},
    ]


def test_reasoning_text_and_calls_are_one_message_of_the_assistant() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    answer = [thought, message("assistant", "I look."), call("c1", command="ls"), call("c2", command="pwd")]
    results = [result("c1", "a.txt"), result("c2", [{"type": "input_text", "text": "/"}])]
    found = conversation(message("user", "Which files?"), *answer, *results, thought, message("assistant", "a.txt"))
    assert found.messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "name": "shell", "arguments": {"command": "ls"}},
                {"id": "c2", "name": "shell", "arguments": {"command": "pwd"}},
            ],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "c1", "name": "shell"},
        {"role": "tool", "content": "/", "tool_call_id": "c2", "name": "shell"},
        {"role": "assistant", "content": "a.txt", "reasoning": "Hm."},
    ]


def test_what_comes_after_a_call_is_a_message_of_its_own() -> None:
    found = conversation(message("user", "x"), call("c1"), message("assistant", "y"), message("assistant", "z"))
    assert [(each["content"], "tool_calls" in each) for each in found.messages[1:]] == [
        *(("", True), ("y", False), ("z", False))
    ]


def test_a_custom_tool_takes_a_text() -> None:
    patch = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"}
    done = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    found = conversation(message("user", "x"), patch, done)
    assert found.messages[1]["tool_calls"][0]["arguments"] == {"input": "*** Begin Patch"}
    assert found.messages[2]["content"] == "ok"


def test_items_of_tools_that_run_on_a_server_are_skipped_and_named() -> None:
    found = conversation(message("user", "x"), {"type": "web_search_call", "id": "ws_1", "status": "completed"})
    assert len(found.messages) == 1
    assert found.warnings == ["input[1] was skipped: items of type 'web_search_call' are not supported"]


def test_sound_is_a_part_of_a_message_and_is_not_stored_by_default() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    item = {"role": "user", "content": [part, {"type": "input_text", "text": "What is this?"}]}
    [message] = conversation(item).messages
    assert message["content"] == [
        {"type": "audio", "data": "UklGRg=="},
        {"type": "text", "text": "What is this?"},
    ]
    assert has_files([msgspec.convert(item, Item)])
    assert not has_files([msgspec.convert({"role": "user", "content": "What is this?"}, Item)])


@all_cases(
    ("item", "parameter"),
    [
        ({"role": "robot", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input[0].content[0]"),
        ({"role": "user", "content": 3}, "input[0].content"),
        ({"role": "user", "content": [3]}, "input[0].content[0]"),
        ({**call("c1"), "arguments": "[1"}, "input[0].arguments"),
        ({**call("c1"), "call_id": None}, "input[0]"),
        ({"type": "function_call_output", "output": "x"}, "input[0]"),
        ({"type": "item_reference", "id": "x"}, "input[0]"),
        ({"type": "reasoning", "encrypted_content": "uma-trio:?"}, "input[0].encrypted_content"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_place(item: Fields, parameter: str) -> None:
    with pytest.raises(HttpError) as refused:
        conversation(item)
    assert (refused.value.status, refused.value.parameter) == (400, parameter)


def renderer(*, seals: bool = False) -> ResponseEvents:
    head = response_head("resp_1", ResponsesRequest(), "m", {}, [])
    return ResponseEvents(head, "1", Extras(), custom_tools=frozenset({"apply_patch"}), seals=seals)


def rendered(*given: Event, seals: bool = False) -> list[Fields]:
    events = renderer(seals=seals)
    written = b"".join(map(events.render, given))
    written = events.begin() + written + events.end()  # as StreamedAnswer calls it
    return [json.loads(line.removeprefix(b"data: ")) for line in written.split(b"\n") if line.startswith(b"data: ")]


def test_reasoning_text_and_calls_are_items_with_events_in_order() -> None:
    events = rendered(*ANSWER, eos(reason="tool_calls", tool_calls=CALLS))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in events] == [
        *(("created", None), ("in_progress", None)),
        *(("output_item.added", 0), ("content_part.added", 0)),
        *(("reasoning_text.delta", 0), ("reasoning_text.delta", 0), ("reasoning_text.done", 0)),
        *(("content_part.done", 0), ("output_item.done", 0)),
        *(("output_item.added", 1), ("content_part.added", 1)),
        *(("output_text.delta", 1), ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1)),
        *(("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.delta", 2)),
        *(("function_call_arguments.done", 2), ("output_item.done", 2)),
        *(("output_item.added", 3), ("custom_tool_call_input.delta", 3), ("custom_tool_call_input.done", 3)),
        *(("output_item.done", 3), ("completed", None)),
    ]
    assert events[0]["response"]["output"] == []
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert {item["status"] for item in output} == {"completed"}
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I must look."}]
    assert (output[2]["call_id"], output[2]["arguments"]) == ("c1", '{"command": "ls"}')
    assert (output[3]["type"], output[3]["input"]) == ("custom_tool_call", "*** Begin\nPatch")


def test_a_whole_response_has_the_items_of_a_streamed_one() -> None:
    streamed = rendered(*ANSWER, eos(reason="tool_calls", tool_calls=CALLS))[-1]["response"]
    end = eos(reason="tool_calls", tool_calls=CALLS, text="I look.", reasoning="I must look.")
    found: Any = msgspec.to_builtins(renderer().whole([end]))
    for item in (*streamed["output"], *found["output"]):
        if "arguments" in item:
            item["arguments"] = json.loads(item["arguments"])
    found["created_at"] = streamed["created_at"]  # a second may have begun between them
    assert found == streamed
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


def test_a_call_that_is_cut_is_incomplete() -> None:
    events = rendered(*ANSWER[3:5], eos(reason="length"))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == events[-2]["item"]["status"] == "incomplete"


def test_a_call_that_fails_to_parse_is_text() -> None:
    events = rendered(*ANSWER[3:5], Token(id="r", text="<tool_call>oops"), eos())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [
        *(("function_call", "incomplete"), ("message", "completed"))
    ]
    assert done[1]["content"][0]["text"] == "<tool_call>oops"


def test_reasoning_comes_back_sealed_from_clients_that_send_it_only_so() -> None:
    reasoning = rendered(*ANSWER[:2], eos(), seals=True)[-1]["response"]["output"][0]
    found = conversation(
        message("user", "x"), {**reasoning, "content": None}, message("assistant", "y"), message("user", "z")
    )
    assert found.messages[1] == {"role": "assistant", "content": "y", "reasoning": "I must look."}
    assert rendered(*ANSWER[:2], eos())[-1]["response"]["output"][0]["encrypted_content"] is None
    of_others = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}
    assert conversation(message("user", "x"), of_others).messages == [{"role": "user", "content": "x"}]


def test_an_error_in_the_middle_ends_the_response_as_failed() -> None:
    events = renderer()
    written = (
        events.begin()
        + events.render(ANSWER[2])
        + events.fail(HttpError(ErrorKind("E_MODEL_UNAVAILABLE", 503), "try again"))
    )
    last = json.loads(written.split(b"data: ")[-1])
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_is_overloaded"
    assert "E_MODEL_UNAVAILABLE" in last["response"]["error"]["message"]
