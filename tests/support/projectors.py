"""Projectors with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import llama_abi
from tests.support.bench_scripts import bench_script
from uma_trio.models.packaged import EMBEDDED

N_ROWS = 16
"""Rows of a picture."""


def projector_file(folder: Path, kind: str = "mlp", model: Path = EMBEDDED) -> Path:
    """A tiny projector of ``model``; skips the test if the library cannot use it."""
    if not llama_abi.load().stamp.mtmd_sha256:
        pytest.skip("the library has no libmtmd: ./build_llama.sh --dev builds it")
    script, path = bench_script("make_projector"), folder / "mmproj.gguf"
    script.make_projector(path, model, script.SHAPES["tiny-siglip" if kind == "gemma3" else "tiny"], kind=kind)
    return path
