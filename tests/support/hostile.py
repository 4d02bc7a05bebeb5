"""Input that no client should send, with the error that answers it; for tests of the daemon with any engine."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import cbor2

from uma_trio.protocol.framing import frame

CAP = 1 << 16
"""``max_frame_bytes`` of a server that is tested with this input."""

TOO_LARGE, JSON, CBOR = "E_PROTO_FRAME_TOO_LARGE", "E_PROTO_INVALID_JSON", "E_PROTO_INVALID_CBOR"
BAD, TRUNCATED, TOO_MANY = "E_PROTO_BAD_REQUEST", "E_PROTO_TRUNCATED", "E_PROTO_TOO_MANY_VALUES"


@attrs.frozen
class Hostile:
    """Bytes from a client.  The server answers with one error event, then closes the connection."""

    name: str
    data: bytes
    code: str
    """Code of the error."""
    id: str | None = None
    """Request id in the error."""

    def __str__(self) -> str:
        return self.name


def _nested(depth: int) -> bytes:
    return b'{"id":"a","prompt":"x","metadata":' + b'{"k":' * depth + b"1" + b"}" * depth + b"}"


FRAMES = (
    Hostile("length zero", frame(b""), JSON),
    Hostile("length of all ones", b"\xff\xff\xff\xff", TOO_LARGE),
    Hostile("length of all ones and more", b"\xff" * 5000, TOO_LARGE),
    Hostile("one byte over the cap", (CAP + 1).to_bytes(4, "little"), TOO_LARGE),
    Hostile("an HTTP request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", TOO_LARGE),
    Hostile("length in the other byte order", len(b'{"id":"a"}').to_bytes(4, "big") + b'{"id":"a"}', TOO_LARGE),
    Hostile("not UTF-8", frame(b'{"id":"a","prompt":"\xff\xfe"}'), JSON),
    Hostile("overlong UTF-8", frame(b'{"id":"a","prompt":"\xc0\xaf"}'), JSON),
    Hostile("a surrogate in UTF-8", frame(b'{"id":"a","prompt":"\xed\xa0\x80"}'), JSON),
    Hostile("a lone surrogate, escaped", frame(rb'{"id":"a","prompt":"\ud800"}'), JSON),
    Hostile("a lone low surrogate, escaped", frame(rb'{"id":"a","prompt":"x\udc00y"}'), JSON),
    Hostile("a bare NUL", frame(b'{"id":"a","prompt":"x\0y"}'), JSON),
    Hostile("nothing but NUL", frame(b"\0" * 100), JSON),
    Hostile("NaN", frame(b'{"id":"a","prompt":"x","temperature":NaN}'), JSON),
    Hostile("Infinity", frame(b'{"id":"a","prompt":"x","temperature":Infinity}'), JSON),
    Hostile("an exponent too large", frame(b'{"id":"a","prompt":"x","temperature":1e999}'), JSON),
    Hostile("a byte order mark", frame(b'\xef\xbb\xbf{"id":"a","prompt":"x"}'), JSON),
    Hostile("UTF-16", frame('{"id":"a","prompt":"x"}'.encode("utf-16")), JSON),
    Hostile("a list", frame(b"[]"), JSON),
    Hostile("a text", frame(b'"prompt"'), JSON),
    Hostile("null", frame(b"null"), JSON),
    Hostile("cut off", frame(b'{"id":"a","prompt":'), JSON),
    Hostile("two objects", frame(b'{"id":"a","prompt":"x"}{}'), JSON),
    Hostile("single quotes", frame(b"{'id':'a'}"), JSON),
    Hostile("ten thousand lists", frame(b'{"id":"a","prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), JSON),
    Hostile("lists that never close", frame(b'{"id":' + b"[" * 60_000), JSON),
    Hostile("nested metadata", frame(_nested(40)), BAD, "a"),
    Hostile("deeply nested metadata", frame(_nested(9_000)), JSON),
    Hostile("CBOR cut off", frame(cbor2.dumps({"id": "a", "prompt": "x"})[:-1]), CBOR),
    Hostile("CBOR and more", frame(cbor2.dumps({"id": "a", "prompt": "x"}) + b"\0"), CBOR),
    Hostile("CBOR that claims 2^62 entries", frame(b"\xbb\x3f\xff\xff\xff\xff\xff\xff\xff"), CBOR),
    Hostile("a CBOR text of 2^62 bytes", frame(b"\xa1\x62id\x7b\x3f\xff\xff\xff\xff\xff\xff\xff"), CBOR),
    Hostile("a CBOR list of 2^62", frame(b"\xa1\x62id\x9b\x3f\xff\xff\xff\xff\xff\xff\xff"), CBOR),
    Hostile("CBOR that is not UTF-8", frame(b"\xa1\x62id\x62\xff\xfe"), CBOR),
    Hostile("CBOR with a key twice", frame(b"\xa2\x62id\x61a\x62id\x61b"), CBOR),
    Hostile("CBOR with keys of numbers", frame(cbor2.dumps({1: "a", "prompt": "x"})), CBOR),
    Hostile("a CBOR date", frame(b"\xa1\x62id\xc0\x741970-01-01T00:00:00Z"), CBOR),
    Hostile("a CBOR big number", frame(cbor2.dumps({"id": "a", "prompt": "x", "seed": 1 << 80})), CBOR),
    Hostile("CBOR that holds itself", frame(b"\xa1\x62id\xd8\x1c\x81\xd8\x1d\x00"), CBOR),
    Hostile("deep CBOR", frame(b"\xa1\x62id" + b"\x81" * 50_000 + b"\x00"), TOO_MANY),
    Hostile("endless CBOR", frame(b"\xa1\x62id" + b"\x9f" * 50_000), TOO_MANY),
    Hostile("a reserved CBOR byte", frame(b"\xa1\x62id\x1c"), CBOR),
)  # fmt: skip


def _fields(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "prompt": "x"} | fields


REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature below zero", _fields(temperature=-1)),
    ("temperature of 10^30", _fields(temperature=1e30)),
    ("temperature as text", _fields(temperature="hot")),
    ("top_p of zero", _fields(top_p=0)),
    ("top_p of two", _fields(top_p=2)),
    ("top_k below zero", _fields(top_k=-1)),
    ("top_k of 2^31", _fields(top_k=1 << 31)),
    ("seed below zero", _fields(seed=-1)),
    ("seed of 2^63", _fields(seed=1 << 63)),
    ("seed of 2^64 - 1", _fields(seed=(1 << 64) - 1)),
    ("seed with a fraction", _fields(seed=1.5)),
    ("max_tokens of zero", _fields(max_tokens=0)),
    ("max_tokens below zero", _fields(max_tokens=-5)),
    ("max_tokens of 2^31", _fields(max_tokens=1 << 31)),
    ("max_tokens as text", _fields(max_tokens="5")),
    ("max_tokens true", _fields(max_tokens=True)),
    ("an empty stop", _fields(stop="")),
    ("an empty stop among others", _fields(stop=["x", ""])),
    ("ten thousand stops", _fields(stop=["x"] * 10_000)),
    ("a stop of 10,000 characters", _fields(stop=["x" * 10_000])),
    ("a stop that is a number", _fields(stop=[1])),
    ("stop null", _fields(stop=None)),
    ("stream as text", _fields(stream="yes")),
    ("metadata as a list", _fields(metadata=[1])),
    ("metadata of 20 kB", _fields(metadata={"k": "x" * 20_000})),
    ("slo of nothing known", _fields(slo={"priority": "royal"})),
    ("slo below zero", _fields(slo={"target_itl_ms": -1})),
    ("slo as text", _fields(slo="fast")),
    ("prompt null", _fields(prompt=None)),
    ("prompt as a number", _fields(prompt=5)),
    ("prompt as a list of text", _fields(prompt=["a", "b"])),
    ("prompt and messages", _fields(messages=[{"role": "user", "content": "x"}])),
    ("no messages", {"id": "a", "messages": []}),
    ("too many messages", {"id": "a", "messages": [{"role": "user", "content": ""}] * 1025}),
    ("messages of an unknown role", {"id": "a", "messages": [{"role": "oracle", "content": "x"}]}),
    ("a message without content", {"id": "a", "messages": [{"role": "user"}]}),
    ("messages as text", {"id": "a", "messages": "hello"}),
    ("neither prompt nor messages", {"id": "a"}),
    ("an unknown event", {"id": "a", "event": "eos"}),
    ("an unknown type", {"id": "a", "type": "shutdown"}),
)  # fmt: skip

NAMELESS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing", {}),
    ("no id", {"prompt": "x"}),
    ("an empty id", {"id": "", "prompt": "x"}),
    ("an id of 257 characters", {"id": "a" * 257, "prompt": "x"}),
    ("an id of two lines", {"id": "a\nb", "prompt": "x"}),
    ("an id that clears a terminal", {"id": "\x1b[2J", "prompt": "x"}),
    ("an id that is a number", {"id": 7, "prompt": "x"}),
    ("an id that is null", {"id": None, "prompt": "x"}),
    ("a cancel of nothing", {"event": "cancel"}),
    ("an event that is a list", {"event": ["cancel"]}),
    ("metrics with a strange id", {"type": "metrics", "id": 5}),
)  # fmt: skip


def _in_both(cases: tuple[tuple[str, dict[str, Any]], ...], id: str | None) -> list[Hostile]:
    return [
        Hostile(f"{name} ({kind})", frame(data), BAD, id)
        for name, fields in cases
        for kind, data in (("JSON", json.dumps(fields).encode()), ("CBOR", cbor2.dumps(fields)))
    ]


ALL: tuple[Hostile, ...] = (
    *FRAMES,
    *_in_both(REQUESTS, "a"),
    *_in_both(NAMELESS, None),
    Hostile("temperature NaN (CBOR)", frame(cbor2.dumps(_fields(temperature=math.nan))), BAD, "a"),
    Hostile("temperature Infinity (CBOR)", frame(cbor2.dumps(_fields(temperature=math.inf))), BAD, "a"),
    Hostile("top_p NaN (CBOR)", frame(cbor2.dumps(_fields(top_p=math.nan))), BAD, "a"),
    Hostile("metadata NaN (CBOR)", frame(cbor2.dumps(_fields(metadata={"k": math.nan}))), BAD, "a"),
    Hostile("metadata of bytes (CBOR)", frame(cbor2.dumps(_fields(metadata={"k": b"\xff"}))), BAD, "a"),
    Hostile("prompt of bytes (CBOR)", frame(cbor2.dumps(_fields(prompt=b"x"))), BAD, "a"),
    Hostile("a whole number of 400 digits", frame(b'{"id":"a","prompt":"x","seed":' + b"9" * 400 + b"}"), BAD, "a"),
    Hostile("a whole number of 30 digits", frame(b'{"id":"a","prompt":"x","seed":' + b"9" * 30 + b"}"), BAD, "a"),
)

HARMLESS: tuple[tuple[str, bytes], ...] = (
    ("exactly the cap", frame(b'{"id":"a","prompt":"x","max_tokens":2}'.ljust(CAP))),
    ("an escaped NUL", frame(rb'{"id":"a","prompt":"x\u0000y","max_tokens":2}')),
    ("a key twice: the last one counts", frame(b'{"id":"a","prompt":"x","max_tokens":"bad","max_tokens":2}')),
    ("a surrogate pair, escaped", frame(rb'{"id":"a","prompt":"\ud83e\udd8a","max_tokens":2}')),
    ("an unknown field", frame(b'{"id":"a","prompt":"x","max_tokens":2,"best_of":10}')),
    ("top_k above the vocabulary", frame(b'{"id":"a","prompt":"x","max_tokens":2,"top_k":2147483647,"temperature":1}')),
    ("the hottest temperature", frame(b'{"id":"a","prompt":"x","max_tokens":2,"temperature":100}')),
    ("a temperature of nearly nothing", frame(b'{"id":"a","prompt":"x","max_tokens":2,"temperature":1e-300}')),
    ("a top_p of nearly nothing", frame(b'{"id":"a","prompt":"x","max_tokens":2,"temperature":1,"top_p":1e-300}')),
    ("the largest seed", frame(b'{"id":"a","prompt":"x","max_tokens":2,"temperature":1,"seed":9223372036854775807}')),
    ("sixteen stops", frame(b'{"id":"a","prompt":"x","max_tokens":2,"stop":' + json.dumps(["\x01" * 256] * 16).encode() + b"}")),
    ("a CBOR map without a length", frame(b"\xbf\x62id\x61a\x66prompt\x61x\x6amax_tokens\x02\xff")),
)  # fmt: skip
"""Unusual input that is allowed: name and bytes.  Each request gets two tokens."""
