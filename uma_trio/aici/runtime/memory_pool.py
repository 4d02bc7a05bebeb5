"""Bounds the memory of all controllers together."""

from __future__ import annotations

import threading
import weakref

import attrs

from uma_trio.aici.runtime.variables import Variables


@attrs.define(eq=False)
class _Request:
    n_bytes: int = 0
    is_evicted: bool = False


class MemoryPool:
    """Counts the memory of instances by request, which its variables stand for.  Thread-safe.

    When all of them have more than ``max_bytes``, the request with the most is evicted: its instances must be closed
    instead of called.  So controllers that take all the memory they can get do no harm to modest ones.  Calls that are
    in flight may exceed the bound, each by what one controller may have.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._requests: weakref.WeakKeyDictionary[Variables, _Request] = weakref.WeakKeyDictionary()

    def count(self, variables: Variables, change: int) -> None:
        """The memory of a request has grown by ``change`` bytes."""
        with self._lock:
            self._requests.setdefault(variables, _Request()).n_bytes += change
            self._n_bytes += change
            if self._n_bytes > self.max_bytes and change > 0:
                self._evict()

    def is_evicted(self, variables: Variables) -> bool:
        """Whether the instances of a request must be closed."""
        with self._lock:
            request = self._requests.get(variables)
            return request is not None and request.is_evicted

    def _evict(self) -> None:
        """Evict the largest requests until the others are within the bound."""
        left = sum(each.n_bytes for each in self._requests.values() if not each.is_evicted)
        while left > self.max_bytes:
            largest = max(
                (each for each in self._requests.values() if not each.is_evicted), key=lambda each: each.n_bytes
            )
            largest.is_evicted = True
            left -= largest.n_bytes
