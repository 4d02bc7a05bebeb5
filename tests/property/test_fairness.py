"""Prefill is divided by priority, by VTC (virtual token counters) and by deadline, and no prompt starves."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.device import CPU, SimulatedServer
from uma_trio.daemon.policy.fairness import (
    AGING_INTERVAL_S,
    MAX_LEAD,
    MAX_SKIPPED_TICKS,
    ROTATION_PERIOD,
    WAIT_PER_WORK,
    Service,
    divide,
    rank,
)
from uma_trio.daemon.policy.view import Priority, SequenceView

ENDLESS = 1 << 60


def bound(prefills: list[SequenceView]) -> int:
    """Divisions within which every prompt advances, as ``divide`` promises."""
    groups = Counter((view.priority, view.principal) for view in prefills)
    return ROTATION_PERIOD * max(groups.values()) * (MAX_SKIPPED_TICKS + len(groups) if len(groups) > 1 else 1)


@st.composite
def some_prefills(draw: st.DrawFn, *, endless: bool = False, most: int = 12) -> list[SequenceView]:
    seq_ids = draw(st.lists(st.integers(0, 255), min_size=1, max_size=most, unique=True))
    sizes = st.just(ENDLESS) if endless else st.integers(1, 500)
    dues = st.sampled_from([-5.0, 0.5, 1.0, 2.0, math.inf])
    weights = {name: draw(st.sampled_from([0.5, 1.0, 1.0, 3.0])) for name in "abcd"}
    found = []
    for seq_id in seq_ids:
        principal = draw(st.sampled_from("abcd"))
        found.append(
            SequenceView(
                seq_id,
                draw(sizes),
                due_s=draw(dues),
                priority=draw(st.sampled_from(Priority)),
                principal=principal,
                weight=weights[principal],
            )
        )
    return found


def changed(view: SequenceView, **fields: Any) -> SequenceView:
    return msgspec.structs.replace(view, **fields)


def order_within_group(view: SequenceView, burst: int) -> tuple[bool, float, int]:
    """Sort key of the prompts of one group."""
    return view.n_pending > burst, view.due_s, view.seq_id


@attrs.define
class Prefill:
    """Consecutive divisions, with what they gave."""

    views: list[SequenceView]
    burst: int = 64
    service: Service = attrs.field(factory=Service)
    given: Counter[int] = attrs.field(factory=Counter)
    by_principal: Counter[str] = attrs.field(factory=Counter)

    def divide(self, tokens: int) -> list[int]:
        """Divide ``tokens``; returns the sequences that advanced."""
        shares, self.service = divide(self.views, tokens, self.service, burst=self.burst)
        for view, n in shares:
            self.given[view.seq_id] += n
            self.by_principal[view.principal] += n
        given = {view.seq_id: n for view, n in shares}
        left = [changed(view, n_pending=view.n_pending - given.get(view.seq_id, 0)) for view in self.views]
        self.views = [view for view in left if view.n_pending]
        return [view.seq_id for view, _ in shares]


def after(prefills: list[SequenceView], divisions: int) -> Service:
    """The service after so many divisions."""
    service = Service()
    for _ in range(divisions):
        _, service = divide(prefills, 7, service, burst=5)
    return service


# -- one division -----------------------------------------------------------------------------------


@given(some_prefills(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30))
def test_all_tokens_are_given_and_no_prompt_gets_more_than_it_needs(
    prefills: list[SequenceView], tokens: int, burst: int, before: int
) -> None:
    shares, _ = divide(prefills, tokens, after(prefills, before), burst=burst)
    assert sum(n for _, n in shares) == min(tokens, sum(view.n_pending for view in prefills))
    assert all(1 <= n <= view.n_pending for view, n in shares)
    assert len({view.seq_id for view, _ in shares}) == len(shares)


@given(some_prefills(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30), st.randoms())
def test_a_division_is_pure_and_ignores_the_order_of_its_input(
    prefills: list[SequenceView], tokens: int, burst: int, before: int, rng: random.Random
) -> None:
    service = after(prefills, before)
    was = (dict(service.counters), dict(service.histories))
    result = divide(prefills, tokens, service, burst=burst)
    assert divide(prefills, tokens, service, burst=burst) == result
    assert (service.counters, service.histories) == was
    rng.shuffle(prefills)
    assert divide(prefills, tokens, service, burst=burst) == result


@given(some_prefills(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30))
def test_principals_are_charged_for_their_tokens_by_weight(
    prefills: list[SequenceView], tokens: int, burst: int, before: int
) -> None:
    service = after(prefills, before)
    expected = {view.principal: service.counter(view.principal) for view in prefills}
    shares, later = divide(prefills, tokens, service, burst=burst)
    for view, n in shares:
        expected[view.principal] += n / view.weight
    assert later.counters == pytest.approx(expected)


@given(some_prefills(), st.integers(1, 2000), st.integers(1, 100))
def test_a_higher_class_takes_all_that_its_principal_is_given(
    prefills: list[SequenceView], tokens: int, burst: int
) -> None:
    shares = {view.seq_id: n for view, n in divide(prefills, tokens, Service(), burst=burst)[0]}
    for principal in {view.principal for view in prefills}:
        own = [view for view in prefills if view.principal == principal]
        left = sum(shares.get(view.seq_id, 0) for view in own)
        for priority in Priority:
            views = [view for view in own if view.priority is priority]
            given = sum(shares.get(view.seq_id, 0) for view in views)
            assert given == min(left, sum(view.n_pending for view in views))
            left -= given


def test_a_class_is_no_claim_to_more_than_others_get() -> None:
    prefills = [
        SequenceView(0, 1000, principal="a", priority=Priority.INTERACTIVE),
        SequenceView(1, 1000, principal="b", priority=Priority.NORMAL),
    ]
    shares, _ = divide(prefills, 200, Service(), burst=10)
    assert {view.seq_id: n for view, n in shares} == {0: 100, 1: 100}


def test_the_least_served_principal_goes_first() -> None:
    prefills = [SequenceView(0, 100, principal="a"), SequenceView(1, 100, principal="b")]
    shares, service = divide(prefills, 30, Service({"a": 50.0, "b": 20.0}), burst=16)
    assert [(view.seq_id, n) for view, n in shares] == [(1, 30)]
    assert service.counters == {"a": 50.0, "b": 50.0}


# -- the queue --------------------------------------------------------------------------------------


def test_the_queue_is_ordered_by_who_holds_a_place_then_by_service_then_by_priority() -> None:
    service = Service({"a": 50.0, "b": 20.0, "c": 90.0})
    waiting = {
        "background": rank(Priority.BACKGROUND, "c", 0.0, service, holds_place=False),
        "nothing yet": rank(Priority.NORMAL, "c", 0.0, service, holds_place=False),
        "less served": rank(Priority.NORMAL, "b", 0.0, service, holds_place=True),
        "interactive": rank(Priority.INTERACTIVE, "a", 0.0, service, holds_place=True),
        "normal": rank(Priority.NORMAL, "a", 0.0, service, holds_place=True),
    }
    assert sorted(waiting, key=waiting.__getitem__) == [
        "nothing yet",
        "less served",
        "interactive",
        "normal",
        "background",
    ]


def test_a_queued_request_rises_by_a_class_each_interval_up_to_the_highest() -> None:
    waits = [0.0, 0.9 * AGING_INTERVAL_S, AGING_INTERVAL_S, 2 * AGING_INTERVAL_S, 9 * AGING_INTERVAL_S]
    ranks = [rank(Priority.BACKGROUND, "a", waited_s, Service(), holds_place=True) for waited_s in waits]
    assert [(is_background, risen) for is_background, _, _, risen in ranks] == [
        (True, 2),
        (True, 2),
        (False, 1),
        (False, 0),
        (False, 0),
    ]


# -- within one group -------------------------------------------------------------------------------


@given(some_prefills(), st.integers(1, 2000), st.integers(1, 100))
def test_each_prompt_gets_all_that_it_can_use_before_the_next(
    prefills: list[SequenceView], tokens: int, burst: int
) -> None:
    """Prompts that fit into a burst go first and the others follow, both by deadline."""
    prefills = [changed(view, priority=Priority.NORMAL, principal="a", weight=1.0) for view in prefills]
    expected, left = {}, tokens
    for view in sorted(prefills, key=lambda view: order_within_group(view, burst)):
        if n := min(left, view.n_pending):
            expected[view.seq_id] = n
            left -= n
    assert {view.seq_id: n for view, n in divide(prefills, tokens, Service(), burst=burst)[0]} == expected


def test_with_equal_targets_prompts_are_served_in_the_order_of_arrival() -> None:
    prefill = Prefill(
        [SequenceView(2, 300, due_s=1.0), SequenceView(0, 300, due_s=3.0), SequenceView(1, 300, due_s=2.0)]
    )
    assert [prefill.divide(100) for _ in range(6)] == [[2], [2], [2], [1], [1], [1]]


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    prefill = Prefill([SequenceView(0, ENDLESS, due_s=0.0), SequenceView(1, ENDLESS, due_s=1.0)])
    prefill.divide(100)
    prefill.views.append(SequenceView(2, 64, due_s=9.0))
    prefill.divide(100)
    assert prefill.given == {0: 136, 2: 64}


def test_a_prompt_with_an_earlier_deadline_overtakes() -> None:
    prefill = Prefill([SequenceView(0, ENDLESS, due_s=10.0), SequenceView(1, ENDLESS, due_s=11.0)])
    prefill.divide(100)
    prefill.views.append(SequenceView(2, 300, due_s=5.0))
    assert [prefill.divide(100) for _ in range(4)] == [[2], [2], [2], [0]]


@pytest.mark.parametrize(("due_s", "first"), [(27.0, 1), (29.0, 0)])
def test_a_prompt_with_less_work_overtakes_one_that_is_due_earlier(due_s: float, first: int) -> None:
    """500 tokens instead of 4,000, a millisecond each: 3.5 s less work."""
    prompts = [SequenceView(0, 4000, due_s=0.0), SequenceView(1, 500, due_s=due_s)]
    assert 27.0 < WAIT_PER_WORK * 3.5 < 29.0
    given, _ = divide(prompts, 100, Service(), burst=64, token_s=1e-3)
    assert [view.seq_id for view, _ in given] == [first]


def test_short_prompts_lower_the_mean_time_to_first_token_of_a_burst() -> None:
    """Prompts of very different lengths that come together, the longest first."""
    lengths = [4000, 2000, 800, 400, 200, 100]
    server, first_token_s = SimulatedServer(CPU), {}
    for seq_id, length in enumerate(lengths):
        server.prefill(seq_id, length, n_to_generate=1).due_s = 1.0 + seq_id / 1e3
    while server.running:
        before = set(server.running)
        server.tick()
        first_token_s |= dict.fromkeys(before - set(server.running), server.now_s)
    assert list(first_token_s) == [5, 4, 3, 2, 1, 0]


def test_the_last_division_of_a_rotation_period_begins_with_the_next_sequence() -> None:
    prefill = Prefill([SequenceView(seq_id, ENDLESS, due_s=seq_id == 3) for seq_id in (3, 5, 9)], burst=16)
    rotated = []
    for _ in range(5):
        assert [prefill.divide(100) for _ in range(ROTATION_PERIOD - 1)] == [[5]] * (ROTATION_PERIOD - 1)
        before = Counter(prefill.given)
        prefill.divide(100)
        rotated.append(dict(prefill.given - before))
    assert rotated == [{3: 16, 5: 84}, {5: 100}, {9: 16, 5: 84}, {3: 16, 5: 84}, {5: 100}]


def test_the_rotation_skips_sequences_that_are_gone() -> None:
    prefill = Prefill([SequenceView(seq_id, ENDLESS, due_s=seq_id) for seq_id in range(4)], burst=16)
    for _ in range(2 * ROTATION_PERIOD):
        prefill.divide(16)
    del prefill.views[1]
    for _ in range(ROTATION_PERIOD):
        prefill.divide(16)
    assert dict(prefill.given) == {0: 16 * (3 * ROTATION_PERIOD - 2), 1: 16, 2: 16}


def test_only_divisions_that_serve_the_group_count_for_its_rotation() -> None:
    """Two principals that take turns each have their own rotation."""
    views = [SequenceView(seq_id, ENDLESS, due_s=seq_id, principal="ab"[seq_id % 2]) for seq_id in range(4)]
    prefill = Prefill(views, burst=16)
    for _ in range(4 * ROTATION_PERIOD):
        prefill.divide(16)
    n = 16 * (2 * ROTATION_PERIOD - 1)
    assert dict(prefill.given) == {0: n, 1: n, 2: 16, 3: 16}


def test_long_prompts_that_arrive_together_finish_one_after_the_other() -> None:
    """Interleaved, all would have their first token at the end."""
    server, first_token_s = SimulatedServer(CPU), {}
    for arrived, seq_id in enumerate((3, 0, 4, 2, 1)):
        server.prefill(seq_id, 2000, n_to_generate=1).due_s = 1.0 + 10 * arrived
    while server.running:
        before = set(server.running)
        server.tick()
        first_token_s |= dict.fromkeys(before - set(server.running), server.now_s)
    assert list(first_token_s) == [3, 0, 4, 2, 1]
    assert statistics.mean(first_token_s.values()) <= 0.65 * max(first_token_s.values())


# -- no starvation ----------------------------------------------------------------------------------


@given(some_prefills(endless=True), st.integers(1, 64), st.data())
def test_every_prompt_advances_within_the_bound(prefills: list[SequenceView], burst: int, data: st.DataObject) -> None:
    least = data.draw(st.sampled_from([1, burst, 200]))
    most = data.draw(st.sampled_from([least, 2 * least]))
    counters = data.draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 1e6, 1e12])))
    rng = random.Random(data.draw(st.integers(0, 99)))
    prefill = Prefill(prefills, burst, Service(counters))
    within = bound(prefills)
    last = dict.fromkeys([view.seq_id for view in prefills], 0)
    ticks = min(3 * within, 1500)
    for tick in range(1, ticks + 1):
        last.update(dict.fromkeys(prefill.divide(rng.randint(least, most)), tick))
        assert tick - min(last.values()) < within


@given(st.integers(0, 99), st.integers(1, 4))
def test_every_prompt_advances_within_the_bound_while_others_come_and_go(seed: int, n_principals: int) -> None:
    """Sequence ids are reused, deadlines of new prompts are ever earlier, and a whole class can be idle for a while."""
    rng, parallel, burst, least = random.Random(seed), 8, 32, 16
    prefill = Prefill([], burst)
    waited = Counter[int]()
    worst = ROTATION_PERIOD * parallel * (MAX_SKIPPED_TICKS + min(parallel, 3 * n_principals))
    for tick in range(1000):
        free = set(range(parallel)) - {view.seq_id for view in prefill.views}
        for seq_id in free:
            if rng.random() < 0.5:
                size, due_s = rng.choice([5, 60, 1000, ENDLESS]), rng.choice([0.0, -tick, math.inf])
                priority, principal = rng.choice(list(Priority)), str(rng.randrange(n_principals))
                prefill.views.append(SequenceView(seq_id, size, due_s=due_s, priority=priority, principal=principal))
        if not prefill.views:
            continue
        ready = {view.seq_id for view in prefill.views}
        served = set(prefill.divide(rng.randint(least, 40)))
        waited = Counter({seq_id: waited[seq_id] + 1 for seq_id in ready - served})
        assert max(waited.values(), default=0) < worst


@given(st.integers(1, 64), st.integers(2, 8), st.integers(1, 100))
def test_an_endless_supply_of_short_and_urgent_prompts_does_not_starve_a_long_one(
    burst: int, parallel: int, tokens: int
) -> None:
    """With a single group, each prompt advances within ``ROTATION_PERIOD`` divisions a sequence."""
    prefill, waited = Prefill([SequenceView(0, ENDLESS)], burst), 0
    for tick in range(200):
        free = set(range(parallel)) - {view.seq_id for view in prefill.views}
        prefill.views += [SequenceView(seq_id, burst if tick % 2 else 500, due_s=-tick) for seq_id in free]
        waited = 0 if 0 in prefill.divide(tokens) else waited + 1
        assert waited < ROTATION_PERIOD * parallel


def test_a_group_that_finishes_at_once_was_not_skipped() -> None:
    """Tiny background prompts, always a new one, never take a whole turn; that is no claim to the next turn."""
    prefill = Prefill([SequenceView(0, ENDLESS, priority=Priority.INTERACTIVE), SequenceView(1, ENDLESS)], burst=16)
    for _ in range(10 * (MAX_SKIPPED_TICKS + 2)):
        if len(prefill.views) < 3:
            prefill.views.append(SequenceView(2, 5, priority=Priority.BACKGROUND))
        prefill.divide(16)
    assert prefill.given[1] >= 16 * 9


@given(st.integers(1, 64), st.lists(st.integers(1, 200), min_size=40, max_size=80))
def test_a_lower_class_is_skipped_only_so_often(burst: int, ticks: list[int]) -> None:
    """The lowest of three classes waits at most one tick longer than the middle one."""
    prefill = Prefill([SequenceView(i, ENDLESS, priority=priority) for i, priority in enumerate(Priority)], burst)
    waited = dict.fromkeys(range(3), 0)
    for tokens in ticks:
        served = prefill.divide(tokens)
        waited = {i: 0 if i in served else n + 1 for i, n in waited.items()}
        assert waited[Priority.INTERACTIVE] <= 2  # the two classes below it have one turn each
        assert waited[Priority.NORMAL] <= MAX_SKIPPED_TICKS
        assert waited[Priority.BACKGROUND] <= MAX_SKIPPED_TICKS + 1  # both are due at once: one after the other


def test_a_turn_of_a_lower_class_is_one_burst() -> None:
    prefill = Prefill([SequenceView(0, ENDLESS, priority=Priority.INTERACTIVE), SequenceView(1, ENDLESS)], burst=16)
    for _ in range(10 * (MAX_SKIPPED_TICKS + 1)):
        prefill.divide(100)
    assert prefill.given == {0: 9000 - 160, 1: 160}


def test_the_group_that_was_skipped_longest_has_the_first_turn() -> None:
    """There are more groups than ticks for which one can be skipped."""
    many = 2 * MAX_SKIPPED_TICKS
    heavy = SequenceView(0, ENDLESS, principal="heavy", weight=1e9, priority=Priority.INTERACTIVE)
    views = [SequenceView(i, ENDLESS, principal=f"{i:02}") for i in range(1, many + 1)]
    prefill = Prefill([heavy, *views], burst=16)
    for _ in range(MAX_SKIPPED_TICKS + 3 * (many + 1)):
        prefill.divide(16)
    assert {prefill.given[i] for i in range(1, many + 1)} <= {48, 64}


def test_leftover_tokens_are_no_turn() -> None:
    """A group that gets only what the higher class cannot use still counts as skipped."""
    prefill = Prefill([SequenceView(0, ENDLESS)], burst=16)
    for tick in range(10 * (MAX_SKIPPED_TICKS + 1)):
        prefill.views.append(SequenceView(tick + 1, 15, priority=Priority.INTERACTIVE))
        prefill.divide(16)
        prefill.views = prefill.views[:1]
    assert prefill.given[0] == 10 * (16 + MAX_SKIPPED_TICKS)


# -- principals -------------------------------------------------------------------------------------


@given(
    st.integers(1, 64), st.integers(1, 10), st.integers(1, 10), st.lists(st.integers(1, 500), min_size=1, max_size=80)
)
def test_backlogged_principals_are_served_equally_however_many_prompts_they_have(
    burst: int, n: int, m: int, ticks: list[int]
) -> None:
    """The bound of VTC: the difference does not grow with time."""
    prefill = Prefill([SequenceView(i, ENDLESS, principal="b" if i < n else "a") for i in range(n + m)], burst)
    for tokens in ticks:
        prefill.divide(tokens)
        assert abs(prefill.by_principal["a"] - prefill.by_principal["b"]) <= burst


@given(st.integers(1, 64), st.integers(1, 5), st.integers(1, 5), st.data())
def test_backlogged_principals_are_served_in_proportion_to_their_weights(
    burst: int, n: int, m: int, data: st.DataObject
) -> None:
    """Weights 1 and 3 give 1 : 3, within a burst at any time.

    Each tick has room for a burst.  In smaller ticks, catching up after one burst can take longer than
    ``MAX_SKIPPED_TICKS``, and the guarantee against starvation goes before the proportion.
    """
    light = [SequenceView(i, ENDLESS, principal="light", weight=1.0) for i in range(n)]
    heavy = [SequenceView(n + i, ENDLESS, principal="heavy", weight=3.0) for i in range(m)]
    prefill = Prefill(light + heavy, burst)
    for tokens in data.draw(st.lists(st.integers(burst, 10 * burst), min_size=1, max_size=80)):
        prefill.divide(tokens)
        assert abs(prefill.by_principal["light"] - prefill.by_principal["heavy"] / 3) <= burst
    assert prefill.service.counters["light"] == pytest.approx(prefill.by_principal["light"])
    assert prefill.service.counters["heavy"] == pytest.approx(prefill.by_principal["heavy"] / 3)


def test_a_tiny_weight_does_not_starve() -> None:
    """The principal still has its turn when it was skipped for ``MAX_SKIPPED_TICKS``."""
    views = [SequenceView(0, ENDLESS, principal="a"), SequenceView(1, ENDLESS, principal="b", weight=1e-6)]
    prefill = Prefill(views, burst=16)
    for _ in range(10 * (MAX_SKIPPED_TICKS + 1)):
        prefill.divide(16)
    assert prefill.given[1] >= 10 * 16


@given(st.integers(0, 99))
def test_the_size_of_requests_does_not_matter(seed: int) -> None:
    """A principal with two prompts of thousands at a time gets within a tenth of what one with six of dozens gets."""
    rng, prefill = random.Random(seed), Prefill([])
    seq_id = 0
    for _ in range(400):
        for principal, sizes, many in (("large", (2000, 4000), 2), ("small", (20, 60), 6)):
            while sum(view.principal == principal for view in prefill.views) < many:
                seq_id += 1
                prefill.views.append(SequenceView(seq_id, rng.randint(*sizes), principal=principal))
        prefill.divide(rng.randint(16, 200))
    assert 0.9 < prefill.by_principal["large"] / prefill.by_principal["small"] < 1.1


def test_generated_tokens_count_twice() -> None:
    service = Service().decoded(
        [SequenceView(0, principal="a"), SequenceView(1, principal="a"), SequenceView(2, principal="b")]
    )
    assert service.counters == pytest.approx({"a": 4.0, "b": 2.0})
    prefills = [SequenceView(3, 100, principal="a"), SequenceView(4, 100, principal="b")]
    shares, _ = divide(prefills, 2, service, burst=16)
    assert [view.seq_id for view, _ in shares] == [4]


def test_generated_tokens_are_charged_by_weight() -> None:
    service = Service().decoded(
        [
            SequenceView(0, principal="a", weight=2.0),
            SequenceView(1, principal="a", weight=2.0),
            SequenceView(2, principal="b"),
        ]
    )
    assert service.counters == pytest.approx({"a": 2.0, "b": 2.0})


def test_a_new_principal_starts_at_the_lowest_counter() -> None:
    service = Service({"a": 500.0, "b": 300.0})
    assert service.counter("new") == pytest.approx(300.0, rel=1e-12)
    assert service.counter("new") < 300.0, "it goes before the least-served principal, since it may have waited long"
    assert service.charged({"new": 10.0}).counters == pytest.approx({"a": 500.0, "b": 300.0, "new": 310.0})
    assert Service().counter("new") == pytest.approx(0.0)


def test_nobody_saves_up_service_while_idle() -> None:
    prefill = Prefill([SequenceView(0, ENDLESS, principal="a"), SequenceView(1, 100, principal="b")])
    while any(view.principal == "b" for view in prefill.views):
        prefill.divide(64)
    prefill.service = prefill.service.without("b")
    for _ in range(100):
        prefill.divide(64)
    prefill.views.append(SequenceView(2, ENDLESS, principal="b"))
    before = Counter(prefill.by_principal)
    for _ in range(100):
        prefill.divide(64)
    gained = prefill.by_principal - before
    assert abs(gained["a"] - gained["b"]) <= 64


def test_leaving_does_not_clear_a_high_counter() -> None:
    """The counter is kept until the others have caught up, and dropped then."""
    service = Service({"a": 100.0, "b": 200.0, "c": 150.0}).without("b")
    assert service.counter("b") == 200.0
    assert service.counter("new") == pytest.approx(100.0)
    assert service.charged({"b": 5.0}) == Service({"a": 100.0, "b": 205.0, "c": 150.0})
    later = service.charged({"a": 1000.0, "c": 1000.0}).without("c")
    assert later.counter("b") == pytest.approx(1100.0)
    assert later.departed == {"c": 1150.0}
    assert later.without("a") == Service(), "without active principals nothing is kept"


def test_a_returning_principal_waits_for_a_bounded_lead_only() -> None:
    """It had the model for itself, so others did not want what it got."""
    service = Service({"a": 100.0, "b": 90_000.0}).without("b")
    assert service.counter("b") == 100.0 + MAX_LEAD


def test_nobody_saves_up_service_with_a_slow_stream() -> None:
    """A principal with a slow stream has fallen far behind.  Its new request is served with the others, not before."""
    service = Service({"a": 1e6, "b": 10.0, "c": 2e6}).arrived("b", waiting={"a", "c"})
    assert service.counters == {"a": 1e6, "b": 1e6, "c": 2e6}
    assert service.arrived("c", waiting={"a", "b"}).counters == service.counters, "a high counter stays"
    assert Service({"b": 10.0}).arrived("b", waiting=()).counters == {"b": 10.0}
