"""What ticks cost on this machine, measured before the first client waits for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from uma_trio.engine.link import EngineLink
from uma_trio.engine.messages import SampleRequest, Step, StepInput
from uma_trio.kv.ops import KvOp, Truncate
from uma_trio.sampling import SamplingParams
from uma_trio.scheduling.cost import CostModel, DecodeCallTimes, Work

BUDGET_S: Final = 0.5
"""Time limit of each of the two parts; no step begins after it.  A rough estimate is better than a slow start."""

SHAPES: Final = (((0, 16),), ((1, 64),), ((2, 16), (3, 16)), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)),
                 ((0, 1), (1, 1), (2, 1), (3, 32)), ((0, 128),), ((0, 1), (1, 1)), ((1, 256),), ((1, 1),), ((0, 1),),
                 ((0, 1), (1, 1)), ((0, 1), (1, 1), (2, 1), (3, 64)), ((1, 256),), ((1, 1),))  # fmt: skip
"""(sequence, tokens) of each step.  The first step only warms up.  The last ones have others in front of them, since the
cost of a chunk or a decode also grows with its context."""

MAX_ROWS: Final = 8
"""Calls of 1 to this many decode rows are measured one by one."""

ROUNDS: Final = 2
"""Measurements of each call width.  The fastest counts, because noise only makes a step slower."""


async def calibrate(link: EngineLink, *, known: CostModel | None = None, budget_s: float = BUDGET_S) -> CostModel:
    """Measure some small steps of an engine, whose KV cache is empty before and after.

    Takes about twice ``budget_s``.  Steps for which sequences, cells or the batch are too small are left out.

    Args:
        known: what an earlier run has learned.

    Raises:
        EngineError, EngineDied: a step failed.
    """
    trial = _Trial(link)
    cost = known or CostModel()
    ends = time.perf_counter() + budget_s
    for n, shape in enumerate(SHAPES):
        found = await trial.run(shape) if trial.fits(shape) else None
        if n and found is not None:
            cost = cost.observed(*found)
        if time.perf_counter() > ends:
            break
    await trial.clear()
    ms = await _call_widths(trial, budget_s)
    await trial.clear()
    return CostModel(cost.decode_only, cost.mixed, DecodeCallTimes(ms + cost.call_times.ms[len(ms) :]))


async def _call_widths(trial: _Trial, budget_s: float) -> tuple[float, ...]:
    """Milliseconds of calls of 1 to ``MAX_ROWS`` decode rows, as far as the time goes."""
    ends = time.perf_counter() + budget_s
    ms = [0.0]
    for rows in range(1, MAX_ROWS + 1):
        if not trial.fits([(0, ROUNDS * rows)]):
            break
        ms.append(min([await trial.decode_ms(rows) for _ in range(ROUNDS)]))
        if time.perf_counter() > ends:
            break
    return tuple(ms)


class _Trial:
    """Steps of meaningless tokens."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._info = link.info
        self._lengths: dict[int, int] = {}

    def fits(self, shape: Sequence[tuple[int, int]]) -> bool:
        info, lengths = self._info, self._lengths
        n = sum(n for _, n in shape)
        each = all(seq < info.n_seq_max and lengths.get(seq, 0) + n <= info.n_ctx_seq for seq, n in shape)
        return each and n <= info.n_batch and sum(lengths.values()) + n <= info.n_ctx

    async def run(self, shape: Sequence[tuple[int, int]]) -> tuple[Work, float]:
        """A tick of ``(sequence, tokens)``, one token being a decode: what it held, and its milliseconds."""
        decodes = [self._input(seq, n) for seq, n in shape if n == 1]
        prompts = [self._input(seq, n) for seq, n in shape if n > 1]
        separately = bool(decodes and prompts) and not self._info.unified
        calls = [decodes, prompts] if separately else [decodes + prompts]
        n = sum(len(each.tokens) for each in prompts)
        before = sum(each.position * len(each.tokens) for each in prompts) / n if n else 0.0
        work = Work(n, len(decodes), sum(each.position for each in decodes), before, len(calls))
        return work, await self._step_ms(calls)

    async def decode_ms(self, rows: int) -> float:
        """One call of this many decode rows, of as many sequences; or of one sequence where there are fewer."""
        if rows <= self._info.n_seq_max:
            return await self._step_ms([[self._input(seq, 1) for seq in range(rows)]])
        length = self._lengths[0]
        drafts = self._input(0, rows, sample_each=True)
        self._lengths[0] = length  # nobody knows how many are accepted
        return await self._step_ms([[drafts]], [Truncate(0, length)])

    async def clear(self) -> None:
        """Empty the KV cache."""
        await self._link.compute(Step([Truncate(seq) for seq in self._lengths]))
        self._lengths.clear()

    async def _step_ms(self, calls: Sequence[Sequence[StepInput]], ops: Sequence[KvOp] = ()) -> float:
        output = await self._link.compute(Step(ops, calls))
        return output.decode_ms + output.sample_ms

    def _input(self, seq: int, n: int, *, sample_each: bool = False) -> StepInput:
        position = self._lengths.get(seq, 0)
        self._lengths[seq] = position + n
        tokens = [token % self._info.n_vocab for token in range(position, position + n)]
        return StepInput(seq, position, tokens, [SampleRequest(SamplingParams())] * (n if sample_each else 1))
