"""Predicts how long a tick takes, learned online from the ticks before.

The time of a tick is close to linear in what it computes::

    t = a * n_calls + b * prefill_tokens + c * decode_rows + d * context_tokens + e * prefill_attention

================= ========================================================================================
context_tokens    KV cells that the attention of the decode rows scans
prefill_attention KV cells that the attention of the prefill chunks scans: n * m + n * n / 2 for a chunk of
                  n tokens after m tokens
================= ========================================================================================

The last chunks of a long prompt take several times as long as its first ones.  A model without ``prefill_attention``
notices that too late.  Where attention scans the whole cache (``AttentionScan.CACHE``), m is the number of its cells up to
the highest one in use, and each decode row scans as many.

Decode-only ticks run other kernels than ticks with prefill, so each kind has coefficients of its own.  Both are fitted
by recursive least squares with a forgetting factor: old ticks fade, and the model follows a machine that gets warm or
busy.  A kind of tick that does not occur does not fade.

Where the time of ticks by their rows was measured (``PrefillCurves``), the measured time replaces the first two terms,
and the regression finds a factor for it.  Where the curve was measured next to decodes, one kernel computes the attention
of all rows.  So ``prefill_attention`` then includes ``context_tokens``.

A line fits the first few decode rows poorly; ``decode_split`` has measured times of these.

Source: docs/design/scheduler.md, "What a tick will take"; recursive least squares in information form: Haykin,
Adaptive Filter Theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from uma_trio.daemon.policy.decode_split import SPLIT_THRESHOLD, DecodeCallTimes
from uma_trio.daemon.policy.row_curve import PrefillCurves

FORGETTING_FACTOR: Final = 0.98
"""Weight of all earlier ticks after one more tick.  A tick fifty ticks ago counts for a third."""

MIN_INFORMATION: Final = 0.01
"""Lower bound of the information about each coefficient.  Without it, ticks that are all alike (the same four streams
and no prompts) would let the rest fade to nothing, and noise would pass for news."""

WARMUP_TICKS: Final = 8
"""Ticks after which the model starts to distrust outliers."""

OUTLIER_TOLERANCE: Final = 0.5
"""The part of a measurement that exceeds the prediction by more than this share is ignored at first.  If one slow tick
of several seconds were believed, prompts would wait long after it.  A device that really has become slower raises the
error, and with it the tolerance, within a few ticks."""

OUTLIER_ERRORS: Final = 8.0
"""The tolerance is at least this many times the error of the model."""

ERROR_SMOOTHING: Final = 0.05
"""Weight of the latest tick in the error."""

MAX_TICK_ERROR: Final = 4.0
"""Upper bound of what one tick adds to the error."""

MIN_MARGIN: Final = 0.01
MAX_MARGIN: Final = 0.1
"""Bounds of the share of the time before a deadline that is kept free: without it, half of the ticks would be late."""

TICKS_IN_TIME: Final = 0.9
"""Share of the ticks that should take no longer than the prediction plus the margin."""

MARGIN_STEP: Final = 0.5
"""How fast a margin follows.  A tick that took longer than the prediction plus the margin raises the margin by about this
share.  The nine of ten other ticks together lower it by about as much."""

N_MARGINS: Final = 12
"""Number of classes of ticks by duration, each with a margin of its own.  The first class ends at 1 ms, and each of the
next ends at twice as much."""

CONTEXT_ALIGNMENT: Final = 256
"""llama.cpp rounds the context of a call up to a multiple of this (``llama_kv_cache::get_n_kv``)."""

MAX_CONTEXT_GROUPS: Final = 24
"""With more groups of equal context length than this, rows are not split by context: the search is quadratic."""

Features: TypeAlias = tuple[float, ...]
"""Five numbers: calls, prefill tokens, decode rows, context of the decode rows, attention of the prefill tokens."""

FEATURE_SCALES: Final = (1.0, 100.0, 10.0, 10_000.0, 100_000.0)
"""Units of the features, chosen to make all coefficients similar in size: ms a call, ms for 100 prefill tokens, ..."""

N_FEATURES: Final = len(FEATURE_SCALES)

CURVE_SCALE: Final = 10.0
"""Unit of the measured time of a tick's rows, which is the second feature where there are curves."""

TILE_ROWS: Final = 16
"""Rows of a tile.  All row counts of a tile take the same time, so they share a correction of the prediction."""

CORRECTION_STEP: Final = 0.5
CORRECTION_DECAY: Final = 0.01
MAX_CORRECTION: Final = 1.25
"""A correction is a factor on the prediction, from 1 / ``MAX_CORRECTION`` to ``MAX_CORRECTION``.  A tick moves the
correction of its tile by ``CORRECTION_STEP`` of the error, in logarithms.  The corrections of all tiles fade by
``CORRECTION_DECAY`` a tick, because the cost of a tile also depends on the context, which changes."""

STAIR_TOLERANCE: Final = 0.08
"""A tick may take this share longer than the time that is left, for a chunk that ends just before a stair of the cost, if
prompts gain more speed by it than the tick gets longer."""

STAIR_RATE: Final = 0.99
"""The plan takes, of the prefill chunks that end in time, the longest one that reaches this share of the best speed, in
tokens a millisecond.  So a chunk ends just before a stair."""

PREFILL_SPEED: Final = 0.97
"""Share of the speed of the fastest chunk, in prompt tokens a millisecond.  Next to streams, a chunk is no longer than the
shortest one that reaches it (``CostModel.worthwhile_prefill_tokens``)."""

RECORDING_WEIGHT: Final = 0.5
"""Weight of the latest recording in their mean."""
MAX_RECORDING_MS: Final = 50.0
"""A recording counts as this long at most, so that a hiccup does not count for long."""

CHUNK_SHARES: Final = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1.0)
"""Lengths of the chunks whose speeds are compared without a curve, as shares of the longest one.  With a curve the measured
row counts are compared."""


LONG_CHUNK: Final = 512
"""Tokens of a chunk in which the price of the call hardly counts."""

DRAFT_WEIGHT: Final = 0.05
"""Weight of the latest step in the averages of a draft model."""

FEW_DRAFT_TOKENS: Final = 4
"""With more tokens than this for each call, a step tells how long tokens take and not how long calls take."""

MAX_DRAFT_FACTOR: Final = 3.0
"""A step counts as this many times the prediction at most, so that a hiccup does not stop speculation for long."""


@attrs.frozen
class Work:
    """What one tick computes."""

    prefill_tokens: int
    decode_rows: int
    """One row for each decoding sequence, and one more for each draft token that is verified and for each gap in the
    sequence ids of a call that the engine fills."""
    context_tokens: int
    """KV cells that the attention of the decode rows scans: the sum of their context lengths, or more
    (``AttentionScan``)."""
    mean_prefill_context: float = 0.0
    """KV cells that each prefill token scans, without those of its chunk: the tokens before it on average, or all cells
    in use."""
    n_calls: int = 1
    """Consecutive calls of ``llama_decode``, and one more for each further length of chunks with per-sequence KV: llama.cpp
    computes together only chunks of one length."""
    is_recorded: bool = False
    """The device records the decode call, to repeat it (CUDA graphs)."""


@attrs.frozen
class LinearModel:
    """Linear model of a tick's time, fitted by recursive least squares.  Immutable."""

    coefficients: Features
    """Milliseconds for one unit of each scaled feature; none is negative."""
    information: tuple[Features, ...] = tuple(
        tuple(MIN_INFORMATION if row == column else 0.0 for column in range(N_FEATURES)) for row in range(N_FEATURES)
    )
    """Information matrix: the sum of x times x transposed over the observed ticks, recent ticks counting most."""
    n_observed: int = 0
    """Number of ticks that the model has learned from."""
    error: float = 0.0
    """Mean of |predicted - measured| / measured, recent ticks counting most.  Each tick adds ``MAX_TICK_ERROR`` at
    most."""
    unconstrained: Features | None = None
    """The coefficients before negative ones were set to 0.  The recursion continues from these."""
    margins: tuple[float, ...] = (0.0,) * N_MARGINS
    """By which share a tick may take longer than predicted, by class of duration: a quantile of what was observed."""
    curves: PrefillCurves | None = None
    """The measured time of ticks with prefill by their rows; ``None`` if there is none, or it has no stairs."""
    corrections: Mapping[int, float] = attrs.field(factory=dict)
    """With curves: factor on the prediction of the coefficients, by the number of tiles of rows; 1 for other tiles."""

    def predict(self, work: Work) -> float:
        """Predicted milliseconds of ``work``, at least 0."""
        return self._predicted(self._features(work), work.prefill_tokens + work.decode_rows)

    def _predicted(self, x: Features, rows: int) -> float:
        return max(0.0, self._linear(x) * self._correction(rows))

    def _linear(self, x: Features) -> float:
        return sum([c * feature for c, feature in zip(self.coefficients, x, strict=True)])

    def _correction(self, rows: float) -> float:
        return self.corrections.get(math.ceil(rows / TILE_ROWS), 1.0) if self.corrections else 1.0

    def observed(self, work: Work, ms: float) -> LinearModel:
        """The model after a tick: ``work`` took ``ms`` milliseconds."""
        x = self._features(work)
        rows = work.prefill_tokens + work.decode_rows
        predicted = self._predicted(x, rows)
        tick_error = min(abs(predicted - ms) / max(ms, 0.01), MAX_TICK_ERROR)
        in_warmup = self.n_observed < WARMUP_TICKS
        tolerance = max(OUTLIER_TOLERANCE, OUTLIER_ERRORS * self.error)
        believed = ms if in_warmup else min(ms, predicted * (1 + tolerance) + 1)
        information = tuple([
            tuple([
                FORGETTING_FACTOR * k + x[i] * x[j] + ((1 - FORGETTING_FACTOR) * MIN_INFORMATION if i == j else 0.0)
                for j, k in enumerate(row)
            ])
            for i, row in enumerate(self.information)
        ])  # fmt: skip
        unconstrained = self.unconstrained or self.coefficients
        residual = believed / self._correction(rows) - sum([c * t for c, t in zip(unconstrained, x, strict=True)])
        gain = _solve(information, x)
        unconstrained = tuple([c + g * residual for c, g in zip(unconstrained, gain, strict=True)])
        # an average over the warm-up would be dominated by the initial estimate
        error = tick_error if in_warmup else self.error + ERROR_SMOOTHING * (tick_error - self.error)
        coefficients = _non_negative(unconstrained, information)
        margins = self._margins_after(predicted, ms)
        corrections = self._corrections_after(rows, believed / max(predicted, 0.01))
        return LinearModel(
            coefficients, information, self.n_observed + 1, error, unconstrained, margins, self.curves, corrections
        )

    def _corrections_after(self, rows: int, ratio: float) -> Mapping[int, float]:
        if self.curves is None or self.n_observed < WARMUP_TICKS:
            return self.corrections
        tile = math.ceil(rows / TILE_ROWS)
        corrections = {number: correction ** (1 - CORRECTION_DECAY) for number, correction in self.corrections.items()}
        corrections[tile] = _bounded(corrections.get(tile, 1.0) * _bounded(ratio) ** CORRECTION_STEP)
        return corrections

    def margin(self, ms: float) -> float:
        """The share of ``ms``, the time before a deadline, that should be kept free."""
        return self.margins[_duration_class(ms)]

    def _margins_after(self, predicted: float, ms: float) -> tuple[float, ...]:
        # a tick that was planned to end before a deadline, by a margin, also counts for the duration with it
        classes = {_duration_class(predicted), _duration_class(predicted / (1 - MAX_MARGIN))}
        margins = list(self.margins)
        for n in classes:
            share = TICKS_IN_TIME if ms * (1 - margins[n]) > predicted else TICKS_IN_TIME - 1
            margins[n] = min(MAX_MARGIN, max(MIN_MARGIN, margins[n] * (1 + MARGIN_STEP * share)))
        return tuple(margins)

    def max_prefill_tokens(self, ms: float, work: Work) -> float:
        """Prefill tokens with which ``work`` is predicted to take ``ms``; negative if it takes longer with none.

        ``math.inf`` if any number fits.  With curves, tokens that would begin an expensive stair are left out.

        Args:
            ms: milliseconds, or ``math.inf``.
            work: its own prefill tokens are ignored.
        """
        if self.curves is not None:
            return self._up_to_a_stair(ms, work, self.curves)
        # remaining = linear * n + quadratic * n * n
        quadratic = self.coefficients[4] / FEATURE_SCALES[4] / 2
        linear = self.coefficients[1] / FEATURE_SCALES[1] + 2 * quadratic * work.mean_prefill_context
        if ms == math.inf:
            return math.inf
        remaining = ms - self.predict(attrs.evolve(work, prefill_tokens=0))
        discriminant = linear * linear + 4 * quadratic * remaining
        if remaining > 0 and discriminant + linear > 0:
            return 2 * remaining / (linear + math.sqrt(discriminant))
        return remaining / linear if linear > 0 else math.copysign(math.inf, remaining)

    def worthwhile_prefill_tokens(self, work: Work, most: int) -> int:
        """See ``CostModel.worthwhile_prefill_tokens``."""
        if self.curves is not None:
            tokens, _, tick_ms = self._measured_chunks(work, self.curves)
            sizes = [(int(n), t) for n, t in zip(tokens, tick_ms, strict=True) if 0 < n < most]
            sizes.append((most, self.predict(attrs.evolve(work, prefill_tokens=most))))
        else:  # the attention inside of a chunk is the same if that is divided
            without = self._linear(self._features(attrs.evolve(work, prefill_tokens=0)))
            token_ms = self.coefficients[1] / FEATURE_SCALES[1]
            token_ms += self.coefficients[4] / FEATURE_SCALES[4] * work.mean_prefill_context
            sizes = [(n, without + n * token_ms) for n in [max(1, int(share * most)) for share in CHUNK_SHARES]]
        speeds = [n / max(t, 1e-9) for n, t in sizes]
        enough = PREFILL_SPEED * max(speeds)
        return next(n for (n, _), speed in zip(sizes, speeds, strict=True) if speed >= enough)

    def _measured_chunks(self, work: Work, curves: PrefillCurves) -> tuple[list[float], list[float], list[float]]:
        """The chunks with which a tick has a measured number of rows, next to the decode rows of ``work``.

        Returns:
            Three lists, ``[row counts of the curve]``: tokens of the chunk, not positive where the decodes have more rows;
            milliseconds of the tick without corrections; the same with corrections.
        """
        curve, n_other, _ = curves.of(work.decode_rows)
        scale = self.coefficients[1] / CURVE_SCALE
        token_ms = self.coefficients[4] / FEATURE_SCALES[4] * work.mean_prefill_context
        without = self._linear(self._features(attrs.evolve(work, prefill_tokens=0))) - scale * curve.at(n_other)
        tokens: list[float] = [rows - n_other for rows in curve.rows]
        linear_ms = [without + scale * t + token_ms * n for t, n in zip(curve.ms, tokens, strict=True)]
        tick_ms = [t * self._correction(n + work.decode_rows) for t, n in zip(linear_ms, tokens, strict=True)]
        return tokens, linear_ms, tick_ms

    def _up_to_a_stair(self, ms: float, work: Work, curves: PrefillCurves) -> float:
        """See ``max_prefill_tokens``: the longest chunk in time whose speed is near the best one."""
        curve, _, _ = curves.of(work.decode_rows)
        scale = self.coefficients[1] / CURVE_SCALE
        token_ms = self.coefficients[4] / FEATURE_SCALES[4] * work.mean_prefill_context
        tokens, linear_ms, tick_ms = self._measured_chunks(work, curves)
        n = max([n for n, t in enumerate(tick_ms, 1) if t <= ms], default=0)
        if not n:
            return -1.0
        last_ms = scale * curve.slope(n) + token_ms
        if ms == math.inf or not last_ms:
            return math.inf
        measured = [(n, t) for n, t in zip(tokens, tick_ms, strict=True) if t <= max(ms, (1 + STAIR_TOLERANCE) * ms)]
        in_time = [(n, t) for n, t in measured if t <= ms]
        more = (ms / self._correction(tokens[n - 1] + work.decode_rows + 1) - linear_ms[n - 1]) / last_ms
        if more > 0 and not curve.may_hide_a_stair(n):
            in_time.append((tokens[n - 1] + more, ms))
        tokens = [n for n, _ in in_time]
        rates = [n / max(t, 1e-9) for n, t in in_time]
        best = max(rates)
        if best <= 0:
            return tokens[-1]  # as many decodes as that were not measured
        late = [n for n, t in measured if t > ms and n / t > best * t / ms]
        return max(late, default=max([n for n, rate in zip(tokens, rates, strict=True) if rate >= STAIR_RATE * best]))

    def _features(self, work: Work) -> Features:
        attention, context = work.prefill_tokens * work.mean_prefill_context, work.context_tokens
        if self.curves is None:
            calls, rows, decodes = work.n_calls, work.prefill_tokens / FEATURE_SCALES[1], work.decode_rows
            attention += work.prefill_tokens * work.prefill_tokens / 2
        else:  # measured with one call, and at the beginning of a prompt
            curve, n_other, n_measured = self.curves.of(work.decode_rows)
            calls, rows = work.n_calls - 1, curve.at(work.prefill_tokens + n_other) / CURVE_SCALE
            decodes = max(0, work.decode_rows - n_measured)
            if self.curves.mixed is not None:  # one kernel for all rows
                attention, context = attention + context, 0
        return (
            calls,
            rows,
            decodes / FEATURE_SCALES[2],
            context / FEATURE_SCALES[3],
            attention / FEATURE_SCALES[4],
        )


def _bounded(correction: float) -> float:
    return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, correction))


def _duration_class(ms: float) -> int:
    return int(min(max(0.0, ms), 2.0 ** (N_MARGINS - 2))).bit_length()


def _solve(matrix: Sequence[Features], right: Features) -> Features:
    """Solve ``matrix @ x = right``.  The matrix is symmetric and positive definite, so no pivoting is needed."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    size = len(rows)
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for k in range(i + 1, size + 1):
                row[k] -= factor * pivot[k]
    x = [0.0] * size
    for i in reversed(range(size)):
        row = rows[i]
        x[i] = (row[size] - sum([row[k] * x[k] for k in range(i + 1, size)])) / row[i]
    return tuple(x)


def _non_negative(coefficients: Features, information: Sequence[Features]) -> Features:
    """The best fit without negative coefficients.

    A negative coefficient is fixed at 0 and the others are fitted again.  Clipping alone would leave the others too
    high for every tick that was observed.
    """
    free = list(range(len(coefficients)))
    best = coefficients
    while min(best) < 0:
        free = [i for i in free if best[i] > 0]
        if not free:
            break
        right = tuple([sum([k * c for k, c in zip(information[i], coefficients, strict=True)]) for i in free])
        fitted = dict(zip(free, _solve([tuple([information[i][j] for j in free]) for i in free], right), strict=True))
        best = tuple([fitted.get(i, 0.0) for i in range(len(best))])
    return tuple([max(0.0, c) for c in best])


@attrs.frozen
class CostModel:
    """Predicts the time of ticks.  Immutable.  Starts from a rough estimate, which a few ticks correct."""

    decode_only: LinearModel = LinearModel((5.0, 0.0, 5.0, 1.0, 0.0))
    """Ticks without prefill."""
    mixed: LinearModel = LinearModel((10.0, 30.0, 10.0, 1.0, 1.0), margins=(MAX_MARGIN,) * N_MARGINS)
    """Ticks with prefill."""
    call_times: DecodeCallTimes = attrs.field(factory=DecodeCallTimes)
    knows_stairs: bool = False
    """Whether calibration has measured if the time of ticks by their rows is a staircase."""
    recording_ms: float = 0.0
    """How much longer a tick with prefill takes in which the device records the decode call."""

    def predict(self, work: Work) -> float:
        """Predicted milliseconds of a tick."""
        return (self.mixed if work.prefill_tokens else self.decode_only).predict(work) + self._recording_ms(work)

    def _recording_ms(self, work: Work) -> float:
        return self.recording_ms if work.is_recorded else 0.0

    def observed(self, work: Work, ms: float) -> CostModel:
        """The model after a tick: ``work`` took ``ms`` milliseconds.

        From a tick in which the device recorded it learns the time of that alone.
        """
        if work.is_recorded:
            latest_ms = min(MAX_RECORDING_MS, max(0.0, ms - self.mixed.predict(work)))
            step_ms = RECORDING_WEIGHT * (latest_ms - self.recording_ms)
            return attrs.evolve(self, recording_ms=self.recording_ms + step_ms)
        if work.prefill_tokens:
            return attrs.evolve(self, mixed=self.mixed.observed(work, ms))
        call_times = self.call_times.observed(work.decode_rows, work.n_calls, ms)
        return attrs.evolve(self, decode_only=self.decode_only.observed(work, ms), call_times=call_times)

    def with_curves(self, curves: PrefillCurves) -> CostModel:
        """The model with the measured time of ticks with prefill.  Of such ticks it keeps the margins only.

        Curves without stairs are ignored: a learned line is as good.
        """
        if not curves.has_stairs:
            return attrs.evolve(self, knows_stairs=True)
        call_ms, _, row_ms, *others = self.decode_only.coefficients
        coefficients = (call_ms, CURVE_SCALE, 0.0 if curves.mixed is not None else row_ms, *others)
        mixed = LinearModel(coefficients, margins=self.mixed.margins, curves=curves)
        return attrs.evolve(self, mixed=mixed, knows_stairs=True)

    def max_prefill_tokens(self, ms: float, work: Work) -> float:
        """Prefill tokens that fit into a tick of ``ms`` milliseconds together with the decode rows of ``work``.

        Negative if the decodes alone take longer, and ``math.inf`` if any number fits.
        """
        return self.mixed.max_prefill_tokens(ms - self._recording_ms(work), work)

    def worthwhile_prefill_tokens(self, work: Work, most: int) -> int:
        """The fewest prefill tokens with which prompts advance nearly as fast as possible, next to the decodes of ``work``.

        "Nearly" is ``PREFILL_SPEED`` of the speed of the fastest chunk of up to ``most`` tokens.  More tokens would make
        all streams wait longer, and gain little.  The fuller the KV cache, the more of a tick is attention, which takes
        about as long for each token of a short chunk as of a long one.  So shorter chunks are enough there.
        """
        return self.mixed.worthwhile_prefill_tokens(work, most)

    @property
    def prefill_token_ms(self) -> float:
        """Predicted milliseconds of a prompt token in a long chunk."""
        return self.mixed.predict(Work(LONG_CHUNK, 0, 0)) / LONG_CHUNK

    def decode_call_ms(self, rows: int, context_tokens: int) -> float:
        """Predicted milliseconds of one call of decodes, from the measured time of its rows where there is one.

        Compare only results of this method: it and ``predict`` rest on different measurements.
        """
        if rows > self.call_times.max_rows:
            return self.decode_only.predict(Work(0, rows, context_tokens))
        return self.call_times.ms[rows] + self.decode_only.coefficients[3] * context_tokens / FEATURE_SCALES[3]

    def call_price(self, max_rows: int) -> Callable[[int, int], float]:
        """Return a function that predicts the milliseconds of a decode call, from its rows and its context.

        It uses the measured times if all row counts up to ``max_rows`` were measured, and otherwise the regression
        alone.  The regression learns from whole ticks, so the two cannot be compared.
        """
        if max_rows <= self.call_times.max_rows:
            return self.decode_call_ms
        return lambda rows, context_tokens: self.decode_only.predict(Work(0, rows, context_tokens))

    def split(self, rows: int, contexts: Sequence[int] = ()) -> tuple[int, ...]:
        """Split ``rows`` of decodes into the fastest sequence of calls.

        If the number of rows alone is a reason to split them, the contexts are ignored.

        Args:
            contexts: context length of each row if attention is padded to the longest context of a call; otherwise
                empty.

        Returns:
            Rows of each call.  The calls take the rows in their order.
        """
        by_rows = self.call_times.split(rows)
        if not contexts or len(by_rows) > 1 or rows < 2:
            return by_rows
        token_ms = self.decode_only.coefficients[3] / FEATURE_SCALES[3]
        padded = rows * _aligned(max(contexts))
        if (padded - sum(contexts)) * token_ms < (1 - SPLIT_THRESHOLD) * self.decode_call_ms(rows, padded):
            return by_rows  # even without any padding the call would not be faster by enough
        groups = _groups_of_equal_length(contexts)
        return self._split_by_context(groups, token_ms) if len(groups) <= MAX_CONTEXT_GROUPS else by_rows

    def _split_by_context(self, groups: Sequence[tuple[int, int]], token_ms: float) -> tuple[int, ...]:
        """Split between ``groups`` where that is fastest; a single call if splitting saves too little."""
        call_ms = self.decode_only.coefficients[0]
        row_ms = self.decode_only.coefficients[2] / FEATURE_SCALES[2]
        measured, max_rows = self.call_times.ms, self.call_times.max_rows
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # by number of groups: time and calls
        whole_ms = 0.0
        for n in range(len(groups)):
            width = longest = 0
            fastest: tuple[float, tuple[int, ...]] = (math.inf, ())
            for m in range(n, -1, -1):  # the last call begins with group m
                count, length = groups[m]
                width, longest = width + count, max(longest, length)
                rows_ms = measured[width] if width <= max_rows else call_ms + row_ms * width
                last_call_ms = rows_ms + token_ms * longest * width
                if best[m][0] + last_call_ms < fastest[0]:
                    fastest = (best[m][0] + last_call_ms, (*best[m][1], width))
            best.append(fastest)
            whole_ms = last_call_ms  # one call with all groups so far
        split_ms, widths = best[-1]
        return widths if split_ms < SPLIT_THRESHOLD * whole_ms else (sum(widths),)


def _aligned(context: int) -> int:
    return -(-context // CONTEXT_ALIGNMENT) * CONTEXT_ALIGNMENT


def _groups_of_equal_length(contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighbours with the same aligned context length: (rows, aligned length) of each group."""
    groups: list[tuple[int, int]] = []
    count = last = 0
    for context in contexts:
        length = _aligned(context)
        if length != last and count:
            groups.append((count, last))
            count = 0
        count, last = count + 1, length
    return [*groups, (count, last)]


@attrs.frozen
class DraftCost:
    """Milliseconds of a draft model.  Immutable."""

    call_ms: float = 0.0
    """One call, with one token or a few."""
    token_ms: float = 0.0
    """Each token that the draft model has not computed before it begins to propose some."""

    def ms(self, calls: float, n_tokens: float) -> float:
        """Predicted milliseconds of ``calls`` calls, with ``n_tokens`` tokens in addition to one for each call."""
        return self.call_ms * calls + self.token_ms * n_tokens

    def observed(self, calls: int, n_tokens: int, ms: float) -> DraftCost:
        """Learn from a step: ``calls`` calls with ``n_tokens`` tokens of the inputs took ``ms`` milliseconds."""
        ms = min(ms, MAX_DRAFT_FACTOR * self.ms(calls, n_tokens) + 1.0)
        if n_tokens <= FEW_DRAFT_TOKENS * calls:
            return attrs.evolve(self, call_ms=self.call_ms + DRAFT_WEIGHT * (ms / calls - self.call_ms))
        token_ms = max(0.0, ms - self.call_ms * calls) / n_tokens
        return attrs.evolve(self, token_ms=self.token_ms + DRAFT_WEIGHT * (token_ms - self.token_ms))
