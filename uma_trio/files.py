"""Files: reads those that a person names with a bound, replaces small ones whole or not at all, says where ours are."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_TEXT_BYTES: Final = 1 << 20
"""Size of the largest text: a file of settings, a template, a grammar."""


def read_text(path: Path, *, pipes: bool = False) -> str:
    """Read a file of UTF-8 text with at most ``MAX_TEXT_BYTES``.

    Args:
        pipes: the path may also be that of a pipe or a device, such as /dev/stdin.  Reading waits for its writer.

    Raises:
        OSError: it cannot be read, is too large, or is no regular file.  A pipe without a writer counts as empty, and an
            empty pipe is an error, too.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, MAX_TEXT_BYTES, pipes=pipes).decode()


def read_bytes(path: Path, most: int, *, pipes: bool = False) -> bytes:
    """Read a file with at most ``most`` bytes.

    Args:
        pipes: as in ``read_text``.

    Raises:
        OSError: as in ``read_text``.
    """
    # opening a pipe without O_NONBLOCK waits for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (pipes or stat.S_ISREG(mode)):
            raise OSError(errno.EINVAL, "it is not a regular file")
        os.set_blocking(descriptor, True)
        data = file.read(most + 1)
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {size}")
    if not data and stat.S_ISFIFO(mode):
        raise OSError(errno.EPIPE, "nobody writes into this pipe")
    return data


def replace_text(path: Path, text: str, *, new_mode: int = 0o666) -> None:
    """Write a file of UTF-8 text, or replace one.  If that fails, for example on a full disk, the old one stays.

    A symbolic link stays, and the file that it points to is replaced.  A replaced file keeps its mode.

    Args:
        new_mode: mode of a file that did not exist, less the umask.

    Raises:
        OSError: it cannot be written, or is no regular file.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary = target.with_name(f".uma-trio-{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, new_mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode())
            if mode is not None:
                os.fchmod(descriptor, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def state_folder(chosen: Path | None = None) -> Path:
    """The folder of what outlives a process: ``chosen``, such as the setting ``state_dir``, or where it is by default."""
    import platformdirs

    return chosen or Path(platformdirs.user_state_dir("uma-trio"))
