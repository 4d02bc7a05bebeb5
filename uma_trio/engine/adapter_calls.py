"""Calls whose rows have different LoRA adapters.

The scales of the adapters lie in the order of the rows.  So a call must be computed in one pass, and its rows in the order of
the batch.  llama.cpp does that with unified KV, up to ``n_ubatch`` rows; and otherwise with one token each of sequences whose
ids rise by one.  All other calls are split in such a way that llama.cpp computes the same passes as without adapters, or nearly.

Source: llama-batch.cpp, ``split_simple`` and ``split_equal``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from uma_trio.engine.fillers import is_decode
from uma_trio.engine.messages import StepInput


def calls_of_adapters(
    inputs: Sequence[StepInput], n_ubatch: int | None, can_fill: Callable[[Sequence[StepInput]], object]
) -> Sequence[Sequence[StepInput]]:
    """The calls that compute ``inputs``, each with the same adapters in all rows or in one pass.

    Args:
        n_ubatch: rows of a pass, if llama.cpp computes the rows of a batch in order; otherwise ``None``.
        can_fill: whether filler rows will make the sequence ids of these decodes consecutive.
    """
    if len({each.adapters for each in inputs}) < 2:
        return (inputs,)
    if n_ubatch is not None:
        return passes(inputs, n_ubatch)
    if all(map(is_decode, inputs)) and (_has_consecutive_ids(inputs) or can_fill(inputs)):
        return (inputs,)
    return [[*of_set] for _, of_set in groupby(inputs, attrgetter("adapters"))]


def passes(inputs: Sequence[StepInput], n_rows: int) -> list[list[StepInput]]:
    """Split ``inputs`` after every ``n_rows`` tokens.  What is sampled stays together, so such a pass may have fewer."""
    found: list[list[StepInput]] = [[]]
    left = n_rows
    for each in inputs:
        rest = each
        while len(rest.tokens) > left:
            n = min(left, len(rest.tokens) - len(rest.samples))
            if n > 0:
                found[-1].append(msgspec.structs.replace(rest, tokens=rest.tokens[:n], samples=()))
                rest = msgspec.structs.replace(rest, position=rest.position + n, tokens=rest.tokens[n:])
            if found[-1]:
                found.append([])
            if len(rest.samples) > n_rows:
                break  # nothing can be split off
            left = n_rows
        found[-1].append(rest)
        left -= len(rest.tokens)
    return found


def _has_consecutive_ids(inputs: Sequence[StepInput]) -> bool:
    return all(each.seq_id == inputs[0].seq_id + n for n, each in enumerate(inputs))
