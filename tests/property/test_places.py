"""Which sequences lose their places to a waiting request."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.daemon.policy.fairness import MAX_LEAD
from uma_trio.daemon.policy.places import Capacity, Claimant, Place, capacity_for, claim, claim_spare, goes_before
from uma_trio.daemon.policy.view import Priority

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}
ROOM = Capacity(sequences=8, cells=800, free_sequences=0, free_cells=0)


def place(principal: str, cells: int = 100, **fields: object) -> Place:
    return Place(
        **{
            "principal": principal,
            "weight": WEIGHTS[principal],
            "priority": Priority.NORMAL,
            "cells": cells,
            "n_tokens": 50,
            "service": 1e6,
            "turn_ends_s": 1e9,
            **fields,
        }
    )


def claimant(principal: str, cells: int = 100, priority: Priority = Priority.NORMAL, service: float = 0.0) -> Claimant:
    weight = WEIGHTS[principal]
    return Claimant(principal=principal, weight=weight, priority=priority, cells=cells, service=service)


def principals_after(places: list[Place], victims: tuple[int, ...], winner: str) -> Counter[str]:
    left = [each for index, each in enumerate(places) if index not in victims]
    return Counter([winner, *[each.principal for each in left]])


def balance(places: list[Place], waiting: list[str]) -> Counter[str]:
    """What each principal holds when all of ``waiting`` want places of 100 cells for ever."""
    for _ in range(100):
        for principal in waiting:
            found = claim(claimant(principal), places, ROOM)
            if found is not None:
                places = [each for index, each in enumerate(places) if index not in found.victims]
                places.append(place(principal))
                break
        else:
            return Counter(each.principal for each in places)
    raise AssertionError("they take places from each other for ever")


def test_a_principal_that_holds_nothing_takes_a_place_at_once() -> None:
    found = claim(claimant("b"), [place("a")] * 8, ROOM)
    assert found is not None
    assert (len(found.victims), found.due_s) == (1, float("-inf"))


def test_principals_that_want_more_end_with_places_by_their_weights() -> None:
    assert balance([place("a")] * 8, ["a", "b"]) == {"a": 4, "b": 4}
    assert balance([place("a")] * 8, ["a", "c"]) == {"a": 2, "c": 6}
    assert balance([place("c")] * 8, ["a", "b", "c"]) == {"a": 2, "b": 1, "c": 5}


def test_nobody_takes_places_of_its_own_or_of_those_with_less() -> None:
    assert claim(claimant("a"), [place("a")] * 8, ROOM) is None
    assert claim(claimant("a"), [place("a")] * 5 + [place("b")] * 3, ROOM) is None


def test_one_that_was_given_as_much_service_waits() -> None:
    held = [place("a")] * 7 + [place("b")]
    assert claim(claimant("b", service=1e6 - MAX_LEAD), held, ROOM) is None
    assert claim(claimant("b", service=1e6 - MAX_LEAD - 1), held, ROOM) is not None
    assert claim(claimant("c", service=1e9), held, ROOM) is not None, "it holds nothing"


def test_the_only_place_of_a_principal_is_taken_when_its_turn_ends_and_only_by_one_that_holds_nothing() -> None:
    room = Capacity(2, 200, 0, 0)
    held = [place("a", turn_ends_s=7.0), place("b", turn_ends_s=5.0)]
    found = claim(claimant("c"), held, room)
    assert found is not None
    assert (found.victims, found.due_s) == ((1,), 5.0)
    assert claim(claimant("a"), held, room) is None


def test_the_lowest_class_then_the_fewest_tokens_lose_their_places() -> None:
    held = [place("a", n_tokens=9), place("a", n_tokens=90, priority=Priority.BACKGROUND), place("a", n_tokens=5)]
    room = Capacity(3, 300, 0, 0)
    found = claim(claimant("b"), held, room)
    assert found is not None
    assert found.victims == (1,)
    found = claim(claimant("b"), [each for each in held if each.priority is Priority.NORMAL], room)
    assert found is not None
    assert found.victims == (1,)


def test_background_takes_places_of_background_only() -> None:
    mixed = [place("a"), place("a", priority=Priority.BACKGROUND), *[place("a")] * 6]
    found = claim(claimant("b", priority=Priority.BACKGROUND), mixed, ROOM)
    assert found is not None
    assert found.victims == (1,)
    assert claim(claimant("b", priority=Priority.BACKGROUND), [place("a")] * 8, ROOM) is None


BACKGROUND = Priority.BACKGROUND


def test_background_gives_way_at_once_also_to_its_own_principal() -> None:
    held = [place("a", n_tokens=5), place("a", priority=BACKGROUND, n_tokens=90), place("a", n_tokens=1)]
    for principal in "ab":
        found = claim(claimant(principal), held, Capacity(3, 300, 0, 0))
        assert found is not None
        assert found.victims == (1,)
    assert claim(claimant("a", priority=BACKGROUND), held, Capacity(3, 300, 0, 0)) is None
    only = [place("a"), place("b", priority=BACKGROUND, turn_ends_s=9.0)]
    for principal in "abc":
        found = claim(claimant(principal), only, Capacity(2, 200, 0, 0))
        assert found is not None
        assert (found.victims, found.due_s) == ((1,), float("-inf")), "it has no turn that others wait for"


def test_background_keeps_a_spare_place_while_others_run_and_one_for_itself() -> None:
    def mixed(n_others: int, n_background: int) -> list[Place]:
        return [place("a")] * n_others + [place("a", priority=BACKGROUND, n_tokens=9 + n) for n in range(n_background)]

    full = Capacity(4, 400, 0, 0)
    assert claim_spare(mixed(0, 4), full) is None, "copies are quick then"
    assert claim_spare(mixed(4, 0), full) is None
    assert claim_spare(mixed(3, 1), full) is None, "this class goes on"
    found = claim_spare(mixed(1, 3), full)
    assert found is not None
    assert (found.victims, found.due_s) == ((1,), float("-inf"))
    assert claim_spare(mixed(1, 2), Capacity(4, 400, 1, 100)) is None, "there is one"
    assert claim_spare(mixed(1, 2), Capacity(4, 400, 1, 99)) is not None, "it has no cells"
    assert claim_spare([place("a"), *[place("a", priority=BACKGROUND, can_yield=False)] * 3], full) is None
    for priority in Priority:
        room = capacity_for(claimant("b", priority=priority), mixed(1, 2), Capacity(4, 400, 1, 100))
        assert room.free_sequences == (priority is not BACKGROUND)
        alone = capacity_for(claimant("b", priority=priority), mixed(0, 3), Capacity(4, 400, 1, 100))
        assert alone.free_sequences == 1


def test_background_of_another_principal_takes_a_place_of_its_like_and_leaves_the_spare_one() -> None:
    held = [place("a"), *[place("a", priority=BACKGROUND)] * 2]
    found = claim(claimant("b", priority=BACKGROUND), held, Capacity(4, 400, 1, 100))
    assert found is not None
    assert found.victims == (1,)


def test_as_much_background_gives_way_as_is_needed_and_others_after_it() -> None:
    held = [place("a", cells=100, priority=BACKGROUND)] * 3 + [place("a", cells=100)] * 5
    found = claim(claimant("a", cells=200), held, ROOM)
    assert found is not None
    assert len(found.victims) == 2
    assert {*found.victims} < {0, 1, 2}
    assert claim(claimant("a", cells=400), held, ROOM) is None, "its own places of other classes stay"
    found = claim(claimant("b", cells=400), held, ROOM)
    assert found is not None
    assert {0, 1, 2} < {*found.victims}
    assert len(found.victims) == 4


def test_a_sequence_that_cannot_yield_counts_and_stays() -> None:
    held = [place("a", can_yield=False)] * 7 + [place("a")]
    found = claim(claimant("b"), held, ROOM)
    assert found is not None
    assert found.victims == (7,)
    assert claim(claimant("b"), [place("a", can_yield=False)] * 8, ROOM) is None


def test_forks_that_wait_go_after_principals_with_less() -> None:
    held = [place("a")] * 4 + [place("b")] * 2
    assert goes_before(claimant("c"), "a", held, ROOM)
    assert goes_before(claimant("b"), "a", held, ROOM)
    assert not goes_before(claimant("b", cells=700), "a", held, ROOM)
    assert not goes_before(claimant("a"), "a", held, ROOM)
    assert goes_before(claimant("b"), "c", held, ROOM), "whose place was just taken"


NAMES = st.sampled_from(sorted(WEIGHTS))


@given(
    held=st.lists(st.tuples(NAMES, st.integers(1, 400), st.booleans()), min_size=1, max_size=12),
    free=st.tuples(st.integers(0, 3), st.integers(0, 300)),
    principal=NAMES,
    cells=st.integers(1, 900),
)
def test_a_claim_makes_room_with_no_more_victims_than_it_needs(
    held: list[tuple[str, int, bool]], free: tuple[int, int], principal: str, cells: int
) -> None:
    places = [place(name, own, can_yield=can) for name, own, can in held]
    room = Capacity(len(held) + free[0], max(1, sum(each.cells for each in places) + free[1]), *free)
    found = claim(claimant(principal, cells), places, room)
    if found is None:
        return
    taken = [places[index] for index in found.victims]
    assert taken
    assert all(each.can_yield and each.principal != principal for each in taken)
    assert free[1] + sum(each.cells for each in taken) >= cells
    for left_out in taken:
        others = [each for each in taken if each is not left_out]
        assert free[0] + len(others) < 1 or free[1] + sum(each.cells for each in others) < cells
    if any(each.principal == principal for each in places):
        after = principals_after(places, found.victims, principal)
        assert all(after[each.principal] for each in taken), "only one that holds nothing takes the last place"


@given(st.lists(NAMES, min_size=8, max_size=8), st.lists(NAMES, min_size=1, max_size=3, unique=True))
def test_claims_come_to_an_end(holders: list[str], waiting: list[str]) -> None:
    """With more places than principals, nobody takes back what another one has just taken."""
    after = balance([place(name) for name in holders], waiting)
    assert sum(after.values()) == 8
    assert all(after[name] for name in waiting)
