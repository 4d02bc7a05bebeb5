"""Frames: whole, byte by byte, with trailing bytes, and with wrong lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.errors import FrameTooLarge, TruncatedFrame
from uma_trio.protocol.framing import HEADER_BYTES, FrameReader, frame

CAP = 1 << 20


def reader(*data: bytes, cap: int = CAP) -> FrameReader:
    frames = FrameReader(max_frame_bytes=cap)
    for piece in data:
        frames.receive_data(piece)
    return frames


def drain(frames: FrameReader) -> list[bytes]:
    found = []
    while (payload := frames.next_payload()) is not None:
        found.append(payload)
    return found


def test_the_bytes_of_a_frame() -> None:
    assert frame(b"{}") == b"\x02\x00\x00\x00{}"
    assert frame(b"x" * 258)[:4] == b"\x02\x01\x00\x00"


@given(st.lists(st.binary(max_size=300), max_size=5), st.binary(max_size=3))
def test_whole_byte_by_byte_and_with_trailing_bytes(payloads: list[bytes], trailing: bytes) -> None:
    data = b"".join(map(frame, payloads))
    assert drain(reader(data)) == payloads

    frames, found = reader(), []
    for i in range(len(data)):
        frames.receive_data(data[i : i + 1])
        found += drain(frames)
    assert found == payloads
    assert not frames.mid_frame

    frames = reader(data + trailing)
    assert drain(frames) == payloads
    assert frames.mid_frame == bool(trailing)


@given(st.binary(max_size=2000), st.lists(st.integers(1, 50), max_size=50))
def test_any_split_gives_the_same_payload(payload: bytes, cuts: list[int]) -> None:
    data, frames, found = frame(payload) * 2, reader(), []
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        if piece:
            frames.receive_data(piece)
            found += drain(frames)
    assert found == [payload] * 2


def test_a_frame_of_exactly_the_limit_is_accepted() -> None:
    assert drain(reader(frame(b"x" * CAP))) == [b"x" * CAP]


@all_cases("length", [CAP + 1, 1 << 24, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF])
def test_a_frame_above_the_limit_is_refused_by_its_header(length: int) -> None:
    header = length.to_bytes(4, "little")
    frames = reader(header[:3])
    assert frames.next_payload() is None
    frames.receive_data(header[3:])
    for _ in range(2):  # the error repeats, so that no caller continues by accident
        with pytest.raises(FrameTooLarge, match=f"{length} bytes; the limit is {CAP}"):
            frames.next_payload()


def test_a_good_frame_before_a_bad_one_is_delivered() -> None:
    frames = reader(frame(b"{}") + b"\xff\xff\xff\xff")
    assert frames.next_payload() == b"{}"
    with pytest.raises(FrameTooLarge):
        frames.next_payload()


def test_an_empty_frame_is_a_payload() -> None:
    assert drain(reader(b"\0" * 8)) == [b"", b""]


@all_cases("data", [b"\0", b"\x05\0\0", b"\x05\0\0\0", b"\x05\0\0\0abcd"])
def test_closed_inside_a_frame(data: bytes) -> None:
    frames = reader(data)
    assert frames.next_payload() is None
    assert frames.mid_frame
    frames.receive_data(b"")
    with pytest.raises(TruncatedFrame, match=f"{len(data)} bytes into"):
        frames.next_payload()


def test_closing_between_frames_is_not_an_error() -> None:
    assert drain(reader(frame(b"{}"), b"")) == [b"{}"]
    assert drain(reader(b"")) == []


def test_memory_grows_with_received_bytes_not_with_announced_ones() -> None:
    frames = reader((CAP - 1).to_bytes(4, "little") + b"x")
    assert frames.next_payload() is None
    assert len(frames._buffer) == HEADER_BYTES + 1


def test_a_returned_frame_is_freed() -> None:
    frames = reader(frame(b"x" * CAP))
    drain(frames)
    assert len(frames._buffer) == 0
