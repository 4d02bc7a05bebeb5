"""Files of results, which survive ``kill -9``, full disks and power failures: a row that was appended is never lost.

A file is locked while it is written, so two processes never work on the same rows.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import msgspec


class Busy(Exception):
    """Another process works on these rows."""


class _Answered(msgspec.Struct):
    custom_id: str


_ANSWERED: Final = msgspec.json.Decoder(_Answered)


class RowFile:
    """A file to which lines are appended.  All methods block.

    What a crash has cut off is removed when the file is opened: its row is computed again.

    Raises:
        Busy: another process has it open.
        OSError: it cannot be read or written, or has lines that are no results.  It is unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy from None
            self._is_torn = False
            """Whether the file ends with a part of a line."""
            self.custom_ids = set(self._read())
            """Those of the rows in the file."""
        except BaseException:
            self.close()
            raise

    def _read(self) -> Iterator[str]:
        self.n_bytes = 0
        """Size of the whole lines."""
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                is_torn = line[:1] == b"{" and not line.endswith(b"\n")
                if is_torn or b"\0" in line:  # which a file system may leave in place of what it has not written
                    break
                try:
                    answered = _ANSWERED.decode(line)
                except msgspec.DecodeError:
                    raise OSError(errno.EINVAL, f"line {number} is no result of a row", str(self.path)) from None
                self.n_bytes += len(line)
                yield answered.custom_id
        os.ftruncate(self._descriptor, self.n_bytes)

    def append(self, lines: Mapping[str, bytes]) -> None:
        """Append whole lines, by the ``custom_id`` of their rows, and wait until they are on the disk.

        Raises:
            OSError: they could not be written.  None of them counts as written.
        """
        if not lines:
            return
        if self._is_torn:
            os.ftruncate(self._descriptor, self.n_bytes)
        self._is_torn = True
        rest = data = memoryview(b"".join(lines.values()))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)
        self._is_torn = False
        self.n_bytes += len(data)
        self.custom_ids.update(lines)

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
