"""Changes of single logits, before any filter: masks, biases, penalties.

All of them name a few tokens of a row, so that a tick costs what it changes, however large the vocabulary: all rows'
tokens are put together, and a few calls of numpy do the rest.  Each changed number depends on its own row alone.

Source: llama.cpp's samplers ``logit-bias`` and ``penalties``, in their order and with their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.sampling.params import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class Bias:
    """What is added to logits.  Never changed."""

    ids: Tokens
    """(n,), each in [0, n_vocab) and none twice."""
    values: Floats
    """(n,)"""


@attrs.define(eq=False)
class Past:
    """What stands before a draw, as far as penalties look at it.  Never changed, but see ``Transcript``."""

    tokens: Tokens
    """(n,): the end of the prompt, then all of the answer.  Each in [0, n_vocab)."""
    n_prompt: int
    """Of them, those of the prompt."""


class Transcript:
    """The past of one request, as it grows.

    A ``Past`` is a view of it and stays what it is, since what was written is never changed.  Tokens that are not
    known for sure, which a view can have at its end, are written before it is read and may be overwritten
    when it no longer is: guesses, and the one that a step under way is about to sample.

    Args:
        prompt: (n,).
        params: who looks at how much of it.
        most: tokens that can follow the prompt.
    """

    def __init__(self, prompt: Tokens, params: SamplingParams, most: int) -> None:
        self._n_prompt = min(len(prompt), params.window)
        self._tokens = np.zeros(self._n_prompt + most, np.int32)
        self._tokens[: self._n_prompt] = prompt[len(prompt) - self._n_prompt :]

    def write(self, at: int, tokens: Sequence[int]) -> None:
        """``tokens`` are the answer's from number ``at`` on, or are guessed to be."""
        at += self._n_prompt
        self._tokens[at : at + len(tokens)] = tokens

    def past(self, n: int) -> Past:
        """What stands before the draw of the answer's token number ``n``, counted from 0."""
        return Past(self._tokens[: self._n_prompt + n], self._n_prompt)


def penalises(params: SamplingParams) -> bool:
    """Whether what stands before a draw changes its logits."""
    return params.window > 0 or params.counts


def forbid(logits: Floats, masks: Sequence[npt.NDArray[np.integer] | None]) -> None:
    """Set what must not be chosen to -inf."""
    logits[_places([(row, mask) for row, mask in enumerate(masks) if mask is not None])] = -np.inf


def add(logits: Floats, biases: Sequence[Bias | None]) -> None:
    """Add each row's bias."""
    some = [(row, bias) for row, bias in enumerate(biases) if bias is not None]
    logits[_places([(row, bias.ids) for row, bias in some])] += np.concatenate([bias.values for _, bias in some])


def penalise(logits: Floats, params: Sequence[SamplingParams], pasts: Sequence[Past | None]) -> None:
    """Make tokens that came before less likely: the repetition penalty first, then the other two."""
    some = [(row, past) for row, past in enumerate(pasts) if past is not None]
    repeats = [(row, past.tokens[-params[row].window :]) for row, past in some if params[row].window]
    if repeats:
        _penalise_repetition(logits, params, repeats)
    counted = [(row, past.tokens[past.n_prompt :]) for row, past in some if params[row].counts]
    if counted:
        _penalise_counts(logits, params, counted)


def _penalise_repetition(
    logits: Floats, params: Sequence[SamplingParams], windows: Sequence[tuple[int, Tokens]]
) -> None:
    places = rows, _ = _places(windows)
    penalties = _of_rows([p.repetition_penalty for p in params])[rows]
    values = logits[places]
    with np.errstate(over="ignore"):
        # Dividing a negative one would make the token more likely.  A token that stands there twice gets the same
        # value twice.
        logits[places] = np.where(values <= 0, values * penalties, values / penalties)


def _penalise_counts(logits: Floats, params: Sequence[SamplingParams], answers: Sequence[tuple[int, Tokens]]) -> None:
    n_vocab = logits.shape[1]
    rows, ids = _places(answers)
    keys = rows * n_vocab + ids
    if not len(keys):
        return
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(first, append=len(keys)).astype(np.float32)
    rows, ids = np.divmod(keys[first], n_vocab)
    frequency = _of_rows([p.frequency_penalty for p in params])[rows]
    presence = _of_rows([p.presence_penalty for p in params])[rows]
    logits[rows, ids] -= counts * frequency + presence


def _of_rows(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


def _places(named: Sequence[tuple[int, npt.NDArray[np.integer]]]) -> tuple[Ints, Ints]:
    """Rows and ids of all that is ``named``, which is not empty, one after another."""
    ids = [ids for _, ids in named]
    rows = np.repeat(np.array([row for row, _ in named], np.int64), [len(part) for part in ids])
    return rows, np.concatenate(ids).astype(np.int64)
