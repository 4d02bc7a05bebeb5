"""Messages: the type, bounds and default of every field, and the conversion of events in both directions."""

import json
import math
import typing
from collections.abc import Mapping
from typing import Any

import attrs
import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.errors import BadRequest, UmaError
from uma_trio.protocol.answers import Metrics, ModelDescription, ModelList, SessionInfo, SessionList, Transcript
from uma_trio.protocol.chat import MAX_TOOL_DEPTH, ChatMessage, NamedTool, Tool, ToolCall
from uma_trio.protocol.events import (
    Eos,
    Failure,
    Forecast,
    Logprob,
    Logprobs,
    PrefillProgress,
    Reasoning,
    Token,
    ToolCallDelta,
    UnknownEvent,
)
from uma_trio.protocol.messages import ServerEvent, parse, parse_event, to_fields
from uma_trio.protocol.parameters import ROWS, Field, Parameter
from uma_trio.protocol.payload import Encoding, decode, encode
from uma_trio.protocol.queries import MetricsQuery, ModelsQuery, TokenizeQuery
from uma_trio.protocol.requests import MAX_METADATA_BYTES, MAX_METADATA_DEPTH, Cancel, Constraint, Generate, Slo
from uma_trio.protocol.types import MAX_ERROR_CHARS
from uma_trio.protocol.usage import Timings, Usage

LEAST = {"id": "r1", "prompt": "x"}


def refused(fields: dict[str, object]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(fields)
    return caught.value


# -- requests ---------------------------------------------------------------------------------------


def test_minimal_request() -> None:
    assert parse(LEAST) == Generate(id="r1", prompt="x")
    assert parse(LEAST | {"type": "generate"}) == Generate(id="r1", prompt="x")


def test_request_with_every_field() -> None:
    found = parse(
        {
            "id": "r1",
            "model": "small",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": ""},
            ],
            "parse_special": False,
            "max_tokens": 5,
            "n": 1,
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "repeat_last_n": 5,
            "frequency_penalty": -0.5,
            "presence_penalty": 1,
            "logit_bias": {"7": -100, "8": 2},
            "logprobs": 3,
            "seed": 2**63 - 1,
            "stop": ["a", "b"],
            "stop_token_ids": [3, 4],
            "ignore_eos": False,
            "stream": False,
            "echo": True,
            "return_full_text": True,
            "keep_alive": True,
            "cache_prompt": False,
            "speculate": True,
            "session_id": "s",
            "n_keep": 4,
            "slo": {"target_ttft_ms": 150, "target_itl_ms": 80.5, "priority": "background"},
            "principal": "web",
            "constraint": {"choice": ["a"], "after": "b"},
            "metadata": {"user": [1, None, {"deep": True}]},
        }
    )
    assert found == Generate(
        id="r1",
        model="small",
        messages=[
            ChatMessage(role="system", content="be brief"),
            ChatMessage(role="user", content="hello"),
            ChatMessage(role="assistant", content=""),
        ],
        parse_special=False,
        max_tokens=5,
        n=1,
        temperature=1.0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        repeat_last_n=5,
        frequency_penalty=-0.5,
        presence_penalty=1.0,
        logit_bias={7: -100.0, 8: 2.0},
        logprobs=3,
        seed=2**63 - 1,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        constraint=Constraint(choice=["a"], after="b"),
        ignore_eos=False,
        stream=False,
        echo=True,
        return_full_text=True,
        keep_alive=True,
        cache_prompt=False,
        speculate=True,
        session_id="s",
        n_keep=4,
        slo=Slo(target_ttft_ms=150.0, target_itl_ms=80.5, priority="background"),
        principal="web",
        metadata={"user": [1, None, {"deep": True}]},
    )
    assert isinstance(found, Generate)
    assert type(found.temperature) is float


def test_a_session_takes_one_answer_only() -> None:
    several = parse(LEAST | {"n": 3})
    assert isinstance(several, Generate)
    assert several.n == 3
    assert "fork" in str(refused(LEAST | {"n": 3, "session_id": "s"}))


def test_cancel_and_metrics() -> None:
    assert parse({"event": "cancel", "id": "r1"}) == Cancel(id="r1")
    assert parse({"type": "metrics"}) == MetricsQuery()
    assert parse({"type": "metrics", "id": "m", "keep_alive": True}) == MetricsQuery(id="m", keep_alive=True)


def test_unknown_fields_are_ignored_everywhere() -> None:
    assert parse(LEAST | {"best_of": 2, "x": {"y": None}}) == parse(LEAST)
    assert parse(LEAST | {"slo": {"deadline": 5}}) == parse(LEAST)
    chat = {"id": "r1", "messages": [{"role": "user", "content": "x", "mood": "me"}]}
    assert parse(chat) == Generate(id="r1", messages=[ChatMessage(role="user", content="x")])
    assert parse({"event": "cancel", "id": "r1", "reason": 5}) == Cancel(id="r1")


@all_cases(
    "name",
    [
        "prompt",
        "messages",
        "max_tokens",
        "logprobs",
        "seed",
        "speculate",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "repeat_last_n",
        "frequency_penalty",
        "presence_penalty",
        "session_id",
        "n_keep",
        "metadata",
        "model",
        "principal",
    ],
)
def test_null_means_absent(name: str) -> None:
    if name == "prompt":
        chat = {"id": "r1", "messages": [{"role": "user", "content": "x"}]}
        assert parse(chat | {"prompt": None}) == parse(chat)
    else:
        assert parse(LEAST | {name: None}) == parse(LEAST)
    assert parse(LEAST | {"event": None, "type": None}) == parse(LEAST)


@all_cases(("stop", "stops"), [("a", ("a",)), ([], ()), (["a"], ("a",)), (["a", "b", "a"], ("a", "b", "a"))])
def test_stop_is_a_string_or_a_list(stop: object, stops: tuple[str, ...]) -> None:
    found = parse(LEAST | {"stop": stop})
    assert isinstance(found, Generate)
    assert found.stops == stops


def taken(row: Field) -> list[object]:
    """Values of a field at its bounds."""
    bounds, text = row.bounds, "x" * row.bounds.get("max_length", 0)
    low, high = bounds.get("ge", row.default), bounds.get("le", row.default)
    words = typing.get_args(row.type)
    values: list[object] = [*words] if words else {bool: [False, True], str: [text]}.get(row.type, [low, high])
    several = [[], *([value] * row.most for value in values)] if row.is_list and row.most else []
    return [*several, *(values if row.type in row.kinds else []), *([None] if row.default is None else [])]


AT_THE_BOUNDS = [
    *((row.name, value) for row in ROWS for value in taken(row)),
    ("continue_final_message", False),
    ("add_generation_prompt", False),
    ("id", "x" * 256),
    ("model", "x" * 256),
    ("principal", "x" * 256),
    ("principal_weight", 0.01),
    ("principal_weight", 100),
    ("principal_max_requests", None),
    ("principal_max_requests", 1),
    ("principal_max_requests", 1_000_000),
    ("id", "é"),
    ("prompt", ""),
    ("prompt", "a\0b"),
    ("infill", None),
    ("infill", {}),
    ("infill", {"prefix": "", "suffix": "a", "files": [{"text": "", "filename": "x" * 1024}] * 256}),
    ("prompt", [0]),
    ("prompt", [2**31 - 1] * (1 << 20)),
    ("logit_bias", {}),
    ("logit_bias", {str(token): -100 for token in range(300)}),
    ("logit_bias", {"0": 100, str(2**31 - 1): -0.0}),
    ("session_id", "x" * 256),
    ("session_id", "../é\u2028"),
    ("chat_template_kwargs", {}),
    ("slo", {}),
    ("slo", {"target_ttft_ms": 1e-9, "target_itl_ms": 3_600_000}),
    ("slo", {"target_ttft_ms": None, "priority": "interactive"}),
    ("constraint", None),
    ("constraint", {"json_schema": {}}),
    ("constraint", {"json_object": True, "after": "x" * 256}),
    ("constraint", {"regex": "x" * 65536}),
    ("constraint", {"choice": ["x" * 4096] * 512}),
    ("tools", []),
    ("tool_choice", "auto"),
    ("tool_choice", "none"),
    ("metadata", {}),
    ("adapters", []),
    ("adapters", [{"name": "x" * 256, "scale": -16}, {"name": "é", "scale": 16.0}, {"name": "b", "scale": None}]),
    ("adapters", [{"name": f"a{n}", "scale": 0} for n in range(8)]),
]


@all_cases(("name", "value"), AT_THE_BOUNDS)
def test_values_at_the_bounds_are_accepted(name: str, value: object) -> None:
    parse(LEAST | {name: value})


@all_cases("other", [{"messages": [{"role": "user", "content": "Hi"}]}, {"session_id": "s"}, {"prompt": [1]}])
def test_what_does_not_go_with_a_gap(other: dict[str, object]) -> None:
    gap = {"id": "r", "infill": {"prefix": "a", "suffix": "b"}}
    assert parse(gap).infill.suffix == "b"
    assert parse(gap | {"prompt": "c"}).prompt == "c"
    with pytest.raises(BadRequest) as caught:
        parse(gap | other)
    assert caught.value.field == "infill"


def test_variables_of_a_template_go_with_messages() -> None:
    kwargs = {"enable_thinking": False, "budget": 7, "reasoning_effort": "high"}
    fields = {"id": "r", "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": kwargs}
    assert parse(fields).chat_template_kwargs == kwargs
    with pytest.raises(BadRequest, match="go with messages"):
        parse(LEAST | {"chat_template_kwargs": kwargs})
    with pytest.raises(BadRequest, match="cannot set tools"):
        parse(fields | {"chat_template_kwargs": {"tools": "x"}})


@all_cases("query", [{}, {"type": "tokenize"}])
def test_only_a_text_of_the_assistant_is_continued(query: dict[str, str]) -> None:
    def asked(*messages: dict[str, object], **fields: object) -> dict[str, object]:
        return {"id": "r", "messages": list(messages), "continue_final_message": True, **query, **fields}

    question, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": {}}]}
    assert parse(asked(question, begun)).continue_final_message
    assert parse(asked(begun)).continue_final_message
    for messages in ([question], [begun, question], [question, call]):
        with pytest.raises(BadRequest, match="end messages with one of role assistant") as caught:
            parse(asked(*messages))
        assert caught.value.field == "continue_final_message"
    text = {"text": "Hi"} if query else {"prompt": "Hi"}
    with pytest.raises(BadRequest, match="continue_final_message"):
        parse({"id": "r", "continue_final_message": True, **query, **text})


def not_taken(row: Field) -> list[object]:
    """Values that a field refuses."""
    bounds, values = row.bounds, list[object]()
    if row.type is bool:
        values = [0, 1, "true", []]
    elif row.type in (int, float):
        least = bounds["gt"] if "gt" in bounds else bounds["ge"] - (1 if row.type is int else 1e-9)
        of_type = [1.0, 2**64] if row.type is int else []
        between = [1] if "multiple_of" in bounds else []
        values = [least, bounds["le"] + 1, math.nan, math.inf, "1", True, {}, *of_type, *between]
    else:
        values = ["", "x" * (bounds.get("max_length", 6) + 1), 1, True, {}, b"x"]
    if row.is_list:
        longest = next(value for value in taken(row) if isinstance(value, list) and value)
        several: list[object] = [*([value] for value in [*values, None]), longest * 2, {}]
        values = [*several, *(values if row.type in row.kinds else [1, "x"])]
    return [*values, *([] if row.default is None or isinstance(row, Parameter) else [None])]


NOT_TAKEN = [
    *((row.name, not_taken(row)) for row in ROWS),
    ("id", ["", "x" * 257, 1, None, True, [], {}]),
    ("model", ["", "x" * 257, 1, True, [], b"x"]),
    ("principal", ["", "x" * 257, 1, True, [], b"x"]),
    ("principal_weight", [0, 0.009, 100.1, -1, math.nan, math.inf, "1", True, None]),
    ("principal_max_requests", [0, -1, 1_000_001, 1.0, "1", True]),
    ("prompt", [1, True, [], {}, b"x", [-1], [2**31], [1.0], ["1"], [None], [[1]], [1] * ((1 << 20) + 1)]),
    (
        "logit_bias",
        [
            None,
            [],
            1,
            "x",
            {"a": 1},
            {"-1": 1},
            {"1.0": 1},
            {"01": 1},
            {" 1": 1},
            {"": 1},
            {str(2**31): 1},
            {"9" * 400: 1},
        ],
    ),
    (
        "logit_bias",
        [
            {"1": 100.1},
            {"1": -100.1},
            {"1": math.nan},
            {"1": -math.inf},
            {"1": "1"},
            {"1": None},
            {"1": True},
            {"1": [1]},
        ],
    ),
    ("logit_bias", [{str(token): 1 for token in range(301)}]),
    ("constraint", [1, "x", [], {}, {"after": "x"}, {"json_object": False}, {"json_object": 1}, {"json_schema": []}]),
    ("constraint", [{"regex": ""}, {"regex": "x" * 65537}, {"regex": "a", "lark": "b"}, {"gbnf": 1}, {"lark": None}]),
    ("constraint", [{"choice": []}, {"choice": [""]}, {"choice": "ab"}, {"choice": ["x"] * 513}, {"choice": [1]}]),
    ("constraint", [{"regex": "a", "after": ""}, {"regex": "a", "after": "x" * 257}]),
    ("infill", [1, "x", [], {"prefix": 1}, {"suffix": None}, {"files": {}}, {"files": ["x"]}, {"files": [{}]}]),
    ("infill", [{"files": [{"text": "a", "filename": "x" * 1025}]}, {"files": [{"text": ""}] * 257}]),
    ("continue_final_message", [0, 1, "true", None]),
    ("add_generation_prompt", [0, 1, "true", None]),
    (
        "tools",
        [None, 1, "x", {}, [{}], [1], [{"name": ""}], [{"name": "a b"}], [{"name": "a\n"}], [{"name": "x" * 129}]],
    ),
    ("tools", [[{"name": "a", "parameters": []}], [{"name": "a"}, {"name": "a"}], [{"name": "a", "description": 1}]]),
    ("tools", [[{"name": "a", "parameters": {"type": "string"}}], [{"name": f"t{n}"} for n in range(513)]]),
    ("tool_choice", [None, "some", 1, [], {}, {"name": 1}, {"name": "a"}, "required"]),
    ("session_id", ["", "x" * 257, 1, True, [], b"x"]),
    ("chat_template_kwargs", [None, [], {"a b": 1}, {"": 1}, {"a": []}, {"a": 1.5}, {"a": "<|im_end|>"}]),
    ("chat_template_kwargs", [{"a": "x\n"}, {"messages": 1}, {"tools": True}, {f"v{n}": 1 for n in range(17)}]),
    ("slo", [None, [], 1, "x", {"target_ttft_ms": 0}, {"target_ttft_ms": -1}, {"target_itl_ms": 3_600_001}]),
    ("slo", [{"target_itl_ms": math.nan}, {"target_itl_ms": "1"}, {"priority": "high"}, {"priority": None}]),
    ("adapters", [None, 1, "x", {}, ["x"], [{}], [{"name": ""}], [{"name": 1}], [{"name": "x" * 257}], [[]]]),
    ("adapters", [[{"name": "a", "scale": scale}] for scale in (-16.1, 16.1, math.nan, math.inf, "1", True, [])]),
    ("adapters", [[{"name": f"a{n}"} for n in range(9)]]),
    ("metadata", [[], 1, "x", True]),
    ("metadata", [{"a": b"x"}, {"a": math.nan}, {"a": [{"b": math.inf}]}, {"a": [-math.inf]}]),
]


@all_cases(("name", "value"), [(name, value) for name, values in NOT_TAKEN for value in values])
def test_values_of_the_wrong_type_or_out_of_bounds_are_refused(name: str, value: object) -> None:
    error = refused(LEAST | {name: value})
    assert name in str(error)
    assert error.field is not None
    assert error.field.startswith(name)
    assert len(str(error)) <= MAX_ERROR_CHARS + 10
    assert error.request_id == ("r1" if name != "id" else None)


def test_every_field_has_cases() -> None:
    elsewhere = {"messages", "controller", "controller_arg"}  # the last two: test_protocol_controllers.py
    fields = {field.name for field in attrs.fields(Generate)} - elsewhere
    assert {name for name, _ in AT_THE_BOUNDS} == fields
    assert {name for name, _ in NOT_TAKEN} == fields


@all_cases(
    "chat",
    [
        [],
        {},
        "x",
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "function", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "tool_calls": []}],
        [{"role": "user", "content": "x", "tool_calls": [{"name": "a", "arguments": {}}]}],
        [{"role": "user", "content": "x", "tool_call_id": "c"}],
        [{"role": "assistant", "tool_calls": [{"name": "a"}]}],
        [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{}"}]}],
        [{"role": "assistant", "tool_calls": [{"name": "a b", "arguments": {}}]}],
        [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": {"x": math.nan}}]}],
        [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": {}}] * 129}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}],
        ["x"],
        [None],
        [{"role": "user", "content": "x"}] * 1025,
    ],
)
def test_messages_that_are_refused(chat: object) -> None:
    error = refused({"id": "r1", "messages": chat})
    assert "messages" in str(error)
    assert error.field is not None
    assert error.field.startswith("messages")
    assert error.request_id == "r1"


def test_tools_and_what_came_of_them() -> None:
    call = {"id": "c1", "name": "add", "arguments": {"a": [1, {"b": None}]}}
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "x" * 128, "arguments": {}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]
    tools = [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}, {"name": "a.b:c/d-e_F9"}]
    found = parse({"id": "r1", "messages": chat, "tools": tools, "tool_choice": {"name": "add"}})
    assert isinstance(found, Generate)
    assert found.messages is not None
    assert [message.text for message in found.messages] == ["Be brief.", "", "3"]
    assert (found.messages[1].tool_calls or [])[0] == ToolCall(id="c1", name="add", arguments={"a": [1, {"b": None}]})
    assert found.tools[1] == Tool(name="a.b:c/d-e_F9")
    assert found.tool_choice == NamedTool(name="add")
    assert found.must_call
    parse({"id": "r1", "messages": chat, "tools": [{"name": f"t{n}"} for n in range(512)]})


def test_parameters_as_deep_as_allowed() -> None:
    def nested(depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for _ in range(depth - 1):
            found = {"properties": found}
        return found

    chat = [{"role": "user", "content": "x"}]
    for depth in (1, MAX_TOOL_DEPTH):
        parse({"id": "r1", "messages": chat, "tools": [{"name": "a", "parameters": nested(depth)}]})
    error = refused({"id": "r1", "messages": chat, "tools": [{"name": "a", "parameters": nested(MAX_TOOL_DEPTH + 1)}]})
    assert error.field == "tools[0].parameters"


@all_cases(
    ("fields", "said"),
    [
        ({"prompt": "x", "tools": [{"name": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "no tools"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "a"}], "tool_choice": {"name": "b"}},
            "'b'",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "a"}],
                "tool_choice": "required",
                "ignore_eos": True,
            },
            "ignore_eos",
        ),
    ],
)
def test_tools_that_are_not_possible(fields: dict[str, object], said: str) -> None:
    error = refused({"id": "r1", **fields})
    assert said in str(error)
    assert error.field is not None
    assert error.field in fields


def test_exactly_one_of_prompt_and_messages() -> None:
    chat = [{"role": "user", "content": "x"}]
    assert "exactly one" in str(refused({"id": "r1"}))
    assert "exactly one" in str(refused({"id": "r1", "prompt": None, "messages": None}))
    assert "exactly one" in str(refused({"id": "r1", "prompt": "x", "messages": chat}))


def test_id_is_required() -> None:
    for fields in ({"prompt": "x"}, {}, {"event": "cancel"}):
        assert str(refused(fields)).startswith("id is missing")


@all_cases("event", ["token", "", 1, True, [], {}])
def test_other_events_from_a_client_are_refused(event: object) -> None:
    assert "cancel" in str(refused(LEAST | {"event": event}))


@all_cases("kind", ["metric", "", 1, False, [], {}])
def test_unknown_types_are_refused(kind: object) -> None:
    assert "'metrics'" in str(refused(LEAST | {"type": kind}))


def test_cancel_and_metrics_are_checked_too() -> None:
    for fields in ({"event": "cancel", "id": ""}, {"event": "cancel", "id": 5}, {"type": "metrics", "id": 5}):
        refused(fields)
    refused({"type": "metrics", "keep_alive": "yes"})


@all_cases(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number from 0 to 100, not the text 'hot'"),
        ({"top_p": 0}, "top_p must be a number above 0, up to 1, not 0"),
        ({"mirostat": 1}, "mirostat must be 0 or 2, not 1"),
        ({"n": 1.5}, "n must be a whole number from 1 to 16, not 1.5"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more, not 0"),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 9223372036854775807, not 9223372036854775808"),
        ({"stream": None}, "stream must be true or false, not null"),
        ({"history": "x"}, "history must be one of 'continue', 'replace', not the text 'x'"),
        ({"stop": [""]}, "stop[0] must be a text of 1 to 256 characters, not an empty text"),
        ({"stop": 1}, "stop must be a text of 1 to 256 characters or a list of at most 16 texts, not 1"),
        (
            {"stop_token_ids": {"a": 1}},
            "stop_token_ids must be a list of at most 64 whole numbers, not an object of 1 fields",
        ),
        ({"tool_choice": []}, "tool_choice must be one of 'auto', 'none', 'required' or an object, not an empty list"),
        ({"logit_bias": {"a": 1}}, "each key of logit_bias must be a whole number, 0 or more"),
        ({"logit_bias": {"1": 101}}, "each value of logit_bias must be a number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias must be an object of at most 300 fields"),
        ({"slo": {"target_ttft_ms": -1}}, "slo.target_ttft_ms must be a number above 0, up to 3600000, not -1"),
        ({"session_id": "x" * 300}, "session_id must be a text of 1 to 256 characters, not a text of 300 characters"),
        (
            {"session_id": "a\nb"},
            "session_id must be a text of 1 to 256 characters without control characters, not the text 'a\\nb'",
        ),
        (
            {"model": "\x9b2J"},
            "model must be a text of 1 to 256 characters without control characters, not the text '\\x9b2J'",
        ),
        (
            {"type": "sessions", "action": "rename", "session_id": "s", "title": "\x1b[2J"},
            "title must be a text of at most 256 characters without control characters, not the text '\\x1b[2J'",
        ),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role must be one of 'assistant', "),
        ({"messages": [{"content": ""}]}, "messages[0].role is missing; give one of 'assistant', "),
    ],
)
def test_errors_say_which_field_what_it_may_be_and_what_it_was(fields: dict[str, Any], message: str) -> None:
    assert str(refused(LEAST | fields)).startswith(message)


def test_errors_quote_no_long_texts() -> None:
    error = refused({"id": "r", "messages": [{"role": "x" * 1_000_000, "content": ""}]})
    assert str(error).endswith("not a text of 1000000 characters")
    assert str(refused({})) == "id is missing; give a text of 1 to 256 characters"


@all_cases(
    ("claimed", "expected"),
    [("x" * 256, "x" * 256), ("x" * 257, None), ("", None), (5, None), (None, None), ([], None)],
)
def test_errors_carry_a_usable_request_id(claimed: object, expected: str | None) -> None:
    assert refused({"id": claimed, "prompt": 5}).request_id == expected


# -- metadata ---------------------------------------------------------------------------------------


def test_metadata_as_large_as_allowed() -> None:
    room = MAX_METADATA_BYTES - len(b'{"k":""}')
    parse(LEAST | {"metadata": {"k": "x" * room}})
    parse(LEAST | {"metadata": {"k": "é" * (room // 2)}})
    error = refused(LEAST | {"metadata": {"k": "x" * (room + 1)}})
    assert f"{MAX_METADATA_BYTES + 1} bytes" in str(error)
    assert error.request_id == "r1"


def nested(depth: int) -> dict[str, object]:
    found: object = 1
    for i in range(depth - 1):
        found = [found] if i % 2 else {"k": found}
    return {"k": found}


def test_metadata_as_deep_as_allowed() -> None:
    deepest = nested(MAX_METADATA_DEPTH)
    parse(LEAST | {"metadata": deepest})
    for depth in (MAX_METADATA_DEPTH + 1, 500, 900):
        assert "deep" in str(refused(LEAST | {"metadata": nested(depth)}))
    for encoding in Encoding:  # such metadata can be echoed
        assert decode(encode(to_fields(Failure(code="E", message="", metadata=deepest)), encoding), encoding)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
metadatas = st.dictionaries(
    texts,
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)),
    max_size=4,
)


@given(metadatas)
def test_metadata_is_echoed_unchanged(metadata: dict[str, object]) -> None:
    found = parse(LEAST | {"metadata": metadata})
    assert isinstance(found, Generate)
    for encoding in Encoding:
        event = Failure(code="E", message="m", id="r1", metadata=found.metadata)
        assert decode(encode(to_fields(event), encoding), encoding)["metadata"] == metadata


# -- both encodings ------------------------------------------------------------------------------------

slos = st.fixed_dictionaries(
    {},
    optional={
        "target_ttft_ms": st.none() | st.floats(0, 3_600_000, exclude_min=True),
        "target_itl_ms": st.none() | st.integers(1, 3_600_000),
        "priority": st.sampled_from(["interactive", "normal", "background"]),
    },
)
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=4,
)


def values_of(row: Field) -> st.SearchStrategy[object]:
    """Values that a field takes."""
    bounds, low = row.bounds, row.bounds.get("ge", row.bounds.get("gt"))
    found: st.SearchStrategy[object] = st.sampled_from(typing.get_args(row.type) or (row.default,))
    if row.type is bool:
        found = st.booleans()
    elif row.type is str:
        found = st.text("ab", min_size=bounds["min_length"], max_size=5)
    elif row.type is int:
        found = st.integers(low, bounds["le"]).map(lambda value: value - value % bounds.get("multiple_of", 1))
    elif row.type is float:
        found = st.floats(low, bounds["le"], exclude_min="gt" in bounds) | st.integers(
            math.floor(low) + 1, bounds["le"]
        )
    lists = st.lists(found, max_size=row.most) if row.is_list else st.nothing()
    return (
        lists
        | (found if row.type in row.kinds else st.nothing())
        | (st.none() if row.default is None else st.nothing())
    )


options = st.fixed_dictionaries(
    {"id": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)},
    optional={
        **{row.name: values_of(row) for row in ROWS},
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=5),
        "constraint": st.none()
        | st.builds(lambda texts: {"choice": texts}, st.lists(st.text("ab", min_size=1), min_size=1)),
        "session_id": st.none() | st.text("ab", min_size=1, max_size=256),
        "slo": slos,
        "metadata": st.none() | metadatas,
        "a field of the future": scalars,
    },
)
requests = st.builds(
    lambda fields, words: (
        fields
        | words
        | ({"n": 1} if fields.get("session_id") or fields.get("detached") else {})
        | ({"ignore_eos": False} if fields.get("constraint") else {})
    ),
    options,
    st.builds(lambda text: {"prompt": text}, texts) | st.builds(lambda chat: {"messages": chat}, chats),
)


@given(requests)
def test_a_request_means_the_same_in_json_and_cbor(fields: dict[str, object]) -> None:
    from_json = parse(decode(json.dumps(fields).encode(), Encoding.JSON))
    from_cbor = parse(decode(cbor2.dumps(fields), Encoding.CBOR))
    assert from_json == from_cbor
    assert isinstance(from_json, Generate)
    for name, value in fields.items():
        if value is not None and name in (
            "id",
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "logprobs",
            "stop_token_ids",
            "seed",
        ):
            assert getattr(from_json, name) == value


anything = st.recursive(
    scalars | st.floats() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([field.name for field in attrs.fields(Generate)] + ["event", "type"])


@given(
    st.dictionaries(names, anything, max_size=6)
    | st.builds(lambda more: LEAST | more, st.dictionaries(names, anything, max_size=3))
)
def test_any_fields_give_a_message_or_a_bad_request(fields: dict[str, object]) -> None:
    try:
        found = parse(fields)
    except UmaError as error:
        known = isinstance(error, BadRequest) and len(str(error)) <= MAX_ERROR_CHARS + 10
    else:
        known = isinstance(found, Generate | Cancel | MetricsQuery)
    assert known


# -- events, encoded ----------------------------------------------------------------------------------

counts = st.integers(0, 2**53)
times = st.floats(0, 1e9)
failures = st.builds(
    Failure,
    code=texts,
    message=texts,
    id=st.none() | texts,
    index=st.none() | counts,
    retry_after_ms=st.none() | counts,
    metadata=st.none() | metadatas,
)
octets = st.lists(st.integers(0, 255), max_size=4)
alternatives = st.lists(
    st.builds(Logprob, token_id=counts, text=texts, bytes=octets, logprob=st.floats(-99, 0)), max_size=2
)
scored = st.builds(
    Logprobs, token_id=counts, text=texts, bytes=octets, logprob=st.floats(-99, 0), top_logprobs=alternatives
)
calls = st.builds(ToolCall, id=st.text("ab", min_size=1), name=st.text("ab_", min_size=1), arguments=metadatas)
events = (
    st.builds(Token, id=texts, text=texts, token_id=st.none() | counts, echo=st.booleans(), inserted=st.booleans())
    | st.builds(Token.of, texts, texts, counts, scored, index=st.none() | counts)
    | st.builds(Reasoning.of, texts, texts, st.none() | counts, st.none() | scored, index=st.none() | counts)
    | st.builds(ToolCallDelta, id=texts, call=counts, call_id=st.none() | texts, arguments=st.none() | texts)
    | st.builds(Forecast, id=texts, queue_position=counts, start_ms=times, end_ms=times, index=st.none() | counts)
    | st.builds(PrefillProgress, id=texts, prefilled_tokens=counts, prompt_tokens=counts, index=st.none() | counts)
    | st.builds(
        Eos,
        id=texts,
        reason=st.sampled_from(["stop", "length", "tool_calls", "cancelled", "error"]),
        usage=st.builds(
            Usage,
            prompt_tokens=counts,
            completion_tokens=counts,
            cached_tokens=counts,
            dropped_tokens=counts,
            reasoning_tokens=st.none() | counts,
            sampled_tokens=st.none() | counts,
            inserted_tokens=st.none() | counts,
        ),
        timings=st.builds(
            Timings, queue_ms=times, ttft_ms=st.none() | times, total_ms=times, tokens_per_s=st.none() | times
        ),
        text=st.none() | texts,
        reasoning=st.none() | texts,
        tool_calls=st.none() | st.lists(calls, max_size=2),
        logprobs=st.none() | st.lists(scored, max_size=2),
        stop=st.none() | texts,
        seed=st.none() | st.integers(0, 2**63 - 1),
        metadata=st.none() | metadatas,
    )
    | failures
)
CLASSES = {
    "token": Token,
    "reasoning": Reasoning,
    "tool_call": ToolCallDelta,
    "eos": Eos,
    "error": Failure,
    "progress": PrefillProgress,
    "forecast": Forecast,
}


def without_none(value: object) -> object:
    """Like ``attrs.asdict``, without fields that are None."""
    assert attrs.has(type(value))
    found = {}
    for field in attrs.fields(type(value)):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if inner is not None:
            found[field.name] = plain(inner)
    return found


def plain(value: object) -> object:
    if isinstance(value, list):
        return [plain(one) for one in value]
    return without_none(value) if attrs.has(type(value)) else value


@given(events)
def test_events_round_trip_in_both_encodings(event: ServerEvent) -> None:
    decoded = [decode(encode(to_fields(event), encoding), encoding) for encoding in Encoding]
    assert decoded[0] == decoded[1]
    assert parse_event(decoded[0]) == event
    fields = dict(decoded[0])
    assert type(event) is CLASSES[fields.pop("event")]
    if isinstance(event, Token):
        fields.setdefault("echo", False)
        fields.setdefault("inserted", False)
    assert fields == without_none(event)


BIASES = [{}, {0: 1}, {7: -100.0, 8: 2.0, 2**31 - 1: 100}, dict.fromkeys(range(300), -1)]
WRONG_BIASES = [
    {-1: 1},
    {2**31: 1},
    {2**63: 1},
    {-(2**64): 1},
    {1: 101},
    {1: True},
    {1: [1]},
    dict.fromkeys(range(301), 1),
]


def _as_text(bias: Mapping[int, object]) -> dict[str, object]:
    return {str(token): value for token, value in bias.items()}


@all_cases("bias", BIASES)
def test_token_ids_as_keys_mean_the_same_in_both_encodings(bias: Mapping[int, float]) -> None:
    json = decode(encode(LEAST | {"logit_bias": _as_text(bias)}, Encoding.JSON), Encoding.JSON)
    for keys in (bias, _as_text(bias), dict(zip(bias, _as_text(bias).values(), strict=True))):
        found = parse(decode(encode(LEAST | {"logit_bias": keys}, Encoding.CBOR), Encoding.CBOR))
        assert found == parse(json)
        assert isinstance(found, Generate)
        assert found.logit_bias == bias


@all_cases("bias", WRONG_BIASES)
def test_invalid_biases_give_the_same_error_in_both_encodings(bias: Mapping[int, object]) -> None:
    said = {
        str(refused(decode(encode(LEAST | {"logit_bias": keys}, encoding), encoding)))
        for keys, encoding in ((_as_text(bias), Encoding.JSON), (_as_text(bias), Encoding.CBOR), (bias, Encoding.CBOR))
    }
    assert len(said) == 1
    assert "logit_bias must be " in said.pop()


def test_the_fields_of_a_token() -> None:
    assert to_fields(Token(id="r", text="hi", token_id=7)) == {"id": "r", "event": "token", "text": "hi", "token_id": 7}
    assert to_fields(Token(id="r", text="hi", token_id=None, echo=True)) == {
        "id": "r",
        "event": "token",
        "text": "hi",
        "echo": True,
    }
    assert to_fields(Token(id="r", text="", token_id=0))["text"] == ""


def test_fields_without_a_value_are_absent() -> None:
    usage, timings = (
        Usage(prompt_tokens=0, completion_tokens=0),
        Timings(queue_ms=0, ttft_ms=None, total_ms=1.5, tokens_per_s=None),
    )
    assert to_fields(Eos(id="r", reason="cancelled", usage=usage, timings=timings)) == {
        "id": "r",
        "event": "eos",
        "reason": "cancelled",
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "dropped_tokens": 0},
        "timings": {"queue_ms": 0, "total_ms": 1.5},
    }
    assert to_fields(Failure(code="E_X", message="")) == {"event": "error", "code": "E_X", "message": ""}


@all_cases(
    ("fields", "expected"),
    [
        ({"text": ""}, TokenizeQuery(text="")),
        ({"tokens": []}, TokenizeQuery(tokens=[])),
        (
            {"text": "x", "add_special": False, "parse_special": False},
            TokenizeQuery(text="x", add_special=False, parse_special=False),
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "model": "m",
                "id": "q",
                "keep_alive": True,
                "principal": "web",
            },
            TokenizeQuery(
                messages=[ChatMessage(role="user", content="x")], model="m", id="q", keep_alive=True, principal="web"
            ),
        ),
    ],
)
def test_tokenize_queries(fields: dict[str, object], expected: TokenizeQuery) -> None:
    assert parse({"type": "tokenize", **fields}) == expected


@all_cases(
    "fields",
    [
        {},
        {"text": None},
        {"text": "x", "tokens": [1]},
        {"text": "x", "messages": [{"role": "user", "content": "x"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}, {"name": "f"}]},
        {"text": "x", "tools": [{"name": "f"}]},
        {"tokens": [-1]},
        {"tokens": [1] * ((1 << 20) + 1)},
        {"tokens": "1"},
        {"text": 1},
        {"text": "x", "add_special": 1},
        {"text": "x", "principal": ""},
    ],
)
def test_tokenize_queries_that_ask_for_nothing_or_too_much(fields: dict[str, object]) -> None:
    assert refused({"type": "tokenize", "id": "q", **fields}).request_id == "q"


def test_a_models_query_and_its_answer() -> None:
    assert parse({"type": "models", "id": "q"}) == ModelsQuery(id="q")
    model = ModelDescription(
        name="m",
        description="d",
        architecture="llama",
        quantization=None,
        size_bytes=1,
        n_parameters=2,
        context=3,
        context_per_request=4,
        parallel=5,
        capabilities=["completion", "chat"],
        embedding_length=6,
    )
    found = ModelList(models=[model])
    assert parse_event(to_fields(found)) == found
    assert "quantization" not in to_fields(found)["models"][0]


def test_metrics_fields_are_top_level() -> None:
    found = to_fields(Metrics(snapshot={"tokens_total": 0, "p50_ms": None, "kv": {"cells": 5}}, id="m"))
    assert found == {"id": "m", "event": "metrics", "tokens_total": 0, "kv": {"cells": 5}}


# -- events, decoded ----------------------------------------------------------------------------------


def test_unknown_events_and_fields_of_a_newer_server() -> None:
    fields = {"id": "r", "event": "search", "name": "search"}
    found = parse_event(fields)
    assert found == UnknownEvent(fields)
    assert found.id == "r"
    for nameless in ({}, {"event": None}, {"event": 5}, {"event": ["eos"]}):
        assert parse_event(nameless) == UnknownEvent(nameless)
        assert parse_event(nameless).id is None
    token = {"id": "r", "event": "token", "text": "x", "token_id": 1, "colour": "red"}
    assert parse_event(token) == Token(id="r", text="x", token_id=1)
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "joules": 3}
    eos = {"id": "r", "event": "eos", "reason": "stop", "usage": usage, "timings": {"queue_ms": 1, "total_ms": 2}}
    assert parse_event(eos) == Eos(
        id="r",
        reason="stop",
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(queue_ms=1, total_ms=2),
    )


def test_answers_to_queries_round_trip() -> None:
    metrics = Metrics(snapshot={"tokens_total": 0, "kv": {"cells": 5}}, id="m")
    assert parse_event(to_fields(metrics)) == metrics
    sessions = SessionList(sessions=[SessionInfo(session_id="s", turns=1, tokens=9, durable=True)])
    assert parse_event(to_fields(sessions)) == sessions
    for content in ({"messages": [ChatMessage(role="user", content="x")]}, {"text": ""}):
        transcript = Transcript(session=sessions.sessions[0], more=True, id="q", **content)
        assert parse_event(to_fields(transcript)) == transcript


@all_cases(
    "fields",
    [
        {"event": "token"},
        {"event": "token", "id": "r", "text": 5},
        {"event": "eos", "id": "r", "reason": "stop"},
        {"event": "error", "id": "r"},
        {"event": "sessions", "sessions": {}},
    ],
)
def test_an_invalid_known_event_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=f"event '{fields['event']}'"):
        parse_event(fields)


@all_cases("more", [{}, {"token_id": 1}, {"index": 0}, {"unknown": 1}])
@all_cases("missing", [None, "id", "text"])
@all_cases("wrong", [None, "id", "text"])
def test_a_token_is_checked_however_few_fields_it_has(
    more: dict[str, Any], missing: str | None, wrong: str | None
) -> None:
    fields: dict[str, Any] = {"id": "r", "event": "token", "text": "x", **more}
    if missing is not None:
        del fields[missing]
    if wrong in fields:
        fields[wrong] = 5
    if missing is None and wrong is None:
        expected = {name: value for name, value in more.items() if name != "unknown"}
        assert parse_event(fields) == Token(id="r", text="x", **expected)
    else:
        with pytest.raises(BadRequest, match="event 'token'"):
            parse_event(fields)
