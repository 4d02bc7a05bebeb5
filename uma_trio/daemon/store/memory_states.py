"""States of sequences in the machine's memory, for streams that have lost their places and go on later.

They are unnamed files, because a descriptor is how the engine gets a state.  Nothing of them outlives the process, and
nobody else can write to them, so they need no hashes.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Final

import attrs

from uma_trio.daemon.store.state_folder import StateFileError, allocate

MAX_SHARE_OF_FREE: Final = 0.5
"""A new state takes at most this share of the memory that is free."""


class MemoryStates:
    """States in unnamed files.  The methods are thread-safe.

    Args:
        max_bytes: limit of all states together.
        free_bytes: memory that is free now.
    """

    def __init__(self, max_bytes: int, free_bytes: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._names = itertools.count(1)
        self._states: dict[str, tuple[int, int]] = {}
        """Descriptor and size of each state by name, unfinished ones included."""
        self._used = 0
        self._lock = threading.Lock()
        """Protects the two above."""

    @property
    def used_bytes(self) -> int:
        """Size of all states, unfinished ones included."""
        return self._used

    def close(self) -> None:
        """Remove all states."""
        for name in [*self._states]:
            self.remove(name)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def begin(self, n_bytes: int) -> MemoryDraft:
        """Take memory for a state.  Blocks until the system has provided it.

        Raises:
            StateFileError: there is not enough.
        """
        free = int(MAX_SHARE_OF_FREE * self._free_bytes())
        with self._lock:
            if self._used + n_bytes > self._max_bytes or n_bytes > free:
                left = min(self._max_bytes - self._used, free)
                raise StateFileError(f"a state has {n_bytes} bytes, and {left} are left (preempted_max_mb)")
            self._used += n_bytes
            name = f"memory {next(self._names)}"
        try:
            fd = _unnamed_file(n_bytes)
        except OSError as error:
            self._give_back(n_bytes)
            raise StateFileError(f"no memory for a state of {n_bytes} bytes: {error}") from error
        with self._lock:
            self._states[name] = fd, n_bytes
        return MemoryDraft(name, fd)

    def open(self, name: str, *, verify: bool = True) -> MemoryReader:
        """Open a state.

        Args:
            verify: changes nothing; a state in memory is as it was written.

        Raises:
            StateFileError: the state does not exist.
        """
        with self._lock:
            state = self._states.get(name)
            if state is None:
                raise StateFileError(f"there is no state {name} in memory")
            return MemoryReader(os.dup(state[0]))

    def remove(self, name: str) -> None:
        """Remove a state.  Open readers keep it; removing a missing state is a no-op."""
        with self._lock:
            state = self._states.pop(name, None)
        if state is not None:
            os.close(state[0])
            self._give_back(state[1])

    def _give_back(self, n_bytes: int) -> None:
        with self._lock:
            self._used -= n_bytes


@attrs.frozen
class MemoryDraft:
    """A state that is being written.  Nothing finishes it: ``remove`` its name if it is not needed."""

    name: str
    fd: int


@attrs.define
class MemoryReader:
    """A state, open for reading."""

    fd: int
    offset: int = attrs.field(default=0, init=False)
    hashes: bytes = attrs.field(default=b"", init=False)

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)


def _unnamed_file(n_bytes: int) -> int:
    """The descriptor of a new file whose space is allocated, so that writing to it cannot fail."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("uma-trio-state")
        try:
            os.posix_fallocate(fd, 0, n_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd
    with tempfile.TemporaryFile() as file:
        allocate(file.fileno(), n_bytes)
        return os.dup(file.fileno())
