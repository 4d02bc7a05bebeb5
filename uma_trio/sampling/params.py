"""Sampling parameters of one request."""

from __future__ import annotations

import attrs


@attrs.frozen
class SamplingParams:
    """How the next token is chosen from the logits.

    The values are within the bounds that ``protocol.messages.Generate`` declares; nothing is checked here.
    """

    temperature: float = 0.0
    """Divides the logits.  0 takes the most likely token; the filters then have no effect."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off.  May exceed the vocabulary."""

    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens that together reach this probability; 1 is off."""

    seed: int = 0
    """Unsigned 64 bits.  The random numbers depend on the seed and the index of the draw alone."""

    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0 is off."""

    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the window; 1 is off."""

    repeat_last_n: int = 64
    """Length of the window: the last tokens of prompt and answer together."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer contains it; 0 is off."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the answer contains; 0 is off."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def window(self) -> int:
        """Number of tokens that the repetition penalty looks at; 0 if it is off."""
        return self.repeat_last_n if self.repetition_penalty != 1 else 0

    @property
    def counts(self) -> bool:
        """Whether the penalties need to know how often the answer contains each token."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0
