"""Tokens that the sampler draws, asked with plain lists, and the distribution that it draws from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from uma_trio.engine.sampling import sampler
from uma_trio.engine.sampling.candidates import Doubles, Floats, Ints, relative_weights
from uma_trio.engine.sampling.dry import Breakers
from uma_trio.engine.sampling.plan import BannedIds, Rows, SamplingPlan
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams


def sample(
    logits: np.ndarray,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    *more: Any,
    mus: Any = None,
    **given: Any,
) -> np.ndarray:
    """A token for each row; ``more`` and ``given`` are further lists of ``Rows``."""
    return sampler.sample(logits, Rows(params, steps, *more, **given), mus)


def distribution(
    logits: Floats,
    params: SamplingParams,
    banned: BannedIds = None,
    bias: Bias | None = None,
    past: Past | None = None,
    breakers: Breakers | None = None,
    step: int = 0,
) -> tuple[Ints, Doubles]:
    """Return the distribution that ``sample`` draws from in one row, computed by the same code.

    Args:
        logits: (n_vocab,); overwritten as by ``sample``.
        params: must not be greedy.
        step: how many tokens the request has drawn before; XTC depends on it.

    Returns:
        Token ids and their probabilities, most likely first.  No probability is 0, and they sum up to 1.  Both
        arrays are empty where ``sample`` returns ``NO_TOKEN``.
    """
    plan = SamplingPlan([params], len(logits))
    rows = sampler.apply_logit_ops(
        logits[np.newaxis], Rows([params], [step], [banned], [bias], [past], [breakers]), plan
    )
    max_logits = rows.max(axis=1)
    if not np.isfinite(max_logits[0]):
        return np.empty(0, np.int64), np.empty(0)
    if plan.unfiltered:
        ids = np.arange(len(logits))
        sums = relative_weights(rows, max_logits, np.array([params.temperature]))[0].cumsum(dtype=np.float64)
    else:
        ((_, ids, sums),) = sampler.filter_rows(rows, max_logits, plan.filters, sampler.chances_of(plan, [step]))
    probabilities = np.diff(sums, prepend=0.0) / sums[-1]
    ids, probabilities = ids[probabilities > 0], probabilities[probabilities > 0]
    order = np.lexsort((ids, -rows[0, ids]))
    return ids[order], probabilities[order]
