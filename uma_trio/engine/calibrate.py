"""What ticks cost on this machine, measured before the first client waits for one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from uma_trio.engine.records import Draw, Engine, Feed, Step
from uma_trio.sampling import SamplingParams
from uma_trio.scheduling.cost import CostModel, Work

BUDGET_S: Final = 0.5
"""After so long no further step is begun: a rough guess of a large model is better than a long start."""

SHAPES: Final = (((0, 16),), ((1, 64),), ((2, 16), (3, 16)), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)),
                 ((0, 1), (1, 1), (2, 1), (3, 32)), ((0, 128),), ((0, 1), (1, 1)), ((1, 1),),
                 ((0, 1), (1, 1), (2, 1), (3, 64)))  # fmt: skip
"""(sequence, tokens) of each step.  The first one is only for warming up."""

NEEDED_CELLS: Final = 512


def calibrate(engine: Engine, *, budget_s: float = BUDGET_S) -> CostModel:
    """A cost model that has seen some small steps of ``engine``, whose cache is empty before and after.

    Blocks for about ``budget_s``.  Where sequences or cells are too few for it, the model stays a guess.

    Raises:
        EngineError: a step failed.
    """
    cost = CostModel()
    facts = engine.facts
    sequences = {seq_id for shape in SHAPES for seq_id, _ in shape}
    if len(sequences) > facts.n_seq_max or min(facts.n_ctx, len(sequences) * facts.n_ctx_seq) < NEEDED_CELLS:
        return cost
    ends = time.perf_counter() + budget_s
    for warm, (step, work) in enumerate(_steps(facts.n_vocab, facts.n_batch)):
        result = engine.step(step)
        if warm:
            cost = cost.observed(work, result.decode_ms + result.sample_ms)
        if time.perf_counter() > ends:
            break
    engine.step(Step(removals=tuple(sorted(sequences))))
    return cost


def _steps(n_vocab: int, n_batch: int) -> Iterator[tuple[Step, Work]]:
    """Those of ``SHAPES`` that fit into a batch."""
    held = dict.fromkeys({seq_id for shape in SHAPES for seq_id, _ in shape}, 0)
    draw = Draw(SamplingParams(), 0)
    for shape in SHAPES:
        if sum(n for _, n in shape) > n_batch:
            continue
        feeds = []
        context = sum(held[seq_id] for seq_id, _ in shape)
        for seq_id, n in shape:
            tokens = (np.arange(held[seq_id], held[seq_id] + n) % n_vocab).astype(np.int32)
            feeds.append(Feed(seq_id, held[seq_id], tokens, draw))
            held[seq_id] += n
        sizes = [n for _, n in shape]
        prompt = sum(n for n in sizes if n > 1)
        yield Step(feeds=tuple(feeds)), Work(prompt, sizes.count(1), context)
