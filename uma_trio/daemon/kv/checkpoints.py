"""Checkpoints: saved states to which sequences of a recurrent memory can be truncated.

A recurrent state covers all tokens before it and cannot be rolled back to fewer.  The engine therefore keeps a copy of
the state at some lengths, a *checkpoint*.  Checkpoints are small compared with keys and values.

This module assigns the numbers and counts the references; the engine holds the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, TypeAlias

import attrs

from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS

MIN_SPACING: Final = 64
"""Minimum distance between two checkpoints of a sequence, in tokens.  Fewer tokens are cheap to compute again."""

TOKENS_AFTER_LAST: Final = 8
"""Prompt tokens after the prompt's last checkpoint.  A repeated request computes the last token again, and a chat
template may change the tokens right before the answer in the next turn."""

MAX_SPECULATIVE: Final = 3
"""Maximum number of checkpoints inside a prompt that only help requests which may never come."""

MIN_SPECULATIVE_SPACING: Final = 256
"""Minimum distance between speculative checkpoints, in tokens.  Copying a state takes time."""


@attrs.frozen
class Checkpoint:
    """The saved state of a sequence at one length."""

    length: int
    """Tokens that the state covers."""
    id: int
    """Number under which the engine keeps the state."""


Checkpoints: TypeAlias = tuple[Checkpoint, ...]
"""The checkpoints of one sequence, by ascending length."""


def latest(checkpoints: Checkpoints, length: int) -> Checkpoint | None:
    """The longest checkpoint with at most ``length`` tokens."""
    longest = None
    for checkpoint in checkpoints:
        if checkpoint.length <= length:
            longest = checkpoint
    return longest


def least_useful(checkpoints: Checkpoints) -> Checkpoint:
    """The checkpoint to drop first; ``checkpoints`` is not empty.

    That is the oldest one after the first.  The first stays, because most requests share the beginning.
    """
    return checkpoints[1] if len(checkpoints) > 2 else checkpoints[0]


def speculative_lengths(start: int, end: int) -> list[int]:
    """Lengths at which to checkpoint a stretch of a prompt that nobody has shared yet.

    Each length halves the rest of the stretch.  A request that diverges ``n`` tokens before ``end`` therefore computes
    at most about ``n`` of the shared tokens again, as long as ``n`` is at least an eighth of the stretch.
    """
    lengths: list[int] = []
    while len(lengths) < MAX_SPECULATIVE and end - start >= 2 * MIN_SPECULATIVE_SPACING:
        start += (end - start) // 2
        start -= start % MIN_SPACING  # kernels run faster with round numbers of rows
        lengths.append(start)
    return lengths


class CheckpointIds:
    """Hands out checkpoint numbers and counts how many sequences refer to each.

    Args:
        max_checkpoints: maximum number of checkpoints in use at a time.
    """

    def __init__(self, max_checkpoints: int) -> None:
        self.max_checkpoints = max_checkpoints
        self._references: dict[int, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._references)

    def new(self, length: int) -> Checkpoint:
        """Return a new checkpoint with one reference."""
        self._last += 1
        self._references[self._last] = 1
        return Checkpoint(length, self._last)

    def share(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Add a reference to each checkpoint."""
        for checkpoint in checkpoints:
            self._references[checkpoint.id] += 1

    def drop(self, checkpoints: Iterable[Checkpoint]) -> list[int]:
        """Remove a reference from each checkpoint; returns the numbers that have none left."""
        unused = []
        for checkpoint in checkpoints:
            self._references[checkpoint.id] -= 1
            if not self._references[checkpoint.id]:
                del self._references[checkpoint.id]
                unused.append(checkpoint.id)
        return unused

    def check_integrity(self, in_use: Iterable[Checkpoints]) -> None:
        """Raise AssertionError unless the references match ``in_use``, the checkpoints of all sequences."""
        references: dict[int, int] = {}
        for checkpoints in in_use:
            assert len(checkpoints) <= MAX_CHECKPOINTS
            assert all(one.length < other.length for one, other in pairwise(checkpoints))
            for checkpoint in checkpoints:
                references[checkpoint.id] = references.get(checkpoint.id, 0) + 1
        assert references == self._references
        assert len(references) <= self.max_checkpoints
