"""Encoded pictures in files: written whole, and verified when they are read back.

A file has a header, the picture's blocks and tokens, its rows, and a hash of all that.  The folder has a maximum size: the least
recently used pictures make room for new ones.

All functions block on the disk; call them from one worker thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Final

import numpy as np

from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.folder import PrivateFolder, StoreError, read_up_to
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile

SUFFIX: Final = ".picture"
NAME: Final = re.compile(r"[0-9a-f]{64}\.picture")
_HEADER: Final = struct.Struct("<16s32sIIII")
_MAGIC: Final = b"uma-picture-v3\0\0"
_BLOCK: Final = struct.Struct("<I?I")
_HASH_BYTES: Final = hashlib.sha256().digest_size


class PictureFileError(StoreError):
    """A picture cannot be written or read back."""


def encode(key: bytes, picture: EncodedMedia) -> bytes:
    """The content of a file.

    Args:
        key: 32 bytes, which name the picture.
    """
    rows = picture.rows
    header = _HEADER.pack(_MAGIC, key, len(picture.blocks), len(picture.tokens), rows.n, rows.width)
    blocks = b"".join([_BLOCK.pack(block.n, block.is_causal, block.columns) for block in picture.blocks])
    data = header + blocks + picture.tokens.astype("<i4").tobytes() + rows.read(0, rows.n).astype("<f4").tobytes()
    return data + hashlib.sha256(data).digest()


def decode(key: bytes, data: bytes | bytearray) -> EncodedMedia:
    """The inverse of ``encode``.

    Raises:
        DamagedFile: the content is not what ``encode`` made for ``key``.
    """
    body, digest = memoryview(data)[:-_HASH_BYTES], bytes(data[-_HASH_BYTES:])
    if len(data) < _HEADER.size + _HASH_BYTES or hashlib.sha256(body).digest() != digest:
        raise DamagedFile("its content does not have its hash")
    magic, of, n_blocks, n_tokens, n_rows, width = _HEADER.unpack_from(body)
    if magic != _MAGIC or of != key:
        raise DamagedFile("it is of another version, or of another picture")
    at = _HEADER.size + n_blocks * _BLOCK.size
    if at + 4 * (n_tokens + n_rows * width) != len(body):
        raise DamagedFile("it has another size than its header says")
    blocks = [RowBlock(*fields) for fields in _BLOCK.iter_unpack(body[_HEADER.size : at])]
    tokens = np.frombuffer(body, "<i4", n_tokens, at).astype(np.int32)
    rows = np.frombuffer(body, "<f4", n_rows * width, at + 4 * n_tokens)
    return EncodedMedia(tokens, RowFile.of(rows.astype(np.float32).reshape(n_rows, width)), blocks)


class PictureFolder:
    """The encoded pictures in one folder, of at most ``max_bytes`` together.

    Args:
        folder: created if missing.  Only one process at a time can use it.

    Raises:
        PictureFileError: the folder cannot be used.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = PrivateFolder(folder, PictureFileError)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By name, the least recently used first."""
        self.n_bytes = 0
        """Size of all files."""
        try:
            for file in self._folder.list_files():
                if file.refused is None and NAME.fullmatch(file.name):
                    self._count(file.name, file.n_bytes)
                elif file.refused is None and NAME.match(file.name):  # one that was not complete
                    self._folder.remove(file.name)
            self._make_room(0)
        except PictureFileError:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder."""
        self._folder.close()

    def find(self, key: bytes) -> EncodedMedia | None:
        """The picture named ``key``; ``None`` if it is not there.

        Raises:
            PictureFileError: its file is damaged or cannot be read.  It is removed, if possible.
        """
        name = key.hex() + SUFFIX
        size = self._sizes.get(name)
        if size is None:
            return None
        try:
            with self._folder.opened("read", name) as descriptor:
                picture = decode(key, read_up_to(descriptor, min(size, self.max_bytes), 0))
                os.utime(descriptor)
        except (PictureFileError, DamagedFile) as error:
            self._drop(name)
            if isinstance(error, DamagedFile):
                raise PictureFileError(f"{self._folder.path / name} is damaged: {error}; it was removed") from None
            raise
        self._sizes.move_to_end(name)
        return picture

    def add(self, key: bytes, picture: EncodedMedia) -> None:
        """Write a picture, unless it is there, or larger than the folder may be.

        Raises:
            PictureFileError: it cannot be written, for example because the disk is full.
        """
        name = key.hex() + SUFFIX
        if name in self._sizes:
            return
        data = encode(key, picture)
        if len(data) > self.max_bytes:
            return
        if self._folder.reopen():
            self._sizes.clear()
            self.n_bytes = 0
        self._make_room(len(data))
        self._folder.write_atomically(name, data)
        self._count(name, len(data))

    def _count(self, name: str, n_bytes: int) -> None:
        self._sizes[name] = n_bytes
        self.n_bytes += n_bytes

    def _make_room(self, n_bytes: int) -> None:
        while self._sizes and self.n_bytes + n_bytes > self.max_bytes:
            name = next(iter(self._sizes))
            self._folder.remove(name)
            self.n_bytes -= self._sizes.pop(name)

    def _drop(self, name: str) -> None:
        self.n_bytes -= self._sizes.pop(name)
        with contextlib.suppress(PictureFileError):  # the error that led here says more
            self._folder.remove(name)
