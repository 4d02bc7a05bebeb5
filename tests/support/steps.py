"""Counts the lines of ``uma_trio`` that run: a measure of work that does not depend on the machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import attrs


@attrs.define
class Steps:
    n: int = 0
    """Lines that have run; a line in a loop counts each time."""

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(
            "uma_trio."
        ):  # others run at any time, for the garbage collector
            return None
        self.n += event == "line"
        return self._trace


@contextlib.contextmanager
def counted_steps() -> Iterator[Steps]:
    """Count the lines that this thread runs, in all functions of ``uma_trio`` that the block calls."""
    steps = Steps()
    before = sys.gettrace()
    sys.settrace(steps._trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
