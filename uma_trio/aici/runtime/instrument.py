"""Changes a module before it is compiled, so that the host can do with its instances what the format does not offer.

| change | for |
|---|---|
| mutable globals are exported | a fork copies them |
| the start function is exported instead of run | a fork is an instance that must not start again |
| ``memory.grow`` traps where it would fail | a controller out of memory has a clear error |
| a module that changes its tables is marked | a fork cannot copy what is in them |

The module must be valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from uma_trio.aici.runtime import binary
from uma_trio.aici.runtime.binary import NotReadable, Vector, decode, encode

PREFIX: Final = "uma_trio."
"""Begins the names of added exports.  A module that exports such a name itself is refused."""
START: Final = PREFIX + "start"
OUT_OF_MEMORY: Final = PREFIX + "out_of_memory"
"""A global: 1 after ``memory.grow`` has trapped."""
NOT_COPIED: Final = PREFIX + "not_copied"
"""A global of a module whose instances have state that a fork cannot copy."""
GLOBAL: Final = PREFIX + "global."
"""Begins the names of mutable globals."""

MAX_MUTABLE_GLOBALS: Final = 256
_END = 0x0B
_GROW_TYPE: Final = bytes([0x60, 1, binary.I32, 1, binary.I32])

_NUMBER: Final = rb"[\x80-\xff]*[\x00-\x7f]"
_MEMARG: Final = _NUMBER + _NUMBER
_PLAIN: Final = re.compile(
    rb"(?s:"
    rb"[\x00\x01\x05\x0b\x0f\x1a\x1b\x45-\xc4]"
    rb"|[\x02-\x04\x0c\x0d\x10\x20-\x24\x3f\x41\x42]"
    + _NUMBER
    + rb"|[\x11\x28-\x3e]"
    + _MEMARG
    + rb"|\x43.{4}|\x44.{8}"
    rb"|\xfc(?:[\x00-\x07]|[\x08\x0a]" + _MEMARG + rb"|[\x09\x0b\x0d]" + _NUMBER + rb")"
    rb"|\xfd(?:[\x00-\x0b\x5c\x5d]" + _MEMARG + rb"|[\x0c\x0d].{16}|[\x15-\x22].|[\x54-\x5b]" + _MEMARG + rb"."
    rb"|[\x0e-\x14\x23-\x53\x5e-\x7f]|[\x80-\xff][\x01\x02])"
    rb")*+"
)
"""Instructions that stay as they are; br_table is the only other one."""
_BR_TABLE, _MEMORY_GROW = 0x0E, 0x40
_CHANGES_TABLE: Final = re.compile(rb"\xfc[\x0c\x0e]" + _MEMARG)
"""table.init, table.copy"""
_PERHAPS_UNUSUAL: Final = re.compile(rb"\x40\x00|\xfc[\x0c\x0e\x80-\xff]")
_CONSTANT: Final = re.compile(
    rb"(?s:[\x23\x41\x42]" + _NUMBER + rb"|\x43.{4}|\x44.{8}|\xfd\x0c.{16}|[\x6a-\x6c\x7c-\x7e])*+\x0b"
)
"""The expression with which a global begins."""


def instrument(wasm: bytes) -> bytes:
    """The module with the changes above, without custom sections but for the names of functions.

    Blocks for about 10 ms per MB.

    Raises:
        NotReadable: it has something that this version does not know.
    """
    sections = binary.sections(wasm)
    exports = Vector(sections.get(binary.EXPORT))
    if any(binary.name(entry, 0)[0].startswith(PREFIX) for entry in exports.split(binary.export_end)):
        raise NotReadable(f"names of exports that begin with {PREFIX} are taken")
    types, functions = Vector(sections.get(binary.TYPE)), Vector(sections.get(binary.FUNCTION))
    imports, globals_ = Vector(sections.get(binary.IMPORT)), Vector(sections.get(binary.GLOBAL))
    grow_function = sum(1 for _ in imports.split(binary.import_end)) + functions.count
    bodies, n_grow, changes_table = _new_bodies(Vector(sections.get(binary.CODE)), grow_function)
    mutable, has_vector = _mutable_globals(globals_)
    if len(mutable) > MAX_MUTABLE_GLOBALS:
        raise NotReadable(f"it has {len(mutable)} mutable globals; at most {MAX_MUTABLE_GLOBALS} are supported")
    for index in mutable:
        exports.append(binary.export(GLOBAL + str(index), binary.IS_GLOBAL, index))
    if has_vector or changes_table:
        exports.append(binary.export(NOT_COPIED, binary.IS_GLOBAL, globals_.count))
        globals_.append(bytes([binary.I32, 0, 0x41, 0, _END]))
    if n_grow:
        flag = globals_.count
        exports.append(binary.export(OUT_OF_MEMORY, binary.IS_GLOBAL, flag))
        globals_.append(bytes([binary.I32, 1, 0x41, 0, _END]))
        functions.append(encode(types.count))
        types.append(_GROW_TYPE)
        bodies.append(_grow_or_trap(flag))
    if binary.START in sections:
        index, _ = decode(sections.pop(binary.START), 0)
        exports.append(binary.export(START, binary.IS_FUNCTION, index))
    changed = {
        binary.TYPE: types,
        binary.FUNCTION: functions,
        binary.GLOBAL: globals_,
        binary.EXPORT: exports,
        binary.CODE: bodies,
    }
    sections.update({number: vector.to_bytes() for number, vector in changed.items() if vector.count})
    return wasm[:8] + b"".join(
        bytes([number]) + encode(len(sections[number])) + sections[number]
        for number in (*binary.ORDER, binary.CUSTOM)
        if number in sections
    )


def _grow_or_trap(flag: int) -> bytes:
    """Body of a function that grows the memory by its argument, or sets the global ``flag`` and traps."""
    code = bytes([1, 1, binary.I32])  # one local
    code += bytes([0x20, 0, 0x40, 0, 0x22, 1])  # local.get 0, memory.grow, local.tee 1
    code += bytes([0x41, 0x7F, 0x46, 0x04, 0x40])  # i32.const -1, i32.eq, if
    code += bytes([0x41, 1, 0x24]) + encode(flag) + bytes([0x00, 0x0B])  # i32.const 1, global.set, unreachable, end
    code += bytes([0x20, 1, 0x0B])  # local.get 1, end
    return encode(len(code)) + code


def _new_bodies(code: Vector, grow_function: int) -> tuple[Vector, int, bool]:
    """The functions, calling ``grow_function`` instead of ``memory.grow``; how many do; whether tables are changed."""
    bodies, n_grow, changes_table = [], 0, False
    call = b"\x10" + encode(grow_function)
    for entry in code.split(binary.sized_end):
        if _PERHAPS_UNUSUAL.search(entry) is None:
            bodies.append(entry)
            continue
        position = decode(entry, 0)[1]
        done, parts = position, []
        for start, end in _unusual(entry, _after_locals(entry, position)):
            if entry[start] == _MEMORY_GROW:
                parts += [entry[done:start], call]
                done = end
                n_grow += 1
            else:
                changes_table = True
        body = b"".join([*parts, entry[done:]])
        bodies.append(encode(len(body)) + body)
    return Vector.of(bodies), n_grow, changes_table


def _unusual(body: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Where instructions are that change the memory's size or a table.  ``position``: of the first instruction."""
    while True:
        position = _PLAIN.match(body, position).end()  # type: ignore[union-attr]  # it matches nothing, too
        if position == len(body):
            return
        if body[position] == _BR_TABLE:
            n_targets, position = decode(body, position + 1)
            for _ in range(n_targets + 1):
                position = decode(body, position)[1]
        elif body[position] == _MEMORY_GROW:
            yield position, position + 2
            position += 2
        elif (change := _CHANGES_TABLE.match(body, position)) is not None:
            yield position, change.end()
            position = change.end()
        else:
            raise NotReadable(f"instruction {body[position : position + 2].hex(' ')} is not supported")


def _after_locals(body: bytes, position: int) -> int:
    n_groups, position = decode(body, position)
    for _ in range(n_groups):
        position = decode(body, position)[1] + 1
    return position


def _mutable_globals(globals_: Vector) -> tuple[list[int], bool]:
    """Indices of those that can be copied, and whether there are others."""
    copied, has_vector = [], False
    for index, entry in enumerate(globals_.split(_global_end)):
        if entry[1] and entry[0] == binary.V128:
            has_vector = True
        elif entry[1]:
            copied.append(index)
    return copied, has_vector


def _global_end(section: bytes, position: int) -> int:
    matched = _CONSTANT.match(section, position + 2)
    if matched is None:
        raise NotReadable("a global begins with an expression that is not supported")
    return matched.end()
