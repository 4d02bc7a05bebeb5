"""Saved states in memory instead of a folder, with faults to switch on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import trio

from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.store.state_folder import StateDraft, StateFileError, StateReader
from uma_trio.engine_link.state_pages import PAGE_BYTES, hash_of
from uma_trio.engine_link.tokens import TokenIds


async def at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    """Stands for ``trio.to_thread.run_sync``: other tasks run first, and the call takes no time."""
    await trio.lowlevel.checkpoint()
    return call(*arguments)


@attrs.define
class MemoryFiles:
    """Implements ``serving.offload.StateFiles``.  The flags are faults."""

    states: dict[str, tuple[SavedState, bytes]] = attrs.field(factory=dict)
    full: bool = False
    """The disk is full."""
    fails_late: bool = False
    """``finish`` fails."""
    broken: bool = False
    """Files are damaged, and their checksums show it."""
    garbled: bool = False
    """Files are damaged although their checksums are right."""
    altered: bool = False
    """Files are damaged at their end.  ``open`` finds that only with ``verify``."""
    open_files: int = 0
    _names: Any = attrs.field(factory=lambda: itertools.count(1))

    def begin(self, n_bytes: int) -> MemoryDraft:
        if self.full:
            raise StateFileError("no space left")
        self.open_files += 1
        return MemoryDraft(self, memory_file(bytes(n_bytes)))

    def open(self, name: str, *, verify: bool = True) -> MemoryReading:
        if self.broken or (self.altered and verify):
            self.states.pop(name, None)  # quarantined
        if name not in self.states:
            raise StateFileError(f"{name} cannot be read")
        self.open_files += 1
        data = self.states[name][1]
        hashes = b"" if verify or self.garbled else hashes_of(data)
        if self.altered:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return MemoryReading(self, memory_file(bytes(len(data)) if self.garbled else data), hashes)

    def remove(self, name: str) -> None:
        if self.states.pop(name, None) is None:
            raise StateFileError(f"there is no {name}")

    @property
    def used_bytes(self) -> int:
        return sum(len(data) for _, data in self.states.values())

    def __contains__(self, name: str) -> bool:
        return name in self.states

    def scan(self) -> list[SavedState]:
        return [saved for saved, _ in self.states.values()]


def hashes_of(data: bytes) -> bytes:
    """The hashes of its pages."""
    return b"".join([hash_of(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)])


def fill(draft: StateDraft, content: bytes) -> None:
    """Writes a state, as the engine does."""
    assert os.pwrite(draft.fd, content, draft.offset) == len(content)


def content_of(reader: StateReader) -> bytes:
    """Reads a state, and closes its file."""
    try:
        return os.pread(reader.fd, reader.state.n_bytes, reader.offset)
    finally:
        reader.close()


def memory_file(data: bytes) -> int:
    """The descriptor of an unnamed file with this content."""
    fd = os.memfd_create("state")
    os.write(fd, data)
    return fd


@attrs.define
class MemoryDraft:
    files: MemoryFiles
    fd: int
    offset: int = 0

    def finish(
        self,
        tokens: TokenIds,
        *,
        principal: str,
        n_bytes: int,
        checkpoints: tuple[tuple[int, int], ...],
        adapters: str,
    ) -> SavedState:
        data = os.pread(self.fd, n_bytes, 0)
        self.abandon()
        if self.files.fails_late:
            raise StateFileError("the disk failed")
        name = f"state {next(self.files._names)}"
        saved = SavedState(name, principal, np.array(tokens), n_bytes, checkpoints, adapters)
        self.files.states[saved.name] = (saved, data)
        return saved

    def abandon(self) -> None:
        self.files.open_files -= 1
        os.close(self.fd)


@attrs.define
class MemoryReading:
    files: MemoryFiles
    fd: int
    hashes: bytes
    offset: int = 0

    def close(self) -> None:
        self.files.open_files -= 1
        os.close(self.fd)
