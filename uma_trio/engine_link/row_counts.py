"""The numbers of rows for which GPUs have kernels of their own."""

from __future__ import annotations

from typing import Final

MAX_VECTOR_ROWS: Final = 8
"""Up to this many rows, Vulkan has a kernel for each number of them.  Above, kernels compute tiles of 16 rows or more."""


def row_counts(most: int) -> list[int]:
    """1 to ``MAX_VECTOR_ROWS``, then doubling up to ``most``: at least one for each kernel."""
    counts = [*range(1, min(MAX_VECTOR_ROWS, most) + 1)]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts
