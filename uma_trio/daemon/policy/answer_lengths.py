"""How many more tokens an answer is expected to have, learned from the answers before.

An answer that ended by itself says how long answers are.  One that was cut (by ``max_tokens``, its client or an error)
says that it would have been longer.  So the share of answers that are longer than ``n`` tokens is estimated by the
product-limit formula.

Source: Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations" (1958).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

import attrs

MAX_ANSWERS: Final = 64
"""How many of the last answers count."""

TAIL: Final = 2.0
"""An answer is expected to be at most this many times as long as the longest of them, or as it is already."""


@attrs.define(eq=False)
class AnswerLengths:
    """The lengths of the last answers of one model."""

    _answers: deque[tuple[int, bool]] = attrs.field(factory=lambda: deque(maxlen=MAX_ANSWERS), init=False)
    """Tokens, and whether the answer ended by itself."""
    _curve: tuple[list[int], list[float], list[float]] | None = attrs.field(default=None, init=False)
    """Lengths; the share of answers that are longer than each; the mean of answers that are cut at each."""

    def record(self, n_tokens: int, *, ended_itself: bool) -> None:
        """Learn from an answer that has ended."""
        if n_tokens:
            self._answers.append((n_tokens, ended_itself))
            self._curve = None

    @property
    def is_known(self) -> bool:
        """Whether one of these answers has ended by itself."""
        return any(ended for _, ended in self._answers)

    def expected(self, n_tokens: int, most: int) -> float:
        """Tokens that follow in an answer that has ``n_tokens``, from 1 to ``most``.

        Before an answer has ended by itself this is ``most``.

        Args:
            most: tokens that may follow, at least 1.
        """
        if not self.is_known:
            return most
        lengths, shares, means = self._curve = self._curve or self._new_curve()
        index = bisect_right(lengths, n_tokens) - 1
        share = shares[index]
        if share <= 0:  # longer than all of them
            return max(1.0, min(most, (TAIL - 1) * n_tokens))
        end = min(n_tokens + most, TAIL * max(n_tokens, lengths[-1]))

        def mean(at: float) -> float:
            index = bisect_right(lengths, at) - 1
            return means[index] + shares[index] * (at - lengths[index])

        return max(1.0, min(most, (mean(end) - mean(n_tokens)) / share))

    def _new_curve(self) -> tuple[list[int], list[float], list[float]]:
        lengths, shares, means = [0], [1.0], [0.0]
        answers = sorted(self._answers, key=lambda answer: (answer[0], not answer[1]))
        for index, (n_tokens, ended) in enumerate(answers):
            if ended:
                means.append(means[-1] + shares[-1] * (n_tokens - lengths[-1]))
                lengths.append(n_tokens)
                shares.append(shares[-1] * (1 - 1 / (len(answers) - index)))
        longest = answers[-1][0]
        if longest > lengths[-1]:
            means.append(means[-1] + shares[-1] * (longest - lengths[-1]))
            lengths.append(longest)
            shares.append(shares[-1])
        return lengths, shares, means
