"""What the first bytes of a file say: the kind of a picture or of sound, the size of a picture, and how it is turned.

A decoder takes as much memory as a picture has pixels, and a file of some kB can have billions. So the size is read and
bounded before anything is decoded, and so is the length of sound. Pure.

Source: PNG 1.2, JFIF and EXIF 2.3 (orientation), GIF89a, the BMP headers of Windows; RIFF WAVE, FLAC's STREAMINFO, the
frame headers of MPEG layer III, Xing's tag in the first frame.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import attrs

Kind = Literal["PNG", "JPEG", "GIF", "BMP", "WAV", "MP3", "FLAC"]

MAX_FILE_BYTES: Final = 32 << 20
MAX_PIXELS: Final = 40_000_000
"""Pixels of a picture: 120 MB when it is decoded."""
MAX_SECONDS: Final = 1800
"""Length of sound: 115 MB when it is decoded at 16 kHz."""
MAX_SIDE: Final = 16384
"""Width and height of a picture in pixels."""

TAKEN: Final = "a picture is PNG, JPEG, GIF or BMP, and sound is WAV, MP3 or FLAC"

MAX_SEGMENTS: Final = 1000
"""Segments of a JPEG file before its size."""
MAX_SCANS: Final = 100
"""Scans of a JPEG file: each goes over all pixels, and may take some bytes only.  Encoders make about ten."""
MAX_FILL_BYTES: Final = 1 << 16
"""No byte behind this one fills the room between two segments."""

WAV_KINDS: Final = (1, 3, 6, 7, 0xFFFE)
"""PCM, floating point, A-law, mu-law; and one that says more elsewhere."""
MPEG1_KBIT: Final = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MPEG2_KBIT: Final = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Bit rates of layer III by their numbers, from 1 on."""
TAG_BYTES: Final = 64
"""Beginning of a frame that may have Xing's tag."""
LEAST_FRAME_BYTES: Final = 24
"""Size of the smallest frame of layer III: 8 kbit/s at 24 kHz."""

_JPEG_SIZES: Final = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_JPEG_WITHOUT_LENGTH: Final = {0x01, *range(0xD0, 0xD9)}
_ORIENTATION: Final = 0x0112


class Refused(Exception):
    """The file is no picture or sound that can be encoded; says why, and what can."""


class TooManyRows(Exception):
    """What a file becomes in a prompt has more tokens than a request may have."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"{n_tokens} tokens")
        self.n_tokens = n_tokens


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
    """Length of sound: what its header and its size say."""

    @property
    def is_sound(self) -> bool:
        return self.kind in ("WAV", "MP3", "FLAC")


def inspect(data: bytes) -> MediaFile:
    """Look at a file without decoding it.

    Raises:
        Refused: it is no such file, it ends before its size, or it is too large.
    """
    if len(data) > MAX_FILE_BYTES:
        raise Refused(f"the file has {len(data)} bytes, and {MAX_FILE_BYTES} are allowed: send a smaller one")
    try:
        found = _inspect(data)
    except (struct.error, IndexError):
        raise Refused("the file ends in the middle of its header: send the whole file") from None
    if found.is_sound:
        if found.seconds > MAX_SECONDS:
            raise Refused(f"the sound lasts {found.seconds:.0f} s; it may last {MAX_SECONDS} s: send a part of it")
        return found
    if found.kind == "JPEG" and (n_scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise Refused(
            f"the JPEG file has {n_scans} scans; it may have {MAX_SCANS}: send one that another program wrote"
        )
    if not 1 <= found.width <= MAX_SIDE or not 1 <= found.height <= MAX_SIDE or found.width * found.height > MAX_PIXELS:
        raise Refused(
            f"the picture has {found.width} x {found.height} pixels; it may have {MAX_SIDE} on a side and {MAX_PIXELS} "
            "in all: send a smaller one"
        )
    return found


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
        return MediaFile("WAV", seconds=_wav_seconds(data))
    if data.startswith(b"fLaC"):
        return MediaFile("FLAC", seconds=_flac_seconds(data))
    if data.startswith(b"ID3") or (len(data) >= 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return MediaFile("MP3", seconds=_mp3_seconds(data))
    raise Refused(f"the file is of another kind, or damaged: {TAKEN}")


def _wav_seconds(data: bytes) -> float:
    """The length of the whole file, as if all of it were samples: its sizes may say anything."""
    at = 12
    for _ in range(MAX_SEGMENTS):
        name, n_bytes = struct.unpack_from("<4sI", data, at)
        if name == b"fmt ":
            kind, _, rate, _, frame_bytes = struct.unpack_from("<HHIIH", data, at + 8)
            if kind not in WAV_KINDS or not rate or not frame_bytes:
                raise Refused("the WAV file has compressed samples, or none: send PCM, or MP3 or FLAC")
            return float(len(data) / (rate * frame_bytes))
        at += 8 + n_bytes + n_bytes % 2
    raise Refused("the WAV file does not say what its samples are: it is damaged, send another one")


def _flac_seconds(data: bytes) -> float:
    (packed,) = struct.unpack_from(">Q", data, 18)  # in STREAMINFO: rate, channels, bits, samples
    rate, samples = packed >> 44, packed & (1 << 36) - 1
    if not rate or not samples:
        raise Refused("the FLAC file does not say how long it is: send one that another program wrote")
    return float(samples / rate)


def _mp3_seconds(data: bytes) -> float:
    """As if all frames had the bit rate of the first one."""
    at = 0
    if data.startswith(b"ID3"):
        a, b, c, d = struct.unpack_from("4B", data, 6)
        at = 10 + (a << 21 | b << 14 | c << 7 | d)
    for start in range(at, min(at + MAX_FILL_BYTES, len(data) - 2)):
        sync, second, third = data[start : start + 3]
        version, layer, bits = second >> 3 & 3, second >> 1 & 3, third >> 4
        if sync == 0xFF and second >= 0xE0 and version != 1 and layer == 1 and 0 < bits < 15:
            _check_frames(data, start)
            kbit = (MPEG1_KBIT if version == 3 else MPEG2_KBIT)[bits - 1]
            return float(8 * len(data) / (1000 * kbit))
    raise Refused("the MP3 file has no frame: it is damaged, send another one")


def _check_frames(data: bytes, start: int) -> None:
    """Refuse a first frame that says how many there are, and says too many: a decoder takes memory for all of them."""
    frame = data[start : start + TAG_BYTES]
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at >= 0 and frame[at + 7] & 1:
        (count,) = struct.unpack_from(">I", frame, at + 8)
        if count * LEAST_FRAME_BYTES > len(data):
            raise Refused(f"the MP3 file has no room for {count} frames: it is damaged, send another one")


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
