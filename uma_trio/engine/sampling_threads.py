"""Samples the rows of a step in several threads, since a GPU waits for the tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling import sampler
from uma_trio.engine.sampling.candidates import Floats
from uma_trio.engine.sampling.plan import Rows, SamplingPlan
from uma_trio.engine_link.sampling import SamplingParams

Tokens = npt.NDArray[np.int32]

LOGITS_OF_A_THREAD: Final = 1 << 20
"""To find the best of these takes 0.4 to 0.5 ms on the host of a GPU, since they are in no cache; with half as many,
waking the threads takes what they save."""

DRAW: Final = 4
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
        self._helpers: list[Helper] = []
        self._params: Sequence[SamplingParams] = ()
        self._parts: list[tuple[slice, SamplingPlan]] = []
        """How the rows of ``_params`` are divided, until there are others."""
        self.copied_logits_rows = 0
        """Rows of logits that were copied for the latest tokens."""

    def sample(
        self,
        logits: Floats,
        rows: Rows,
        mus: dict[int, float] | None = None,
    ) -> Tokens:
        """See ``sampler.sample``.  Blocks until all rows have their token."""
        if rows.params != self._params:
            self._divide(rows.params, logits.shape[1])
        if len(self._parts) == 1:
            return sampler.sample(logits, rows, mus, self._parts[0][1])
        while len(self._helpers) < len(self._parts) - 1:
            self._helpers.append(Helper())

        def part(some: slice, plan: SamplingPlan) -> Tokens:
            mus_of_part: dict[int, float] = {}
            tokens = sampler.sample(logits[some], rows.part(some), mus_of_part, plan)
            if mus is not None:
                mus.update({some.start + row: mu for row, mu in mus_of_part.items()})
            return tokens

        first, *others = self._parts
        helpers = self._helpers[: len(others)]
        for helper, part_of_rows in zip(helpers, others, strict=True):
            helper.begin(functools.partial(part, *part_of_rows))
        try:
            tokens = [part(*first)]
        finally:  # nobody may use the logits any more
            outcomes = [helper.end() for helper in helpers]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            tokens.append(outcome)
        return np.concatenate(tokens)

    def _divide(self, params: Sequence[SamplingParams], n_vocab: int) -> None:
        work = sum([1 if row_params.greedy else DRAW for row_params in params])
        n_parts = max(1, min(self._n_threads, len(params), round(work * n_vocab / LOGITS_OF_A_THREAD)))
        ends = [len(params) * part // n_parts for part in range(n_parts + 1)]
        self._parts = [(rows, SamplingPlan(params[rows], n_vocab)) for rows in map(slice, ends, ends[1:])]
        self._params, self.copied_logits_rows = params, sum([plan.copied_logits_rows for _, plan in self._parts])

    def close(self) -> None:
        """End the threads.  Blocks until they have."""
        for helper in self._helpers:
            helper.close()


class Helper:
    """A thread that does one piece of work at a time.

    A queue, a future and a condition for each piece, as ``ThreadPoolExecutor`` has them, take turns at Python's lock while a
    GPU waits: four threads then took as long as one.
    """

    def __init__(self) -> None:
        self._begins, self._ended = threading.Lock(), threading.Lock()
        self._begins.acquire()
        self._ended.acquire()
        self._work: Callable[[], Tokens] | None = None
        self._outcome: Tokens | BaseException
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], Tokens]) -> None:
        """Do ``work``.  ``end`` must follow."""
        self._work = work
        self._begins.release()

    def end(self) -> Tokens | BaseException:
        """What the work returned or raised.  Blocks until then."""
        self._ended.acquire()
        return self._outcome

    def _run(self) -> None:
        while True:
            self._begins.acquire()
            if self._work is None:
                return
            try:
                self._outcome = self._work()
            except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits)
                self._outcome = error
            self._work = None
            self._ended.release()

    def close(self) -> None:
        """End the thread.  Blocks until it has."""
        self._begins.release()
        self._thread.join()
