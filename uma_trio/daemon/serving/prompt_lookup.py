"""Prompt lookup: draft tokens for speculative decoding, without a draft model.

Answers repeat their prompts: edited code, summaries, JSON with one changed field.  The draft is whatever followed the
previous occurrence of the last three tokens.  A draft token costs one more row in the next batch, which verifies it.

Source: Saxena, Prompt Lookup Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

NGRAM_SIZE: Final = 3
"""How many tokens must match."""

ACCEPTANCE_WEIGHT: Final = 0.15
"""Weight of the latest draft token in the moving average ``acceptance_rate``."""


class PromptLookup:
    """The tokens of one answer, with an index of the last occurrence of each n-gram.

    Args:
        tokens: the prompt.
        acceptance_rate: the initial estimate, before any draft token was verified.
    """

    def __init__(self, tokens: Iterable[int], *, acceptance_rate: float = 0.5) -> None:
        self.acceptance_rate = acceptance_rate
        """Moving average of the share of draft tokens that were right, including those that nobody asked for."""
        self._tokens = list(tokens)
        t = self._tokens
        self._index = dict(zip(zip(t, t[1:], t[2:], strict=False), range(NGRAM_SIZE, len(t)), strict=False))
        """N-gram -> the position after its last occurrence.  The n-gram at the very end has none yet."""
        self._position = self._find()
        """Where the draft begins; ``None`` without a match."""
        self._matched_at = 0
        """Number of tokens when there was a match last; at first 0."""

    def draft(self, n: int) -> Sequence[int]:
        """Return at most ``n`` draft tokens.  A draft that reaches the end of the answer starts over."""
        if self._position is None:
            return ()
        draft_tokens = self._tokens[self._position : self._position + n]
        return draft_tokens if len(draft_tokens) == n else (draft_tokens * (n // len(draft_tokens) + 1))[:n]

    @property
    def n_unmatched(self) -> int:
        """Tokens since there was a draft."""
        return 0 if self._position is not None else len(self._tokens) - self._matched_at

    def append(self, token: int) -> None:
        """Append the token that was really sampled, and update ``acceptance_rate``."""
        if self._position is not None:
            accepted = self._tokens[self._position] == token
            self.acceptance_rate += ACCEPTANCE_WEIGHT * (accepted - self.acceptance_rate)
            self._position = self._position + 1 if accepted else None
            self._matched_at = len(self._tokens) + 1
        t = self._tokens
        if len(t) >= NGRAM_SIZE:
            self._index[t[-3], t[-2], t[-1]] = len(t)
        t.append(token)
        if self._position is None:
            self._position = self._find()

    def _find(self) -> int | None:
        t = self._tokens
        return self._index.get((t[-3], t[-2], t[-1])) if len(t) >= NGRAM_SIZE else None
