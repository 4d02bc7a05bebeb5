"""Find, verify, load and bind libllama.

The order matters: the stamp is read before any code of the library runs, libstdc++ is loaded
before libllama, and the log callback is set before the backends start to talk.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import os
import sys
import threading
from pathlib import Path

import attrs

from llama_abi.errors import LibraryError
from llama_abi.functions import FUNCTIONS
from llama_abi.logs import LogRouter
from llama_abi.stamp import DEFAULT_DIRECTORY, Stamp, fix
from llama_abi.types import DEVICE_TYPE, C, ggml_log_callback

DIRECTORY_VARIABLE = "UMA_LLAMA_DIR"

CANARY = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "type_k": 1,
    "no_perf": True,
    "swa_full": True,
}
"""Defaults of ``llama_context_params``, from its first field to its last booleans.  A library whose
struct is laid out otherwise answers with other numbers here, before anything depends on it."""


class DeviceType(enum.Enum):
    """What llama.cpp says a device is."""

    CPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_CPU"]
    GPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_GPU"]
    IGPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_IGPU"]
    ACCEL = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_ACCEL"]
    META = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_META"]


@attrs.frozen
class Device:
    """Something that computes."""

    name: str
    description: str
    type: DeviceType
    memory_free: int
    """Bytes, at the moment of asking; 0 where the backend does not know."""
    memory_total: int
    """Bytes."""


class Library:
    """A loaded libllama.  One process has one; ``load`` gives it out.

    ``c`` is the ctypes library with every declared function bound; only this package uses it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where it was loaded from."""
        self.stamp = Stamp.read(directory)
        """What it was built from."""
        self.stamp.verify(directory)
        self.logs = LogRouter()
        self.c = _open(directory)
        C.bind(self.c, FUNCTIONS)
        self._sing()
        self.c.llama_log_set(self.logs.callback, None)
        atexit.register(self.close_logging)
        self.c.llama_backend_init()
        self.max_sequences = int(self.c.llama_max_parallel_sequences())
        """Most sequences that one context can have; compiled in."""

    def _sing(self) -> None:
        params = self.c.llama_context_default_params()
        wrong = [
            f"{name} is {getattr(params, name)} and not {value}"
            for name, value in CANARY.items()
            if getattr(params, name) != value
        ]
        if wrong:
            raise LibraryError(
                f"the library in {self.directory} has other defaults than its header promises "
                f"({'; '.join(wrong)}): {fix(self.directory, self.stamp.backend)} --clean"
            )

    @property
    def system_info(self) -> str:
        """What the CPU backend was compiled with, in llama.cpp's words."""
        return _text(self.c.llama_print_system_info())

    @property
    def supports_gpu_offload(self) -> bool:
        """A GPU was found, or the RPC backend is compiled in: llama.cpp counts that as one.

        Whether there is a GPU here, ``devices`` tells.
        """
        return bool(self.c.llama_supports_gpu_offload())

    @property
    def supports_rpc(self) -> bool:
        """The RPC backend is compiled in."""
        return bool(self.c.llama_supports_rpc())

    def devices(self) -> tuple[Device, ...]:
        """All devices that the backends have found, in their order; asks for memory each time."""
        found = []
        for index in range(self.c.ggml_backend_dev_count()):
            device = self.c.ggml_backend_dev_get(index)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self.c.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            found.append(
                Device(
                    name=_text(self.c.ggml_backend_dev_name(device)),
                    description=_text(self.c.ggml_backend_dev_description(device)),
                    type=DeviceType(self.c.ggml_backend_dev_type(device)),
                    memory_free=free.value,
                    memory_total=total.value,
                )
            )
        return tuple(found)

    def close_logging(self) -> None:
        """Stop calling Python from C's log; nothing that llama.cpp says is seen afterwards.

        Called by itself when the interpreter ends.  Unsetting the callback would send every later
        line to stderr, so a C function stands in that takes no notice of its arguments.
        """
        silent = ctypes.cast(self.c.llama_supports_rpc, ggml_log_callback)
        self.c.llama_log_set(silent, None)

    def __repr__(self) -> str:
        return f"<Library {self.stamp.pin} {self.stamp.backend} in {self.directory}>"


_loaded: Library | None = None
_loading = threading.Lock()


def load(directory: Path | None = None) -> Library:
    """The library in ``directory``, else in ``$UMA_LLAMA_DIR``, else beside this package.

    Loads once and gives the same object from then on.

    Raises:
        LibraryError: none is there, its stamp does not hold, it lacks symbols, or another one is
            loaded in this process already.  The message names the fix.
    """
    global _loaded
    named = directory or os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY
    place = Path(named).resolve()
    with _loading:
        if _loaded is None:
            _loaded = Library(place)
        elif _loaded.directory != place:
            raise LibraryError(
                f"this process has loaded the library in {_loaded.directory} and cannot take the one in "
                f"{place} too: use another process"
            )
        return _loaded


def _open(directory: Path) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    if sys.platform != "darwin":
        # A CUDA build carries libstdc++ symbols of its own.  Unless the real ones are global
        # already, libllama's streams resolve into them, and loading a model crashes.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    path = directory / f"libllama.{suffix}"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} does not load ({error}): {fix(directory)} --clean") from None


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
