"""Operations on single logits, before any filter: bans, biases and penalties.

Each operation names a few tokens of a row.  The tokens of all rows are concatenated, and a few numpy calls update
them, so the cost of a step depends on how many logits change and not on the size of the vocabulary.  Rows stay
independent: the result for a row does not depend on the other rows.

The order and the arithmetic are those of llama.cpp's samplers ``logit-bias`` and ``penalties``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.sampling import Bias, Floats, Past, SamplingParams
from uma_trio.engine_link.tokens import TokenIds

Ints = npt.NDArray[np.int64]


def apply_bans(logits: Floats, banned: Sequence[npt.NDArray[np.integer] | None]) -> None:
    """Set the logits of banned tokens to -inf."""
    logits[_indices([(row, ids) for row, ids in enumerate(banned) if ids is not None])] = -np.inf


def apply_biases(logits: Floats, biases: Sequence[Bias | None]) -> None:
    """Add each row's bias."""
    given = [(row, bias) for row, bias in enumerate(biases) if bias is not None]
    logits[_indices([(row, bias.ids) for row, bias in given])] += np.concatenate([bias.values for _, bias in given])


def apply_penalties(logits: Floats, params: Sequence[SamplingParams], pasts: Sequence[Past | None]) -> None:
    """Apply the repetition penalty, then the frequency and presence penalties."""
    given = [(row, past) for row, past in enumerate(pasts) if past is not None]
    windows = [
        (row, past.tokens[-params[row].repetition_window :]) for row, past in given if params[row].repetition_window
    ]
    if windows:
        _apply_repetition_penalty(logits, params, windows)
    answers = [(row, past.tokens[past.n_prompt :]) for row, past in given if params[row].counts_answer]
    if answers:
        _apply_count_penalties(logits, params, answers)


def _apply_repetition_penalty(
    logits: Floats, params: Sequence[SamplingParams], windows: Sequence[tuple[int, TokenIds]]
) -> None:
    indices = rows, _ = _indices(windows)
    penalties = _float32([p.repetition_penalty for p in params])[rows]
    values = logits[indices]
    with np.errstate(over="ignore"):
        # Dividing a negative logit would make the token more likely.  A token that occurs twice in the window is
        # written twice, with the same value.
        logits[indices] = np.where(values <= 0, values * penalties, values / penalties)


def _apply_count_penalties(
    logits: Floats, params: Sequence[SamplingParams], answers: Sequence[tuple[int, TokenIds]]
) -> None:
    n_vocab = logits.shape[1]
    rows, ids = _indices(answers)
    keys = rows * n_vocab + ids
    if not len(keys):
        return
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(first, append=len(keys)).astype(np.float32)
    rows, ids = np.divmod(keys[first], n_vocab)
    frequency = _float32([p.frequency_penalty for p in params])[rows]
    presence = _float32([p.presence_penalty for p in params])[rows]
    logits[rows, ids] -= counts * frequency + presence


def _float32(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


def _indices(tokens: Sequence[tuple[int, npt.NDArray[np.integer]]]) -> tuple[Ints, Ints]:
    """Concatenate the (row, ids) pairs, at least one, into an index array of rows and one of ids."""
    ids = [ids for _, ids in tokens]
    rows = np.repeat(np.array([row for row, _ in tokens], np.int64), [len(part) for part in ids])
    return rows, np.concatenate(ids).astype(np.int64)
