"""One dedicated thread for one engine, and how trio waits for it.

Every call into a llama context comes from the same thread: OpenMP keeps a team of workers for each
thread that calls it, so a step that wandered over a pool would pay for new teams.  An answer comes
back with one ``run_sync_soon``.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

T = TypeVar("T")


class Pending(Generic[T]):
    """A call that is under way in the thread, or waits there for its turn."""

    def __init__(self) -> None:
        self.before_told: Callable[[], None] | None = None
        """Called in the thread when the call has ended, before the loop hears of it; must be quick, and not raise."""
        self.began_s = math.nan
        """When the thread took it up, on trio's clock."""
        self._outcome: outcome.Outcome[T] | None = None
        self._told = False
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
        if not self._told:
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    @property
    def result(self) -> T | None:
        """For calls after this one in the thread, which see it before the loop does; ``None`` if it raised."""
        return self._outcome.value if isinstance(self._outcome, outcome.Value) else None

    def _tell(self) -> None:
        self._told = True
        if self._waiting is not None:
            trio.lowlevel.reschedule(self._waiting)


class EngineThread:
    """Runs calls one after another, in the order of their submission.

    To be made inside ``trio.run``.  ``close`` it, or its thread keeps the process alive no longer than
    the interpreter (it is a daemon thread), but whatever it runs is cut off.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Pending[Any]] | None] = queue.SimpleQueue()
        self._trio = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Pending[T]:
        """Have ``call`` run in the thread; does not wait."""
        pending: Pending[T] = Pending()
        self._calls.put((call, pending))
        return pending

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` in the thread and wait for its result.  Cannot be cancelled."""
        return await self.submit(call).wait()

    def close(self) -> None:
        """Let the thread end after what was submitted before."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, pending = item
            pending.began_s = self._clock.current_time()
            pending._outcome = outcome.capture(call)
            if pending.before_told is not None:
                pending.before_told()
            try:
                self._trio.run_sync_soon(pending._tell)
            except trio.RunFinishedError:
                return  # nobody is left to tell
