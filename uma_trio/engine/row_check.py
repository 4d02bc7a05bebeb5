"""Checks that a model computes a row in the same way whatever is computed next to it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine_link.messages import EngineError

ALONE: Final = 4
"""Rows that are computed one by one, to compare."""


def check_rows(context: llama_abi.Context, n_rows: int) -> None:
    """Compare the logits of rows alone, in a chunk, and next to another sequence, bit by bit; clears ``context``.

    Args:
        n_rows: rows in the chunk.

    Raises:
        EngineError: they differ.
    """
    n_rows = min(n_rows, context.n_batch // 2)
    tokens = np.random.default_rng(0).integers(0, context.model.vocab.n_tokens, n_rows).tolist()
    seq_ids = range(min(2, context.n_seq_max))
    together = _compute(context, dict.fromkeys(seq_ids, (0, tokens)))
    context.clear()
    _compute(context, {0: (0, tokens[:-ALONE])})
    alone = [_compute(context, {0: (at, tokens[at : at + 1])}) for at in range(n_rows - ALONE, n_rows)]
    context.clear()
    by_sequence = np.split(together, len(seq_ids))
    if not np.array_equal(by_sequence[0], by_sequence[-1]) or not np.array_equal(
        by_sequence[0][-ALONE:], np.concatenate(alone)
    ):
        raise EngineError(
            "reproducible is not possible with this model: llama.cpp computes a row of it otherwise next to others. It is "
            "with quantised weights, such as Q8_0"
        )


def _compute(context: llama_abi.Context, parts: dict[int, tuple[int, list[int]]]) -> npt.NDArray[np.float32]:
    """Logits of all rows of a call; by sequence id the position of its first row, and its tokens."""
    batch = llama_abi.Batch(context.n_batch)
    for seq_id, (position, tokens) in parts.items():
        batch.add(tokens, pos=position, seq=seq_id, logits="all")
    if code := context.decode(batch):
        raise EngineError(f"llama_decode returned {code} while the rows were compared")
    logits: Any = context.logits(sum(len(tokens) for _, tokens in parts.values())).array
    return np.array(logits)
