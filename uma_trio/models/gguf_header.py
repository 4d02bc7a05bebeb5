"""Parser for the header of a GGUF file, which is untrusted input.

Every count, length, size and offset is checked against the bounds of the file before it is used. The parser takes no
memory and runs no loop for a number that the file itself could not hold.

Source: docs/gguf.md of ggml (versions 2 and 3), and the checks of llama.cpp's gguf.cpp.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import attrs

from uma_trio.errors import ErrorWithRemedy
from uma_trio.models.split import PART, part_name

DEFAULT_ALIGNMENT = 32
"""Bytes; also the smallest alignment that ggml's buffers accept."""
MAX_ALIGNMENT = 1 << 20
MAX_HEADER_BYTES = 128 << 20
"""The largest headers known, with 256k tokens and their merges, take about 20 MiB."""
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_TEXT_BYTES = 16 << 20
MAX_KEY_BYTES = 1 << 10
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4

_FIRST_READ = 1 << 20

_UINT8, _INT8, _UINT16, _UINT32, _FLOAT32, _STRING, _ARRAY = 0, 1, 2, 4, 6, 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Value types of fixed size, and their ``struct`` formats."""

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}  # fmt: skip
"""id: (name, weights per block, bytes per block), from enum ggml_type."""

Scalar = int | float | str


REMEDY = "get the file from another source, or convert the model again"
AGAIN = "download or copy it again"


class GgufError(ErrorWithRemedy):
    """The file must not be loaded. ``reason`` names the defect."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(reason, remedy)


def _damaged(defect: str) -> GgufError:
    return GgufError(f"{defect}: the file is damaged")


class _BeyondWindow(Exception):
    """The header continues after the part of the file that has been read so far."""


@attrs.frozen
class Tensor:
    """A tensor's entry in the header."""

    name: str
    shape: tuple[int, ...]
    """Dimensions, the row length first."""
    type: str
    """Name of its ggml type, such as ``Q8_0``."""
    n_bytes: int
    """Size of its data, without padding."""


@attrs.frozen
class _Array:
    kind: int
    count: int
    start: int
    """Offset of the first item."""


class GgufHeader:
    """The metadata and tensor entries of a well-formed header.

    Args:
        data: the beginning of the file.
        file_size: bytes.
        vocab_only: accept a file without tensors.

    Raises:
        GgufError: the header is damaged, or contradicts the size of the file.
        _BeyondWindow: ``data`` ends inside the header.
    """

    def __init__(self, data: bytes, file_size: int, *, vocab_only: bool) -> None:
        self._data = data
        self._at = 0
        self.size_bytes = file_size
        """Size of the file."""
        self.values: dict[str, Scalar] = {}
        """Metadata that are not arrays. Text is decoded with replacement characters."""
        self.tensors: list[Tensor] = []
        """Tensors in the order of the file."""
        self._kinds: dict[str, int] = {}
        self._arrays: dict[str, _Array] = {}
        self._check_version()
        n_tensors, n_kv = self._unpack("QQ", "the counts of tensors and of key-value pairs")
        # The smallest pair is a key of one byte and a value of one; the smallest tensor has one dimension.
        self._check_count(n_kv, MAX_PAIRS, 8 + 1 + 4 + 1, "key-value pairs")
        self._check_count(n_tensors, MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
        for _ in range(n_kv):
            self._read_pair()
        if n_tensors == 0 and not vocab_only and self.n_parts == 1:
            raise GgufError("it has no tensors: it is a vocabulary, and not a model", "give a whole model")
        self._read_tensors(n_tensors)

    @property
    def n_parts(self) -> int:
        """Files that the model consists of."""
        count = self.values.get("split.count")
        return count if isinstance(count, int) and count > 0 else 1

    def has(self, key: str) -> bool:
        """Whether the file has ``key``."""
        return key in self.values or key in self._arrays

    def is_float32(self, key: str) -> bool:
        """Whether the value of ``key`` is one 32-bit float; llama.cpp ends the process where it reads another type."""
        return self._kinds.get(key) == _FLOAT32

    def text(self, key: str) -> str:
        """The text value of ``key`` up to a NUL, as C reads it; ``""`` where the file has none."""
        value = self.values.get(key)
        return value.partition("\0")[0] if isinstance(value, str) else ""

    def count(self, key: str) -> int | None:
        """Number of items in the array ``key``; ``None`` where the file has no such array."""
        array = self._arrays.get(key)
        return None if array is None else array.count

    def numbers(self, key: str) -> tuple[int | float, ...]:
        """All numbers of ``key``, whether one value or an array; empty where the file has none."""
        value = self.values.get(key)
        if isinstance(value, int | float):
            return (value,)
        array = self._arrays.get(key)
        if array is None or array.kind == _STRING:
            return ()
        return struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", self._data, array.start)

    def octets(self, key: str) -> bytes:
        """The array of 8-bit integers ``key`` as bytes; empty where the file has none."""
        array = self._arrays.get(key)
        if array is None or array.kind not in (_UINT8, _INT8):
            return b""
        return bytes(self._data[array.start : array.start + array.count])

    def strings(self, key: str) -> list[bytes]:
        """Items of the array of strings ``key``; empty where the file has none."""
        array = self._arrays.get(key)
        if array is None or array.kind != _STRING:
            return []
        read, data, at, items = struct.Struct("<Q").unpack_from, self._data, array.start, []
        for _ in range(array.count):
            start = at + 8
            at = start + read(data, at)[0]
            items.append(data[start:at])
        return items

    def _check_version(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            if self._data.startswith(b"version https://git-lfs"):
                raise GgufError("it is a Git LFS pointer, not the model", "run git lfs pull")
            raise GgufError(
                f"it is not a GGUF file: it begins with {_shown(magic)}, not with GGUF" if magic else "it is empty",
                "give the path of a .gguf file",
            )
        self._at = 4
        (version,) = self._unpack("I", "the version")
        if version in (2 << 24, 3 << 24):
            raise GgufError("it is a big-endian GGUF and this machine is not", "get the little-endian one")
        if version not in (2, 3):
            raise GgufError(f"it is GGUF version {version}; only 2 and 3 are supported", "convert the model again")

    def _read_pair(self) -> None:
        key = self._read_string(MAX_KEY_BYTES, "a key")
        if not key or "\0" in key or key in self.values or key in self._arrays:
            raise _damaged(f"the key {key!r} is empty, duplicate, or contains a NUL")
        (kind,) = self._unpack("I", f"the type of {key}")
        if key == "general.alignment" and kind != _UINT32:
            raise _damaged("general.alignment is not a uint32")
        if key == "split.no" and kind != _UINT16:  # llama-model-loader.cpp reads it without a check
            raise _damaged("split.no is not a uint16")
        if kind == _ARRAY:
            self._read_array(key)
        elif kind == _STRING:
            self.values[key] = self._read_string(MAX_TEXT_BYTES, key)
        elif kind in _SCALARS:
            (self.values[key],) = self._unpack(_SCALARS[kind], key)
            self._kinds[key] = kind
        else:
            raise _damaged(f"the value of {key} has the type {kind}, which does not exist")

    def _read_array(self, key: str) -> None:
        kind, count = self._unpack("IQ", f"the array {key}")
        start = self._at
        if kind == _STRING:
            self._check_count(count, self.size_bytes, 8, f"strings in {key}")
            self._skip_strings(count, key)
        elif kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            self._check_count(count, self.size_bytes, size, f"values in {key}")
            self._skip(count * size, key)
        elif kind == _ARRAY:
            raise _damaged(f"{key} is an array of arrays, which llama.cpp does not support")
        else:
            raise _damaged(f"the array {key} has items of the type {kind}, which does not exist")
        self._arrays[key] = _Array(kind, count, start)

    def _read_tensors(self, n_tensors: int) -> None:
        alignment = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int)
        if not DEFAULT_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _damaged(
                f"its alignment {alignment} is not a power of two from {DEFAULT_ALIGNMENT} to {MAX_ALIGNMENT}"
            )
        names: set[str] = set()
        expected = end = 0
        for _ in range(n_tensors):
            tensor, offset = self._read_tensor()
            name = tensor.name
            if name in names:
                raise _damaged(f"the tensor {name} is duplicate")
            names.add(name)
            self.tensors.append(tensor)
            if offset % alignment:
                raise _damaged(f"the data of {name} at {offset} is not aligned to {alignment} bytes")
            if offset != expected:
                wrong = "overlaps the tensor before it" if offset < expected else "leaves a gap before it"
                raise _damaged(f"the data of {name} at {offset} {wrong}: it belongs at {expected}")
            end = offset + tensor.n_bytes
            expected = _aligned(end, alignment)
        available = self.size_bytes - _aligned(self._at, alignment)
        if n_tensors and end > available:
            raise GgufError(
                f"its tensors need {end} bytes and the file has {max(available, 0)}: it was cut off",
                AGAIN,
            )

    def _read_tensor(self) -> tuple[Tensor, int]:
        """Read the entry of the next tensor, with the offset of its data in bytes."""
        name = self._read_string(MAX_TENSOR_NAME_BYTES, "a tensor's name")
        (n_dimensions,) = self._unpack("I", f"the number of dimensions of {name}")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise _damaged(f"the tensor {name} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = self._unpack(f"{n_dimensions}Q", f"the dimensions of {name}")
        kind, offset = self._unpack("IQ", f"type and offset of {name}")
        if kind not in TENSOR_TYPES:
            raise _damaged(f"the tensor {name} has the type {kind}, unknown to the llama.cpp this is built with")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if shape[0] % block:
            raise _damaged(f"the tensor {name} has rows of {shape[0]}, no multiple of {type_name}'s {block}")
        n_blocks = shape[0] // block
        for dimension in shape[1:]:
            n_blocks *= dimension  # Python's integers do not overflow
        if n_blocks == 0:
            raise _damaged(f"the tensor {name} has a dimension of 0")
        size = n_blocks * block_bytes
        if size > self.size_bytes:
            raise GgufError(
                f"the tensor {name} takes {size} bytes and the whole file has {self.size_bytes}: "
                "it was cut off or is damaged",
                AGAIN,
            )
        return Tensor(name, shape, type_name, size), offset

    # The end of the window is the end of the file, or a reason to read more of it.

    def _unpack(self, layout: str, what: str) -> tuple[int, ...]:
        start = self._at
        self._skip(struct.calcsize("<" + layout), what)
        return struct.unpack_from("<" + layout, self._data, start)

    def _skip(self, size: int, what: str) -> None:
        self._at += size
        if self._at > len(self._data):
            self._beyond(what)

    def _beyond(self, what: str) -> None:
        if self._at > self.size_bytes:
            raise GgufError(f"it ends inside {what}: it was cut off", AGAIN)
        raise _BeyondWindow

    def _check_count(self, count: int, limit: int, least_bytes: int, what: str) -> None:
        if count > limit or count * least_bytes > self.size_bytes - self._at:
            raise _damaged(f"it claims {count} {what}, more than it has room for")

    def _read_string(self, limit: int, what: str) -> str:
        (length,) = self._unpack("Q", f"the length of {what}")
        if length > limit:
            raise _damaged(f"{what} has {length} bytes, more than {limit}")
        self._skip(length, what)
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _skip_strings(self, count: int, key: str) -> None:
        # Vocabularies have hundreds of thousands of strings: this loop does as little as possible.
        read, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            at += 8  # the end of a length that is not completely in the window
        self._at = at
        if at > len(data):
            self._beyond(key)


def read_header(path: Path, *, vocab_only: bool = False) -> GgufHeader:
    """Parse the header of ``path``.

    Reads at most ``MAX_HEADER_BYTES``, whatever the size of the file.

    Raises:
        GgufError: the file is not a GGUF, is damaged, or is built to do harm.
        OSError: the file cannot be opened or read.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # opening a pipe would block
        raise GgufError("it is not a regular file", "give the path of a .gguf file")
    with path.open("rb") as file:
        window = _FIRST_READ
        data = file.read(window)
        while True:
            try:
                return GgufHeader(data, status.st_size, vocab_only=vocab_only)
            except _BeyondWindow:
                if window >= MAX_HEADER_BYTES:
                    limit = MAX_HEADER_BYTES >> 20
                    raise _damaged(f"its header is larger than {limit} MiB, which no model needs") from None
                window = min(window * 8, MAX_HEADER_BYTES)
                file.seek(0, os.SEEK_SET)
                data = file.read(window)
                if len(data) < min(window, status.st_size):
                    raise GgufError("it became shorter while it was read", "copy it again") from None


def _shown(magic: bytes) -> str:
    """The first bytes of a file: as text if they are printable ASCII, otherwise in hexadecimal digits."""
    text = magic.decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() and text else f"the bytes {magic.hex(' ')}"


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def parts_of(path: Path, count: int) -> list[Path]:
    """The paths of all parts of a model, of which ``path`` is the first.

    Args:
        count: parts that the header of ``path`` claims.

    Raises:
        GgufError: the name is not that of the first part, or a part is missing.
    """
    if count == 1:
        return [path]
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        expected = part_name("NAME", 1, count)
        raise GgufError(f"it is one of {count} parts, and its name does not end as {expected}", "give it its old name")
    if int(match["number"]) != 1:
        raise GgufError(
            f"it is part {int(match['number'])} of {count}", f"give the first one: {part_name(match['stem'], 1, count)}"
        )
    parts = [path.with_name(part_name(match["stem"], number, count)) for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise GgufError(f"{len(missing)} of its {count} parts are missing, the first one {missing[0]}", AGAIN)
    return parts
