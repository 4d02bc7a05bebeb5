"""Cuts a byte stream into payloads: ``uint32_le length | payload``.

Source: docs/PROTOCOL.md, "Frames".
"""

from __future__ import annotations

from typing import Final

from uma_trio.errors import FrameTooLarge, TruncatedFrame

HEADER_BYTES: Final = 4


class FrameReader:
    """Stores what arrives and tells when a payload is complete.

    Knows lengths and nothing of what is inside.  Holds at most one frame and one read beyond it.
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes
        self._closed = False

    @property
    def mid_frame(self) -> bool:
        """Whether part of a frame has arrived and the rest has not."""
        return bool(self._buffer)

    def receive_data(self, data: bytes) -> None:
        """Store ``data``; ``b""`` says that the peer has closed its side."""
        self._buffer += data
        self._closed |= not data

    def next_payload(self) -> bytes | None:
        """Take the next whole payload; ``None`` when it takes more data to complete one.

        Raises:
            FrameTooLarge: as soon as the length is known and before its payload is waited for.
            TruncatedFrame: the peer closed inside a frame.
        """
        if len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if length > self._max_frame_bytes:
                raise FrameTooLarge(f"a frame of {length} bytes; at most {self._max_frame_bytes} are taken")
            end = HEADER_BYTES + length
            if len(self._buffer) >= end:
                payload = bytes(self._buffer[HEADER_BYTES:end])
                del self._buffer[:end]
                return payload
        if self._closed and self._buffer:
            raise TruncatedFrame(f"the connection ended {len(self._buffer)} bytes into a frame")
        return None


def frame(payload: bytes) -> bytes:
    """The bytes of one frame; the inverse of ``FrameReader.next_payload``."""
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload
