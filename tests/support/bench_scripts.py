"""Scripts of ``benches/`` as modules.  They are in no package, and import each other from their own folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benches"


def bench_script(name: str) -> ModuleType:
    """The module of ``benches/NAME.py``."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
