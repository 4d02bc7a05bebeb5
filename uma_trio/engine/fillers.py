"""Filler rows: they make the sequence ids of a call consecutive.

With per-sequence KV, llama.cpp computes the rows of a call together only if their sequence ids are consecutive, and
otherwise reads all weights once for each run of ids.  So a call of decodes gets one more row for each id that is missing
between its own: any token at the end of that sequence, without logits.  The engine removes the token right after the
call, so the sequence keeps what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import llama_abi
from uma_trio.engine.messages import StepInput

FILLER_TOKEN: Final = 0
"""Every vocabulary has it.  Nothing attends to it but its own row, whose result nobody reads."""


def is_decode(each: StepInput) -> bool:
    """One token whose logits are wanted."""
    return len(each.tokens) == 1 == len(each.samples)


def missing_ids(inputs: Sequence[StepInput]) -> list[int]:
    """Sequence ids that are missing between those of a call, ascending.

    Empty unless each input is one decode and their ids ascend.
    """
    if len(inputs) < 2 or inputs[-1].seq_id - inputs[0].seq_id < len(inputs) or not all(map(is_decode, inputs)):
        return []
    missing: list[int] = []
    for before, each in pairwise(inputs):
        if each.seq_id <= before.seq_id:
            return []
        missing += range(before.seq_id + 1, each.seq_id)
    return missing


def add_filled(batch: llama_abi.Batch, inputs: Sequence[StepInput], fillers: Mapping[int, int]) -> None:
    """Append the decodes of a call and its filler rows to ``batch``, in the order of their sequence ids.

    Args:
        fillers: positions by sequence id.
    """
    rows = [(each.seq_id, each.position, each.tokens[0], True) for each in inputs]
    rows += [(seq_id, position, FILLER_TOKEN, False) for seq_id, position in fillers.items()]
    seq_ids, positions, tokens, logits = zip(*sorted(rows), strict=True)
    batch.add_decodes(tokens, positions=positions, seqs=seq_ids, logits=logits)
