"""A side channel of a runtime in memory, with the rules of a real one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from uma_trio.aici.messages import Auth, ModuleInfo, TagInfo
from uma_trio.errors import BadRequest, ControllerNotFound


class MemoryLibrary:
    """Keeps modules and tags."""

    def __init__(self) -> None:
        self.modules: dict[str, bytes] = {}
        self.tags: dict[str, TagInfo] = {}

    async def make_module(self, wasm: bytes, auth: Auth) -> ModuleInfo:
        if not wasm.startswith(b"\0asm"):
            raise BadRequest("this is no Wasm module: it does not begin with \\0asm")
        module_id = hashlib.sha256(wasm).hexdigest()
        self.modules[module_id] = wasm
        return ModuleInfo(module_id=module_id, wasm_size=len(wasm), compiled_size=2 * len(wasm), time=7)

    async def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth) -> list[TagInfo]:
        if module_id not in self.modules:
            raise ControllerNotFound(f"there is no module {module_id}")
        if not auth.is_admin and not all(tag.rpartition(".")[0] == auth.user for tag in tags):
            raise BadRequest("permission denied for tag name")
        size = len(self.modules[module_id])
        found = [TagInfo(tag, module_id, 1767225600, auth.user, size, 2 * size) for tag in tags]
        self.tags |= {info.tag: info for info in found}
        return found

    async def get_tags(self, auth: Auth) -> list[TagInfo]:
        return [*reversed(self.tags.values())]
