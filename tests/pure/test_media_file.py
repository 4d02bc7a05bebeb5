"""Tests for what the first bytes of a picture or of sound say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.cases import all_cases
from tests.support.pictures import drawn, jpeg_header, png, scans
from tests.support.sounds import flac_header, mp3_frames, wav
from uma_trio.encoder import media_file
from uma_trio.encoder.media_file import MAX_SCANS, MAX_SECONDS, MediaFile, Refused, inspect


def bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<Iii", 40, width, height)


@all_cases(
    ("data", "found"),
    [
        (png(drawn(1, 50, 70)), MediaFile("PNG", 70, 50)),
        (b"GIF89a" + struct.pack("<HH", 3, 4), MediaFile("GIF", 3, 4)),
        (bmp(5, -6), MediaFile("BMP", 5, 6)),
        (b"BM" + bytes(12) + struct.pack("<IHH", 12, 5, 6), MediaFile("BMP", 5, 6)),
        (jpeg_header(640, 480), MediaFile("JPEG", 640, 480)),
        (jpeg_header(640, 480, orientation=6), MediaFile("JPEG", 640, 480, 6)),
        (jpeg_header(640, 480, orientation=8, order=">"), MediaFile("JPEG", 640, 480, 8)),
        (jpeg_header(640, 480, orientation=99), MediaFile("JPEG", 640, 480)),
        (flac_header(90), MediaFile("FLAC", seconds=90.0)),
        (mp3_frames(16_000), MediaFile("MP3", seconds=1.0)),
        (mp3_frames(31_790, tag=200), MediaFile("MP3", seconds=2.0)),
    ],
)
def test_kind_size_and_orientation(data: bytes, found: MediaFile) -> None:
    assert inspect(data) == found
    assert found.is_sound == (not found.width)


@all_cases(
    ("data", "reason"),
    [
        (b"", "of another kind"),
        (b"<svg/>", "a picture is PNG, JPEG, GIF or BMP"),
        (b"RIFF\0\0\0\0WEBP", "of another kind"),
        (png(drawn(1))[:20], "ends in the middle of its header"),
        (b"\xff\xd8\xff", "ends in the middle"),
        (b"\xff\xd8\xff\xda", "says no size"),
        (b"\xff\xd8no segment", "says no size"),
        (b"\xff\xd8" + b"\xff" * (1 << 17), "says no size"),
        (b"\xff\xd8" + b"\xff\xd0" * 2000, "says no size"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + struct.pack(">II", 40_000, 40_000), "40000 x 40000 pixels"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + struct.pack(">II", 0, 1), "0 x 1 pixels"),
        (jpeg_header(16_000, 16_000), "40000000 in all"),
        (bmp(-5, 5), "-5 x 5 pixels"),
        (flac_header(MAX_SECONDS + 1), "lasts 1801 s; it may last 1800 s"),
        (flac_header(0), "does not say how long it is"),
        (b"fLaC", "ends in the middle of its header"),
        (wav(1, MAX_SECONDS + 100, rate=10), "lasts 19.. s"),
        (wav(1, kind=2), "compressed samples"),
        (wav(1)[:30], "ends in the middle of its header"),
        (b"RIFF\0\0\0\0WAVE" + bytes(100_000), "does not say what its samples are"),
        (mp3_frames(29_000_000), "lasts 1812 s"),
        (mp3_frames(36) + b"Info\0\0\0\1\0\0\1\0" + bytes(4000), "no room for 256 frames"),
        (b"\xff\xe3\x10" + bytes(2_000_000), "lasts 2000 s"),  # 8 kbit/s
        (b"ID3" + bytes(100_000), "no frame"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        inspect(data)


def test_a_large_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_file, "MAX_FILE_BYTES", 100)
    with pytest.raises(Refused, match="and 100 are allowed: send a smaller one"):
        inspect(png(drawn(1)))


def test_the_photo_of_the_library() -> None:
    photo = Path(__file__).parents[2] / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"
    if not photo.exists():
        pytest.skip("the source of llama.cpp is not unpacked: ./build_llama.sh does it")
    found = inspect(photo.read_bytes())
    assert found.kind == "JPEG"
    assert min(found.width, found.height) > 100


def test_a_file_with_many_scans_is_refused_before_it_is_decoded() -> None:
    assert inspect(scans(MAX_SCANS - 1)).width == 4096
    with pytest.raises(Refused, match="has 101 scans; it may have 100"):
        inspect(scans(MAX_SCANS))


def test_the_length_of_a_wav_file_counts_all_its_bytes() -> None:
    assert inspect(wav(1, 2.0)).seconds == pytest.approx(2.0, abs=0.01)
    assert inspect(wav(1, 2.0)).is_sound
