"""Memory bandwidth of this machine, the upper limit for the speed of ticks on a CPU."""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np

MAX_BLOCK_BYTES: Final = 32 << 20
"""Copied by each thread at most.  Larger than a thread's share of the caches of most machines."""

MIN_BLOCK_BYTES: Final = 4 << 20
"""Copied by each thread at least, so that starting it hardly counts."""

ROUNDS: Final = 3


def memory_bytes_per_s(threads: int, model_bytes: int) -> float:
    """Measure bytes read plus bytes written per second with ``threads`` parallel copies; the best of three rounds.

    Blocks for about 10 ms per round, and less for a small model.  Takes 64 MiB per thread at most meanwhile.

    Args:
        model_bytes: weights that a tick reads.  What fits into the caches is read from there.
    """
    n_bytes = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, model_bytes // threads))
    sources = [np.ones(n_bytes, np.uint8) for _ in range(threads)]
    targets = [np.zeros(n_bytes, np.uint8) for _ in range(threads)]

    def copy_all() -> float:
        copiers = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources, strict=True)]
        began = time.perf_counter()
        for copier in copiers:
            copier.start()
        for copier in copiers:
            copier.join()
        return time.perf_counter() - began

    return 2.0 * threads * n_bytes / min(copy_all() for _ in range(ROUNDS))
