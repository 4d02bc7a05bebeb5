"""Named POSIX shared memory: created by the engine, opened by the runtime, and its names removed in the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import posix_ipc

FOLDER: Final = Path("/dev/shm")
"""Where Linux shows the names.  Other systems show them nowhere."""

MODE: Final = 0o600

_OURS: Final = re.compile(r"(?:sem\.)?(uma(\d+)-\d+-)")
_numbers: Final = itertools.count()


def new_prefix() -> str:
    """A prefix of names that no other process uses.  ``remove_stale`` recognises it."""
    return f"/uma{os.getpid()}-{next(_numbers)}-"


class SharedMemory:
    """A named piece of memory, mapped.

    Args:
        create: make it; what had the name before loses it.  Otherwise it is opened, or made if nothing has the name.

    Raises:
        OSError: no room, no permission, or another size than the one of the existing memory.
    """

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        self.name = name
        self.size = size
        with _as_os_error(name):
            if create:
                unlink_memory(name)
            flags = posix_ipc.O_CREX if create else posix_ipc.O_CREAT
            self._fd: int = posix_ipc.SharedMemory(name, flags, mode=MODE).fd
        try:
            if not self._has_size(size):
                os.ftruncate(self._fd, size)
            self.map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._reserved: dict[int, int] = {}

    def _has_size(self, size: int) -> bool:
        n_bytes = os.fstat(self._fd).st_size
        if n_bytes not in (0, size):
            raise OSError(
                errno.EINVAL,
                f"{self.name} has {n_bytes} bytes, and {size} are expected; give engine and runtime the same sizes",
            )
        return n_bytes == size

    def reserve(self, begin: int, end: int) -> None:
        """Make sure that bytes can be written: a page that finds no room ends the process with SIGBUS.

        Raises:
            OSError: there is no room.
        """
        if end > self._reserved.get(begin, begin):
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(self._fd, begin, end - begin)
                except OSError as error:
                    reason = f"no room for {end - begin} bytes in {FOLDER}: {error.strerror}"
                    raise OSError(error.errno, reason) from None
            self._reserved[begin] = end

    @property
    def fd(self) -> int:
        """Its descriptor, until ``close``."""
        return self._fd

    def lock(self) -> None:
        """Show to ``remove_stale`` that the process which made this memory lives."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlink(self) -> None:
        """Remove the name, unless something else has it by now."""
        if inode(self.name) in (None, os.fstat(self._fd).st_ino):
            unlink_memory(self.name)

    def close(self) -> None:
        """Unmap it.  Views of ``map`` must be gone."""
        self.map.close()
        os.close(self._fd)


def inode(name: str) -> int | None:
    """Which memory or semaphore has a name now; ``None`` if none has, or if the system does not show it."""
    with contextlib.suppress(OSError):
        return (FOLDER / name.removeprefix("/")).stat().st_ino
    return None


def unlink_memory(name: str) -> None:
    """Remove the name of a memory, if something has it."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


def unlink_semaphore(name: str) -> None:
    """Remove the name of a semaphore, if something has it."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_semaphore(name)


def remove_stale() -> list[str]:
    """Remove names that processes of uma-trio left behind when they were killed; returns them.

    A process lives if it has the memory of the biases locked: its id may mean nothing here, as in another container.
    """
    removed = []
    try:
        names = sorted(entry.name for entry in os.scandir(FOLDER))
    except OSError:  # not Linux
        return []
    stale: dict[str, bool] = {}
    for name in names:
        if (match := _OURS.match(name)) is None:
            continue
        prefix, pid = match[1], int(match[2])
        if prefix not in stale:
            stale[prefix] = not _lives(pid) and not _is_locked(FOLDER / f"{prefix}bin-shm")
        if stale[prefix]:
            with contextlib.suppress(OSError):
                (FOLDER / name).unlink()
                removed.append(name)
    return removed


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # of another user
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    try:
        yield
    except posix_ipc.Error as error:
        raise OSError(errno.EACCES, f"cannot open {name}: {error}") from None
    except ValueError as error:  # a name that the system refuses
        raise OSError(errno.EINVAL, f"cannot open {name}: {error}") from None
