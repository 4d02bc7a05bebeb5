"""Models with random weights, made by ``benches/make_model.py``, once for all tests that ask for the same."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.real_daemon import ROOT

SCRIPT = ROOT / "benches" / "make_model.py"


@functools.cache
def make_model_script() -> ModuleType:
    """The script as a module; it is in no package."""
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def random_model(shape: str, quant: str = "q8_0", ctx: int = 1024) -> Path:
    """A model of ``shape``; skips where its vocabulary is missing."""
    script = make_model_script()
    if not script.DEFAULT_VOCABULARY.exists():
        pytest.skip(f"{script.DEFAULT_VOCABULARY} is not there: ./build_llama.sh unpacks it")
    out = _folder() / f"{shape}-{quant}-{ctx}.gguf"
    script.make_model(out, script.parse_shape(shape), quant, ctx=ctx)
    return out


@functools.cache
def _folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="uma-trio-models-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
