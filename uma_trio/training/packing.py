"""Pack samples into rows of tokens, and plan the rows of each training step."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.training.bpe import Pair, Tokenizer
from uma_trio.training.chat import CONTROLS, tokens_of
from uma_trio.training.corpus import samples_of_row

Ids = npt.NDArray[np.uint16]


@attrs.frozen
class Batch:
    """The input of one training step."""

    ids: Ids
    """Shape ``[rows, length + 1]``.  Inputs are all columns except the last, targets all except the first."""
    learned: npt.NDArray[np.int32]
    """Indices into the flattened targets of the tokens in the loss: answers and their end tokens."""


@attrs.frozen
class Step:
    """The rows of one step: ``rows`` rows from index ``first``, each of ``length`` tokens."""

    kind: str
    first: int
    rows: int
    length: int


LENGTHS = {"short": 512, "medium": 2048, "long": 8192}
_PATTERN = (
    "short",
    "short",
    "medium",
    "short",
    "long",
    "short",
    "medium",
    "short",
    "short",
    "long",
    "short",
    "medium",
    "short",
)


def planned(steps: int, tokens: int, longest: int) -> Iterator[Step]:
    """All steps in order, each of ``tokens`` tokens: short rows first, then all three kinds."""
    used = dict.fromkeys(LENGTHS, 0)
    for at in range(steps):
        kind = "short" if at < steps // 10 else _PATTERN[at % len(_PATTERN)]
        length = min(LENGTHS[kind], longest)
        rows = max(1, tokens // length)
        yield Step(kind, used[kind], rows, length)
        used[kind] += rows


def filled(step: Step, tokenizer: Tokenizer) -> Batch:
    """Fill the rows of a step.  A sample that does not fit is cut off at the end of the row."""
    ids = np.zeros((step.rows, step.length + 1), np.uint16)
    said = np.zeros((step.rows, step.length + 1), np.bool_)
    for row in range(step.rows):
        at = 0
        for sample in samples_of_row(step.kind, step.first + row):
            more, learned = tokens_of(sample, tokenizer)
            room = step.length + 1 - at
            ids[row, at : at + len(more)] = more[:room]
            said[row, at : at + len(more)] = learned[:room]
            at += len(more)
            if at > step.length:
                break
    return Batch(ids, np.flatnonzero(said[:, 1:]).astype(np.int32))


def batches(steps: Iterator[Step], tokenizer: Tokenizer, workers: int) -> Iterator[Batch]:
    """The batches of ``steps`` in order, built by worker processes."""
    with multiprocessing.get_context("spawn").Pool(workers, _begin, (tokenizer.merges,)) as pool:
        yield from _ahead(pool, steps, 4 * workers)


def _ahead(pool: Pool, steps: Iterator[Step], most: int) -> Iterator[Batch]:
    waiting = []
    for step in steps:
        waiting.append(pool.apply_async(_work, (step,)))
        if len(waiting) >= most:
            yield waiting.pop(0).get()
    while waiting:
        yield waiting.pop(0).get()


_tokenizer: Tokenizer


def _begin(merges: tuple[Pair, ...]) -> None:
    global _tokenizer
    _tokenizer = Tokenizer(CONTROLS, merges)


def _work(step: Step) -> Batch:
    return filled(step, _tokenizer)
