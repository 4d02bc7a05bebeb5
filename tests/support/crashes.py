"""A crash at every system call that changes a folder, without a process for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

import pytest

CALLS: Final = ("open", "pwrite", "ftruncate", "utime", "fdatasync", "rename", "fsync", "unlink")


class _Crash(BaseException):
    """The process is dead: its clean-ups change nothing any more."""


class Run:
    """A block of which the process dies at the call number ``n``; a context manager that ends the block there."""

    def __init__(self, n: int) -> None:
        self.crashed = False
        self._left = n
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for name in CALLS:
            self._patch.setattr(os, name, self._limited(getattr(os, name)))

    def _limited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                raise _Crash
            self._left -= 1
            return original(*arguments, **options)

        return call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._patch.undo()
        self.crashed = isinstance(error, _Crash)
        return self.crashed


def crash_everywhere() -> Iterator[Run]:
    """Yields runs that crash at the first call, at the second, and so on; the last run completes."""
    n = 0
    while True:
        run = Run(n)
        yield run
        if not run.crashed:
            return
        n += 1
