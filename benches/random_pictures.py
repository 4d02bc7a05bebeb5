"""Pictures to send."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np

SQUARES: Final = 16
"""Squares of one colour on a side of a picture."""


def random_picture(seed: int, side: int = 448) -> bytes:
    """A PNG file of coloured squares, ``side`` pixels wide and high."""
    colours = np.random.default_rng(seed).integers(0, 256, (SQUARES, SQUARES, 3), np.uint8)
    at = np.arange(side) * SQUARES // side
    lines = np.zeros((side, 1 + 3 * side), np.uint8)  # each begins with the number of its filter: none
    lines[:, 1:] = colours[at][:, at].reshape(side, 3 * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def _chunk(named: tuple[bytes, bytes]) -> bytes:
    name, data = named
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
