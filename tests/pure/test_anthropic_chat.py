"""Chats of Anthropic's API as messages of the socket protocol."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.cases import all_cases
from uma_trio.gateway.dialects.anthropic.chat import Chat, ChatMessages, tool_fields
from uma_trio.gateway.dialects.anthropic.dialect import error_body
from uma_trio.gateway.errors import ErrorKind, HttpError
from uma_trio.protocol.messages import parse
from uma_trio.protocol.requests import Generate

Fields = dict[str, Any]


def text(words: str) -> Fields:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def user(*content: Any) -> Fields:
    return {"role": "user", "content": [text(each) if isinstance(each, str) else each for each in content]}


def assistant(*content: Any) -> Fields:
    return {**user(*content), "role": "assistant"}


def chat(*messages: Fields, **fields: Any) -> Chat:
    return msgspec.convert({"messages": messages, **fields}, Chat)


def converted(*messages: Fields, **fields: Any) -> list[Fields]:
    found = ChatMessages(chat(*messages, **fields)).messages
    request = parse({"id": "r", "messages": found})  # the daemon takes it
    assert isinstance(request, Generate)
    return found


@all_cases("system", ["Be brief.", [text("Be brief.")]])
def test_the_system_prompt_comes_first(system: Any) -> None:
    assert converted(user("Hi"), system=system) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_values_of_thinking_that_are_not_known_are_named() -> None:
    def warnings(**thinking: Any) -> list[str]:
        return ChatMessages(chat(user("Hi"), thinking=thinking)).warnings

    assert warnings(type="adaptive", display="summarized") == warnings(type="disabled") == []
    [of_type, of_display] = warnings(type="enabeld", display="loud")
    assert of_type == "the type of thinking 'enabeld' is not known and had no effect; did you mean enabled?"
    assert "display of thinking 'loud'" in of_display


def test_blocks_of_text_and_consecutive_messages_of_the_user_are_paragraphs() -> None:
    assert converted(user("a", "b"), {"role": "user", "content": "c"}) == [{"role": "user", "content": "a\n\nb\n\nc"}]
    assert converted(user("x"), system=[text("a"), text("b")])[0]["content"] == "a\n\nb"


def test_a_system_message_at_the_end_leaves_what_comes_before_it_as_it_was() -> None:
    before = [{"role": "system", "content": "first"}, user("a"), assistant("b"), user("c")]
    first = converted(*before, system="s")
    then = converted(*before, {"role": "system", "content": "9 tokens left"}, assistant("d"), user("e"), system="s")
    assert first[0] == {"role": "system", "content": "s\n\nfirst"}
    assert then[:3] == first[:3]
    assert then[3] == {"role": "user", "content": "c\n\n<system>\n9 tokens left\n</system>"}


def test_a_tool_call_and_its_result() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("21"), text("degrees")]}
    thought = {"type": "thinking", "thinking": "I must look.", "signature": "s"}
    assert converted(user("How warm is Paris?"), assistant(thought, "I look.", call), user(result, "Well?"))[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "I must look.",
            "tool_calls": [{"id": "toolu_1", "name": "weather", "arguments": {"city": "Paris"}}],
        },
        {"role": "tool", "content": "21\n\ndegrees", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "user", "content": "Well?"},
    ]


@all_cases(
    ("content", "is_error", "expected"),
    [("21", False, "21"), ("no such city", True, "Error: no such city"), (None, None, ""), ([], None, "")],
)
def test_results_of_tools(content: Any, is_error: bool | None, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error}
    assert converted(user(result)) == [{"role": "tool", "content": expected, "tool_call_id": "t"}]


def test_what_only_another_server_can_read_is_skipped_and_named() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": {"type": "error"}},
    ]
    found = ChatMessages(chat(user("a"), assistant(*blocks, "b"), user("c")))
    assert found.messages[1] == {"role": "assistant", "content": "b"}
    assert [warning.split()[5] for warning in found.warnings] == [repr(block["type"]) for block in blocks]


def test_a_document_that_is_text() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}}
    assert converted(user(document, "Go on."))[0]["content"] == "Once.\n\nGo on."


@all_cases(
    ("message", "parameter"),
    [
        (user("x", {"type": "image", "source": {}}), "messages[0].content[1]"),
        (user({"type": "document", "source": {"type": "base64", "data": ""}}), "messages[0].content[0]"),
        (user({"type": "tool_result", "content": ""}), "messages[0].content[0]"),
        (user({"type": "tool_result", "tool_use_id": "t", "content": 3}), "messages[0].content[0]"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [text("x"), {"type": "image"}]}),
            "messages[0].content[0].content[1]",
        ),
        (assistant({"type": "tool_use", "name": "f"}), "messages[0].content[0]"),
        (assistant({"type": "tool_use", "id": "t", "name": "f"}), "messages"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_place(message: Fields, parameter: str) -> None:
    with pytest.raises(HttpError) as refused:
        ChatMessages(chat(message))
    assert (refused.value.status, refused.value.parameter) == (400, parameter)


TOOL = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}


def test_tools_of_the_client_are_taken_and_those_of_servers_skipped_and_named() -> None:
    tools = [TOOL, {"type": "bash_20250124", "name": "bash"}, {"type": "custom", "name": "f", "input_schema": {}}]
    fields, warnings = tool_fields(chat(user("x"), tools=tools))
    assert fields == {"tools": [FUNCTION, {"name": "f", "description": "", "parameters": {}}]}
    assert "'bash_20250124'" in warnings[0]
    with pytest.raises(HttpError, match="input_schema"):
        tool_fields(chat(user("x"), tools=[{"name": "f"}]))


@all_cases(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "weather"}, ({"name": "weather"}, True)),
    ],
)
def test_the_choice_of_a_tool(choice: Fields, expected: tuple[Any, bool]) -> None:
    fields, _ = tool_fields(chat(user("x"), tools=[TOOL], tool_choice=choice))
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == expected
    parse({"id": "r", "messages": [{"role": "user", "content": "x"}], **fields})


@all_cases(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error")),
        *((404, "not_found_error"), (413, "request_too_large"), (422, "invalid_request_error")),
        *((429, "rate_limit_error"), (500, "api_error"), (502, "api_error"), (503, "overloaded_error")),
    ],
)
def test_types_of_errors(status: int, kind: str) -> None:
    body = error_body(HttpError(ErrorKind("E_X", status), "what to do"), "req-1")
    assert body["error"] == {"type": kind, "message": "what to do", "code": "E_X"}
    assert (body["type"], body["request_id"]) == ("error", "req-1")
