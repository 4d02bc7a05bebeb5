"""A private folder: one user, one process, and files that either exist completely or do not exist.

All operations are relative to the open folder descriptor, so replacing the folder at the path cannot redirect them.
Only ``reopen`` looks at the path again, and repeats all checks.  Only regular files of the current user are opened:
no symbolic links, pipes or devices.
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

from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.files import sync_folder

LOCK: Final = "lock"
TEMPORARY_SUFFIX: Final = ".tmp"
"""Suffix of files that are being written.  After a crash, such a file is garbage."""
QUARANTINE_SUFFIX: Final = ".bad"
"""Suffix of damaged files, which are kept for inspection."""

HINTS: Final = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some of this user's quota, or choose a folder on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose a folder on another disk",
    errno.EACCES: "choose a folder that this user can write to",
    errno.EPERM: "choose a folder that this user can write to",
    errno.EROFS: "choose a folder on a writable disk",
    errno.ENOENT: "it was removed while the daemon was running: restart with a folder that stays",
    errno.ENOTDIR: "choose a folder that is not below a file",
    errno.ELOOP: "symbolic links are not followed: choose the folder itself",
    errno.EIO: "the disk may be failing: choose a folder on another disk",
}
"""What the user can do about an error, by errno."""


class StoreError(Exception):
    """Something cannot be stored or read back.  The message gives the path, the reason and a remedy."""


@attrs.frozen
class FileInfo:
    """One directory entry."""

    name: str
    n_bytes: int
    mtime_ns: int
    refused: str | None
    """Why the file must not be opened; ``None`` for a regular file of this user."""


def _holder(locked: int) -> str:
    """The process that holds the lock of the open lock file, which has its process id."""
    pid = os.pread(locked, 20, 0).strip()
    return f"process {int(pid)}" if pid.isdigit() else "another process"


class PrivateFolder:
    """A folder of the current user, created if missing and locked while it is open.

    Args:
        path: the folder.
        error: the class of the errors that all methods raise.

    Raises:
        StoreError: as ``error``; the folder cannot be created or opened, belongs to another user, is writable for
            others, or is in use by another process.
    """

    def __init__(self, path: Path, error: type[StoreError]) -> None:
        self.path = path
        self._error = error
        self._reopening = threading.Lock()
        self.descriptor, self._locked = self._open()

    def _open(self) -> tuple[int, int]:
        """Open the folder at the path, created if missing, and take its lock; return both descriptors."""
        with self.os_errors("use"), contextlib.ExitStack() as on_error:
            try:
                _create(self.path)
            except FileNotFoundError as error:  # as in /proc, where nobody can create anything
                raise self._error(
                    f"cannot create {self.path}: {error.strerror}; choose a folder that can be created"
                ) from error
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
                    f"{self.path} is in use by {_holder(locked)}: stop it, or choose another folder"
                ) from None
            with contextlib.suppress(OSError):  # a full disk: the error of the next process has no number
                os.ftruncate(locked, 0)
                os.pwrite(locked, b"%d\n" % os.getpid(), 0)
            on_error.pop_all()
            return descriptor, locked

    def _check(self, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise self._error(f"{self.path} belongs to another user: choose a folder of this user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._error(f"others can write to {self.path}: run chmod go-w on it, or choose another folder")

    def reopen(self) -> bool:
        """Switch to the folder that the path names now, if the open folder was removed or moved away.

        Without this, a restart would not find files that are written from now on.  A removed lock file is replaced
        as well, because another process could otherwise lock the folder.

        Returns:
            Whether the folder is a different one.  Files of the previous folder must be considered lost.

        Raises:
            StoreError: the new folder cannot be created or used; the previous one stays open.
        """
        with self._reopening, self.os_errors("use"):
            is_same = _is_at(self.path, self.descriptor)
            if is_same and _is_at(self.path / LOCK, self._locked):
                return False
            descriptor, locked = self._open()
            for new, old in ((descriptor, self.descriptor), (locked, self._locked)):
                os.dup2(new, old, inheritable=False)  # keeps the numbers, which other threads are using
                os.close(new)
            return not is_same

    def close(self) -> None:
        """Release the folder and its lock.  Closing twice is a no-op."""
        with self._reopening:
            for descriptor in (self._locked, self.descriptor):
                if descriptor >= 0:
                    os.close(descriptor)
            self._locked = self.descriptor = -1

    @contextlib.contextmanager
    def os_errors(self, action: str, name: str = "") -> Iterator[None]:
        """Convert an ``OSError`` into a message with the action, the path, the reason and a remedy."""
        try:
            yield
        except OSError as error:
            hint = HINTS.get(error.errno or 0)
            reason = error.strerror or str(error)
            raise self._error(f"cannot {action} {self.path / name}: {reason}{f'; {hint}' if hint else ''}") from error

    def names(self) -> set[str]:
        """List all file names except the lock."""
        with self.os_errors("list"):
            return set(os.listdir(self.descriptor)) - {LOCK}

    def list_files(self) -> list[FileInfo]:
        """List all files except the lock, least recently modified first."""
        files = []
        for name in self.names():
            with self.os_errors("inspect", name):
                try:
                    status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                except FileNotFoundError:  # removed after it was listed
                    continue
            files.append(FileInfo(name, status.st_size, status.st_mtime_ns, _refused(status)))
        return sorted(files, key=lambda file: (file.mtime_ns, file.name))

    def open(self, name: str, *, write: bool = False) -> int:
        """Open a regular file of this user and return its descriptor, which the caller closes.

        Raises:
            StoreError: the file does not exist, is not a regular file, or belongs to another user.
        """
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with self.os_errors("open", name):
            descriptor = os.open(name, flags | (os.O_RDWR if write else os.O_RDONLY), dir_fd=self.descriptor)
            refused = _refused(os.fstat(descriptor))
        if refused:
            os.close(descriptor)
            raise self._error(f"{self.path / name} is not opened: it is {refused}")
        return descriptor

    @contextlib.contextmanager
    def opened(self, action: str, name: str, *, write: bool = False) -> Iterator[int]:
        """Open a file as ``open`` does, and close it at the end; errors in between say ``action``."""
        descriptor = self.open(name, write=write)
        try:
            with self.os_errors(action, name):
                yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str, most: int) -> bytearray:
        """Read a whole file.

        Raises:
            DamagedFile: it has more than ``most`` bytes.
            StoreError: as ``open``.
        """
        with self.opened("read", name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > most:
                raise DamagedFile(f"it has {size} bytes; such a file has at most {most}")
            return read_up_to(descriptor, size, 0)

    def cut(self, name: str, size: int) -> None:
        """Remove what follows the first ``size`` bytes of a file, durably."""
        with self.opened("cut", name, write=True) as descriptor:
            os.ftruncate(descriptor, size)
            sync(descriptor)

    def create(self, name: str) -> int:
        """Create an empty file that only this user can read; return a writable descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.os_errors("create", name):
            return os.open(name, flags, 0o600, dir_fd=self.descriptor)

    def exists(self, name: str) -> bool:
        """Tell whether the name is taken, also by a symbolic link."""
        with self.os_errors("inspect", name):
            try:
                os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def rename(self, old: str, new: str) -> None:
        """Rename a file durably, replacing any file of the new name."""
        with self.os_errors("rename", old):
            os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file.  Removing a missing file is a no-op."""
        with self.os_errors("remove", name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make all names that were added or removed so far durable."""
        with self.os_errors("write"):
            os.fsync(self.descriptor)

    def write_atomically(self, name: str, data: bytes) -> None:
        """Replace the content of a file durably.  After a crash, the file has either the old content or the new."""
        temporary = name + TEMPORARY_SUFFIX
        self.remove(temporary)
        descriptor = self.create(temporary)
        try:
            with self.os_errors("write", name):
                write_all(descriptor, data, 0)
                sync(descriptor)
            self.rename(temporary, name)
        except StoreError:
            with contextlib.suppress(self._error):
                self.remove(temporary)
            raise
        finally:
            os.close(descriptor)


def _create(path: Path) -> None:
    """Create the folder and its missing parents durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _is_at(path: Path, descriptor: int) -> bool:
    opened = os.fstat(descriptor)
    try:
        return os.path.samestat(os.stat(path), opened)
    except FileNotFoundError:
        return False


def _refused(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_uid != os.geteuid():
        return "owned by another user"
    return None


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Call ``os.pwrite`` until all bytes are written: a single call may write fewer."""
    left = memoryview(data)
    while left:
        n = os.pwrite(descriptor, left, offset)
        left, offset = left[n:], offset + n


def read_up_to(descriptor: int, n_bytes: int, offset: int) -> bytearray:
    """Read ``n_bytes``, or fewer if the file ends before."""
    data = bytearray(n_bytes)
    n = read_into(descriptor, memoryview(data), offset)
    del data[n:]
    return data


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from the file and return the number of bytes read; fewer only at the end of the file."""
    n = 0
    while n < len(buffer) and (got := os.preadv(descriptor, [buffer[n:]], offset + n)):
        n += got
    return n


def sync(descriptor: int) -> None:
    """Make a file's content and size durable: they survive a crash of the machine."""
    if sys.platform == "darwin":  # fsync leaves the data in the drive's volatile cache there
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)
