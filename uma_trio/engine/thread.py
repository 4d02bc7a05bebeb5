"""One dedicated thread for one engine, and how trio waits for it.

Every call into a llama context comes from the same thread: OpenMP keeps a team of workers for each
thread that calls it, so a step that wandered over a pool would pay for new teams.  An answer comes
back with one ``run_sync_soon``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import outcome
import trio

T = TypeVar("T")


AWAKE_S: Final = 0.001
"""How long who was woken early keeps the loop waiting for the result before it sleeps again."""


class Pending(Generic[T]):
    """A call that is under way in the thread."""

    def __init__(self, loop: trio.lowlevel.TrioToken) -> None:
        self._loop = loop
        self._outcome: outcome.Outcome[T] | None = None
        """Set in the thread."""
        self._done = threading.Lock()
        """Held until then."""
        self._done.acquire()
        self._woken = False
        self._waiting: trio.lowlevel.Task | None = None

    async def wait(self) -> T:
        """The call's result, or what it raised.

        Cannot be cancelled: C code that runs cannot be left, and who waits must know that it is done.
        """
        await self.settled()
        assert self._outcome is not None
        return self._outcome.unwrap()

    async def settled(self) -> None:
        """Wait for the end, whatever it is.  Cannot be cancelled."""
        while self._outcome is None:
            if self._woken:
                self._woken = False
                self._done.acquire(timeout=AWAKE_S)
                continue
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    def almost(self) -> None:
        """The result will be there in some ten or hundred microseconds: wake the waiter now.

        For the call itself, in the thread: the way to the waiting task takes as long.
        """
        with contextlib.suppress(trio.RunFinishedError):  # nobody is left to tell
            self._loop.run_sync_soon(self._wake)

    def _complete(self, found: outcome.Outcome[T]) -> None:
        """From the thread."""
        self._outcome = found
        self._done.release()
        self._loop.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._woken = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            trio.lowlevel.reschedule(waiting)


class EngineThread:
    """Runs calls one after another, in the order of their submission.

    To be made inside ``trio.run``.  ``close`` it, or its thread keeps the process alive no longer than
    the interpreter (it is a daemon thread), but whatever it runs is cut off.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], Pending[Any]] | None] = queue.SimpleQueue()
        self._trio = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Callable[[], None]], T]) -> Pending[T]:
        """Have ``call`` run in the thread; does not wait.

        Args:
            call: gets a function that it may call, once and at any time, to say that it is almost done.
        """
        pending: Pending[T] = Pending(self._trio)
        self._calls.put((call, pending))
        return pending

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` in the thread and wait for its result.  Cannot be cancelled."""
        return await self.submit(lambda almost: call()).wait()

    def close(self) -> None:
        """Let the thread end after what was submitted before."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, pending = item
            found = outcome.capture(call, pending.almost)
            try:
                pending._complete(found)
            except trio.RunFinishedError:
                return  # nobody is left to tell
