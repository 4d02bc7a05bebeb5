"""The tokens of one tick, for all rows at once.

    masks -> (penalties) -> temperature -> top-k -> top-p -> draw

Rows do not influence each other: a row gets the same token alone and in any batch.  What is costly
is touching every logit, so that happens in a few passes over the whole matrix; all that follows
works on the few candidates that are left.

Source: starling.md, "Sampler Pipeline"; llama.cpp's samplers in the same order are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma_trio.sampling.candidates import Doubles, Floats, Ints, most_likely, nucleus, weights_of
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.rng import uniforms

NO_TOKEN = -1
"""For a row whose logits give no distribution: a NaN or +inf among them, or nothing above -inf."""

FIRST_GUESS = 256
"""Candidates that are sorted for top-p without top-k; more than enough for most distributions."""

SORTED_TOP_K = 512
"""With a larger top-k a row is filtered by itself, without sorting what it keeps."""

_GROUP = 64


def sample(
    logits: Floats,
    params: Sequence[SamplingParams],
    steps: Sequence[int] | npt.NDArray[np.integer],
    masks: Sequence[npt.NDArray[np.integer] | None] | None = None,
) -> npt.NDArray[np.int32]:
    """Choose one token for each row.

    Args:
        logits: (rows, n_vocab).  Masked entries are overwritten with -inf if the array is writeable.
        params: one a row.
        steps: how many tokens were drawn for this row's request before.
        masks: for each row the ids that must not be chosen, each in [0, n_vocab), or None.

    Returns:
        (rows,) token ids in [0, n_vocab); ``NO_TOKEN`` for a row without a distribution.  Among
        equal logits the lower id counts as the more likely one.
    """
    logits = _masked(logits, masks)
    tokens = logits.argmax(axis=1)
    best = logits[np.arange(len(logits)), tokens]
    usable = np.isfinite(best)  # argmax finds a NaN or +inf, if the row has one
    tokens[~usable] = NO_TOKEN
    drawn = [row for row, p in enumerate(params) if not p.greedy and usable[row]]
    if drawn:
        chances = uniforms([params[row].seed for row in drawn], np.asarray(steps)[drawn])
        if len(drawn) < len(logits):
            logits, best = logits[drawn], best[drawn]
        tokens[drawn] = _draw(logits, best, [params[row] for row in drawn], chances)
    chosen: npt.NDArray[np.int32] = tokens.astype(np.int32)
    return chosen


def copied_rows(params: Sequence[SamplingParams], n_vocab: int) -> int:
    """How many rows ``sample`` copies before it reads them; the others it reads where they are."""
    drawn = [p for p in params if not p.greedy]
    gathers = len(drawn) < len(params) or any(_unfiltered(p, n_vocab) for p in drawn)
    return len(drawn) if gathers else 0


def distribution(
    logits: Floats, params: SamplingParams, mask: npt.NDArray[np.integer] | None = None
) -> tuple[Ints, Doubles]:
    """What ``sample`` draws from in one row, by the code that it uses itself.

    Args:
        logits: (n_vocab,); overwritten where masked.
        params: must not be greedy.

    Returns:
        token ids and their probabilities, most likely first; none is 0 and they sum up to 1.  Both
        are empty where ``sample`` returns ``NO_TOKEN``.
    """
    rows = _masked(logits[np.newaxis], [mask])
    best = rows.max(axis=1)
    if not np.isfinite(best[0]):
        return np.empty(0, np.int64), np.empty(0)
    if _unfiltered(params, len(logits)):
        ids = np.arange(len(logits))
        mass = weights_of(rows, best, np.array([params.temperature]))[0].cumsum(dtype=np.float64)
    else:
        ((_, ids, mass),) = _filtered(rows, best, [params])
    probabilities = np.diff(mass, prepend=0.0) / mass[-1]
    ids, probabilities = ids[probabilities > 0], probabilities[probabilities > 0]
    order = np.lexsort((ids, -rows[0, ids]))
    return ids[order], probabilities[order]


def _masked(logits: Floats, masks: Sequence[npt.NDArray[np.integer] | None] | None) -> Floats:
    if masks is None or all(mask is None for mask in masks):
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    for row, mask in enumerate(masks):
        if mask is not None:
            logits[row, mask] = -np.inf
    return logits


def _unfiltered(params: SamplingParams, n_vocab: int) -> bool:
    return params.top_p == 1 and not 0 < params.top_k < n_vocab


def _draw(logits: Floats, best: Floats, params: Sequence[SamplingParams], chances: Doubles) -> Ints:
    n_vocab = logits.shape[1]
    tokens = np.empty(len(logits), np.int64)
    whole = [row for row, p in enumerate(params) if _unfiltered(p, n_vocab)]
    if whole:
        temperatures = np.array([params[row].temperature for row in whole])
        tokens[whole] = _draw_from_all(logits[whole], best[whole], temperatures, chances[whole])
    some = [row for row, p in enumerate(params) if not _unfiltered(p, n_vocab)]
    if some:
        if whole:
            logits, best = logits[some], best[some]
        for row, ids, mass in _filtered(logits, best, [params[row] for row in some]):
            aim = chances[some[row]] * mass[-1]
            # The first whose sum exceeds the aim: one without weight never is the first.
            place = min(int(mass.searchsorted(aim, side="right")), len(mass) - 1)
            tokens[some[row]] = ids[place]
    return tokens


def _filtered(
    logits: Floats, best: Floats, params: Sequence[SamplingParams]
) -> list[tuple[int, Ints, Doubles]]:
    """What top-k and top-p leave of each row: its number, ids, and their weights summed from the left.

    Which of the two ways a row takes depends on nothing but the row.
    """
    n_vocab = logits.shape[1]
    temperatures = np.array([p.temperature for p in params])
    top_k = np.array([p.top_k if p.top_k < n_vocab else 0 for p in params])
    found: list[tuple[int, Ints, Doubles]] = []

    by_itself = (top_k > SORTED_TOP_K).tolist()
    totals = np.zeros(len(params))
    unlimited = np.flatnonzero(top_k == 0)
    if len(unlimited):
        weights = weights_of(logits[unlimited], best[unlimited], temperatures[unlimited])
        # Row by row: a sum over a matrix may add a row's numbers in an order that depends on the others.
        totals[unlimited] = [row.sum(dtype=np.float64) for row in weights]

    wanted = np.where(top_k == 0, min(FIRST_GUESS, n_vocab), np.minimum(top_k, SORTED_TOP_K))
    ids, mass = most_likely(logits, best, temperatures, wanted)
    for row, p in enumerate(params):
        sums = mass[row, : wanted[row]]
        goal = p.top_p * (totals[row] if top_k[row] == 0 else sums[-1])
        if by_itself[row] or (top_k[row] == 0 and sums[-1] < goal and wanted[row] < n_vocab):
            masses = nucleus(logits[row], float(best[row]), p.temperature, int(top_k[row]), p.top_p)
            found.append((row, np.arange(n_vocab), masses))
            continue
        kept = len(sums) if p.top_p == 1 else min(int(sums.searchsorted(goal)) + 1, len(sums))
        found.append((row, ids[row, :kept], sums[:kept]))
    return found


def _draw_from_all(logits: Floats, best: Floats, temperatures: Doubles, chances: Doubles) -> Ints:
    """Draw without a filter: first a group of tokens by its weight, then a token inside it."""
    rows, n_vocab = logits.shape
    size = min(_GROUP, n_vocab)
    n_groups = -(-n_vocab // size)
    weights = np.zeros((rows, size * n_groups), np.float32)
    weights[:, :n_vocab] = weights_of(logits, best, temperatures)
    grouped = weights.reshape(rows, size, n_groups)
    row = np.arange(rows)
    sums = grouped.sum(axis=1, dtype=np.float64).cumsum(axis=1)
    aim = chances * sums[:, -1]
    group = np.minimum((sums <= aim[:, np.newaxis]).sum(axis=1), n_groups - 1)
    before = np.where(group > 0, sums[row, group - 1], 0.0)
    inside = grouped[row, :, group].astype(np.float64).cumsum(axis=1)
    place = (inside <= (aim - before)[:, np.newaxis]).sum(axis=1)
    # Rounding may leave the aim at the very end: then the last token with any weight.
    last = (inside < inside[:, -1:]).sum(axis=1)
    chosen: Ints = np.minimum(place, last) * n_groups + group
    return chosen
