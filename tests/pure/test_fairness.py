"""Whose prompt is read: higher classes, the least served and who is due first, and nobody never."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.device import CPU, House
from uma_trio.scheduling.fairness import LOWER_CLASS_WAITS, ROUND, Service, divide
from uma_trio.scheduling.policy import Priority, Slot

ENDLESS = 1 << 60


def bound(prompts: list[Slot]) -> int:
    """Divisions within which each prompt gets some, as ``divide`` promises."""
    groups = Counter((slot.priority, slot.tenant) for slot in prompts)
    return ROUND * max(groups.values()) * (LOWER_CLASS_WAITS + len(groups) if len(groups) > 1 else 1)


@st.composite
def some_prompts(draw: st.DrawFn, *, endless: bool = False, most: int = 12) -> list[Slot]:
    seq_ids = draw(st.lists(st.integers(0, 255), min_size=1, max_size=most, unique=True))
    sizes = st.just(ENDLESS) if endless else st.integers(1, 500)
    dues = st.sampled_from([-5.0, 0.5, 1.0, 2.0, math.inf])
    who = {"priority": st.sampled_from(Priority), "tenant": st.integers(0, 3)}
    return [
        Slot(seq_id, draw(sizes), due_s=draw(dues), **{name: draw(values) for name, values in who.items()})
        for seq_id in seq_ids
    ]


def read_first(slot: Slot, burst: int) -> tuple[bool, float, int]:
    """The order of one tenant's prompts."""
    return slot.pending > burst, slot.due_s, slot.seq_id


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


def later(prompts: list[Slot], divisions: int) -> Service:
    """What so many divisions leave."""
    service = Service()
    for _ in range(divisions):
        _, service = divide(prompts, 7, service, burst=5)
    return service


# -- one division -----------------------------------------------------------------------------------


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30))
def test_all_tokens_are_given_and_none_that_nobody_wants(
    prompts: list[Slot], tokens: int, burst: int, before: int
) -> None:
    service = later(prompts, before)
    shares, _ = divide(prompts, tokens, service, burst=burst)
    assert sum(n for _, n in shares) == min(tokens, sum(slot.pending for slot in prompts))
    assert all(1 <= n <= slot.pending for slot, n in shares)
    assert len({slot.seq_id for slot, _ in shares}) == len(shares)


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30), st.randoms())
def test_the_same_at_any_time_and_nothing_is_changed(
    prompts: list[Slot], tokens: int, burst: int, before: int, chance: random.Random
) -> None:
    service = later(prompts, before)
    slots, was = [attrs.asdict(slot) for slot in prompts], (dict(service.tenants), dict(service.turns))
    shares, after = divide(prompts, tokens, service, burst=burst)
    assert divide(prompts, tokens, service, burst=burst) == (shares, after)
    assert [attrs.asdict(slot) for slot in prompts] == slots
    assert (service.tenants, service.turns) == was
    chance.shuffle(prompts)
    assert divide(prompts, tokens, service, burst=burst) == (shares, after), "the order they come in matters"


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100), st.integers(0, 30))
def test_what_was_given_is_booked(prompts: list[Slot], tokens: int, burst: int, before: int) -> None:
    service = later(prompts, before)
    expected = {slot.tenant: service.of(slot.tenant) for slot in prompts}
    shares, after = divide(prompts, tokens, service, burst=burst)
    for slot, n in shares:
        expected[slot.tenant] += n
    assert after.tenants == pytest.approx(expected)


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


# -- of one tenant ----------------------------------------------------------------------------------


@given(some_prompts(), st.integers(1, 2000), st.integers(1, 100))
def test_each_gets_all_it_can_use_before_the_next(prompts: list[Slot], tokens: int, burst: int) -> None:
    """Those that a burst completes first, the others after them, each by due time."""
    for slot in prompts:
        slot.priority, slot.tenant = Priority.NORMAL, 0
    expected, left = {}, tokens
    for slot in sorted(prompts, key=lambda slot: read_first(slot, burst)):
        if n := min(left, slot.pending):
            expected[slot.seq_id] = n
            left -= n
    assert {slot.seq_id: n for slot, n in divide(prompts, tokens, Service(), burst=burst)[0]} == expected


def test_with_equal_targets_it_is_the_order_of_arrival() -> None:
    reading = Reading([Slot(2, 300, due_s=1.0), Slot(0, 300, due_s=3.0), Slot(1, 300, due_s=2.0)])
    assert [reading.divide(100) for _ in range(6)] == [[2], [2], [2], [1], [1], [1]]


def test_a_short_prompt_is_not_kept_waiting_by_long_ones() -> None:
    reading = Reading([Slot(0, ENDLESS, due_s=0.0), Slot(1, ENDLESS, due_s=1.0)])
    reading.divide(100)
    reading.prompts.append(Slot(2, 64, due_s=9.0))
    reading.divide(100)
    assert reading.given == {0: 136, 2: 64}


def test_who_asks_for_a_tight_target_goes_earlier() -> None:
    reading = Reading([Slot(0, ENDLESS, due_s=10.0), Slot(1, ENDLESS, due_s=11.0)])
    reading.divide(100)
    reading.prompts.append(Slot(2, 300, due_s=5.0))
    assert [reading.divide(100) for _ in range(4)] == [[2], [2], [2], [0]]


def test_every_eighth_division_begins_with_the_next_in_rotation() -> None:
    reading = Reading([Slot(seq_id, ENDLESS, due_s=seq_id == 3) for seq_id in (3, 5, 9)], burst=16)
    in_rotation = []
    for _ in range(5):
        assert [reading.divide(100) for _ in range(ROUND - 1)] == [[5]] * (ROUND - 1)
        before = Counter(reading.given)
        reading.divide(100)
        in_rotation.append(dict(reading.given - before))
    assert in_rotation == [{3: 16, 5: 84}, {5: 100}, {9: 16, 5: 84}, {3: 16, 5: 84}, {5: 100}]


def test_the_rotation_goes_on_after_one_that_has_gone() -> None:
    reading = Reading([Slot(seq_id, ENDLESS, due_s=seq_id) for seq_id in range(4)], burst=16)
    for _ in range(2 * ROUND):
        reading.divide(16)
    del reading.prompts[1]
    for _ in range(ROUND):
        reading.divide(16)
    assert dict(reading.given) == {0: 16 * (3 * ROUND - 2), 1: 16, 2: 16}


def test_only_divisions_that_give_the_tenant_something_count_for_its_rotation() -> None:
    """Tenants that take turns by bursts have rounds of their own."""
    reading = Reading([Slot(seq_id, ENDLESS, due_s=seq_id, tenant=seq_id % 2) for seq_id in range(4)], burst=16)
    for _ in range(4 * ROUND):
        reading.divide(16)
    assert dict(reading.given) == {0: 16 * (2 * ROUND - 1), 1: 16 * (2 * ROUND - 1), 2: 16, 3: 16}


def test_long_prompts_that_come_together_end_one_after_the_other() -> None:
    """Read in turns all would have their first token at the end."""
    house, first_token_s = House(CPU), {}
    for arrived, seq_id in enumerate((3, 0, 4, 2, 1)):
        house.read(seq_id, 2000, n=1).slot.due_s = 1.0 + arrived / 1e3
    while house.held:
        before = set(house.held)
        house.tick()
        first_token_s |= dict.fromkeys(before - set(house.held), house.now_s)
    assert list(first_token_s) == [3, 0, 4, 2, 1]
    assert statistics.mean(first_token_s.values()) <= 0.65 * max(first_token_s.values())


# -- nobody never -----------------------------------------------------------------------------------


@given(some_prompts(endless=True), st.integers(1, 64), st.data())
def test_every_prompt_gets_some_in_time(prompts: list[Slot], burst: int, data: st.DataObject) -> None:
    least = data.draw(st.sampled_from([1, burst, 200]))
    most = data.draw(st.sampled_from([least, 2 * least]))
    behind = data.draw(st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 1e6, 1e12])))
    chance = random.Random(data.draw(st.integers(0, 99)))
    reading = Reading(prompts, burst, Service(behind))
    within = bound(prompts)
    last = dict.fromkeys([slot.seq_id for slot in prompts], 0)
    ticks = min(3 * within, 1500)
    for tick in range(1, ticks + 1):
        last.update(dict.fromkeys(reading.divide(chance.randint(least, most)), tick))
        assert tick - min(last.values()) < within


@given(st.integers(0, 99), st.integers(1, 4))
def test_every_prompt_gets_some_in_time_while_others_come_and_go(seed: int, tenants: int) -> None:
    """Sequences are reused, those who come are ever more in a hurry, and all of one class can be away for a while."""
    chance, parallel, burst, least = random.Random(seed), 8, 32, 16
    reading = Reading([], burst)
    waited = Counter[int]()
    worst = ROUND * parallel * (LOWER_CLASS_WAITS + min(parallel, 3 * tenants))
    for tick in range(1000):
        free = set(range(parallel)) - {slot.seq_id for slot in reading.prompts}
        for seq_id in free:
            if chance.random() < 0.5:
                size, due_s = chance.choice([5, 60, 1000, ENDLESS]), chance.choice([0.0, -tick, math.inf])
                who = {"priority": chance.choice(list(Priority)), "tenant": chance.randrange(tenants)}
                reading.prompts.append(Slot(seq_id, size, due_s=due_s, **who))
        if not reading.prompts:
            continue
        ready = {slot.seq_id for slot in reading.prompts}
        served = set(reading.divide(chance.randint(least, 40)))
        waited = Counter({seq_id: waited[seq_id] + 1 for seq_id in ready - served})
        assert max(waited.values(), default=0) < worst


@given(st.integers(1, 64), st.integers(2, 8), st.integers(1, 100))
def test_a_long_prompt_is_read_beside_short_and_urgent_ones_without_end(burst: int, parallel: int, tokens: int) -> None:
    """Of one tenant alone each gets some within ``ROUND`` divisions for each sequence."""
    reading, waited = Reading([Slot(0, ENDLESS)], burst), 0
    for tick in range(200):
        free = set(range(parallel)) - {slot.seq_id for slot in reading.prompts}
        reading.prompts += [Slot(seq_id, burst if tick % 2 else 500, due_s=-tick) for seq_id in free]
        waited = 0 if 0 in reading.divide(tokens) else waited + 1
        assert waited < ROUND * parallel


def test_who_is_read_to_the_end_at_once_was_not_passed_over() -> None:
    """A tenant's tiny background prompts, always a new one: never a whole turn, and yet no claim to the next."""
    reading = Reading([Slot(0, ENDLESS, priority=Priority.INTERACTIVE), Slot(1, ENDLESS)], burst=16)
    for _ in range(10 * (LOWER_CLASS_WAITS + 2)):
        if len(reading.prompts) < 3:
            reading.prompts.append(Slot(2, 5, priority=Priority.BACKGROUND))
        reading.divide(16)
    assert reading.given[1] >= 16 * 9


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


def test_who_has_waited_longest_has_the_first_turn() -> None:
    """Though there are more of them than ticks that each is passed over."""
    many = 2 * LOWER_CLASS_WAITS
    reading = Reading([Slot(i, ENDLESS, tenant=i, priority=Priority.BACKGROUND) for i in range(many)], burst=16)
    reading.prompts.append(Slot(many, ENDLESS, tenant=many, priority=Priority.INTERACTIVE))
    for _ in range(LOWER_CLASS_WAITS + 3 * (many + 1)):
        reading.divide(16)
    assert {reading.given[i] for i in range(many)} == {48}


def test_leavings_are_no_turn() -> None:
    """What the higher class cannot use is too little to wait for."""
    reading = Reading([Slot(0, ENDLESS)], burst=16)
    for tick in range(10 * (LOWER_CLASS_WAITS + 1)):
        reading.prompts.append(Slot(tick + 1, 15, priority=Priority.INTERACTIVE))
        reading.divide(16)
        reading.prompts = reading.prompts[:1]
    assert reading.given[0] == 10 * (16 + LOWER_CLASS_WAITS)


# -- tenants ----------------------------------------------------------------------------------------


@given(
    st.integers(1, 64), st.integers(1, 10), st.integers(1, 10), st.lists(st.integers(1, 500), min_size=1, max_size=80)
)
def test_backlogged_tenants_are_served_alike_however_many_prompts_they_have(
    burst: int, n: int, m: int, ticks: list[int]
) -> None:
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
