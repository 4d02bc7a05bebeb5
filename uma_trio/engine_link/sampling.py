"""What sampling needs to know, and what it says: parameters, biases, the past of a sequence, log probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.parameters import PARAMETERS, SamplingValues

Floats: TypeAlias = npt.NDArray[np.float32]

NO_TOKEN: Final = -1
"""The token id of a row whose logits are no distribution: one is NaN or +inf, or all are -inf."""

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

    mu: float | None = None
    """State of mirostat: the greatest surprise of a token that is drawn next, in bits.  Each draw changes it; see
    ``surprise_limit``."""

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed."""
        return msgspec.structs.replace(self, seed=seed)  # type: ignore[type-var]

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature == 0 or (self.top_k == 1 and not self.mirostat)

    @property
    def is_adaptive(self) -> bool:
        """Whether each draw changes how the next one is made.  So a step can sample one token of such a sequence."""
        return self.mirostat != 0 and not self.greedy

    @property
    def surprise_limit(self) -> float:
        """``mu``; before the first draw, which has no state yet, twice ``mirostat_tau``."""
        return 2 * self.mirostat_tau if self.mu is None else self.mu

    def next_mu(self, probability: float) -> float:
        """The state after the draw of a token that had this share of what was left to draw from."""
        return self.surprise_limit - self.mirostat_eta * (-math.log2(probability) - self.mirostat_tau)

    def with_mu(self, mu: float) -> SamplingParams:
        """A copy with the state after a draw."""
        return msgspec.structs.replace(self, mu=mu)  # type: ignore[type-var]

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


class Bias(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Numbers to add to the logits of some tokens.  The arrays must not be changed."""

    ids: TokenIds
    """(n,) token ids in [0, n_vocab), without duplicates."""
    values: Floats
    """(n,) what to add to the logit of each."""


class Past(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The tokens before a draw, as far as penalties need them."""

    tokens: TokenIds
    """(n,) token ids in [0, n_vocab): the end of the prompt, then the whole answer so far."""
    n_prompt: int
    """How many of them belong to the prompt."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of a sampled token, and the most likely tokens at its position."""

    logprob: float
    """Natural logarithm of the sampled token's probability."""
    top_logprobs: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens: descending, equal ones by ascending id, without probability 0."""
