"""What a tick will take, learned from the ticks that were.

A tick's time is close to linear in what it holds::

    t = a * calls + b * prompt_tokens + c * decodes + d * context_read_by_decodes + e * context_read_by_prompts

where each token of a chunk reads all that stands before it: a chunk of n behind m tokens reads n * m + n * n / 2.
A long prompt's last chunks take several times what its first ones took, and a model without that term is late
in noticing.  The coefficients are others for ticks of decodes alone than for those with prompt tokens, since
they run other kernels.  Each of the two is a recursive least squares over the recent ticks: old ones fade, so the
model follows a machine that gets warm or busy.  Of a kind of tick that does not occur nothing fades.

Over the first few rows of a decode a line is a poor fit on a CPU, whose kernels take some numbers of rows much better
than others: two streams of a Q4_0 model took 8.6 ms together and 3.3 ms each alone, six 18.8 ms and five 12.7 ms.
``Widths`` keeps what each took, and says how to cut a tick's rows into calls.

Source: docs/ARCHITECTURE.md, "The scheduler"; the recursion is the standard one with a forgetting factor
(Haykin, Adaptive Filter Theory, chapter on RLS), in its information form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs

FORGETTING: Final = 0.98
"""A tick's weight after one more tick: fifty ticks ago counts for a third."""

LEAST_SURE: Final = 0.01
"""What is known of each coefficient at least, in the unit of ``Line.known``.  Of what does not occur (streams
without prompts, always the same four of them) forgetting would leave nothing, and noise would be taken for news."""

TRUSTED: Final = 8
"""Ticks after which a line may doubt a measurement."""

SURPRISE: Final = 0.5
"""What a tick took beyond this share more than was predicted is not believed at once.  One that took
seconds, since the machine was busy, would make prompts wait long after; a device that has become slower
raises the error, and with it what is believed, within a few ticks."""

WORTH_CUTTING: Final = 0.94
"""Several calls must take less than this share of one: each has its overhead, and measurements have noise."""

MOST_OFF: Final = 4.0
"""Bound of one tick's share in the error."""

Terms: TypeAlias = tuple[float, ...]
"""Five numbers: of a call, its prompt tokens, its decodes, what its decodes read, what its prompts read."""

SCALES: Final = (1.0, 100.0, 10.0, 10_000.0, 100_000.0)
"""Of the five terms, so that all coefficients are of like size: milliseconds a call, a hundred prompt tokens,
ten decodes, ten thousand tokens of context read by decodes, a hundred thousand read by prompts."""

TERMS: Final = len(SCALES)


@attrs.frozen
class Work:
    """What one tick holds."""

    prompt_tokens: int
    decodes: int
    """Rows of decoding sequences: one each, and one more for each guess that is checked."""
    context_tokens: int
    """Tokens that stand before these rows, all together: what their attention reads."""
    prompt_context: float = 0.0
    """Tokens in front of the chunks of prompts, on average over their tokens."""
    calls: int = 1
    """Of ``llama_decode``, one after another."""


@attrs.frozen
class Line:
    """One linear model and how sure it is of each coefficient."""

    coefficients: Terms
    """In ms for the scaled terms, none below 0."""
    known: tuple[Terms, ...] = tuple(
        tuple(LEAST_SURE if row == column else 0.0 for column in range(TERMS)) for row in range(TERMS)
    )
    """How sure it is: the sum of x times x transposed over the ticks seen, the recent ones counting most."""
    seen: int = 0
    """Ticks it has learned from."""
    error: float = 0.0
    """Average of |predicted - measured| / measured, each at most 4, the recent ones counting most."""
    free: Terms | None = None
    """The coefficients before they were held at 0 or above; the recursion goes on from these."""

    def predict(self, work: Work) -> float:
        """Milliseconds; never less than 0."""
        return sum([c * x for c, x in zip(self.coefficients, _terms(work), strict=True)])

    def observed(self, work: Work, ms: float) -> Line:
        """The model after a tick of ``work`` that took ``ms``."""
        x = _terms(work)
        predicted = self.predict(work)
        off = min(abs(predicted - ms) / max(ms, 0.01), MOST_OFF)
        believed = min(ms, predicted * (1 + max(SURPRISE, 8 * self.error)) + 1) if self.seen >= TRUSTED else ms
        known = tuple([
            tuple([
                FORGETTING * k + x[i] * x[j] + ((1 - FORGETTING) * LEAST_SURE if i == j else 0.0)
                for j, k in enumerate(row)
            ])
            for i, row in enumerate(self.known)
        ])  # fmt: skip
        free = self.free or self.coefficients
        miss = believed - sum([c * t for c, t in zip(free, x, strict=True)])
        free = tuple([c + g * miss for c, g in zip(free, _solved(known, x), strict=True)])
        error = off if self.seen < TRUSTED else self.error + 0.05 * (off - self.error)  # of one that learns: the last
        return Line(_not_negative(free, known), known, self.seen + 1, error, free)

    def largest_prompt(self, ms: float, work: Work) -> float:
        """Prompt tokens with which ``work``, its own left out, is predicted to take ``ms``; may be below 0."""
        # left = linear * n + square * n * n
        square = self.coefficients[4] / SCALES[4] / 2
        linear = self.coefficients[1] / SCALES[1] + 2 * square * work.prompt_context
        left = ms - self.predict(attrs.evolve(work, prompt_tokens=0))
        root = linear * linear + 4 * square * left
        if left > 0 and root + linear > 0:
            return 2 * left / (linear + math.sqrt(root))
        return left / linear if linear > 0 else math.copysign(math.inf, left)


def _solved(matrix: Sequence[Terms], right: Terms) -> Terms:
    """``x`` of ``matrix @ x = right``; ``matrix`` is symmetric and positive definite, so needs no pivots."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    size = len(rows)
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for k in range(i + 1, size + 1):
                row[k] -= factor * pivot[k]
    found = [0.0] * size
    for i in reversed(range(size)):
        row = rows[i]
        found[i] = (row[size] - sum([row[k] * found[k] for k in range(i + 1, size)])) / row[i]
    return tuple(found)


def _not_negative(coefficients: Terms, known: Sequence[Terms]) -> Terms:
    """The likeliest coefficients of which none is below 0.

    One that came out negative is held at 0, and the others move as far as they are tied to it: merely
    cut off it would leave them too high for every tick that was seen.
    """
    free = list(range(len(coefficients)))
    found = coefficients
    while min(found) < 0:
        free = [i for i in free if found[i] > 0]
        if not free:
            break
        right = tuple([sum([k * c for k, c in zip(known[i], coefficients, strict=True)]) for i in free])
        fitted = dict(zip(free, _solved([tuple([known[i][j] for j in free]) for i in free], right), strict=True))
        found = tuple([fitted.get(i, 0.0) for i in range(len(found))])
    return tuple([max(0.0, c) for c in found])


def _terms(work: Work) -> Terms:
    return (
        work.calls,
        work.prompt_tokens / SCALES[1],
        work.decodes / SCALES[2],
        work.context_tokens / SCALES[3],
        work.prompt_tokens * (work.prompt_context + work.prompt_tokens / 2) / SCALES[4],
    )


@attrs.frozen
class Widths:
    """What one call took by its rows of decodes when the model was loaded, behind little context.

    That does not change later: beside many others' context, which takes its own time, it could not be told which is
    which, and calls would be cut that are better whole.
    """

    ms: tuple[float, ...] = (0.0,)
    """By number of rows; the first, of none, is 0.  Without gaps."""

    @property
    def most(self) -> int:
        """The largest number of rows that was measured."""
        return len(self.ms) - 1

    def cut(self, rows: int) -> tuple[int, ...]:
        """``rows`` cut into the calls that take least together, the widest first; whole if that saves too little."""
        if not 1 < rows <= self.most:
            return (rows,)
        return _cut(self.ms[: rows + 1])


def _cut(ms: tuple[float, ...]) -> tuple[int, ...]:
    rows = len(ms) - 1
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for n in range(1, rows + 1):
        best.append(min((best[n - w][0] + ms[w], (*best[n - w][1], w)) for w in range(1, n + 1)))
    least, widths = best[rows]
    return tuple(sorted(widths, reverse=True)) if least < WORTH_CUTTING * ms[rows] else (rows,)


CONTEXT_STEP: Final = 256
"""Tokens by which the context of a call is rounded up, as llama.cpp does (``llama_kv_cache::get_n_kv``)."""

MOST_BLOCKS: Final = 24
"""Neighbours of like length are cut as one; where there are more of these, nothing is cut."""


@functools.lru_cache(maxsize=256)
def _cut_by_length(lengths: tuple[int, ...], calls: tuple[float, ...], a_step: float) -> tuple[int, ...]:
    """Rows cut, in order, where that takes least: each costs as much as the longest of its call.

    Args:
        lengths: of the rows, in steps.
        calls: what a call of so many rows takes, without context.
        a_step: what a row takes for a step.
    """
    ends = [n for n in range(1, len(lengths)) if lengths[n] != lengths[n - 1]] + [len(lengths)]
    if len(ends) > MOST_BLOCKS:
        return (len(lengths),)
    starts = [0, *ends[:-1]]
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for n, end in enumerate(ends):
        longest = 0
        least: tuple[float, tuple[int, ...]] = (math.inf, ())
        for m in reversed(range(n + 1)):  # the last call begins with block m
            longest = max(longest, lengths[starts[m]])
            width = end - starts[m]
            ms = best[m][0] + calls[width] + a_step * longest * width
            if ms < least[0]:
                least = (ms, (*best[m][1], width))
        best.append(least)
    whole = calls[-1] + a_step * max(lengths) * len(lengths)
    return best[-1][1] if best[-1][0] < WORTH_CUTTING * whole else (len(lengths),)


@attrs.frozen
class CostModel:
    """Both lines.  Starts from a guess that a few ticks correct."""

    alone: Line = Line((5.0, 0.0, 5.0, 1.0, 0.0))
    """Ticks of decodes alone."""
    mixed: Line = Line((10.0, 30.0, 10.0, 1.0, 1.0))
    """Ticks with prompt tokens."""
    widths: Widths = Widths()

    def predict(self, work: Work) -> float:
        """Milliseconds that a tick of ``work`` will take."""
        return (self.mixed if work.prompt_tokens else self.alone).predict(work)

    def of_rows(self, rows: int, context_tokens: int) -> float:
        """Milliseconds of a call of decodes, to be compared with that of other numbers of rows."""
        if rows > self.widths.most:
            return self.alone.predict(Work(0, rows, context_tokens))
        return self.widths.ms[rows] + self.alone.coefficients[3] * context_tokens / SCALES[3]

    def cut(self, rows: int, contexts: Sequence[int] = ()) -> tuple[int, ...]:
        """``rows`` of decodes cut into the calls that take least together, in order.

        Args:
            contexts: of the rows, where each takes as long as the longest of its call; else empty.
        """
        plain = self.widths.cut(rows)
        if not contexts or len(plain) > 1 or rows < 2:
            return plain
        most = rows * max(contexts) - sum(contexts)
        a_token = self.alone.coefficients[3] / SCALES[3]
        if most * a_token < (1 - WORTH_CUTTING) * self.of_rows(rows, rows * max(contexts)):
            return plain  # were it all saved, it would be too little
        lengths = tuple([-(-context // CONTEXT_STEP) for context in contexts])
        calls = tuple([round(self.of_rows(width, 0), 1) for width in range(rows + 1)])
        return _cut_by_length(lengths, calls, float(f"{a_token * CONTEXT_STEP:.2g}"))  # rounded, to be the same next time

    def observed(self, work: Work, ms: float) -> CostModel:
        """The model after a tick of ``work`` that took ``ms``."""
        if work.prompt_tokens:
            return CostModel(self.alone, self.mixed.observed(work, ms), self.widths)
        return CostModel(self.alone.observed(work, ms), self.mixed, self.widths)

    def largest_prompt(self, ms: float, work: Work) -> float:
        """Prompt tokens that fit beside ``work``'s decodes into a tick of ``ms``."""
        return self.mixed.largest_prompt(ms, work)
