"""The tokens of one tick, for all rows at once.

    masks, biases -> repetition, frequency and presence penalties -> temperature -> top-k -> top-p -> min-p -> draw

Rows do not influence each other: a row gets the same token alone and in any batch.  What is costly
is touching every logit, so that happens in a few passes over the whole matrix; all that follows
works on the few candidates that are left.

Source: llama.cpp's samplers in the same order are the reference; docs/ARCHITECTURE.md says why this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from uma_trio.sampling import edits
from uma_trio.sampling.candidates import Doubles, Floats, Ints, most_likely, nucleus, weights_of
from uma_trio.sampling.edits import Bias, Past
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.rng import uniforms

NO_TOKEN = -1
"""For a row whose logits give no distribution: a NaN or +inf among them, or nothing above -inf."""

FIRST_GUESS = 256
"""Candidates that are sorted for top-p without top-k; more than enough for most distributions."""

SORTED_TOP_K = 512
"""With a larger top-k a row is filtered by itself, without sorting what it keeps."""

_GROUP = 64

Mask: TypeAlias = npt.NDArray[np.integer] | None


def sample(
    logits: Floats,
    params: Sequence[SamplingParams],
    steps: Sequence[int] | npt.NDArray[np.integer],
    masks: Sequence[Mask] | None = None,
    biases: Sequence[Bias | None] | None = None,
    pasts: Sequence[Past | None] | None = None,
) -> npt.NDArray[np.int32]:
    """Choose one token for each row.

    Args:
        logits: (rows, n_vocab).  What masks, biases and penalties change is overwritten if the array is writeable.
        params: one a row.
        steps: how many tokens were drawn for this row's request before.
        masks: for each row the ids that must not be chosen, each in [0, n_vocab), or None; None: nobody has any.
        biases: for each row what is added to its logits, or None.
        pasts: for each row what its penalties look at; None for a row without penalties.

    Returns:
        (rows,) token ids in [0, n_vocab); ``NO_TOKEN`` for a row without a distribution.  Among
        equal logits the lower id counts as the more likely one.
    """
    logits = _edited(logits, params, masks, biases, pasts)
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
    logits: Floats,
    params: SamplingParams,
    mask: Mask = None,
    bias: Bias | None = None,
    past: Past | None = None,
) -> tuple[Ints, Doubles]:
    """What ``sample`` draws from in one row, by the code that it uses itself.

    Args:
        logits: (n_vocab,); overwritten as by ``sample``.
        params: must not be greedy.

    Returns:
        token ids and their probabilities, most likely first; none is 0 and they sum up to 1.  Both
        are empty where ``sample`` returns ``NO_TOKEN``.
    """
    rows = _edited(logits[np.newaxis], [params], [mask], [bias], [past])
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


def _edited(
    logits: Floats,
    params: Sequence[SamplingParams],
    masks: Sequence[Mask] | None,
    biases: Sequence[Bias | None] | None,
    pasts: Sequence[Past | None] | None,
) -> Floats:
    forbids, adds, penalises = (
        given is not None and any(one is not None for one in given) for given in (masks, biases, pasts)
    )
    if not (forbids or adds or penalises):
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    if adds and biases is not None:
        edits.add(logits, biases)
    if penalises and pasts is not None:
        edits.penalise(logits, params, pasts)
    if forbids and masks is not None:  # last: whatever was added to it, and were it NaN, it is out
        edits.forbid(logits, masks)
    return logits


def _unfiltered(params: SamplingParams, n_vocab: int) -> bool:
    return params.top_p == 1 and params.min_p == 0 and not 0 < params.top_k < n_vocab


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


def _filtered(logits: Floats, best: Floats, params: Sequence[SamplingParams]) -> list[tuple[int, Ints, Doubles]]:
    """What the filters leave of each row: its number, ids, and their weights summed from the left.

    Which of the two ways a row takes depends on nothing but the row.
    """
    n_vocab = logits.shape[1]
    temperatures = np.array([p.temperature for p in params])
    top_k = np.array([p.top_k if p.top_k < n_vocab else 0 for p in params])
    least = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    found: list[tuple[int, Ints, Doubles]] = []

    by_itself = (top_k > SORTED_TOP_K).tolist()
    totals = np.full(len(params), np.inf)
    of_all = [row for row, p in enumerate(params) if top_k[row] == 0 and p.top_p < 1]
    if of_all:
        weights = weights_of(logits[of_all], best[of_all], temperatures[of_all])
        # Row by row: a sum over a matrix may add a row's numbers in an order that depends on the others.
        totals[of_all] = [row.sum(dtype=np.float64) for row in weights]

    wanted = np.where(top_k == 0, min(FIRST_GUESS, n_vocab), np.minimum(top_k, SORTED_TOP_K))
    ids, logs, mass = most_likely(logits, best, temperatures, wanted)
    for row, p in enumerate(params):
        sums, scaled = mass[row, : wanted[row]], logs[row, : wanted[row]]
        goal = p.top_p * (totals[row] if top_k[row] == 0 else sums[-1])
        is_cut = sums[-1] >= goal or scaled[-1] < least[row]
        if by_itself[row] or (top_k[row] == 0 and not is_cut and wanted[row] < n_vocab):
            masses = nucleus(logits[row], float(best[row]), p.temperature, int(top_k[row]), p.top_p, least[row])
            found.append((row, np.arange(n_vocab), masses))
            continue
        kept = len(sums) if p.top_p == 1 else min(int(sums.searchsorted(goal)) + 1, len(sums))
        if p.min_p:
            kept = min(kept, int((scaled >= least[row]).sum()))
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
