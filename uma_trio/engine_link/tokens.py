"""Runs of token ids, and their common prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""``[n]`` token ids."""

MIN_SHARED_TOKENS: Final = 16
"""Shorter common prefixes are computed again instead of shared."""


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of leading tokens that ``a`` and ``b`` have in common."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


def common_list_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """``common_prefix`` of lists."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next((at for at in range(n) if a[at] != b[at]), n)
