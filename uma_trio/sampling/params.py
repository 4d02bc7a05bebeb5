"""How a request wants its tokens to be chosen."""

from __future__ import annotations

import math

import attrs

MAX_SEED = 2**64 - 1


def _temperature(_: object, __: object, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"temperature must be a finite number of at least 0, not {value}")


def _top_p(_: object, __: object, value: float) -> None:
    if not 0 < value <= 1:  # also refuses NaN
        raise ValueError(f"top_p must be above 0 and at most 1, not {value}")


@attrs.frozen
class SamplingParams:
    """The filters of one request, in the order in which they are applied.

    Raises:
        ValueError: a value out of its bounds.  The protocol tells clients before it gets here.
    """

    temperature: float = attrs.field(default=0.0, validator=_temperature)
    """Logits are divided by it; 0 takes the most likely token and ignores what follows."""

    top_k: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Only the so many most likely tokens can be drawn; 0 is off.  May exceed the vocabulary."""

    top_p: float = attrs.field(default=1.0, validator=_top_p)
    """Only the fewest most likely tokens that together reach this probability; 1 is off."""

    seed: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.le(MAX_SEED)])
    """Of 64 bits.  It and the number of the draw alone decide the random numbers."""

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw: the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1
