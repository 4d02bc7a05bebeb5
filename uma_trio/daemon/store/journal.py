"""Sessions on disk: a turn is durable before its client learns that the turn is complete.

A session is a file to which each turn appends a record (``journal_format``).  A turn for which ``write`` has returned
survives any crash, also of the machine; a turn in progress survives completely or not at all.  A file of which
little is still current is compacted, and a file that was removed or cut from outside is recreated: the journal
knows the content of every file, because it refers to records that the sessions keep in memory anyway.

A file for each session, and not a table of SQLite: one damaged page must cost one session at most, and closing a
session must make room on a full disk.  docs/benchmarks/robustness.md has the figures.

All functions block on the disk.  All may be called from several threads; each file is written by one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import Final

import attrs

from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.folder import (
    QUARANTINE_SUFFIX,
    TEMPORARY_SUFFIX,
    FileInfo,
    PrivateFolder,
    StoreError,
    sync,
    write_all,
)
from uma_trio.daemon.store.journal_format import (
    MAX_FILE_BYTES,
    SPARE_BYTES,
    WASTE,
    SessionKey,
    SessionRecord,
    decode,
    encode,
    file_stem,
)

SUFFIX: Final = ".session"

MAX_QUARANTINED: Final = 100
MAX_QUARANTINED_BYTES: Final = 1 << 28
"""Limits of all damaged files together; beyond either, the oldest are removed.  Those of a session go when it is closed."""


class JournalError(StoreError):
    """A session cannot be stored or read back."""


@attrs.define(eq=False)
class _Entry:
    """A session and its file."""

    key: SessionKey
    stem: str
    wanted: SessionRecord | None = None
    """What the file must contain; ``None``: it must be removed."""
    written: SessionRecord | None = None
    """What the file contains; ``None`` if that is not known."""
    file_bytes: int = 0
    """Bytes of intact records."""
    max_file_bytes: int = SPARE_BYTES
    """Beyond this size, it is checked whether the file is to be compacted."""
    closed: bool = False
    """The file was removed.  A new file of the same name belongs to another entry."""
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the file is read or written."""

    @property
    def name(self) -> str:
        return self.stem + SUFFIX


class Journal:
    """The sessions of one model in one folder.

    Call ``load`` first: it lists the sessions and repairs what a crash left behind.

    Args:
        folder: created if missing.  Only one process at a time can use it.

    Raises:
        JournalError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.restored = 0
        """Number of files that were removed or cut from outside and have been recreated."""
        self.problems: list[str] = []
        """Files that the last ``load`` changed or did not accept, and why; one line each."""
        self._entries: dict[SessionKey, _Entry] = {}
        self._lock = threading.Lock()
        """Protects the two above.  May be taken while holding an entry's lock, never the other way round."""
        self._folder = PrivateFolder(folder, JournalError)

    def close(self) -> None:
        """Release the folder; nothing can be written any more."""
        self._folder.close()

    # -- inventory ------------------------------------------------------------------------------

    def load(self) -> list[SessionRecord]:
        """Return all sessions, least recently used first.  Call it before anything is written.

        Cuts off half a record at the end of a file, and quarantines damaged files and those of another version.
        Everything that is not a regular file of this user is ignored.  ``problems`` lists all of these.

        Raises:
            JournalError: the folder cannot be read.
        """
        with self._lock:
            self._entries.clear()
            self.problems = []
            quarantined: list[FileInfo] = []
            for file in self._folder.list_files():
                if file.refused:
                    self._report(file.name, f"ignored, it is {file.refused}")
                elif file.name.endswith(TEMPORARY_SUFFIX):
                    self._folder.remove(file.name)
                elif file.name.endswith(QUARANTINE_SUFFIX):
                    quarantined.append(file)
                elif not file.name.endswith(SUFFIX):
                    self._report(file.name, "ignored, it is not a session file")
                else:
                    try:
                        entry = self._load(file.name)
                    except JournalError as error:
                        self._report(file.name, f"ignored, {error}")
                    except DamagedFile as error:
                        new_name = f"{file.name.removesuffix(SUFFIX)}.{secrets.token_hex(4)}{QUARANTINE_SUFFIX}"
                        self._report(file.name, f"quarantined as {new_name}: {error}")
                        with contextlib.suppress(JournalError):  # it is not used in any case
                            self._folder.rename(file.name, new_name)
                            quarantined.append(attrs.evolve(file, name=new_name))
                    else:
                        self._entries[entry.key] = entry
            n_bytes = 0
            for n, file in enumerate(reversed(quarantined)):
                n_bytes += file.n_bytes
                if n >= MAX_QUARANTINED or n_bytes > MAX_QUARANTINED_BYTES:
                    with contextlib.suppress(JournalError):  # the next start tries again
                        self._folder.remove(file.name)
            sessions = [entry.written for entry in self._entries.values() if entry.written is not None]
        return sorted(sessions, key=lambda session: session.used_at)

    def needs_repair(self) -> list[SessionKey]:
        """List the sessions whose files are missing or could not be changed; pass each to ``repair``.

        Raises:
            JournalError: the folder was removed and cannot be created again, or it cannot be read.
        """
        self._folder.reopen()
        names = self._folder.names()
        with self._lock:
            return [
                entry.key
                for entry in self._entries.values()
                if entry.name not in names or entry.wanted is not entry.written
            ]

    # -- changes --------------------------------------------------------------------------------

    def write(self, session: SessionRecord) -> bool:
        """Store a session durably, replacing its previous record.  The arrays of ``session`` must not change later.

        If the disk fails, the previous content stays and ``repair`` tries again.

        Returns:
            Whether the file had been removed or cut from outside, and was recreated.

        Raises:
            JournalError: the session is invalid or too large, or the disk fails.
        """
        while True:
            with self._lock:
                entry = self._entries.get(session.key) or self._new_entry(session.key)
            with entry.lock:
                if not entry.closed:
                    return self._write(entry, session)

    def repair(self, key: SessionKey) -> SessionRecord | None:
        """Write or remove the file of a session that ``needs_repair``.

        Returns:
            The session as its file contains it now; ``None`` if there is no such session.

        Raises:
            JournalError: the file still cannot be changed.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        with entry.lock:
            if entry.closed:
                return None
            if entry.wanted is not entry.written or not self._folder.exists(entry.name):
                self._settle(entry)
            return entry.wanted

    def remove(self, key: SessionKey) -> None:
        """Remove a session durably, including its quarantined files.  Removing a missing session is a no-op.

        Raises:
            JournalError: a file cannot be removed; ``repair`` tries again.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        with entry.lock:
            if not entry.closed:
                entry.wanted = None
                self._settle(entry)

    def path_of(self, key: SessionKey) -> Path | None:
        """Where the session is; ``None`` if it is not on disk."""
        entry = self._entries.get(key)
        return None if entry is None or entry.written is None else self._folder.path / entry.name

    # -- one file -------------------------------------------------------------------------------

    def _new_entry(self, key: SessionKey) -> _Entry:
        try:
            entry = _Entry(key, file_stem(key))
        except ValueError as error:
            raise JournalError(str(error)) from None
        if self._folder.exists(entry.name):
            raise JournalError(f"{self._folder.path / entry.name} was ignored at the start: remove it first")
        self._entries[key] = entry
        return entry

    def _write(self, entry: _Entry, session: SessionRecord) -> bool:
        before, entry.wanted = entry.wanted, session
        try:
            self._folder.reopen()
            return self._settle(entry)
        except ValueError as error:  # the session is invalid: trying again would not help
            entry.wanted = before
            if before is None:
                self._remove(entry)
            raise JournalError(str(error)) from None

    def _settle(self, entry: _Entry) -> bool:
        """Write or remove the file, as ``entry`` wants it; return whether it had been changed from outside."""
        if entry.wanted is None:
            self._remove(entry)
            return False
        before, was_intact = entry.written, True
        if before is not None and before.created_at == entry.wanted.created_at:
            data = encode(entry.wanted, before)
            n_bytes = entry.file_bytes + len(data)
            if n_bytes > entry.max_file_bytes:
                entry.max_file_bytes = max(SPARE_BYTES, WASTE * len(encode(entry.wanted)))
            if n_bytes <= entry.max_file_bytes:
                was_intact = self._append(entry, data)
                if was_intact:
                    entry.file_bytes = n_bytes
                    entry.written = entry.wanted
                    return False
        data = encode(entry.wanted)
        entry.written = None  # after a failure it is not known which file exists
        self._folder.write_atomically(entry.name, data)
        entry.file_bytes, entry.written = len(data), entry.wanted
        with self._lock:
            self.restored += not was_intact
        return not was_intact

    def _append(self, entry: _Entry, data: bytes) -> bool:
        """Append a record durably; return ``False`` if the file was removed or cut from outside."""
        try:
            descriptor = self._folder.open(entry.name, write=True)
        except JournalError:  # removed, or replaced by something else
            return False
        try:
            with self._folder.os_errors("write", entry.name):
                size = os.fstat(descriptor).st_size
                if size < entry.file_bytes:
                    return False
                if size > entry.file_bytes:  # left by an append that failed and could not be undone
                    os.ftruncate(descriptor, entry.file_bytes)
                try:
                    write_all(descriptor, data, entry.file_bytes)
                    sync(descriptor)
                except OSError:
                    with contextlib.suppress(OSError):  # the next append tries again
                        os.ftruncate(descriptor, entry.file_bytes)
                    raise
        finally:
            os.close(descriptor)
        return True

    def _remove(self, entry: _Entry) -> None:
        self._folder.remove(entry.name)
        for name in self._folder.names():
            if name.startswith(entry.stem) and name.endswith(QUARANTINE_SUFFIX):
                self._folder.remove(name)
        self._folder.sync()
        with self._lock:
            entry.closed = True
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _load(self, name: str) -> _Entry:
        """Read a file and cut off half a record at its end.

        Raises:
            JournalError, DamagedFile: the file cannot be used.
        """
        data = self._folder.read(name, MAX_FILE_BYTES)
        session, n_bytes = decode(data)
        entry = _Entry(session.key, file_stem(session.key), session, session, n_bytes)
        if name != entry.name:
            raise DamagedFile("it is the file of another session under this name")
        if n_bytes < len(data):
            self._folder.cut(name, n_bytes)
            self._report(name, f"cut off {len(data) - n_bytes} bytes after the last intact record")
        return entry

    def _report(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")
