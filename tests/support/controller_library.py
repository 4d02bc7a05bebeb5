"""The side channel of a runtime without its process: the real store of modules, and a compiler that compiles nothing."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from uma_trio.aici.runtime.interface import BadModule
from uma_trio.aici.runtime.module_space import Space
from uma_trio.aici.runtime.module_store import ModuleStore, StoreError
from uma_trio.aici_link.messages import Auth, ModuleInfo, ModuleRecord, Removal, RemoveModule, TagInfo
from uma_trio.daemon.aici.link import NO_MODULE
from uma_trio.errors import ControllerFailed, ControllerNotFound

T = TypeVar("T")


class NoWasmHost:
    """Machine code is twice the module."""

    def compile(self, wasm: bytes, *, is_ours: bool = False) -> bytes:
        if not wasm.startswith(b"\0asm"):
            raise BadModule("this is no Wasm module: it does not begin with \\0asm")
        return bytes(wasm) * 2

    def load(self, compiled: bytes) -> bytes:
        return compiled

    def instantiate(self, module: Any, argument: str, variables: Any) -> Any: ...
    def close(self) -> None: ...


class MemoryLibrary:
    """Keeps modules and tags in a folder that is removed with it."""

    def __init__(self, shipped: Mapping[str, bytes] | None = None) -> None:
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder)
        self.store = ModuleStore(folder, NoWasmHost(), Space(1 << 30, 1 << 28), shipped or {})

    async def make_module(self, wasm: bytes, auth: Auth) -> ModuleInfo:
        return _do(lambda: self.store.add(wasm, auth))

    async def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth) -> list[TagInfo]:
        return _do(lambda: self.store.set_tags(module_id, tags, auth))

    async def get_tags(self, auth: Auth) -> list[TagInfo]:
        return _do(lambda: self.store.tags(auth))

    async def get_modules(self, owner: str | None, auth: Auth) -> list[ModuleRecord]:
        return _do(lambda: self.store.modules(auth, owner))

    async def remove(self, removal: Removal, auth: Auth) -> list[str]:
        if isinstance(removal, RemoveModule):
            return _do(lambda: self.store.remove_module(removal.module_id, auth, removal.owner))
        return _do(lambda: self.store.remove_tags(removal.tags, auth, removal.owner))


def _do(act: Callable[[], T]) -> T:
    try:
        return act()
    except (StoreError, BadModule) as error:
        kind = ControllerNotFound if NO_MODULE.match(str(error)) else ControllerFailed
        raise kind(str(error)) from None
