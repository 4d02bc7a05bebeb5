"""Log probabilities of the model's own distribution, before masks, biases, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling.candidates import Floats, relative_weights, top_candidates
from uma_trio.engine_link.sampling import NO_TOKEN, TokenLogprobs


def compute_logprobs(
    logits: Floats, tokens: npt.NDArray[np.integer], n_top: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Compute the log probability of each row's token.

    Args:
        logits: (rows, n_vocab) as the model computed them.
        tokens: (rows,) ids in [0, n_vocab), or ``NO_TOKEN``.
        n_top: (rows,) how many most likely tokens to list.  May exceed n_vocab.

    Returns:
        One entry a row; ``None`` for a row without a token, or with NaN or +inf among its logits.
    """
    max_logits = logits.max(axis=1)
    usable = np.flatnonzero((np.asarray(tokens) != NO_TOKEN) & np.isfinite(max_logits))
    results: list[TokenLogprobs | None] = [None] * len(logits)
    if not len(usable):
        return results
    if len(usable) < len(logits):
        logits, max_logits = logits[usable], max_logits[usable]
    weights = relative_weights(logits, max_logits)
    # Summed row by row, as in the sampler: the sum of a row must not depend on the other rows.
    norms = max_logits.astype(np.float64) + np.log([row.sum(dtype=np.float64) for row in weights])
    sampled = (logits[np.arange(len(logits)), tokens[usable]] - norms).tolist()
    counts = np.array([min(n_top[row], logits.shape[1]) for row in usable.tolist()])
    ids, log_weights = top_candidates(logits, max_logits, np.maximum(counts, 1))
    values = log_weights + (max_logits - norms)[:, np.newaxis]
    for row, index in enumerate(usable.tolist()):
        top = zip(ids[row, : counts[row]].tolist(), values[row, : counts[row]].tolist(), strict=True)
        results[index] = TokenLogprobs(sampled[row], tuple(pair for pair in top if pair[1] > -np.inf))
    return results
