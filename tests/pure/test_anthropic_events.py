"""Answers of Anthropic's API: the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from tests.support.answers import ANSWER, CALLS, eos
from uma_trio.client import Event, PrefillProgress, Token
from uma_trio.gateway.dialects.anthropic.messages import MessageEvents
from uma_trio.gateway.errors import ErrorKind, HttpError

Fields = dict[str, Any]
HEAD = {"id": "msg_1", "role": "assistant", "model": "m"}


def renderer(*, has_reasoning: bool = True) -> MessageEvents:
    return MessageEvents(HEAD, "1", 3, has_reasoning=has_reasoning)


def events_of(written: bytes) -> list[Fields]:
    return [json.loads(line.removeprefix(b"data: ")) for line in written.split(b"\n") if line.startswith(b"data: ")]


def rendered(*given: Event, has_reasoning: bool = True) -> list[Fields]:
    events = renderer(has_reasoning=has_reasoning)
    written = b"".join(map(events.render, given))
    return events_of(events.begin() + written + events.end())  # as StreamedAnswer calls it


def shape(events: list[Fields]) -> list[tuple[Any, ...]]:
    """Type, index, and what is in it, of each event about a block."""
    content = [event.get("content_block") or event.get("delta") or {} for event in events]
    return [
        (event["type"].removeprefix("content_block_"), event["index"], inner.get("type"))
        for event, inner in zip(events, content, strict=True)
        if "index" in event
    ]


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    events = rendered(*ANSWER, eos(reason="tool_calls", tool_calls=CALLS))
    assert shape(events) == [
        *(("start", 0, "thinking"), ("delta", 0, "thinking_delta"), ("delta", 0, "thinking_delta")),
        *(("delta", 0, "signature_delta"), ("stop", 0, None)),
        *(("start", 1, "text"), ("delta", 1, "text_delta"), ("stop", 1, None)),
        *(("start", 2, "tool_use"), ("delta", 2, "input_json_delta"), ("delta", 2, "input_json_delta")),
        ("stop", 2, None),
        *(("start", 3, "tool_use"), ("delta", 3, "input_json_delta"), ("stop", 3, None)),
    ]
    calls = [event["content_block"] for event in events if event["type"] == "content_block_start"][2:]
    assert [(call["id"], call["name"], call["input"]) for call in calls] == [
        ("c1", "shell", {}),
        ("c2", "apply_patch", {}),
    ]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 3,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }


def test_without_thinking_the_other_blocks_are_numbered_from_zero() -> None:
    events = rendered(*ANSWER[:3], eos(), has_reasoning=False)
    assert shape(events) == [("start", 0, "text"), ("delta", 0, "text_delta"), ("stop", 0, None)]
    assert shape(rendered(*ANSWER[:2], eos(), has_reasoning=False)) == [("start", 0, "text"), ("stop", 0, None)]


def test_a_call_that_fails_to_parse_is_text() -> None:
    events = rendered(*ANSWER[3:5], Token(id="r", text="<tool_call>oops"), eos())
    assert [event[:2] for event in shape(events)][3:] == [("start", 1), ("delta", 1), ("stop", 1)]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


def test_the_first_event_has_the_size_of_the_prompt() -> None:
    progress = PrefillProgress(id="r", prefilled_tokens=5, prompt_tokens=5)
    start = rendered(progress, ANSWER[2], eos())[0]
    assert start["type"] == "message_start"
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] == 5


def test_an_answer_that_the_context_cuts_says_so() -> None:
    assert rendered(ANSWER[2], eos(reason="length"))[-2]["delta"]["stop_reason"] == "max_tokens"
    events = MessageEvents(HEAD, "1", 100, has_reasoning=True)
    events.render(eos(reason="length"))
    assert events_of(events.end())[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"


def test_an_error_in_the_middle() -> None:
    [error] = events_of(renderer().fail(HttpError(ErrorKind("E_MODEL_UNAVAILABLE", 503), "try again")))
    assert error["type"] == "error"
    assert error["error"]["type"] == "overloaded_error"


def test_a_stream_that_has_nothing_to_send_sends_pings() -> None:
    assert MessageEvents.keep_alive_frame == b'event: ping\ndata: {"type":"ping"}\n\n'
