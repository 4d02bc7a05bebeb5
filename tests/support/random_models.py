"""Models with random weights from ``benches/make_model.py``; each is made once in a test run."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.real_daemon import ROOT
from tests.support.run import locked, run_folder


@functools.cache
def bench_script(name: str) -> ModuleType:
    """A script of ``benches/`` as a module; it is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benches" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
