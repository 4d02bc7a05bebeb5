"""Loads the backends of a library that has them as plug-ins, as those of wheels are.

One wheel serves every machine of its architecture: it has the CPU backend in several variants, each of which scores
itself on the CPU that it meets (``ggml_backend_score`` in ggml-backend-impl.h). Backends of GPUs come in wheels of
their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from llama_abi.errors import LibraryError
from llama_abi.locations import plugin_folders
from llama_abi.remedies import build_command
from llama_abi.stamp import Stamp

NO_BACKENDS = ("libggml", "libggml-base")

OnOpen = Callable[[Path], object]
"""Gets each file before its code runs, which may hang: for example, while a driver does."""


@attrs.frozen
class Backends:
    """Which plug-ins this process uses."""

    used: tuple[str, ...] = ()
    """Names of the loaded files."""
    unused: tuple[str, ...] = ()
    """Backends of other packages that do not load on this machine, with the reason."""
    backend: str = ""
    """What the best of the loaded ones from other packages was built for; empty without one."""


def load_backends(c: ctypes.CDLL, directory: Path, on_open: OnOpen = lambda path: None) -> Backends:
    """Load the best variant of each backend in ``directory``, and those of the other packages.

    GPUs come first, as llama.cpp wants it.

    Raises:
        LibraryError: no variant of the CPU backend runs on this CPU, or a plug-in is of another version.
    """
    stamps = {folder: Stamp.read(folder) for folder in plugin_folders()}
    for folder, stamp in stamps.items():
        stamp.verify(folder)
    used, unused, backend = [], [], ""
    for variants in (*_backends(stamps), *_backends([directory])):
        scores = {}
        for path in variants:
            on_open(path)
            scores[path] = _score(path)
        best = max(variants, key=lambda path: scores[path].value)
        on_open(best)
        if scores[best].value > 0 and c.ggml_backend_load(str(best).encode()):
            used.append(best.name)
            if best.parent in stamps:
                backend = backend or stamps[best.parent].backend
        elif best.parent != directory:
            unused.append(f"{best.name}: {scores[best].problem or 'it found no device'}")
    if not any(name.startswith("libggml-cpu") for name in used):
        raise LibraryError(
            f"no variant of the CPU backend in {directory} runs on this CPU",
            f"build the library on this machine: {build_command()}",
        )
    return Backends(tuple(used), tuple(unused), backend)


def _backends(folders: Iterable[Path]) -> Iterable[list[Path]]:
    """The files of each backend: one, or one for each variant."""
    backends: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("libggml*.so")):
            if path.stem not in NO_BACKENDS:
                backends.setdefault(path.stem.split("-")[1], []).append(path)
    return backends.values()


@attrs.frozen
class _Score:
    value: int
    """How well a plug-in suits this machine; 0 if it does not run here. One without a score has 1."""
    problem: str = ""
    """Why it cannot be loaded, such as a library that is missing."""


def _score(path: Path) -> _Score:
    """Opens the file and leaves it open: the destructors of a closed one would run at the process's end even so."""
    try:
        return _Score(int(ctypes.CDLL(str(path)).ggml_backend_score()))
    except OSError as error:
        return _Score(0, str(error))
    except AttributeError:
        return _Score(1)
