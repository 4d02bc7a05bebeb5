"""Finds, verifies, loads and binds libllama, and libmtmd where pictures or sound are encoded.

The order matters: the stamp is verified before any code of the library runs, libstdc++ is loaded before libllama, and
the log callback is set before the backends log anything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from llama_abi.backends import Backends, OnOpen, load_backends
from llama_abi.errors import LibraryError, LlamaError
from llama_abi.functions import FUNCTIONS
from llama_abi.locations import is_checkout, is_default, library_directory
from llama_abi.logs import LogRouter
from llama_abi.mtmd_declarations import MTMD, MTMD_FUNCTIONS
from llama_abi.remedies import build_command, repair_command
from llama_abi.stamp import Stamp
from llama_abi.types import DEVICE_TYPE, C, ggml_log_callback

BACKTRACE_VARIABLE = "GGML_NO_BACKTRACE"

SPLIT_BUFFERS = b"ggml_backend_split_buffer_type"
"""What a backend offers that can split the rows of a matrix between devices."""

EXPECTED_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "type_k": 1,
    "no_perf": True,
    "swa_full": True,
}
"""Defaults of ``llama_context_params``, from its first field to its last booleans. A library with another struct layout
returns other numbers."""


class DeviceType(enum.Enum):
    """Kind of a device."""

    CPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_CPU"]
    GPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_GPU"]
    IGPU = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_IGPU"]
    ACCEL = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_ACCEL"]
    META = DEVICE_TYPE["GGML_BACKEND_DEVICE_TYPE_META"]


@attrs.frozen
class Device:
    """A compute device."""

    name: str
    description: str
    type: DeviceType
    memory_free: int
    """Free memory in bytes when ``Library.devices`` was called; 0 if the backend does not know."""
    memory_total: int
    """Memory in bytes."""
    buffer: str = ""
    """Name of its buffer type, as ``Buffer.place`` and ``Placement.overrides`` have it."""
    backend: str = ""
    """Name of its backend, such as ``CUDA`` or ``RPC``."""
    splits_rows: bool = False
    """Whether its backend has ``split_mode`` ``row``."""


class Library:
    """The loaded libllama. A process has one; ``load`` returns it.

    Args:
        on_open: see ``load``.

    ``c`` is the ctypes library with all declared functions bound. Only this package uses it.
    """

    def __init__(self, directory: Path, on_open: OnOpen) -> None:
        self.directory = directory
        """Directory that it was loaded from."""
        self.stamp = Stamp.read(directory)
        """Source, backend and options of the build."""
        if is_default(directory) and is_checkout() and not self.stamp.has_declarations(directory):
            # The checkout has been updated, or edited.
            from llama_abi.check import check_again

            self.stamp = check_again(directory, self.stamp)
        self.stamp.verify(directory)
        self.logs = LogRouter()
        self.c = _open(directory, on_open)
        if missing := C.bind(self.c, FUNCTIONS):
            raise LibraryError(
                f"the library lacks {', '.join(missing)}, so it is not the llama.cpp version of these declarations",
                repair_command(directory, self.stamp.backend, clean=True),
            )
        self._check_defaults()
        self.c.llama_log_set(self.logs.callback, None)
        atexit.register(self.silence_logging)
        self._mtmd: ctypes.CDLL | None = None
        self.plugins = Backends()
        """Backends that were chosen for this machine; none if they are linked in, or not loaded."""
        self._has_backends = False
        self.max_sequences = int(self.c.llama_max_parallel_sequences())
        """Most sequences in one context, a constant of the build."""
        self.max_devices = int(self.c.llama_max_devices())
        """Most devices of a model, a constant of the build."""

    def load_backends(self, on_open: OnOpen) -> None:
        """Load what models compute with, unless it is loaded."""
        if self._has_backends:
            return
        if self.stamp.has_plugins:
            self.plugins = load_backends(self.c, self.directory, on_open)
        self.c.llama_backend_init()
        self._has_backends = True

    @property
    def mtmd(self) -> ctypes.CDLL:
        """libmtmd with all declared functions bound; loaded when it is first asked for.

        Raises:
            LibraryError: the library was built without it.
        """
        if self._mtmd is None:
            remedy = repair_command(self.directory, self.stamp.backend, clean=True)
            if not self.stamp.mtmd_sha256:
                raise LibraryError(f"the library in {self.directory} was built without libmtmd", remedy)
            mtmd = _open_file(self.directory, "libmtmd")
            if missing := MTMD.bind(mtmd, MTMD_FUNCTIONS):
                raise LibraryError(f"libmtmd lacks {', '.join(missing)}", remedy)
            mtmd.mtmd_helper_log_set(self.logs.callback, None)
            self._mtmd = mtmd
        return self._mtmd

    def _check_defaults(self) -> None:
        params = self.c.llama_context_default_params()
        wrong = [
            f"{name} is {getattr(params, name)}, not {value}"
            for name, value in EXPECTED_DEFAULTS.items()
            if getattr(params, name) != value
        ]
        if wrong:
            raise LibraryError(
                f"the library in {self.directory} does not have the defaults of its header ({'; '.join(wrong)})",
                repair_command(self.directory, self.stamp.backend, clean=True),
            )

    @property
    def backend(self) -> str:
        """The backend in use: that of the best plug-in that was loaded, otherwise what this library was built for."""
        return self.plugins.backend or self.stamp.backend

    @property
    def system_info(self) -> str:
        """CPU features that the library was compiled with, as llama.cpp prints them."""
        return _text(self.c.llama_print_system_info())

    @property
    def supports_gpu_offload(self) -> bool:
        """Whether a GPU was found or the RPC backend is compiled in, which llama.cpp counts as a GPU.

        ``devices`` lists the GPUs of this machine.
        """
        return bool(self.c.llama_supports_gpu_offload())

    @property
    def supports_rpc(self) -> bool:
        """Whether the RPC backend is compiled in."""
        return bool(self.c.llama_supports_rpc())

    def devices(self) -> tuple[Device, ...]:
        """List the devices of all backends, with their free memory now."""
        devices = []
        for name, device in self._devices():
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self.c.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            backend = self.c.ggml_backend_dev_backend_reg(device)
            devices.append(
                Device(
                    name=name,
                    description=_text(self.c.ggml_backend_dev_description(device)),
                    type=DeviceType(self.c.ggml_backend_dev_type(device)),
                    memory_free=free.value,
                    memory_total=total.value,
                    buffer=_text(self.c.ggml_backend_buft_name(self.c.ggml_backend_dev_buffer_type(device))),
                    backend=_text(self.c.ggml_backend_reg_name(backend)),
                    splits_rows=bool(self.c.ggml_backend_reg_get_proc_address(backend, SPLIT_BUFFERS)),
                )
            )
        return tuple(devices)

    def _devices(self) -> Iterator[tuple[str, Any]]:
        for index in range(self.c.ggml_backend_dev_count()):
            device = self.c.ggml_backend_dev_get(index)
            yield _text(self.c.ggml_backend_dev_name(device)), device

    def device_pointer(self, name: str) -> Any:
        """The C object of a device.

        Raises:
            LlamaError: there is no device of that name.
        """
        devices = dict(self._devices())
        if name not in devices:
            raise LlamaError(f"there is no device {name}; there are {', '.join(devices)}")
        return devices[name]

    def buffer_type(self, name: str) -> Any:
        """The C object of the buffer type of a device, by its own name or by that of the device.

        Raises:
            LlamaError: there is no such buffer type.
        """
        types = {device: self.c.ggml_backend_dev_buffer_type(pointer) for device, pointer in self._devices()}
        types |= {_text(self.c.ggml_backend_buft_name(buffer_type)): buffer_type for buffer_type in types.values()}
        if name not in types:
            raise LlamaError(f"there is no buffer type {name}; there are {', '.join(types)}")
        return types[name]

    def add_rpc_server(self, endpoint: str) -> None:
        """Add the devices of an RPC server to those of this library. Adding it again does nothing.

        Blocks until the server answers. It serves one process at a time, and the next one waits. llama.cpp ends this
        process if nobody listens at ``endpoint``, and when a server that is in use goes away.

        Args:
            endpoint: ``HOST:PORT``.

        Raises:
            LlamaError: the library has no RPC backend, or the server has no devices.
        """
        backend = self.c.ggml_backend_reg_by_name(b"RPC")
        address = self.c.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
        add = ctypes.CFUNCTYPE(C.known["ggml_backend_reg_t"], ctypes.c_char_p)(address)
        server = add(endpoint.encode())
        if not server:
            raise LlamaError(f"the RPC server at {endpoint} has no devices")
        self.c.ggml_backend_register(server)

    def silence_logging(self) -> None:
        """Discard everything that llama.cpp logs from now on.

        Runs when the interpreter ends, because C must not call Python afterwards. Without any callback llama.cpp would
        write to stderr, so the callback becomes a C function that ignores its arguments.
        """
        silent = ctypes.cast(self.c.llama_supports_rpc, ggml_log_callback)
        self.c.llama_log_set(silent, None)
        if self._mtmd is not None:
            self._mtmd.mtmd_helper_log_set(silent, None)

    def __repr__(self) -> str:
        return f"<Library {self.stamp.pin} {self.stamp.backend} in {self.directory}>"


_loaded: Library | None = None
_loading = threading.Lock()


def load(directory: Path | None = None, *, backends: bool = True, on_open: OnOpen = lambda path: None) -> Library:
    """Load libllama, or return the loaded one.

    Sets ``GGML_NO_BACKTRACE=1`` unless the environment has it: otherwise an assertion in llama.cpp starts a debugger,
    which blocks the dying process for seconds and writes pages of stack frames to its terminal.

    Args:
        directory: where it is; by default see ``library_directory``.
        backends: load the backends too. Without them models have a vocabulary only.
        on_open: called with each file before its code runs, which may hang.

    Raises:
        LibraryError: there is no library, it does not match its stamp, it lacks symbols, or the process has loaded
            another one. The message names the remedy.
    """
    global _loaded
    place = library_directory(directory)
    with _loading:
        if _loaded is None:
            os.environ.setdefault(BACKTRACE_VARIABLE, "1")
            _loaded = Library(place, on_open)
        elif _loaded.directory != place:
            raise LibraryError(
                f"this process has loaded the library in {_loaded.directory} and cannot load the one in {place} too",
                "use another process",
            )
        if backends:
            _loaded.load_backends(on_open)
        return _loaded


def _open(directory: Path, on_open: OnOpen) -> ctypes.CDLL:
    if sys.platform != "darwin":
        # A CUDA build has libstdc++ symbols of its own. Unless the real ones are global already, libllama's streams
        # resolve to them, and loading a model crashes.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    return _open_file(directory, "libllama", on_open)


def _open_file(directory: Path, name: str, on_open: OnOpen = lambda path: None) -> ctypes.CDLL:
    path = directory / f"{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"
    on_open(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded ({error})", _remedy(str(error), directory)) from None


def _remedy(error: str, directory: Path) -> str:
    """What to do about an error of the dynamic linker."""
    missing = re.match(r"(lib\S+): cannot open shared object file", error)
    if missing is None or missing[1].startswith(("libllama", "libggml", "libmtmd")):
        return repair_command(directory, clean=True)
    if missing[1].startswith("libcuda.so"):
        return f"install the NVIDIA driver, in a container start it with access to the GPU, or {build_command('--backend cpu')}"
    return f"install the package that has {missing[1]}, or add its folder to LD_LIBRARY_PATH"


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
