"""Memory bandwidth of this machine, the upper limit for the speed of ticks on a CPU."""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np

BLOCK_BYTES: Final = 32 << 20
"""Copied by each thread.  Larger than a thread's share of the caches of most machines."""

ROUNDS: Final = 3


def memory_bytes_per_s(threads: int) -> float:
    """Measure bytes read plus bytes written per second with ``threads`` parallel copies; the best of three rounds.

    Blocks for about 10 ms per round.  Takes 64 MiB per thread meanwhile.
    """
    sources = [np.ones(BLOCK_BYTES, np.uint8) for _ in range(threads)]
    targets = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(threads)]

    def copy_all() -> float:
        copiers = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets, sources, strict=True)]
        began = time.perf_counter()
        for copier in copiers:
            copier.start()
        for copier in copiers:
            copier.join()
        return time.perf_counter() - began

    return 2.0 * threads * BLOCK_BYTES / min(copy_all() for _ in range(ROUNDS))
