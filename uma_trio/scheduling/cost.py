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
    """What the attention of these rows reads: the tokens before each, all together; where a call takes each row as long
    as its longest, so many for each."""
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


def _blocks(contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours whose contexts are of one length: (how many, their context rounded up)."""
    found: list[tuple[int, int]] = []
    count = last = 0
    for context in contexts:
        length = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        if length != last and count:
            found.append((count, last))
            count = 0
        count, last = count + 1, length
    return [*found, (count, last)]


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

        Where their number alone is a reason to cut them, that decides.

        Args:
            contexts: tokens before each of the rows, where each takes as long as the longest of its call; else empty.
        """
        plain = self.widths.cut(rows)
        if not contexts or len(plain) > 1 or rows < 2:
            return plain
        a_token, read = self.alone.coefficients[3] / SCALES[3], rows * max(contexts)
        if (read - sum(contexts)) * a_token < (1 - WORTH_CUTTING) * self.of_rows(rows, read):
            return plain  # were it all saved, it would be too little
        blocks = _blocks(contexts)
        return self._cut_by_length(blocks, a_token) if len(blocks) <= MOST_BLOCKS else plain

    def _cut_by_length(self, blocks: Sequence[tuple[int, int]], a_token: float) -> tuple[int, ...]:
        """Rows cut between ``blocks`` where that takes least; whole if that saves too little."""
        base, a_row = self.alone.coefficients[0], self.alone.coefficients[2] / SCALES[2]
        measured, most = self.widths.ms, self.widths.most
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        """By number of blocks: what the best calls of these take, and their widths."""
        whole = 0.0
        for n in range(len(blocks)):
            width = longest = 0
            least: tuple[float, tuple[int, ...]] = (math.inf, ())
            for m in range(n, -1, -1):  # the last call begins with block m
                count, length = blocks[m]
                width, longest = width + count, max(longest, length)
                call = (measured[width] if width <= most else base + a_row * width) + a_token * longest * width
                if best[m][0] + call < least[0]:
                    least = (best[m][0] + call, (*best[m][1], width))
            best.append(least)
            whole = call  # of all blocks so far
        ms, widths = best[-1]
        return widths if ms < WORTH_CUTTING * whole else (sum(widths),)

    def observed(self, work: Work, ms: float) -> CostModel:
        """The model after a tick of ``work`` that took ``ms``."""
        if work.prompt_tokens:
            return CostModel(self.alone, self.mixed.observed(work, ms), self.widths)
        return CostModel(self.alone.observed(work, ms), self.mixed, self.widths)

    def largest_prompt(self, ms: float, work: Work) -> float:
        """Prompt tokens that fit beside ``work``'s decodes into a tick of ``ms``."""
        return self.mixed.largest_prompt(ms, work)
