"""What was said in sessions, on disk before anybody is told that a turn is done.

A session is a file to which each turn adds a record (``journal_format``).  A turn that ``write`` has returned from is
there after any crash, also of the machine; of one under way all or nothing is.  A file in which little is still true
is written anew, as is one that somebody has removed or cut: what it must hold is known here, by references to what its
owner holds anyway.

All functions block on the disk.  Everything may be called from several threads at once; one file is written by one at
a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import Final

import attrs

from uma_trio.store.folder import TEMPORARY, Found, PrivateFolder, StoreError, read_up_to, sync, write_all
from uma_trio.store.journal_format import (
    MAX_FILE_BYTES,
    MAX_MODEL_CHARACTERS,
    SPARE_BYTES,
    WASTE,
    Damaged,
    Extent,
    Foreign,
    Header,
    SessionKey,
    SessionRecord,
    decode,
    encode_header,
    encode_turn,
    file_stem,
    record_of,
)

SUFFIX: Final = ".session"
ASIDE: Final = ".bad"
"""Of files that cannot be used: kept for a look, until their session is closed or there are too many."""

MAX_ASIDE: Final = 100
MAX_ASIDE_BYTES: Final = 1 << 28
"""Of all files that were set aside; beyond either the oldest go."""


class JournalError(StoreError):
    """A session cannot be kept, or not be read again."""


@attrs.define(eq=False)
class _Entry:
    """What is known of a session's file."""

    key: SessionKey
    name: str
    wanted: SessionRecord | None = None
    """What it is to hold; ``None``: it is to go."""
    written: SessionRecord | None = None
    """What it holds as far as is known; ``None``: open."""
    extent: Extent = attrs.field(factory=Extent)
    size: int = 0
    """Bytes of whole records."""
    gone: bool = False
    """A new file of that name would be another entry's."""
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the file is read or written."""


class Journal:
    """The sessions of one model in one folder.

    Call ``load`` first: it says what there is, and repairs what a crash has left.

    Args:
        folder: made if it is not there.  One process at a time may use it.
        model: says which model tokens belong to; sessions of another are left alone.
        max_sessions: how many are kept; more are refused.

    Raises:
        JournalError: the folder cannot be used.
        ValueError: ``model`` is empty or too long.
    """

    def __init__(self, folder: Path, *, model: str, max_sessions: int) -> None:
        if not 1 <= len(model) <= MAX_MODEL_CHARACTERS:
            raise ValueError(f"a model is named by 1 to {MAX_MODEL_CHARACTERS} characters")
        self.max_sessions = max_sessions
        self.restored = 0
        """Files that were gone, or shorter than they had been left, and were written anew."""
        self.problems: list[str] = []
        """What the last ``load`` did not take as it was, and why: one line each."""
        self._model = model
        self._entries: dict[SessionKey, _Entry] = {}
        self._aside: dict[str, int] = {}
        """Bytes of each file that was set aside, the oldest first."""
        self._lock = threading.Lock()
        """Of the three above; taken with an entry's lock held, never the other way round."""
        self._folder = PrivateFolder(folder, JournalError)

    def close(self) -> None:
        """Let others use the folder; nothing can be written any more."""
        self._folder.close()

    # -- what there is --------------------------------------------------------------------------

    def load(self) -> list[SessionRecord]:
        """All sessions, the longest unused first; to be called before anything is written.

        A last record that is not whole is cut off; files that are damaged otherwise, or of an earlier version, are set
        aside; those of another model or a later version, and what is no plain file of this user, are left alone.
        ``problems`` says which and why.

        Raises:
            JournalError: the folder cannot be read.
        """
        with self._lock:
            self._entries.clear()
            self.problems = []
            sessions: list[SessionRecord] = []
            aside: list[Found] = []
            for each in reversed(self._folder.found()):
                if each.refused:
                    self._report(each.name, f"left alone, it is {each.refused}")
                elif each.name.endswith(TEMPORARY):
                    self._folder.remove(each.name)
                elif each.name.endswith(ASIDE):
                    aside.append(each)
                elif not each.name.endswith(SUFFIX):
                    self._report(each.name, "left alone, it is no session")
                elif len(self._entries) >= self.max_sessions:
                    self._report(each.name, f"left alone, there are {self.max_sessions} that were used later")
                else:
                    try:
                        entry, session = self._taken(each.name)
                    except (Foreign, JournalError) as error:
                        self._report(each.name, f"left alone, {error}")
                    except Damaged as error:
                        new_name = f"{each.name.removesuffix(SUFFIX)}.{secrets.token_hex(4)}{ASIDE}"
                        self._report(each.name, f"set aside as {new_name}: {error}")
                        with contextlib.suppress(JournalError):  # it is not used in any case
                            self._folder.rename(each.name, new_name)
                            aside.append(attrs.evolve(each, name=new_name))
                    else:
                        self._entries[entry.key] = entry
                        sessions.append(session)
            self._aside = {each.name: each.n_bytes for each in reversed(aside)}
            while len(self._aside) > MAX_ASIDE or sum(self._aside.values()) > MAX_ASIDE_BYTES:
                name = next(iter(self._aside))
                del self._aside[name]
                with contextlib.suppress(JournalError):  # the next start tries again
                    self._folder.remove(name)
            return sorted(sessions, key=lambda session: session.used_at)

    def behind(self) -> list[SessionKey]:
        """Sessions whose files are not what they should be: gone, or a change of them has failed.  For ``repair``.

        Raises:
            JournalError: the folder is gone and cannot be made again, or it cannot be read.
        """
        self._folder.renew()
        there = self._folder.names()
        with self._lock:
            return [
                entry.key
                for entry in self._entries.values()
                if entry.name not in there or entry.wanted is not entry.written
            ]

    # -- changes --------------------------------------------------------------------------------

    def write(self, session: SessionRecord) -> bool:
        """Make ``session`` what is there under its key, durable when this returns; its arrays must not change.

        Where the disk fails, what was there before stays, and ``repair`` tries again.

        Returns:
            Whether the file was gone, or shorter than it had been left: it was written anew.

        Raises:
            JournalError: the session is out of bounds, there are too many, or it cannot be written.
        """
        while True:
            with self._lock:
                entry = self._entries.get(session.key) or self._new_entry(session)
            with entry.lock:
                if not entry.gone:
                    return self._written(entry, session)

    def repair(self, key: SessionKey) -> SessionRecord | None:
        """Write what is known of a session where its file is gone or behind; what the file holds now.

        Raises:
            JournalError: it cannot be written.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        with entry.lock:
            if entry.gone:
                return None
            if entry.wanted is not entry.written or not self._folder.exists(entry.name):
                self._settle(entry)
            return entry.wanted

    def remove(self, key: SessionKey) -> None:
        """Forget a session, its file, and what was set aside of it before; for good when this returns.

        Raises:
            JournalError: something cannot be removed; ``repair`` tries again.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        with entry.lock:
            if not entry.gone:
                entry.wanted = None
                self._settle(entry)

    # -- one file -------------------------------------------------------------------------------

    def _header(self, session: SessionRecord) -> Header:
        return Header(model=self._model, key=session.key, created_at=session.created_at)

    def _new_entry(self, session: SessionRecord) -> _Entry:
        key = session.key
        try:
            encode_header(self._header(session))
            name = file_stem(self._model, key) + SUFFIX
        except ValueError as error:
            raise JournalError(str(error)) from None
        if len(self._entries) >= self.max_sessions:
            raise JournalError(f"there are {self.max_sessions} sessions, which is the most: close some")
        if self._folder.exists(name):
            raise JournalError(f"{self._folder.path / name} was left alone at the start: remove it first")
        self._entries[key] = entry = _Entry(key, name)
        return entry

    def _written(self, entry: _Entry, session: SessionRecord) -> bool:
        before, entry.wanted = entry.wanted, session
        try:
            self._folder.renew()
            return self._settle(entry)
        except ValueError as error:  # it will not be better the next time
            entry.wanted = before
            if before is None:
                self._remove(entry)
            raise JournalError(str(error)) from None

    def _settle(self, entry: _Entry) -> bool:
        """Make the file what is wanted; whether it was not as it had been left."""
        if entry.wanted is None:
            self._remove(entry)
            return False
        before, was_whole = entry.written, True
        if before is not None and before.created_at == entry.wanted.created_at:
            turn = record_of(entry.wanted, before)
            extent = entry.extent.copy()
            extent.apply(turn)
            data = encode_turn(turn)
            if entry.size + len(data) <= max(SPARE_BYTES, WASTE * extent.live_bytes):
                was_whole = self._extend(entry, data)
                if was_whole:
                    entry.size += len(data)
                    entry.extent, entry.written = extent, entry.wanted
                    return False
        turn = record_of(entry.wanted)
        extent = Extent()
        extent.apply(turn)
        data = encode_header(self._header(entry.wanted)) + encode_turn(turn)
        entry.written = None  # a failure leaves it open which file is there
        self._folder.put(entry.name, data)
        entry.size, entry.extent, entry.written = len(data), extent, entry.wanted
        with self._lock:
            self.restored += not was_whole
        return not was_whole

    def _extend(self, entry: _Entry, data: bytes) -> bool:
        """Add a record, if the file is there as it was left; whether it is."""
        try:
            descriptor = self._folder.open(entry.name, write=True)
        except JournalError:  # gone, or something else is there in its place
            return False
        try:
            with self._folder.telling("write", entry.name):
                size = os.fstat(descriptor).st_size
                if size < entry.size:
                    return False
                if size > entry.size:  # an append that failed could not be taken back then
                    os.ftruncate(descriptor, entry.size)
                try:
                    write_all(descriptor, data, entry.size)
                    sync(descriptor)
                except OSError:
                    with contextlib.suppress(OSError):  # the next append tries again
                        os.ftruncate(descriptor, entry.size)
                    raise
        finally:
            os.close(descriptor)
        return True

    def _remove(self, entry: _Entry) -> None:
        self._folder.remove(entry.name)
        with self._lock:
            bad = [name for name in self._aside if name.startswith(entry.name.removesuffix(SUFFIX))]
        for name in bad:
            self._folder.remove(name)
        self._folder.sync()
        with self._lock:
            for name in bad:
                self._aside.pop(name, None)
            entry.gone = True
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _taken(self, name: str) -> tuple[_Entry, SessionRecord]:
        """Read a file and cut off what is not whole.

        Raises:
            JournalError, Damaged, Foreign: it cannot be used.
        """
        data = self._content(name)
        session, extent, good = decode(data, self._model)
        if name != file_stem(self._model, session.key) + SUFFIX:
            raise Damaged("it is another session's file under this name")
        if good < len(data):
            self._cut(name, good)
            self._report(name, f"{len(data) - good} bytes cut off behind the last whole record")
        return _Entry(session.key, name, session, session, extent, good), session

    def _content(self, name: str) -> bytearray:
        descriptor = self._folder.open(name)
        try:
            with self._folder.telling("read", name):
                size = os.fstat(descriptor).st_size
                if size > MAX_FILE_BYTES:
                    raise Damaged(f"it has {size} bytes, a session has {MAX_FILE_BYTES} at most")
                return read_up_to(descriptor, size, 0)
        finally:
            os.close(descriptor)

    def _cut(self, name: str, size: int) -> None:
        descriptor = self._folder.open(name, write=True)
        try:
            with self._folder.telling("cut", name):
                os.ftruncate(descriptor, size)
                sync(descriptor)
        finally:
            os.close(descriptor)

    def _report(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")
