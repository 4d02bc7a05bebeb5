"""Is this file a GGUF that may be shown to llama.cpp?

A model file comes from anywhere, and llama.cpp parses it in C inside our process.  So every count,
length, size and offset of the header is checked here first, against the bounds of the file and
against each other.  Nothing is believed: no memory is taken and no loop run for a number that the
file itself could not hold.

Source: docs/gguf.md of ggml (versions 2 and 3), and the checks of llama.cpp's gguf.cpp.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import attrs

DEFAULT_ALIGNMENT = 32
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

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Value types of fixed size, and how to read them."""
_UNSIGNED = (0, 2, 4, 10)

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
"""id: (name, weights a block, bytes a block), of enum ggml_type."""


class GgufError(ValueError):
    """The file must not be loaded.  The message says what is wrong with it and what to do."""


class _BeyondWindow(Exception):
    """The header goes on behind what has been read of the file so far."""


@attrs.frozen(kw_only=True)
class GgufSummary:
    """What the header says, as far as anybody needs it before the model is loaded."""

    version: int
    architecture: str
    """``""`` if the file does not say."""
    name: str
    """``""`` if the file does not say."""
    n_tensors: int
    n_kv: int
    size_bytes: int
    """Of the file."""
    context_length: int | None
    """Tokens of context that the model was trained for."""
    n_vocab: int | None
    """Entries of ``tokenizer.ggml.tokens``."""
    split_count: int
    """Files that the model consists of; 1 if it is this one alone."""


def check_gguf(path: str | os.PathLike[str], *, vocab_only: bool = False) -> GgufSummary:
    """Read the header of a GGUF and hold all that it says against the file.

    Args:
        path: a regular file.
        vocab_only: whether a file without tensors will do.

    Raises:
        GgufError: it is none, it is damaged, or it is built to do harm.
        OSError: it cannot be opened or read.

    Reads ``MAX_HEADER_BYTES`` at most, whatever the file's size.
    """
    path = Path(path)
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # to open a pipe is to wait
        raise GgufError(f"{path} is not a regular file; give the path of a .gguf file")
    with path.open("rb") as file:
        window = _FIRST_READ
        data = file.read(window)
        while True:
            try:
                return _Header(data, status.st_size, vocab_only).summary()
            except _BeyondWindow:
                if window >= MAX_HEADER_BYTES:
                    raise GgufError(
                        f"{path}: its header is larger than {MAX_HEADER_BYTES >> 20} MiB, which no model needs"
                    ) from None
                window = min(window * 8, MAX_HEADER_BYTES)
                file.seek(0)
                data = file.read(window)
                if len(data) < min(window, status.st_size):
                    raise GgufError(f"{path} became shorter while it was read; copy it anew") from None
            except GgufError as error:
                raise GgufError(f"{path}: {error}") from None


class _Header:
    """One walk over the header, from front to back.  ``data`` is the beginning of the file."""

    def __init__(self, data: bytes, file_size: int, vocab_only: bool) -> None:
        self._data = data
        self._at = 0
        self._file_size = file_size
        self._vocab_only = vocab_only
        self._values: dict[str, object] = {}
        self._lengths: dict[str, int] = {}

    def summary(self) -> GgufSummary:
        version = self._version()
        n_tensors, n_kv = self._unpack("<QQ", "the counts of tensors and of key-value pairs")
        # The smallest pair is a key of one byte and a value of one; the smallest tensor has one dimension.
        self._count(n_kv, MAX_PAIRS, 8 + 1 + 4 + 1, "key-value pairs")
        self._count(n_tensors, MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
        if n_tensors == 0 and not self._vocab_only:
            raise GgufError("it has no tensors: it is a vocabulary, or the first part of a split; give a whole model")
        for _ in range(n_kv):
            self._pair()
        self._tensors(n_tensors)
        architecture = self._text("general.architecture")
        context = self._values.get(f"{architecture}.context_length")
        splits = self._values.get("split.count")
        return GgufSummary(
            version=version,
            architecture=architecture,
            name=self._text("general.name"),
            n_tensors=n_tensors,
            n_kv=n_kv,
            size_bytes=self._file_size,
            context_length=context if isinstance(context, int) else None,
            n_vocab=self._lengths.get("tokenizer.ggml.tokens"),
            split_count=splits if isinstance(splits, int) and splits > 0 else 1,
        )

    def _version(self) -> int:
        magic = self._data[:4]
        if magic != b"GGUF":
            if self._data.startswith(b"version https://git-lfs"):
                raise GgufError("it is a Git LFS pointer, not the model; run git lfs pull")
            raise GgufError(f"it begins with {magic!r} and not with b'GGUF'; it is not a GGUF file")
        self._at = 4
        (version,) = self._unpack("<I", "the version")
        if version in (2 << 24, 3 << 24):
            raise GgufError("it is a big-endian GGUF and this machine is not; get the little-endian one")
        if version not in (2, 3):
            raise GgufError(f"it is GGUF version {version}; only 2 and 3 can be read. Convert the model anew")
        assert isinstance(version, int)
        return version

    def _pair(self) -> None:
        key = self._string(MAX_KEY_BYTES, "a key")
        if not key or key in self._values or key in self._lengths:
            raise GgufError(f"the key {key!r} is empty or there twice; the file is damaged")
        (kind,) = self._unpack("<I", f"the type of {key}")
        if kind == _ARRAY:
            self._array(key)
        elif kind == _STRING:
            self._values[key] = self._string(MAX_TEXT_BYTES, key)
        elif kind in _SCALARS:
            (value,) = self._unpack(_SCALARS[kind], key)
            self._values[key] = value if kind in _UNSIGNED else None
            if key == "general.alignment" and kind != _UINT32:
                raise GgufError("general.alignment is not a uint32; the file is damaged")
        else:
            raise GgufError(f"the value of {key} has the type {kind}, which does not exist")

    def _array(self, key: str) -> None:
        kind, count = self._unpack("<IQ", f"the array {key}")
        if kind == _STRING:
            self._count(count, self._file_size, 8, f"strings in {key}")
            self._skip_strings(count, key)
        elif kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            self._count(count, self._file_size, size, f"values in {key}")
            self._skip(count * size)
        elif kind == _ARRAY:
            raise GgufError(f"{key} is an array of arrays, which llama.cpp does not read")
        else:
            raise GgufError(f"the array {key} has entries of the type {kind}, which does not exist")
        self._lengths[key] = count

    def _tensors(self, n_tensors: int) -> None:
        alignment = self._values.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int)
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise GgufError(f"its alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}")
        names: set[str] = set()
        expected = end = 0
        for _ in range(n_tensors):
            name, offset, size = self._tensor()
            if name in names:
                raise GgufError(f"the tensor {name} is there twice; the file is damaged")
            names.add(name)
            if offset % alignment:
                raise GgufError(f"the data of {name} at {offset} is not aligned to {alignment} bytes")
            if offset != expected:
                wrong = "overlaps what comes before it" if offset < expected else "leaves a gap before it"
                raise GgufError(f"the data of {name} at {offset} {wrong}: it belongs at {expected}")
            end = offset + size
            expected = _aligned(end, alignment)
        there = self._file_size - _aligned(self._at, alignment)
        if n_tensors and end > there:
            raise GgufError(
                f"its tensors need {end} bytes and {max(there, 0)} are there: the file was cut off. "
                "Download or copy it anew"
            )

    def _tensor(self) -> tuple[str, int, int]:
        """Name, offset and size in bytes of the next tensor."""
        name = self._string(MAX_TENSOR_NAME_BYTES, "a tensor's name")
        (n_dimensions,) = self._unpack("<I", f"the number of dimensions of {name}")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"the tensor {name} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        dimensions = self._unpack(f"<{n_dimensions}Q", f"the dimensions of {name}")
        kind, offset = self._unpack("<IQ", f"type and offset of {name}")
        if kind not in TENSOR_TYPES:
            raise GgufError(f"the tensor {name} has the type {kind}, unknown to the llama.cpp this is built with")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if dimensions[0] % block:
            raise GgufError(f"the tensor {name} has rows of {dimensions[0]}, no multiple of {type_name}'s {block}")
        n_blocks = dimensions[0] // block
        for dimension in dimensions[1:]:
            n_blocks *= dimension  # Python's integers do not overflow
        if n_blocks == 0:
            raise GgufError(f"the tensor {name} has a dimension of 0")
        if n_blocks * block_bytes > self._file_size:
            raise GgufError(
                f"the tensor {name} takes {n_blocks * block_bytes} bytes and the whole file has "
                f"{self._file_size}: it was cut off or is damaged. Download or copy it anew"
            )
        return name, offset, n_blocks * block_bytes

    # Reading.  The end of the window is the end of the file, or a reason to read more of it.

    def _unpack(self, layout: str, what: str) -> tuple[int, ...]:
        start = self._at
        self._skip(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self._data, start)

    def _skip(self, size: int, what: str = "an array") -> None:
        self._at += size
        if self._at > len(self._data):
            self._beyond(what)

    def _beyond(self, what: str) -> None:
        if self._at > self._file_size:
            raise GgufError(f"it ends inside {what}: it was cut off. Download or copy it anew")
        raise _BeyondWindow

    def _count(self, count: int, limit: int, least_bytes: int, what: str) -> None:
        if count > limit or count * least_bytes > self._file_size - self._at:
            raise GgufError(f"it claims {count} {what}, more than it has room for; the file is damaged")

    def _string(self, limit: int, what: str) -> str:
        (length,) = self._unpack("<Q", f"the length of {what}")
        if length > limit:
            raise GgufError(f"{what} has {length} bytes, more than {limit}; the file is damaged")
        self._skip(length, what)
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _skip_strings(self, count: int, key: str) -> None:
        # Vocabularies have hundreds of thousands of these: nothing in this loop that can be outside.
        read, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            at += 8  # where the length ends that is not all in the window
        self._at = at
        if at > len(data):
            self._beyond(key)

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        return value if isinstance(value, str) else ""


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
