"""Sampling parameters of a request."""

from __future__ import annotations

import msgspec

MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to choose the tokens of one request.

    The bounds stand in the protocol, which checks every request.  Nothing is checked again here.
    """

    temperature: float = 0.0
    """Divides the logits.  0 is greedy: the most likely token is taken, and the filters have no effect."""

    top_k: int = 0
    """Keeps the `top_k` most likely tokens.  0 is off.  May exceed the size of the vocabulary."""

    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probabilities sum up to `top_p`.  1 is off."""

    seed: int = 0
    """Seed of the random numbers, 64 bits.  A random number depends only on the seed and on the number of the draw."""

    min_p: float = 0.0
    """Keeps tokens that are at least `min_p` times as likely as the most likely one.  0 is off."""

    repetition_penalty: float = 1.0
    """Divides the positive logits of recent tokens and multiplies the negative ones.  1 is off."""

    repeat_last_n: int = 64
    """How many tokens the repetition penalty looks back, over prompt and answer together."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it occurs in the answer.  0 is off."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of a token if it occurs in the answer.  0 is off."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def repetition_window(self) -> int:
        """How many tokens before a draw the repetition penalty needs; 0 if it is off."""
        return self.repeat_last_n if self.repetition_penalty != 1 else 0

    @property
    def counts_answer(self) -> bool:
        """Whether the frequency or the presence penalty is on, which count the tokens of the answer."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is on, so that a draw depends on the tokens before it."""
        return self.repetition_window > 0 or self.counts_answer
