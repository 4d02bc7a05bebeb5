"""What makes room for a model: a decision about the models that are loaded."""

from __future__ import annotations

import math
from typing import Any

from tests.support.cases import all_cases
from uma_trio.daemon.registry.room import (
    LEAST_LOADED_S,
    PATIENCE_S,
    Bounds,
    Evict,
    Load,
    LoadedView,
    Needs,
    Refuse,
    Wait,
    decide,
    missing_room,
)

GB = 10**9
BUDGET = Bounds(budget_bytes=10 * GB)
NEEDS = Needs(whole=4 * GB, least=1 * GB)
BEGAN = 1000.0


def view(name: str, gigabytes: int, **fields: Any) -> LoadedView:
    return LoadedView(name=name, memory_bytes=gigabytes * GB, **fields)


def step(*loaded: LoadedView, needs: Needs = NEEDS, bounds: Bounds = BUDGET, now: float = BEGAN) -> Any:
    return decide(needs, loaded, bounds, began=BEGAN, now=now)


def test_a_model_that_is_alone_is_bounded_by_a_setting_only() -> None:
    assert step(needs=Needs(whole=20 * GB, least=20 * GB)) == Load()
    bounds = Bounds(budget_bytes=3 * GB, budget_is_set=True)
    assert step(bounds=bounds) == Load(3 * GB)
    assert step(bounds=bounds, needs=Needs(whole=4 * GB, least=4 * GB)) == Load(), "its engine says whether it fits"


def test_with_room_for_its_whole_context_a_model_has_no_bound() -> None:
    assert step(view("a", 2), view("b", 3)) == Load()
    assert step(view("a", 20), bounds=Bounds()) == Load()


def test_the_least_recently_used_model_without_requests_goes_first() -> None:
    used, older, newer = view("a", 5, is_used=True), view("b", 2, used_at=5.0), view("c", 2, used_at=7.0)
    assert step(used, newer, older) == Evict(
        2, "it needs about 4,000 MB, and 9,000 of 10,000 MB are taken (models_memory_mb)"
    )
    assert isinstance(step(view("a", 9, is_leaving=True), older), Wait), "one goes already"
    assert step(view("a", 9, stays=True), view("b", 0, used_at=1.0)).index == 1


def test_a_model_in_use_gets_time_then_the_load_takes_what_is_left_then_the_oldest_drains() -> None:
    loaded = view("a", 8, is_used=True, loaded_at=BEGAN - 100), view("b", 1, is_used=True, loaded_at=BEGAN - 50)
    assert step(*loaded) == Wait(BEGAN + PATIENCE_S)
    assert step(*loaded, now=BEGAN + PATIENCE_S) == Load(1 * GB)
    assert step(*loaded, needs=Needs(whole=4 * GB, least=2 * GB), now=BEGAN + PATIENCE_S).index == 0
    young = view("a", 9, is_used=True, loaded_at=BEGAN - 1)
    assert step(young) == Wait(BEGAN - 1 + LEAST_LOADED_S)


def test_next_to_pinned_models_a_model_is_fitted_or_refused_with_the_numbers() -> None:
    pinned = view("a", 8, stays=True, is_used=True)
    assert step(pinned) == Load(2 * GB)
    refused = step(pinned, needs=Needs(whole=4 * GB, least=3 * GB))
    assert refused == Refuse(
        "it needs about 4,000 MB, and 8,000 of 10,000 MB are taken (models_memory_mb), by a, which stay loaded"
    )


def test_the_number_of_models_is_a_bound_that_no_fit_helps() -> None:
    bounds = Bounds(max_loaded=1)
    assert missing_room(0, [view("a", 1)], bounds) == "1 models are loaded (max_loaded_models)"
    assert isinstance(step(view("a", 1, stays=True), bounds=bounds), Refuse)
    assert step(view("a", 1, is_used=True), bounds=bounds, now=math.inf) == Evict(
        0, "1 models are loaded (max_loaded_models)"
    )


@all_cases("budget", range(1, 12))
def test_what_is_loaded_never_exceeds_the_budget(budget: int) -> None:
    """Loading, each time with what is decided, three models that cannot go."""
    loaded: list[LoadedView] = []
    bounds = Bounds(budget_bytes=budget * GB, budget_is_set=True)
    for name in "abc":
        found = step(*loaded, bounds=bounds)
        if isinstance(found, Load):
            loaded.append(LoadedView(name=name, memory_bytes=found.room_bytes or NEEDS.whole, stays=True))
    assert 0 < sum(each.memory_bytes for each in loaded) <= budget * GB
