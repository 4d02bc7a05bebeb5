"""``python -m uma_trio.aici.controllers build``."""

from __future__ import annotations

import argparse
import sys

from uma_trio.aici.controllers.build import BuildError, build


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
