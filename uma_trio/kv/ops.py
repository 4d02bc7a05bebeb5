"""Changes of the KV cache that a step makes before it computes, in order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove the tokens of a sequence from position ``length`` on; 0 removes all."""

    seq_id: int
    length: int = 0
    checkpoint: int | None = None
    """The checkpoint of this length; a recurrent memory needs one unless all is removed."""


class CopyPrefix(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give an empty sequence the first ``length`` tokens of another one."""

    source: int
    target: int
    length: int
    """At most as many as the source holds."""
    checkpoint: int | None = None
    """The source's checkpoint of this length; a recurrent memory needs one for less than the whole."""


class SaveCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep the present state of a sequence under a new number, in the engine's memory."""

    seq_id: int
    checkpoint: int


class DropCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop a checkpoint.  Dropping one that does not exist is a no-op."""

    checkpoint: int


class MeasureState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report how many bytes ``SaveState`` needs for a sequence, and for each of its checkpoints."""

    seq_id: int
    checkpoints: tuple[int, ...] = ()


class SaveState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the state of a sequence into an open file: keys, values, and what a recurrent model keeps."""

    seq_id: int
    fd: int
    offset: int
    """Byte of the file at which the state begins."""
    n_bytes: int
    """Room for the state; the file has this many bytes behind ``offset``, and those of the checkpoints."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Number and bytes of each checkpoint to be written behind the state, in order."""


class LoadState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give a sequence a saved state in place of what it holds.  It may be an input from the next step on."""

    seq_id: int
    length: int
    """Tokens in the state."""
    fd: int
    offset: int
    n_bytes: int
    checkpoints: tuple[tuple[int | None, int], ...] = ()
    """Number and bytes of each checkpoint behind the state, in order; ``None``: skip it."""


KvOp: TypeAlias = (
    Truncate | CopyPrefix | SaveCheckpoint | DropCheckpoint | MeasureState | SaveState | LoadState
)
