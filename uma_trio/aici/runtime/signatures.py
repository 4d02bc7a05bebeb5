"""What a module may import, and what it must export; checks both before the module is compiled.

Types as letters: ``i`` for i32, ``I`` for i64.  A signature has those of the parameters and that of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from uma_trio.aici.runtime import binary
from uma_trio.aici.runtime.binary import Vector
from uma_trio.aici.runtime.interface import BadModule

Signature: TypeAlias = tuple[str, str]

MAX_EXPORTS: Final = 4096

_LETTERS: Final = {0x7F: "i", 0x7E: "I", 0x7D: "f", 0x7C: "F"}
_OTHER: Final = "?"
_NAMES: Final = {"i": "i32", "I": "i64"}

_Exports: TypeAlias = Mapping[str, tuple[int, int]]
"""Kind and index by name."""

ENV: Final = "env"
WASI: Final = "wasi_snapshot_preview1"
CONSTRAINT: Final = "uma_trio_constraint"
"""Constraints of the engine; not a part of AICI."""

IMPORTS: Final[Mapping[str, Mapping[str, Signature]]] = {
    ENV: {
        "aici_host_read_blob": ("iii", "i"),
        "aici_host_module_arg": ("", "i"),
        "aici_host_process_arg": ("", "i"),
        "aici_host_token_trie": ("", "i"),
        "aici_host_tokens": ("", "i"),
        "aici_host_tokenize": ("ii", "i"),
        "aici_host_return_logit_bias": ("i", ""),
        "aici_host_return_process_result": ("ii", ""),
        "aici_host_storage_cmd": ("ii", "i"),
        "aici_host_self_seq_id": ("", "i"),
        "aici_host_eos_token": ("", "i"),
        "aici_host_stop": ("", ""),
    },
    WASI: {
        "args_get": ("ii", "i"),
        "args_sizes_get": ("ii", "i"),
        "clock_time_get": ("iIi", "i"),
        "environ_get": ("ii", "i"),
        "environ_sizes_get": ("ii", "i"),
        "fd_close": ("i", "i"),
        "fd_fdstat_get": ("ii", "i"),
        "fd_filestat_get": ("ii", "i"),
        "fd_filestat_set_size": ("iI", "i"),
        "fd_prestat_dir_name": ("iii", "i"),
        "fd_prestat_get": ("ii", "i"),
        "fd_read": ("iiii", "i"),
        "fd_readdir": ("iiiIi", "i"),
        "fd_seek": ("iIii", "i"),
        "fd_sync": ("i", "i"),
        "fd_write": ("iiii", "i"),
        "path_create_directory": ("iii", "i"),
        "path_filestat_get": ("iiiii", "i"),
        "path_filestat_set_times": ("iiiiIIi", "i"),
        "path_link": ("iiiiiii", "i"),
        "path_open": ("iiiiiIIii", "i"),
        "path_readlink": ("iiiiii", "i"),
        "path_remove_directory": ("iii", "i"),
        "path_rename": ("iiiiii", "i"),
        "path_unlink_file": ("iii", "i"),
        "poll_oneoff": ("iiii", "i"),
        "proc_exit": ("i", ""),
        "random_get": ("ii", "i"),
        "sched_yield": ("", "i"),
    },
    CONSTRAINT: {
        "constraint_new": ("ii", "i"),
        "constraint_mask": ("i", "i"),
        "constraint_allowed_one": ("i", "i"),
        "constraint_advance": ("iii", "i"),
        "constraint_can_end": ("i", "i"),
        "constraint_is_done": ("i", "i"),
        "constraint_drop": ("i", ""),
    },
}

EXPORTS: Final[Mapping[str, Signature]] = {
    "aici_init": ("", ""),
    "aici_create": ("", "i"),
    "aici_init_prompt": ("i", ""),
    "aici_pre_process": ("i", ""),
    "aici_mid_process": ("i", ""),
    "aici_post_process": ("i", ""),
}
"""Functions that a module must export, next to ``memory``."""

OPTIONAL_EXPORTS: Final[Mapping[str, Signature]] = {"aici_panic": ("", "")}
"""Functions that a module may leave out.  What it exports under these names must be such a function."""


def check_interface(wasm: bytes, max_memory_bytes: int) -> None:
    """Raises ``BadModule`` unless a valid module can be a controller, ``NotReadable`` if it has something unknown."""
    sections = binary.sections(wasm)
    types = [_signature(entry) for entry in Vector(sections.get(binary.TYPE)).split(binary.type_end)]
    imported = [*Vector(sections.get(binary.IMPORT)).split(binary.import_end)]
    functions = [_check_import(entry, types) for entry in imported]  # Wasm numbers them first
    own = Vector(sections.get(binary.FUNCTION)).split(binary.number_end)
    functions += [types[binary.decode(number, 0)[0]] for number in own]
    memories = [*Vector(sections.get(binary.MEMORY)).split(binary.limits_end)]
    exports = dict(_export(entry) for entry in Vector(sections.get(binary.EXPORT)).split(binary.export_end))
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
            raise BadModule(f"the module exports {name} with another type than {_signature_text(signature)}")


def _check_import(entry: bytes, types: list[Signature]) -> Signature:
    module, position = binary.name(entry, 0)
    field, position = binary.name(entry, position)
    name = f"{module}.{field}"
    offered = IMPORTS.get(module, {}).get(field)
    if offered is None:
        raise BadModule(f"the module imports {name:.200}, which a controller cannot have")
    if types[binary.decode(entry, position + 1)[0]] != offered:
        raise BadModule(f"the module imports {name} with another type than {_signature_text(offered)}")
    return offered


def _check_memory(exports: _Exports, memories: list[bytes], max_memory_bytes: int) -> None:
    kind, index = exports["memory"]
    if kind != binary.IS_MEMORY:
        raise BadModule("the module's export memory is not a memory")
    n_bytes = binary.decode(memories[index], 1)[0] * binary.PAGE_BYTES
    if n_bytes > max_memory_bytes:
        raise BadModule(f"the module begins with {n_bytes >> 20} MiB of memory; at most {max_memory_bytes >> 20}")


def _export(entry: bytes) -> tuple[str, tuple[int, int]]:
    name, position = binary.name(entry, 0)
    return name, (entry[position], binary.decode(entry, position + 1)[0])


def _signature(entry: bytes) -> Signature:
    parameters = 1  # after the byte that says that this is a function
    results = binary.sized_end(entry, parameters)
    return _letters(entry, parameters), _letters(entry, results)


def _letters(entry: bytes, position: int) -> str:
    size, start = binary.decode(entry, position)
    return "".join(_LETTERS.get(letter, _OTHER) for letter in entry[start : start + size])


def _signature_text(signature: Signature) -> str:
    parameters, results = (", ".join(_NAMES[letter] for letter in part) for part in signature)
    return f"({parameters}) -> ({results})"
