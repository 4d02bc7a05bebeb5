"""Cuts a byte stream into length-prefixed payloads: ``uint32_le length | payload``.

Source: docs/PROTOCOL.md, "Frames".
"""

from __future__ import annotations

import struct
from typing import Final

from uma_trio.errors import FrameTooLarge, TruncatedFrame

HEADER_BYTES: Final = 4
_header: Final = struct.Struct("<I")


class FrameReader:
    """Buffers received bytes until a payload is complete.

    Does not look into payloads.  Holds at most one frame and one read beyond it.
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes
        self._closed = False

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has arrived in part."""
        return bool(self._buffer)

    @property
    def next_bytes(self) -> int:
        """Size of the next frame, if all of it has arrived; otherwise 0."""
        end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "little")
        return end if HEADER_BYTES <= end <= len(self._buffer) else 0

    @property
    def arriving_bytes(self) -> int:
        """Size of the frame that arrives, as its header announces it; 0 before the header is complete."""
        return int.from_bytes(self._buffer[:HEADER_BYTES], "little") if len(self._buffer) >= HEADER_BYTES else 0

    @property
    def header(self) -> bytes:
        """The first bytes of the frame that arrives."""
        return bytes(self._buffer[:HEADER_BYTES])

    def receive_data(self, data: bytes) -> None:
        """Buffer ``data``; ``b""`` means that the peer closed its sending side."""
        self._buffer += data
        self._closed |= not data

    def next_payload(self) -> bytes | None:
        """Remove and return the next complete payload; ``None`` if more data is needed.

        Raises:
            FrameTooLarge: the header announces more than ``max_frame_bytes``; raised before the payload arrives.
            TruncatedFrame: the peer closed inside a frame.
        """
        if len(self._buffer) >= HEADER_BYTES:
            (length,) = _header.unpack_from(self._buffer)
            if length > self._max_frame_bytes:
                raise FrameTooLarge(f"a frame of {length} bytes; the limit is {self._max_frame_bytes}")
            end = HEADER_BYTES + length
            if len(self._buffer) >= end:
                payload = bytes(self._buffer[HEADER_BYTES:end])
                del self._buffer[:end]
                return payload
        if self._closed and self._buffer:
            raise TruncatedFrame(f"the connection ended {len(self._buffer)} bytes into a frame")
        return None


def frame(payload: bytes) -> bytes:
    """Prefix ``payload`` with its length; the inverse of ``FrameReader.next_payload``."""
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload
