"""Owning a C object: one owner, freed once, in the right order, and a clear error afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

from llama_abi.errors import Closed, LlamaError


class _Held:
    """The C object and who counts on it; outlives its handle until it is freed.

    ``busy`` while a call into it runs.  Only the interpreter's end can release a busy one (a
    daemon thread still computes); it is then left to the operating system.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], None], parent: _Held | None) -> None:
        self.pointer = pointer
        self.free = free
        self.parent = parent
        self.children = 0
        self.busy = False
        self.released = False
        if parent is not None:
            parent.children += 1

    def release(self) -> None:
        """Free it, unless something made from it is in use; the last of those then frees it."""
        self.released = True
        if self.busy or self.children:
            return
        self.free(self.pointer)
        if self.parent is not None:
            self.parent.children -= 1
            if self.parent.released:
                self.parent.release()


class Owned:
    """Base of every handle that frees something.

    ``close()`` frees; so does leaving a ``with`` block; so does the garbage collector, for what
    nobody closed.  A child keeps its parent's C object alive, whatever the order of collection.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], None], *, parent: Owned | None = None) -> None:
        self._held: _Held = _Held(pointer, free, parent._held if parent is not None else None)
        self._parent = parent
        self._finalizer = weakref.finalize(self, self._held.release)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self._finalizer.alive

    @property
    def _pointer(self) -> Any:
        """The C object.

        Raises:
            Closed: it has been freed.
        """
        if not self._finalizer.alive:
            raise Closed(f"this {type(self).__name__} is closed")
        return self._held.pointer

    def close(self) -> None:
        """Free the C object.  A second call does nothing.

        Raises:
            LlamaError: something made from it is still open, or a call into it is running in
                another thread.  Nothing is freed then.
        """
        if not self._finalizer.alive:
            return
        if self._held.children:
            raise LlamaError(
                f"this {type(self).__name__} is in use: close what was made from it first ({self._held.children} open)"
            )
        if self._held.busy:
            raise LlamaError(f"this {type(self).__name__} is computing; close it when that call has returned")
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
