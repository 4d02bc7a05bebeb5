"""The tokens of one tick, for all rows at once.

    masks -> (penalties) -> temperature -> top-k -> top-p -> draw

Rows do not influence each other: a row gets the same token alone and in any batch.  What is costly
is touching every logit, so that happens in a few passes over the whole matrix; all that follows
works on the few candidates that are left.

Source: starling.md, "Sampler Pipeline"; llama.cpp's samplers in the same order are the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.rng import uniforms

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NO_TOKEN = -1
"""For a row whose logits give no distribution: a NaN or +inf among them, or nothing above -inf."""

_FIRST_GUESS = 256
"""Candidates to look at for top-p without top-k; most often enough, eight times more if not."""

_GROUP = 64
"""Logits whose maximum stands for them while candidates are searched."""

_NARROW = 1024
"""Rows with more candidates are sorted one by one, lest one wide row widen all."""

_LOWEST = np.finfo(np.float32).min


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


def distribution(
    logits: Floats, params: SamplingParams, mask: npt.NDArray[np.integer] | None = None
) -> tuple[Ints, Doubles]:
    """What ``sample`` draws from in one row: token ids and their probabilities, most likely first.

    Args:
        logits: (n_vocab,).
        params: must not be greedy.

    Returns:
        ids and probabilities of the same length, which sum up to 1; both empty where ``sample``
        returns ``NO_TOKEN``.
    """
    rows = _masked(logits[np.newaxis], [mask])
    best = rows.max(axis=1)
    if not np.isfinite(best[0]):
        return np.empty(0, np.int64), np.empty(0)
    if params.top_k == 0 and params.top_p == 1:
        (found,) = _sorted_candidates(rows, best, np.array([params.temperature]), np.full(1, rows.shape[1]))
        kept = found.ids.shape[1]
    else:
        (found,) = _filtered(rows, best, [params])
        kept = found.kept[0]
    mass = found.mass[0, :kept]
    return found.ids[0, :kept], np.diff(mass, prepend=0.0) / mass[-1]


def _masked(logits: Floats, masks: Sequence[npt.NDArray[np.integer] | None] | None) -> Floats:
    if masks is None or all(mask is None for mask in masks):
        return logits
    if not logits.flags.writeable:
        logits = logits.copy()
    for row, mask in enumerate(masks):
        if mask is not None:
            logits[row, mask] = -np.inf
    return logits


def _draw(logits: Floats, best: Floats, params: Sequence[SamplingParams], chances: Doubles) -> Ints:
    tokens = np.empty(len(logits), np.int64)
    whole = [row for row, p in enumerate(params) if p.top_k == 0 and p.top_p == 1]
    if whole:
        temperatures = np.array([params[row].temperature for row in whole])
        tokens[whole] = _draw_from_all(logits[whole], best[whole], temperatures, chances[whole])
    some = [row for row, p in enumerate(params) if p.top_k != 0 or p.top_p != 1]
    if some:
        if whole:
            logits, best = logits[some], best[some]
        rows = np.array(some)
        for found in _filtered(logits, best, [params[row] for row in some]):
            at = rows[found.rows]
            tokens[at] = found.draw(chances[at])
    return tokens


@attrs.frozen(eq=False)
class Candidates:
    """The tokens of some rows that may be drawn, the most likely first."""

    rows: Ints
    """(n,) which rows these are."""
    ids: Ints
    """(n, width); rows with fewer candidates end in ids of no meaning, without weight."""
    mass: Doubles
    """(n, width) the weights ``exp((logit - best) / temperature)``, summed from the left."""
    whole: npt.NDArray[np.bool_]
    """(n,) whether these are all tokens of the row that have a logit above -inf."""
    kept: Ints = attrs.field(factory=lambda: np.empty(0, np.int64))
    """(n,) how many of the candidates the filters leave."""

    def draw(self, chances: Doubles) -> Ints:
        """One id a row; ``chances`` (n,) in [0, 1)."""
        row = np.arange(len(self.rows))
        aim = chances * self.mass[row, self.kept - 1]
        # The first candidate whose sum exceeds the aim; one without weight never is the first.
        place = (self.mass <= aim[:, np.newaxis]).sum(axis=1)
        chosen: Ints = self.ids[row, np.minimum(place, self.kept - 1)]
        return chosen


def _filtered(logits: Floats, best: Floats, params: Sequence[SamplingParams]) -> Iterator[Candidates]:
    """What top-k and top-p leave of each row; each row is in one of the results."""
    n_vocab = logits.shape[1]
    temperatures = np.array([p.temperature for p in params])
    top_k = np.array([min(p.top_k, n_vocab) for p in params])
    top_p = np.array([p.top_p for p in params])
    totals = np.zeros(len(params))
    unlimited = np.flatnonzero(top_k == 0)
    if len(unlimited):
        totals[unlimited] = _weights(logits[unlimited], best[unlimited], temperatures[unlimited]).sum(
            axis=1, dtype=np.float64
        )
    rows = np.arange(len(params))
    wanted = np.where(top_k == 0, min(_FIRST_GUESS, n_vocab), top_k)
    while len(rows):
        here = logits if len(rows) == len(logits) else logits[rows]
        short: list[int] = []
        for found in _sorted_candidates(here, best[rows], temperatures[rows], wanted[rows]):
            found = attrs.evolve(found, rows=rows[found.rows])
            k, p, total = top_k[found.rows], top_p[found.rows], totals[found.rows]
            index = np.arange(len(found.rows))
            limit = np.where(k == 0, found.ids.shape[1], np.minimum(k, found.ids.shape[1]))
            total = np.where(k == 0, total, found.mass[index, limit - 1])
            reached = (found.mass < (p * total)[:, np.newaxis]).sum(axis=1) + 1
            ready = (k != 0) | found.whole | (reached <= found.ids.shape[1])
            kept = np.where(p == 1, limit, np.minimum(reached, limit))
            short += found.rows[~ready].tolist()
            yield Candidates(
                found.rows[ready], found.ids[ready], found.mass[ready], found.whole[ready], kept[ready]
            )
        rows = np.array(sorted(short), np.int64)
        wanted = np.minimum(wanted * 8, n_vocab)


def _sorted_candidates(
    logits: Floats, best: Floats, temperatures: Doubles, wanted: Ints
) -> Iterator[Candidates]:
    """At least the ``wanted`` most likely tokens of each row, sorted, with their masses."""
    n_vocab = logits.shape[1]
    at_least = _reached_by(logits, wanted)
    flat = np.flatnonzero(logits >= at_least[:, np.newaxis])
    row = flat // n_vocab
    count = np.bincount(row, minlength=len(logits))
    end = np.cumsum(count)
    keys = _sort_keys(logits.ravel()[flat], flat - row * n_vocab)
    whole = at_least == _LOWEST

    def finish(rows: Ints, keys: npt.NDArray[np.uint64]) -> Candidates:
        keys.sort(axis=1)
        ids, values = _from_sort_keys(keys)
        with np.errstate(over="ignore"):
            scaled = (values.astype(np.float64) - best[rows, np.newaxis]) / temperatures[rows, np.newaxis]
        return Candidates(rows, ids, np.exp(scaled).cumsum(axis=1), whole[rows])

    wide = count > _NARROW
    for r in np.flatnonzero(wide):
        yield finish(np.array([r]), keys[np.newaxis, end[r] - count[r] : end[r]])
    rows = np.flatnonzero(~wide)
    if len(rows):
        padded = np.full((len(logits), count[rows].max()), _PADDING)
        column = np.arange(len(flat)) - (end - count)[row]
        fits = ~wide[row]
        padded[row[fits], column[fits]] = keys[fits]
        yield finish(rows, padded[rows])


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


_PADDING = np.uint64(0xFF80_0000_0000_0000)
"""The sort key of id 0 with logit -inf."""


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


def _weights(logits: Floats, best: Floats, temperatures: Doubles) -> Floats:
    """``exp((logit - best) / temperature)``, in [0, 1], of all logits."""
    weights: Floats = logits - best[:, np.newaxis]
    # Below this any other logit than the best weighs nothing, and 0 / 0 would weigh NaN.
    divisors = np.maximum(temperatures, np.finfo(np.float32).tiny).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        weights /= divisors[:, np.newaxis]
        return np.exp(weights, out=weights)


def _draw_from_all(logits: Floats, best: Floats, temperatures: Doubles, chances: Doubles) -> Ints:
    """Draw without a filter: first a group of tokens by its weight, then a token inside it."""
    rows, n_vocab = logits.shape
    size = min(_GROUP, n_vocab)
    n_groups = -(-n_vocab // size)
    weights = np.zeros((rows, size * n_groups), np.float32)
    weights[:, :n_vocab] = _weights(logits, best, temperatures)
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
