"""Hold our declarations against llama.h, with the C compiler as the judge.

    python -m llama_abi.check llama_abi/lib/include
    python -m llama_abi.check llama_abi/lib/include --stamp cpu     # and stamp the library beside it

C accepts a second declaration of a function if and only if it agrees with the first, so the check
is ``#include "llama.h"`` followed by our own lines, plus assertions for struct sizes, for every
field's offset and type *by name*, and for every enum value.  Size alone would not do: two layouts
of equal size can disagree in every field.  Nothing is linked; it takes milliseconds.

What it cannot see is a library built from another commit than the header; see ``stamp``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from llama_abi.csource import source
from llama_abi.ctext import prototypes
from llama_abi.errors import LibraryError
from llama_abi.functions import FUNCTIONS
from llama_abi.stamp import STAMP, pin, write
from llama_abi.types import C


@attrs.frozen
class Verdict:
    """What the compiler said."""

    errors: tuple[str, ...]
    """One line for each declaration that disagrees with the header."""
    warnings: tuple[str, ...]
    """Functions in use that the header has marked as deprecated."""


def compiler() -> str:
    """The C compiler: ``$CC``, else the first of cc, gcc, clang on the PATH."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise LibraryError("no C compiler found: install gcc or clang, or set CC")


def check(headers: Path, table: str = FUNCTIONS) -> Verdict:
    """Compare every declaration with ``headers/llama.h``.

    Raises:
        LibraryError: there is no compiler, or no header.
    """
    if not (headers / "llama.h").is_file():
        raise LibraryError(f"there is no llama.h in {headers}; run ./build_llama.sh")
    command = [*compiler().split(), "-std=gnu11", "-fsyntax-only", "-x", "c", "-I", str(headers), "-"]
    done = subprocess.run(command, input=source(table), text=True, capture_output=True, check=False)
    errors = [line for line in done.stderr.splitlines() if re.search(r"\berror: ", line)]
    warnings = [line for line in done.stderr.splitlines() if re.search(r"\bwarning: ", line)]
    if done.returncode and not errors:
        errors = done.stderr.splitlines() or [f"{compiler()} failed with status {done.returncode}"]
    return Verdict(tuple(errors), tuple(warnings))


def main(arguments: list[str]) -> int:
    """0 when all agree, 1 when not or when it cannot say."""
    parser = argparse.ArgumentParser(
        prog="python -m llama_abi.check", description="Hold llama_abi's declarations against llama.h."
    )
    parser.add_argument("headers", type=Path, metavar="HEADER_DIR", help="holds llama.h and what it includes")
    parser.add_argument(
        "--stamp", metavar="BACKEND", help="when all agree, stamp the library in the folder above HEADER_DIR"
    )
    parser.add_argument("--source", default=pin(), help="for the stamp: what the library was built from")
    parser.add_argument("--option", action="append", default=[], help="for the stamp: an option of the build")
    chosen = parser.parse_args(arguments)
    library = chosen.headers.absolute().parent
    try:
        verdict = check(chosen.headers)
        for line in (*verdict.errors, *verdict.warnings):
            print(line, file=sys.stderr)
        if verdict.errors:
            (library / STAMP).unlink(missing_ok=True)
            raise LibraryError(
                f"{len(verdict.errors)} declarations in llama_abi/types.py and llama_abi/functions.py "
                "disagree with llama.h; edit the lines that the compiler names"
            )
        counts = f"{len(prototypes(FUNCTIONS))} functions, {len(C.structs)} structs, {len(C.enums)} enums"
        print(f"llama_abi agrees with {chosen.headers / 'llama.h'}: {counts}")
        if chosen.stamp:
            write(library, source=chosen.source, backend=chosen.stamp, options=tuple(chosen.option))
    except LibraryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
