"""Payloads: JSON and CBOR are equivalent, and hostile bytes raise the documented error only."""

import contextlib
import json
import struct
from collections.abc import Callable

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.steps import counted_steps
from uma_trio.errors import InvalidCbor, InvalidJson
from uma_trio.protocol.payload import MAX_CBOR_DEPTH, MAX_PAIRS, Encoding, decode, encode, encoding_of

JSON, CBOR = Encoding.JSON, Encoding.CBOR

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
objects = st.dictionaries(texts, plain, max_size=4)


@given(objects)
def test_objects_round_trip_in_both_encodings(fields: dict[str, object]) -> None:
    for encoding in Encoding:
        payload = encode(fields, encoding)
        assert decode(payload, encoding) == fields
        assert encoding_of(payload) is encoding


@given(objects)
def test_other_libraries_read_and_write_the_same(fields: dict[str, object]) -> None:
    assert json.loads(encode(fields, JSON)) == fields
    assert cbor2.loads(encode(fields, CBOR)) == fields
    assert decode(json.dumps(fields).encode(), JSON) == fields
    assert decode(json.dumps(fields, ensure_ascii=False, indent=1).encode(), JSON) == fields


def test_the_first_byte_selects_the_encoding() -> None:
    for byte in range(256):
        expected = CBOR if 0xA0 <= byte <= 0xBF else JSON
        assert encoding_of(bytes([byte])) is expected
    assert encoding_of(b"") is JSON


def test_nul_and_astral_characters_survive() -> None:
    fields = {"text": "a\0b\U0001f600é\u2028"}
    for encoding in Encoding:
        assert decode(encode(fields, encoding), encoding) == fields


@all_cases(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b" ", id="blank"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
        pytest.param("{}".encode("utf-16"), id="UTF-16"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'"a"', id="a string"),
        pytest.param(b"1", id="a number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{", id="not closed"),
        pytest.param(b'{"a":1}}', id="closed twice"),
        pytest.param(b'{"a":1} {}', id="two objects"),
        pytest.param(b'{"a":1}\0', id="a trailing NUL"),
        pytest.param(b'{"a":1,}', id="a trailing comma"),
        pytest.param(b"{'a':1}", id="single quotes"),
        pytest.param(b"{1:1}", id="a key that is no string"),
        pytest.param(b'{"a":NaN}', id="NaN"),
        pytest.param(b'{"a":Infinity}', id="Infinity"),
        pytest.param(b'{"a":-Infinity}', id="-Infinity"),
        pytest.param(b'{"a":1e999999999}', id="huge exponent"),
        pytest.param(b'{"a":-1e400}', id="too small a number"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", id="huge integer"),
        pytest.param(b'{"a":' + b"9" * 1_000_000 + b"}", id="megabyte of digits"),
        pytest.param(b'{"a":01}', id="leading zero"),
        pytest.param(b'{"a":+1}', id="plus sign"),
        pytest.param(b'{"a":0x1}', id="hexadecimal"),
        pytest.param(b'{"a":.5}', id="no digit before the point"),
        pytest.param(b'{"a":"\xff"}', id="invalid UTF-8"),
        pytest.param(b'{"\xff":1}', id="invalid UTF-8 in a key"),
        pytest.param(b'{"a":[{"b":"\xfe"}]}', id="invalid UTF-8 far inside"),
        pytest.param(b'{"a":"\xc0\x80"}', id="overlong NUL"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', id="surrogate in UTF-8"),
        pytest.param(b'{"a":"\xf4\x90\x80\x80"}', id="beyond U+10FFFF"),
        pytest.param(b'{"a":"\xe2\x82', id="ends inside a character"),
        pytest.param(b'{"a":"\\ud800"}', id="lone high surrogate"),
        pytest.param(b'{"a":"\\ud800x"}', id="high surrogate before a letter"),
        pytest.param(b'{"a":"\\udc00"}', id="lone low surrogate"),
        pytest.param(b'{"a":"\\udc00\\ud800"}', id="surrogates the wrong way round"),
        pytest.param(b'{"a":"\0"}', id="raw NUL in a string"),
        pytest.param(b'{"a":"\n"}', id="raw newline in a string"),
        pytest.param(b'{"a":"\\x41"}', id="no such escape"),
        pytest.param(b'{"a":"\\u12"}', id="short escape"),
        pytest.param(b"[" * 100_000, id="nested, open"),
        pytest.param(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="nested lists"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="nested objects"),
        pytest.param(b"\xd9\xd9\xf7\xa0", id="self-described CBOR"),
    ],
)
def test_hostile_json(payload: bytes) -> None:
    assert encoding_of(payload) is JSON
    with pytest.raises(InvalidJson) as caught:
        decode(payload, JSON)
    assert 0 < len(str(caught.value)) < 300


def test_the_last_duplicate_key_in_json_counts() -> None:
    assert decode(b'{"a":1,"a":2}', JSON) == {"a": 2}


def text(value: str) -> bytes:
    return cbor2.dumps(value)


def with_value(raw: bytes) -> bytes:
    """Return a map whose only value is ``raw``."""
    return b"\xa1" + text("a") + raw


def with_bias(raw: bytes) -> bytes:
    return b"\xa1" + text("logit_bias") + raw


@all_cases(
    ("raw", "value"),
    [
        (b"\xa2\x05\x01" + text("6") + b"\xf9\x3c\x00", {"5": 1, "6": 1.0}),
        (b"\xbf\x19\x01\x00\x38\x63\xff", {"256": -100}),
        (b"\xb8\x01\x1b" + b"\xff" * 8 + b"\x00", {str(2**64 - 1): 0}),
        (b"\xa1\x20\x00", {"-1": 0}),
        (b"\xa0", {}),
        (b"\xbf\xff", {}),
        (
            b"\xb9\x10\x00" + b"".join(b"\x19" + struct.pack(">H", n) + b"\0" for n in range(4096)),
            {str(n): 0 for n in range(4096)},
        ),
        (b"\x81\x01", [1]),
        (b"\x01", 1),
    ],
)
def test_integer_token_ids_become_text(raw: bytes, value: object) -> None:
    assert decode(with_bias(raw), CBOR) == {"logit_bias": value}
    as_second = b"\xbf" + text("a") + b"\xa0" + text("logit_bias") + raw + text("z") + b"\xf6\xff"
    assert decode(as_second, CBOR) == {"a": {}, "logit_bias": value, "z": None}


@all_cases(
    "payload",
    [
        pytest.param(with_value(b"\xc0" + text("2020-01-01T00:00:00Z")), id="date as text"),
        pytest.param(with_value(b"\xc1\x00"), id="date as number"),
        pytest.param(with_value(b"\xc2\x49" + b"\xff" * 9), id="big number"),
        pytest.param(with_value(b"\xc2\x5a\x00\x01\x00\x00" + b"\xff" * 65536), id="very big number"),
        pytest.param(with_value(b"\xc4\x82\x1b" + b"\xff" * 8 + b"\x01"), id="decimal with huge exponent"),
        pytest.param(with_value(b"\xc5\x82\x1b" + b"\x7f" * 8 + b"\x01"), id="big float"),
        pytest.param(with_value(b"\xd8\x19\x00"), id="string reference"),
        pytest.param(with_value(b"\xd8\x1c\x81\xd8\x1d\x00"), id="list that holds itself"),
        pytest.param(with_value(b"\xd8\x1d\x00"), id="shared reference"),
        pytest.param(with_value(b"\xd8\x1e\x82\x01\x00"), id="fraction over zero"),
        pytest.param(with_value(b"\xd8\x23" + text("(a+)+$")), id="regular expression"),
        pytest.param(with_value(b"\xd8\x24" + text("a")), id="MIME"),
        pytest.param(with_value(b"\xd8\x25\x50" + b"\0" * 16), id="UUID"),
        pytest.param(with_value(b"\xd9\x01\x00\x80"), id="string references"),
        pytest.param(with_value(b"\xd9\x01\x02\x81\x01"), id="set"),
        pytest.param(with_value(b"\xd9\x01\x04\x44\0\0\0\0"), id="IP address"),
        pytest.param(with_value(b"\xd9\xa7\xf8\x00"), id="complex"),
        pytest.param(with_value(b"\xd9\xd9\xf7\x00"), id="self-description inside"),
        pytest.param(with_value(b"\xd9\x03\xe7\x00"), id="unknown tag"),
        pytest.param(with_value(b"\xdb" + b"\xff" * 8 + b"\x00"), id="greatest tag"),
        pytest.param(b"\xa1\xc1\x00\x00", id="tag as key"),
        pytest.param(b"\xbf" * 60, id="indefinite maps, open"),
        pytest.param(with_value(b"\x9f"), id="indefinite list, open"),
        pytest.param(with_value(b"\x9f" * 100_000), id="indefinite lists, nested"),
        pytest.param(with_value(b"\x7f\x61a"), id="indefinite text, open"),
        pytest.param(with_value(b"\x7f\x41a\xff"), id="bytes inside indefinite text"),
        pytest.param(with_value(b"\x9b" + b"\xff" * 8), id="list of 2**64"),
        pytest.param(with_value(b"\x9b" + struct.pack(">Q", 1 << 31)), id="list of 2**31"),
        pytest.param(with_value(b"\x7b" + b"\xff" * 8), id="text of 2**64"),
        pytest.param(with_value(b"\x7b" + struct.pack(">Q", 1 << 40)), id="text of 2**40"),
        pytest.param(with_value(b"\x5b" + struct.pack(">Q", 1 << 62)), id="bytes of 2**62"),
        pytest.param(b"\xbb" + b"\xff" * 8, id="map of 2**64"),
        pytest.param(b"\xbb" + struct.pack(">Q", 1 << 40), id="map of 2**40"),
        pytest.param(b"\xa1", id="cut off at the key"),
        *(pytest.param(b"\xb8\xb9\xba\xbb"[n : n + 1] + b"\0" * n, id=f"cut off in the length, {n}") for n in range(4)),
        pytest.param(b"\xbc", id="map of a reserved length"),
        pytest.param(with_bias(b"\xbf"), id="indefinite biases, open"),
        pytest.param(with_bias(b"\xb8"), id="biases cut off in the length"),
        pytest.param(with_bias(b"\xbc"), id="biases of a reserved length"),
        pytest.param(with_bias(b"\xa1\x01"), id="biases cut off at the value"),
        pytest.param(with_bias(b"\xa2\x01\x00\x01\x00"), id="the same token twice"),
        pytest.param(with_bias(b"\xa2\x01\x00" + text("1") + b"\x00"), id="the same token as number and as text"),
        pytest.param(with_bias(b"\xa1\xf9\x3c\x00\x00"), id="float as token"),
        pytest.param(with_bias(b"\xa1\xf5\x00"), id="bool as token"),
        pytest.param(with_bias(b"\xa1\xf6\x00"), id="null as token"),
        pytest.param(with_bias(b"\xa1\x41a\x00"), id="bytes as token"),
        pytest.param(with_bias(b"\xa1\x82\x01\x02\x00"), id="list as token"),
        pytest.param(with_bias(b"\xa1\xc2\x41\x01\x00"), id="big number as token"),
        pytest.param(with_bias(b"\xa1\x01\xa1\x01\x01"), id="numbers as keys inside a bias"),
        pytest.param(b"\xa1" + text("metadata") + with_bias(b"\xa1\x01\x02"), id="biases inside something else"),
        pytest.param(
            with_bias(b"\xb9\x10\x01" + b"".join(b"\x19" + struct.pack(">H", n) + b"\0" for n in range(4097))),
            id="too many biases",
        ),
        pytest.param(b"\xbf" + b"".join(text(f"{n:04}") + b"\0" for n in range(4097)) + b"\xff", id="too many fields"),
        pytest.param(b"\xa1" + text("a"), id="cut off at the value"),
        pytest.param(b"\xa0\x00", id="a trailing byte"),
        pytest.param(b"\xa0\xa0", id="two maps"),
        pytest.param(b"\xa1\x01\x02", id="number as key"),
        pytest.param(b"\xa1\x41a\x02", id="bytes as key"),
        pytest.param(b"\xa1\xf6\x02", id="null as key"),
        pytest.param(b"\xa1\x80\x02", id="list as key"),
        pytest.param(b"\xa1\xa0\x02", id="map as key"),
        pytest.param(with_value(b"\xa1\x01\x02"), id="number as key inside"),
        pytest.param(with_value(b"\x81\xa1\x41a\x02"), id="bytes as key inside"),
        pytest.param(b"\xa2" + text("a") + b"\x01" + text("a") + b"\x02", id="the same key twice"),
        pytest.param(with_value(b"\xf7"), id="undefined"),
        pytest.param(with_value(b"\x82\x01\x81\xf7"), id="undefined inside"),
        pytest.param(with_value(b"\xe0"), id="simple value"),
        pytest.param(with_value(b"\xf8\xff"), id="greatest simple value"),
        pytest.param(with_value(b"\xf8\x14"), id="false in two bytes"),
        pytest.param(with_value(b"\xff"), id="break without a beginning"),
        pytest.param(with_value(b"\x1c"), id="reserved length"),
        pytest.param(with_value(b"\x61\xff"), id="invalid UTF-8"),
        pytest.param(b"\xa1\x61\xff\x00", id="invalid UTF-8 in a key"),
        pytest.param(with_value(b"\x63\xed\xa0\x80"), id="surrogate"),
        pytest.param(with_value(b"\x7f\x61\xc3\x61\xa9\xff"), id="character split over chunks"),
        pytest.param(with_value(b"\x81" * 100_000 + b"\x00"), id="nested lists"),
        pytest.param((b"\xa1" + text("a")) * 100_000 + b"\x00", id="nested maps"),
        pytest.param(with_value(b"\x81" * MAX_CBOR_DEPTH + b"\x00"), id="nested just too deeply"),
    ],
)
def test_hostile_cbor(payload: bytes) -> None:
    assert encoding_of(payload) is CBOR
    with pytest.raises(InvalidCbor) as caught:
        decode(payload, CBOR)
    assert 0 < len(str(caught.value)) < 300


@all_cases(
    ("raw", "value"),
    [
        (b"\x9f\x01\x02\xff", [1, 2]),
        (b"\x7f\x61a\x61b\xff", "ab"),
        (b"\xbf\x61a\x01\xff", {"a": 1}),
        (b"\xf9\x3c\x00", 1.0),
        (b"\x3b" + b"\xff" * 8, -(2**64)),
        (b"\x81" * 60 + b"\x00", None),
        (b"\x43abc", b"abc"),
    ],
)
def test_unusual_but_well_formed_cbor(raw: bytes, value: object) -> None:
    found = decode(with_value(raw), CBOR)["a"]
    assert found == value or value is None


@given(st.binary(max_size=200))
def test_random_bytes_give_an_object_or_an_uma_error(payload: bytes) -> None:
    for encoding in Encoding:
        error = InvalidJson if encoding is JSON else InvalidCbor
        with contextlib.suppress(error):
            assert type(decode(payload, encoding)) is dict


@given(objects, st.data())
def test_damaged_payloads_give_an_object_or_an_uma_error(fields: dict[str, object], data: st.DataObject) -> None:
    for encoding in Encoding:
        payload = bytearray(encode(fields, encoding))
        for _ in range(data.draw(st.integers(1, 3))):
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = decode(bytes(payload), encoding)
        except (InvalidJson, InvalidCbor):
            continue
        assert type(found) is dict


NASTY = [
    b"\xa1",
    b"\xbf",
    b"\x9f",
    b"\x81",
    b"\x7f",
    b"\xff",
    b"\x61a",
    b"\xd8\x1d",
    b"\xd8\x1c",
    b"\x1b",
    b"\x9b",
    b"\xf7",
    b"\0",
]


@given(st.lists(st.sampled_from(NASTY), max_size=30))
def test_cbor_of_nasty_pieces(pieces: list[bytes]) -> None:
    with contextlib.suppress(InvalidCbor):
        decode(with_value(b"".join(pieces)), CBOR)


def many(header: bytes, n: int) -> bytes:
    """Return the header of a list or a map of ``n`` items, in four bytes."""
    return header + struct.pack(">I", n)


LARGE = 1 << 16
FEW = 200
STEPS_FOR: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "CBOR numbers": (FEW, lambda n: with_value(many(b"\x9a", n) + b"\x00" * n)),
    "CBOR empty texts": (FEW, lambda n: with_value(many(b"\x9a", n) + b"\x60" * n)),
    "CBOR empty chunks": (FEW, lambda n: with_value(b"\x7f" + b"\x60" * n + b"\xff")),
    "CBOR fields": (
        15 * MAX_PAIRS,
        lambda n: many(b"\xba", n // 6) + b"".join(b"\x64%04x\x00" % (i % 65536) for i in range(n // 6)),
    ),
    "CBOR biases": (
        15 * MAX_PAIRS,
        lambda n: with_bias(
            many(b"\xba", n // 9) + b"".join(b"\x1a%b\x00" % struct.pack(">I", i << 10) for i in range(n // 9))
        ),
    ),
    "CBOR empty lists": (2 * LARGE, lambda n: with_value(many(b"\x9a", n) + b"\x80" * n)),
    "CBOR empty maps": (2 * LARGE, lambda n: with_value(many(b"\x9a", n) + b"\xa0" * n)),
    "CBOR lists of one": (2 * LARGE, lambda n: with_value(many(b"\x9a", n // 2) + b"\x81\x00" * (n // 2))),
    "JSON numbers": (FEW, lambda n: b'{"a":[' + b"0," * (n // 2) + b"0]}"),
    "JSON empty lists": (FEW, lambda n: b'{"a":[' + b"[]," * (n // 3) + b"0]}"),
    "JSON keys": (FEW, lambda n: b"{" + b",".join(b'"%06x":0' % i for i in range(n // 12)) + b"}"),
}
"""Payloads of about ``n`` bytes that are much work for their size, and how many lines of Python may run for one."""


@all_cases("name", STEPS_FOR)
def test_a_large_frame_is_decoded_by_few_lines_of_python(name: str) -> None:
    """The event loop decodes frames, so every stream waits that long; C code takes milliseconds for a megabyte."""
    most, make = STEPS_FOR[name]
    payload = make(LARGE)
    with counted_steps() as steps, contextlib.suppress(InvalidCbor):
        decode(payload, encoding_of(payload))
    assert steps.n <= most
