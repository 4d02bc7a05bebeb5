"""The filters of llama.cpp's chain, in its order: each says which tokens of one row it keeps, however many these are.

Only the tokens near a limit are sorted: a flat distribution keeps most of the vocabulary.  A row whose filters all have
``by_sums`` is mostly filtered without these functions, by the running sums of sorted candidates (``sampler.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling.candidates import Floats, Ints
from uma_trio.engine_link.sampling import SamplingParams

Bools: TypeAlias = npt.NDArray[np.bool_]


def kept_tokens(logits: Floats, max_logit: float, params: SamplingParams) -> Ints:
    """Apply the filters to one row, ``logits`` (n,).

    Returns:
        Indices of the tokens that are left, in ascending order.
    """
    distances, kept = np.float32(max_logit) - logits, np.ones(len(logits), bool)
    for filter_ in FILTERS:
        if filter_.is_on(params, len(logits)):
            kept &= filter_.keep(logits, distances, kept, params)
    return np.flatnonzero(kept)


def _top_k(logits: Floats, distances: Floats, kept: Bools, params: SamplingParams) -> Bools:
    k = params.top_k
    limit = np.partition(logits, -k)[-k]
    best: Bools = logits > limit
    at_limit = np.flatnonzero(logits == limit)
    best[at_limit[: k - np.count_nonzero(best)]] = True
    return best


def _typical_p(logits: Floats, distances: Floats, kept: Bools, params: SamplingParams) -> Bools:
    weights = np.exp(-distances) * kept
    likely = weights > 0
    expected = np.average(distances[likely], weights=weights[likely])
    return _nearest(np.abs(distances - np.float32(expected)), weights, params.typical_p)


def _top_p(logits: Floats, distances: Floats, kept: Bools, params: SamplingParams) -> Bools:
    return _nearest(distances, np.exp(-distances) * kept, params.top_p)


def _min_p(logits: Floats, distances: Floats, kept: Bools, params: SamplingParams) -> Bools:
    likely: Bools = -distances >= math.log(params.min_p)
    return likely


def _nearest(distances: Floats, weights: Floats, share: float) -> Bools:
    """Mark the smallest set of tokens with this share of all weight, those with the smallest distance first."""
    # The bits of non-negative floats sort like their values.  The upper half of the bits makes a
    # logarithmic histogram, fine enough that few tokens share a bin.
    bins = (distances.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    sums = np.bincount(bins, weights).cumsum()
    goal = share * sums[-1]
    limit = int(sums.searchsorted(goal))
    kept: Bools = bins < limit
    at_limit = np.flatnonzero(bins == limit)
    at_limit = at_limit[np.argsort(distances[at_limit], kind="stable")]
    missing = goal - (sums[limit - 1] if limit else 0.0)
    kept[at_limit[: int(weights[at_limit].cumsum(dtype=np.float64).searchsorted(missing)) + 1]] = True
    return kept


class Filter(NamedTuple):
    """One sampler of the chain that excludes tokens."""

    is_on: Callable[[SamplingParams, int], bool]
    """Whether it is on for a row of so many tokens."""
    keep: Callable[[Floats, Floats, Bools, SamplingParams], Bools]
    """Marks the tokens that it keeps.  Gets the logits, how far each is below the largest one, and what the filters before it
    have kept."""
    by_sums: bool = False
    """``sampler.py`` finds what it keeps in sorted candidates: it keeps the most likely tokens, and no others."""


FILTERS: Final = (
    Filter(lambda p, n: 0 < p.top_k < n, _top_k, by_sums=True),
    Filter(lambda p, n: p.typical_p < 1, _typical_p),
    Filter(lambda p, n: p.top_p < 1, _top_p, by_sums=True),
    Filter(lambda p, n: p.min_p > 0, _min_p, by_sums=True),
)
"""In the order of the chain.  Top-n-sigma comes before them, XTC after them: see ``sampler.py``."""
