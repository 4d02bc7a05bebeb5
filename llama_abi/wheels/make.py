"""Makes a wheel of a library that ``build_llama.sh --portable`` has built, for machines without a compiler.

    ./build_llama.sh --portable
    python llama_abi/wheels/make.py --out dist

``uma-trio-llama`` has libllama and its backends for the CPU (with Metal on a Mac). The version is that of uma-trio, which
refuses the library of another version. Needs hatchling.
"""

from __future__ import annotations

import os
import platform
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
from llama_abi.stamp import WHEEL, Stamp

ROOT = Path(__file__).parents[2]
GLIBC = "2_28"
"""What build_llama.sh links with."""
MACOS = "13_0"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
description = "libllama for uma-trio, built for all machines of one architecture"
version = "{version}"
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

The library of [llama.cpp](https://github.com/ggml-org/llama.cpp) ({pin}) that uma-trio {version} loads. It is used by
`pip install 'uma-trio[llama]'` and has no Python interface of its own.
"""


def version() -> str:
    """The version of uma-trio."""
    return str(ProjectMetadata(str(ROOT), PluginManager()).version)


def tag() -> str:
    """The wheel's tag: it has no Python extension, so it serves every Python."""
    if sys.platform == "darwin":
        return f"py3-none-macosx_{MACOS}_{platform.machine()}"
    return f"py3-none-manylinux_{GLIBC}_{platform.machine()}"


def make(library: Path, out: Path) -> Path:
    """Write the wheel of the library in ``library`` into ``out``.

    Raises:
        LibraryError: it is not a portable library, or it does not match its stamp.
    """
    stamp = Stamp.read(library)
    stamp.verify(library)
    if not stamp.has_plugins:
        raise LibraryError(f"the library in {library} is for this machine only", "run ./build_llama.sh --portable")
    with tempfile.TemporaryDirectory(prefix="uma-wheel-") as folder:
        project = Path(folder)
        names = {
            "name": WHEEL.replace("_", "-"),
            "package": WHEEL,
            "version": version(),
            "pin": stamp.pin,
            "tag": tag(),
        }
        (project / "pyproject.toml").write_text(PROJECT.format(**names))
        (project / "hatch_build.py").write_text(HOOK.format(**names))
        (project / "README.md").write_text(README.format(**names))
        shutil.copy(ROOT / "LICENSE", project)
        shutil.copy(ROOT / "build" / "llama.cpp" / "LICENSE", project / "LICENSE.llama.cpp")
        package = project / WHEEL
        package.mkdir()
        (package / "__init__.py").write_text('"""The library of llama.cpp that uma-trio loads."""\n')
        shutil.copytree(library, package / "lib")
        os.environ.setdefault("SOURCE_DATE_EPOCH", _date_of_commit())
        [built] = WheelBuilder(folder).build(directory=str(out.resolve()))
    return Path(built)


def _date_of_commit() -> str:
    """When the checkout's commit was made: two wheels of it have the same times."""
    done = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "1577836800"


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
    """Make the wheel uma-trio-llama from a portable library."""
    try:
        wheel = make(library.resolve(), out)
    except LibraryError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
