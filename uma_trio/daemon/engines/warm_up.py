"""The first step of each shape, before a client waits for it.

Vulkan and Metal compile a shader when a call first needs it, which takes up to a second.  Which shaders a call needs depends on its
rows, on the rows that have logits, and on the context: see docs/GPU.md, "Shaders".  So a start computes a call of
each class once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from uma_trio.daemon.engines.calibrate import Trial
from uma_trio.daemon.engines.link import EngineLink
from uma_trio.engine_link.row_counts import row_counts

log = structlog.get_logger("uma_trio.engine")

MAX_OUTPUTS: Final = 128
"""Rows of a call whose logits are all wanted.  More have the shaders of these, and each one takes memory for its logits."""

N_PASSES: Final = 2
LONG_CONTEXT: Final = 1024
"""The second pass is behind so many tokens, as far as there is room: attention has other shaders from there on."""


async def warm_up(
    link: EngineLink,
    on_progress: Callable[[float], None] = lambda share: None,
    should_continue: Callable[[], bool] = lambda: True,
) -> bool:
    """Have a device compile what it will need, if it compiles when that is first used.  The KV cache is empty before and after.

    Args:
        on_progress: called with the share that is done, in [0, 1].
        should_continue: asked before each number of rows; False gives up.

    Returns:
        Whether it was not given up.

    Raises:
        EngineError, EngineDied: a call failed.
    """
    info = link.info
    if not info.compiles_shaders:
        return should_continue()
    began = time.perf_counter()
    counts = row_counts(info.n_batch)
    with_adapters = [(), ((0, 1.0),)] if info.adapters else [()]
    n_done, n_planned = 0, N_PASSES * len(counts) * len(with_adapters)
    log.info("compiling shaders", why="the first start with a driver and a model takes longest")
    for adapters in with_adapters:
        trial = Trial(link, adapters)
        for _ in range(N_PASSES):
            for rows in counts:
                if not should_continue():
                    return False
                await trial.append(0, rows)
                await trial.make_room(0, rows if rows > info.n_seq_max else 1)
                if rows <= MAX_OUTPUTS and trial.can_decode(rows):
                    await trial.decode_ms(rows)
                n_done += 1
                on_progress(n_done / n_planned)
            await trial.extend(0, LONG_CONTEXT)
        await trial.clear()
    log.info("the shaders are compiled", seconds=round(time.perf_counter() - began, 1))
    return True
