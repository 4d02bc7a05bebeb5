"""Whose prompt is read: equals alike, higher classes and the least served first, and nobody never."""

from __future__ import annotations

import math
import random
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.scheduling.fairness import LOWER_CLASS_WAITS, Service, divide
from uma_trio.scheduling.policy import Priority, Slot

ENDLESS = 1 << 60


def bound(prompts: list[Slot], *, burst: int, least: int) -> int:
    """Divisions within which each prompt gets some, as ``divide`` promises."""
    groups = Counter((slot.priority, slot.tenant) for slot in prompts)
    pieces = math.ceil(burst / min(burst, least))
    return (LOWER_CLASS_WAITS + len(groups)) * (1 + (max(groups.values()) - 1) * pieces)


@st.composite
def some_prompts(draw: st.DrawFn, *, endless: bool = False, most: int = 12) -> list[Slot]:
    seq_ids = draw(st.lists(st.integers(0, 255), min_size=1, max_size=most, unique=True))
    sizes = st.just(ENDLESS) if endless else st.integers(1, 500)
    return [
        Slot(seq_id, draw(sizes), priority=draw(st.sampled_from(Priority)), tenant=draw(st.integers(0, 3)))
        for seq_id in seq_ids
    ]


@attrs.define
class Reading:
    """Divisions one after another."""

    prompts: list[Slot]
    burst: int = 64
    service: Service = attrs.field(factory=Service)
    given: Counter[int] = attrs.field(factory=Counter)
    by_tenant: Counter[int] = attrs.field(factory=Counter)

    def divide(self, tokens: int) -> list[int]:
        """The sequences that got some."""
        shares, self.service = divide(self.prompts, tokens, self.service, burst=self.burst)
        for slot, n in shares:
            slot.pending -= n
            self.given[slot.seq_id] += n
            self.by_tenant[slot.tenant] += n
        self.prompts = [slot for slot in self.prompts if slot.pending]
        return [slot.seq_id for slot, _ in shares]


# -- one division -----------------------------------------------------------------------------------


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 6))
def test_all_tokens_are_given_and_none_that_nobody_wants(prompts: list[Slot], tokens: int, burst: int, before: int) -> None:
    service = Service()
    for _ in range(before):
        _, service = divide(prompts, 7, service, burst=burst)
    shares, _ = divide(prompts, tokens, service, burst=burst)
    assert sum(n for _, n in shares) == min(tokens, sum(slot.pending for slot in prompts))
    assert all(1 <= n <= slot.pending for slot, n in shares)
    assert len({slot.seq_id for slot, _ in shares}) == len(shares)
    assert divide(prompts, tokens, service, burst=burst)[0] == shares, "it changed what it was given"


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100))
def test_what_was_given_is_booked(prompts: list[Slot], tokens: int, burst: int) -> None:
    shares, service = divide(prompts, tokens, Service(), burst=burst)
    booked = Counter[int]()
    for slot, n in shares:
        booked[slot.tenant] += n
    assert service.tenants == pytest.approx({slot.tenant: booked[slot.tenant] for slot in prompts})


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100))
def test_a_higher_class_takes_all_it_can_use(prompts: list[Slot], tokens: int, burst: int) -> None:
    shares = {slot.seq_id: n for slot, n in divide(prompts, tokens, Service(), burst=burst)[0]}
    highest = min(slot.priority for slot in prompts)
    wanted = sum(slot.pending for slot in prompts if slot.priority is highest)
    assert sum(shares.get(slot.seq_id, 0) for slot in prompts if slot.priority is highest) == min(tokens, wanted)


def test_the_least_served_tenant_goes_first() -> None:
    prompts = [Slot(0, 100, tenant=1), Slot(1, 100, tenant=2)]
    shares, service = divide(prompts, 30, Service({1: 50.0, 2: 20.0}), burst=16)
    assert [(slot.seq_id, n) for slot, n in shares] == [(1, 30)]
    assert service.tenants == {1: 50.0, 2: 50.0}


def test_a_burst_that_a_tick_cut_off_goes_on_in_the_next() -> None:
    reading = Reading([Slot(i, 100) for i in range(3)], burst=16)
    shares = []
    for _ in range(3):
        before = Counter(reading.given)
        reading.divide(20)
        shares.append(sorted((reading.given - before).items()))
    assert shares == [[(0, 16), (1, 4)], [(1, 12), (2, 8)], [(0, 12), (2, 8)]]


def test_who_was_cut_off_and_has_gone_leaves_its_burst_to_nobody() -> None:
    reading = Reading([Slot(i, 100) for i in range(3)], burst=16)
    reading.divide(20)
    reading.prompts = [slot for slot in reading.prompts if slot.seq_id != 1]
    reading.divide(16)
    assert reading.given[2] == 16


# -- equals -----------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 255), min_size=2, max_size=12, unique=True),
    st.integers(1, 64),
    st.booleans(),
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
)
def test_of_a_tenants_prompts_none_is_more_than_a_burst_ahead(seq_ids: list[int], burst: int, others: bool, ticks: list[int]) -> None:
    """However much time a tick has, and whoever else reads."""
    own = [Slot(seq_id, ENDLESS) for seq_id in seq_ids]
    more = [Slot(300, ENDLESS, tenant=5), Slot(301, ENDLESS, tenant=6), Slot(302, ENDLESS, priority=Priority.BACKGROUND)]
    reading = Reading(own + more if others else own, burst)
    for tokens in ticks:
        reading.divide(tokens)
        fed = [reading.given[seq_id] for seq_id in seq_ids]
        assert max(fed) - min(fed) <= burst


def test_a_short_prompt_is_not_kept_waiting_by_long_ones() -> None:
    reading = Reading([Slot(0, ENDLESS), Slot(1, ENDLESS)])
    for _ in range(10):
        reading.divide(100)
    reading.prompts.append(Slot(2, 30))
    reading.divide(100)
    reading.divide(100)
    assert reading.given[2] == 30


# -- nobody never -----------------------------------------------------------------------------------


@given(some_prompts(endless=True), st.integers(1, 64), st.data())
def test_every_prompt_gets_some_in_time(prompts: list[Slot], burst: int, data: st.DataObject) -> None:
    least = data.draw(st.sampled_from([1, burst, 200]))
    most = data.draw(st.sampled_from([least, 2 * least]))
    behind = data.draw(st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 1e6, 1e12])))
    chance = random.Random(data.draw(st.integers(0, 99)))
    reading = Reading(prompts, burst, Service(behind))
    within = bound(prompts, burst=burst, least=least)
    last = dict.fromkeys([slot.seq_id for slot in prompts], 0)
    ticks = min(3 * within, 1500)
    for tick in range(1, ticks + 1):
        last.update(dict.fromkeys(reading.divide(chance.randint(least, most)), tick))
        assert tick - min(last.values()) < within


@given(st.integers(0, 99), st.integers(1, 4))
def test_every_prompt_gets_some_in_time_while_others_come_and_go(seed: int, tenants: int) -> None:
    """Sequences are reused, and all of one class can be away for a while."""
    chance, parallel, burst, least = random.Random(seed), 8, 32, 16
    reading = Reading([], burst)
    waited = Counter[int]()
    worst = (LOWER_CLASS_WAITS + 3 * tenants) * (1 + (parallel - 1) * 2)
    for _ in range(400):
        free = set(range(parallel)) - {slot.seq_id for slot in reading.prompts}
        for seq_id in free:
            if chance.random() < 0.5:
                size = chance.choice([5, 60, 1000, ENDLESS])
                reading.prompts.append(Slot(seq_id, size, priority=chance.choice(list(Priority)), tenant=chance.randrange(tenants)))
        if not reading.prompts:
            continue
        ready = {slot.seq_id for slot in reading.prompts}
        served = set(reading.divide(chance.randint(least, 40)))
        waited = Counter({seq_id: waited[seq_id] + 1 for seq_id in ready - served})
        assert max(waited.values(), default=0) < worst


@given(st.integers(1, 64), st.lists(st.integers(1, 200), min_size=40, max_size=80))
def test_a_lower_class_is_passed_over_only_so_often(burst: int, ticks: list[int]) -> None:
    """Also the lowest of three, which waited as long as the middle one got its turns."""
    reading = Reading([Slot(i, ENDLESS, priority=priority) for i, priority in enumerate(Priority)], burst)
    waited = dict.fromkeys(range(3), 0)
    for tokens in ticks:
        served = reading.divide(tokens)
        waited = {i: 0 if i in served else n + 1 for i, n in waited.items()}
        assert waited[Priority.INTERACTIVE] <= 2  # the two below it have one turn each
        assert waited[Priority.NORMAL] <= LOWER_CLASS_WAITS
        assert waited[Priority.BACKGROUND] <= LOWER_CLASS_WAITS + 1  # both at once: one after the other


def test_a_turn_of_a_lower_class_is_a_burst_and_no_more() -> None:
    reading = Reading([Slot(0, ENDLESS, priority=Priority.INTERACTIVE), Slot(1, ENDLESS)], burst=16)
    for _ in range(10 * (LOWER_CLASS_WAITS + 1)):
        reading.divide(100)
    assert reading.given == {0: 9000 - 160, 1: 160}


# -- tenants ----------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 10), st.integers(1, 10), st.lists(st.integers(1, 500), min_size=1, max_size=80))
def test_backlogged_tenants_are_served_alike_however_many_prompts_they_have(burst: int, n: int, m: int, ticks: list[int]) -> None:
    """The bound of virtual token counters: the difference does not grow with time."""
    reading = Reading([Slot(i, ENDLESS, tenant=int(i < n)) for i in range(n + m)], burst)
    for tokens in ticks:
        reading.divide(tokens)
        assert abs(reading.by_tenant[0] - reading.by_tenant[1]) <= burst


@given(st.integers(0, 99))
def test_sizes_of_requests_do_not_matter(seed: int) -> None:
    """One tenant with two prompts of thousands at a time, one with six of dozens: within a tenth of each other."""
    chance, reading = random.Random(seed), Reading([])
    seq_id = 0
    for _ in range(400):
        for tenant, sizes, many in ((0, (2000, 4000), 2), (1, (20, 60), 6)):
            while sum(slot.tenant == tenant for slot in reading.prompts) < many:
                reading.prompts.append(Slot(seq_id := seq_id + 1, chance.randint(*sizes), tenant=tenant))
        reading.divide(chance.randint(16, 200))
    assert 0.9 < reading.by_tenant[0] / reading.by_tenant[1] < 1.1


def test_generated_tokens_count_twice() -> None:
    service = Service().decoded([Slot(0, tenant=1), Slot(1, tenant=1), Slot(2, tenant=2)])
    assert service.tenants == pytest.approx({1: 4.0, 2: 2.0})
    shares, _ = divide([Slot(3, 100, tenant=1), Slot(4, 100, tenant=2)], 2, service, burst=16)
    assert [slot.seq_id for slot, _ in shares] == [4]


def test_who_comes_starts_where_the_least_served_one_is() -> None:
    service = Service({1: 500.0, 2: 300.0})
    assert service.of(9) == pytest.approx(300.0, rel=1e-12)
    assert service.of(9) < 300.0, "and goes before that one: it may have waited for long"
    assert service.given({9: 10.0}).tenants == pytest.approx({1: 500.0, 2: 300.0, 9: 310.0})
    assert Service().of(9) == pytest.approx(0.0)


def test_nobody_saves_up_while_away() -> None:
    reading = Reading([Slot(0, ENDLESS, tenant=1), Slot(1, 100, tenant=2)])
    while any(slot.tenant == 2 for slot in reading.prompts):
        reading.divide(64)
    reading.service = reading.service.without(2)
    for _ in range(100):
        reading.divide(64)
    reading.prompts.append(Slot(2, ENDLESS, tenant=2))
    before = Counter(reading.by_tenant)
    for _ in range(100):
        reading.divide(64)
    gained = reading.by_tenant - before
    assert abs(gained[1] - gained[2]) <= 64


def test_nobody_is_forgiven_for_going() -> None:
    """What it was given beyond others counts, until they have caught up; then it is forgotten."""
    service = Service({1: 100.0, 2: 900.0, 3: 400.0}).without(2)
    assert service.of(2) == 900.0
    assert service.of(9) == pytest.approx(100.0)
    assert service.given({2: 5.0}) == Service({1: 100.0, 2: 905.0, 3: 400.0})
    later = service.given({1: 1000.0, 3: 1000.0}).without(3)
    assert later.of(2) == pytest.approx(1100.0)
    assert later.away == {3: 1400.0}
    assert later.without(1) == Service(), "where nobody is left nobody has a claim"


def test_nobody_saves_up_with_a_slow_stream() -> None:
    """It has fallen far behind; what it asks for now it gets beside the others, not before them."""
    service = Service({1: 1e6, 2: 10.0, 3: 2e6}).arrived(2, waiting={1, 3})
    assert service.tenants == {1: 1e6, 2: 1e6, 3: 2e6}
    assert service.arrived(3, waiting={1, 2}).tenants == service.tenants, "nor does it lose what it had"
    assert Service({2: 10.0}).arrived(2, waiting=()).tenants == {2: 10.0}
