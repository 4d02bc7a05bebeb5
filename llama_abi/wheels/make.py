"""Makes a wheel of a library that ``build_llama.sh --portable`` has built, for machines without a compiler.

    ./build_llama.sh --portable
    python llama_abi/wheels/make.py --out dist
    ./build_llama.sh --portable --backend vulkan
    python llama_abi/wheels/make.py --out dist --library build/portable-vulkan

``uma-trio-llama`` has libllama and its backends for the CPU (with Metal on a Mac). ``uma-trio-llama-vulkan``, ``-cuda12``
and ``-cuda13`` have one backend more, which is loaded next to it. The version is that of uma-trio, which refuses the
library of another version. Needs hatchling.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

sys.path.insert(0, str(Path(__file__).parents[2]))

from llama_abi.errors import LibraryError
from llama_abi.locations import WHEEL
from llama_abi.stamp import Stamp

ROOT = Path(__file__).parents[2]
MACOS = "13_0"
LLAMA_LICENSE = ROOT / "build" / "llama.cpp" / "LICENSE"
DATE_WITHOUT_COMMIT = "1577836800"
"""When files of the wheel were changed, in Unix seconds, if git knows no commit: the first of January 2020."""
FIRST_DATE, LAST_DATE = 315_532_800, 4_354_819_199
"""The first and the last Unix second that a zip file can say: from 1980 to 2107."""
CUDA_WHEELS = {
    "cuda12": ["nvidia-cublas-cu12>=12", "nvidia-cuda-runtime-cu12>=12"],
    "cuda13": ["nvidia-cublas>=13,<14", "nvidia-cuda-runtime>=13,<14"],
}
"""The libraries of CUDA that a plug-in links with, as NVIDIA publishes them."""

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
description = "{description}"
version = "{version}"
dependencies = {dependencies}
license = "MIT"
license-files = ["LICENSE*"]
requires-python = ">=3.11"
readme = "README.md"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
artifacts = ["*"]

[tool.hatch.build.targets.wheel.hooks.custom]
"""

HOOK = """
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = "{tag}"
"""

README = """# {name}

{description}, from [llama.cpp](https://github.com/ggml-org/llama.cpp) ({pin}). It is used by
`pip install 'uma-trio[{extra}]'` and has no Python interface of its own.
"""


def version() -> str:
    """The version of uma-trio."""
    return str(ProjectMetadata(str(ROOT), PluginManager()).version)


def tag(library: Path) -> str:
    """The wheel's tag: any Python 3, because no file is a Python extension, and the oldest glibc that all files run with."""
    if sys.platform == "darwin":
        return f"py3-none-macosx_{MACOS}_{platform.machine()}"
    needed = (int(minor) for minor in _matches(library, rb"\0GLIBC_2\.(\d+)"))
    return f"py3-none-manylinux_2_{max([28, *needed])}_{platform.machine()}"


def extra_of(library: Path, stamp: Stamp) -> str:
    """The extra of uma-trio that requires this wheel: ``llama``, ``vulkan``, ``cuda12`` or ``cuda13``."""
    if any(library.glob("libllama.*")):
        return "llama"
    return stamp.backend + max(_matches(library, rb"\0libcudart\.so\.(\d+)"), default=b"").decode()


def _matches(library: Path, pattern: bytes) -> set[bytes]:
    """What the group of ``pattern`` matches in the library's files, whose string tables name all that they link with."""
    return {match for path in library.glob("lib*") for match in re.findall(pattern, path.read_bytes())}


def make(library: Path, out: Path) -> Path:
    """Write the wheel of the library in ``library`` into ``out``.

    Raises:
        LibraryError: it is not a portable library, it does not match its stamp, or the licence of llama.cpp is missing.
        OSError: a file cannot be read or written.
    """
    stamp = Stamp.read(library)
    stamp.verify(library)
    if not LLAMA_LICENSE.is_file():
        raise LibraryError(
            f"there is no {LLAMA_LICENSE}, which belongs into the wheel", "run ./build_llama.sh --portable --clean"
        )
    if not stamp.has_plugins:
        raise LibraryError(f"the library in {library} is for this machine only", "run ./build_llama.sh --portable")
    extra = extra_of(library, stamp)
    package = WHEEL if extra == "llama" else f"{WHEEL}_{extra}"
    names = {
        "name": package.replace("_", "-"),
        "package": package,
        "extra": extra,
        "version": version(),
        "pin": stamp.pin,
        "tag": tag(library),
        "description": "libllama for uma-trio, built for all machines of one architecture",
        "dependencies": [],
    }
    if extra != "llama":
        names["description"] = f"The {stamp.backend} backend for uma-trio-llama"
        names["dependencies"] = [f"{WHEEL.replace('_', '-')}=={version()}", *CUDA_WHEELS.get(extra, [])]
    with tempfile.TemporaryDirectory(prefix="uma-wheel-") as folder:
        project = Path(folder)
        (project / "pyproject.toml").write_text(PROJECT.format(**names))
        (project / "hatch_build.py").write_text(HOOK.format(**names))
        (project / "README.md").write_text(README.format(**names))
        shutil.copy(ROOT / "LICENSE", project)
        shutil.copy(LLAMA_LICENSE, project / "LICENSE.llama.cpp")
        (project / package).mkdir()
        (project / package / "__init__.py").write_text(f'"""{names["description"]}."""\n')
        packed = project / package / "lib"
        shutil.copytree(library, packed)
        if Stamp.read(packed) != stamp:
            raise LibraryError(f"the library in {library} changed while it was packed", "run make.py again")
        stamp.verify(packed)
        os.environ.setdefault("SOURCE_DATE_EPOCH", _date_of_commit())
        [built] = WheelBuilder(folder).build(directory=str(out.resolve()))
    return Path(built)


def _date_of_commit() -> str:
    """The Unix second of the checkout's commit, so that two wheels of one commit are equal."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:  # it may stand in the checkout of another project
        return DATE_WITHOUT_COMMIT
    done = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or DATE_WITHOUT_COMMIT


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--library",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=ROOT / "build" / "portable",
    show_default="build/portable",
    help="Folder of the library.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "dist", show_default="dist", help="Folder of the wheel.")  # fmt: skip
def main(library: Path, out: Path) -> None:
    """Make the wheel of a portable library, or of a plug-in for one."""
    date = os.environ.get("SOURCE_DATE_EPOCH", DATE_WITHOUT_COMMIT)
    if not (date.isdecimal() and len(date) < 20 and FIRST_DATE <= int(date) <= LAST_DATE):
        raise click.ClickException(
            f"SOURCE_DATE_EPOCH is {date!r}: set it to seconds from {FIRST_DATE} to {LAST_DATE}, or unset it"
        )
    try:
        wheel = make(library.resolve(), out)
    except (LibraryError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
