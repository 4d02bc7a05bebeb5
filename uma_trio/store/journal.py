"""The tokens of sessions, on disk before anybody is told that a turn is done.

A session is a file to which each turn adds a record (``journal_format``).  A turn that ``append`` has returned from is
there after any crash, also of the machine; of one under way all or nothing is.  Files in which little is still true
are written anew.

All functions block on the disk.  Everything may be called from several threads at once; of one session's turns one is
written at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from uma_trio.protocol.messages import ChatMessage
from uma_trio.store import tokens as token_list
from uma_trio.store.folder import TEMPORARY, PrivateFolder, StoreError, read_up_to, sync, write_all
from uma_trio.store.journal_format import (
    MAX_FILE_BYTES,
    MAX_MODEL_CHARACTERS,
    SPARE_BYTES,
    WASTE,
    Damaged,
    Extent,
    Foreign,
    Header,
    Record,
    Session,
    SessionKey,
    Turn,
    as_record,
    decode,
    encode_header,
    encode_session,
    encode_turn,
    file_stem,
)
from uma_trio.store.tokens import Tokens

SUFFIX: Final = ".session"
ASIDE: Final = ".bad"

UNSURE: Final = -1


class JournalError(StoreError):
    """A session cannot be kept, or not be read again."""


@attrs.frozen(kw_only=True, eq=False)
class SessionRecord:
    """A session as it is on disk."""

    key: SessionKey
    created_at: float
    """Seconds since 1970, as ``last_used_at``."""
    last_used_at: float
    n_turns: int
    tokens: Tokens
    """What is left of all turns, int32 ``[n]``, read-only."""
    messages: tuple[ChatMessage, ...]


@attrs.define(eq=False)
class _Entry:
    """What is known of a session's file."""

    header: Header
    name: str
    extent: Extent
    size: int = 0
    """Bytes of whole records; 0: there is no file yet, ``UNSURE``: a failure left it open which file is there."""
    gone: bool = False
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
        self.set_aside = 0
        """Files found damaged since this object was made."""
        self.cut = 0
        """Files of which a last, incomplete record was cut off."""
        self.problems: list[str] = []
        """What the last ``load`` did not take as it was, and why: one line each."""
        self._model = model
        self._entries: dict[SessionKey, _Entry] = {}
        self._lock = threading.Lock()
        """Of the entries; taken with an entry's lock held, never the other way round."""
        self._folder = PrivateFolder(folder, JournalError)

    def close(self) -> None:
        """Let others use the folder; nothing can be written any more."""
        self._folder.close()

    # -- what there is --------------------------------------------------------------------------

    def load(self) -> list[SessionRecord]:
        """All sessions, the longest unused first; to be called before anything is written.

        A last record that is not whole is cut off; files that are damaged otherwise are set aside; those of another
        model, and what is no plain file of this user, are left alone.  ``problems`` says which and why.

        Raises:
            JournalError: the folder cannot be read.
        """
        with self._lock:
            self._entries.clear()
            self.problems = []
            sessions = []
            for each in reversed(self._folder.found()):
                if each.refused:
                    self._report(each.name, f"left alone, it is {each.refused}")
                elif each.name.endswith(TEMPORARY):
                    self._folder.remove(each.name)
                elif each.name.endswith(ASIDE):
                    continue
                elif not each.name.endswith(SUFFIX):
                    self._report(each.name, "left alone, it is no session")
                elif len(self._entries) >= self.max_sessions:
                    self._report(each.name, f"left alone, there are {self.max_sessions} that were used later")
                else:
                    try:
                        entry, session = self._taken(each.name)
                    except Foreign as error:
                        self._report(each.name, f"left alone, {error}")
                    except Damaged as error:
                        self._report(each.name, f"set aside, {error}")
                        self._set_aside(each.name)
                    except JournalError as error:
                        self._report(each.name, f"left alone, {error}")
                    else:
                        self._entries[entry.header.key] = entry
                        sessions.append(_told(session))
            return sorted(sessions, key=lambda session: session.last_used_at)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Of the files of all sessions."""
        with self._lock:
            return sum(max(0, entry.size) for entry in self._entries.values())

    # -- changes --------------------------------------------------------------------------------

    def create(self, key: SessionKey, when: float) -> None:
        """A new session without tokens, durable when this returns.

        Raises:
            JournalError: it is there already, there are too many, or it cannot be written.
        """
        self._begin(Session.begun(self._new_header(key, when)))

    def append(self, key: SessionKey, turn: Turn) -> None:
        """One turn more, durable when this returns; a session that is not there begins with it.

        Where it fails the session is as before; the same turn may be tried again.

        Raises:
            JournalError: the turn does not fit the session or is out of bounds, there are too many sessions, or it
                cannot be written.
        """
        while (entry := self._entries.get(key)) is None:
            session = Session.begun(self._new_header(key, turn.when))
            record = _record_of(turn, session.extent)
            _apply(session, record)
            if self._begin(session, exist_ok=True):
                return
        with self._held(entry):
            record = _record_of(turn, entry.extent)
            extent = entry.extent.copy()
            _apply(extent, record)
            data = encode_turn(record)
            if entry.size + len(data) > max(SPARE_BYTES, WASTE * extent.live_bytes):
                session = self._read(entry)
                _apply(session, record)
                self._write(entry, encode_session(session))
            else:
                self._extend(entry, data)
            entry.extent = extent

    def rewrite(self, key: SessionKey) -> None:
        """Write the session's file anew, without what later turns have replaced.  ``append`` does it in time.

        Raises:
            JournalError: there is no such session, or it cannot be read or written.
        """
        with self._held(self._known(key)) as entry:
            self._write(entry, encode_session(self._read(entry)))

    def fork(self, key: SessionKey, new_id: str) -> SessionRecord:
        """A second session of the same tenant with the same tokens and messages, durable when this returns.

        Raises:
            JournalError: there is no session ``key``, there is one ``new_id``, there are too many, or it cannot be
                read or written.
        """
        with self._held(self._known(key)) as entry:
            session = self._read(entry)
        session.used_at = time.time()
        session.header = self._new_header(SessionKey(key.tenant, new_id), session.used_at)
        self._begin(session)
        return _told(session)

    def remove(self, key: SessionKey) -> None:
        """Forget a session and its file, for good when this returns.

        Raises:
            JournalError: there is no such session, or its file cannot be removed.
        """
        with self._held(self._known(key)) as entry:
            self._folder.remove(entry.name)
            self._forget(entry)
            self._folder.sync()

    # -- one file -------------------------------------------------------------------------------

    def _begin(self, session: Session, *, exist_ok: bool = False) -> bool:
        """Write a new session's file; whether it was new."""
        header = session.header
        entry = _Entry(header, file_stem(self._model, header.key) + SUFFIX, session.extent)
        with entry.lock:
            with self._lock:
                if header.key in self._entries:
                    if exist_ok:
                        return False
                    raise JournalError(f"there is a session {header.key.id!r} already")
                if len(self._entries) >= self.max_sessions:
                    raise JournalError(f"there are {self.max_sessions} sessions, which is the most: remove some")
                if self._folder.exists(entry.name):
                    raise JournalError(f"{self._folder.path / entry.name} was left alone by load: remove it first")
                self._entries[header.key] = entry
            try:
                self._write(entry, encode_session(session))
            except BaseException:
                self._forget(entry)
                with contextlib.suppress(JournalError):  # what is there was not promised to anybody
                    self._folder.remove(entry.name)
                raise
        return True

    @contextlib.contextmanager
    def _held(self, entry: _Entry) -> Iterator[_Entry]:
        """The entry, locked, and what is known of its file is so."""
        with entry.lock:
            if entry.gone:
                raise JournalError(f"session {entry.header.key.id!r} was removed meanwhile")
            if entry.size == UNSURE:
                try:
                    found, _ = self._taken(entry.name)
                except (Damaged, Foreign) as error:
                    raise JournalError(f"{self._folder.path / entry.name} cannot be used: {error}") from None
                entry.size, entry.extent = found.size, found.extent
            yield entry

    def _taken(self, name: str) -> tuple[_Entry, Session]:
        """Read a file and cut off what is not whole.

        Raises:
            JournalError, Damaged, Foreign: it cannot be used.
        """
        data = self._content(name)
        session, good = decode(data, self._model)
        if name != file_stem(self._model, session.header.key) + SUFFIX:
            raise Damaged("it is another session's file under this name")
        if good < len(data):
            self._cut(name, good)
            self.cut += 1
            self._report(name, f"{len(data) - good} bytes cut off behind the last whole record")
        return _Entry(session.header, name, session.extent.copy(), good), session

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

    def _read(self, entry: _Entry) -> Session:
        name = entry.name
        try:
            session, good = decode(self._content(name)[: entry.size], self._model)
        except (Damaged, Foreign) as error:
            raise JournalError(f"{self._folder.path / name} is not what was written: {error}") from None
        if good != entry.size:
            raise JournalError(f"{self._folder.path / name} was cut off: restart to use what is left")
        return session

    def _write(self, entry: _Entry, data: bytes) -> None:
        """Make ``data`` the whole file."""
        try:
            self._folder.put(entry.name, data)
        except BaseException:
            if entry.size:
                entry.size = UNSURE
            raise
        entry.size = len(data)

    def _extend(self, entry: _Entry, data: bytes) -> None:
        name = entry.name
        descriptor = self._folder.open(name, write=True)
        try:
            with self._folder.telling("write", name):
                size = os.fstat(descriptor).st_size
                if size < entry.size:
                    raise JournalError(f"{self._folder.path / name} was cut off: restart to use what is left")
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
        entry.size += len(data)

    def _cut(self, name: str, size: int) -> None:
        descriptor = self._folder.open(name, write=True)
        try:
            with self._folder.telling("cut", name):
                os.ftruncate(descriptor, size)
                sync(descriptor)
        finally:
            os.close(descriptor)

    # -- bookkeeping ----------------------------------------------------------------------------

    def _new_header(self, key: SessionKey, when: float) -> Header:
        header = Header(model=self._model, key=key, created_at=when)
        try:
            encode_header(header)
        except ValueError as error:
            raise JournalError(str(error)) from None
        return header

    def _known(self, key: SessionKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise JournalError(f"there is no session {key.id!r}")
        return entry

    def _forget(self, entry: _Entry) -> None:
        entry.gone = True
        with self._lock:
            if self._entries.get(entry.header.key) is entry:
                del self._entries[entry.header.key]

    def _set_aside(self, name: str) -> None:
        self.set_aside += 1
        with contextlib.suppress(JournalError):  # it is not used in any case
            self._folder.rename(name, f"{name.removesuffix(SUFFIX)}.{secrets.token_hex(4)}{ASIDE}")

    def _report(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")


def _record_of(turn: Turn, extent: Extent) -> Record:
    try:
        return as_record(turn, len(extent.sizes))
    except ValueError as error:
        raise JournalError(str(error)) from None


def _apply(to: Session | Extent, record: Record) -> None:
    try:
        to.apply(record)
    except ValueError as error:
        raise JournalError(str(error)) from None


def _told(session: Session) -> SessionRecord:
    return SessionRecord(
        key=session.header.key,
        created_at=session.header.created_at,
        last_used_at=session.used_at,
        n_turns=session.extent.n_turns,
        tokens=token_list.from_bytes(session.token_bytes),
        messages=tuple(session.messages),
    )
