"""Samples the rows of a step in several threads, since a GPU waits for the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling import sampler
from uma_trio.engine.sampling.candidates import Floats
from uma_trio.engine.sampling.plan import Rows, SamplingPlan
from uma_trio.engine_link.sampling import SamplingParams

LOGITS_OF_A_THREAD: Final = 1 << 22
"""To find the best of these takes 0.9 ms, since they are in no cache.  On a virtual machine with a GPU, four threads that
share them need as long as one: waking them takes what they save."""

DRAW: Final = 16
"""A draw counts as so many times finding the best token, so that threads share draws of a quarter of a million logits each.
With fewer rows in a thread the threads wait for each other."""

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
        self._params: Sequence[SamplingParams] = ()
        self._parts: list[tuple[slice, SamplingPlan]] = []
        """How the rows of ``_params`` are divided, until there are others."""
        self.copied_rows = 0
        """Rows of logits that were copied for the latest tokens."""

    def sample(
        self,
        logits: Floats,
        rows: Rows,
        mus: dict[int, float] | None = None,
    ) -> npt.NDArray[np.int32]:
        """See ``sampler.sample``.  Blocks until all rows have their token."""
        if rows.params != self._params:
            self._divide(rows.params, logits.shape[1])
        if len(self._parts) == 1:
            return sampler.sample(logits, rows, mus, self._parts[0][1])
        self._pool = self._pool or ThreadPoolExecutor(self._n_threads - 1, "sampling")

        def part(some: slice, plan: SamplingPlan) -> npt.NDArray[np.int32]:
            found: dict[int, float] = {}
            tokens = sampler.sample(logits[some], rows.part(some), found, plan)
            if mus is not None:
                mus.update({some.start + row: mu for row, mu in found.items()})
            return tokens

        first, *others = self._parts
        running = [self._pool.submit(part, *each) for each in others]
        return np.concatenate([part(*first), *[each.result() for each in running]])

    def _divide(self, params: Sequence[SamplingParams], n_vocab: int) -> None:
        work = sum([1 if each.greedy else DRAW for each in params])
        n_parts = max(1, min(self._n_threads, round(work * n_vocab / LOGITS_OF_A_THREAD)))
        ends = [len(params) * part // n_parts for part in range(n_parts + 1)]
        self._parts = [(rows, SamplingPlan(params[rows], n_vocab)) for rows in map(slice, ends, ends[1:])]
        self._params, self.copied_rows = params, sum([plan.copied_rows for _, plan in self._parts])

    def close(self) -> None:
        """End the threads.  Blocks until they have."""
        if self._pool is not None:
            self._pool.shutdown()
