"""Which rows with different LoRA adapters can be in one call.

llama.cpp divides a call into passes (its ubatches), and may reorder the rows.  The scales of the adapters are applied to the
rows of a pass in the order of the call.  So a call with different adapters must be one pass, with its rows in their order:

============================================  ==================================================================
the call has                                  rows with different adapters
============================================  ==================================================================
unified KV, no recurrent layers               are together, up to ``n_ubatch`` rows
one decode each of consecutive sequence ids   are together; filler rows can make the ids consecutive
anything else                                 are in different calls: a new one where the adapters change
============================================  ==================================================================

Splitting costs little: llama.cpp would compute about the same passes within one call.

Source: llama-batch.cpp, ``split_simple`` and ``split_equal``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from uma_trio.engine.fillers import is_decode
from uma_trio.engine_link.messages import StepInput


def split_by_adapters(
    inputs: Sequence[StepInput], n_ubatch: int | None, can_fill: Callable[[Sequence[StepInput]], object]
) -> Sequence[Sequence[StepInput]]:
    """Split one call into calls that each have the same adapters in all rows, or are computed in one pass.

    Args:
        inputs: the call, in batch order.
        n_ubatch: rows of a pass, if llama.cpp computes the rows of a call in their order; otherwise ``None``.
        can_fill: returns whether filler rows will make the sequence ids of these decodes consecutive.

    Returns:
        Calls with the same tokens in the same order.
    """
    if len({step_input.adapters for step_input in inputs}) < 2:
        return (inputs,)
    if n_ubatch is not None:
        return split_into_passes(inputs, n_ubatch)
    if all(map(is_decode, inputs)) and (_has_consecutive_ids(inputs) or can_fill(inputs)):
        return (inputs,)
    return [[*group] for _, group in groupby(inputs, attrgetter("adapters"))]


def split_into_passes(inputs: Sequence[StepInput], n_rows: int) -> list[list[StepInput]]:
    """Split a call after every ``n_rows`` tokens.

    The tokens of an input that are sampled from stay in one pass, since they are verified together.  So the pass before
    may have fewer tokens.  If they are more than ``n_rows``, they are a longer pass of their own.
    """
    passes: list[list[StepInput]] = [[]]
    left = n_rows
    for step_input in inputs:
        rest = step_input
        while len(rest.tokens) > left:
            n = min(left, len(rest.tokens) - len(rest.samples))
            if n > 0:
                passes[-1].append(msgspec.structs.replace(rest, tokens=rest.tokens[:n], samples=()))
                rest = msgspec.structs.replace(rest, position=rest.position + n, tokens=rest.tokens[n:])
            if passes[-1]:
                passes.append([])
            left = n_rows
            if len(rest.tokens) == len(rest.samples) > n_rows:
                break  # nothing more can be split off
        passes[-1].append(rest)
        left -= len(rest.tokens)
    return passes


def _has_consecutive_ids(inputs: Sequence[StepInput]) -> bool:
    return all(step_input.seq_id == inputs[0].seq_id + n for n, step_input in enumerate(inputs))
