"""GGUF files with large vocabularies, read and written at once.

The classes of ``gguf`` handle each token by itself, which takes seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np

LENGTH = struct.Struct("<Q")
ARRAY, STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING


class Reader(gguf.GGUFReader):
    """A ``GGUFReader`` whose arrays are one part, or one part for each string.  For files in little-endian order."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count, at = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64), orig_offs + 12
        types = [ARRAY, gguf.GGUFValueType(kind[0])]
        if types[1] != STRING:
            numbers = self._get(at, self.gguf_scalar_to_np[types[1]], count[0])
            return 12 + numbers.nbytes, [kind, count, numbers], [2], types
        raw, parts = memoryview(self.data), [kind, count]  # type: ignore[arg-type]
        for _ in range(int(count[0])):
            start = at + LENGTH.size
            at = start + LENGTH.unpack_from(raw, at)[0]
            parts.append(raw[start:at])
        return at - orig_offs, parts, list(range(2, len(parts))), types


class Writer(gguf.GGUFWriter):
    """A ``GGUFWriter`` that packs an array whose type it knows at once."""

    def _pack_val(
        self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, sub_type: gguf.GGUFValueType | None = None
    ) -> bytes:
        if vtype != ARRAY or sub_type is None:
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        head = struct.pack("<IIQ", vtype, sub_type, len(val))
        return head + (_strings(val) if sub_type == STRING else self._numbers(val, sub_type))

    def _numbers(self, val: Sequence[float], kind: gguf.GGUFValueType) -> bytes:
        return struct.pack(f"<{len(val)}{self._simple_value_packing[kind]}", *val)


def _strings(val: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in val]
    return b"".join(part for text in encoded for part in (LENGTH.pack(len(text)), text))


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, prefix: str = "", **changed: Any) -> None:
    """Copy the metadata whose names begin with ``prefix``, but for the architecture, which a writer is made with.

    Args:
        changed: other values of some of them.
    """
    for name, field in reader.fields.items():
        if name.startswith(prefix) and not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
            value = changed[name] if name in changed else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)


def write_to_end(writer: gguf.GGUFWriter) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
