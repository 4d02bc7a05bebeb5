"""Messages about controllers: what a query and a request may have, and how the events travel."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.aici_link.messages import readable_error
from uma_trio.errors import BadRequest
from uma_trio.protocol.codec import ClientCodec, ServerCodec
from uma_trio.protocol.controllers import (
    MAX_ARG_BYTES,
    MAX_PARTS,
    Backtrack,
    ControllerOutput,
    Controllers,
    ControllersQuery,
    ControllerTag,
    Fork,
    StorageWrite,
)
from uma_trio.protocol.events import Eos, Failure, Token
from uma_trio.protocol.messages import ServerEvent, parse, parse_event
from uma_trio.protocol.parameters import ROWS
from uma_trio.protocol.payload import Encoding, encoding_of
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings, Usage

MODULE = "0123456789abcdef" * 4
LEAST = {"id": "r1", "controller": "jsctrl"}
QUERY = {"type": "controllers"}


def refused(fields: dict[str, object]) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(fields)
    return str(caught.value)


# -- requests -----------------------------------------------------------------------------------------


@all_cases("arg", [None, "let x = 1", "", {"a": [1, None]}, ["x"], 5, 0.5, True])
def test_a_request_with_a_controller_has_no_prompt(arg: object) -> None:
    assert parse(LEAST | {"controller_arg": arg}) == Generate(id="r1", controller="jsctrl", controller_arg=arg)


OTHER: dict[type, object] = {bool: True, int: 2, str: "x"}
"""Values that are no defaults."""


@all_cases(
    ("name", "value"),
    [
        ("prompt", "x"),
        ("prompt", ""),
        ("messages", [{"role": "user", "content": "x"}]),
        ("tools", [{"name": "f"}]),
        ("constraint", {"regex": "x"}),
        ("session_id", "s"),
        *(
            (row.name, [OTHER[row.type]] if row.is_list else OTHER[row.type])
            for row in ROWS
            if not row.goes_with_controller
        ),
    ],
)
def test_what_does_not_go_with_a_controller_is_named(name: str, value: object) -> None:
    assert f"omit {name}" in refused(LEAST | {name: value})


def test_fields_that_say_what_holds_anyway_are_allowed() -> None:
    harmless = {"n": 1, "stop": [], "tools": [], "echo": False, "constraint": None, "max_tokens": 5, "temperature": 1}
    parse(LEAST | harmless)


@all_cases("tag", [".", "..", "a/b", "../a", "_a", "z" * 51, "a b", "é", "a" * 21])
def test_a_tag_that_cannot_be_is_named_with_the_rule(tag: str) -> None:
    why = refused(QUERY | {"action": "tag", "module_id": MODULE, "tags": ["good.one-1_", tag]})
    assert why.startswith(f"{tag!r} cannot be a tag: a tag has 1 to 50 characters: the letters A to Z")


@all_cases("tag", ["a", "1", "z" * 50, "a" * 20, "alice.v1-2_x"])
def test_tags_that_can_be(tag: str) -> None:
    parse(QUERY | {"action": "tag", "module_id": MODULE, "tags": [tag]})


@all_cases(
    ("error", "said"),
    [
        ("Error (pre0): TypeError: no\n    at main (program.js:4)\n*** aici_host_stop()", "TypeError: no\n    at main (program.js:4)"),
        ("Error (init): no program was given\n*** aici_host_stop()\n", "no program was given"),
        ("Error (mid): *** aici_host_stop()", "Error (mid): *** aici_host_stop()"),
        ("Error (mid): aici_mid_process: unreachable", "Error (mid): aici_mid_process: unreachable"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_controller_that_ended_itself_has_said_why(error: str, said: str) -> None:
    assert readable_error(error) == said


def test_an_argument_needs_a_controller() -> None:
    assert "goes with controller" in refused({"id": "r1", "prompt": "x", "controller_arg": "y"})
    assert "controller" in refused({"id": "r1"})


def test_bounds_of_the_argument() -> None:
    parse(LEAST | {"controller_arg": "x" * (MAX_ARG_BYTES - 2)})
    assert str(MAX_ARG_BYTES) in refused(LEAST | {"controller_arg": "x" * MAX_ARG_BYTES})
    deep: object = 1
    for _ in range(32):
        deep = [deep]
    parse(LEAST | {"controller_arg": deep})
    assert "32 deep" in refused(LEAST | {"controller_arg": [deep]})
    for strange in (b"x", float("nan"), 2**70):
        assert "controller_arg" in refused(LEAST | {"controller_arg": strange})


# -- queries ------------------------------------------------------------------------------------------


def test_queries() -> None:
    assert parse(QUERY) == ControllersQuery()
    assert parse(QUERY | {"action": "upload", "binary": "AGFzbQ=="}) == ControllersQuery(
        action="upload", binary=b"\0asm"
    )
    assert parse(QUERY | {"action": "upload", "binary": b"\0asm", "part": 3, "of": 4}) == ControllersQuery(
        action="upload", binary=b"\0asm", part=3, of=4
    )
    assert parse(QUERY | {"action": "tag", "module_id": MODULE, "tags": ["a"]}) == ControllersQuery(
        action="tag", module_id=MODULE, tags=["a"]
    )


@all_cases(
    ("fields", "message"),
    [
        ({"action": "upload"}, "binary is required"),
        ({"binary": "AAAA"}, "binary is required"),
        ({"action": "upload", "binary": "A"}, "binary"),
        ({"action": "upload", "binary": "AAAA", "part": 1}, "there are 1 parts"),
        ({"action": "upload", "binary": "AAAA", "of": MAX_PARTS + 1}, "of"),
        ({"action": "upload", "binary": "AAAA", "tags": ["x"]}, "otherwise neither"),
        ({"action": "tag", "module_id": MODULE}, "module_id and tags"),
        ({"action": "tag", "tags": ["x"]}, "module_id and tags"),
        ({"action": "tag", "module_id": "jsctrl", "tags": ["x"]}, "module_id"),
        ({"action": "tag", "module_id": MODULE, "tags": []}, "tags"),
        ({"action": "remove"}, "action"),
    ],
)
def test_wrong_queries_are_refused(fields: dict[str, object], message: str) -> None:
    assert message in refused(QUERY | fields)


# -- events -------------------------------------------------------------------------------------------

USAGE = Usage(prompt_tokens=1, completion_tokens=3, sampled_tokens=2, inserted_tokens=1)
EOS = Eos(id="r1", index=0, reason="deadlock", usage=USAGE, timings=Timings(queue_ms=0, total_ms=1))
TAG = ControllerTag(tag="a", module_id=MODULE, updated_at=5.0, updated_by="uid:0", wasm_size=7, compiled_size=9)
EVENTS: list[ServerEvent] = [
    Fork(id="r1", index=1, parent=0),
    Token(id="r1", index=1, text="x", token_id=5, inserted=True),
    Backtrack(id="r1", index=1, tokens=1, text="x"),
    ControllerOutput(id="r1", index=0, logs="hello"),
    ControllerOutput(id="r1", index=0, error="trap", storage=[StorageWrite.of("a", b"\xff", "append", 3)]),
    EOS,
    Controllers(id="r1", tags=[TAG], more=True),
    Controllers(id="r1", module_id=MODULE, wasm_size=5, compiled_size=7, time_ms=1.5),
]


@all_cases("encoding", Encoding)
@all_cases("event", EVENTS)
def test_events_arrive_as_they_were(event: ServerEvent, encoding: Encoding) -> None:
    server, client = ServerCodec("auto", max_frame_bytes=1 << 20), ClientCodec(encoding)
    server.receive_data(client.encode(dict(LEAST)))
    server.next_message()
    client.receive_data(server.encode(event))
    assert client.next_event() == event


def test_a_token_of_the_model_is_not_marked() -> None:
    assert parse_event({"event": "token", "id": "r1", "text": "x", "token_id": 5, "index": 0}) == Token(
        id="r1", text="x", token_id=5, index=0
    )


@given(st.binary(max_size=20))
def test_values_of_variables_survive(value: bytes) -> None:
    assert StorageWrite.of("x", value, "set", None).content == value


def test_all_answers_have_the_encoding_of_the_request_until_the_last_has_ended() -> None:
    server = ServerCodec("auto", max_frame_bytes=1 << 20)
    client = ClientCodec(Encoding.CBOR)
    server.receive_data(client.encode(dict(LEAST)))
    server.next_message()
    server.receive_data(ClientCodec().encode({"event": "cancel", "id": "other"}))
    server.next_message()

    def encoding_of_next(event: ServerEvent) -> Encoding:
        return encoding_of(server.encode(event)[4:])

    failed = Failure(code="E_CONTROLLER_FAILED", message="trap", id="r1", index=1)
    order = [
        Fork(id="r1", index=1, parent=0),
        Fork(id="r1", index=2, parent=0),
        EOS,
        ControllerOutput(id="r1", index=1, logs="x"),
        failed,
        Backtrack(id="r1", index=2, tokens=1, text="x"),
        attrs.evolve(EOS, index=2),
    ]
    assert [encoding_of_next(event) for event in order] == [Encoding.CBOR] * len(order)
    assert encoding_of_next(failed) is Encoding.JSON  # the request has ended
