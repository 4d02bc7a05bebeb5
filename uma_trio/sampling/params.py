"""Sampling parameters of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from uma_trio.protocol.parameters import PARAMETERS, SamplingValues

if TYPE_CHECKING:
    _Values = SamplingValues
else:  # as an array, a step's parameters are a fraction of the size
    _Values = msgspec.defstruct(
        "_Values", [(row.name, row.type, row.default) for row in PARAMETERS], frozen=True, array_like=True
    )


class SamplingParams(_Values):
    """How to choose the tokens of one request: a value for each sampling parameter.

    The bounds stand in the protocol, which checks every request.  Nothing is checked again here.
    """

    seed: int = 0
    """Seed of the random numbers, 64 bits.  A random number depends only on the seed and on the number of the draw."""

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed."""
        return msgspec.structs.replace(self, seed=seed)  # type: ignore[type-var]

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
        return self.repetition_window > 0 or self.counts_answer or self.dry_window > 0

    @property
    def dry_window(self) -> int:
        """How many tokens before a draw DRY needs; 0 if it is off."""
        return self.dry_penalty_last_n if self.dry_multiplier else 0
