"""Records in a file that only grows: each with a CRC, so a reader knows how much of a file is intact.

A record is HEAD and its payload.  HEAD has a mark, the size and CRC-32 of the payload, and a CRC-32 of itself.  A crash
leaves half a record at the end of a file, and nowhere else.  The mark also identifies the version of the format.

This module is pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

from uma_trio.daemon.store.encoding import DamagedFile

HEAD: Final = struct.Struct("<4sIII")
"""Mark, bytes of the payload, CRC-32 of the payload, CRC-32 of the preceding 12 bytes."""


def record(mark: bytes, payload: bytes) -> bytes:
    """The record that holds ``payload``.

    Args:
        mark: four bytes that neither text nor tokens contain: UTF-8 has no byte 0xFF.
    """
    head = HEAD.pack(mark, len(payload), zlib.crc32(payload), 0)[:-4]
    return b"".join([head, zlib.crc32(head).to_bytes(4, "little"), payload])


def intact_records(mark: bytes, data: bytes | bytearray) -> Iterator[tuple[memoryview, int]]:
    """Yield the payload and the end of each intact record, up to the first damaged one.

    Raises:
        DamagedFile: intact records follow the damaged one.
    """
    view, at = memoryview(data), 0
    while (head := _head(mark, view, at)) is not None:
        size, code = head
        start = at + HEAD.size
        payload = view[start : start + size]
        if zlib.crc32(payload) != code:
            break
        at = start + size
        yield payload, at
    after = at
    while (after := data.find(mark, after + 1)) >= 0:
        if _head(mark, view, after) is not None:
            raise DamagedFile(f"no record begins at byte {at}, although one begins at byte {after}")


def _head(mark: bytes, view: memoryview, at: int) -> tuple[int, int] | None:
    """Return size and CRC of the payload of the record at ``at``; ``None`` if there is no complete record."""
    head = view[at : at + HEAD.size]
    if len(head) < HEAD.size:
        return None
    own_mark, size, code, own = HEAD.unpack(head)
    if own_mark != mark or own != zlib.crc32(head[:-4]) or size > len(view) - at - HEAD.size:
        return None
    return size, code
