"""The controllers that come with uma-trio.  They are in memory, and need no file but those of the package."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from uma_trio.aici.runtime.interface import CannotCompile
from uma_trio.aici.runtime.store_files import DIGEST_BYTES, load_or_compile
from uma_trio.aici_link.messages import TagInfo

if TYPE_CHECKING:  # the store needs no engine
    from uma_trio.aici.runtime.host import Module, WasmHost

log = logging.getLogger(__name__)

BY: Final = "uma-trio"
"""Who has set the tags of these controllers."""


@attrs.define(eq=False)
class _Shipped:
    name: str
    wasm: bytes
    compiled_size: int = 0
    module: Module | None = None
    """Loaded when it is first needed."""
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while it is compiled."""
    failures: int = 0


class ShippedModules:
    """Controllers by name and by id.  Thread-safe.

    Args:
        modules: name -> Wasm.
        folder: keeps machine code, so that the next process need not compile.  If it cannot be used, each process compiles.
    """

    def __init__(self, modules: Mapping[str, bytes], host: WasmHost, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._of_id = {hashlib.sha256(wasm).hexdigest(): _Shipped(name, wasm) for name, wasm in modules.items()}
        self._id_of = {shipped.name: module_id for module_id, shipped in self._of_id.items()}
        for module_id, shipped in self._of_id.items():
            with contextlib.suppress(OSError):
                shipped.compiled_size = max(0, self._path(module_id).stat().st_size - DIGEST_BYTES)

    def has(self, module_id: str) -> bool:
        """Whether a module comes with uma-trio."""
        return module_id in self._of_id

    def id_of(self, name: str) -> str | None:
        """The id of the controller with a name."""
        return self._id_of.get(name)

    def sizes(self, module_id: str) -> tuple[int, int]:
        """Bytes of the module and of its machine code; 0 if it was never compiled."""
        shipped = self._of_id[module_id]
        return len(shipped.wasm), shipped.compiled_size

    def compiled_size(self, module_id: str) -> int:
        """Bytes of the machine code."""
        return self._of_id[module_id].compiled_size

    def tags(self) -> list[TagInfo]:
        """The names of all."""
        return [
            TagInfo(shipped.name, id, 0, BY, len(shipped.wasm), shipped.compiled_size)
            for id, shipped in self._of_id.items()
        ]

    def open(self, module_id: str) -> Module:
        """A controller, compiled when it is first needed, and again if that failed.

        Raises:
            CannotCompile, BadModule, OSError: see ``WasmHost.compile``.
        """
        shipped = self._of_id[module_id]
        failures = shipped.failures
        with shipped.lock:
            if shipped.module is None:
                if shipped.failures > failures:  # an attempt failed while this caller waited: one is enough
                    raise CannotCompile(f"{shipped.name} could not be compiled; try again")
                try:
                    shipped.module = self._load(module_id, shipped)
                except BaseException:
                    shipped.failures += 1
                    raise
            return shipped.module

    def _load(self, module_id: str, shipped: _Shipped) -> Module:
        def compiled() -> bytes:
            code = self._host.compile(shipped.wasm, is_ours=True)
            shipped.compiled_size = len(code)
            with contextlib.suppress(OSError):  # then the code cannot be kept either, and the log says so
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for old in self._folder.iterdir():
                    if old.suffix == ".elf" and old.stem not in self._of_id:
                        old.unlink()
            return code

        return load_or_compile(self._path(module_id), shipped.name, self._host, compiled)

    def _path(self, module_id: str) -> Path:
        return self._folder / f"{module_id}.elf"
