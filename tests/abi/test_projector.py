"""Tests for projectors: pictures become rows, rows take the place of tokens, and llama-server continues them alike."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import llama_abi
from llama_abi import LibraryError, LlamaError, MediaPiece
from llama_abi.stamp import Stamp
from tests.support.bench_scripts import bench_script
from tests.support.pictures import drawn, png

SERVER = Path(__file__).parents[2] / "build" / "peers" / "bin" / "llama-server"
BEFORE, AFTER, N_TOKENS = "Look: ", " What is this?", 24


@pytest.fixture(scope="module")
def mmproj(library: llama_abi.Library, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not library.stamp.mtmd_sha256:
        pytest.skip("the library has no libmtmd: ./build_llama.sh --dev builds it")
    script, path = bench_script("make_projector"), tmp_path_factory.mktemp("projector") / "mmproj-tiny.gguf"
    script.make_projector(path, tiny, script.SHAPES["tiny"])
    return path


@pytest.fixture(scope="module")
def projector(library: llama_abi.Library, tiny: Path, mmproj: Path) -> Iterator[llama_abi.Projector]:
    with llama_abi.Model(library, tiny, no_alloc=True) as model, llama_abi.Projector(model, mmproj) as opened:
        yield opened


def rows_of(projector: llama_abi.Projector, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    with projector.decode(png(pixels)) as bitmap:
        [piece] = projector.encode(bitmap)
    assert isinstance(piece, MediaPiece)
    return piece.rows


def continued(
    context: llama_abi.Context, rows: npt.NDArray[np.float32], sizes: list[int], n_tokens: int = N_TOKENS
) -> list[int]:
    """Greedy tokens after a picture between two texts, whose rows are decoded in pieces of ``sizes``."""
    context.clear()
    vocab = context.model.vocab
    tokens, picture = llama_abi.Batch(64), llama_abi.Batch(64, n_embd=context.model.n_embd_inp)
    before = vocab.tokenize(BEFORE, add_special=True, parse_special=True)
    after = vocab.tokenize(AFTER, add_special=False, parse_special=True)
    tokens.add(before, pos=0, seq=0, logits="none")
    context.decode(tokens)
    at = len(before)
    for part in np.split(rows, np.cumsum(sizes)[:-1]):
        picture.clear()
        picture.add_rows(part, pos=at, seq=0, logits="none")
        context.decode(picture)
        at += len(part)
    found: list[int] = []
    new = after.tolist()
    while len(found) < n_tokens:
        tokens.clear()
        tokens.add(new, pos=at, seq=0)
        context.decode(tokens)
        at += len(new)
        new = [int(context.logits(1).array.argmax())]
        found += new
    return found


# -- encoding --------------------------------------------------------------------------------------


def test_a_picture_becomes_rows_of_the_width_of_the_model(projector: llama_abi.Projector) -> None:
    assert (projector.sees, projector.hears, projector.uses_mrope) == (True, False, False)
    rows = rows_of(projector, drawn(1))
    assert rows.shape == (16, projector.n_embd)
    assert np.isfinite(rows).all()
    assert not np.array_equal(rows, rows_of(projector, drawn(2)))


def test_pixels_are_those_of_the_file_and_give_the_same_rows(projector: llama_abi.Projector) -> None:
    pixels = drawn(3)
    with projector.decode(png(pixels)) as bitmap:
        assert bitmap.size == (70, 50)
        assert np.array_equal(bitmap.pixels(), pixels)
    with projector.picture(pixels) as bitmap:
        [piece] = projector.encode(bitmap)
    assert isinstance(piece, MediaPiece)
    assert piece.is_causal
    assert np.array_equal(piece.rows, rows_of(projector, pixels))


@pytest.mark.parametrize(
    "data", [b"", b"no picture", png(drawn(4))[:200], b"RIFF\0\0\0\0WAVE" + bytes(100), b"\xff\xd8\xff" + bytes(500)]
)
def test_what_is_no_picture_is_refused(projector: llama_abi.Projector, data: bytes) -> None:
    with pytest.raises(LlamaError, match="cannot be decoded"):
        projector.decode(data)
    assert len(rows_of(projector, drawn(1))) == 16


def test_pixels_of_another_shape_are_refused(projector: llama_abi.Projector) -> None:
    for shape in ((4, 4), (4, 4, 4), (0, 4, 3)):
        with pytest.raises(LlamaError, match="a picture is uint8"):
            projector.picture(np.zeros(shape, np.uint8))


def test_a_projector_of_another_model_or_of_no_model_is_refused(
    library: llama_abi.Library, tiny: Path, mmproj: Path, tmp_path: Path
) -> None:
    make_model, other = bench_script("make_model"), tmp_path / "other.gguf"
    make_model.make_model(other, make_model.parse_shape("1x128"), "q8_0")
    with llama_abi.Model(library, other, no_alloc=True) as model, pytest.raises(LlamaError, match="mismatch"):
        llama_abi.Projector(model, mmproj)
    with llama_abi.Model(library, tiny, no_alloc=True) as model:
        with pytest.raises(LlamaError, match="cannot load the projector"):
            llama_abi.Projector(model, tiny)
        with pytest.raises(LlamaError, match="there is no file"):
            llama_abi.Projector(model, tmp_path / "none.gguf")
    with llama_abi.Model(library, tiny, vocab_only=True) as model, pytest.raises(LlamaError, match="vocabulary only"):
        llama_abi.Projector(model, mmproj)


def test_the_model_outlives_its_projector(library: llama_abi.Library, tiny: Path, mmproj: Path) -> None:
    model = llama_abi.Model(library, tiny, no_alloc=True)
    projector = llama_abi.Projector(model, mmproj)
    with pytest.raises(LlamaError, match="close what was made from it"):
        model.close()
    projector.close()
    model.close()
    with pytest.raises(llama_abi.HandleClosed):
        projector.decode(png(drawn(1)))


def test_a_library_without_libmtmd_says_how_to_get_it(
    library: llama_abi.Library, tiny: Path, mmproj: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Stamp(**{**{f: getattr(library.stamp, f) for f in Stamp.__annotations__}, "mtmd_sha256": ""})
    monkeypatch.setattr(library, "stamp", without)
    monkeypatch.setattr(library, "_mtmd", None)
    with (
        llama_abi.Model(library, tiny, no_alloc=True) as model,
        pytest.raises(LibraryError, match=r"built without libmtmd; .*build_llama\.sh"),
    ):
        llama_abi.Projector(model, mmproj)


# -- rows in place of tokens -----------------------------------------------------------------------


def test_the_rows_of_a_picture_can_be_decoded_in_chunks(
    projector: llama_abi.Projector, context: llama_abi.Context
) -> None:
    rows = rows_of(projector, drawn(5))
    whole = continued(context, rows, [16])
    assert continued(context, rows, [1, 7, 8]) == whole
    assert continued(context, rows_of(projector, drawn(6)), [16]) != whole


def test_rows_and_tokens_are_in_different_batches() -> None:
    tokens, rows = llama_abi.Batch(4), llama_abi.Batch(4, n_embd=8)
    with pytest.raises(LlamaError, match="this batch takes rows"):
        rows.add([1], pos=0, seq=0)
    with pytest.raises(LlamaError, match="this batch takes rows"):
        rows.add_decodes([1], positions=[0], seqs=[0])
    with pytest.raises(LlamaError, match=r"float32 \[n, 0\]"):
        tokens.add_rows(np.zeros((1, 8), np.float32), pos=0, seq=0)
    assert (tokens.n_tokens, rows.n_tokens) == (0, 0)


def test_rows_that_no_model_takes_are_refused(context: llama_abi.Context) -> None:
    rows = llama_abi.Batch(4, n_embd=8)
    wrong_rows: tuple[npt.NDArray[Any], ...] = (np.zeros((1, 9), np.float32), np.zeros((1, 8)), np.zeros(8, np.float32))
    for wrong in wrong_rows:
        with pytest.raises(LlamaError, match=r"float32 \[n, 8\]"):
            rows.add_rows(wrong, pos=0, seq=0)
    with pytest.raises(LlamaError, match="finite"):
        rows.add_rows(np.full((1, 8), np.nan, np.float32), pos=0, seq=0)
    with pytest.raises(LlamaError, match="do not fit"):
        rows.add_rows(np.zeros((5, 8), np.float32), pos=0, seq=0)
    rows.add_rows(np.zeros((1, 8), np.float32), pos=0, seq=0)
    with pytest.raises(LlamaError, match="rows of this model have 64 numbers, not 8"):
        context.decode(rows)


# -- next to llama-server --------------------------------------------------------------------------


@contextlib.contextmanager
def llama_server(model: Path, mmproj: Path, log: Path) -> Iterator[str]:
    """The address of a server that has loaded its model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(SERVER),
        "-m",
        str(model),
        "--mmproj",
        str(mmproj),
        "--port",
        str(port),
        "-c",
        "512",
        "-np",
        "1",
        "-t",
        "1",
    ]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                os.sched_yield()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def ask(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data, {"Content-Type": "application/json"})) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.skipif(not SERVER.exists(), reason="there is no llama-server: ./build_llama.sh --peers builds it")
def test_llama_server_continues_a_picture_with_the_same_tokens(
    projector: llama_abi.Projector, context: llama_abi.Context, tiny: Path, mmproj: Path, tmp_path: Path
) -> None:
    with llama_server(tiny, mmproj, tmp_path / "server.log") as address:
        marker = ask(f"{address}/props")["media_marker"]
        for seed, (height, width) in enumerate([(50, 70), (56, 56), (200, 30), (1, 1)]):
            pixels = drawn(seed, height, width)
            prompt = {
                "prompt_string": f"{BEFORE}{marker}{AFTER}",
                "multimodal_data": [base64.b64encode(png(pixels)).decode()],
            }
            body = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "return_tokens": True}
            theirs = ask(f"{address}/completion", body)["tokens"]
            assert theirs == continued(context, rows_of(projector, pixels), [16], len(theirs))
            assert theirs
