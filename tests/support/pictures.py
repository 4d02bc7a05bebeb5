"""Pictures for tests: random pixels, and PNG files without a library."""

from __future__ import annotations

import struct
import zlib

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
