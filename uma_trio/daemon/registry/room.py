"""What makes room for a model, as a decision about the models that are loaded now.

A model needs the memory that it takes with its whole context.  Where that much cannot be freed, it gets less context,
and takes the memory that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from uma_trio.config import MB

PATIENCE_S: Final = 10.0
"""How long a load waits for a model without requests, before one with requests drains to make room."""
LEAST_LOADED_S: Final = 30.0
"""A model that has been loaded for less than this time does not drain to make room: two would take turns all the time."""


@attrs.frozen(kw_only=True)
class LoadedView:
    """A loaded copy of a model."""

    name: str
    memory_bytes: int
    is_leaving: bool = False
    """It gets no more requests, and ends with its last one."""
    stays: bool = False
    """It may not be unloaded: it is pinned, or the copy that the load replaces."""
    is_used: bool = False
    used_at: float = 0.0
    loaded_at: float = 0.0


@attrs.frozen(kw_only=True)
class Bounds:
    """What all models may have together.  0 is no bound."""

    budget_bytes: int = 0
    max_loaded: int = 0
    budget_is_set: bool = False
    """Whether the budget is a setting.  Then it also bounds a model that is alone."""


@attrs.frozen(kw_only=True)
class Needs:
    """About what a model takes, in bytes."""

    whole: int
    """With all of its context."""
    least: int
    """With the least context that is worth loading it."""


@attrs.frozen
class Load:
    """Load it now."""

    room_bytes: int = 0
    """The model gets so little context that it takes this much at most; 0 is no bound."""


@attrs.frozen
class Wait:
    """Decide again when something has changed, at the latest at this time."""

    until: float = math.inf


@attrs.frozen
class Evict:
    """Unload a model first."""

    index: int
    """Which of the loaded models."""
    reason: str


@attrs.frozen
class Refuse:
    """It cannot be loaded."""

    reason: str


def missing_room(n_bytes: int, loaded: Sequence[LoadedView], bounds: Bounds) -> str | None:
    """Why there is no room for another model of this size; ``None`` if there is.

    A model that is alone has room: whether it fits is for its engine to say.
    """
    if not loaded:
        return None
    if bounds.max_loaded and len(loaded) >= bounds.max_loaded:
        return f"{len(loaded)} models are loaded (max_loaded_models)"
    used, budget = sum(model.memory_bytes for model in loaded), bounds.budget_bytes
    if budget and used + n_bytes > budget:
        return (
            f"it needs about {n_bytes / MB:,.0f} MB, and {used / MB:,.0f} of {budget / MB:,.0f} MB are taken "
            "(models_memory_mb)"
        )
    return None


def decide(
    needs: Needs, loaded: Sequence[LoadedView], bounds: Bounds, *, began: float, now: float
) -> Load | Wait | Evict | Refuse:
    """The next step to make room for a model.

    Models that nobody uses are unloaded, the one that was used least recently first.  If all are in use for long, the
    model takes what they leave; if that is too little, the one that was loaded first drains.

    Args:
        began: when the load began, in seconds on the clock of ``now``.
    """
    missing = missing_room(needs.whole, loaded, bounds)
    if missing is None:
        is_too_large = not loaded and bounds.budget_is_set and needs.least <= bounds.budget_bytes < needs.whole
        return Load(bounds.budget_bytes if is_too_large else 0)
    if any(model.is_leaving for model in loaded):
        return Wait()
    unused = least_recently_used(loaded)
    if unused is not None:
        return Evict(unused, missing)
    can_go = [index for index, model in enumerate(loaded) if not model.stays]
    oldest = min(can_go, key=lambda index: loaded[index].loaded_at, default=None)
    if oldest is not None:
        until = max(began + PATIENCE_S, loaded[oldest].loaded_at + LEAST_LOADED_S)
        if now < until:
            return Wait(until)
    if missing_room(needs.least, loaded, bounds) is None:
        return Load(bounds.budget_bytes - sum(model.memory_bytes for model in loaded))
    if oldest is not None:
        return Evict(oldest, missing)
    return Refuse(f"{missing}, by {', '.join(model.name for model in loaded)}, which stay loaded")


def least_recently_used(loaded: Sequence[LoadedView]) -> int | None:
    """Index of the model that nobody uses, and was used least recently; ``None`` if there is none that may go."""
    unused = [n for n, model in enumerate(loaded) if not (model.stays or model.is_used or model.is_leaving)]
    return min(unused, key=lambda n: loaded[n].used_at, default=None)
