"""Sound for tests: WAV files, and headers of others, without a library."""

from __future__ import annotations

import struct

import numpy as np

RATE = 16_000


def wav(seed: int, seconds: float = 1.0, *, rate: int = RATE, kind: int = 1) -> bytes:
    """A WAV file with some notes, 16 bits and one channel.

    Args:
        kind: what its samples claim to be.
    """
    notes = np.random.default_rng(seed).uniform(100, 2000, 4)
    times = np.arange(round(seconds * rate)) / rate
    samples = sum(np.sin(2 * np.pi * note * times) for note in notes) * 4000
    data = samples.astype("<i2").tobytes()
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + header + struct.pack("<4sI", b"data", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac_header(seconds: int, rate: int = RATE) -> bytes:
    """The beginning of a FLAC file that claims to be so long."""
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + bytes(10) + struct.pack(">Q", rate << 44 | seconds * rate) + bytes(16)


def mp3_frames(n_bytes: int, *, tag: int = 0) -> bytes:
    """A first frame of 128 kbit/s, and zeros; ``tag`` bytes of ID3 before it."""
    head = b"ID3\4\0\0" + bytes([0, 0, tag >> 7, tag & 127]) + bytes(tag) if tag else b""
    return head + b"\xff\xfb\x90\x00" + bytes(n_bytes - 4)
