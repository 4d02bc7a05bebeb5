"""A folder that is this process's alone, and files in it that are whole or not there.

All is done relative to the opened folder, so one that is moved or replaced in the meantime is not followed to
somewhere else, but by ``renew``, which checks it like a new one.  What is opened must be a plain file of this user: no
link, pipe or device.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

LOCK: Final = "lock"
TEMPORARY: Final = ".tmp"
"""How names of files end that are being written; what a crash leaves of them means nothing."""

WHAT_TO_DO: Final = {
    errno.ENOSPC: "free some space, or name a folder on another disk",
    errno.EDQUOT: "free some of this user's quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or name a folder on another disk",
    errno.EACCES: "name a folder that this user can write",
    errno.EPERM: "name a folder that this user can write",
    errno.EROFS: "name a folder on a disk that can be written",
    errno.ENOENT: "somebody has removed it: restart with a folder that stays",
    errno.ENOTDIR: "name a folder that is not below a file",
    errno.ELOOP: "links are not followed: name the folder itself",
    errno.EIO: "the disk may be failing: name a folder on another one",
}


class StoreError(Exception):
    """Something cannot be kept, or not be read again; says which path, why, and what to do."""


@attrs.frozen
class Found:
    """One name in the folder."""

    name: str
    n_bytes: int
    used_at_ns: int
    """Its mtime."""
    refused: str | None
    """Why it must not be opened, if so."""


class PrivateFolder:
    """A folder of this user, made if need be, and locked as long as it is open.

    Args:
        path: of the folder.
        error: what is raised.

    Raises:
        StoreError: as ``error``; it cannot be made or opened, is another user's, can be written by others, or
            is in use by another process.
    """

    def __init__(self, path: Path, error: type[StoreError]) -> None:
        self.path = path
        self._error = error
        self._renewing = threading.Lock()
        self.descriptor, self._locked = self._opened()

    def _opened(self) -> tuple[int, int]:
        """Descriptors of the folder that the path names, made if need be, and of its lock, which is held."""
        with self.telling("use"), contextlib.ExitStack() as on_error:
            _make(self.path)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            on_error.callback(os.close, descriptor)
            self._check(os.fstat(descriptor))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            locked = os.open(LOCK, flags, 0o600, dir_fd=descriptor)
            on_error.callback(os.close, locked)
            try:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._error(
                    f"{self.path} is in use by another process: stop it, or name another folder"
                ) from None
            on_error.pop_all()
            return descriptor, locked

    def _check(self, found: os.stat_result) -> None:
        if found.st_uid != os.geteuid():
            raise self._error(f"{self.path} belongs to another user: name a folder of this one")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._error(f"others can write to {self.path}: chmod go-w it, or name another folder")

    def renew(self) -> bool:
        """Go on in the folder that the path names now, where that is not the one that is open: somebody has removed
        it, or moved it away, and a restart would not find what is written there.  Likewise where the lock is gone:
        another process could take a new one.

        Returns:
            Whether it is another folder.  Nothing that was in the one before can be counted on then.

        Raises:
            StoreError: it cannot be made or used; the one that is open stays so.
        """
        with self._renewing, self.telling("use"):
            is_same = _is_at(self.path, self.descriptor)
            if is_same and _is_at(self.path / LOCK, self._locked):
                return False
            found, locked = self._opened()
            for new, old in ((found, self.descriptor), (locked, self._locked)):
                os.dup2(new, old, inheritable=False)  # the numbers stay: other threads are using them
                os.close(new)
            return not is_same

    def close(self) -> None:
        """Let go of the folder and its lock; does nothing the second time."""
        with self._renewing:
            for descriptor in (self._locked, self.descriptor):
                if descriptor >= 0:
                    os.close(descriptor)
            self._locked = self.descriptor = -1

    @contextlib.contextmanager
    def telling(self, doing: str, name: str = "") -> Iterator[None]:
        """Turn an ``OSError`` into one that says what could not be done to which path, and what helps."""
        try:
            yield
        except OSError as error:
            what = WHAT_TO_DO.get(error.errno or 0)
            reason = error.strerror or str(error)
            raise self._error(f"cannot {doing} {self.path / name}: {reason}{f'; {what}' if what else ''}") from error

    def names(self) -> set[str]:
        """All of them, without the lock's."""
        with self.telling("list"):
            return set(os.listdir(self.descriptor)) - {LOCK}

    def found(self) -> list[Found]:
        """What has a name, the least recently used first."""
        found = []
        for name in self.names():
            with self.telling("look at", name):
                try:
                    status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                except FileNotFoundError:  # gone since it was listed
                    continue
            found.append(Found(name, status.st_size, status.st_mtime_ns, _refused(status)))
        return sorted(found, key=lambda each: (each.used_at_ns, each.name))

    def open(self, name: str, *, write: bool = False) -> int:
        """A descriptor of a plain file of this user, to be closed by the caller.

        Raises:
            StoreError: it is not there, or no such file.
        """
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with self.telling("open", name):
            descriptor = os.open(name, flags | (os.O_RDWR if write else os.O_RDONLY), dir_fd=self.descriptor)
            refused = _refused(os.fstat(descriptor))
        if refused:
            os.close(descriptor)
            raise self._error(f"{self.path / name} is not opened: it is {refused}")
        return descriptor

    def create(self, name: str) -> int:
        """A descriptor of a new, empty file that only this user may read."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.telling("make", name):
            return os.open(name, flags, 0o600, dir_fd=self.descriptor)

    def exists(self, name: str) -> bool:
        """Whether something, be it a link, has that name."""
        with self.telling("look at", name):
            try:
                os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def rename(self, old: str, new: str) -> None:
        """From now on, and after a crash, ``old`` is called ``new``; it replaces what was called so."""
        with self.telling("rename", old):
            os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """The file is gone; nothing happens if it was already."""
        with self.telling("remove", name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Names given and removed so far outlive a crash."""
        with self.telling("write"):
            os.fsync(self.descriptor)

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the whole content of ``name``.  After a crash it is the old one or this."""
        temporary = name + TEMPORARY
        self.remove(temporary)
        descriptor = self.create(temporary)
        try:
            with self.telling("write", name):
                write_all(descriptor, data, 0)
                sync(descriptor)
            self.rename(temporary, name)
        except StoreError:
            with contextlib.suppress(self._error):
                self.remove(temporary)
            raise
        finally:
            os.close(descriptor)


def _make(path: Path) -> None:
    """The folder, and those above it that are missing; they outlive a crash of the machine."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        above = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(above)
        finally:
            os.close(above)


def _is_at(path: Path, descriptor: int) -> bool:
    opened = os.fstat(descriptor)
    try:
        return os.path.samestat(os.stat(path), opened)
    except FileNotFoundError:
        return False


def _refused(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if not stat.S_ISREG(status.st_mode):
        return "no plain file"
    if status.st_uid != os.geteuid():
        return "another user's"
    return None


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """``os.pwrite`` until all is written: it may write less than it is given."""
    left = memoryview(data)
    while left:
        n = os.pwrite(descriptor, left, offset)
        left, offset = left[n:], offset + n


def read_up_to(descriptor: int, n_bytes: int, offset: int) -> bytearray:
    """``n_bytes`` from ``offset`` on, or fewer where the file ends before."""
    data = bytearray(n_bytes)
    n = read_into(descriptor, memoryview(data), offset)
    del data[n:]
    return data


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer``; how many bytes there were."""
    n = 0
    while n < len(buffer) and (got := os.preadv(descriptor, [buffer[n:]], offset + n)):
        n += got
    return n


def sync(descriptor: int) -> None:
    """What was written to the file, its size too, outlives a crash of the machine."""
    if sys.platform == "darwin":  # fsync there leaves it in the drive's own cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)
