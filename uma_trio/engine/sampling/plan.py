"""What the parameters of rows say about how they are sampled.  Streams that go on have equal parameters in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling.dry import Breakers
from uma_trio.engine.sampling.filters import FILTERS
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams

BannedIds: TypeAlias = npt.NDArray[np.integer] | None


class RowMask(Protocol):
    """The tokens that may follow, for one row."""

    def apply(self, row: npt.NDArray[np.float32]) -> None:
        """Set the logits of all others to -inf."""


TOP_P_CANDIDATES: Final = 256
"""How many candidates are sorted for top-p without top-k.  Most distributions need far fewer."""

MAX_SORTED_TOP_K: Final = 512
"""A row with a larger top-k is filtered separately, without sorting the tokens that it keeps."""

MAX_XTC_THRESHOLD: Final = 0.5
"""Above it no two tokens have so much, so there is nothing to exclude."""


class Rows(msgspec.Struct, gc=False):
    """What is known of rows that are to be sampled, next to their logits.  Lists have one element a row."""

    params: Sequence[SamplingParams]
    steps: Sequence[int]
    """How many tokens each row's request has drawn before."""
    banned: Sequence[BannedIds] | None = None
    """Ids of forbidden tokens, in [0, n_vocab)."""
    biases: Sequence[Bias | None] | None = None
    """What is added to the logits."""
    pasts: Sequence[Past | None] | None = None
    """The tokens that penalties need; ``None`` for a row without penalties."""
    breakers: Sequence[Breakers | None] | None = None
    """What ends a repetition, for each row with DRY."""
    grammar_masks: Sequence[RowMask | None] | None = None
    """Tokens that grammars allow."""

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows(*[values and values[rows] for values in msgspec.structs.astuple(self)])


class SamplingPlan:
    """Which rows need what.

    Args:
        params: one a row.
    """

    def __init__(self, params: Sequence[SamplingParams], n_vocab: int) -> None:
        self.drawn = [row for row, p in enumerate(params) if not p.greedy]
        """Rows with a random draw.  What follows is about these rows alone, and counts only them."""
        self.cuts = [row for row in self.drawn if params[row].top_n_sigma and not params[row].mirostat]
        """Rows with top-n-sigma, counted among all rows."""
        self.params = [params[row] for row in self.drawn]
        self.seeds = [p.seed for p in self.params]
        self.unfiltered = [row for row, p in enumerate(self.params) if is_unfiltered(p, n_vocab)]
        """Rows that are drawn from the whole vocabulary."""
        self.temperatures = np.array([self.params[row].temperature for row in self.unfiltered])
        """Temperatures of the unfiltered rows."""
        self.filtered = [row for row, p in enumerate(self.params) if not is_unfiltered(p, n_vocab)]
        self.filters = Filters([self.params[row] for row in self.filtered], n_vocab)
        self.with_xtc = [
            row for row, p in enumerate(self.params) if p.xtc_probability and p.xtc_threshold <= MAX_XTC_THRESHOLD
        ]
        gathers = len(self.drawn) < len(params) or (self.unfiltered and self.filtered)
        self.copied_logits_rows = len(self.drawn) if gathers else 0
        """Rows of logits that are copied; the others are read in place."""


class Filters:
    """Filters of rows from which only some tokens can be drawn; lists and arrays have one element a row.

    Args:
        params: one a row.
    """

    def __init__(self, params: Sequence[SamplingParams], n_vocab: int) -> None:
        self.params = params
        self.top_k = [p.top_k if p.top_k < n_vocab else 0 for p in params]
        """0 is off."""
        self.min_log_weights = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
        """Logarithm of the smallest weight that min-p keeps."""
        self.any_order = [any(not f.by_sums and f.is_on(p, n_vocab) for f in FILTERS) for p in params]
        """Whether a filter may exclude the most likely tokens."""
        self.are_large = [
            k > MAX_SORTED_TOP_K or (k == 0 and any_order)
            for k, any_order in zip(self.top_k, self.any_order, strict=True)
        ]
        """Whether so many tokens may be kept that they are not sorted."""
        self.needs_total = [row for row, p in enumerate(params) if self.top_k[row] == 0 and p.top_p < 1]
        """Rows of which the sum of all weights is needed."""
        self.counts = np.array([min(k, MAX_SORTED_TOP_K) or min(TOP_P_CANDIDATES, n_vocab) for k in self.top_k], int)
        """How many candidates are sorted."""
        self.temperatures = np.array([p.temperature for p in params])


def is_unfiltered(params: SamplingParams, n_vocab: int) -> bool:
    """Whether any token can be drawn."""
    if params.xtc_probability or params.dynatemp_range or params.mirostat:
        return False
    return not any(filter_.is_on(params, n_vocab) for filter_ in FILTERS)
