"""Tests for what the first bytes of a picture or of sound say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.cases import all_cases
from tests.support.pictures import drawn, jpeg_header, png, scans
from tests.support.sounds import flac_header, mp3_frames, silent_mp3, wav
from uma_trio.encoder import media_file
from uma_trio.encoder.media_file import MAX_SCANS, MediaFile, inspect
from uma_trio.encoder.refusals import Refused
from uma_trio.encoder.sound_file import MAX_SECONDS


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
        (jpeg_header(640, 480)[:-1], "ends in the middle of its pixels: send the whole file"),
        (bmp(-5, 5), "-5 x 5 pixels"),
        (flac_header(MAX_SECONDS + 1), "lasts 1801 s; it may last 1800 s"),
        (flac_header(0), "does not say how long it is"),
        (b"fLaC", "ends in the middle of its header"),
        (wav(1, MAX_SECONDS + 100, rate=10), "lasts 19.. s"),
        (wav(1, kind=2), "compressed samples"),
        (wav(1)[:30], "ends in the middle of its header"),
        (b"RIFF\0\0\0\0WAVE" + bytes(100_000), "does not say what its samples are"),
        (flac_header(1700, rate=655_350, channels=8), "1114095000 samples in 8 channels; it may have 691200000"),
        (flac_header(0.05), "lasts 0.050 s; it has to last 0.1 s: send a longer one"),
        (silent_mp3(1, kbit=320) + silent_mp3(26_000, kbit=8), "lasts 1872 s"),
        (mp3_frames(36) + b"Info\0\0\0\1\0\2\0\0" + bytes(4000), "lasts 3424 s"),
        (mp3_frames(4000), "lasts 0.026 s"),
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


def test_the_length_of_sound_counts_all_its_bytes_or_frames() -> None:
    announcing = silent_mp3(1)[:36] + b"Xing\0\0\0\1\0\0\4\0" + silent_mp3(1)[48:]
    for data, seconds in (
        (wav(1, 2.0), 2.0),
        (silent_mp3(40), 40 * 1152 / 44_100),
        (mp3_frames(417, tag=200) + b"junk\xff\xff" + silent_mp3(30, kbit=8), 30 * 576 / 8_000),
        (silent_mp3(5, kbit=320) + silent_mp3(95), 100 * 1152 / 44_100),
        (announcing, 1024 * 1152 / 44_100),
        (announcing + silent_mp3(2000), 2001 * 1152 / 44_100),
    ):
        found = inspect(data)
        assert found.seconds == pytest.approx(seconds, abs=0.03)
        assert found.is_sound
