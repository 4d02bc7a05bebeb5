"""The few tokens of a row that are left to draw from.

Weights are ``exp((logit - best) / temperature)``: probabilities but for their sum.  Candidates come
as ids with the running sums of their weights, so that a draw is one binary search.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_GROUP = 64
"""At most so many logits share the maximum that stands for them while candidates are searched."""

_LOWEST = np.finfo(np.float32).min

_PADDING = np.uint64(0xFF80_0000_0000_0000)
"""The sort key of id 0 with logit -inf: without weight."""


def weights_of(logits: Floats, best: Floats, temperatures: Doubles) -> Floats:
    """Of all logits (rows, n_vocab), each in [0, 1].  ``best`` (rows,) are the rows' largest."""
    weights: Floats = logits - best[:, np.newaxis]
    # Below this any other logit than the best weighs nothing, and 0 / 0 would weigh NaN.
    divisors = np.maximum(temperatures, np.finfo(np.float32).tiny).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        weights /= divisors[:, np.newaxis]
        return np.exp(weights, out=weights)


def most_likely(logits: Floats, best: Floats, temperatures: Doubles, wanted: Ints) -> tuple[Ints, Doubles, Doubles]:
    """The ``wanted`` (rows,) tokens with the largest logits of each row, and often some more.

    Returns:
        ids, logarithms of their weights, and running sums of these weights, each (rows, width), largest
        first and equal ones by id.  Rows with fewer candidates end in ids of no meaning, which weigh nothing.
    """
    rows, n_vocab = logits.shape
    flat = np.flatnonzero(logits >= _reached_by(logits, wanted)[:, np.newaxis])
    row = flat // n_vocab
    count = np.bincount(row, minlength=rows)
    first = np.cumsum(count) - count
    width = max(int(count.max()), int(wanted.max()))
    keys = np.full((rows, width), _PADDING)
    keys[row, np.arange(len(flat)) - first[row]] = _sort_keys(logits.ravel()[flat], flat - row * n_vocab)
    keys.sort(axis=1)
    ids, values = _from_sort_keys(keys)
    with np.errstate(over="ignore", under="ignore"):
        scaled = (values.astype(np.float64) - best[:, np.newaxis]) / temperatures[:, np.newaxis]
        return ids, scaled, np.exp(scaled).cumsum(axis=1)


def nucleus(logits: Floats, best: float, temperature: float, top_k: int, top_p: float, least: float) -> Doubles:
    """All that top-k (0 is off), top-p and min-p leave of one row, however much that is.

    Nothing is sorted but the tokens about the limit: a flat distribution keeps most of the vocabulary.

    Args:
        logits: (n_vocab,).
        least: the logarithm of the least weight that min-p leaves; -inf is off.

    Returns:
        (n_vocab,) running sums of weights; those of the tokens that are filtered out are 0.
    """
    weights = weights_of(logits[np.newaxis], np.array([best], np.float32), np.array([temperature]))[0]
    if top_k:
        limit = np.partition(logits, -top_k)[-top_k]
        kept = logits > limit
        at = np.flatnonzero(logits == limit)
        kept[at[: top_k - np.count_nonzero(kept)]] = True
        weights *= kept
    if top_p < 1:
        weights *= _reach(np.float32(best) - logits, weights, top_p)
    if least > -np.inf:
        weights *= logits - np.float32(best) >= least * temperature
    masses: Doubles = weights.cumsum(dtype=np.float64)
    return masses


def _reach(distances: Floats, weights: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens the share ``top_p`` of all weight takes, those of least distance to the best first."""
    # The bits of floats that are not negative have the order of their values; the upper half of them
    # is a logarithmic scale fine enough that few tokens share a place on it.
    places = (distances.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    sums = np.bincount(places, weights).cumsum()
    goal = top_p * sums[-1]
    limit = int(sums.searchsorted(goal))
    kept = places < limit
    at = np.flatnonzero(places == limit)
    at = at[np.argsort(distances[at], kind="stable")]
    missing = goal - (sums[limit - 1] if limit else 0.0)
    kept[at[: int(weights[at].cumsum(dtype=np.float64).searchsorted(missing)) + 1]] = True
    return kept


def _reached_by(logits: Floats, wanted: Ints) -> Floats:
    """(rows,) values that at least ``wanted`` logits of each row reach, and seldom many more.

    The n-th largest of some groups' maxima is reached in n groups.  Finding those maxima is one pass
    of vector instructions, several times faster than a partition of the row.
    """
    rows, n_vocab = logits.shape
    size = max(1, min(_GROUP, n_vocab // (4 * int(wanted.max()))))
    n_groups = n_vocab // size
    grouped = logits[:, : n_groups * size].reshape(rows, size, n_groups)
    maxima = np.sort(grouped.max(axis=1), axis=1)
    place = n_groups - wanted
    values: Floats = np.maximum(maxima[np.arange(rows), np.maximum(place, 0)], _LOWEST)
    values[place <= 0] = _LOWEST
    return values


def _sort_keys(values: Floats, ids: Ints) -> npt.NDArray[np.uint64]:
    """Integers in the order of falling values, and of rising ids among equal ones.

    Sorting them is several times faster than a stable argsort, and nothing has to be gathered.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
    falling = np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
    return (falling.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)


def _from_sort_keys(keys: npt.NDArray[np.uint64]) -> tuple[Ints, Floats]:
    falling = (keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(falling >> np.uint32(31), falling, falling ^ np.uint32(0x7FFFFFFF))
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64), bits.view(np.float32)
