"""Our processes import no code from the current folder: a user may start a daemon in a folder of downloads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uma_trio.processes.interpreter import ROOT, package_environment, python_module


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    for name in ("uma_trio", "trio", "click", "llama_abi", "uma_trio_llama", "uma_trio_llama_vulkan"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger was here')")
    return tmp_path


def test_a_process_of_the_daemon(downloads: Path) -> None:
    done = subprocess.run(
        [*python_module("uma_trio"), "--version"],
        cwd=downloads,
        env={**os.environ, **package_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_user_who_types_python_m(downloads: Path) -> None:
    """Python looks for ``uma_trio`` itself in the current folder first; our code imports nothing else from there."""
    (downloads / "uma_trio" / "__init__.py").unlink()
    (downloads / "uma_trio").rmdir()
    done = subprocess.run(
        [sys.executable, "-m", "uma_trio", "--version"],
        cwd=downloads,
        env={**os.environ, **package_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_module_starts_python_in_another_way() -> None:
    paths = [path for path in (ROOT / "uma_trio").rglob("*.py") if "training" not in path.parts]
    found = {path.name for path in paths for how in ("-m", "-c") if f'sys.executable, "{how}"' in path.read_text()}
    assert found == {"__main__.py"}, "it runs pip, in a checkout"
