"""What a chat template may still cost.

Every operation that can make something big out of something small is charged the size of its result
before it runs, and all others the size of what they made.  Each charge looks at the clock too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

import attrs

MAX_DEPTH = 32
"""Lists in lists in lists: deeper is nobody's chat template."""

ENTRY_CHARS = 32
"""What an entry of a list is charged beyond its own size, about its share of memory and of a walk."""


class LimitExceeded(Exception):
    """A template would take more memory or time than it may."""


@attrs.frozen
class Limits:
    """What compiling and what each rendering may cost."""

    source_chars: int = 1 << 17
    output_chars: int = 1 << 21
    work_chars: int = 1 << 26
    """All strings and list entries that are made on the way, whether they are kept or not."""
    seconds: float = 1.0


class Meter(threading.local):
    """What is left to the rendering that runs in this thread; nothing before ``start``."""

    _work = 0
    _deadline = 0.0

    def start(self, limits: Limits) -> None:
        """Forget what was charged in this thread before, and begin to count."""
        self._work = limits.work_chars
        self._deadline = time.monotonic() + limits.seconds

    def charge(self, size: int = 0) -> None:
        """Take ``size`` characters, and one for the work of counting, from what is left.

        Raises:
            LimitExceeded: not so much is left, or the time is over.
        """
        self._work -= size + 1
        if self._work < 0:
            raise LimitExceeded("it makes too much text or too long lists")
        if time.monotonic() > self._deadline:
            raise LimitExceeded("it takes too long")

    def size_of(self, value: object) -> int:
        """Characters that ``value`` has about when it is printed, entries counted as often as they occur.

        Raises:
            LimitExceeded: more than is left, or nested deeper than ``MAX_DEPTH``.  Raised early: a list
                that holds another one twice, and so on forty levels down, is never walked to its end.
        """
        return _size(value, self._work, MAX_DEPTH)

    def charge_for(self, value: object) -> None:
        """Charge a value that is there already."""
        self.charge(self.size_of(value))


def _size(value: object, limit: int, depth: int) -> int:
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, (list, tuple)):
        size = _size_of_all(value, limit, depth)
    elif isinstance(value, Mapping):
        size = _size_of_all(value.keys(), limit, depth)
        size += _size_of_all(value.values(), limit - size, depth)
    else:
        size = 8
    if size > limit:
        raise LimitExceeded("it makes too much text or too long lists")
    return size


def _size_of_all(values: Iterable[object], limit: int, depth: int) -> int:
    if depth == 0:
        raise LimitExceeded(f"it nests lists deeper than {MAX_DEPTH}")
    size = 0
    for value in values:
        size += ENTRY_CHARS + _size(value, limit - size, depth - 1)
        if size > limit:
            raise LimitExceeded("it makes too much text or too long lists")
    return size
