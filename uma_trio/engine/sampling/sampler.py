"""Sample one token for each row of a step, all rows together.

    biases -> repetition, frequency and presence penalties -> DRY -> banned ids -> grammars
           -> top-n-sigma -> top-k -> typical-p -> top-p -> min-p -> XTC -> temperature -> draw

With mirostat, the steps after the grammars are: temperature -> limit of the surprise -> draw -> next limit.

Rows are independent: a row gets the same token alone and in any batch.  Touching every logit is the expensive part, so
that happens in a few passes over the whole matrix.  All further work is on the few candidates that remain.

The reference is llama.cpp's samplers in the same order; docs/design/scheduler.md, "Sampling", gives the
reason for this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from uma_trio.engine.sampling.candidates import (
    LEAST_TEMPERATURE,
    Doubles,
    Floats,
    Ints,
    cut_by_deviation,
    entropy_share,
    relative_weights,
    top_candidates,
    unsurprising,
    without_top_choices,
)
from uma_trio.engine.sampling.dry import apply_dry
from uma_trio.engine.sampling.filters import kept_tokens
from uma_trio.engine.sampling.logit_ops import apply_bans, apply_biases, apply_penalties
from uma_trio.engine.sampling.plan import Filters, Rows, SamplingPlan
from uma_trio.engine.sampling.rng import uniforms
from uma_trio.engine_link.sampling import NO_TOKEN, SamplingParams

_BYTES_AT_ONCE = 1 << 21
"""Logits that are drawn from together, in bytes.  With fewer, threads that sample other rows wait for Python more than they compute;
what is computed of more leaves the cache."""

_XTC_STREAM: Final = 0x5DEECE66D1CE4E5B
"""Makes the seed of a second sequence of random numbers."""

_GREEDY: Final = SamplingParams()

_GROUP = 64

T = TypeVar("T")


def sample(
    logits: Floats,
    rows: Rows,
    mus: dict[int, float] | None = None,
    plan: SamplingPlan | None = None,
) -> npt.NDArray[np.int32]:
    """Sample one token for each row.

    Args:
        logits: (rows, n_vocab).  Bans, masks, biases and penalties overwrite it, unless the array is read-only.
        mus: gets ``SamplingParams.mu`` for the next draw, for each row that mirostat has drawn.
        plan: of ``rows.params``, if it is there already.

    Returns:
        (rows,) token ids in [0, n_vocab), or ``NO_TOKEN``.  Among equal logits the lower id counts as more likely.
    """
    n_vocab = logits.shape[1]
    plan = plan or SamplingPlan(rows.params, n_vocab)
    logits = apply_logit_ops(logits, rows, plan)
    # A step is mostly one row or a few, and numpy's code has left the caches since the last one: each call takes long.
    tokens = logits.argmax(axis=1)
    best = [float(logits[row, token]) for row, token in enumerate(tokens.tolist())]
    if not all(map(math.isfinite, best)):  # argmax returns a NaN or +inf if the row has one
        usable = [*map(math.isfinite, best)]
        tokens[np.logical_not(usable)] = NO_TOKEN
        plan = SamplingPlan(
            [p if is_usable else _GREEDY for p, is_usable in zip(rows.params, usable, strict=True)], n_vocab
        )
    if drawn := plan.drawn:
        steps = [rows.steps[row] for row in drawn]
        max_logits = np.array([best[row] for row in drawn], np.float32)
        if len(drawn) < len(logits):
            logits = logits[drawn]
        chosen, mus_of_drawn = _draw(logits, max_logits, plan, uniforms(plan.seeds, steps), chances_of(plan, steps))
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
        if mus is not None:
            mus.update({drawn[row]: mu for row, mu in mus_of_drawn.items()})
    sampled: npt.NDArray[np.int32] = tokens.astype(np.int32)
    return sampled


def apply_logit_ops(logits: Floats, rows: Rows, plan: SamplingPlan) -> Floats:
    params = rows.params
    banned, biases, pasts = _if_any(rows.banned), _if_any(rows.biases), _if_any(rows.pasts)
    grammar_masks = _if_any(rows.grammar_masks)
    if not (banned or biases or pasts or grammar_masks or plan.cuts):
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    if biases:
        apply_biases(logits, biases)
    if pasts:
        apply_penalties(logits, params, pasts)
        for row, (past, breakers) in enumerate(zip(pasts, rows.breakers or (), strict=False)):
            if past is not None and breakers is not None:
                apply_dry(logits[row], params[row], past.tokens, breakers)
    if banned:  # last, so that a ban wins over any bias or penalty, even over NaN
        apply_bans(logits, banned)
    for row, mask in enumerate(grammar_masks):
        if mask is not None:
            mask.apply(logits[row])
    for row in plan.cuts:
        cut_by_deviation(logits[row], params[row].top_n_sigma)
    return logits


def _if_any(given: Sequence[T | None] | None) -> Sequence[T | None]:
    """``given``, or nothing if no row has something."""
    return given if given and any(one is not None for one in given) else ()


def chances_of(plan: SamplingPlan, steps: Sequence[int]) -> list[float]:
    """A random number in [0, 1) for each row with XTC, independent of that of the draw; 1 for the others."""
    chances = [1.0] * len(plan.params)
    for row in plan.with_xtc:
        [chances[row]] = uniforms([plan.seeds[row] ^ _XTC_STREAM], [steps[row]])
    return chances


def _draw(
    logits: Floats, max_logits: Floats, plan: SamplingPlan, randoms: Sequence[float], chances: Sequence[float]
) -> tuple[list[int], dict[int, float]]:
    """A token for each row, and the next state of mirostat for each row that has it."""
    mus: dict[int, float] = {}
    tokens = [NO_TOKEN] * len(logits)
    at_once = max(1, _BYTES_AT_ONCE // (logits.shape[1] * logits.itemsize))
    for start in range(0, len(plan.unfiltered), at_once):
        some, temperatures = plan.unfiltered[start : start + at_once], plan.temperatures[start : start + at_once]
        # consecutive rows are not copied
        rows = slice(some[0], some[-1] + 1) if some[-1] - some[0] == len(some) - 1 else some
        drawn = _draw_unfiltered(logits[rows], max_logits[rows], temperatures, [randoms[row] for row in some])
        for row, token in zip(some, drawn, strict=True):
            tokens[row] = token
    if filtered := plan.filtered:
        if plan.unfiltered:
            logits, max_logits = logits[filtered], max_logits[filtered]
        for row, ids, sums in filter_rows(logits, max_logits, plan.filters, [chances[row] for row in filtered]):
            target = randoms[filtered[row]] * sums[-1]
            # The first sum above the target: never that of a token with weight 0.
            place = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
            tokens[filtered[row]] = int(ids[place])
            if (p := plan.filters.params[row]).mirostat:
                weight = sums[place] - (sums[place - 1] if place else 0.0)
                mus[filtered[row]] = p.next_mu(weight / sums[-1])
    return tokens, mus


@np.errstate(over="ignore", under="ignore")
def filter_rows(
    logits: Floats, max_logits: Floats, filters: Filters, chances: Sequence[float]
) -> list[tuple[int, Ints, Doubles]]:
    """Apply the filters: for each row its number, the remaining ids, and the running sums of their weights.

    There are four code paths.  Which one a row takes depends on that row alone.
    """
    n_vocab = logits.shape[1]
    top_k, min_log_weights, temperatures = filters.top_k, filters.min_log_weights, filters.temperatures
    results: list[tuple[int, Ints, Doubles]] = []

    totals = np.full(len(top_k), np.inf)
    if needs_total := filters.needs_total:
        weights = relative_weights(logits[needs_total], max_logits[needs_total])
        # Row by row: a sum over a matrix may add a row's numbers in an order that depends on the other rows.
        totals[needs_total] = [row.sum(dtype=np.float64) for row in weights]

    all_ids, all_log_weights = top_candidates(logits, max_logits, filters.counts)
    all_sums, counts = _sums(all_log_weights), filters.counts.tolist()
    all_tempered = all_sums if (temperatures == 1).all() else _sums(all_log_weights, temperatures[:, np.newaxis])
    for row, p in enumerate(filters.params):
        if p.mirostat:
            weights = relative_weights(logits[row : row + 1], max_logits[row : row + 1], temperatures[row : row + 1])[0]
            ids = unsurprising(weights, p.surprise_limit)
            results.append((row, ids, weights[ids].cumsum(dtype=np.float64)))
            continue
        sums, log_weights = all_sums[row, : counts[row]], all_log_weights[row, : counts[row]]
        goal = p.top_p * (totals[row] if top_k[row] == 0 else sums[-1])
        # Whether the limit of top-p or of min-p lies within the sorted candidates.
        is_limited = sums[-1] >= goal or log_weights[-1] < min_log_weights[row]
        if filters.are_large[row] or (top_k[row] == 0 and not is_limited and counts[row] < n_vocab):
            ids = kept_tokens(logits[row], float(max_logits[row]), p)
            results.append((row, *_weigh(ids, logits[row, ids] - max_logits[row], p, chances[row])))
            continue
        if filters.any_order[row]:
            some = kept_tokens(log_weights.astype(np.float32), 0.0, p)
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
    sums: Doubles = np.exp(log_weights / np.maximum(temperature, LEAST_TEMPERATURE)).cumsum(axis=-1, dtype=np.float64)
    return sums


def _draw_unfiltered(logits: Floats, max_logits: Floats, temperatures: Doubles, randoms: Sequence[float]) -> list[int]:
    """Draw from whole rows: first a group of tokens by its weight, then a token of the group."""
    rows, n_vocab = logits.shape
    size = min(_GROUP, n_vocab)
    n_groups = -(-n_vocab // size)
    weights = np.empty((rows, size * n_groups), np.float32)
    if n_vocab % size:
        weights[:, n_vocab:] = 0
    relative_weights(logits, max_logits, temperatures, out=weights[:, :n_vocab])
    grouped = weights.reshape(rows, size, n_groups)
    all_sums = grouped.sum(axis=1).cumsum(axis=1, dtype=np.float64)
    chosen = []
    for groups, sums, random in zip(grouped, all_sums, randoms, strict=True):
        target = random * float(sums[-1])
        group = min(int(sums.searchsorted(target, "right")), n_groups - 1)
        inside = groups[:, group].cumsum(dtype=np.float64)
        place = int(inside.searchsorted(target - sums[group - 1] if group else target, "right"))
        if place == size:  # rounding can put the target at the very end: then take the last token with any weight
            place = int(inside.searchsorted(inside[-1]))
        chosen.append(place * n_groups + group)
    return chosen
