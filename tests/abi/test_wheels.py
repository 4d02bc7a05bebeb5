"""Tests for llama_abi/wheels/make.py, with the library of this machine in place of a portable one."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import uma_trio
from llama_abi import stamp as stamps
from llama_abi.locations import STAMP
from tests.support.profile import sampled

pytest.importorskip("hatchling", reason="the extra dev installs hatchling, which makes wheels: ./build_llama.sh --dev")
MAKE = Path(__file__).parents[2] / "llama_abi" / "wheels" / "make.py"


def make(library: Path, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, str(MAKE), "--library", str(library), "--out", str(out)]
    return subprocess.run(arguments, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


@pytest.fixture
def portable(directory: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(directory, tmp_path / "lib"))
    stamp = json.loads((copy / STAMP).read_text())
    (copy / STAMP).write_text(json.dumps({**stamp, "options": [*stamp["options"], "-DGGML_BACKEND_DL=ON"]}))
    return copy


def test_a_library_for_one_machine_is_refused(directory: Path, tmp_path: Path) -> None:
    if "-DGGML_BACKEND_DL=ON" in json.loads((directory / STAMP).read_text())["options"]:
        pytest.skip("the library is portable: unset UMA_LLAMA_DIR")
    done = make(directory, tmp_path)
    assert done.returncode == 1
    assert "is for this machine only; run ./build_llama.sh --portable" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_the_wheel(portable: Path, tmp_path: Path) -> None:
    """It has every file of the library, both licences, and a tag for every Python of this architecture."""
    done = make(portable, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "out").glob("*.whl")
    assert wheel.name.startswith(f"uma_trio_llama-{uma_trio.__version__}-py3-none-")
    assert wheel.stem.endswith(platform.machine())
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    files = {path.relative_to(portable).as_posix() for path in portable.rglob("*") if path.is_file()}
    assert {f"uma_trio_llama/lib/{name}" for name in files} <= {*names}
    assert {"LICENSE", "LICENSE.llama.cpp"} <= {Path(name).name for name in names}


def test_the_wheel_of_a_plug_in(portable: Path, tmp_path: Path) -> None:
    """It requires the library of the same version, and the libraries of CUDA that it links with."""
    for path in portable.glob("lib*"):
        if path.name != "libggml-base.so":
            path.unlink()
    (portable / "libggml-cuda.so").write_bytes(b"\0libcudart.so.13\0libcublas.so.13\0")
    stamps.write(portable, source=stamps.pin(), backend="cuda", options=("-DGGML_BACKEND_DL=ON",))
    done = make(portable, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "out").glob("uma_trio_llama_cuda13-*.whl")
    with zipfile.ZipFile(wheel) as file:
        [metadata] = (file.read(name).decode() for name in file.namelist() if name.endswith("METADATA"))
    assert f"Requires-Dist: uma-trio-llama=={uma_trio.__version__}" in metadata
    assert "Requires-Dist: nvidia-cublas<14,>=13" in metadata


@pytest.mark.thorough
def test_two_wheels_of_a_commit_are_equal(portable: Path, tmp_path: Path) -> None:
    contents = []
    for name in ("first", "second"):
        assert make(portable, tmp_path / name).returncode == 0
        [wheel] = (tmp_path / name).glob("*.whl")
        contents.append(wheel.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.thorough
@pytest.mark.parametrize("date", sampled(["yesterday", "", "0", "-1", "9" * 5000], 4))
def test_a_date_that_no_wheel_can_have(portable: Path, tmp_path: Path, date: str) -> None:
    done = make(portable, tmp_path, SOURCE_DATE_EPOCH=date)
    assert done.returncode == 1
    assert "or unset it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made(portable: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = make(portable, tmp_path / "file" / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")


@pytest.mark.thorough
def test_without_git(portable: Path, tmp_path: Path) -> None:
    assert make(portable, tmp_path / "out", PATH="/nowhere").returncode == 0
