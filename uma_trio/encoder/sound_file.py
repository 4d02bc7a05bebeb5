"""How long a file of sound is at most, before it is decoded, and how long it may be.  Pure.

Source: RIFF WAVE, FLAC's STREAMINFO (RFC 9639), the frame headers of MPEG layer III, Xing's tag in the first frame.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from uma_trio.encoder.refusals import Refused

MIN_SECONDS: Final = 0.1
"""Length of sound.  libmtmd ends the process when it gets a sample or two."""
MAX_SECONDS: Final = 1800
"""Length of sound: 115 MB when it is decoded at 16 kHz."""
MAX_CHUNKS: Final = 1000
"""Chunks of a WAV file before the chunk with the format of its samples."""
WAV_KINDS: Final = (1, 3, 6, 7, 0xFFFE)
"""PCM, floating point, A-law, mu-law; and one that says more elsewhere."""
MAX_SAMPLES: Final = MAX_SECONDS * 8 * 48_000
"""Samples of a FLAC file in all channels: some bytes can be thousands of them, and each takes time."""
MPEG1_KBIT: Final = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MPEG2_KBIT: Final = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Bit rates of layer III by their numbers, from 1 on."""
MAX_FILL_BYTES: Final = 1 << 16
"""No byte behind this one, counted from the end of the tag, begins the first frame."""
TAG_BYTES: Final = 64
"""Beginning of a frame that may have Xing's tag."""


def checked_length(seconds: float) -> float:
    """``seconds``; refuses sound that is too short or too long."""
    if seconds > MAX_SECONDS:
        raise Refused(f"the sound lasts {seconds:.0f} s; it may last {MAX_SECONDS} s: send a part of it")
    if seconds < MIN_SECONDS:
        raise Refused(f"the sound lasts {seconds:.3f} s; it has to last {MIN_SECONDS} s: send a longer one")
    return seconds


def wav_seconds(data: bytes) -> float:
    """The length of the whole file, as if all of it were samples: its sizes may say anything."""
    at = 12
    for _ in range(MAX_CHUNKS):
        name, n_bytes = struct.unpack_from("<4sI", data, at)
        if name == b"fmt ":
            kind, _, rate, _, frame_bytes = struct.unpack_from("<HHIIH", data, at + 8)
            if kind not in WAV_KINDS or not rate or not frame_bytes:
                raise Refused("the WAV file has compressed samples, or none: send PCM, or MP3 or FLAC")
            return checked_length(len(data) / (rate * frame_bytes))
        at += 8 + n_bytes + n_bytes % 2
    raise Refused("the WAV file does not say what its samples are: it is damaged, send another one")


def flac_seconds(data: bytes) -> float:
    """What the header says: a decoder stops there."""
    (packed,) = struct.unpack_from(">Q", data, 18)  # in STREAMINFO: rate, channels, bits, samples
    rate, n_channels, samples = packed >> 44, (packed >> 41 & 7) + 1, packed & (1 << 36) - 1
    if not rate or not samples:
        raise Refused("the FLAC file does not say how long it is: send one that another program wrote")
    seconds = checked_length(samples / rate)
    if samples * n_channels > MAX_SAMPLES:
        raise Refused(
            f"the FLAC file has {samples} samples in {n_channels} channels; it may have {MAX_SAMPLES} in all: send a part "
            "of it, or fewer channels"
        )
    return seconds


def _frames() -> dict[bytes, tuple[int, float]]:
    """Size and seconds of a frame, by the first three bytes of its header."""
    frames = {}
    for second, kbits, factor, n_samples, rates in (
        (0xFA, MPEG1_KBIT, 144, 1152, (44_100, 48_000, 32_000)),
        (0xF2, MPEG2_KBIT, 72, 576, (22_050, 24_000, 16_000)),
        (0xE2, MPEG2_KBIT, 72, 576, (11_025, 12_000, 8_000)),
    ):
        for bits, kbit in enumerate(kbits, 1):
            for number, rate in enumerate(rates):
                for others in range(8):  # no checksum, padding, private
                    key = bytes([0xFF, second | others & 1, bits << 4 | number << 2 | others >> 1])
                    frames[key] = factor * 1000 * kbit // rate + (others >> 2), n_samples / rate
    return frames


_FRAMES: Final = _frames()
_SYNC: Final = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]", re.DOTALL)


def mp3_seconds(data: bytes) -> float:
    """Return the length of all frames, or of the announced ones if these are longer: a decoder takes memory for them."""
    at, latest = _after_tag(data), _after_tag(data) + MAX_FILL_BYTES
    total = announced = 0.0
    while (header := _SYNC.search(data, at, len(data) if total else latest)) is not None:
        at = header.start()
        n_bytes, seconds = _FRAMES.get(header[0], (1, 0.0))
        if not total:
            announced = _announced(data[at : at + TAG_BYTES]) * seconds
        total += seconds
        at += n_bytes
    if not total:
        raise Refused("the MP3 file has no frame: it is damaged, send another one")
    return checked_length(max(total, announced))


def _after_tag(data: bytes) -> int:
    """Where the first frame begins at the earliest."""
    if not data.startswith(b"ID3"):
        return 0
    a, b, c, d = struct.unpack_from("4B", data, 6)
    return int(10 + (a << 21 | b << 14 | c << 7 | d))


def _announced(frame: bytes) -> int:
    """How many frames a file has, as its first one says; 0 if that says nothing."""
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at < 0 or not frame[at + 7] & 1:
        return 0
    return int(struct.unpack_from(">I", frame, at + 8)[0])
