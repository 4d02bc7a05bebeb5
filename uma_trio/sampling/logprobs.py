"""How likely the model itself found a token: of its logits as they came, before anything is done to them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.sampling.candidates import Floats, most_likely, weights_of


@attrs.frozen
class Score:
    """Of one chosen token."""

    logprob: float
    """Natural logarithm of its probability."""
    best: Sequence[tuple[int, float]]
    """The most likely tokens and theirs, largest first and equal ones by id; none of probability 0."""


def logprobs(raw: Floats, tokens: npt.NDArray[np.integer], wanted: Sequence[int]) -> list[Score | None]:
    """Score the chosen token of each row.

    Args:
        raw: (rows, n_vocab) logits as the model gave them.
        tokens: (rows,) ids in [0, n_vocab), or below 0 for a row without any.
        wanted: of how many most likely tokens a row tells, 0 for none; more than there are is all.

    Returns:
        For each row a score, or ``None`` where there is no token or a logit is NaN or +inf.
    """
    best = raw.max(axis=1)
    usable = np.flatnonzero((np.asarray(tokens) >= 0) & np.isfinite(best))
    scores: list[Score | None] = [None] * len(raw)
    if not len(usable):
        return scores
    if len(usable) < len(raw):
        raw, best = raw[usable], best[usable]
    ones = np.ones(len(raw))
    weights = weights_of(raw, best, ones)
    # Summed row by row, as in the sampler: a row's sum must not depend on the other rows.
    norms = best.astype(np.float64) + np.log([row.sum(dtype=np.float64) for row in weights])
    chosen = (raw[np.arange(len(raw)), tokens[usable]] - norms).tolist()
    most = np.array([min(wanted[row], raw.shape[1]) for row in usable.tolist()])
    ids, logs, _ = most_likely(raw, best, ones, np.maximum(most, 1))
    values = logs + (best - norms)[:, np.newaxis]
    for row, at in enumerate(usable.tolist()):
        few = zip(ids[row, : most[row]].tolist(), values[row, : most[row]].tolist(), strict=True)
        scores[at] = Score(chosen[row], tuple(pair for pair in few if pair[1] > -np.inf))
    return scores
