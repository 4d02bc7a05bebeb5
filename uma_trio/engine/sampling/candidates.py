"""Candidates: the few tokens of a row that the filters leave to draw from.

The weight of a token is ``exp(logit - max_logit)``, its probability up to a constant factor.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MAX_GROUP = 64
"""Most logits in a group when the search for candidates looks at the maxima of groups."""

_LOWEST = np.finfo(np.float32).min
LEAST_TEMPERATURE = np.finfo(np.float32).tiny
"""At a smaller one every token but the best has weight 0, and the best would have 0 / 0 = NaN."""


def relative_weights(
    logits: Floats, max_logits: Floats, temperatures: Doubles | None = None, out: Floats | None = None
) -> Floats:
    """Return the weights of all tokens, (rows, n_vocab), each in [0, 1].

    Args:
        logits: (rows, n_vocab).
        max_logits: (rows,) the largest logit of each row.
        temperatures: (rows,), above 0; without them all are 1.
        out: (rows, n_vocab), where the weights are written; without it they get an array of their own.
    """
    weights: Floats = np.subtract(logits, max_logits[:, np.newaxis], out=out)
    with np.errstate(over="ignore", under="ignore"):
        if temperatures is not None:
            weights /= np.maximum(temperatures, LEAST_TEMPERATURE).astype(np.float32)[:, np.newaxis]
        return np.exp(weights, out=weights)


def top_candidates(logits: Floats, max_logits: Floats, counts: Ints) -> tuple[Ints, Doubles]:
    """Find at least the ``counts`` (rows,) tokens with the largest logits of each row.

    Returns:
        Ids, and logits less the largest one, each (rows, width), in descending order of logits and ascending order of
        ids among equal logits.  Rows with fewer candidates are padded with arbitrary ids of weight 0.
    """
    rows, n_vocab = logits.shape
    flat = np.flatnonzero(logits >= _thresholds(logits, counts)[:, np.newaxis])  # nonzero of a matrix takes much longer
    row, token = np.divmod(flat, n_vocab)
    n_found = np.bincount(row, minlength=rows)
    column = np.arange(len(row)) - (n_found.cumsum() - n_found)[row]
    width = max(int(n_found.max()), int(counts.max()))
    ids, values = np.zeros((rows, width), np.int64), np.full((rows, width), -np.inf)
    ids[row, column], values[row, column] = token, logits[row, token]
    sorted_ = np.arange(rows)[:, np.newaxis], (-values).argsort(axis=1, kind="stable")
    return ids[sorted_], values[sorted_] - max_logits[:, np.newaxis]


def cut_by_deviation(logits: Floats, n: float) -> None:
    """Set the logits to -inf that are more than ``n`` standard deviations below the largest one.

    Args:
        logits: (n_vocab,); tokens with -inf do not count.
    """
    counted = logits[np.isfinite(logits)]
    if len(counted):
        logits[logits < counted.max() - n * counted.std(dtype=np.float64)] = -np.inf


def unsurprising(weights: Floats, limit: float) -> Ints:
    """Exclude tokens whose surprise, the negative logarithm of the probability, is above ``limit``.

    Args:
        weights: (n,) of all tokens.
        limit: in bits.

    Returns:
        Ids of the tokens that are left, in ascending order; of the most likely one if no other is.
    """
    kept = np.flatnonzero(weights >= weights.sum(dtype=np.float64) * 2.0**-limit)
    return kept if len(kept) else np.array([weights.argmax()])


def without_top_choices(log_weights: Doubles, threshold: float) -> Ints:
    """Exclude the tokens whose probability is at least ``threshold``, except the least likely one of them.

    Args:
        log_weights: (n,) of candidates; the weights that they have need no sum of 1.

    Returns:
        Indices of the candidates that are left, in ascending order.
    """
    weights = np.exp(log_weights)
    likely = np.flatnonzero(weights >= threshold * weights.sum())
    kept = np.ones(len(weights), bool)
    if len(likely):
        kept[likely] = False
        kept[likely[len(likely) - 1 - weights[likely][::-1].argmin()]] = True
    return np.flatnonzero(kept)


def entropy_share(log_weights: Doubles) -> float:
    """The entropy of candidates, two or more, as a share of what it would be if all were equally likely."""
    weights = np.exp(log_weights)
    likely = weights > 0
    total = weights.sum()
    entropy = math.log(total) - float((weights[likely] * log_weights[likely]).sum()) / total
    share: float = entropy / math.log(len(log_weights))
    return min(1.0, max(0.0, share))


def _thresholds(logits: Floats, counts: Ints) -> Floats:
    """Return (rows,) values that at least ``counts`` logits of each row reach, and rarely many more.

    The n-th largest of the maxima of groups is reached in n groups.  Computing these maxima is one vectorised
    pass, several times faster than a partition of the row.
    """
    rows, n_vocab = logits.shape
    size = max(1, min(_MAX_GROUP, n_vocab // (4 * int(counts.max()))))
    n_groups = n_vocab // size
    grouped = logits[:, : n_groups * size].reshape(rows, size, n_groups)
    maxima = np.sort(grouped.max(axis=1), axis=1)
    place = n_groups - counts
    values: Floats = np.maximum(maxima[np.arange(rows), np.maximum(place, 0)], _LOWEST)
    values[place <= 0] = _LOWEST
    return values
