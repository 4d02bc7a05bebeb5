"""Where libraries are: built by build_llama.sh, in an installed package, or in a folder that the user names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

STAMP = "stamp.json"
"""In the folder of each library; see ``stamp``."""
DIRECTORY_VARIABLE = "UMA_LLAMA_DIR"
DEFAULT_DIRECTORY = Path(__file__).with_name("lib")
"""Where build_llama.sh installs the library."""
WHEEL = "uma_trio_llama"
"""The package that has a library which was built before, for machines without a compiler."""
PLUGINS = ("uma_trio_llama_cuda13", "uma_trio_llama_cuda12", "uma_trio_llama_vulkan")
"""Packages with a further backend for such a library, the best first."""


def folder_of_package(name: str) -> Path | None:
    """The folder ``lib`` of an installed package; ``None`` if it is not installed, or only an empty folder is left."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], "lib").resolve()


def plugin_folders() -> list[Path]:
    """The folders of the installed ``PLUGINS``."""
    return [folder for name in PLUGINS if (folder := folder_of_package(name)) is not None]


def library_directory(named: Path | None = None) -> Path:
    """Where the library is: the first of ``named``, ``$UMA_LLAMA_DIR``, what build_llama.sh has built, and the wheel.

    If there is none, this is where build_llama.sh would install it.
    """
    chosen = named or os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(os.path.realpath(chosen))  # resolve() refuses links that lead to themselves
    if (DEFAULT_DIRECTORY / STAMP).exists():
        return default_directory()
    return folder_of_package(WHEEL) or default_directory()


def is_checkout() -> bool:
    """Whether this package runs from a checkout, which can build a library."""
    return (DEFAULT_DIRECTORY.parents[1] / "build_llama.sh").exists()


def default_directory() -> Path:
    """``DEFAULT_DIRECTORY`` without links."""
    return DEFAULT_DIRECTORY.resolve()


def is_default(directory: Path) -> bool:
    """Whether ``directory``, which is resolved, is the one where build_llama.sh installs the library."""
    return directory == default_directory()
