"""Decoding: batched = alone, logits that pass, sequences, states, and what is refused."""

from __future__ import annotations

import numpy as np

import llama_abi
from llama_abi import Batch, Context

PROMPT = [464, 3290, 318, 257, 845, 922, 5044, 13]


def decode(context: Context, tokens: list[int], *, pos: int = 0, seq: int = 0) -> np.ndarray:
    """Feed ``tokens`` and copy the logits after the last."""
    batch = Batch(64)
    batch.add(tokens, pos=pos, seq=seq)
    assert context.decode(batch) == llama_abi.OK
    return context.logits(1).array[0].copy()


def test_options_reach_the_context(context: Context) -> None:
    assert (context.n_ctx, context.n_ctx_seq, context.n_seq_max) == (1024, 256, 4)
    assert (context.n_batch, context.n_ubatch) == (64, 32)
