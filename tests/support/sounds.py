"""Sound for tests: WAV, FLAC and MP3 files without a library, intact ones and such that claim to be something else.

Source: RIFF WAVE; RFC 9639 (FLAC); the frames of MPEG layer III.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

RATE = 16_000
PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE


def notes(seed: int, seconds: float = 1.0, *, rate: int = RATE) -> npt.NDArray[np.int16]:
    """Samples of some notes."""
    times = np.arange(round(seconds * rate)) / rate
    heights = np.random.default_rng(seed).uniform(100, 2000, 4)
    return np.array(sum(np.sin(2 * np.pi * height * times) for height in heights) * 4000, np.int16)


def wav(seed: int, seconds: float = 1.0, *, rate: int = RATE, kind: int = PCM) -> bytes:
    """A WAV file with some notes, 16 bits and one channel.

    Args:
        kind: what its samples claim to be.
    """
    return riff(notes(seed, seconds, rate=rate).astype("<i2").tobytes(), rate=rate, kind=kind)


def riff(data: bytes, *, rate: int = RATE, kind: int = PCM, bits: int = 16, channels: int = 1) -> bytes:
    """A WAV file of samples."""
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, min(rate * frame, 0xFFFFFFFF), frame, bits)
    if kind == EXTENSIBLE:
        form += struct.pack("<HHIH", 22, bits, 0, PCM) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"".join(name + struct.pack("<I", len(body)) + body for name, body in ((b"fmt ", form), (b"data", data)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


# -- FLAC -------------------------------------------------------------------------------------------

BLOCK = 1024
"""Samples of a frame."""


def flac_header(seconds: float, rate: int = RATE, *, channels: int = 1, bits: int = 16) -> bytes:
    """The beginning of a FLAC file that claims to be so long."""
    packed = rate << 44 | (channels - 1) << 41 | (bits - 1) << 36 | round(seconds * rate)
    return (
        b"fLaC"
        + bytes([0x80, 0, 0, 34])
        + struct.pack(">HH", 16, 0xFFFF)
        + bytes(6)
        + struct.pack(">Q", packed)
        + bytes(16)
    )


def flac(seed: int, seconds: float = 1.0) -> bytes:
    """A FLAC file with some notes.  Its frames have subframes of all kinds but those with linear prediction."""
    samples = notes(seed, seconds).astype(int)
    frames = [
        flac_frame(number, len(block), subframe(block, order))
        for number, start in enumerate(range(0, len(samples), BLOCK))
        for block, order in [(samples[start : start + BLOCK], number % 6 - 1)]
    ]
    return flac_header(len(samples) / RATE) + b"".join(frames)


def subframe(block: npt.NDArray[np.int_], order: int) -> str:
    """The bits of samples: predicted with a polynomial of ``order`` 0 to 4, or verbatim if that is -1."""
    if order < 0:
        return "0" + "000001" + "0" + "".join(map(_two_complement, block))
    residuals = np.diff(block, order)
    folded = np.where(residuals < 0, -2 * residuals - 1, 2 * residuals)
    rice = max(0, int(np.log2(folded.mean() + 1)))
    coded = "".join(f"{'0' * (n >> rice)}1{n & (1 << rice) - 1:0{rice}b}"[: (n >> rice) + 1 + rice] for n in folded)
    return f"0{8 + order:06b}0{''.join(map(_two_complement, block[:order]))}00{0:04b}{min(rice, 14):04b}{coded}"


def constant(value: int) -> str:
    """The bits of a subframe whose samples are all the same, however many they are."""
    return "0" + "000000" + "0" + _two_complement(value)


def flac_frame(number: int, n_samples: int, subframes: str, *, channels: int = 1) -> bytes:
    """A frame with a subframe for each channel."""
    head = bytes([0xFF, 0xF8, 0x70, (channels - 1) << 4]) + chr(number).encode() + struct.pack(">H", n_samples - 1)
    head += _crc(head, 8, 0x07)
    frame = head + _bytes_of(subframes)
    return frame + _crc(frame, 16, 0x8005)


def _two_complement(sample: int) -> str:
    return f"{sample & 0xFFFF:016b}"


def _bytes_of(bits: str) -> bytes:
    n_bytes = -(-len(bits) // 8)
    return int(bits.ljust(8 * n_bytes, "0"), 2).to_bytes(n_bytes, "big")


def _crc(data: bytes, width: int, polynomial: int) -> bytes:
    top, mask = 1 << width - 1, (1 << width) - 1

    def shift(value: int, _: int) -> int:
        return (value << 1 ^ (polynomial if value & top else 0)) & mask

    table = [reduce(shift, range(8), byte << width - 8) for byte in range(256)]
    value = reduce(lambda crc, byte: (crc << 8 ^ table[crc >> width - 8 ^ byte]) & mask, data, 0)
    return value.to_bytes(width // 8, "big")


# -- MP3 --------------------------------------------------------------------------------------------


def mp3_frames(n_bytes: int, *, tag: int = 0) -> bytes:
    """A first frame of 128 kbit/s, and zeros; ``tag`` bytes of ID3 before it."""
    head = b"ID3\4\0\0" + bytes([0, 0, tag >> 7, tag & 127]) + bytes(tag) if tag else b""
    return head + b"\xff\xfb\x90\x00" + bytes(n_bytes - 4)


def silent_mp3(n_frames: int, *, kbit: int = 128) -> bytes:
    """Whole frames of silence, 44.1 kHz and two channels with 128 or 320 kbit/s, or 8 kHz and one with 8."""
    if kbit == 8:
        return (b"\xff\xe3\x18\xc4" + bytes(68)) * n_frames
    number = {128: 9, 320: 14}[kbit]
    return (bytes([0xFF, 0xFB, number << 4, 0]) + bytes(144_000 * kbit // 44_100 - 4)) * n_frames


# -- files to be wary of ----------------------------------------------------------------------------


def intact(others: Sequence[bytes] = ()) -> list[bytes]:
    """Files of every kind that the decoder knows, and ``others``."""
    short, many = notes(1, 0.3), np.random.default_rng(1).integers(0, 256, 24_000, np.uint8).tobytes()
    return [
        wav(1, 0.3),
        riff(many, bits=8, channels=2, rate=44_100),
        riff(many, bits=24, channels=1, rate=8_000),
        riff((short / 32768).astype("<f4").tobytes(), kind=FLOAT, bits=32),
        riff(many, kind=A_LAW, bits=8),
        riff(many, kind=MU_LAW, bits=8),
        riff(many, kind=EXTENSIBLE, bits=16, channels=6),
        flac(1, 0.4),
        flac(2, 0.2),
        silent_mp3(12),
        silent_mp3(20, kbit=8),
        mp3_frames(417, tag=200) + silent_mp3(8),
        *others,
    ]


def bombs() -> dict[str, bytes]:
    """Files that are small and claim, or become, something large; and some that are cut."""
    whole, tune = wav(1), flac(1)
    silence = flac_frame(0, 65_535, constant(0))
    return {
        "nothing": b"",
        "no sound": b"hello",
        "a WAV that says it has 4 GiB": whole[:40] + b"\xff" * 4 + whole[44:],
        "a WAV without samples": whole[:44],
        "a cut WAV": whole[: len(whole) // 2],
        "a WAV of 1 Hz": riff(bytes(3000), rate=1),
        "a WAV of 1 Hz and two hours": riff(bytes(14_400), rate=1),
        "a WAV of 4 GHz": riff(bytes(30_000), rate=0xFFFFFFFF),
        "a WAV of 65,535 channels": riff(bytes(1 << 20), bits=8, channels=65_535),
        "a WAV with 100,000 empty chunks": whole[:12] + (b"none" + bytes(4)) * 100_000 + whole[12:],
        "a FLAC of 28 hours": flac_header(100_000),
        "a FLAC of 29 minutes without its samples": flac_header(1740),
        "a FLAC of 29 minutes in 27 kB": flac_header(1740) + silence * 425,
        "a FLAC of 10 s that has 9 hours": flac_header(10) + silence * 8000,
        "a FLAC of one sample": flac_header(1 / RATE) + tune[42:],
        "a FLAC of 1 Hz": flac_header(1700, rate=1) + tune[42:],
        "a FLAC of 29 minutes with 8 channels": flac_header(1740, channels=8)
        + flac_frame(0, 65_535, constant(0) * 8, channels=8) * 425,
        "a cut FLAC": tune[: len(tune) // 2],
        "an MP3 of 29 minutes": silent_mp3(24_000, kbit=8),
        "an MP3 whose first frame hides 3 hours": silent_mp3(1, kbit=320) + silent_mp3(150_000, kbit=8),
        "an MP3 with a tag of 256 MiB": b"ID3\4\0\0\x7f\x7f\x7f\x7f" + silent_mp3(10),
        "an MP3 that says it has 4 billion frames": silent_mp3(1)[:36]
        + b"Xing\0\0\0\1\xff\xff\xff\xff"
        + silent_mp3(9),
        "a cut MP3": silent_mp3(1)[:200],
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    }
