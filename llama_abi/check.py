"""Checks the declarations of this package against llama.h and mtmd-helper.h with the C compiler.

    python -m llama_abi.check llama_abi/lib/include
    python -m llama_abi.check llama_abi/lib/include --stamp cpu     # and stamp the library next to it

C accepts a second declaration of a function only if it agrees with the first one. So the check compiles
``#include "llama.h"``, followed by every declaration and by assertions for struct sizes, enum values, and the offset
and type of every field. Sizes alone are not enough: two layouts of equal size can differ in every field. Nothing is
linked, and the check takes milliseconds.

It cannot detect a library that was built from another commit than the header; the stamp does that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from llama_abi.check_source import check_source, mtmd_check_source
from llama_abi.declarations import prototypes
from llama_abi.errors import LibraryError
from llama_abi.functions import FUNCTIONS
from llama_abi.locations import STAMP
from llama_abi.mtmd_declarations import MTMD, MTMD_FUNCTIONS
from llama_abi.remedies import build_command
from llama_abi.stamp import MTMD_HEADER, Stamp, pin, write
from llama_abi.types import C


@attrs.frozen
class CheckResult:
    """The compiler's findings."""

    errors: tuple[str, ...]
    """One line for each declaration that differs from the header."""
    warnings: tuple[str, ...]
    """Declared functions that the header marks as deprecated."""


def find_compiler() -> str:
    """Find the C compiler: ``$CC``, or the first of cc, gcc and clang on the PATH."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise LibraryError("no C compiler found", "install gcc or clang, or set CC")


def check(headers: Path, table: str = FUNCTIONS) -> CheckResult:
    """Check every declaration against ``headers/llama.h``.

    Raises:
        LibraryError: there is no compiler or no header.
    """
    if not (headers / "llama.h").is_file():
        raise LibraryError(f"there is no llama.h in {headers}", build_command())
    return _compile(check_source(table), headers)


def check_mtmd(headers: Path) -> CheckResult:
    """Check the declarations of libmtmd against ``headers/mtmd-helper.h``, if it is there."""
    if not (headers / MTMD_HEADER).is_file():
        return CheckResult((), ())
    return _compile(mtmd_check_source(), headers)


def _compile(source: str, headers: Path) -> CheckResult:
    command = [*find_compiler().split(), "-std=gnu11", "-x", "c", "-I", str(headers), "-c", "-"]
    with tempfile.TemporaryDirectory(prefix="uma-check-") as folder:  # Zig's compiler has no -fsyntax-only
        command += ["-o", f"{folder}/check.o"]
        done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    errors = [line for line in done.stderr.splitlines() if re.search(r"\berror: ", line)]
    warnings = [line for line in done.stderr.splitlines() if re.search(r"\bwarning: ", line)]
    if done.returncode and not errors:
        errors = done.stderr.splitlines() or [f"{find_compiler()} failed with status {done.returncode}"]
    return CheckResult(tuple(errors), tuple(warnings))


def _check_all(headers: Path) -> LibraryError | None:
    """Print what the compiler says; returns what is wrong if declarations differ.

    Raises:
        LibraryError: there is no compiler or no header.
    """
    results = (check(headers), check_mtmd(headers))
    for line in (line for result in results for line in (*result.errors, *result.warnings)):
        print(line, file=sys.stderr)
    if errors := [error for result in results for error in result.errors]:
        return LibraryError(
            f"{len(errors)} declarations in llama_abi/types.py, functions.py and mtmd_declarations.py "
            "differ from the headers",
            "edit the lines that the compiler names",
        )
    return None


def check_again(library: Path, stamp: Stamp) -> Stamp:
    """Check declarations that have changed since ``library`` was stamped, and stamp it again.

    Raises:
        LibraryError: there is no compiler, or declarations differ.
    """
    if wrong := _check_all(library / "include"):
        raise wrong
    return write(library, source=stamp.pin, backend=stamp.backend, options=tuple(stamp.options))


def main(arguments: list[str]) -> int:
    """Run the check. Returns 0 if all declarations agree, and 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m llama_abi.check", description="Check the declarations of llama_abi against llama.h."
    )
    parser.add_argument(
        "headers", type=Path, metavar="HEADER_DIR", help="directory of llama.h and the headers that it includes"
    )
    parser.add_argument(
        "--stamp", metavar="BACKEND", help="if all agree, stamp the library in the parent of HEADER_DIR"
    )
    parser.add_argument("--source", default=pin(), help="for the stamp: version of the source")
    parser.add_argument(
        "--option", action="append", default=[], help="for the stamp: a CMake option of the build; may be repeated"
    )
    chosen = parser.parse_args(arguments)
    library = chosen.headers.absolute().parent
    try:
        if wrong := _check_all(chosen.headers):
            (library / STAMP).unlink(missing_ok=True)
            raise wrong
        n_functions = len(prototypes(FUNCTIONS + MTMD_FUNCTIONS))
        counts = f"{n_functions} functions, {len(C.structs | MTMD.structs)} structs, {len(C.enums | MTMD.enums)} enums"
        print(f"llama_abi agrees with the headers in {chosen.headers}: {counts}")
        if chosen.stamp:
            write(library, source=chosen.source, backend=chosen.stamp, options=tuple(chosen.option))
    except LibraryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
