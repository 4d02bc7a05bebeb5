"""Pictures for tests: random pixels, and PNG files without a library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of ``[height, width, 3]``."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def drawn(seed: int, height: int = 50, width: int = 70) -> npt.NDArray[np.uint8]:
    """Random pixels, ``[height, width, 3]``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def jpeg_header(width: int, height: int, *, orientation: int | None = None, order: str = "<") -> bytes:
    """The first segments of a JPEG file, up to its size."""
    exif = b""
    if orientation is not None:
        block = {"<": b"II*\0", ">": b"MM\0*"}[order]
        block += struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0)
        exif = b"\xff\xe1" + struct.pack(">H", 8 + len(block)) + b"Exif\0\0" + block
    size = struct.pack(">HBHHB", 8, 8, height, width, 0)
    return b"\xff\xd8\xff\xe0" + struct.pack(">H", 6) + b"JFIF" + exif + b"\xff\xc0" + size


def gif(shades: Sequence[int], side: int = 2) -> bytes:
    """An animated GIF with a frame of each shade of grey, ``side`` pixels wide and high."""
    palette = bytes(shade for n in range(256) for shade in (n, n, n))
    file = b"GIF89a" + struct.pack("<HHBBB", side, side, 0xF7, 0, 0) + palette
    for shade in shades:
        # 9-bit codes: a clear code before each pixel, so that no table is needed
        codes = [code for _ in range(side * side) for code in (256, shade)] + [257]
        bits = sum(code << 9 * n for n, code in enumerate(codes))
        data = bits.to_bytes(-(-9 * len(codes) // 8), "little")
        control = b"\x21\xf9\x04" + struct.pack("<BHBB", 0, 10, 0, 0)
        frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x08" + bytes([len(data)]) + data + b"\0"
        file += control + frame
    return file + b"\x3b"


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG file whose EXIF block says that it is upright, with another orientation there."""
    entry = b"\x01\x12\x00\x03\x00\x00\x00\x01\x00"
    assert entry + b"\1" in jpeg
    return jpeg.replace(entry + b"\1", entry + bytes([orientation]), 1)
