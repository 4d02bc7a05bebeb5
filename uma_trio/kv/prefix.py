"""How much of a prompt another list of tokens begins with."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]

WORTH_SHARING: Final = 16
"""Tokens; a shorter common beginning is computed again."""


def common(a: Tokens, b: Tokens) -> int:
    """Tokens at the beginning that both have."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    at = int(differ.argmax())
    return at if differ[at] else n
