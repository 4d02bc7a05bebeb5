"""How far an answer has come in its grammar: the daemon says it with every step, and the engine's matchers follow it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class GrammarState(msgspec.Struct, array_like=True, gc=False):
    """A grammar, and how far an answer has come in it."""

    key: str
    """The key of a grammar that was defined before."""
    answer: np.ndarray
    """Tokens of the answer, ``[n]`` int32."""

    def after(self, tokens: Sequence[int]) -> GrammarState:
        """The same with more tokens."""
        n = len(self.answer)
        answer = np.empty(n + len(tokens), np.int32)  # quicker than np.append, and the device waits
        answer[:n] = self.answer
        answer[n:] = tokens
        return GrammarState(self.key, answer)
