"""Other Python processes that run this package, and never what stands in the current folder.

Python itself looks there first for ``python -m`` and ``python -c``. A folder of downloads may have a ``uma_trio`` or a
``uma_trio_llama`` of a stranger.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import uma_trio

PYTHON: Final = (sys.executable, "-P")
"""The interpreter, without the current folder."""

ROOT: Final = Path(uma_trio.__file__).resolve().parents[1]
"""The folder that has this package."""


def python_module(module: str) -> list[str]:
    """The command that runs a module of this package. It needs ``package_environment``."""
    return [*PYTHON, "-m", module]


def package_environment() -> dict[str, str]:
    """Variables with which another interpreter finds this package."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def leave_out_current_folder() -> None:
    """Forget the current folder, which ``python -m uma_trio`` has put first, unless this package is in it."""
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ROOT:
        del sys.path[0]
