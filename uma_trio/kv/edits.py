"""What is done to the KV cache between two computations, in order."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs


@attrs.frozen
class Remove:
    """Tokens of a sequence leave the cache."""

    seq_id: int
    start: int = 0
    """Those at this position and after it; 0 removes all."""


@attrs.frozen
class Copy:
    """A sequence that holds nothing gets the beginning of another one's."""

    source: int
    target: int
    length: int
    """Tokens; at most as many as the source holds."""


@attrs.frozen(eq=False)
class Save:
    """The state of a sequence is written to memory: keys, values, and what a recurrent model keeps."""

    seq_id: int
    into: Any
    """A writable buffer of as many bytes as the state has; the whole of it is written before the step ends."""


@attrs.frozen(eq=False)
class Load:
    """A sequence gets a state that was saved, in place of what it holds.  It may be fed in a later step only."""

    seq_id: int
    length: int
    """Tokens in the state."""
    state: Any
    """A buffer with the state, read before the step ends."""


Edit: TypeAlias = Remove | Copy | Save | Load
