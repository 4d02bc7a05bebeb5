"""What is done to the KV cache between two computations, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs


@attrs.frozen
class Remove:
    """Tokens of a sequence leave the cache."""

    seq_id: int
    start: int = 0
    """Those at this position and after it; 0 removes all."""
    mark: int | None = None
    """The checkpoint that the sequence goes back to; it has ``start`` tokens.  A memory that cannot be cut needs one."""


@attrs.frozen
class Copy:
    """A sequence that holds nothing gets the beginning of another one's."""

    source: int
    target: int
    length: int
    """Tokens; at most as many as the source holds."""
    mark: int | None = None
    """The source's checkpoint of this length; a memory that cannot be cut needs one for less than the whole."""


@attrs.frozen
class Mark:
    """The state of a sequence as it is now is kept as a checkpoint, until it is forgotten."""

    seq_id: int
    mark: int
    """Its number; nothing was kept under it before."""


@attrs.frozen
class Forget:
    """A checkpoint is needed no longer; one that there is not is none the less forgotten."""

    mark: int


@attrs.frozen(eq=False)
class Save:
    """The state of a sequence is written to memory: keys, values, and what a recurrent model keeps."""

    seq_id: int
    into: Any
    """A writable buffer of as many bytes as the state has; the whole of it is written before the step ends."""
    marks: Sequence[tuple[int, Any]] = ()
    """Checkpoints to be written as well, each with such a buffer."""


@attrs.frozen(eq=False)
class Load:
    """A sequence gets a state that was saved, in place of what it holds.  It may be fed in a later step only."""

    seq_id: int
    length: int
    """Tokens in the state."""
    state: Any
    """A buffer with the state, read before the step ends."""
    marks: Sequence[tuple[int, Any]] = ()
    """Numbers of checkpoints of the sequence, each with such a buffer; kept unless the state is refused."""


Edit: TypeAlias = Remove | Copy | Mark | Forget | Save | Load
