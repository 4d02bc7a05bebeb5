"""Ownership of C objects: each is freed once, in the right order, and any later use is a clear error."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from llama_abi.errors import HandleClosed, LlamaError


class _Resource:
    """A C object with the number of objects that depend on it. It outlives its handle until it is freed.

    ``busy`` is true during a call into the object. Only the end of the interpreter can release a busy one, while a
    daemon thread still computes. The object is then left to the operating system.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], None], parent: _Resource | None) -> None:
        self.pointer = pointer
        self.free = free
        self.parent = parent
        self.children = 0
        self.busy = False
        self.released = False
        self._n_calls = 0
        self._call_ended = threading.Condition()
        if parent is not None:
            parent.children += 1

    @contextlib.contextmanager
    def in_call(self) -> Iterator[bool]:
        """A call that any thread may make, during which the object is not freed. Yields whether there still is one."""
        with self._call_ended:
            is_there = not self.released
            self._n_calls += 1
        try:
            yield is_there
        finally:
            with self._call_ended:
                self._n_calls -= 1
                self._call_ended.notify_all()

    def release(self) -> None:
        """Free the object, after the calls of other threads. If others depend on it, the last of them frees it."""
        with self._call_ended:
            self.released = True
            self._call_ended.wait_for(lambda: not self._n_calls)
        if self.busy or self.children:
            return
        self.free(self.pointer)
        if self.parent is not None:
            self.parent.children -= 1
            if self.parent.released:
                self.parent.release()


class Handle:
    """Base class for the owner of a C object.

    ``close()`` frees the object. So does the end of a ``with`` block, and the garbage collector frees what nobody
    closed. A child keeps its parent's C object alive, in whatever order they are collected.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], None], *, parent: Handle | None = None) -> None:
        self._resource: _Resource = _Resource(pointer, free, parent._resource if parent is not None else None)
        self._parent = parent
        self._finalizer = weakref.finalize(self, self._resource.release)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._resource.released

    @property
    def _pointer(self) -> Any:
        """The C object.

        Raises:
            HandleClosed: it has been freed.
        """
        if self._resource.released:
            raise self._is_closed()
        return self._resource.pointer

    @contextlib.contextmanager
    def _kept_open(self) -> Iterator[None]:
        """A call that any thread may make: ``close()`` waits for its end.

        Raises:
            HandleClosed: it has been freed.
        """
        with self._resource.in_call() as is_open:
            if not is_open:
                raise self._is_closed()
            yield

    def _is_closed(self) -> HandleClosed:
        return HandleClosed(f"this {type(self).__name__} is closed")

    def close(self) -> None:
        """Free the C object. Closing it twice is a no-op.

        Raises:
            LlamaError: another handle depends on it, or another thread is in a call into it. It stays open.
        """
        if self._resource.released:
            return
        if self._resource.children:
            raise LlamaError(
                f"this {type(self).__name__} is in use: close what was made from it first "
                f"({self._resource.children} open)"
            )
        if self._resource.busy:
            raise LlamaError(f"this {type(self).__name__} is computing; close it when that call has returned")
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
