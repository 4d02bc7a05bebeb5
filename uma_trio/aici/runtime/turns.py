"""Turns of controllers that call the host.

The host's functions run under one lock of Python.  A controller that calls them all the time would make every other one
wait for this lock again and again.  So each call into a controller has a share of host time.  A controller that has used
up its share goes on when no other one, with some of its share left, is at work.  So it is the expensive controllers that
miss the step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import attrs

ALL_SHARES_S: Final = 0.008
"""Host time of all calls that are in flight together, before any of them has to wait."""
MIN_SHARE_S: Final = 0.0005
"""Share of a call, however many are in flight: a mask takes less."""
PROTECTED_S: Final = 0.05
"""For this time after its beginning, a call with some of its share left holds up the calls without any.

A controller that computes without the host cannot hold them up for longer."""


class OutOfTime(Exception):
    """The deadline of the call came while the host worked for it."""


@attrs.define(eq=False)
class Turn:
    """A call into a controller."""

    deadline: float
    """When it has to end, in seconds on ``HostTurns.now``'s clock."""
    began: float
    spent_s: float = 0.0
    """Time that the host has computed for it."""


class HostTurns:
    """Decides which calls may use the host.  Thread-safe.

    Args:
        now: a clock in seconds.
        cpu_s: the time that the current thread has computed, in seconds.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._now = now
        self.cpu_s = cpu_s
        self._changed = threading.Condition()
        self._in_flight: set[Turn] = set()
        self._waiting: set[Turn] = set()
        self._served: Turn | None = None
        """The call without a share that the host works for.  One at a time."""

    @property
    def n_waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._waiting)

    @contextlib.contextmanager
    def call(self, deadline: float) -> Iterator[Turn]:
        """A call into a controller, while the context lasts."""
        turn = Turn(deadline, self._now())
        with self._changed:
            self._in_flight.add(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._in_flight.discard(turn)
                self._changed.notify_all()

    def enter(self, turn: Turn) -> None:
        """Begin to use the host.  Returns at once if ``turn`` has some of its share left; otherwise blocks for its turn.

        Raises:
            OutOfTime: the deadline has come first.
        """
        if self._has_share(turn):
            return
        with self._changed:
            self._waiting.add(turn)
            try:
                while (wait_s := self.wait_s(turn)) > 0:
                    left_s = turn.deadline - self._now()
                    if left_s <= 0:
                        raise OutOfTime("its calls of the host take too long next to those of others")
                    self._changed.wait(min(wait_s, left_s))
                self._served = turn
            finally:
                self._waiting.discard(turn)
                self._changed.notify_all()

    def leave(self, turn: Turn, spent_s: float) -> None:
        """Note that the host has worked for ``turn``."""
        turn.spent_s += spent_s
        if self._served is turn:
            with self._changed:
                self._served = None
                self._changed.notify_all()

    def wait_s(self, turn: Turn) -> float:
        """How long ``turn``, which has used up its share, waits at most before it asks again; 0: it is its turn."""
        if self._served is not None or min(self._waiting, key=_spent, default=turn).spent_s < turn.spent_s:
            return threading.TIMEOUT_MAX
        now = self._now()
        ends = [
            turn_in_flight.began + PROTECTED_S for turn_in_flight in self._in_flight if self._has_share(turn_in_flight)
        ]
        return max(0.0, max(ends, default=now) - now)

    def _has_share(self, turn: Turn) -> bool:
        return turn.spent_s <= max(MIN_SHARE_S, ALL_SHARES_S / max(1, len(self._in_flight)))


def _spent(turn: Turn) -> float:
    return turn.spent_s
