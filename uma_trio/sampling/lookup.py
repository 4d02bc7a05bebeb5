"""Guesses at what comes next: what came the last time that the same tokens stood here.

Answers repeat their questions: code that is edited, text that is summarised, JSON with one field changed.  A
guess costs nothing but its row in the next batch, where it is checked, and it needs no second model.

Source: Saxena, Prompt Lookup Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

N_GRAM: Final = 3
"""Tokens that must be the same for a guess."""

WEIGHT: Final = 0.15
"""Of the latest guess in the share of those that came true."""


class Lookup:
    """One sequence's tokens, and where each three of them stood last.

    Args:
        tokens: the prompt.
        hits: how far the first guesses are trusted, until it is known how many come true.
    """

    def __init__(self, tokens: Iterable[int], *, hits: float = 0.5) -> None:
        self.hits = hits
        """The share of guesses that came true lately: also of those that nobody wanted to hear."""
        self._tokens = list(tokens)
        t = self._tokens
        self._seen = dict(zip(zip(t, t[1:], t[2:], strict=False), range(N_GRAM, len(t)), strict=False))
        """Three tokens -> the place after them; those at the very end are missing."""
        self._next = self._find()

    def guesses(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens that may follow; what reaches the present goes round again."""
        if self._next is None:
            return ()
        found = self._tokens[self._next : self._next + most]
        return found if len(found) == most else (found * (most // len(found) + 1))[:most]

    def follow(self, token: int) -> None:
        """``token`` is what really came next."""
        if self._next is not None:
            true = self._tokens[self._next] == token
            self.hits += WEIGHT * (true - self.hits)
            self._next = self._next + 1 if true else None
        t = self._tokens
        if len(t) >= N_GRAM:
            self._seen[t[-3], t[-2], t[-1]] = len(t)
        t.append(token)
        if self._next is None:
            self._next = self._find()

    def _find(self) -> int | None:
        t = self._tokens
        return self._seen.get((t[-3], t[-2], t[-1])) if len(t) >= N_GRAM else None
