"""What a tick will take, learned from the ticks that were.

A tick's time is close to linear in what it holds::

    t = a + b * prompt_tokens + c * decodes + d * context_tokens_read

with other coefficients for ticks of decodes alone than for those with prompt tokens, since they run
other kernels.  Each of the two is a recursive least squares over the recent ticks: old ones fade, so the
model follows a machine that gets warm or busy.

Source: docs/ARCHITECTURE.md, "The scheduler"; the recursion is the standard one with a forgetting factor
(Haykin, Adaptive Filter Theory, chapter on RLS).
"""

from __future__ import annotations

import math
from typing import Final

import attrs

FORGETTING: Final = 0.98
"""A tick's weight after one more tick: fifty ticks ago counts for a third."""

MOST_UNCERTAIN: Final = 1e4
"""Bound of a coefficient's variance: without news of it, forgetting alone would let it grow for ever."""

SCALES: Final = (1.0, 100.0, 10.0, 10_000.0)
"""Of the four terms, so that all coefficients are of like size: milliseconds a tick, a hundred prompt
tokens, ten decodes, ten thousand tokens of context."""


@attrs.frozen
class Work:
    """What one tick holds."""

    prompt_tokens: int
    decodes: int
    context_tokens: int
    """KV cells that the tick's sequences hold together: what attention reads."""


@attrs.frozen
class Line:
    """One linear model and how sure it is of each coefficient.

    ``coefficients`` are in ms for the scaled terms; ``spread`` is the matrix P of the recursion, row by row.
    """

    coefficients: tuple[float, float, float, float]
    spread: tuple[tuple[float, float, float, float], ...] = tuple(
        tuple(100.0 if row == column else 0.0 for column in range(4)) for row in range(4)  # type: ignore[misc]
    )
    seen: int = 0
    """Ticks it has learned from."""
    error: float = 0.0
    """Average of |predicted - measured| / measured, the recent ones counting most."""

    def predict(self, work: Work) -> float:
        """Milliseconds; never less than 0.  Coefficients that came out negative count as 0."""
        return sum(max(0.0, c) * x for c, x in zip(self.coefficients, _terms(work), strict=True))

    def observed(self, work: Work, ms: float) -> Line:
        """The model after a tick of ``work`` that took ``ms``."""
        x = _terms(work)
        size = range(4)
        gain = [sum(row[j] * x[j] for j in size) for row in self.spread]  # P x
        scale = FORGETTING + sum(x[i] * gain[i] for i in size)
        miss = ms - sum(c * term for c, term in zip(self.coefficients, x, strict=True))
        coefficients = [c + g / scale * miss for c, g in zip(self.coefficients, gain, strict=True)]
        spread = [
            tuple((self.spread[i][j] - gain[i] * gain[j] / scale) / FORGETTING for j in size) for i in size
        ]
        if max(spread[i][i] for i in size) > MOST_UNCERTAIN:
            spread = [tuple(FORGETTING * entry for entry in row) for row in spread]
        off = abs(self.predict(work) - ms) / max(ms, 0.01)
        error = off if self.seen == 0 else self.error + 0.05 * (min(off, 4.0) - self.error)
        return Line(tuple(coefficients), tuple(spread), self.seen + 1, error)  # type: ignore[arg-type]

    def largest_prompt(self, ms: float, work: Work) -> float:
        """Prompt tokens with which ``work``, its own left out, is predicted to take ``ms``; may be below 0."""
        price = max(0.0, self.coefficients[1]) / SCALES[1]
        left = ms - self.predict(attrs.evolve(work, prompt_tokens=0))
        return left / price if price > 0 else math.copysign(math.inf, left)


def _terms(work: Work) -> tuple[float, float, float, float]:
    return (
        1.0,
        work.prompt_tokens / SCALES[1],
        work.decodes / SCALES[2],
        work.context_tokens / SCALES[3],
    )


@attrs.frozen
class CostModel:
    """Both lines.  Starts from a guess that a few ticks correct."""

    alone: Line = Line((5.0, 0.0, 5.0, 1.0))
    """Ticks of decodes alone."""
    mixed: Line = Line((10.0, 30.0, 10.0, 1.0))
    """Ticks with prompt tokens."""

    def predict(self, work: Work) -> float:
        """Milliseconds that a tick of ``work`` will take."""
        return (self.mixed if work.prompt_tokens else self.alone).predict(work)

    def observed(self, work: Work, ms: float) -> CostModel:
        """The model after a tick of ``work`` that took ``ms``."""
        if work.prompt_tokens:
            return attrs.evolve(self, mixed=self.mixed.observed(work, ms))
        return attrs.evolve(self, alone=self.alone.observed(work, ms))

    def largest_prompt(self, ms: float, work: Work) -> float:
        """Prompt tokens that fit beside ``work``'s decodes into a tick of ``ms``."""
        return self.mixed.largest_prompt(ms, work)
