"""What a file says before it is decoded: the kind of a picture or of sound, its size, and how a picture is turned.

A decoder takes as much memory as a picture has pixels, and a file of some kB can have billions. So the size is read and
bounded before anything is decoded, and so is the length of sound. Pure.

Source: PNG 1.2, JFIF and EXIF 2.3 (orientation), GIF89a, the BMP headers of Windows.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import attrs

from uma_trio.encoder.refusals import Refused
from uma_trio.encoder.sound_file import flac_seconds, mp3_seconds, wav_seconds

Kind = Literal["PNG", "JPEG", "GIF", "BMP", "WAV", "MP3", "FLAC"]

MAX_FILE_BYTES: Final = 32 << 20
MAX_PIXELS: Final = 40_000_000
"""Pixels of a picture: 120 MB when it is decoded."""
MAX_SIDE: Final = 16384
"""Width and height of a picture in pixels."""

TAKEN: Final = "a picture is PNG, JPEG, GIF or BMP, and sound is WAV, MP3 or FLAC"

MAX_SEGMENTS: Final = 1000
"""Segments of a JPEG file before its size."""
MAX_SCANS: Final = 100
"""Scans of a JPEG file: each goes over all pixels, and may take some bytes only.  Encoders make about ten."""
MAX_FILL_BYTES: Final = 1 << 16
"""No byte behind this one fills the room between two segments."""

_JPEG_SIZES: Final = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_JPEG_WITHOUT_LENGTH: Final = {0x01, *range(0xD0, 0xD9)}
_JPEG_END: Final = b"\xff\xd9"
"""Pixels do not contain it."""
_ORIENTATION: Final = 0x0112


@attrs.frozen
class MediaFile:
    """What a file claims to be."""

    kind: Kind
    width: int = 0
    """Pixels before it is turned; 0 for sound."""
    height: int = 0
    orientation: int = 1
    """EXIF's number of the way it is turned, from 1 to 8."""
    seconds: float = 0.0
    """Length of sound: what its headers and its size say, which may be too much."""

    @property
    def is_sound(self) -> bool:
        return self.kind in ("WAV", "MP3", "FLAC")


def inspect(data: bytes) -> MediaFile:
    """Look at a file without decoding it.

    Raises:
        Refused: the data is not such a file, ends too early, or is too large.
    """
    if len(data) > MAX_FILE_BYTES:
        raise Refused(f"the file has {len(data)} bytes, and {MAX_FILE_BYTES} are allowed: send a smaller one")
    try:
        file = _inspect(data)
    except (struct.error, IndexError):
        raise Refused("the file ends in the middle of its header: send the whole file") from None
    if file.is_sound:
        return file
    if file.kind == "JPEG" and (n_scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise Refused(
            f"the JPEG file has {n_scans} scans; it may have {MAX_SCANS}: send one that another program wrote"
        )
    if not 1 <= file.width <= MAX_SIDE or not 1 <= file.height <= MAX_SIDE or file.width * file.height > MAX_PIXELS:
        raise Refused(
            f"the picture has {file.width} x {file.height} pixels; it may have {MAX_SIDE} on a side and {MAX_PIXELS} "
            "in all: send a smaller one"
        )
    return file


def _inspect(data: bytes) -> MediaFile:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return MediaFile("PNG", *struct.unpack_from(">II", data, 16))
    if data.startswith((b"GIF87a", b"GIF89a")):
        return MediaFile("GIF", *struct.unpack_from("<HH", data, 6))
    if data.startswith(b"\xff\xd8"):
        return _inspect_jpeg(data)
    if data.startswith(b"BM"):
        return _inspect_bmp(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return MediaFile("WAV", seconds=wav_seconds(data))
    if data.startswith(b"fLaC"):
        return MediaFile("FLAC", seconds=flac_seconds(data))
    if data.startswith(b"ID3") or (len(data) >= 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return MediaFile("MP3", seconds=mp3_seconds(data))
    raise Refused(f"the file is of another kind, or damaged: {TAKEN}")


def _inspect_bmp(data: bytes) -> MediaFile:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        return MediaFile("BMP", *struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<ii", data, 18)
    return MediaFile("BMP", width, abs(height))


def _inspect_jpeg(data: bytes) -> MediaFile:
    at, orientation = 2, 1
    for _ in range(MAX_SEGMENTS):
        if data[at] != 0xFF:
            break
        while data[at + 1] == 0xFF and at < MAX_FILL_BYTES:
            at += 1
        marker = data[at + 1]
        if marker in _JPEG_WITHOUT_LENGTH:
            at += 2
            continue
        if marker in (0, 0xD9, 0xDA, 0xFF):
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            if data.find(_JPEG_END, at) < 0:
                raise Refused("the JPEG file ends in the middle of its pixels: send the whole file")
            return MediaFile("JPEG", width, height, orientation)
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _orientation(data[at + 10 : at + 2 + length])
        at += 2 + max(2, length)
    raise Refused("the JPEG file says no size before its pixels: it is damaged, send another one")


def _orientation(exif: bytes) -> int:
    """The orientation of an EXIF block; 1, which means upright, if it has none or is damaged."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == _ORIENTATION and kind == 3 and 1 <= value <= 8:
                return int(value)
    except struct.error:
        pass
    return 1
