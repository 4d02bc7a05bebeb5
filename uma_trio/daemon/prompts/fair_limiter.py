"""A limit for work in threads and child processes, in which principals take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
import trio

T = TypeVar("T")


@attrs.define(eq=False)
class FairLimiter:
    """Lets ``n`` threads run at a time.

    Principals take turns, so one that brings much work delays another one by the work that runs.  The work of one principal runs
    in the order in which it came.
    """

    n: int
    _n_running: int = attrs.field(default=0, init=False)
    _waiting: dict[str, deque[trio.Event]] = attrs.field(factory=dict, init=False)
    """Work that waits, by principal, the next principal first."""

    def of(self, principal: str) -> PrincipalLimiter:
        """The limit as work of ``principal`` sees it."""
        return PrincipalLimiter(self, principal)

    async def acquire(self, principal: str) -> None:
        """Wait for a turn of ``principal``."""
        await trio.lowlevel.checkpoint()
        if self._n_running < self.n:
            self._n_running += 1
            return
        turn = trio.Event()
        self._waiting.setdefault(principal, deque()).append(turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self.release()
            else:
                own = self._waiting[principal]
                own.remove(turn)
                if not own:
                    del self._waiting[principal]
            raise

    def release(self) -> None:
        """End some work; the next one begins."""
        if not self._waiting:
            self._n_running -= 1
            return
        principal = next(iter(self._waiting))
        own = self._waiting.pop(principal)
        own.popleft().set()
        if own:
            self._waiting[principal] = own  # behind the others


@attrs.frozen
class PrincipalLimiter:
    """A context manager, and a limiter for ``trio.to_thread.run_sync``."""

    _limiter: FairLimiter
    _principal: str

    async def __aenter__(self) -> None:
        await self._limiter.acquire(self._principal)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """See ``trio.CapacityLimiter``."""
        await self._limiter.acquire(self._principal)

    def release_on_behalf_of(self, borrower: object) -> None:
        """See ``trio.CapacityLimiter``."""
        self._limiter.release()


async def in_thread(function: Callable[..., T], *args: Any, limiter: PrincipalLimiter) -> T:
    """Run ``function`` in a thread.  The wait for it can be cancelled; it then goes on, and counts until it ends."""
    like_trios = cast(trio.CapacityLimiter, limiter)  # trio uses two of its methods, which this one has
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=like_trios)
