"""The tokens of a request that its penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uma_trio.engine_link.sampling import Past, SamplingParams
from uma_trio.engine_link.tokens import TokenIds


class TokenHistory:
    """The growing tokens of one request, for its penalties.

    A ``Past`` is a view of this buffer.  Tokens that are final never change.  A view may end with tokens that are not
    final: draft tokens, or the token that a step in flight is about to sample.  They must be written before the view is
    read, and may be overwritten once it is no longer used.

    Args:
        prompt: (n,) tokens of the prompt.
        params: decides how much of the prompt is kept.
        max_tokens: how many tokens can follow the prompt.
    """

    def __init__(self, prompt: TokenIds, params: SamplingParams, max_tokens: int) -> None:
        self._n_prompt = min(len(prompt), max(params.repetition_window, params.dry_window))
        self._tokens = np.zeros(self._n_prompt + max_tokens, np.int32)
        self._tokens[: self._n_prompt] = prompt[len(prompt) - self._n_prompt :]

    def write(self, position: int, tokens: Sequence[int]) -> None:
        """Write ``tokens``, final or draft, at ``position`` of the answer, counted from 0."""
        position += self._n_prompt
        self._tokens[position : position + len(tokens)] = tokens

    def copy(self) -> TokenHistory:
        """Return a copy that grows by itself."""
        other = TokenHistory.__new__(TokenHistory)
        other._n_prompt, other._tokens = self._n_prompt, self._tokens.copy()
        return other

    def past(self, n: int) -> Past:
        """Return a view of what precedes token ``n`` of the answer, counted from 0."""
        return Past(self._tokens[: self._n_prompt + n], self._n_prompt)
