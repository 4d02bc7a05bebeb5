"""What works in a source tree without the extra ``dev``, and without the metadata that an installation writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import uma_trio

ROOT = Path(uma_trio.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HIDE = """
import importlib.metadata, io, contextlib, json, re, runpy, sys
from pathlib import Path

for requirement in json.loads(sys.argv[2]):  # a name that is None cannot be imported
    sys.modules[re.split("[>=]", requirement)[0].replace("-", "_")] = None

def without_ours(function):
    def found(name):
        if name.replace("_", "-") == "uma-trio":
            raise importlib.metadata.PackageNotFoundError(name)
        return function(name)
    return found

for name in ("distribution", "version", "requires"):
    setattr(importlib.metadata, name, without_ours(getattr(importlib.metadata, name)))
"""

ALL_BENCHES = """
folder, results = Path(sys.argv[1]) / "benches", {}
sys.path.insert(0, str(folder))
programs = [script for script in sorted(folder.glob("*.py")) if "__main__" in script.read_text()]
for script in programs:
    sys.argv = [str(script), "--help"]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(script), run_name="__main__")
        results[script.name] = 0
    except SystemExit as ended:
        results[script.name] = ended.code
    except BaseException as error:
        results[script.name] = repr(error)
print(json.dumps(results))
"""

RUN_HEADER = """
import trio
from uma_trio import config
from uma_trio.daemon.perf_log import run_header
from uma_trio.engine_link.messages import ModelInfo

async def version():
    sizes = dict.fromkeys(("n_vocab", "n_ctx", "n_ctx_seq", "n_ctx_train", "n_batch", "n_seq_max"), 1)
    info = ModelInfo(name="m", description="", eog_ids=(), size_bytes=1, n_params=1, **sizes)
    return run_header(config.load(), info, {}).uma_trio

print(trio.run(version))
"""


def hidden(code: str, *arguments: str) -> str:
    """The output of ``code`` without metadata and without what only the extra dev installs."""
    plain = {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}
    extra = [each for each in PROJECT["optional-dependencies"]["dev"] if each.split(">")[0] not in plain]
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, str(ROOT), json.dumps(extra), *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout


@pytest.mark.thorough
def test_benches_without_the_extra_dev() -> None:
    """Each shows its help, or says in one sentence what to install."""
    results = json.loads(hidden(ALL_BENCHES))
    assert "throughput.py" in results
    remedy = "which the extra dev installs: run ./build_llama.sh --dev"
    wrong = {name: end for name, end in results.items() if end and remedy not in str(end)}
    assert not wrong
    assert remedy in results["embeddings.py"]


def test_the_version_without_an_installation() -> None:
    shown = hidden("sys.argv = ['uma-trio', '--version']\nimport uma_trio.cli\numa_trio.cli.main()")
    assert shown == f"uma-trio, version {uma_trio.__version__}\n"


def test_a_perf_log_without_an_installation() -> None:
    assert hidden(RUN_HEADER).strip() == uma_trio.__version__
