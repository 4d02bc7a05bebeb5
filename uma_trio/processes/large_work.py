"""Runs large work on an event loop in pieces.  After each piece, others get as much time as it took.

A thread would not help: decoders hold Python's global lock until they end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

import attrs

T = TypeVar("T")

LARGE_BYTES: Final = 4 * 1024
"""A smaller message takes a few milliseconds to decode, whatever it contains."""
SHORT_S: Final = 0.002
"""After a shorter piece, others get one turn of the event loop."""


@attrs.frozen
class LargeWork:
    """All large work of one event loop, which takes at most half of the loop's time.

    Args:
        lock: held during a piece and the pause after it; a fair lock of the loop's library.
        sleep: waits for so many seconds.
    """

    _lock: AbstractAsyncContextManager[Any]
    _sleep: Callable[[float], Awaitable[None]]

    @contextlib.asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Run one piece inside of this; it must not wait.  A pause of the same length follows before the next piece."""
        async with self._lock:
            began = time.perf_counter()
            try:
                yield
            finally:
                took_s = time.perf_counter() - began
                await self._sleep(took_s if took_s > SHORT_S else 0)

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run ``work``, which yields between two pieces, and return its result."""
        while True:
            async with self.part():
                try:
                    next(work)
                except StopIteration as end:
                    result: T = end.value
                    return result
