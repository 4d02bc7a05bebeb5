"""Checks what a module imports and exports, before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from uma_trio.aici.runtime import binary
from uma_trio.aici.runtime.binary import Vector
from uma_trio.aici.runtime.interface import BadModule
from uma_trio.aici.runtime.memory import PAGE_BYTES
from uma_trio.aici.runtime.signatures import EXPORTS, IMPORTS, OPTIONAL_EXPORTS, Signature

MAX_EXPORTS: Final = 4096

_LETTERS: Final = {0x7F: "i", 0x7E: "I", 0x7D: "f", 0x7C: "F"}
_OTHER: Final = "?"
_NAMES: Final = {"i": "i32", "I": "i64"}

_Exports: TypeAlias = Mapping[str, tuple[int, int]]
"""Kind and index by name."""


def check_interface(wasm: bytes, max_memory_bytes: int) -> None:
    """Raises ``BadModule`` unless a valid module can be a controller, ``NotReadable`` if it has something unknown."""
    sections = binary.sections(wasm)
    types = [_signature(each) for each in Vector(sections.get(binary.TYPE)).split(binary.type_end)]
    imported = [*Vector(sections.get(binary.IMPORT)).split(binary.import_end)]
    functions = [_check_import(each, types) for each in imported]
    own = Vector(sections.get(binary.FUNCTION)).split(binary.number_end)
    functions += [types[binary.decode(each, 0)[0]] for each in own]
    memories = [*Vector(sections.get(binary.MEMORY)).split(binary.limits_end)]
    exports = dict(_export(each) for each in Vector(sections.get(binary.EXPORT)).split(binary.export_end))
    if len(exports) > MAX_EXPORTS:
        raise BadModule(f"the module exports {len(exports)} things; at most {MAX_EXPORTS}")
    missing = [name for name in ("memory", *EXPORTS) if name not in exports]
    if missing:
        raise BadModule(f"the module does not export {', '.join(missing)}")
    _check_memory(exports, memories, max_memory_bytes)
    for name, signature in {**EXPORTS, **OPTIONAL_EXPORTS}.items():
        if name not in exports:
            continue
        kind, index = exports[name]
        if kind != binary.IS_FUNCTION or functions[index] != signature:
            raise BadModule(f"the module exports {name} with another type than {_spelled(signature)}")


def _check_import(entry: bytes, types: list[Signature]) -> Signature:
    module, position = binary.name(entry, 0)
    field, position = binary.name(entry, position)
    name = f"{module}.{field}"
    offered = IMPORTS.get(module, {}).get(field)
    if offered is None:
        raise BadModule(f"the module imports {name:.200}, which a controller cannot have")
    if types[binary.decode(entry, position + 1)[0]] != offered:
        raise BadModule(f"the module imports {name} with another type than {_spelled(offered)}")
    return offered


def _check_memory(exports: _Exports, memories: list[bytes], max_memory_bytes: int) -> None:
    kind, index = exports["memory"]
    if kind != binary.IS_MEMORY:
        raise BadModule("the module's export memory is not a memory")
    n_bytes = binary.decode(memories[index], 1)[0] * PAGE_BYTES
    if n_bytes > max_memory_bytes:
        raise BadModule(f"the module begins with {n_bytes >> 20} MiB of memory; at most {max_memory_bytes >> 20}")


def _export(entry: bytes) -> tuple[str, tuple[int, int]]:
    name, position = binary.name(entry, 0)
    return name, (entry[position], binary.decode(entry, position + 1)[0])


def _signature(entry: bytes) -> Signature:
    middle = binary.sized_end(entry, 1)
    return _letters(entry, 1), _letters(entry, middle)


def _letters(entry: bytes, position: int) -> str:
    size, start = binary.decode(entry, position)
    return "".join(_LETTERS.get(each, _OTHER) for each in entry[start : start + size])


def _spelled(signature: Signature) -> str:
    parameters, results = (", ".join(_NAMES[each] for each in part) for part in signature)
    return f"({parameters}) -> ({results})"
