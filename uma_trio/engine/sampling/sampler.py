"""Sample one token for each row of a step, all rows together.

    biases -> repetition, frequency and presence penalties -> DRY -> masks
           -> top-n-sigma -> top-k -> typical-p -> top-p -> min-p -> XTC -> temperature -> draw

With mirostat, what follows the masks is: temperature -> limit of the surprise -> draw -> next limit.

Rows are independent: a row gets the same token alone and in any batch.  Touching every logit is the expensive part, so
that happens in a few passes over the whole matrix.  All further work is on the few candidates that remain.

The reference is llama.cpp's samplers in the same order; docs/design/scheduler.md, "Sampling", gives the
reason for this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling.candidates import (
    Doubles,
    Floats,
    Ints,
    cut_by_deviation,
    entropy_share,
    kept_tokens,
    relative_weights,
    top_candidates,
    unsurprising,
    without_top_choices,
)
from uma_trio.engine.sampling.dry import Breakers, apply_dry
from uma_trio.engine.sampling.logit_ops import apply_biases, apply_masks, apply_penalties
from uma_trio.engine.sampling.rng import uniforms
from uma_trio.engine_link.sampling import NO_TOKEN, Bias, Past, SamplingParams

TOP_P_CANDIDATES: Final = 256
"""How many candidates are sorted for top-p without top-k.  Most distributions need far fewer."""

MAX_SORTED_TOP_K: Final = 512
"""A row with a larger top-k is filtered separately, without sorting the tokens that it keeps."""

_BYTES_AT_ONCE = 1 << 21
"""Logits that are drawn from together, in bytes.  With fewer, threads that sample other rows wait for Python more than they compute;
what is computed of more leaves the cache."""

MAX_XTC_THRESHOLD: Final = 0.5
"""Above it no two tokens have so much, so there is nothing to exclude."""

_XTC_STREAM: Final = 0x5DEECE66D1CE4E5B
"""Makes the seed of a second sequence of random numbers."""

_GROUP = 64

_LEAST = np.finfo(np.float32).tiny

Mask: TypeAlias = npt.NDArray[np.integer] | None


def sample(
    logits: Floats,
    params: Sequence[SamplingParams],
    steps: Sequence[int] | npt.NDArray[np.integer],
    masks: Sequence[Mask] | None = None,
    biases: Sequence[Bias | None] | None = None,
    pasts: Sequence[Past | None] | None = None,
    breakers: Sequence[Breakers | None] | None = None,
    mus: dict[int, float] | None = None,
) -> npt.NDArray[np.int32]:
    """Sample one token for each row.

    Args:
        logits: (rows, n_vocab).  Masks, biases and penalties overwrite it, unless the array is read-only.
        params: one a row.
        steps: how many tokens the row's request has drawn before.
        masks: for each row the ids of forbidden tokens, in [0, n_vocab), or ``None``.
        biases: for each row what to add to its logits, or ``None``.
        pasts: for each row the tokens that its penalties need; ``None`` for a row without penalties.
        breakers: for each row with DRY what ends a repetition.
        mus: gets ``SamplingParams.mu`` for the next draw, for each row that mirostat has drawn.

    ``None`` in place of ``masks``, ``biases``, ``pasts`` or ``breakers`` stands for ``None`` in every row.

    Returns:
        (rows,) token ids in [0, n_vocab), or ``NO_TOKEN``.  Among equal logits the lower id counts as more likely.
    """
    logits = _apply_logit_ops(logits, params, masks, biases, pasts, breakers)
    tokens = logits.argmax(axis=1)
    max_logits = logits[np.arange(len(logits)), tokens]
    usable = np.isfinite(max_logits)  # argmax returns a NaN or +inf if the row has one
    tokens[~usable] = NO_TOKEN
    drawn = [row for row, p in enumerate(params) if not p.greedy and usable[row]]
    if drawn:
        seeds, steps = [params[row].seed for row in drawn], np.asarray(steps)[drawn]
        randoms, chances = uniforms(seeds, steps), _chances([params[row] for row in drawn], steps)
        if len(drawn) < len(logits):
            logits, max_logits = logits[drawn], max_logits[drawn]
        tokens[drawn], found = _draw(logits, max_logits, [params[row] for row in drawn], randoms, chances)
        if mus is not None:
            mus.update({drawn[row]: mu for row, mu in found.items()})
    chosen: npt.NDArray[np.int32] = tokens.astype(np.int32)
    return chosen


def copied_rows(params: Sequence[SamplingParams], n_vocab: int) -> int:
    """Return how many rows of logits ``sample`` copies for these parameters.  It reads the other rows in place."""
    drawn = [p for p in params if not p.greedy]
    unfiltered = sum([_is_unfiltered(p, n_vocab) for p in drawn])
    gathers = len(drawn) < len(params) or 0 < unfiltered < len(drawn)
    return len(drawn) if gathers else 0


def distribution(
    logits: Floats,
    params: SamplingParams,
    mask: Mask = None,
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
    rows = _apply_logit_ops(logits[np.newaxis], [params], [mask], [bias], [past], [breakers])
    max_logits = rows.max(axis=1)
    if not np.isfinite(max_logits[0]):
        return np.empty(0, np.int64), np.empty(0)
    if _is_unfiltered(params, len(logits)):
        ids = np.arange(len(logits))
        sums = relative_weights(rows, max_logits, np.array([params.temperature]))[0].cumsum(dtype=np.float64)
    else:
        ((_, ids, sums),) = _filter(rows, max_logits, [params], _chances([params], np.array([step])))
    probabilities = np.diff(sums, prepend=0.0) / sums[-1]
    ids, probabilities = ids[probabilities > 0], probabilities[probabilities > 0]
    order = np.lexsort((ids, -rows[0, ids]))
    return ids[order], probabilities[order]


def _apply_logit_ops(
    logits: Floats,
    params: Sequence[SamplingParams],
    masks: Sequence[Mask] | None,
    biases: Sequence[Bias | None] | None,
    pasts: Sequence[Past | None] | None,
    breakers: Sequence[Breakers | None] | None,
) -> Floats:
    has_masks, has_biases, has_pasts = (
        given is not None and any(one is not None for one in given) for given in (masks, biases, pasts)
    )
    cuts = [row for row, p in enumerate(params) if p.top_n_sigma and not (p.greedy or p.mirostat)]
    if not (has_masks or has_biases or has_pasts or cuts):
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    if has_biases and biases is not None:
        apply_biases(logits, biases)
    if has_pasts and pasts is not None:
        apply_penalties(logits, params, pasts)
        for row, (past, found) in enumerate(zip(pasts, breakers or (), strict=False)):
            if past is not None and found is not None:
                apply_dry(logits[row], params[row], past.tokens, found)
    if has_masks and masks is not None:  # last, so that a mask wins over any bias or penalty, even over NaN
        apply_masks(logits, masks)
    for row in cuts:
        cut_by_deviation(logits[row], params[row].top_n_sigma)
    return logits


def _is_unfiltered(params: SamplingParams, n_vocab: int) -> bool:
    is_off = params.top_p == params.typical_p == 1
    is_off = is_off and params.min_p == params.xtc_probability == params.dynatemp_range == params.mirostat == 0
    return is_off and not 0 < params.top_k < n_vocab


def _chances(params: Sequence[SamplingParams], steps: npt.NDArray[np.integer]) -> Doubles:
    """A random number in [0, 1) for each row with XTC, independent of that of the draw; 1 for the others."""
    chances = np.ones(len(params))
    rows = [row for row, p in enumerate(params) if p.xtc_probability and p.xtc_threshold <= MAX_XTC_THRESHOLD]
    if rows:
        chances[rows] = uniforms([params[row].seed ^ _XTC_STREAM for row in rows], steps[rows])
    return chances


def _draw(
    logits: Floats, max_logits: Floats, params: Sequence[SamplingParams], randoms: Doubles, chances: Doubles
) -> tuple[Ints, dict[int, float]]:
    """A token for each row, and the next state of mirostat for each row that has it."""
    mus: dict[int, float] = {}
    n_vocab = logits.shape[1]
    tokens = np.empty(len(logits), np.int64)
    unfiltered = [row for row, p in enumerate(params) if _is_unfiltered(p, n_vocab)]
    at_once = max(1, _BYTES_AT_ONCE // (n_vocab * logits.itemsize))
    for start in range(0, len(unfiltered), at_once):
        some = unfiltered[start : start + at_once]
        temperatures = np.array([params[row].temperature for row in some])
        # consecutive rows are not copied
        rows = slice(some[0], some[-1] + 1) if some[-1] - some[0] == len(some) - 1 else some
        tokens[rows] = _draw_unfiltered(logits[rows], max_logits[rows], temperatures, randoms[rows])
    filtered = [row for row, p in enumerate(params) if not _is_unfiltered(p, n_vocab)]
    if filtered:
        if unfiltered:
            logits, max_logits = logits[filtered], max_logits[filtered]
        for row, ids, sums in _filter(logits, max_logits, [params[row] for row in filtered], chances[filtered]):
            target = randoms[filtered[row]] * sums[-1]
            # The first sum above the target: never that of a token with weight 0.
            place = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
            tokens[filtered[row]] = ids[place]
            if (p := params[filtered[row]]).mirostat:
                weight = sums[place] - (sums[place - 1] if place else 0.0)
                mus[filtered[row]] = p.next_mu(weight / sums[-1])
    return tokens, mus


def _filter(
    logits: Floats, max_logits: Floats, params: Sequence[SamplingParams], chances: Doubles
) -> list[tuple[int, Ints, Doubles]]:
    """Apply the filters: for each row its number, the remaining ids, and the running sums of their weights.

    There are three code paths.  Which one a row takes depends on that row alone.
    """
    n_vocab = logits.shape[1]
    top_k = np.array([p.top_k if p.top_k < n_vocab else 0 for p in params])
    min_log_weights = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    results: list[tuple[int, Ints, Doubles]] = []

    is_typical = np.array([p.typical_p < 1 for p in params])
    separately = ((top_k > MAX_SORTED_TOP_K) | (is_typical & (top_k == 0))).tolist()
    totals = np.full(len(params), np.inf)
    needs_total = [row for row, p in enumerate(params) if top_k[row] == 0 and p.top_p < 1]
    if needs_total:
        weights = relative_weights(logits[needs_total], max_logits[needs_total], np.ones(len(needs_total)))
        # Row by row: a sum over a matrix may add a row's numbers in an order that depends on the other rows.
        totals[needs_total] = [row.sum(dtype=np.float64) for row in weights]

    counts = np.where(top_k == 0, min(TOP_P_CANDIDATES, n_vocab), np.minimum(top_k, MAX_SORTED_TOP_K))
    all_ids, all_log_weights = top_candidates(logits, max_logits, counts)
    all_sums = _sums(all_log_weights)
    temperatures = np.array([p.temperature for p in params])
    all_tempered = all_sums if (temperatures == 1).all() else _sums(all_log_weights, temperatures[:, np.newaxis])
    for row, p in enumerate(params):
        if p.mirostat:
            weights = relative_weights(logits[row : row + 1], max_logits[row : row + 1], temperatures[row : row + 1])[0]
            ids = unsurprising(weights, p.surprise_limit)
            results.append((row, ids, weights[ids].cumsum(dtype=np.float64)))
            continue
        sums, log_weights = all_sums[row, : counts[row]], all_log_weights[row, : counts[row]]
        goal = p.top_p * (totals[row] if top_k[row] == 0 else sums[-1])
        # Whether the limit of top-p or of min-p lies within the sorted candidates.
        is_limited = sums[-1] >= goal or log_weights[-1] < min_log_weights[row]
        if separately[row] or (top_k[row] == 0 and not is_limited and counts[row] < n_vocab):
            ids = kept_tokens(
                logits[row], float(max_logits[row]), int(top_k[row]), p.typical_p, p.top_p, min_log_weights[row]
            )
            results.append((row, *_weigh(ids, logits[row, ids] - max_logits[row], p, chances[row])))
            continue
        if p.typical_p < 1:
            some = kept_tokens(log_weights.astype(np.float32), 0.0, 0, p.typical_p, p.top_p, min_log_weights[row])
            results.append((row, *_weigh(all_ids[row, some], log_weights[some], p, chances[row])))
            continue
        kept = len(sums) if p.top_p == 1 else min(int(sums.searchsorted(goal)) + 1, len(sums))
        if p.min_p:
            kept = min(kept, int((log_weights >= min_log_weights[row]).sum()))
        if p.dynatemp_range or chances[row] < p.xtc_probability:
            results.append((row, *_weigh(all_ids[row, :kept], log_weights[:kept], p, chances[row])))
        else:
            results.append((row, all_ids[row, :kept], all_tempered[row, :kept]))
    return results


def _weigh(ids: Ints, log_weights: Floats | Doubles, params: SamplingParams, chance: float) -> tuple[Ints, Doubles]:
    """What comes after the filters, for one row: XTC and the temperature.

    Args:
        ids: of the candidates.
        log_weights: their logits less the largest one.
        chance: a random number.

    Returns:
        The ids that are left, and the running sums of their weights.
    """
    if chance < params.xtc_probability:
        kept = without_top_choices(log_weights.astype(np.float64), params.xtc_threshold)
        ids, log_weights = ids[kept], log_weights[kept] - log_weights[kept].max()
    temperature = params.temperature
    if params.dynatemp_range and len(ids) > 1:
        share = entropy_share(log_weights.astype(np.float64)) ** params.dynatemp_exponent
        lowest, highest = max(0.0, temperature - params.dynatemp_range), temperature + params.dynatemp_range
        temperature = lowest + (highest - lowest) * share
    return ids, _sums(log_weights, temperature)


def _sums(log_weights: Floats | Doubles, temperature: float | Doubles = 1.0) -> Doubles:
    """The running sums of weights at a temperature, so that a draw is one binary search."""
    with np.errstate(over="ignore", under="ignore"):
        # At a smaller temperature every token but the best has weight 0, and the best would have 0 / 0 = NaN.
        sums: Doubles = np.exp(log_weights / np.maximum(temperature, _LEAST)).cumsum(axis=-1, dtype=np.float64)
    return sums


def _draw_unfiltered(logits: Floats, max_logits: Floats, temperatures: Doubles, randoms: Doubles) -> Ints:
    """Draw from whole rows: first a group of tokens by its weight, then a token of the group."""
    rows, n_vocab = logits.shape
    size = min(_GROUP, n_vocab)
    n_groups = -(-n_vocab // size)
    weights = relative_weights(logits, max_logits, temperatures)
    if n_vocab % size:
        weights = np.pad(weights, [(0, 0), (0, size * n_groups - n_vocab)])
    grouped = weights.reshape(rows, size, n_groups)
    row = np.arange(rows)
    sums = grouped.sum(axis=1).cumsum(axis=1, dtype=np.float64)
    target = randoms * sums[:, -1]
    group = np.minimum((sums <= target[:, np.newaxis]).sum(axis=1), n_groups - 1)
    before = np.where(group > 0, sums[row, group - 1], 0.0)
    inside = grouped[row, :, group].astype(np.float64).cumsum(axis=1)
    place = (inside <= (target - before)[:, np.newaxis]).sum(axis=1)
    # Rounding can put the target at the very end: then take the last token with any weight.
    last = (inside < inside[:, -1:]).sum(axis=1)
    chosen: Ints = np.minimum(place, last) * n_groups + group
    return chosen
