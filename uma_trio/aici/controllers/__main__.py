"""Compile the controllers: ``python -m uma_trio.aici.controllers build``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

HERE: Final = Path(__file__).parent

CLANG_VERSION: Final = 14
"""The one of Debian 12.  Another one compiles too, but not to the same bytes."""
DEBIAN_PACKAGES: Final = "clang-14 lld-14 wasi-libc libclang-rt-14-dev-wasm32"

QUICKJS: Final = "quickjs-ng==0.17.0.2"
QUICKJS_SHA256: Final = "43d2e48272208721a7aaea8e3f02d4b9318f12ef20cc4f5421b59d9a470706ef"
"""SHA-256 of the source distribution on PyPI, which has QuickJS-ng 0.17.0."""

FLAGS: Final = (
    "--target=wasm32-wasi",
    "--sysroot=/usr",
    "-isystem",
    "/usr/include/wasm32-wasi",
    "-L/usr/lib/wasm32-wasi",
    "-O2",
    "-mexec-model=reactor",
    "-Wl,--strip-all",
)
OWN_FLAGS: Final = ("-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HERE}")
JSCTRL_FLAGS: Final = ("-Os",)
"""A third smaller than with -O2, and as fast in a step."""
QUICKJS_FLAGS: Final = ("-D_GNU_SOURCE", "-DNDEBUG", "-w")
QUICKJS_FILES: Final = ("quickjs.c", "dtoa.c", "libregexp.c", "libunicode.c")


class BuildError(Exception):
    """The controllers cannot be built here."""


@attrs.frozen
class Tools:
    """Programs of the compiler, as paths."""

    clang: str
    linker: str


def build(target: Path = HERE) -> list[Path]:
    """Compile all controllers into ``target``.  The same compiler always makes the same bytes.

    Raises:
        BuildError: a tool is missing, QuickJS cannot be downloaded, or the compiler refuses a source.
    """
    tools = find_tools()
    built = [_build_example(tools, name, target) for name in ("yesno", "uppercase")]
    with tempfile.TemporaryDirectory() as directory:
        source = _download_quickjs(Path(directory))
        built.append(_build_jsctrl(tools, source, Path(directory), target))
    for wasm in built:
        wasm.chmod(0o644)  # the linker makes it executable
    return built


def find_tools() -> Tools:
    """The compiler.

    Raises:
        BuildError: something is missing; the message names the packages.
    """
    clang = shutil.which(f"clang-{CLANG_VERSION}") or shutil.which("clang")
    linker = shutil.which(f"wasm-ld-{CLANG_VERSION}") or shutil.which("wasm-ld")
    missing = [
        name
        for name, is_there in (
            ("clang", clang),
            ("wasm-ld", linker),
            ("wasi-libc", Path("/usr/lib/wasm32-wasi/libc.a").exists()),
        )
        if not is_there
    ]
    if missing or clang is None or linker is None:
        raise BuildError(f"missing: {', '.join(missing)}. On Debian: apt-get install {DEBIAN_PACKAGES}")
    return Tools(clang, linker)


def _build_example(tools: Tools, name: str, target: Path) -> Path:
    wasm = target / f"{name}.wasm"
    _compile(tools, [*OWN_FLAGS, "-Wl,-z,stack-size=65536", f"{name}.c", "-o", str(wasm)], HERE)
    return wasm


def _build_jsctrl(tools: Tools, quickjs: Path, directory: Path, target: Path) -> Path:
    sdk = directory / "sdk.c"
    sdk.write_text(_as_c_array("jsctrl_sdk", (HERE / "jsctrl.js").read_bytes()), encoding="ascii")
    objects = []
    for file in QUICKJS_FILES:
        _compile(tools, [*JSCTRL_FLAGS, *QUICKJS_FLAGS, "-c", file, "-o", str(directory / f"{file}.o")], quickjs)
        objects.append(str(directory / f"{file}.o"))
    wasm = target / "jsctrl.wasm"
    # The runtime's stack for calls is 512 KiB; this is the other one, for what has an address.
    stack = "-Wl,-z,stack-size=524288"
    _compile(tools, [*JSCTRL_FLAGS, *OWN_FLAGS, f"-I{quickjs}", "-Wno-unused-parameter", "-Wno-sign-compare", stack, "jsctrl.c", str(sdk), *objects, "-lm", "-o", str(wasm)], HERE)  # fmt: skip
    return wasm


def _compile(tools: Tools, arguments: Sequence[str], directory: Path) -> None:
    command = [tools.clang, *FLAGS, *arguments]
    if "-c" not in arguments:
        command.append(f"-fuse-ld={tools.linker}")
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        text = done.stderr.strip()
        hint = f"\nOn Debian: apt-get install {DEBIAN_PACKAGES}" if "clang_rt" in text else ""
        raise BuildError(f"{' '.join(command)}\n{text}{hint}")


def _download_quickjs(directory: Path) -> Path:
    """The folder with QuickJS's C files."""
    pin = directory / "pin.txt"
    pin.write_text(f"{QUICKJS} --hash=sha256:{QUICKJS_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps", "--no-binary", "quickjs-ng", "--require-hashes", "-r", str(pin), "-d", str(directory)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    [archive] = directory.glob("quickjs_ng-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return next(directory.glob("quickjs_ng-*/upstream-quickjs"))


def _as_c_array(name: str, content: bytes) -> str:
    numbers = ",".join(map(str, [*content, 0]))
    return f"extern const char {name}[];\nconst char {name}[] = {{{numbers}}};\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m uma_trio.aici.controllers", description=__doc__)
    parser.add_argument("command", choices=["build"], help="compile the controllers, next to their sources")
    parser.parse_args()
    try:
        built = build()
    except BuildError as error:
        sys.exit(f"error: {error}")
    for wasm in built:
        print(f"{wasm.name}: {wasm.stat().st_size} bytes")


if __name__ == "__main__":
    main()
