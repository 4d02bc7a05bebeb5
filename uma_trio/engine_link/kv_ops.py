"""Operations on the engine's KV cache.

The engine runs a step's operations in order, before it computes the step's tokens.  Operations are plain data: msgpack
carries them to the engine's process.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

MAX_CHECKPOINTS: Final = 8
"""Most checkpoints of a sequence."""


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove all tokens of a sequence from position ``length`` on."""

    seq_id: int
    length: int = 0
    """Tokens to keep; 0 removes everything."""
    checkpoint: int | None = None
    """Checkpoint of ``length`` tokens to restore.  Required by memories that cannot be truncated, unless ``length`` is
    0."""


class CopyPrefix(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy the first tokens of one sequence into another, which is empty."""

    source: int
    target: int
    length: int
    """Tokens to copy; the source holds at least as many."""
    checkpoint: int | None = None
    """The source's checkpoint of ``length`` tokens.  Memories that cannot be truncated require it, unless ``length`` is
    all that the source holds."""


class SaveCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep the current recurrent state of a sequence as a checkpoint."""

    seq_id: int
    checkpoint: int
    """Number of the new checkpoint; not in use."""


class DropCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop a checkpoint.  Dropping one that does not exist is a no-op."""

    checkpoint: int


class MeasureState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report how many bytes ``SaveState`` needs for a sequence and for each of its checkpoints."""

    seq_id: int
    checkpoints: tuple[int, ...] = ()
    """Numbers.  A checkpoint that does not exist has 0 bytes."""


class SaveState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the state of a sequence (keys, values, recurrent state) to an open file, then its checkpoints."""

    seq_id: int
    fd: int
    """File descriptor, open for writing."""
    offset: int
    """Position of the state in the file, in bytes."""
    n_bytes: int
    """Size of the state without the checkpoints."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """(number, bytes) of each checkpoint; the engine writes them right after the state, in this order."""


class LoadState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Replace the content of a sequence with a state from an open file.

    The sequence takes no other tokens in the same step.
    """

    seq_id: int
    length: int
    """Tokens in the state."""
    fd: int
    """File descriptor, open for reading."""
    offset: int
    """Position of the state in the file, in bytes."""
    n_bytes: int
    """Size of the state without the checkpoints."""
    checkpoints: tuple[tuple[int | None, int], ...] = ()
    """(number, bytes) of each checkpoint, as in ``SaveState``; number ``None``: skip it.  The engine keeps the others
    unless it refuses the state."""
    standing: tuple[tuple[int, int], ...] = ()
    """Runs of rows that take no position; see ``media.standing_runs``."""
    hashes: bytes = b""
    """Hashes of the pages of the state and its checkpoints, as in ``daemon.store.state_format``; empty if they have been
    verified."""


KvOp: TypeAlias = Truncate | CopyPrefix | SaveCheckpoint | DropCheckpoint | MeasureState | SaveState | LoadState
