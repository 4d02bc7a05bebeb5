"""What ticks cost on this machine, measured before the first client waits for one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from uma_trio.engine.records import Draw, Engine, Feed, ModelFacts, Step
from uma_trio.sampling import SamplingParams
from uma_trio.scheduling.cost import CostModel, Work

BUDGET_S: Final = 0.5
"""After so long no further step is begun: a rough guess of a large model is better than a long start."""

SHAPES: Final = (((0, 16),), ((1, 64),), ((2, 16), (3, 16)), ((0, 1),), ((0, 1), (1, 1), (2, 1), (3, 1)),
                 ((0, 1), (1, 1), (2, 1), (3, 32)), ((0, 128),), ((0, 1), (1, 1)), ((1, 1),),
                 ((0, 1), (1, 1), (2, 1), (3, 64)), ((1, 256),), ((1, 256),), ((0, 1), (1, 1)))  # fmt: skip
"""(sequence, tokens) of each step.  The first one is only for warming up; the last ones stand behind others, for
what a chunk takes also grows with what it reads."""


def calibrate(engine: Engine, *, budget_s: float = BUDGET_S) -> CostModel:
    """A cost model that has seen some small steps of ``engine``, whose cache is empty before and after.

    Blocks for about ``budget_s``.  Steps for which sequences, cells or the batch are too small are left out.

    Raises:
        EngineError: a step failed.
    """
    cost = CostModel()
    ends = time.perf_counter() + budget_s
    for warm, (step, work) in enumerate(_steps(engine.facts)):
        result = engine.step(step)
        if warm:
            cost = cost.observed(work, result.decode_ms + result.sample_ms)
        if time.perf_counter() > ends:
            break
    engine.step(Step(removals=tuple(engine.used_cells())))
    return cost


def _steps(facts: ModelFacts) -> Iterator[tuple[Step, Work]]:
    """Those of ``SHAPES`` for which there is room."""
    held: dict[int, int] = {}
    draw = Draw(SamplingParams(), 0)
    for shape in SHAPES:
        n = sum(n for _, n in shape)
        fits = all(seq_id < facts.n_seq_max and held.get(seq_id, 0) + n <= facts.n_ctx_seq for seq_id, n in shape)
        if not fits or n > facts.n_batch or sum(held.values()) + n > facts.n_ctx:
            continue
        feeds = []
        for seq_id, n in shape:
            pos = held.get(seq_id, 0)
            tokens = (np.arange(pos, pos + n) % facts.n_vocab).astype(np.int32)
            feeds.append(Feed(seq_id, pos, tokens, draw))
            held[seq_id] = pos + n
        yield Step(feeds=tuple(feeds)), _work(feeds)


def _work(feeds: list[Feed]) -> Work:
    decodes = [feed for feed in feeds if len(feed.tokens) == 1]
    prompts = [feed for feed in feeds if len(feed.tokens) > 1]
    n = sum(len(feed.tokens) for feed in prompts)
    before = sum(feed.pos * len(feed.tokens) for feed in prompts) / n if n else 0.0
    return Work(n, len(decodes), sum(feed.pos for feed in decodes), before)
