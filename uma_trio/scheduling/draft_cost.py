"""What a draft model takes, learned online."""

from __future__ import annotations

from typing import Final

import attrs

WEIGHT: Final = 0.05
"""Weight of the latest step in the averages."""

FEW_TOKENS: Final = 4
"""With more tokens than this for each call, a step tells how long tokens take and not how long calls take."""

MAX_FACTOR: Final = 3.0
"""A step counts as this many times the prediction at most, so that a hiccup does not stop speculation for long."""


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
        ms = min(ms, MAX_FACTOR * self.ms(calls, n_tokens) + 1.0)
        if n_tokens <= FEW_TOKENS * calls:
            return attrs.evolve(self, call_ms=self.call_ms + WEIGHT * (ms / calls - self.call_ms))
        token_ms = max(0.0, ms - self.call_ms * calls) / n_tokens
        return attrs.evolve(self, token_ms=self.token_ms + WEIGHT * (token_ms - self.token_ms))
