"""Compute threads, shared between the engines that have requests.

An engine with more threads than cores computes many times slower: its threads wait for each other at barriers.  So a share
goes down at once when another model gets a request, and goes up when the others have had none for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import trio

from uma_trio.daemon.registry.catalog import Catalog
from uma_trio.daemon.registry.model import Instance
from uma_trio.daemon.serving.scheduler import Scheduler

RISE_S: Final = 0.25
"""How long other models must have had no request before a model computes with more threads."""


async def share_threads(catalog: Catalog, total: int) -> None:
    """Share ``total`` threads between the loaded models, for ever."""
    while True:
        with trio.move_on_after(adjust([*catalog.instances()], total)):
            await catalog.wait_changed()
            continue
        raise_shares([*catalog.instances()], total)


def adjust(instances: Sequence[Instance], total: int) -> float:
    """Lower the shares that are too large; return after how many seconds without a change to call ``raise_shares``.

    Args:
        instances: all loaded models.
        total: threads of all together.
    """
    shares = _shares(instances, total)
    for scheduler, n_threads in shares:
        if n_threads < scheduler.n_threads:
            scheduler.set_threads(n_threads)
    return RISE_S if any(n_threads > scheduler.n_threads for scheduler, n_threads in shares) else math.inf


def raise_shares(instances: Sequence[Instance], total: int) -> None:
    """Give each model its whole share."""
    for scheduler, n_threads in _shares(instances, total):
        scheduler.set_threads(n_threads)


def _shares(instances: Sequence[Instance], total: int) -> list[tuple[Scheduler, int]]:
    """Threads of each model.  A model without requests gets as many as it would have with one."""
    busy = [instance for instance in instances if instance.n_leases]
    wanted = sum([instance.service.n_threads for instance in busy])
    shares = []
    for instance in instances:
        own = instance.service.n_threads
        together = wanted if instance in busy else wanted + own
        shares.append((instance.service.scheduler, own if together <= total else max(1, own * total // together)))
    return shares
