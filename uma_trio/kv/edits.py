"""What is done to the KV cache between two computations, in order."""

from __future__ import annotations

from typing import TypeAlias

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


Edit: TypeAlias = Remove | Copy
