"""How a request wants its tokens to be chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

MAX_SEED = 2**64 - 1


def _within(low: float, high: float, *, above: bool = False) -> Callable[[object, attrs.Attribute[Any], float], None]:
    """A finite number of at least ``low`` (or ``above`` it) and at most ``high``; NaN is neither."""

    def check(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
        if not (math.isfinite(value) and low <= value <= high) or (above and value == low):
            least = f"above {low:g}" if above else f"at least {low:g}"
            raise ValueError(f"{attribute.name} must be {least} and at most {high:g}, not {value}")

    return check


@attrs.frozen
class SamplingParams:
    """What is done to the logits of one request, and what is drawn from.

    Raises:
        ValueError: a value out of its bounds.  The protocol tells clients before it gets here.
    """

    temperature: float = attrs.field(default=0.0, validator=_within(0, math.inf))
    """Logits are divided by it; 0 takes the most likely token, and the filters have nothing to do."""

    top_k: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Only the so many most likely tokens can be drawn; 0 is off.  May exceed the vocabulary."""

    top_p: float = attrs.field(default=1.0, validator=_within(0, 1, above=True))
    """Only the fewest most likely tokens that together reach this probability; 1 is off."""

    seed: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.le(MAX_SEED)])
    """Of 64 bits.  It and the number of the draw alone decide the random numbers."""

    min_p: float = attrs.field(default=0.0, validator=_within(0, 1))
    """Only tokens at least so many times as likely as the likeliest; 0 is off."""

    repetition_penalty: float = attrs.field(default=1.0, validator=_within(0.1, 10))
    """Logits of tokens that stand in the window are divided by it if positive, else multiplied; 1 is off."""

    repeat_last_n: int = attrs.field(default=64, validator=[attrs.validators.ge(0), attrs.validators.le(4096)])
    """The window: the last so many tokens of prompt and answer together."""

    frequency_penalty: float = attrs.field(default=0.0, validator=_within(-2, 2))
    """Taken off a token's logit for each time that the answer has it; 0 is off."""

    presence_penalty: float = attrs.field(default=0.0, validator=_within(-2, 2))
    """Taken off a token's logit once if the answer has it; 0 is off."""

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw: the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def window(self) -> int:
        """Tokens before a draw that the repetition penalty looks at; 0 where it is off."""
        return self.repeat_last_n if self.repetition_penalty != 1 else 0

    @property
    def counts(self) -> bool:
        """Whether it matters how often the answer has which token."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0
