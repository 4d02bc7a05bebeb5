"""States of KV sequences in files: written by C through a mapping, checked byte by byte when they come back.

A state is written under a temporary name, made durable, and then renamed: what has a state's name is whole.  What
is read is checked against codes (``spill_format``) all the same, for disks err and people edit.  The folder never
holds more than it may: the states least recently used make room.

All functions block, on the disk too; everything may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import attrs
import numpy.typing as npt

from uma_trio.store import tokens as token_list
from uma_trio.store.folder import (
    TEMPORARY,
    PrivateFolder,
    StoreError,
    read_into,
    read_up_to,
    sync,
    write_all,
)
from uma_trio.store.spill_format import (
    CODE_BYTES,
    NAME_BYTES,
    PAGE_BYTES,
    PAYLOAD_AT,
    Foreign,
    Head,
    Spilled,
    Unusable,
    code_of,
    extra_bytes,
    fingerprint_of,
    is_page,
    make_header,
    make_tail,
    n_pages,
    read_header,
    read_tail,
)
from uma_trio.store.tokens import TOKEN_BYTES, Tokens

KEY: Final = "key"
KEY_BYTES: Final = 32

SUFFIX: Final = ".state"
ASIDE: Final = ".bad"
"""Of files that were found damaged: kept for a look until their room is needed, which is first."""

NAME: Final = re.compile(r"[0-9a-f]{32}")


class SpillError(StoreError):
    """A state cannot be saved, or not be had again."""


class CorruptState(SpillError):
    """A state's file is not what was written; it was set aside."""


@attrs.define
class _File:
    """What is known of a file in the folder."""

    n_bytes: int
    usable: bool
    """Of this fingerprint, and not known to be damaged."""


class SpillFolder:
    """The states in one folder, of one user, at most ``max_bytes`` together.

    Call ``scan`` first: only what it has found, or what was saved since, counts.

    Args:
        folder: made if it is not there.  One process at a time may use it.
        max_bytes: of all files that are kept; more only while one that was removed is still open.
        fingerprint: says which library, model and layout of contexts states belong to.  Those of another are
            foreign: they are not listed, and stay until they are the longest unused.
        readers: threads that check one state together, of which each does about 1 GB/s.

    Raises:
        SpillError: the folder, or the key in it, cannot be used.
    """

    def __init__(self, folder: Path, *, max_bytes: int, fingerprint: bytes | str, readers: int = 1) -> None:
        self.max_bytes = max_bytes
        self.readers = readers
        self.problems: list[str] = []
        """What the last ``scan`` did not list, and why: one line each."""
        self._fingerprint = fingerprint_of(fingerprint)
        self._files: OrderedDict[str, _File] = OrderedDict()
        """By file name, the longest unused first."""
        self._drafts: weakref.WeakSet[Draft] = weakref.WeakSet()
        self._lock = threading.Lock()
        """Of the two above.  Only ``scan`` waits for the disk while it holds it."""
        self._folder = PrivateFolder(folder, SpillError)
        try:
            self._key = self._secret()
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        """Let others use the folder.  States that are open stay so; drafts can no longer be finished."""
        self._folder.close()

    # -- what there is --------------------------------------------------------------------------

    def scan(self) -> list[Spilled]:
        """All usable states, the longest unused first, by what their headers say; the states are not read.

        What a crash has left is removed, what is damaged is set aside, what is foreign or no plain file of this
        user is left alone: ``problems`` says which and why.  Other calls wait until it is done.

        Raises:
            SpillError: the folder cannot be read.
        """
        with self._lock:
            found = []
            self._files.clear()
            self.problems = []
            drafts = {draft.file_name for draft in self._drafts}
            for each in self._folder.found():
                if each.name == KEY or each.name in drafts:
                    continue
                if each.refused:
                    self.problems.append(f"{each.name}: left alone, it is {each.refused}")
                elif each.name.endswith(TEMPORARY):
                    self._folder.remove(each.name)
                elif each.name.endswith(ASIDE):
                    self._add_aside(each.name, each.n_bytes)
                elif not each.name.endswith(SUFFIX) or not NAME.fullmatch(each.name.removesuffix(SUFFIX)):
                    self.problems.append(f"{each.name}: left alone, it is no state")
                else:
                    self._files[each.name] = file = _File(each.n_bytes, usable=False)
                    try:
                        found.append(self._look_at(each.name))
                        file.usable = True
                    except Foreign as error:
                        self.problems.append(f"{each.name}: left alone, {error}")
                    except Unusable as error:
                        self.problems.append(f"{each.name}: set aside, {error}")
                        del self._files[each.name]
                        if self._rename_aside(each.name):
                            self._add_aside(each.name + ASIDE, each.n_bytes)
                    except SpillError as error:
                        self.problems.append(f"{each.name}: left alone, {error}")
            return found

    def __contains__(self, name: str) -> bool:
        """Whether there is a state of that name; it may have made room for others."""
        file = self._files.get(name + SUFFIX)
        return file is not None and file.usable

    @property
    def used_bytes(self) -> int:
        """Of all files that count: states, those being written, foreign ones, and what was set aside."""
        with self._lock:
            return self._used()

    def touch(self, name: str) -> None:
        """``name`` was used just now: others make room before it, also after a restart.

        Raises:
            SpillError: it is not there any more.
        """
        file = self._file_name(name)
        with self._lock:
            if file in self._files:
                self._files.move_to_end(file)
        with self._folder.telling("touch", file):
            now = time.time_ns()  # the system's own mtimes are too coarse for an order
            os.utime(file, ns=(now, now), dir_fd=self._folder.descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Forget a state and its file.  Whoever has it open keeps it; one that is not there is no error.

        Raises:
            SpillError: its file cannot be removed.
        """
        file = self._file_name(name)
        self._folder.remove(file)
        with self._lock:
            self._files.pop(file, None)

    # -- to disk --------------------------------------------------------------------------------

    def begin(self, n_bytes: int) -> Draft:
        """A file for a state of at most ``n_bytes``: its space is allocated, its pages are in memory.

        So writing into the mapping neither waits for the disk nor dies of a full one.  The states longest unused
        make room.

        Raises:
            SpillError: a disk too full, or ``n_bytes`` are more than the folder may hold beside what is
                being written.
        """
        if n_bytes < 1:
            raise SpillError(f"a state of {n_bytes} bytes is none")
        draft = Draft(self, secrets.token_hex(NAME_BYTES), n_bytes)
        self._renew()
        try:
            self._reserve(draft, PAYLOAD_AT + n_bytes + CODE_BYTES * n_pages(n_bytes))
            draft._open(self._folder)
        except BaseException:
            draft.abandon()
            raise
        return draft

    def _renew(self) -> None:
        """Where somebody has removed the folder, go on in a new one, which has no states."""
        if not self._folder.renew():
            return
        with self._lock:
            self._files.clear()
        self._folder.put(KEY, self._key)

    def _reserve(self, draft: Draft, n_bytes: int) -> None:
        """Let ``draft`` count as ``n_bytes``, and make room for them."""
        leaving: list[tuple[str, _File]] = []
        with self._lock:
            others = sum(each.reserved for each in self._drafts if each is not draft)
            if n_bytes + others > self.max_bytes:
                raise SpillError(
                    f"no room in {self._folder.path}: {n_bytes} bytes, beside {others} that are being written, "
                    f"are more than the {self.max_bytes} that it may hold"
                )
            draft.reserved = n_bytes
            self._drafts.add(draft)
            while self._files and self._used() > self.max_bytes:
                leaving.append(self._files.popitem(last=False))
        while leaving:
            name, file = leaving[0]
            try:
                self._folder.remove(name)
            except SpillError:
                with self._lock:
                    for name, file in reversed(leaving):
                        self._files[name] = file
                        self._files.move_to_end(name, last=False)
                raise
            del leaving[0]

    def _keep(self, draft: Draft, head: Head) -> None:
        """``draft`` is complete under its temporary name."""
        name = draft.name + SUFFIX
        try:
            self._folder.rename(draft.file_name, name)
        except SpillError:
            with contextlib.suppress(SpillError):  # renamed, and perhaps not for good: then rather not at all
                self._folder.remove(name)
            raise
        with self._lock:
            self._drafts.discard(draft)
            draft.reserved = 0
            self._files[name] = _File(head.file_bytes, usable=True)

    def _give_up(self, draft: Draft) -> None:
        with self._lock:
            self._drafts.discard(draft)
            draft.reserved = 0
        self._folder.remove(draft.file_name)

    # -- back from disk -------------------------------------------------------------------------

    def open(self, name: str) -> Loaded:
        """A state, every byte of it checked, in a mapping that can only be read.

        Raises:
            CorruptState: it is not what was written; its file was set aside.
            SpillError: it is not there any more, cannot be read, or is foreign.
        """
        file = self._file_name(name)
        try:
            descriptor = self._folder.open(file)
        except SpillError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                with self._lock:
                    self._files.pop(file, None)
            raise
        try:
            with self._folder.telling("read", file):
                spilled, codes = self._described(descriptor, name)
                self._check_pages(descriptor, spilled.n_bytes, codes)
                try:
                    mapping = mmap.mmap(descriptor, spilled.file_bytes, access=mmap.ACCESS_READ)
                except ValueError as error:  # it is shorter than it was just now
                    raise Unusable(str(error)) from None
        except Foreign as error:
            raise SpillError(f"{self._folder.path / file} is not used: {error}") from None
        except Unusable as error:
            self._set_aside(file)
            raise CorruptState(f"{self._folder.path / file} was set aside: {error}") from None
        finally:
            os.close(descriptor)
        with contextlib.suppress(SpillError):  # removed meanwhile: then its place in the order is no matter
            self.touch(name)
        return Loaded(spilled, mapping)

    def _described(self, descriptor: int, name: str) -> tuple[Spilled, list[bytes]]:
        size = os.fstat(descriptor).st_size
        start = read_up_to(descriptor, min(size, PAYLOAD_AT), 0)
        head = read_header(start, name, size, self._fingerprint, self._key)
        return read_tail(read_up_to(descriptor, head.tail_bytes, head.tail_at), head, self._key)

    def _look_at(self, file: str) -> Spilled:
        descriptor = self._folder.open(file)
        try:
            with self._folder.telling("read", file):
                return self._described(descriptor, file.removesuffix(SUFFIX))[0]
        finally:
            os.close(descriptor)

    def _check_pages(self, descriptor: int, n_bytes: int, codes: list[bytes]) -> None:
        n = min(self.readers, len(codes))
        if n == 1:
            self._check_each(descriptor, n_bytes, codes, range(len(codes)))
            return
        shares = [range(first, len(codes), n) for first in range(n)]
        with ThreadPoolExecutor(n, "uma-state") as threads:
            for _ in threads.map(lambda share: self._check_each(descriptor, n_bytes, codes, share), shares):
                pass  # what one raises is raised here

    def _check_each(self, descriptor: int, n_bytes: int, codes: list[bytes], share: range) -> None:
        """Read, not through the mapping: there a bad sector would be the end of the process."""
        buffer = memoryview(bytearray(min(PAGE_BYTES, n_bytes)))
        for i in share:
            page = buffer[: min(PAGE_BYTES, n_bytes - i * PAGE_BYTES)]
            if read_into(descriptor, page, PAYLOAD_AT + i * PAGE_BYTES) < len(page):
                raise Unusable("it was cut off")
            if not is_page(page, codes[i], self._key):
                raise Unusable(f"it was altered between byte {i * PAGE_BYTES} and {i * PAGE_BYTES + len(page)}")

    def _set_aside(self, file: str) -> None:
        with self._lock:
            known = self._files.pop(file, None)
        if self._rename_aside(file) and known is not None:
            with self._lock:
                self._add_aside(file + ASIDE, known.n_bytes)

    def _rename_aside(self, file: str) -> bool:
        try:
            self._folder.rename(file, file + ASIDE)
        except SpillError:  # removed meanwhile, or a folder that cannot be written: it is not used in any case
            return False
        return True

    # -- bookkeeping, with the lock -------------------------------------------------------------

    def _used(self) -> int:
        return sum(file.n_bytes for file in self._files.values()) + sum(each.reserved for each in self._drafts)

    def _add_aside(self, file: str, n_bytes: int) -> None:
        self._files[file] = _File(n_bytes, usable=False)
        self._files.move_to_end(file, last=False)

    def _file_name(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise SpillError(f"{name[:100]!r} is no name of a state")
        return name + SUFFIX

    def _secret(self) -> bytes:
        """The folder's key, made at its first use."""
        if not self._folder.exists(KEY):
            self._folder.put(KEY, secrets.token_bytes(KEY_BYTES))
        descriptor = self._folder.open(KEY)
        try:
            with self._folder.telling("read", KEY):
                key = bytes(read_up_to(descriptor, KEY_BYTES + 1, 0))
                mode = os.fstat(descriptor).st_mode
        finally:
            os.close(descriptor)
        if len(key) != KEY_BYTES or mode & 0o077:
            raise SpillError(
                f"{self._folder.path / KEY} has {len(key)} bytes, or others may read it: remove it, and the states in "
                "this folder are computed again"
            )
        return key


class Draft:
    """A state on its way to disk.  Left without ``finish`` or ``abandon`` it is a file for the next ``scan`` to remove."""

    def __init__(self, folder: SpillFolder, name: str, n_bytes: int) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self.reserved = 0
        """What it counts in the folder."""
        self._folder = folder
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None

    @property
    def file_name(self) -> str:
        return self.name + TEMPORARY

    @property
    def view(self) -> memoryview:
        """Where the state is to be written, ``n_bytes``; until ``finish`` or ``abandon``.

        Raises:
            SpillError: it is over.
        """
        if self._view is None:
            raise SpillError("this draft was finished or abandoned")
        return self._view

    def _open(self, folder: PrivateFolder) -> None:
        size = PAYLOAD_AT + self.n_bytes
        descriptor = folder.create(self.file_name)
        try:
            with folder.telling("allocate", self.file_name):
                _allocate(descriptor, size)
                self._mapping = mmap.mmap(descriptor, size)
                self._view = memoryview(self._mapping)[PAYLOAD_AT:]
                _fault_in(self._view)
        finally:
            os.close(descriptor)

    def finish(
        self,
        tokens: npt.ArrayLike,
        *,
        tenant: int,
        n_bytes: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Spilled:
        """Make the state durable and give it its name.  Reads all of it, and waits for the disk.

        Whatever is raised, the draft is over and its file gone.

        Args:
            tokens: what the sequence holds, ``[n_tokens]``.
            tenant: whose it is.
            n_bytes: how many were written, from the beginning of ``view``; all if not given.
            extra: what else to keep, of JSON's values, at most 64 KiB.

        Raises:
            SpillError: no room, a disk that fails, or arguments that cannot be kept.
        """
        try:
            return self._finish(tokens, tenant, self.n_bytes if n_bytes is None else n_bytes, extra or {})
        finally:
            self.abandon()

    def _finish(self, tokens: npt.ArrayLike, tenant: int, n_bytes: int, extra: dict[str, Any]) -> Spilled:
        view, folder = self.view, self._folder
        if not (0 < n_bytes <= self.n_bytes and -(1 << 63) <= tenant < 1 << 63):
            raise SpillError(f"{n_bytes} bytes of tenant {tenant} do not fit a draft of {self.n_bytes}")
        try:
            token_bytes, more = token_list.to_bytes(tokens), extra_bytes(extra)
        except ValueError as error:
            raise SpillError(str(error)) from None
        pages = (view[at : min(at + PAGE_BYTES, n_bytes)] for at in range(0, n_bytes, PAGE_BYTES))
        tail = make_tail(token_bytes, more, [code_of(page, folder._key) for page in pages])
        now = time.time_ns()
        head = Head(
            name=self.name,
            tenant=tenant,
            saved_at=now / 1e9,
            n_bytes=n_bytes,
            n_tokens=len(token_bytes) // TOKEN_BYTES,
            extra_bytes=len(more),
            tail_code=code_of(tail, folder._key),
        )
        folder._reserve(self, head.file_bytes)
        self._unmap()
        descriptor = folder._folder.open(self.file_name, write=True)
        try:
            with folder._folder.telling("write", self.file_name):
                os.ftruncate(descriptor, head.tail_at)
                write_all(descriptor, tail, head.tail_at)
                write_all(descriptor, make_header(head, folder._fingerprint, folder._key), 0)
                os.utime(descriptor, ns=(now, now))
                sync(descriptor)
        finally:
            os.close(descriptor)
        folder._keep(self, head)
        return Spilled(
            name=self.name,
            tokens=token_list.from_bytes(token_bytes),
            n_bytes=n_bytes,
            file_bytes=head.file_bytes,
            tenant=tenant,
            saved_at=head.saved_at,
            extra=extra,
        )

    def abandon(self) -> None:
        """Give the file up; does nothing once it is finished.

        Raises:
            SpillError: the file cannot be removed; the next ``scan`` tries again.
        """
        self._unmap()
        if self.reserved:
            self._folder._give_up(self)

    def _unmap(self) -> None:
        view, mapping, self._view, self._mapping = self._view, self._mapping, None, None
        if view is not None and mapping is not None:
            _unmap(view, mapping)


class Loaded:
    """A state from disk, checked; a context manager that closes it.

    It is a mapping of the file, in the page cache since it was checked: read it soon, for what a disk fails to give
    later ends the process.
    """

    def __init__(self, spilled: Spilled, mapping: mmap.mmap) -> None:
        self.spilled = spilled
        self._mapping = mapping
        self._view = memoryview(mapping)[PAYLOAD_AT : PAYLOAD_AT + spilled.n_bytes]

    @property
    def view(self) -> memoryview:
        """The state, read-only; until ``close``."""
        return self._view

    @property
    def tokens(self) -> Tokens:
        """What the sequence held, int32 ``[n_tokens]``, read-only."""
        return self.spilled.tokens

    def close(self) -> None:
        """Let go of the mapping; does nothing the second time."""
        _unmap(self._view, self._mapping)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _allocate(descriptor: int, n_bytes: int) -> None:
    """Give the file its space on disk: a hole that cannot be filled later would kill who writes into the mapping."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, n_bytes)
    else:
        zeros = bytes(PAGE_BYTES)
        for at in range(0, n_bytes, PAGE_BYTES):
            write_all(descriptor, memoryview(zeros)[: n_bytes - at], at)


def _fault_in(view: memoryview) -> None:
    """Have the mapping's pages in memory, so that C does not wait for each when it comes to it.

    The system copies zeros into them.  Other than ``madvise`` in Python that leaves the GIL to others, while a journal
    is waited for; other than a write of ours it ends in an error where a page cannot be had, and not in a signal.
    """
    zeros = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while view:
            view = view[os.readv(zeros, [view[:PAGE_BYTES]]) :]
    finally:
        os.close(zeros)


def _unmap(view: memoryview, mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # somebody still holds a part of it: the last one to let go unmaps it
        view.release()
        mapping.close()
