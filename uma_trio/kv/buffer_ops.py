"""State transfers through buffers, for an engine in the daemon's own process.

To be deleted once every engine takes ``SaveState`` and ``LoadState``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


@attrs.frozen(eq=False)
class Save:
    """Write the state of a sequence into a buffer before the step ends."""

    seq_id: int
    into: Any
    """Writable buffer of exactly the state's size."""
    marks: Sequence[tuple[int, Any]] = ()
    """(number, buffer) of each checkpoint to write."""


@attrs.frozen(eq=False)
class Load:
    """Replace the content of a sequence with a state from a buffer.

    The sequence takes no other tokens in the same step.
    """

    seq_id: int
    length: int
    """Tokens in the state."""
    state: Any
    """Buffer with the state; the engine reads it before the step ends."""
    marks: Sequence[tuple[int, Any]] = ()
    """(number, buffer) of each checkpoint to load with the state."""
