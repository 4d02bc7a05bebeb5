"""A model that has not arrived completely: the bytes of each part, their hashes, the state of the download, its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from uma_trio.files import read_text, replace_text
from uma_trio.hub.errors import HubError
from uma_trio.hub.variants import format_bytes

T = TypeVar("T")

READ_BYTES: Final = 8 << 20
SPARE_BYTES: Final = 16 << 20
"""What stays free: file systems and other programs need some."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartialFile:
    """The file ``path``, to which bytes are added at its end.  All methods block.

    Args:
        git_size: size of the whole file if it is verified as git does it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, git_size: int | None = None) -> None:
        self.path = path
        self._git_size = git_size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.size = os.fstat(self._descriptor).st_size
        """Bytes that are here."""
        self._n_hashed = 0
        self._new_hashes()

    def _new_hashes(self) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(usedforsecurity=False)
        if self._git_size is not None:
            self._git.update(b"blob %d\0" % self._git_size)
        self._n_hashed = 0

    @property
    def sha256(self) -> str:
        """Hash of what was appended since ``catch_up``."""
        return self._sha256.hexdigest()

    @property
    def git_sha1(self) -> str:
        return self._git.hexdigest()

    def catch_up(self) -> None:
        """Hash the bytes that an earlier process left: about a second for each gigabyte.

        Raises:
            OSError: they cannot be read.
        """
        while self._n_hashed < self.size:
            data = os.pread(self._descriptor, min(READ_BYTES, self.size - self._n_hashed), self._n_hashed)
            if not data:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            self._hash(data)

    def append(self, data: bytes | bytearray) -> None:
        """Write ``data`` at the end, and hash it.

        Raises:
            HubError: the disk is full.
            OSError: another reason.
        """
        with self._explained():
            view = memoryview(data)
            while view:
                n = os.pwrite(self._descriptor, view, self.size)
                self._hash(view[:n])
                self.size += n
                view = view[n:]

    def restart(self) -> None:
        """Drop all bytes."""
        os.ftruncate(self._descriptor, 0)
        self.size = 0
        self._new_hashes()

    def sync(self) -> None:
        """Wait until the bytes are on disk.

        Raises:
            HubError: the disk is full, which some file systems notice late.
        """
        with self._explained():
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _hash(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._git_size is not None:
            self._git.update(data)
        self._n_hashed += len(data)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise HubError(
                f"{self.path.parent} is full after {format_bytes(self.size)} of the file ({error.strerror})",
                "make room and pull again: it goes on from there",
            ) from None


def check_room(folder: Path, needed: int) -> None:
    """Refuse a download into ``folder`` of which ``needed`` bytes are still missing, if there is no room.

    Raises:
        HubError: with the numbers.
    """
    free = free_bytes(folder)
    if needed + SPARE_BYTES > free:
        raise HubError(
            f"the download needs {format_bytes(needed)}, and {format_bytes(free)} are free in {folder}",
            f"free {format_bytes(needed + SPARE_BYTES - free)}, or choose a folder on another disk with models_dir",
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may write into ``folder``, or where it will be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


# -- the folder of one download ---------------------------------------------------------------------


class DownloadState(msgspec.Struct, frozen=True, kw_only=True):
    """A download that has not ended; other processes show its progress."""

    name: str
    sizes: list[int | None]
    """Bytes of each part; ``None`` as long as the server has not said it."""
    etags: list[str | None]
    identity: list[str]
    """Hash or URL of each part; if they change, the parts are discarded."""


_STATE: Final = msgspec.json.Decoder(DownloadState)


class DownloadFolder:
    """The folder of one download: its lock, its state and its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def part(self, number: int) -> Path:
        """Where the bytes of a part are as long as it is not installed."""
        return self.path / f"{number}.part"

    def sizes(self, count: int) -> list[int]:
        """Bytes that are here of each part."""
        sizes = []
        for number in range(count):
            try:
                sizes.append(self.part(number).stat().st_size)
            except OSError:
                sizes.append(0)
        return sizes

    def state(self) -> DownloadState | None:
        """What an earlier or another process notes of its download."""
        return read_record(self.path / "state.json", _STATE)

    def write_state(self, state: DownloadState) -> None:
        """Raises OSError."""
        replace_text(self.path / "state.json", msgspec.json.encode(state).decode())

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Take the lock until the end of the context, without waiting; False if another process has it.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / "lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # another process has just finished and removed the folder
            yield False
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = os.path.samestat(os.fstat(descriptor), os.stat(lock))
            except (BlockingIOError, FileNotFoundError):
                is_mine = False
            yield is_mine  # another file: the lock was removed together with a download that has ended
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete everything.  Best effort."""
        shutil.rmtree(self.path, ignore_errors=True)


def read_record(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """What is in a JSON file; ``None`` if it is missing or damaged."""
    try:
        return decoder.decode(read_text(path))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
