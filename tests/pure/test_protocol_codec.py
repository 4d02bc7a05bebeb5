"""Codecs: both ends of the framed protocol, the encoding of answers, and the newline protocol."""

import contextlib
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.errors import BadRequest, FrameTooLarge, InvalidCbor, InvalidJson, ProtocolError, TruncatedFrame, UmaError
from uma_trio.protocol.answers import Metrics, SessionInfo, Transcript
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.codec import ClientCodec, NewlineCodec, ServerCodec, server_codec
from uma_trio.protocol.events import Eos, Failure, PrefillProgress, Token
from uma_trio.protocol.framing import frame
from uma_trio.protocol.messages import ClientMessage, ServerEvent
from uma_trio.protocol.payload import Encoding, decode, encode, encoding_of
from uma_trio.protocol.queries import MetricsQuery
from uma_trio.protocol.requests import NEW_MESSAGE, Cancel, Generate
from uma_trio.protocol.usage import Timings, Usage

CAP = 1 << 20
JSON, CBOR = Encoding.JSON, Encoding.CBOR

TOKEN = Token(id="r1", text="hi", token_id=7)
EOS = Eos(
    id="r1",
    reason="stop",
    usage=Usage(prompt_tokens=3, completion_tokens=1),
    timings=Timings(queue_ms=0.5, ttft_ms=2.0, total_ms=3.0, tokens_per_s=None),
    metadata={"k": [1]},
)
FAILURE = Failure(code="E_PROTO_BUSY", message="no", id="r1")
SNAPSHOT = Metrics(snapshot={"tokens_total": 5})
EVENTS = (TOKEN, EOS, FAILURE, SNAPSHOT)


def server(*data: bytes, mode: str = "auto", cap: int = CAP) -> ServerCodec:
    codec = ServerCodec(mode, max_frame_bytes=cap)  # type: ignore[arg-type]
    for piece in data:
        codec.receive_data(piece)
    return codec


def drain(codec: ServerCodec | NewlineCodec) -> list[ClientMessage]:
    found = []
    while (message := codec.next_message()) is not None:
        found.append(message)
    return found


def request(encoding: Encoding, **fields: object) -> bytes:
    return frame(encode({"id": "r1", "prompt": "x"} | fields, encoding))


# -- framed -----------------------------------------------------------------------------------------


@all_cases("encoding", Encoding)
def test_client_and_server_understand_each_other(encoding: Encoding) -> None:
    client, server_end = ClientCodec(encoding), server()
    server_end.receive_data(client.encode({"id": "r1", "prompt": "é\0", "stop": "."}))
    server_end.receive_data(client.encode({"event": "cancel", "id": "r1"}))
    server_end.receive_data(client.encode({"type": "metrics"}))
    assert drain(server_end) == [Generate(id="r1", prompt="é\0", stop="."), Cancel(id="r1"), MetricsQuery()]
    for event in EVENTS:
        client.receive_data(server_end.encode(event))
    assert [client.next_event() for _ in EVENTS] == [*EVENTS]
    assert client.next_event() is None


@given(
    st.lists(st.sampled_from(["generate", "cancel", "metrics"]), max_size=6),
    st.sampled_from(Encoding),
    st.binary(max_size=3),
)
def test_whole_byte_by_byte_and_with_trailing_bytes(kinds: list[str], encoding: Encoding, trailing: bytes) -> None:
    kind_of = {
        "generate": ({"id": "a", "prompt": "é"}, Generate(id="a", prompt="é")),
        "cancel": ({"event": "cancel", "id": "a"}, Cancel(id="a")),
        "metrics": ({"type": "metrics"}, MetricsQuery()),
    }
    data = b"".join(frame(encode(kind_of[kind][0], encoding)) for kind in kinds)
    expected = [kind_of[kind][1] for kind in kinds]
    assert drain(server(data)) == expected

    codec, found = server(), []
    for i in range(len(data)):
        codec.receive_data(data[i : i + 1])
        found += drain(codec)
    assert found == expected
    assert not codec.mid_message

    codec = server(data + trailing)
    assert drain(codec) == expected
    assert codec.mid_message == bool(trailing)


@all_cases("encoding", Encoding)
@all_cases("event", EVENTS)
def test_answers_have_the_encoding_of_the_request(encoding: Encoding, event: ServerEvent) -> None:
    codec = server(request(encoding))
    drain(codec)
    assert encoding_of(codec.encode(event)[4:]) is encoding


@all_cases(("running", "other"), [(JSON, CBOR), (CBOR, JSON)])
def test_other_messages_do_not_change_the_encoding_of_a_stream(running: Encoding, other: Encoding) -> None:
    codec = server(request(running))
    drain(codec)

    def encoding_now(event: ServerEvent) -> Encoding:
        return encoding_of(codec.encode(event)[4:])

    codec.receive_data(frame(encode({"event": "cancel", "id": "elsewhere"}, other)))
    codec.receive_data(frame(encode({"type": "metrics", "keep_alive": True}, other)))
    codec.receive_data(request(other, id="r2"))
    assert len(drain(codec)) == 3
    assert encoding_now(SNAPSHOT) is other
    assert encoding_now(attrs.evolve(FAILURE, id="r2")) is other  # busy
    assert encoding_now(TOKEN) is running
    assert encoding_now(EOS) is running
    codec.receive_data(request(other))  # the same id again, after its end
    drain(codec)
    assert encoding_now(TOKEN) is other


def test_ended_requests_leave_no_state() -> None:
    codec = server()
    for i in range(100):
        codec.receive_data(request(JSON, id=f"r{i}") + frame(encode({"type": "metrics", "id": f"m{i}"}, CBOR)))
        drain(codec)
        codec.encode(attrs.evolve(EOS, id=f"r{i}"))
        codec.encode(Metrics(snapshot={}, id=f"m{i}"))
    assert len(codec._pending) == 0


def test_the_default_encoding_is_json() -> None:
    assert encoding_of(server().encode(Failure(code="E_LIMIT_CONNECTIONS", message="full"))[4:]) is JSON
    assert encoding_of(server(mode="cbor").encode(Failure(code="E_LIMIT_CONNECTIONS", message="full"))[4:]) is CBOR


def test_a_configured_encoding_excludes_the_other() -> None:
    assert drain(server(request(JSON), mode="json")) == drain(server(request(CBOR), mode="cbor"))
    with pytest.raises(InvalidJson, match="--protocol json"):
        drain(server(request(CBOR), mode="json"))
    with pytest.raises(InvalidCbor, match="--protocol cbor"):
        drain(server(request(JSON), mode="cbor"))


@all_cases(
    ("data", "error"),
    [
        (frame(b""), InvalidJson),
        (frame(b"[]"), InvalidJson),
        (frame(b"{}"), BadRequest),
        (frame(b"\xa0"), BadRequest),
        (frame(b"\xa1\x01\x02"), InvalidCbor),
        (b"\xff\xff\xff\xff", FrameTooLarge),
        ((CAP + 1).to_bytes(4, "little"), FrameTooLarge),
        (b"GET / HTTP/1.1\r\n", FrameTooLarge),
        (b"hello\n", FrameTooLarge),
    ],
)
def test_invalid_frames_raise_the_documented_error(data: bytes, error: type[UmaError]) -> None:
    with pytest.raises(error):
        drain(server(data))


def test_the_messages_before_a_bad_frame_are_delivered() -> None:
    codec = server(request(JSON) + frame(b"nonsense"))
    assert codec.next_message() == Generate(id="r1", prompt="x")
    with pytest.raises(InvalidJson):
        codec.next_message()


def test_a_frame_of_exactly_the_cap() -> None:
    prompt = "x" * (1024 - len(encode({"id": "r1", "prompt": ""}, JSON)))
    data = request(JSON, prompt=prompt)
    assert drain(server(data, cap=1024)) == [Generate(id="r1", prompt=prompt)]
    with pytest.raises(FrameTooLarge):
        drain(server(data, cap=1023))


def test_half_closed_inside_a_frame() -> None:
    codec = server(request(JSON)[:-1], b"")
    with pytest.raises(TruncatedFrame):
        codec.next_message()


def test_half_closed_after_a_frame() -> None:
    codec = server(request(JSON), b"")
    assert len(drain(codec)) == 1
    assert not codec.mid_message


@given(st.binary(max_size=400), st.sampled_from(["auto", "json", "cbor", "newline"]))
def test_random_bytes_raise_uma_errors_only(data: bytes, mode: str) -> None:
    codec = server_codec(mode, max_frame_bytes=1024)  # type: ignore[arg-type]
    codec.receive_data(data)
    codec.receive_data(b"")
    with contextlib.suppress(UmaError):
        for _ in range(len(data) + 1):
            if codec.next_message() is None:
                break
        else:
            raise AssertionError("it never came to an end")


@given(st.binary(max_size=200))
def test_random_payloads_raise_uma_errors_only(payload: bytes) -> None:
    with contextlib.suppress(UmaError):
        drain(server(frame(payload)))


def test_a_client_refuses_invalid_payloads() -> None:
    client = ClientCodec()
    client.receive_data(frame(b"[]"))
    with pytest.raises(InvalidJson):
        client.next_event()


# -- newline ----------------------------------------------------------------------------------------


def lines(*data: bytes, cap: int = 64, chat: bool = False) -> NewlineCodec:
    codec = NewlineCodec(max_line_bytes=cap, chat=chat)
    for piece in data:
        codec.receive_data(piece)
    return codec


def prompts(codec: NewlineCodec) -> list[str | None]:
    found = drain(codec)
    assert all(isinstance(message, Generate) for message in found)
    return [message.prompt for message in found if isinstance(message, Generate)]


def test_a_line_is_a_question() -> None:
    [message] = drain(lines(b"Why?\n", chat=True))
    assert message == Generate(id="line-1", messages=[ChatMessage(role="user", content="Why?")])


def test_without_a_chat_template_a_line_is_a_prompt() -> None:
    codec = lines("Erzähl\nmehr\n".encode())
    assert drain(codec) == [Generate(id="line-1", prompt="Erzähl"), Generate(id="line-2", prompt="mehr")]
    assert not codec.mid_message


@all_cases(
    ("data", "found"),
    [
        (b"a\r\nb\n", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\n", ["a\r"]),
        (b"\n\r\n", ["", ""]),
        (b"a", []),
        (b"{}\n", ["{}"]),
    ],
)
def test_ends_of_lines(data: bytes, found: list[str]) -> None:
    assert prompts(lines(data)) == found
    codec, one_by_one = lines(), []
    for i in range(len(data)):
        codec.receive_data(data[i : i + 1])
        one_by_one += prompts(codec)
    assert one_by_one == found


@all_cases(("data", "found"), [(b"a\nb", ["a", "b"]), (b"a\r", ["a"]), (b"a\n", ["a"]), (b"", [])])
def test_the_last_line_needs_no_end_when_the_client_closes(data: bytes, found: list[str]) -> None:
    codec = lines(data, b"")
    assert prompts(codec) == found
    assert not codec.mid_message


@all_cases("data", [b"a\0b\n", b"\0\n", b"\xff\n", b"\xed\xa0\x80\n", b"\xc3\n"])
def test_lines_that_are_not_text_are_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        lines(data).next_message()


@all_cases("encoding", [JSON, CBOR])
def test_a_client_and_a_server_of_different_protocols_find_out_at_once(encoding: Encoding) -> None:
    """The client's frame has no newline at its end, and the server's error line no length at its beginning."""
    codec, client = lines(), ClientCodec(encoding)
    codec.receive_data(client.encode({"id": "r", "prompt": "x"}))
    with pytest.raises(BadRequest, match="--protocol newline") as caught:
        codec.next_message()
    client.receive_data(codec.encode(Failure.of(caught.value)))
    with pytest.raises(ProtocolError, match="--protocol newline"):
        client.next_event()


def test_a_line_as_long_as_allowed() -> None:
    assert prompts(lines(b"x" * 64 + b"\n")) == ["x" * 64]
    assert prompts(lines(b"x" * 64, b"")) == ["x" * 64]
    for data in (b"x" * 65 + b"\n", b"x" * 65):
        with pytest.raises(FrameTooLarge, match="64 bytes"):
            lines(data).next_message()
    with pytest.raises(FrameTooLarge):
        lines(b"x" * 65, b"").next_message()


@given(st.integers(0, 9), st.lists(st.integers(1, 12)))
def test_how_a_line_is_split_does_not_change_why_it_is_refused(at: int, sizes: list[int]) -> None:
    data = b"x" * at + b"\0" + b"x" * 10 + b"\n"
    reasons = []
    for pieces in (sizes, [len(data)]):
        codec, rest = lines(cap=6), data
        with pytest.raises(ProtocolError) as caught:
            for size in [*pieces, len(data)]:
                codec.receive_data(rest[:size])
                rest = rest[size:]
                assert codec.next_message() is None
        reasons.append(type(caught.value))
    assert reasons == [BadRequest if at <= 6 else FrameTooLarge] * 2


def test_mid_message_inside_a_line() -> None:
    codec = lines(b"a")
    assert codec.next_message() is None
    assert codec.mid_message


def test_answers_are_plain_text() -> None:
    codec = lines()
    shown = b"".join(map(codec.encode, [Token(id="r", text="hé", token_id=1), Token(id="r", text="", token_id=2), EOS]))
    assert shown == "hé\n".encode()
    assert codec.encode(FAILURE) == b"error: E_PROTO_BUSY no\n"


def test_an_error_is_one_line() -> None:
    assert lines().encode(Failure(code="E_X", message="two\nlines")).count(b"\n") == 1


def test_which_codec_serves_which_mode() -> None:
    assert isinstance(server_codec("newline", max_frame_bytes=CAP), NewlineCodec)
    for mode in ("auto", "json", "cbor"):
        assert isinstance(server_codec(mode, max_frame_bytes=CAP), ServerCodec)  # type: ignore[arg-type]


# -- several answers to one request -------------------------------------------------------------------

CANCEL_IN_JSON = frame(encode({"event": "cancel", "id": "r1"}, JSON))


@all_cases("last", [attrs.evolve(EOS, index=0), attrs.evolve(FAILURE, index=0)])
def test_all_answers_come_in_the_encoding_of_the_request(last: ServerEvent) -> None:
    """Holds even if the client sends a message in the other encoding in between, until the last answer has ended."""
    codec = server(request(CBOR, n=3), CANCEL_IN_JSON)
    assert len(drain(codec)) == 2
    for event in (attrs.evolve(EOS, index=2), TOKEN, attrs.evolve(EOS, index=1), TOKEN, last):
        assert encoding_of(codec.encode(event)[4:]) is CBOR
    assert encoding_of(codec.encode(TOKEN)[4:]) is JSON


def test_progress_does_not_end_an_answer() -> None:
    codec = server(request(CBOR), CANCEL_IN_JSON)
    assert len(drain(codec)) == 2
    progress = PrefillProgress(id="r1", prefilled_tokens=1, prompt_tokens=2)
    assert [encoding_of(codec.encode(event)[4:]) for event in (progress, TOKEN, EOS)] == [CBOR] * 3


def test_all_parts_of_a_transcript_have_the_encoding_of_the_query() -> None:
    query = {"type": "sessions", "action": "read", "session_id": "s", "id": "r1"}
    codec = server(frame(encode(query, CBOR)), CANCEL_IN_JSON)
    assert len(drain(codec)) == 2
    session = SessionInfo(session_id="s", turns=1, tokens=1, durable=True)
    parts = [Transcript(id="r1", session=session, text="x", more=more) for more in (True, True, False, False)]
    assert [encoding_of(codec.encode(part)[4:]) for part in parts] == [CBOR, CBOR, CBOR, JSON]


@all_cases("end", [EOS, FAILURE])
def test_an_end_without_an_index_ends_all_answers(end: ServerEvent) -> None:
    codec = server(request(CBOR, n=3), CANCEL_IN_JSON)
    assert len(drain(codec)) == 2
    assert [encoding_of(codec.encode(event)[4:]) for event in (end, end)] == [CBOR, JSON]


BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@all_cases(
    ("fields", "warnings"),
    [
        (
            {"prompt": "x", "session": "s"},
            ["the field 'session' is not known and had no effect; did you mean session_id?"],
        ),
        (
            {"prompt": "x", "slo": {"priorty": "normal"}},
            ["the field 'slo.priorty' is not known and had no effect; did you mean slo.priority?"],
        ),
        ({"prompt": "x", "qqq": 1}, ["the field 'qqq' is not known and had no effect"]),
        ({"prompt": "x", "metadata": {"a": 1}, "logit_bias": {"1": 1}, "type": "generate"}, None),
        ({"messages": BEGUN}, [NEW_MESSAGE]),
        ({"messages": BEGUN, "continue_final_message": True}, None),
        ({"messages": BEGUN, "continue_final_message": False}, None),
        ({"messages": BEGUN[:1]}, None),
        ({"type": "sessions", "modle": "m"}, ["the field 'modle' is not known and had no effect; did you mean model?"]),
    ],
)
def test_the_last_event_names_fields_that_are_not_known(fields: dict[str, Any], warnings: list[str] | None) -> None:
    client, server = ClientCodec(), ServerCodec("auto", max_frame_bytes=CAP)
    server.receive_data(client.encode({"id": "r", **fields}))
    assert server.next_message() is not None
    events = [Token(id="r", text="x"), Eos(id="r", reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1), timings=Timings(queue_ms=1, total_ms=1))]  # fmt: skip
    found = [decode(server.encode(event)[4:], Encoding.JSON).get("warnings") for event in events]
    assert found == [None, warnings]


def test_many_unknown_fields_are_counted() -> None:
    server = ServerCodec("auto", max_frame_bytes=1 << 20)
    server.receive_data(ClientCodec().encode({"id": "r", "prompt": "x"} | {f"{n}" * 300: 1 for n in range(100)}))
    assert server.next_message() is not None
    sent = server.encode(Failure(id="r", code="E_X", message="x"))
    warnings = decode(sent[4:], Encoding.JSON)["warnings"]
    assert (len(warnings), warnings[-1]) == (21, "80 more of them are not known")
    assert all(len(each) < 200 for each in warnings)
