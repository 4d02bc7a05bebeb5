"""Loads the backends of a library that has them as plug-ins, as those of wheels are.

One wheel serves every machine of its architecture: it has the CPU backend in several variants, each of which scores
itself on the CPU that it meets (``ggml_backend_score`` in ggml-backend-impl.h). Backends of GPUs come in wheels of
their own.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
from collections.abc import Iterable
from pathlib import Path

from llama_abi.errors import LibraryError
from llama_abi.stamp import folder_of_package

PLUGINS = ("uma_trio_llama_cuda13", "uma_trio_llama_cuda12", "uma_trio_llama_vulkan")
"""Packages with a further backend, the best first."""
NO_BACKENDS = ("libggml", "libggml-base")


def load_backends(c: ctypes.CDLL, directory: Path) -> tuple[str, ...]:
    """Load the best variant of each backend in ``directory``, and those of ``PLUGINS``.

    GPUs come first, as llama.cpp wants it.

    Returns:
        Names of the loaded files.

    Raises:
        LibraryError: no variant of the CPU backend runs on this CPU.
    """
    plugins = [folder for name in PLUGINS if (folder := folder_of_package(name)) is not None]
    loaded = []
    for variants in (*_backends(plugins), *_backends([directory])):
        best = max(variants, key=_score)
        if _score(best) > 0 and c.ggml_backend_load(str(best).encode()):
            loaded.append(best.name)
    if not any(name.startswith("libggml-cpu") for name in loaded):
        raise LibraryError(
            f"no variant of the CPU backend in {directory} runs on this CPU",
            "build the library on this machine: run ./build_llama.sh in a checkout",
        )
    return tuple(loaded)


def _backends(folders: Iterable[Path]) -> Iterable[list[Path]]:
    """The files of each backend: one, or one for each variant."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("libggml*.so")):
            if path.stem not in NO_BACKENDS:
                found.setdefault(path.stem.split("-")[1], []).append(path)
    return found.values()


def _score(path: Path) -> int:
    """How well a plug-in suits this machine; 0 if it does not run here. One without a score has 1."""
    with contextlib.suppress(OSError):
        plugin = ctypes.CDLL(str(path))
        try:
            return int(plugin.ggml_backend_score())
        except AttributeError:
            return 1
        finally:
            _ctypes.dlclose(plugin._handle)
    return 0
