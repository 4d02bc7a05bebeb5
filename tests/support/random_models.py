"""Models with random weights from ``benches/make_model.py``; each is made once in a test run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.bench_scripts import bench_script
from tests.support.real_daemon import ROOT
from tests.support.run import locked, run_folder


def vocabulary_file(name: str) -> Path:
    """The file of a vocabulary that comes with llama.cpp, without weights."""
    return ROOT / "build/llama.cpp/models" / f"ggml-vocab-{name}.gguf"


@functools.cache
def random_model(shape: str, quant: str = "q8_0", ctx: int = 1024, vocabulary: str | None = None) -> Path:
    """A model of ``shape``; the test is skipped if the vocabulary is missing.

    Args:
        vocabulary: one of llama.cpp's, such as ``qwen2``, in place of that which suits the shape.

    Test processes share the files.  A lock lets one process make a model while the others wait.
    """
    script = bench_script("make_model")
    parsed = script.parse_shape(shape)
    words = parsed.vocabulary if vocabulary is None else vocabulary_file(vocabulary)
    if not words.exists():
        pytest.skip(f"{words} is missing: ./build_llama.sh --dev unpacks it")
    made = run_folder() / "-".join(filter(None, (shape, quant, str(ctx), vocabulary)))
    made = made.with_name(f"{made.name}.gguf")
    with locked(made.name):
        if not made.exists():
            script.make_model(made, parsed, quant, vocabulary=words, ctx=ctx)
    return made
