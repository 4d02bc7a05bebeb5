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
    """The first segments of a JPEG file, up to its size, and its end."""
    exif = b""
    if orientation is not None:
        block = {"<": b"II*\0", ">": b"MM\0*"}[order]
        block += struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0)
        exif = b"\xff\xe1" + struct.pack(">H", 8 + len(block)) + b"Exif\0\0" + block
    size = struct.pack(">HBHHB", 8, 8, height, width, 0)
    return b"\xff\xd8\xff\xe0" + struct.pack(">H", 6) + b"JFIF" + exif + b"\xff\xc0" + size + b"\xff\xd9"


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


def scans(n: int, side: int = 4096) -> bytes:
    """A progressive JPEG of one colour whose ``n`` scans each go over all blocks, for some bytes each."""
    head = b"\xff\xd8" + b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64)
    head += b"\xff\xc2" + struct.pack(">HBHHBBBB", 11, 8, side, side, 1, 1, 0x11, 0)
    # one code each: a DC difference of 0; an end of bands for 2**14 blocks and more, in AC
    for table, symbol in ((0x00, 0), (0x10, 0xE0)):
        head += b"\xff\xc4" + struct.pack(">HB", 20, table) + bytes([1] + [0] * 15) + bytes([symbol])
    n_blocks = (side // 8) ** 2
    dc = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0x00, 0, 0, 0) + bytes(n_blocks // 8)
    bits = "".join("0" + "1" * 14 for _ in range(-(-n_blocks // (2**15 - 1))))
    runs = (
        int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big").replace(b"\xff", b"\xff\0")
    )
    ac = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0x00, 1, 63, 0) + runs
    return head + dc + ac * n + b"\xff\xd9"


def bombs() -> dict[str, bytes]:
    """Files that are small and claim, or become, something large; and some that are cut."""
    small = png(drawn(1))
    return {
        "nothing": b"",
        "no picture": b"hello",
        "a PNG of 40,000 x 40,000": small[:16] + struct.pack(">II", 40_000, 40_000) + small[24:],
        "a flat PNG of 6,000 x 6,000": png(np.zeros((6000, 6000, 3), np.uint8)),
        "a PNG of 16,384 x 2,441 without its pixels": small[:16] + struct.pack(">II", 16384, 2441) + small[24:],
        "a cut PNG": small[: len(small) // 2],
        "a cut JPEG": jpeg_header(640, 480),
        "a JPEG that says it is turned": jpeg_header(640, 480, orientation=6),
        "a JPEG of 16,384 x 2,441 without its pixels": jpeg_header(16384, 2441),
        "a JPEG with an endless header": b"\xff\xd8" + b"\xff" * 100_000,
        "a JPEG with 100,000 scans": scans(100_000),
        "a GIF with 10,000 frames": gif([7] * 10_000),
        "a GIF of 16,384 x 2,441": gif([7])[:6] + struct.pack("<HH", 16384, 2441) + gif([7])[10:],
        "a BMP of 16,384 x 2,441": b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, 16384, 2441, 1, 24, *[0] * 6),
        "sound": b"RIFF\0\0\0\0WAVE" + bytes(100),
    }
