"""What ticks cost on this machine, measured before the first client waits for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from uma_trio.engine.records import Draw, Engine, Feed, Remove, Step, StepResult
from uma_trio.sampling import SamplingParams
from uma_trio.scheduling.cost import CostModel, DecodeCallTimes, Work

BUDGET_S: Final = 0.5
"""For each of the two parts; after so long no further step is begun: a rough guess of a large model is better than
a long start."""

SHAPES: Final = (((0, 16),), ((1, 64),), ((2, 16), (3, 16)), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)),
                 ((0, 1), (1, 1), (2, 1), (3, 32)), ((0, 128),), ((0, 1), (1, 1)), ((1, 256),), ((1, 1),), ((0, 1),),
                 ((0, 1), (1, 1)), ((0, 1), (1, 1), (2, 1), (3, 64)), ((1, 256),), ((1, 1),))  # fmt: skip
"""(sequence, tokens) of each step.  The first one is only for warming up; the last ones stand behind others, for
what a chunk or a decode takes also grows with what it reads."""

WIDEST: Final = 8
"""Rows of decodes of which each number is measured by itself."""

ROUNDS: Final = 2
"""Of each of them; the quicker one counts, since nothing makes a step quicker than it is."""


def calibrate(engine: Engine, *, known: CostModel | None = None, budget_s: float = BUDGET_S) -> CostModel:
    """A cost model that has seen some small steps of ``engine``, whose cache is empty before and after.

    Blocks for about twice ``budget_s``.  Steps for which sequences, cells or the batch are too small are left out.

    Args:
        known: what an earlier run has learned.

    Raises:
        EngineError: a step failed.
    """
    trial = _Trial(engine)
    cost = known or CostModel()
    ends = time.perf_counter() + budget_s
    for warm, shape in enumerate(SHAPES):
        found = trial.run(shape) if trial.fits(shape) else None
        if warm and found is not None:
            cost = cost.observed(*found)
        if time.perf_counter() > ends:
            break
    trial.forget()
    ms = _widths(trial, budget_s)
    trial.forget()
    return CostModel(cost.decode_only, cost.mixed, DecodeCallTimes(ms + cost.call_times.ms[len(ms) :]))


def _widths(trial: _Trial, budget_s: float) -> tuple[float, ...]:
    """What decodes of 1 to ``WIDEST`` rows take, as far as the time goes."""
    ends = time.perf_counter() + budget_s
    ms = [0.0]
    for rows in range(1, WIDEST + 1):
        if not trial.fits([(0, ROUNDS * rows)]):
            break
        ms.append(min(trial.decode_ms(rows) for _ in range(ROUNDS)))
        if time.perf_counter() > ends:
            break
    return tuple(ms)


class _Trial:
    """Steps of meaningless tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._facts = engine.facts
        self._held: dict[int, int] = {}

    def fits(self, shape: Sequence[tuple[int, int]]) -> bool:
        facts, held = self._facts, self._held
        n = sum(n for _, n in shape)
        each = all(seq < facts.n_seq_max and held.get(seq, 0) + n <= facts.n_ctx_seq for seq, n in shape)
        return each and n <= facts.n_batch and sum(held.values()) + n <= facts.n_ctx

    def run(self, shape: Sequence[tuple[int, int]]) -> tuple[Work, float]:
        """A tick of ``(sequence, tokens)``, those of one token being decodes: what it held, and its milliseconds."""
        decodes = [self._feed(seq, n) for seq, n in shape if n == 1]
        prompts = [self._feed(seq, n) for seq, n in shape if n > 1]
        apart = bool(decodes and prompts) and not self._facts.unified
        batches = [decodes, prompts] if apart else [decodes + prompts]
        n = sum(len(feed.tokens) for feed in prompts)
        before = sum(feed.pos * len(feed.tokens) for feed in prompts) / n if n else 0.0
        work = Work(n, len(decodes), sum(feed.pos for feed in decodes), before, len(batches))
        return work, _ms(self._engine.step(Step((), batches)))

    def decode_ms(self, rows: int) -> float:
        """One call of so many rows of decodes, of as many sequences; or of one, where there are fewer."""
        if rows <= self._facts.n_seq_max:
            feeds = [self._feed(seq, 1) for seq in range(rows)]
        else:
            feeds = [self._feed(0, rows, each=True)]
        return _ms(self._engine.step(Step((), [feeds])))

    def forget(self) -> None:
        self._engine.step(Step([Remove(seq) for seq in self._held]))
        self._held.clear()

    def _feed(self, seq: int, n: int, *, each: bool = False) -> Feed:
        pos = self._held.get(seq, 0)
        self._held[seq] = pos + n
        tokens = (np.arange(pos, pos + n) % self._facts.n_vocab).astype(np.int32)
        return Feed(seq, pos, tokens, [Draw(SamplingParams(), 0)] * (n if each else 1))


def _ms(result: StepResult) -> float:
    return result.decode_ms + result.sample_ms
