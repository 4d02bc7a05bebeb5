"""Tests for build_llama.sh before it builds anything: every missing requirement is one sentence with the remedy.

Nothing is compiled, installed or downloaded: a fake interpreter answers the script's questions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "build_llama.sh"
TOOLS = ["bash", "dirname", "cut", "sed", "awk", "grep", "df", "uname", "cat", "mkdir", "rm", "tail", "head", "ls"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory for PATH without a compiler and without Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return folder


def fake(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(folder: Path, *, version: str = "3.11.2 new", pip: str = "pip") -> Path:
    lines = [*version.split(), pip, "installed", "/nowhere/bin", "environment", "hash"]
    # The fake answers only the first question, so the script never gets to downloading or building.
    return fake(folder / "fake-python", f"[ $# -eq 4 ] || exit 1\nprintf '%s\\n' {' '.join(lines)}")


def run(*arguments: str, **environment: str | Path) -> tuple[int, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHON", "VULKAN_SDK", "CC", "CXX")}
    done = subprocess.run(
        [str(shutil.which("bash")), str(SCRIPT), *arguments],
        env={**clean, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_help() -> None:
    code, said = run("--help")
    assert code == 0
    for option in ("--backend", "--dev", "--peers", "--prefix", "--jobs", "--source", "--clean", "--help"):
        assert option in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bakend", "cpu"], "unknown option --bakend"),
        (["--backend", "gpu"], "unknown backend 'gpu'"),
        (["--backend=gpu"], "unknown backend 'gpu'"),
        (["--jobs", "0"], "--jobs must be a number from 1"),
        (["--jobs", "two"], "--jobs must be a number from 1"),
        (["--jobs"], "--jobs needs a value"),
        (["--source", "/nowhere"], "is not a llama.cpp checkout"),
        (["--peers=llama-server"], "unknown option --peers=llama-server"),
    ],
)
def test_wrong_options(arguments: list[str], complaint: str) -> None:
    code, said = run(*arguments)
    assert code == 1
    assert said.startswith("error: ")
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_the_directory_of_the_peers() -> None:
    assert "build/peers/bin" in run("--help")[1]
    ignored = (SCRIPT.parent / ".gitignore").read_text().splitlines()
    assert "/build/" in ignored


def test_no_python(bare: Path) -> None:
    assert "install Python 3.11 or newer" in run(PATH=bare)[1]


def test_old_python(bare: Path) -> None:
    old = python(bare, version="3.9.2 old")
    code, said = run(PATH=bare, PYTHON=old)
    assert (code, len(said.splitlines())) == (1, 1)
    assert "Python 3.11 or newer is required, and" in said
    fake(bare / "python3.12", "")
    assert "python3.12 is installed: run  python3.12 -m venv .venv" in run(PATH=bare, PYTHON=old)[1]


def test_an_externally_managed_python(bare: Path) -> None:
    code, said = run(PATH=bare, PYTHON=python(bare, pip="managed"))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "run  python3 -m venv .venv && . .venv/bin/activate" in said


def test_no_pip(bare: Path) -> None:
    assert "-m ensurepip" in run(PATH=bare, PYTHON=python(bare, pip="no-pip"))[1]


def test_no_compiler(bare: Path) -> None:
    code, said = run("--peers", PATH=bare, PYTHON=python(bare))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "no C++ compiler found: install one (Debian, Ubuntu: apt install g++" in said


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="auto considers Vulkan on Linux only")
class TestVulkan:
    @pytest.fixture
    def sdk(self, tmp_path: Path) -> Path:
        """A directory like a Vulkan SDK of version 1.4.309, with SPIR-V headers, glslc and a loader."""
        for name in ("include/vulkan", "include/spirv/unified1", "lib", "bin"):
            (tmp_path / "sdk" / name).mkdir(parents=True)
        sdk = tmp_path / "sdk"
        for name in ("include/vulkan/vulkan.hpp", "include/spirv/unified1/spirv.hpp", "lib/libvulkan.so"):
            (sdk / name).touch()
        self.headers(sdk, 4, 309)
        fake(sdk / "bin" / "glslc", "")
        return sdk

    @staticmethod
    def headers(sdk: Path, minor: int, patch: int) -> None:
        parts = ("(((uint32_t)(0)) << 29U)", "(((uint32_t)(1)) << 22U)", f"(((uint32_t)({minor})) << 12U)")
        version = f"({' | '.join(parts)} | ((uint32_t)({patch})))"
        new = "#define VK_EXT_layer_settings 1\n" if (minor, patch) >= (3, 261) else ""
        (sdk / "include" / "vulkan" / "vulkan_core.h").write_text(
            f"#define VK_HEADER_VERSION_COMPLETE {version}\n{new}"
        )

    def auto(self, sdk: Path, tmp_path: Path, *arguments: str) -> str:
        first, last = run(*arguments, PYTHON=python(tmp_path), VULKAN_SDK=sdk)[1].splitlines()
        assert last.startswith("error: the package cannot be imported")
        return first

    def test_too_old_headers(self, sdk: Path, tmp_path: Path) -> None:
        self.headers(sdk, 3, 239)
        complaint = (
            "the installed Vulkan headers (1.3.239) are too old, llama.cpp needs 1.3.261 or newer: install newer ones"
        )
        code, said = run("--backend", "vulkan", PYTHON=python(tmp_path), VULKAN_SDK=sdk)
        assert (code, len(said.splitlines())) == (1, 1)
        assert complaint in said
        assert "or use --backend cpu" in said
        assert f"==> Backend: cpu (not Vulkan: {complaint}" in self.auto(sdk, tmp_path)

    def test_all_requirements_are_met(self, sdk: Path, tmp_path: Path) -> None:
        assert (
            self.auto(sdk, tmp_path) == "==> Backend: vulkan (Vulkan headers 1.4.309, glslc and a loader are installed)"
        )

    def test_the_cpu_on_request(self, sdk: Path, tmp_path: Path) -> None:
        assert self.auto(sdk, tmp_path, "--backend=cpu") == "==> Backend: cpu (as requested)"
