"""Tests for the process that encodes pictures: what it gives, what it refuses, and how it dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import psutil
import pytest
import trio
import trio.testing

import llama_abi
from tests.support.pictures import drawn, jpeg_header, png
from tests.support.projectors import projector_file
from tests.support.sounds import wav
from uma_trio.daemon.prompts import pictures as pictures_of_daemon
from uma_trio.daemon.prompts.media import Picture
from uma_trio.daemon.prompts.pictures import open_pictures
from uma_trio.encoder import encoder as module
from uma_trio.encoder.__main__ import upright
from uma_trio.encoder.encoded import EncodedMedia
from uma_trio.encoder.encoder import Projector, SandboxedEncoder
from uma_trio.encoder.refusals import Refused
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.errors import BadRequest, ContextTooSmall, ModelUnavailable

MODEL = Path(__file__).parents[2] / "uma_trio" / "models" / "embedded" / "embedded.gguf"
PHOTO = Path(__file__).parents[2] / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Projector:
    return Projector(projector_file(tmp_path_factory.mktemp("projector")), MODEL)


@pytest.fixture(scope="module")
def encoder(projector: Projector) -> Iterator[SandboxedEncoder]:
    found = SandboxedEncoder(projector, "a projector")
    yield found
    found.close()


def child_of(encoder: SandboxedEncoder) -> psutil.Process:
    encoder.encode(png(drawn(0)))
    [child] = children()
    return child


def test_a_picture_is_placeholders_and_as_many_rows(encoder: SandboxedEncoder, projector: Projector) -> None:
    pixels = drawn(1)
    found = encoder.encode(png(pixels))
    assert found.tokens.shape == (16,)
    assert found.tokens.dtype == np.int32
    assert found.tokens.min() >= PLACEHOLDER
    rows = found.rows.read(0, 16)
    assert rows.shape == (16, 256)
    assert np.array_equal(found.rows.read(5, 3), rows[5:8])
    library = llama_abi.load()
    with (
        llama_abi.Model(library, MODEL, no_alloc=True) as model,
        llama_abi.Projector(model, projector.path, use_gpu=projector.use_gpu) as here,
        here.picture(pixels) as bitmap,
    ):
        [piece] = here.encode(bitmap)
    assert isinstance(piece, llama_abi.MediaPiece)
    np.testing.assert_allclose(rows, piece.rows, rtol=1e-5, atol=1e-5)


def test_equal_files_have_equal_placeholders_and_others_differ_at_once(
    encoder: SandboxedEncoder, projector: Projector
) -> None:
    one, same, other = (encoder.encode(png(drawn(seed))) for seed in (1, 1, 2))
    assert np.array_equal(one.tokens, same.tokens)
    assert one.tokens[0] != other.tokens[0]
    another = SandboxedEncoder(projector, "another projector")
    try:
        assert another.encode(png(drawn(1))).tokens[0] != one.tokens[0]
    finally:
        another.close()


def test_files_leave_nothing_behind(encoder: SandboxedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma_trio.encoder.encoder.memory_folder", lambda: tmp_path)
    found = encoder.encode(png(drawn(1)))
    with pytest.raises(Refused):
        encoder.encode(png(drawn(1))[:300])
    assert not [*tmp_path.iterdir()]
    assert os.fstat(found.rows.fd).st_nlink == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"text", "a picture is PNG"),
        (png(drawn(1))[:300], "cannot be decoded"),
        (jpeg_header(640, 480), "cannot be decoded"),
        (b"RIFF\0\0\0\0WAVE" + bytes(100), "ends in the middle of its header"),
        (wav(1), "the file is sound: send it as such"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + (40_000).to_bytes(4) * 2, "40000 x 40000 pixels"),
    ],
)
def test_bad_files_are_refused_and_the_next_one_is_encoded(encoder: SandboxedEncoder, data: bytes, reason: str) -> None:
    child = child_of(encoder)
    with pytest.raises(Refused, match=reason):
        encoder.encode(data)
    assert child_of(encoder).pid == child.pid


def test_mutated_files_are_encoded_or_refused(encoder: SandboxedEncoder) -> None:
    chosen = random.Random(7)
    files = [png(drawn(1)), *([PHOTO.read_bytes()] if PHOTO.exists() else [])]
    outcomes = {"encoded": 0, "refused": 0}
    for n in range(60):
        data = bytearray(files[n % len(files)])
        for _ in range(chosen.randint(1, 8)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        try:
            encoder.encode(bytes(data[: chosen.randint(len(data) // 2, len(data))] if n % 3 == 0 else data))
            outcomes["encoded"] += 1
        except Refused:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes
    assert len(encoder.encode(png(drawn(1))).tokens) == 16


def test_an_encoder_that_is_killed_or_stopped_is_replaced(encoder: SandboxedEncoder) -> None:
    for sent in (signal.SIGKILL, signal.SIGSTOP):
        child = child_of(encoder)
        child.send_signal(sent)
        assert len(encoder.encode(png(drawn(1))).tokens) == 16
        assert child_of(encoder).pid != child.pid


def test_a_file_that_takes_too_long_is_refused(
    encoder: SandboxedEncoder, projector: Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.0)
    hurried = SandboxedEncoder(projector, "a projector")
    try:
        with pytest.raises(Refused, match="it takes longer than 0 s; send another one"):
            hurried.encode(png(np.zeros((6000, 6000, 3), np.uint8)))  # no machine is too busy to notice this one
    finally:
        hurried.close()


def test_a_projector_that_does_not_load_is_an_error_with_the_reason(tmp_path: Path, projector: Projector) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    for path, reason in (
        (tmp_path / "none.gguf", "there is no file"),
        (tmp_path / "bad.gguf", "cannot load the projector"),
    ):
        broken = SandboxedEncoder(Projector(path, MODEL), "")
        with pytest.raises(ModelUnavailable, match=f"cannot start: {reason}"):
            broken.encode(png(drawn(1)))
        broken.close()


def test_pictures_are_turned_as_exif_says() -> None:
    # the orientations of a picture whose first row and column are marked
    seen = np.arange(6, dtype=np.uint8).reshape(2, 3, 1).repeat(3, axis=2)
    stored = {
        1: seen,
        2: seen[:, ::-1],
        3: np.rot90(seen, 2),
        4: seen[::-1],
        5: seen.transpose(1, 0, 2),
        6: np.rot90(seen, 1),
        7: np.rot90(seen, 2).transpose(1, 0, 2),
        8: np.rot90(seen, -1),
    }
    for orientation, pixels in stored.items():
        assert np.array_equal(upright(pixels, orientation), seen), orientation


async def test_the_process_ends_when_it_is_idle_and_the_next_picture_starts_it(
    projector: Projector, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures_of_daemon, "IDLE_S", 0.0)
    others = children()
    with open_pictures(attrs.evolve(projector, max_tokens=100), max_whole=64) as pictures:
        nursery.start_soon(pictures.run)
        [first] = await pictures.encode([Picture(png(drawn(1)), "")], principal="a")
        with trio.fail_after(60):
            while children() != others:
                await trio.sleep(0.01)
        assert await pictures.encode([Picture(png(drawn(1)), "")], principal="a") == [first]
        assert children() == others
        [other] = await pictures.encode([Picture(png(drawn(2)), "")], principal="b")
        assert len(other.tokens) == 16


async def test_where_memory_is_short_the_process_starts_with_the_first_picture_that_there_is_room_for(
    projector: Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, picture = children(), Picture(png(drawn(1)), "")
    with open_pictures(attrs.evolve(projector, max_tokens=100), max_whole=64, waits=True) as pictures:
        assert (pictures.sees, pictures.hears, children()) == (True, False, others)
        with monkeypatch.context() as short:
            short.setattr(module, "free_memory_bytes", lambda swap: 100 << 20)
            with pytest.raises(ModelUnavailable, match=r"it takes 25\d MiB, and 100 MiB are free"):
                await pictures.encode([picture], principal="a")
            assert children() == others
        [found] = await pictures.encode([picture], principal="a")
        assert len(found.tokens) == 16


async def test_what_is_kept_and_what_a_request_may_have_is_bounded(
    projector: Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (Picture(png(drawn(n)), f"messages[{n}]") for n in range(2))
    monkeypatch.setattr(pictures_of_daemon, "MAX_KEPT", 1)
    with open_pictures(attrs.evolve(projector, max_tokens=32), max_whole=64) as pictures:
        [first, second] = await pictures.encode([one, two], principal="a")
        assert await pictures.encode([two], principal="a") == [second]
        assert await pictures.encode([one], principal="a") != [first]
        [of_another] = await pictures.encode([one], principal="b")
        assert pictures.snapshot()["encoded_total"] == 4, "the response time would reveal what others send"
        assert np.array_equal(of_another.tokens, first.tokens)
        assert first.rows.read(0, 16).any(), "a request that has it still reads it"
        with pytest.raises(ContextTooSmall, match="the first 3 of 4 pictures have 48 tokens"):
            await pictures.encode([one, two, one, Picture(b"never looked at", "")], principal="a")


async def test_requests_with_the_same_new_picture_encode_it_once(projector: Projector, nursery: trio.Nursery) -> None:
    """Also if the first of them is cancelled, or cannot be encoded."""
    found: list[EncodedMedia] = []

    async def encode(data: bytes) -> None:
        found.extend(await pictures.encode([Picture(data, "")], principal="a"))

    with open_pictures(attrs.evolve(projector, max_tokens=100), max_whole=64) as pictures:
        async with trio.open_nursery() as requests:
            for _ in range(3):
                requests.start_soon(encode, png(drawn(1)))
        assert len(set(map(id, found))) == 1
        assert pictures.snapshot()["encoded_total"] == 1
        assert pictures.snapshot()["found_total"] == 2
        async with trio.open_nursery() as given_up:
            given_up.start_soon(encode, png(drawn(2)))
            await trio.testing.wait_all_tasks_blocked()
            given_up.start_soon(encode, png(drawn(2)))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(encode, png(drawn(2)))
            given_up.cancel_scope.cancel()
        [again] = await pictures.encode([Picture(png(drawn(2)), "")], principal="a")
        assert len(again.tokens) == 16
        for _ in range(2):  # a failure is not kept
            with pytest.raises(BadRequest):
                await encode(b"no picture")


def children() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile, or has ended and is a zombie
            if "uma_trio.encoder" in each.cmdline():
                found.append(each)
    return found
