"""Verifies a saved state while llama.cpp copies it.

llama.cpp trusts what a state says about its cells, and copies keys and values without looking at them.  So the former
is verified before llama.cpp sees the state, and the latter while it copies them: threads hash the state's pages, which
also maps them, so that the thread that copies meets few page faults.  docs/design/kv-cache.md has the reasons.
"""

from __future__ import annotations

import itertools
import struct
from concurrent.futures import Executor, Future
from typing import Final

from uma_trio.engine_link.state_pages import HASH_BYTES, PAGE_BYTES, hash_of, n_pages

FRONT_PAGES: Final = 4
"""Pages that are verified first.  They describe 340,000 cells; the cells of a longer state are verified as a whole."""

PAGES_PER_TASK: Final = 64
"""Pages that one thread hashes at a time: for fewer, more threads take longer than one."""

CELL_BYTES: Final = 12
"""Position, number of sequences, and one sequence."""

MAX_STREAMS: Final = 256
MAX_LAYERS: Final = 512
"""As in llama.cpp; more are read where cells have another size, as with M-RoPE."""


class DamagedState(Exception):
    """A state is not what was saved."""


class StateCheck:
    """Verifies a state.  A context manager; leaving it does not wait for the threads.

    Args:
        state: the state with its checkpoints.
        hashes: of its pages, one after the other; empty if the state has been verified.
        threads: hash most pages.  They should be running already: on a busy machine it takes milliseconds to start one.
    """

    def __init__(self, state: memoryview, hashes: bytes, threads: Executor) -> None:
        self._state = state
        self._hashes = hashes
        self._threads = threads
        self._tasks: list[Future[None]] = []

    def _verify(self, first: int, end: int) -> None:
        for page in range(first, end):
            at = page * PAGE_BYTES
            if hash_of(self._state[at : at + PAGE_BYTES]) != self._hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]:
                raise DamagedState(f"it was altered between byte {at} and {at + PAGE_BYTES}")

    def begin(self, n_bytes: int) -> None:
        """Start the threads, and wait until the first ``n_bytes`` are verified, except for keys and values.

        Raises:
            DamagedState: the state was altered, or there is not one hash for each page.
        """
        if not self._hashes:
            return
        n = n_pages(len(self._state))
        if len(self._hashes) != n * HASH_BYTES:
            raise DamagedState(f"it has {n} pages and {len(self._hashes)} bytes of hashes")
        self._verify(0, min(n, FRONT_PAGES))  # before the threads begin: they hardly let go of the GIL
        starts = range(FRONT_PAGES, n, PAGES_PER_TASK)
        self._tasks = [self._threads.submit(self._verify, at, min(at + PAGES_PER_TASK, n)) for at in starts]
        end = end_of_cells(self._state[:n_bytes])
        if end is None or end > FRONT_PAGES * PAGE_BYTES:
            self.wait()

    def wait(self) -> None:
        """Wait until the whole state is verified.

        Raises:
            DamagedState: the state was altered.
        """
        for task in self._tasks:
            task.result()

    def __enter__(self) -> StateCheck:
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()


def end_of_cells(state: memoryview) -> int | None:
    """Where the description of the cells ends, in the state of a sequence in one cache of keys and values.

    Behind it are keys and values of each layer, each after 12 or 16 bytes that say their type and size.  llama.cpp refuses
    a state where these differ from its own.

    Returns:
        ``None`` for any other state: recurrent, of several caches, with positions in two dimensions, or cut off.
    """
    end = None
    try:
        (n_streams,) = struct.unpack_from("<8xI", state)
        at = 12
        if n_streams > MAX_STREAMS:
            return None
        for _ in range(n_streams):
            (n_cells,) = struct.unpack_from("<I", state, at)
            at += 4
            if not n_cells:
                continue
            if end is not None:
                return None
            at += CELL_BYTES * n_cells
            transposed, n_layers = struct.unpack_from("<II", state, at)
            if n_layers > MAX_LAYERS:
                return None
            end = at = at + 8
            for values, _ in itertools.product((False, True), range(n_layers)):
                if values and transposed:
                    _, element_bytes, width = struct.unpack_from("<iII", state, at)
                    at += 12 + element_bytes * width * n_cells
                else:
                    _, row_bytes = struct.unpack_from("<iQ", state, at)
                    at += 12 + row_bytes * n_cells
    except (struct.error, OverflowError):  # behind the end of the state
        return None
    return end if at == len(state) else None
