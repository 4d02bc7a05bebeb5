"""Reads and writes the binary format of modules.

A module must be valid; nothing here checks it.  Source: https://webassembly.github.io/spec/core/binary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

TYPE, IMPORT, FUNCTION, TABLE, MEMORY, GLOBAL, EXPORT, START, ELEMENT, CODE, DATA, DATA_COUNT = range(1, 13)
CUSTOM: Final = 0
ORDER: Final = (
    *(TYPE, IMPORT, FUNCTION, TABLE, MEMORY, GLOBAL),
    *(EXPORT, START, ELEMENT, DATA_COUNT, CODE, DATA),
)
"""Sections, as they follow one another."""

IS_FUNCTION, IS_TABLE, IS_MEMORY, IS_GLOBAL = range(4)
"""Kinds of imports and exports."""

I32, V128 = 0x7F, 0x7B
FUNCTION_TYPE: Final = 0x60

HEADER_BYTES: Final = 8
PAGE_BYTES: Final = 64 << 10
"""Unit of a memory's size."""
MAX_NAMES_BYTES: Final = 1 << 20
"""Names of functions are only shown in errors; a larger section of them is left out."""


class NotReadable(ValueError):
    """The module has something that this version does not know."""


class Vector:
    """A vector of the format: the number of its entries, then the entries."""

    def __init__(self, section: bytes | None) -> None:
        self.count, start = (0, 0) if section is None else decode(section, 0)
        self._entries = [] if section is None else [section[start:]]

    @classmethod
    def of(cls, entries: list[bytes]) -> Vector:
        vector = cls(None)
        vector.count, vector._entries = len(entries), entries
        return vector

    def append(self, entry: bytes) -> None:
        self.count += 1
        self._entries.append(entry)

    def split(self, find_end: Callable[[bytes, int], int]) -> Iterator[bytes]:
        """The entries, one by one.  ``find_end`` gets the bytes and where an entry begins, and says where it ends."""
        section = b"".join(self._entries)
        position = 0
        for _ in range(self.count):
            end = find_end(section, position)
            yield section[position:end]
            position = end

    def to_bytes(self) -> bytes:
        return encode(self.count) + b"".join(self._entries)


def sections(wasm: bytes) -> dict[int, bytes]:
    """Sections by number; of the custom ones only the names of functions.

    Raises:
        NotReadable: an unknown section.
    """
    sections_read = {}
    position = HEADER_BYTES
    while position < len(wasm):
        number = wasm[position]
        size, start = decode(wasm, position + 1)
        position = start + size
        if number == CUSTOM:
            if size <= MAX_NAMES_BYTES and wasm.startswith(b"\4name", start):
                sections_read[number] = wasm[start:position]
        elif number in ORDER:
            sections_read[number] = wasm[start:position]
        else:
            raise NotReadable(f"section {number} is not supported")
    return sections_read


# -- where an entry ends --------------------------------------------------------------------------


def sized_end(section: bytes, position: int) -> int:
    size, start = decode(section, position)
    return start + size


def number_end(section: bytes, position: int) -> int:
    return decode(section, position)[1]


def type_end(section: bytes, position: int) -> int:
    """
    Raises:
        NotReadable: it is not the type of a function.
    """
    if section[position] != FUNCTION_TYPE:
        raise NotReadable("a type that is not that of a function is not supported")
    return sized_end(section, sized_end(section, position + 1))  # a type of a value is a byte


def import_end(section: bytes, position: int) -> int:
    """
    Raises:
        NotReadable: it is not a function.
    """
    module, position = name(section, position)
    field, position = name(section, position)
    if section[position] != IS_FUNCTION:
        raise NotReadable(f"it imports {module}.{field}, which is not a function")
    return number_end(section, position + 1)


def limits_end(section: bytes, position: int) -> int:
    has_maximum = section[position] & 1
    position = number_end(section, position + 1)
    return number_end(section, position) if has_maximum else position


def export_end(section: bytes, position: int) -> int:
    return number_end(section, name(section, position)[1] + 1)


# -- parts of entries -----------------------------------------------------------------------------


def name(section: bytes, position: int) -> tuple[str, int]:
    """A name, and where it ends."""
    size, start = decode(section, position)
    return section[start : start + size].decode("utf-8", "replace"), start + size


def export(called: str, kind: int, index: int) -> bytes:
    """An entry of the exports."""
    data = called.encode()
    return encode(len(data)) + data + bytes([kind]) + encode(index)


def decode(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned LEB128 number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def encode(value: int) -> bytes:
    """An unsigned LEB128 number."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
