"""Logs of detached answers on disk: what a client has got survives the daemon.

``append`` writes to the kernel and does not wait for the disk: a killed daemon loses nothing, and a crash of the machine
at most the last tokens, which are computed again.  The beginning and the end of an answer are durable.

All functions block on the disk.  Each file is written by one thread at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from uma_trio.daemon.store.answer_log import AnswerLog, decode
from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.folder import (
    QUARANTINE_SUFFIX,
    TEMPORARY_SUFFIX,
    PrivateFolder,
    StoreError,
    sync,
    write_all,
)
from uma_trio.daemon.store.journal_format import SessionKey, file_stem

SUFFIX: Final = ".answer"
MAX_FILE_BYTES: Final = 1 << 30


class AnswerFolderError(StoreError):
    """An answer cannot be stored or read back."""


@attrs.frozen(eq=False)
class StoredAnswer:
    """An answer that a folder has."""

    log: AnswerLog
    n_bytes: int


class AnswerFolder:
    """The folder of all answers of a daemon.

    Raises:
        AnswerFolderError: the folder cannot be used, or another daemon uses it.
    """

    def __init__(self, path: Path) -> None:
        self._folder = PrivateFolder(path, AnswerFolderError)
        self.problems: list[str] = []
        """What ``load`` could not use."""

    def close(self) -> None:
        """Release the folder."""
        self._folder.close()

    def load(self) -> list[StoredAnswer]:
        """Read all answers.  Half a record at the end of a file is cut off; a damaged file is renamed, and not read again.

        Raises:
            AnswerFolderError: the folder cannot be read.
        """
        answers = []
        for file in self._folder.list_files():
            if file.name.endswith(TEMPORARY_SUFFIX):
                self._folder.remove(file.name)
            elif file.name.endswith(SUFFIX):
                try:
                    answers.append(self._load(file.name))
                except (AnswerFolderError, DamagedFile) as error:
                    self.problems.append(f"{file.name}: {error}")
                    if isinstance(error, DamagedFile):
                        self._folder.rename(file.name, file.name + QUARANTINE_SUFFIX)
        return answers

    def create(self, key: SessionKey, data: bytes) -> None:
        """Write a new answer durably.

        Raises:
            AnswerFolderError: it cannot be written.
        """
        self._folder.reopen()
        self._folder.write_atomically(_name(key), data)

    def append(self, key: SessionKey, data: bytes, at: int, *, durable: bool) -> None:
        """Write ``data`` at byte ``at``, which is the end of the file.

        Raises:
            AnswerFolderError: it cannot be written.
        """
        with self._folder.opened("write", _name(key), write=True) as descriptor:
            write_all(descriptor, data, at)
            if durable:
                sync(descriptor)

    def read(self, key: SessionKey) -> AnswerLog:
        """Read an answer.

        Raises:
            AnswerFolderError, DamagedFile: it cannot be read.
        """
        return decode(self._folder.read(_name(key), MAX_FILE_BYTES))[0]

    def remove(self, key: SessionKey) -> None:
        """Remove an answer durably.  Removing a missing one is a no-op.

        Raises:
            AnswerFolderError: it cannot be removed.
        """
        self._folder.remove(_name(key))
        self._folder.sync()

    def _load(self, name: str) -> StoredAnswer:
        data = self._folder.read(name, MAX_FILE_BYTES)
        log, n_bytes = decode(data)
        if name != _name(log.key):
            raise DamagedFile("it is another answer under this name")
        if n_bytes < len(data):
            self._folder.cut(name, n_bytes)
        return StoredAnswer(log, n_bytes)


def _name(key: SessionKey) -> str:
    return file_stem(key) + SUFFIX
