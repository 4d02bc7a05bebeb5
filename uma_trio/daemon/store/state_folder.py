"""Sequence states in files: written through a descriptor by the engine, verified when they are read back.

A state is written under a temporary name, made durable, and renamed: a file with a state's name is complete.  Every
byte is verified against hashes (``state_format``) before a state is used, because disks fail and people edit files: here,
or by the engine while it loads the state.
The folder has a maximum size: the least recently used states make room for new ones.

All functions block, on the disk as well; call them from worker threads.  They may be called from several threads.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs

from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.store.encoding import DamagedFile, ForeignFile
from uma_trio.daemon.store.folder import (
    QUARANTINE_SUFFIX,
    TEMPORARY_SUFFIX,
    PrivateFolder,
    StoreError,
    read_into,
    read_up_to,
    sync,
    write_all,
)
from uma_trio.daemon.store.state_format import (
    NAME_BYTES,
    PAYLOAD_AT,
    decode_header,
    decode_tail,
    encode,
    fingerprint_of,
)
from uma_trio.engine_link.state_pages import HASH_BYTES, PAGE_BYTES, hash_of, n_pages
from uma_trio.engine_link.tokens import TokenIds

SUFFIX: Final = ".state"

PAGES_PER_READER: Final = 64
"""Fewest pages for which a thread is started.

Measured on two EPYC cores: one thread verifies 50 MB at 20 GB/s from the page cache and at 2.9 GB/s from the disk, and
more threads are slower.  For 1 GB, two threads are faster: 20 instead of 17 GB/s, and 1.6 instead of 1.1 GB/s.
"""

NAME: Final = re.compile(r"[0-9a-f]{32}")


class StateFileError(StoreError):
    """A state cannot be saved or read back."""


class CorruptState(StateFileError):
    """A state's file is not what was written; it was quarantined."""


@attrs.define
class _File:
    """A file that counts towards the size of the folder."""

    n_bytes: int
    usable: bool
    """The file has the folder's fingerprint and is not known to be damaged."""


class StateFolder:
    """The saved states in one folder, of at most ``max_bytes`` together.

    Call ``scan`` first: files that it has not seen do not count.

    Args:
        folder: created if missing.  Only one process at a time can use it.
        max_bytes: most bytes of all files together.  Removed files do not count, even while they are open.
        fingerprint: identifies the library, the model and the layout of its contexts.  States with another fingerprint
            are foreign: they are not listed, and stay until they are the least recently used.
        readers: most threads that read and hash one state together; small states need only one.

    Raises:
        StateFileError: the folder cannot be used.
    """

    def __init__(self, folder: Path, *, max_bytes: int, fingerprint: bytes | str, readers: int = 1) -> None:
        self.max_bytes = max_bytes
        self.readers = readers
        self.problems: list[str] = []
        """Files that the last ``scan`` did not list, and why; one line each."""
        self._fingerprint = fingerprint_of(fingerprint)
        self._files: OrderedDict[str, _File] = OrderedDict()
        """By file name, least recently used first."""
        self._drafts: weakref.WeakSet[StateDraft] = weakref.WeakSet()
        self._lock = threading.Lock()
        """Protects the two above.  Only ``scan`` blocks on the disk while it holds the lock."""
        self._folder = PrivateFolder(folder, StateFileError)

    def close(self) -> None:
        """Release the folder.  Open states stay readable; drafts can no longer be finished."""
        self._folder.close()

    # -- inventory ------------------------------------------------------------------------------

    def scan(self) -> list[SavedState]:
        """List all usable states, least recently used first.  Reads their metadata, but not the states.

        Also cleans up: removes unfinished files and quarantines damaged ones.  Foreign files, and everything that is
        not a regular file of this user, stay as they are.  ``problems`` lists the files that were not accepted.  Other
        calls wait until the scan is done.

        Raises:
            StateFileError: the folder cannot be read.
        """
        with self._lock:
            states = []
            self._files.clear()
            self.problems = []
            drafts = {draft.file_name for draft in self._drafts}
            for file in self._folder.list_files():
                if file.name in drafts:
                    continue
                if file.refused:
                    self.problems.append(f"{file.name}: ignored, it is {file.refused}")
                elif file.name.endswith(TEMPORARY_SUFFIX):
                    self._folder.remove(file.name)
                elif file.name.endswith(QUARANTINE_SUFFIX):
                    self._add_quarantined(file.name, file.n_bytes)
                elif not file.name.endswith(SUFFIX) or not NAME.fullmatch(file.name.removesuffix(SUFFIX)):
                    self.problems.append(f"{file.name}: ignored, it is not a state file")
                else:
                    self._files[file.name] = entry = _File(file.n_bytes, usable=False)
                    try:
                        states.append(self._inspect(file.name))
                        entry.usable = True
                    except (ForeignFile, StateFileError) as error:
                        self.problems.append(f"{file.name}: ignored, {error}")
                    except DamagedFile as error:
                        self.problems.append(f"{file.name}: quarantined, {error}")
                        del self._files[file.name]
                        if self._rename_to_quarantine(file.name):
                            self._add_quarantined(file.name + QUARANTINE_SUFFIX, file.n_bytes)
            return states

    def __contains__(self, name: str) -> bool:
        """Tell whether a state still exists; it may have made room for others."""
        file = self._files.get(name + SUFFIX)
        return file is not None and file.usable

    @property
    def used_bytes(self) -> int:
        """Size of all files that count: states, drafts, foreign files and quarantined files."""
        with self._lock:
            return self._used()

    def touch(self, name: str) -> None:
        """Mark a state as used now.  The order of use survives a restart.

        Raises:
            StateFileError: the state does not exist any more.
        """
        file = self._file_name(name)
        with self._lock:
            if file in self._files:
                self._files.move_to_end(file)
        with self._folder.os_errors("touch", file):
            now = time.time_ns()  # the file system's own timestamps are too coarse for an order
            os.utime(file, ns=(now, now), dir_fd=self._folder.descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a state.  Open readers keep it; removing a missing state is a no-op.

        Raises:
            StateFileError: the file cannot be removed.
        """
        file = self._file_name(name)
        self._folder.remove(file)
        with self._lock:
            self._files.pop(file, None)

    # -- writing --------------------------------------------------------------------------------

    def begin(self, n_bytes: int) -> StateDraft:
        """Create a file for a state of at most ``n_bytes``.

        Its space on disk is allocated and its pages are in the page cache, so that writing through a mapping of
        the file neither blocks on the disk nor fails because the disk is full.  Least recently used states make room.

        Raises:
            StateFileError: the disk is full, or ``n_bytes`` do not fit into the folder next to the other drafts.
        """
        if n_bytes < 1:
            raise StateFileError(f"a state has at least 1 byte, not {n_bytes}")
        draft = StateDraft(self, secrets.token_hex(NAME_BYTES), n_bytes)
        self._reopen()
        try:
            self._reserve(draft, PAYLOAD_AT + n_bytes + HASH_BYTES * n_pages(n_bytes))
            draft._open(self._folder.create(draft.file_name))
            with self._folder.os_errors("allocate", draft.file_name):
                allocate(draft.fd, PAYLOAD_AT + n_bytes)
        except BaseException:
            draft.abandon()
            raise
        return draft

    def _reopen(self) -> None:
        """Continue in a new, empty folder if the folder was removed."""
        if self._folder.reopen():
            with self._lock:
                self._files.clear()

    def _reserve(self, draft: StateDraft, n_bytes: int) -> None:
        """Count ``draft`` as ``n_bytes`` and make room for them."""
        evicted: list[tuple[str, _File]] = []
        with self._lock:
            others = sum(other.reserved for other in self._drafts if other is not draft)
            if n_bytes + others > self.max_bytes:
                raise StateFileError(
                    f"no room in {self._folder.path}: {n_bytes} bytes and {others} of other drafts exceed its limit "
                    f"of {self.max_bytes}"
                )
            draft.reserved = n_bytes
            self._drafts.add(draft)
            while self._files and self._used() > self.max_bytes:
                evicted.append(self._files.popitem(last=False))
        while evicted:
            name, file = evicted[0]
            try:
                self._folder.remove(name)
            except StateFileError:
                with self._lock:
                    for name, file in reversed(evicted):
                        self._files[name] = file
                        self._files.move_to_end(name, last=False)
                raise
            del evicted[0]

    def _complete(self, draft: StateDraft, state: SavedState) -> None:
        """Add the metadata, make the file durable and give it its final name."""
        fd, now, n_bytes = draft.fd, time.time_ns(), state.n_bytes
        if not 0 < n_bytes <= draft.n_bytes:
            raise StateFileError(f"{n_bytes} bytes do not fit a draft of {draft.n_bytes}")
        try:
            with self._folder.os_errors("read", draft.file_name):
                hashes = _hash_pages(fd, n_bytes, self.readers)
            header, tail = encode(state, fingerprint=self._fingerprint, saved_at=now / 1e9, page_hashes=hashes)
        except (ValueError, DamagedFile) as error:
            raise StateFileError(f"{self._folder.path / draft.file_name} cannot be finished: {error}") from None
        file_bytes = PAYLOAD_AT + n_bytes + len(tail)
        self._reserve(draft, file_bytes)
        with self._folder.os_errors("write", draft.file_name):
            _write_metadata(fd, header, tail, PAYLOAD_AT + n_bytes, now)
        name = draft.name + SUFFIX
        try:
            self._folder.rename(draft.file_name, name)
        except StateFileError:
            with contextlib.suppress(StateFileError):  # it may be renamed but not durably: better not at all
                self._folder.remove(name)
            raise
        with self._lock:
            self._drafts.discard(draft)
            draft.reserved = 0
            self._files[name] = _File(file_bytes, usable=True)

    def _discard(self, draft: StateDraft) -> None:
        with self._lock:
            self._drafts.discard(draft)
            draft.reserved = 0
        self._folder.remove(draft.file_name)

    # -- reading --------------------------------------------------------------------------------

    def open(self, name: str, *, verify: bool = True) -> StateReader:
        """Open a state after verifying every byte of it.

        Args:
            verify: if False, and the state is in the page cache, only the metadata is verified.  Whoever reads the state
                then verifies it with ``reader.hashes``.

        Raises:
            CorruptState: the file is not what was written; it was quarantined.
            StateFileError: the state does not exist any more, cannot be read, or is foreign.
        """
        file = self._file_name(name)
        try:
            fd = self._folder.open(file)
        except StateFileError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                with self._lock:
                    self._files.pop(file, None)
            raise
        try:
            with self._folder.os_errors("read", file):
                state, hashes = self._read_metadata(fd, name)
                if verify or not _is_cached(fd, PAYLOAD_AT + state.n_bytes):
                    _verify(_hash_pages(fd, state.n_bytes, self.readers), hashes)
                    hashes = []
        except BaseException as error:
            os.close(fd)
            match error:
                case ForeignFile():
                    raise StateFileError(f"{self._folder.path / file} is not used: {error}") from None
                case DamagedFile():
                    self._quarantine(file)
                    raise CorruptState(f"{self._folder.path / file} was quarantined: {error}") from None
            raise
        with contextlib.suppress(StateFileError):  # removed in the meantime: its place in the order is irrelevant
            self.touch(name)
        return StateReader(fd, state, b"".join(hashes))

    def _read_metadata(self, fd: int, name: str) -> tuple[SavedState, list[bytes]]:
        size = os.fstat(fd).st_size
        header = decode_header(read_up_to(fd, min(size, PAYLOAD_AT), 0), name, size, self._fingerprint)
        return decode_tail(read_up_to(fd, header.tail_bytes, header.tail_at), header)

    def _inspect(self, file: str) -> SavedState:
        with self._folder.opened("read", file) as fd:
            return self._read_metadata(fd, file.removesuffix(SUFFIX))[0]

    def _quarantine(self, file: str) -> None:
        with self._lock:
            known = self._files.pop(file, None)
        if self._rename_to_quarantine(file) and known is not None:
            with self._lock:
                self._add_quarantined(file + QUARANTINE_SUFFIX, known.n_bytes)

    def _rename_to_quarantine(self, file: str) -> bool:
        try:
            self._folder.rename(file, file + QUARANTINE_SUFFIX)
        except StateFileError:  # removed in the meantime, or a read-only folder: the file is not used in any case
            return False
        return True

    def path_of(self, name: str) -> Path:
        """Return where a state is."""
        return self._folder.path / self._file_name(name)

    def adopt(self, path: Path, principal: str) -> SavedState:
        """Copy the file of another folder, after verifying every byte of it.  Blocks on the disk.

        Args:
            principal: its owner here.

        Raises:
            StateFileError: it is damaged or foreign, or there is no room.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StateFileError(f"cannot read {path}: {error.strerror}") from None
        try:
            try:
                state, hashes = self._read_metadata(fd, path.name.removesuffix(SUFFIX))
                _verify(_hash_pages(fd, state.n_bytes, self.readers), hashes)
            except (OSError, DamagedFile) as error:
                raise StateFileError(f"{path} is not used: {error}") from None
            draft = self.begin(state.n_bytes)
            try:
                with self._folder.os_errors("write", draft.file_name):
                    buffer = memoryview(bytearray(min(PAGE_BYTES, state.n_bytes)))
                    for at in range(PAYLOAD_AT, PAYLOAD_AT + state.n_bytes, PAGE_BYTES):
                        part = buffer[: PAYLOAD_AT + state.n_bytes - at]
                        read_into(fd, part, at)
                        write_all(draft.fd, part, at)
            except BaseException:
                draft.abandon()
                raise
            return draft.finish(
                state.tokens, principal=principal, checkpoints=state.checkpoints, adapters=state.adapters
            )
        finally:
            os.close(fd)

    # -- bookkeeping, with the lock held --------------------------------------------------------

    def _used(self) -> int:
        return sum(file.n_bytes for file in self._files.values()) + sum(draft.reserved for draft in self._drafts)

    def _add_quarantined(self, file: str, n_bytes: int) -> None:
        self._files[file] = _File(n_bytes, usable=False)
        self._files.move_to_end(file, last=False)

    def _file_name(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise StateFileError(f"{name[:100]!r} is not the name of a state")
        return name + SUFFIX


class _OpenState:
    """A state in an open file, whose descriptor another process gets.

    Reading or writing through a mapping ends a process with SIGBUS if the file was cut or the disk fails.
    """

    offset: Final = PAYLOAD_AT
    """Where the state begins in the file.  A multiple of the system's page size, so it can be mapped from there."""

    def __init__(self) -> None:
        self._fd = -1
        self._close_fd: weakref.finalize[[int], _OpenState] | None = None

    def _open(self, fd: int) -> None:
        """Take ``fd`` over; it is closed with the object at the latest."""
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)

    @property
    def fd(self) -> int:
        """Descriptor of the file, valid until the object is closed; pass it to the engine process, do not close it.

        Raises:
            StateFileError: the object is closed.
        """
        if self._fd < 0:
            raise StateFileError("this state file is closed")
        return self._fd

    def close(self) -> None:
        """Close the file.  Closing twice is a no-op."""
        self._fd = -1
        if self._close_fd is not None:
            self._close_fd()


class StateDraft(_OpenState):
    """A state that is being saved: write ``n_bytes`` at ``offset`` of ``fd``, then call ``finish`` or ``abandon``.

    A draft that is dropped without either leaves a file that the next ``scan`` removes.
    """

    def __init__(self, folder: StateFolder, name: str, n_bytes: int) -> None:
        super().__init__()
        self.name = name
        self.n_bytes = n_bytes
        """Most bytes that the state may have."""
        self.reserved = 0
        """Bytes that count towards the size of the folder."""
        self._folder = folder

    @property
    def file_name(self) -> str:
        """Temporary name of the file."""
        return self.name + TEMPORARY_SUFFIX

    def finish(
        self,
        tokens: TokenIds,
        *,
        principal: str,
        n_bytes: int | None = None,
        checkpoints: tuple[tuple[int, int], ...] = (),
        adapters: str = "",
    ) -> SavedState:
        """Make the state durable under its name.  Reads and hashes the whole file, and blocks on the disk.

        The draft is closed in any case; if an error is raised, its file is removed.

        Args:
            tokens: tokens of the sequence, shape ``[n_tokens]``, which do not change later.
            principal: owner of the sequence, 1 to 128 bytes of UTF-8.
            n_bytes: bytes that were written; the size of the draft by default.
            checkpoints, adapters: see ``SavedState``.

        Raises:
            StateFileError: there is no room, the disk fails, or an argument is invalid.
        """
        size = self.n_bytes if n_bytes is None else n_bytes
        state = SavedState(self.name, principal, tokens, size, checkpoints, adapters)
        try:
            self._folder._complete(self, state)
            return state
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the file.  A no-op after ``finish``.

        Raises:
            StateFileError: the file cannot be removed; the next ``scan`` tries again.
        """
        self.close()
        if self.reserved:
            self._folder._discard(self)


class StateReader(_OpenState):
    """A state, open for reading: ``state.n_bytes`` at ``offset`` of ``fd``.

    The state is in the page cache, as a rule because it was read just now.  Use it soon: later, the system may have to read it
    from the disk again.
    """

    def __init__(self, fd: int, state: SavedState, hashes: bytes) -> None:
        super().__init__()
        self.state = state
        self.hashes = hashes
        """Hashes of its pages, ``HASH_BYTES`` each, if it has not been verified; otherwise empty."""
        self._open(fd)


def allocate(fd: int, n_bytes: int) -> None:
    """Allocate space on disk, and fill the page cache with zeros.

    Space first: a process that writes through a mapping is killed when the disk turns out to be full.  Then the page
    cache: the writer does not wait for the file system to find a page for each 4 KiB.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, n_bytes)
    zeros = memoryview(bytes(min(PAGE_BYTES, n_bytes)))
    for at in range(0, n_bytes, PAGE_BYTES):
        write_all(fd, zeros[: n_bytes - at], at)


def _write_metadata(fd: int, header: bytes, tail: bytes, tail_at: int, mtime_ns: int) -> None:
    """Write all but the state, and make the whole file durable."""
    os.ftruncate(fd, tail_at)
    write_all(fd, tail, tail_at)
    write_all(fd, header, 0)
    os.utime(fd, ns=(mtime_ns, mtime_ns))
    sync(fd)


def _is_cached(fd: int, n_bytes: int) -> bool:
    """Tell whether the first ``n_bytes`` of a file are in the page cache, by one byte of each MiB.

    ``False`` where the system or the file system cannot say.
    """
    no_wait, byte = getattr(os, "RWF_NOWAIT", 0), bytearray(1)
    try:
        return no_wait != 0 and all(os.preadv(fd, [byte], at, no_wait) for at in range(0, n_bytes, PAGE_BYTES))
    except OSError:
        return False


def _hash_pages(fd: int, n_bytes: int, readers: int) -> list[bytes]:
    """Read the state and return the hash of each page, computed by up to ``readers`` threads.

    Reads with system calls: through a mapping, a bad sector would end the process.

    Raises:
        DamagedFile: the file ends before the state does.
    """
    n = n_pages(n_bytes)
    n_threads = max(1, min(readers, n // PAGES_PER_READER))

    def hash_range(first: int, end: int) -> list[bytes]:
        buffer = memoryview(bytearray(min(PAGE_BYTES, n_bytes)))
        hashes = []
        for i in range(first, end):
            page = buffer[: min(PAGE_BYTES, n_bytes - i * PAGE_BYTES)]
            if read_into(fd, page, PAYLOAD_AT + i * PAGE_BYTES) < len(page):
                raise DamagedFile("it was cut off")
            hashes.append(hash_of(page))
        return hashes

    if n_threads == 1:
        return hash_range(0, n)
    # Each thread reads one contiguous range: alternating pages defeat the system's read-ahead.
    ends = [n * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads, "uma-state") as threads:
        return [page_hash for hashes in threads.map(hash_range, ends[:-1], ends[1:]) for page_hash in hashes]


def _verify(hashes: list[bytes], expected: list[bytes]) -> None:
    """Raise ``DamagedFile`` unless the hashes of all pages are as expected."""
    for i, (one, other) in enumerate(zip(hashes, expected, strict=True)):
        if one != other:
            raise DamagedFile(f"it was altered between byte {i * PAGE_BYTES} and {(i + 1) * PAGE_BYTES}")
