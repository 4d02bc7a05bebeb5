"""JSON of the gateway that clients read by lines."""

from __future__ import annotations

import json

from uma_trio.gateway.answer import PLACE, PreparedEvent, json_line, sse

ENDS = [chr(each) for each in range(0x11000) if not 0xD800 <= each < 0xE000 and len(f"a{chr(each)}b".splitlines()) > 1]


def test_no_text_ends_a_line_of_a_stream() -> None:
    assert {"\n", "\r", "\x85", "\u2028"} <= {*ENDS}
    for end in ENDS:
        data = {"text": f"a{end}b{end}"}
        assert [json.loads(line) for line in json_line(data).decode().splitlines()] == [data]
        name, line, after = sse(data, "token").decode().splitlines()
        assert (name, json.loads(line.removeprefix("data: ")), after) == ("event: token", data, "")


def test_a_prepared_event_is_the_event():
    prepared = PreparedEvent({"model": PLACE, "delta": {"text": PLACE}, "usage": None}, "delta")
    for text in (*ENDS, "é", '"', PLACE, ""):
        assert prepared.of(text) == sse({"model": PLACE, "delta": {"text": text}, "usage": None}, "delta")
