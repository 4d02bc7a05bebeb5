"""Filler rows: they make the sequence ids of a call consecutive.

With per-sequence KV, llama.cpp computes the rows of a call together only if their sequence ids are consecutive, and
otherwise reads all weights once for each run of ids.  So a call of decodes gets one more row for each id that is missing
between its own: any token at the end of that sequence, without logits.  The engine removes the token right after the
call, so the sequence keeps what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final

import llama_abi
from uma_trio.engine_link.messages import StepInput

FILLER_TOKEN: Final = 0
"""Every vocabulary has it.  Nothing attends to it but its own row, whose result nobody reads."""


DIVIDED_CELLS: Final = 256
"""llama.cpp computes with cells in steps of 256; from two steps on, threads divide those of a row that is alone."""


def is_decode(step_input: StepInput) -> bool:
    """One token whose logits are wanted."""
    return len(step_input.tokens) == 1 == len(step_input.samples)


def missing_ids(inputs: Sequence[StepInput]) -> list[int]:
    """Sequence ids that are missing between those of a call, ascending.

    Empty unless each input is one decode and their ids ascend.
    """
    if len(inputs) < 2 or inputs[-1].seq_id - inputs[0].seq_id < len(inputs) or not all(map(is_decode, inputs)):
        return []
    missing: list[int] = []
    for before, following in pairwise(inputs):
        if following.seq_id <= before.seq_id:
            return []
        missing += range(before.seq_id + 1, following.seq_id)
    return missing


def company(inputs: Sequence[StepInput], n_seq_max: int) -> list[int]:
    """A sequence id next to that of a decode which is alone, and has so many cells that its threads would divide them."""
    if len(inputs) != 1 or n_seq_max < 2 or not is_decode(inputs[0]) or inputs[0].position < DIVIDED_CELLS:
        return []
    seq_id = inputs[0].seq_id
    return [seq_id - 1 if seq_id else 1]


def add_filled(batch: llama_abi.Batch, inputs: Sequence[StepInput], fillers: Mapping[int, int]) -> Sequence[StepInput]:
    """Append the decodes of a call and its filler rows to ``batch``; returns all of them, by sequence id.

    Args:
        fillers: positions by sequence id.
    """
    added = [StepInput(seq_id, position, [FILLER_TOKEN]) for seq_id, position in fillers.items()]
    rows = sorted([*inputs, *added], key=attrgetter("seq_id"))
    add_decodes(batch, rows)
    return rows


def add_decodes(batch: llama_abi.Batch, inputs: Sequence[StepInput]) -> None:
    """Append inputs of one token each to ``batch``; those that sample get logits."""
    batch.add_decodes(
        [step_input.tokens[0] for step_input in inputs],
        positions=[step_input.position for step_input in inputs],
        seqs=[step_input.seq_id for step_input in inputs],
        logits=[bool(step_input.samples) for step_input in inputs],
    )
