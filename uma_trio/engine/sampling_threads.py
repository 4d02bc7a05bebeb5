"""Samples the rows of a step in several threads, since a GPU waits for the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling import sampler
from uma_trio.engine.sampling.candidates import Floats
from uma_trio.engine.sampling.dry import Breakers
from uma_trio.engine.sampling.sampler import Mask
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams

LOGITS_OF_A_THREAD: Final = 1 << 21
"""To read these takes about 1 ms; to wake a thread takes up to half of that on a virtual machine."""

DRAW: Final = 8
"""A draw takes so many times as long as finding the best token."""

MAX_THREADS: Final = 8
"""More threads wait for each other: what is not done by numpy, one at a time can do."""


class SamplingThreads:
    """Samples many rows in several threads, one part of them in each.  The tokens are those of ``sampler.sample``.

    Args:
        n_threads: how many may run, with the caller's.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = min(n_threads, MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None

    def sample(
        self,
        logits: Floats,
        params: Sequence[SamplingParams],
        steps: Sequence[int],
        masks: Sequence[Mask],
        biases: Sequence[Bias | None],
        pasts: Sequence[Past | None],
        breakers: Sequence[Breakers | None],
        mus: dict[int, float],
    ) -> npt.NDArray[np.int32]:
        """See ``sampler.sample``.  Blocks until all rows have their token."""
        work = sum([1 if each.greedy else DRAW for each in params])
        n_parts = min(self._n_threads, work * logits.shape[1] // LOGITS_OF_A_THREAD)
        if n_parts < 2:
            return sampler.sample(logits, params, steps, masks, biases, pasts, breakers, mus)
        self._pool = self._pool or ThreadPoolExecutor(self._n_threads - 1, "sampling")
        ends = [len(logits) * part // n_parts for part in range(n_parts + 1)]

        def part(start: int, end: int) -> npt.NDArray[np.int32]:
            rows = slice(start, end)
            found: dict[int, float] = {}
            tokens = sampler.sample(
                logits[rows], params[rows], steps[rows], masks[rows], biases[rows], pasts[rows], breakers[rows], found
            )
            mus.update({start + row: mu for row, mu in found.items()})
            return tokens

        first, *others = pairwise(ends)
        running = [self._pool.submit(part, *each) for each in others]
        return np.concatenate([part(*first), *[each.result() for each in running]])

    def close(self) -> None:
        """End the threads.  Blocks until they have."""
        if self._pool is not None:
            self._pool.shutdown()
