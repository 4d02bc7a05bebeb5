"""Models with random weights from ``benches/make_model.py``; each is made once in a test run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.bench_scripts import bench_script
from tests.support.run import locked, run_folder


@functools.cache
def random_model(shape: str, quant: str = "q8_0", ctx: int = 1024) -> Path:
    """A model of ``shape``; the test is skipped if the vocabulary is missing.

    Test processes share the files.  A lock lets one process make a model while the others wait.
    """
    script = bench_script("make_model")
    parsed = script.parse_shape(shape)
    if not parsed.vocabulary.exists():
        pytest.skip(f"{parsed.vocabulary} is missing: ./build_llama.sh --dev unpacks it")
    made = run_folder() / f"{shape}-{quant}-{ctx}.gguf"
    with locked(made.name):
        if not made.exists():
            script.make_model(made, parsed, quant, ctx=ctx)
    return made
