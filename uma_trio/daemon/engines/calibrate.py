"""What ticks cost on this machine, measured before the first client waits for one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import attrs

from uma_trio.daemon.engines.link import EngineLink
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.decode_split import DecodeCallTimes
from uma_trio.daemon.policy.row_curve import MAX_NOISE, MIN_POINTS, PrefillCurves, RowCurve, noise
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.kv_ops import KvOp, Truncate
from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import SamplingParams

CHECKED: Final = (((0, 16),), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)), ((0, 64),), ((0, 1), (1, 1), (2, 32)))
"""The steps that show whether what an earlier run has learned still holds.  The first one only warms up."""

FASTER: Final = 0.25
"""If such a step is faster than predicted by this share, the known costs are those of a busy machine.  A slower step says
little, since the machine may be busy now.  The cost model learns from it as from a tick."""

BUDGET_S: Final = 0.5
"""Time limit of each of the first two parts; no step begins after it.  A rough estimate is better than a slow start."""

SHAPES: Final = (((0, 16),), ((1, 64),), ((2, 16), (3, 16)), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)),
                 ((0, 1), (1, 1), (2, 1), (3, 32)), ((0, 128),), ((0, 1), (1, 1)), ((1, 256),), ((1, 1),), ((0, 1),),
                 ((0, 1), (1, 1)), ((0, 1), (1, 1), (2, 1), (3, 64)), ((1, 256),), ((1, 1),))  # fmt: skip
"""(sequence, tokens) of each step.  The first step only warms up.  The last ones have others in front of them, since the
cost of a chunk or a decode also grows with its context."""

MAX_ROWS: Final = 8
"""Calls of 1 to this many decode rows are measured one by one."""

ROUNDS: Final = 4
"""Measurements of each call width, or two where the time is short.  The fastest counts, because noise only makes a step
slower."""

N_MEASURED: Final = len(SHAPES) + ROUNDS * MAX_ROWS
"""Steps that measure everything but the curves."""

CURVE_ROUNDS: Final = 3
"""Measurements of each row count: a GPU loads a kernel when it is first used, and the other two say how steady it is."""

CURVE_ROWS: Final = (*range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, 2049, 128))
"""Row counts of a curve.  Kernels work in tiles of 8 rows or more, so each is the last one of its tile."""

PROMPT_CURVE_ROWS: Final = (16, 64, 128, 256, *range(512, 2049, 512))
"""The same for prompts alone, where there is another curve for prompts next to decodes.  Such ticks are long."""

CURVE_BUDGET_S: Final = (1.0, 0.4)
"""Time limits of the two curves, in which the engine computes.  No step begins that would take longer."""

MAX_CURVE_STEP_MS: Final = 100.0
"""A curve ends with the first row count that takes longer.  On a slow CPU that is soon, and there it is nearly a line."""

MAX_CURVE_DECODES: Final = 8
"""Decodes next to which prompts are measured."""


async def calibrate(
    link: EngineLink, *, known: CostModel | None = None, may_have_stairs: bool = True, budget_s: float = BUDGET_S
) -> CostModel:
    """Measure some small steps of an engine, whose KV cache is empty before and after.

    Takes about twice ``budget_s``, and ``CURVE_BUDGET_S`` if no earlier run has measured the curves.  If ``known`` still
    holds, takes only the time of the steps in ``CHECKED``.  ``known`` is also kept where these steps show that there is no
    time to measure everything: clients wait, and ticks correct it.  Steps for which sequences, cells or the batch are too
    small are left out.

    Args:
        known: what an earlier run has learned.
        may_have_stairs: whether to measure the curves: kernels of a GPU compute rows in tiles.

    Raises:
        EngineError, EngineDied: a step failed.
    """
    trial = Trial(link)
    needs_curves = may_have_stairs and not (known is not None and known.knows_stairs)
    if known is not None and not needs_curves and (checked := await _checked(trial, known, budget_s)) is not None:
        return checked
    cost = known or CostModel()
    ends = time.perf_counter() + budget_s
    ticks: list[tuple[Work, float]] = []
    for n, shape in enumerate(SHAPES):
        tick = await trial.run(shape) if trial.fits(shape) else None
        if n and tick is not None:
            ticks.append(tick)
            cost = cost.observed(*tick)
        if time.perf_counter() > ends:
            break
    await trial.clear()
    ms = await _call_widths(trial, budget_s)
    await trial.clear()
    too_slow = cost.predict(Work(CURVE_ROWS[0], 0, 0)) > MAX_CURVE_STEP_MS
    if needs_curves and not too_slow and (curves := await measured_curves(trial)) is not None:
        cost = cost.with_curves(curves)
        for work, tick_ms in ticks if cost.mixed.curves is not None else ():
            cost = cost.observed(work, tick_ms) if work.prefill_tokens else cost
    # times of different moments do not compare, so those of an earlier run are not mixed with these
    return attrs.evolve(cost, call_times=DecodeCallTimes(max(ms, cost.call_times.ms, key=len)))


async def _checked(trial: Trial, known: CostModel, budget_s: float) -> CostModel | None:
    """``known``, with a few more steps learned; ``None`` if everything should be measured again, and there is time."""
    cost, has_changed = known, len(known.call_times.ms) <= MAX_ROWS
    slowest_ms, ends = 0.0, time.perf_counter() + budget_s
    try:
        for n, shape in enumerate(CHECKED):
            if time.perf_counter() > ends:
                return cost
            if not trial.fits(shape):
                if n < 2:
                    return None
                continue
            work, ms = await trial.run(shape)
            expected = [known.predict(work)]
            if work.decode_rows <= known.call_times.max_rows and not work.prefill_tokens:
                expected.append(known.call_times.ms[work.decode_rows])
            if n:
                has_changed = has_changed or ms < (1 - FASTER) * max(expected)
                slowest_ms = max(slowest_ms, ms)
                cost = cost.observed(work, ms)
    finally:
        await trial.clear()
    return None if has_changed and 1e-3 * slowest_ms * N_MEASURED < 2 * budget_s else cost


async def measured_curves(trial: Trial) -> PrefillCurves | None:
    """What ticks with prefill take by their rows; ``None`` if the device is unsteady or the batch too small."""
    n_decodes = trial.max_decodes_with_a_prompt
    if not n_decodes:
        prompt = await _curve(trial, 0, CURVE_ROWS, CURVE_BUDGET_S[0])
        return None if prompt is None else PrefillCurves(prompt)
    mixed = await _curve(trial, n_decodes, CURVE_ROWS, CURVE_BUDGET_S[0])
    prompt = None if mixed is None else await _curve(trial, 0, PROMPT_CURVE_ROWS, CURVE_BUDGET_S[1])
    return None if mixed is None else PrefillCurves(prompt or mixed, mixed, n_decodes)


async def _curve(trial: Trial, n_decodes: int, row_counts: Sequence[int], budget_s: float) -> RowCurve | None:
    """What a tick of this many decodes and a chunk takes by its rows, as far as the time goes."""
    left_ms = 1e3 * budget_s
    times_by_rows: dict[int, list[float]] = {}
    for rows in [rows for rows in row_counts if rows > n_decodes]:
        times = [
            ms
            for n in range(CURVE_ROUNDS)
            if (ms := await trial.chunk_ms(n_decodes, rows - n_decodes - trial.shorter(n))) is not None
        ]
        if len(times) < CURVE_ROUNDS:
            break
        times_by_rows[rows] = times
        left_ms -= sum(times)
        is_unsteady = len(times_by_rows) == MIN_POINTS and noise(times_by_rows) > MAX_NOISE
        if is_unsteady or min(times) > MAX_CURVE_STEP_MS or left_ms < sum(times):
            break
    await trial.clear()
    return RowCurve.measured(times_by_rows)


async def _call_widths(trial: Trial, budget_s: float) -> tuple[float, ...]:
    """Milliseconds of calls of 1 to ``MAX_ROWS`` decode rows, as far as the time goes.

    The widths are measured in turns.  So a slow moment meets all of them alike, and each call is one of another width
    than the call before, as the calls of a split are: llama.cpp plans its graph again, which the same call twice
    running would not show.
    """
    began = time.perf_counter()
    ms: dict[int, float] = {}
    most = MAX_ROWS
    for number in range(ROUNDS):
        for rows in range(1, most + 1):
            if not trial.fits([(0, rows)]):
                most = rows - 1
                break
            ms[rows] = min(await trial.decode_ms(rows), ms.get(rows, math.inf))
            if not number and time.perf_counter() > began + budget_s / 2:
                most = rows
                break
        if time.perf_counter() > began + budget_s:
            break
    return (0.0, *[ms[rows] for rows in range(1, most + 1)])


class Trial:
    """Steps of meaningless tokens.

    Args:
        adapters: all of them are computed with these.
    """

    def __init__(self, link: EngineLink, adapters: Scales = ()) -> None:
        self._link = link
        self._info = link.info
        self._adapters = adapters
        self._lengths: dict[int, int] = {}

    def fits(self, shape: Sequence[tuple[int, int]]) -> bool:
        info, lengths = self._info, self._lengths
        n = sum(n for _, n in shape)
        sequences_fit = all(seq < info.n_seq_max and lengths.get(seq, 0) + n <= info.n_ctx_seq for seq, n in shape)
        return sequences_fit and n <= info.n_batch and sum(lengths.values()) + n <= info.n_ctx

    async def run(self, shape: Sequence[tuple[int, int]]) -> tuple[Work, float]:
        """A tick of ``(sequence, tokens)``, one token being a decode: what it held, and its milliseconds."""
        n_cells = sum(self._lengths.values())
        decodes = [self._input(seq, n) for seq, n in shape if n == 1]
        prompts = [self._input(seq, n) for seq, n in shape if n > 1]
        separately = bool(decodes and prompts) and not self._info.unified
        calls = [decodes, prompts] if separately else [decodes + prompts]
        n = sum(len(prompt.tokens) for prompt in prompts)
        before = sum(prompt.position * len(prompt.tokens) for prompt in prompts) / n if n else 0.0
        context = sum(decode.position for decode in decodes)
        if self._info.attention_scan is AttentionScan.CACHE:
            context, before = len(decodes) * n_cells, n_cells if n else 0.0
        work = Work(n, len(decodes), context, before, len(calls))
        return work, await self._step_ms(calls)

    async def decode_ms(self, rows: int) -> float:
        """Milliseconds of one call with a decode row of each of ``rows`` sequences, or of one sequence if there are too few."""
        if rows <= self._info.n_seq_max:
            return await self._step_ms([[self._input(seq, 1) for seq in range(rows)]])
        length = self._lengths[0]
        drafts = self._input(0, rows, sample_each=True)
        ms = await self._step_ms([[drafts]])
        await self._link.compute(Step([Truncate(0, length)]))
        self._lengths[0] = length
        return ms

    @property
    def max_decodes_with_a_prompt(self) -> int:
        """How many decodes to measure a prompt with; 0 if they are in calls of their own."""
        return min(MAX_CURVE_DECODES, self._info.n_seq_max - 1) if self._info.unified else 0

    async def chunk_ms(self, n_decodes: int, n: int) -> float | None:
        """Milliseconds of a call with ``n_decodes`` decodes and the first ``n`` tokens of a prompt; ``None``: no room."""
        held = self._lengths.pop(n_decodes, 0)
        shape = [*[(seq, 1) for seq in range(n_decodes)], (n_decodes, n)]
        if not self.fits(shape):
            self._lengths[n_decodes] = held
            return None
        inputs = [self._input(*sequence) for sequence in shape]
        return await self._step_ms([inputs], [Truncate(n_decodes)])

    def shorter(self, n: int) -> int:
        """By how many tokens to shorten the ``n``-th of several like chunks, so that none is recorded to be repeated.

        Chunks of a prompt are never recorded (``prefill._would_be_recorded``), and one row less is in the same tile.
        """
        return n % 2 if self._info.records_calls else 0

    async def append(self, seq: int, rows: int) -> None:
        """Compute up to ``rows`` more tokens of a sequence, as many as there is room for."""
        rows = await self.make_room(seq, rows)
        if rows:
            await self._step_ms([[self._input(seq, rows)]])

    async def extend(self, seq: int, length: int) -> None:
        """Have a sequence hold ``length`` tokens, or as many as there is room for."""
        info = self._info
        others = sum(self._lengths.values()) - self._lengths.get(seq, 0)
        length = min(length, info.n_ctx_seq, info.n_ctx - others)
        while (missing := length - self._lengths.get(seq, 0)) > 0:
            await self._step_ms([[self._input(seq, min(missing, info.n_batch))]])

    def can_decode(self, rows: int) -> bool:
        """Whether ``decode_ms`` can compute this many rows."""
        info = self._info
        if rows <= info.n_seq_max:
            return self.fits([(seq, 1) for seq in range(rows)])
        return info.can_truncate and 0 in self._lengths and self.fits([(0, rows)])

    async def make_room(self, seq: int, rows: int) -> int:
        """Make room for ``rows`` tokens of a sequence, by removing its last ones; returns how many there is room for."""
        info, held = self._info, self._lengths.get(seq, 0)
        most = min(info.n_ctx_seq, info.n_ctx - sum(self._lengths.values()) + held)
        kept = max(0, most - rows)
        if kept < held and (info.can_truncate or not kept):
            await self._link.compute(Step([Truncate(seq, kept)]))
            held = self._lengths[seq] = kept
        return min(rows, most - held)

    async def empty(self, seq: int) -> None:
        """Remove what one sequence holds."""
        await self._link.compute(Step([Truncate(seq)]))
        self._lengths.pop(seq, None)

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
        samples = [SampleRequest(SamplingParams())] * (n if sample_each else 1)
        return StepInput(seq, position, tokens, samples, adapters=self._adapters)
