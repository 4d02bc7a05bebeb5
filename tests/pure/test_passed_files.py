"""Files that come as descriptors: where messages have them, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.errors import BadRequest, UmaError
from uma_trio.protocol import passed_files
from uma_trio.protocol.codec import ClientCodec, ServerCodec
from uma_trio.protocol.passed_files import LEAST_BYTES, MAX_BYTES, put_in, take_out
from uma_trio.protocol.payload import Encoding
from uma_trio.protocol.requests import Generate

LARGE, LARGER = b"a" * LEAST_BYTES, b"b" * (LEAST_BYTES + 1)


def image(data: Any) -> dict[str, Any]:
    return {"type": "image", "data": data}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"id": "r", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [*parts]}]}


@all_cases("encoding", Encoding)
def test_a_message_has_its_files_again_in_any_encoding(encoding: Encoding) -> None:
    text = {"type": "text", "text": "?"}
    whole = chat(image(LARGE), text, image(b"small"), image(LARGER), image("YmFzZTY0"))
    smaller, files = take_out(whole)
    assert files == [LARGE, LARGER]
    data, [first, second] = ClientCodec(encoding).encode(smaller), files
    assert len(data) < LEAST_BYTES
    server = ServerCodec("auto", max_frame_bytes=1 << 20)
    server.files += [first, second, b"of the next message"]
    server.receive_data(data)
    found = server.next_message()
    assert isinstance(found, Generate)
    assert found.messages is not None
    parts = found.messages[1].content
    assert isinstance(parts, list)
    assert [part.data for part in parts] == [LARGE, None, b"small", LARGER, b"base64"]
    assert server.files == [b"of the next message"]
    assert not server._warnings, "descriptor is no unknown field"


def test_what_is_too_much_stays_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_BYTES // LEAST_BYTES
    assert len(take_out(chat(*[image(LARGE)] * 70))[1]) == 64
    monkeypatch.setattr(passed_files, "MAX_PICTURES", 2 * most)
    smaller, files = take_out(chat(*[image(LARGE)] * (most + 1)))
    assert (len(files), smaller["messages"][1]["content"][-1]) == (most, image(LARGE))


@all_cases(
    ("parts", "reason"),
    [
        ([{"type": "image", "descriptor": True}] * 2, r"messages\[1\].content\[1\] names a descriptor, and none came"),
        ([{"type": "image", "descriptor": True, "data": "YQ=="}], "data or a descriptor, not both"),
    ],
)
def test_what_cannot_be_put_in_names_its_request(parts: list[dict[str, Any]], reason: str) -> None:
    server = ServerCodec("auto", max_frame_bytes=1 << 20)
    server.files.append(b"x")
    server.receive_data(ClientCodec().encode(chat(*parts)))
    with pytest.raises(BadRequest, match=reason) as found:
        server.next_message()
    assert found.value.request_id == "r"


_json = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "content", "descriptor", "data", "type"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "id"]), _json))
def test_any_message_is_taken_or_refused(fields: dict[str, Any]) -> None:
    files = [b"1", b"2"]
    with contextlib.suppress(UmaError):
        put_in(fields, files)
    assert files == [b"1", b"2"][2 - len(files) :]
    take_out(fields)
