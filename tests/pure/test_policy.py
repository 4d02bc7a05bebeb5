"""The policy: nobody starves, nothing overflows, and equals are treated alike."""

import doctest
import random
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from uma_trio.config import Scheduling
from uma_trio.scheduling import policy
from uma_trio.scheduling.policy import Pace, Phase, Plan, Share, Slot, Turns, plan

LIMITS = Scheduling()


def prompt(seq_id: int, pending: int) -> Slot:
    return Slot(seq_id, Phase.PREFILL, pending)


def stream(seq_id: int, silent_ms: float = 0.0) -> Slot:
    return Slot(seq_id, Phase.DECODE, silent_ms=silent_ms)


# -- any tick ---------------------------------------------------------------------------------------


@attrs.frozen
class Case:
    """What one call of ``plan`` is given."""

    slots: list[Slot]
    turns: Turns
    budget: int
    capacity: int
    limits: Scheduling

    def plan(self) -> Plan:
        return plan(self.slots, self.turns, budget=self.budget, capacity=self.capacity, limits=self.limits)


@st.composite
def cases(draw: st.DrawFn, *, roomy: bool = True, silences: Sequence[float] = (0.0, 149.0, 151.0, 1e6)) -> Case:
    """Any slots, budget and capacity; ``roomy``: as ``config.load`` makes sure of."""
    n = draw(st.integers(0, 40))
    burst = draw(st.integers(1, 64))
    seq_ids = draw(st.lists(st.integers(0, 255), min_size=n, max_size=n, unique=True))
    slots = [
        stream(seq_id, draw(st.sampled_from(silences)))
        if draw(st.booleans())
        else prompt(seq_id, draw(st.integers(1, 2000)))
        for seq_id in seq_ids
    ]
    turns = Turns(
        draw(st.integers(-1, 255)), draw(st.integers(-1, 255)), draw(st.integers(0, burst - 1)), draw(st.booleans())
    )
    least = n + burst if roomy else burst
    return Case(
        slots,
        turns,
        budget=draw(st.integers(1, 1000)),
        capacity=draw(st.integers(least, least + 600)),
        limits=Scheduling(prefill_burst_tokens=burst),
    )


@given(cases(roomy=False))
def test_a_tick_fits_and_takes_only_what_is_there(case: Case) -> None:
    chosen = case.plan()
    slots = {slot.seq_id: slot for slot in case.slots}
    assert sum(share.n_tokens for share in chosen.shares) <= case.capacity
    assert len({share.seq_id for share in chosen.shares}) == len(chosen.shares)
    for share in chosen.shares:
        assert 1 <= share.n_tokens <= slots[share.seq_id].pending
    of_decodes = [share for share in chosen.shares if slots[share.seq_id].phase is Phase.DECODE]
    assert list(chosen.shares[: len(of_decodes)]) == of_decodes, "decodes come first"
    assert chosen.n_decodes == len(of_decodes)
    assert chosen.n_prompt_tokens == sum(share.n_tokens for share in chosen.shares) - len(of_decodes)
    assert bool(chosen.shares) == bool(case.slots)


@given(cases(roomy=False))
def test_logits_are_wanted_of_decodes_and_ends_of_prompts_alone(case: Case) -> None:
    slots = {slot.seq_id: slot for slot in case.slots}
    for share in case.plan().shares:
        slot = slots[share.seq_id]
        assert share.wants_logits == (slot.phase is Phase.DECODE or share.n_tokens == slot.pending)


@given(cases())
def test_every_stream_is_in_every_tick(case: Case) -> None:
    streams = {slot.seq_id for slot in case.slots if slot.phase is Phase.DECODE}
    assert streams <= {share.seq_id for share in case.plan().shares}


@given(cases())
def test_prompts_wait_for_a_stalled_stream_once_and_else_get_a_burst(case: Case) -> None:
    chosen = case.plan()
    pending = sum(slot.pending for slot in case.slots if slot.phase is Phase.PREFILL)
    stalled = any(slot.silent_ms > 150 for slot in case.slots if slot.phase is Phase.DECODE)
    if stalled and case.turns.had_prompts:
        assert chosen.n_prompt_tokens == 0
        assert not chosen.turns.had_prompts
    else:
        assert chosen.n_prompt_tokens >= min(pending, case.limits.prefill_burst_tokens)
        assert chosen.turns.had_prompts == bool(pending)


@given(cases(silences=(0.0, 149.0)))
def test_no_token_of_room_is_wasted(case: Case) -> None:
    """Unless a stream is stalled, the tick is as full as budget, burst and capacity allow."""
    chosen = case.plan()
    streams = [slot for slot in case.slots if slot.phase is Phase.DECODE]
    pending = sum(slot.pending for slot in case.slots if slot.phase is Phase.PREFILL)
    room = case.capacity - len(streams)
    if streams:
        room = min(room, max(case.budget - len(streams), case.limits.prefill_burst_tokens))
    assert chosen.n_prompt_tokens == min(pending, room)


@given(cases(roomy=False), st.randoms())
def test_the_same_in_any_order_and_at_any_time(case: Case, chance: random.Random) -> None:
    chosen = case.plan()
    assert case.plan() == chosen
    chance.shuffle(case.slots)
    assert case.plan() == chosen


def test_nothing_ready() -> None:
    assert plan([], Turns(), budget=32, capacity=64, limits=LIMITS) == Plan((), Turns(), 0, 0)


def test_streams_that_exceed_the_capacity_take_turns() -> None:
    turns, seen = Turns(), []
    for _ in range(4):
        chosen = plan([stream(i) for i in range(5)], turns, budget=2, capacity=2, limits=LIMITS)
        seen.append([share.seq_id for share in chosen.shares])
        turns = chosen.turns
    assert seen == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_streams_that_exceed_the_capacity_leave_prompts_a_burst() -> None:
    slots = [*(stream(i) for i in range(50)), prompt(99, 100)]
    chosen = plan(slots, Turns(), budget=32, capacity=40, limits=LIMITS)
    assert (chosen.n_decodes, chosen.n_prompt_tokens) == (24, 16)


def test_a_burst_that_a_tick_cut_off_goes_on_in_the_next() -> None:
    turns, seen = Turns(), []
    for _ in range(3):
        chosen = plan([prompt(i, 100) for i in range(3)] + [stream(9)], turns, budget=21, capacity=64, limits=LIMITS)
        seen.append([(share.seq_id, share.n_tokens) for share in chosen.shares[1:]])
        turns = chosen.turns
    assert seen == [[(0, 16), (1, 4)], [(1, 12), (2, 8)], [(2, 8), (0, 12)]]


def test_alone_a_prompt_may_fill_the_tick() -> None:
    chosen = plan([prompt(3, 5000)], Turns(), budget=32, capacity=512, limits=LIMITS)
    assert chosen.shares == (Share(3, 512, wants_logits=False),)


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(policy).failed == 0


# -- many ticks -------------------------------------------------------------------------------------


@attrs.define
class Held:
    """One sequence of the simulated house."""

    pending: int
    to_generate: int
    phase: Phase = Phase.PREFILL
    last_token_ms: float = 0.0
    waited_ticks: int = 0
    fed: int = 0


@attrs.define
class House:
    """Ticks with a clock that the device's cost moves."""

    limits: Scheduling
    capacity: int
    parallel: int
    cost: tuple[float, float, float]
    now_ms: float = 0.0
    turns: Turns = attrs.field(factory=Turns)
    pace: Pace = attrs.field(default=Pace(64))
    sequences: dict[int, Held] = attrs.field(factory=dict)

    def tick(self, ready: set[int] | None = None) -> Plan:
        slots = [
            Slot(seq_id, sequence.phase, sequence.pending, self.now_ms - sequence.last_token_ms)
            for seq_id, sequence in self.sequences.items()
            if ready is None or seq_id in ready
        ]
        chosen = plan(slots, self.turns, budget=self.pace.budget, capacity=self.capacity, limits=self.limits)
        a, b, c = self.cost
        took = a + b * chosen.n_prompt_tokens + c * chosen.n_decodes
        self.now_ms += took
        self.turns = chosen.turns
        if chosen.n_decodes and chosen.n_prompt_tokens:
            n_tokens = chosen.n_decodes + chosen.n_prompt_tokens
            self.pace = self.pace.after(took, capacity=self.capacity, limits=self.limits, n_tokens=n_tokens)
        served = {share.seq_id: share for share in chosen.shares}
        for slot in slots:
            sequence = self.sequences[slot.seq_id]
            share = served.get(slot.seq_id)
            if share is None:
                sequence.waited_ticks += 1
                continue
            sequence.waited_ticks = 0
            sequence.pending -= share.n_tokens
            sequence.fed += share.n_tokens
            if share.wants_logits:
                sequence.phase, sequence.pending, sequence.last_token_ms = Phase.DECODE, 1, self.now_ms
                sequence.to_generate -= 1
                if sequence.to_generate == 0:
                    del self.sequences[slot.seq_id]
        return chosen


@st.composite
def houses(draw: st.DrawFn) -> House:
    parallel = draw(st.integers(1, 32))
    limits = Scheduling(
        prefill_burst_tokens=draw(st.integers(1, 64)),
        min_budget_tokens=draw(st.integers(1, 32)),
        tick_target_ms=draw(st.sampled_from([1.0, 30.0, 1000.0])),
        stall_guard_ms=draw(st.sampled_from([1.0, 150.0, 10_000.0])),
    )
    least = max(parallel + limits.prefill_burst_tokens, limits.min_budget_tokens)
    # a device whose decodes alone are slower than the guard, and one that is much faster than the target
    cost = draw(st.sampled_from([(0.1, 0.001, 0.01), (5.0, 0.1, 0.5), (400.0, 5.0, 50.0), (160.0, 0.0, 0.0)]))
    capacity = draw(st.integers(least, least + 512))
    start = draw(st.integers(1, capacity))
    return House(limits, capacity, parallel, cost, pace=Pace(start))


@given(houses(), st.data())
def test_nobody_starves(house: House, data: st.DataObject) -> None:
    """Arrivals, ends and pauses as they come: a prompt advances within 2 * parallel ticks, a stream in each."""
    for _ in range(data.draw(st.integers(5, 40))):
        for seq_id in range(house.parallel):
            if seq_id not in house.sequences and data.draw(st.booleans()):
                pending, n = data.draw(st.sampled_from([(1, 3), (20, 100), (3000, 1), (100_000, 1)]))
                house.sequences[seq_id] = Held(pending, n)
        chosen = house.tick()
        assert sum(share.n_tokens for share in chosen.shares) <= house.capacity
        for sequence in house.sequences.values():
            if sequence.phase is Phase.DECODE:
                assert sequence.waited_ticks == 0
            else:
                assert sequence.waited_ticks < 2 * house.parallel


@given(houses(), st.integers(1, 16), st.integers(0, 16))
def test_every_request_is_served_to_its_end(house: House, n_prompts: int, n_streams: int) -> None:
    for seq_id in range(min(n_prompts + n_streams, house.parallel)):
        house.sequences[seq_id] = Held(40 if seq_id < n_prompts else 1, 10)
    tokens = sum(sequence.pending for sequence in house.sequences.values())
    bound = 2 * (tokens // house.limits.prefill_burst_tokens + house.parallel) + 2 * 10
    for _ in range(bound):
        if house.sequences:
            house.tick()
    assert not house.sequences


@pytest.mark.parametrize("n_streams", [1, 16, 200])
def test_a_prompt_goes_on_where_decoding_alone_is_slower_than_the_guard(n_streams: int) -> None:
    """Also with more streams than the budget has tokens: in every second tick, a burst."""
    house = House(LIMITS, 256, 256, (200.0, 1.0, 1.0), pace=Pace(32))
    house.sequences = {i: Held(1, 10_000, Phase.DECODE) for i in range(n_streams)}
    house.sequences[n_streams] = Held(320, 1)
    for _ in range(40):
        house.tick()
    assert n_streams not in house.sequences


def test_a_stream_that_is_not_ready_neither_waits_nor_makes_others_wait() -> None:
    house = House(LIMITS, 256, 8, (5.0, 0.1, 0.5))
    house.sequences = {0: Held(1, 100, Phase.DECODE), 1: Held(1, 100, Phase.DECODE)}
    house.now_ms = 1e6
    for _ in range(5):
        assert [share.seq_id for share in house.tick(ready={1}).shares] == [1]
    assert house.sequences[0].to_generate == 100


@given(st.integers(2, 12), st.integers(1, 64), st.integers(0, 8), st.data())
def test_equal_prompts_advance_alike(n: int, burst: int, n_streams: int, data: st.DataObject) -> None:
    """However the budget moves, no prompt is ever more than a burst ahead of another."""
    limits = Scheduling(prefill_burst_tokens=burst)
    fed, turns = dict.fromkeys(range(n), 0), Turns()
    streams = [stream(100 + i, data.draw(st.sampled_from([0.0, 0.0, 200.0]))) for i in range(n_streams)]
    for _ in range(data.draw(st.integers(1, 30))):
        chosen = plan(
            [prompt(i, 1_000_000) for i in fed] + streams,
            turns,
            budget=data.draw(st.integers(1, 400)),
            capacity=n + n_streams + burst + 300,
            limits=limits,
        )
        turns = chosen.turns
        for share in chosen.shares:
            if share.seq_id < n:
                fed[share.seq_id] += share.n_tokens
        assert max(fed.values()) - min(fed.values()) <= burst


def test_a_short_prompt_is_not_kept_waiting_by_long_ones() -> None:
    house = House(LIMITS, 512, 16, (5.0, 0.1, 0.5))
    house.sequences = {0: Held(1, 1000, Phase.DECODE), 1: Held(50_000, 1), 2: Held(50_000, 1)}
    for _ in range(10):
        house.tick()
    house.sequences[3] = Held(30, 1000)
    house.tick()
    house.tick()
    assert house.sequences[3].phase is Phase.DECODE


# -- pace -------------------------------------------------------------------------------------------


def settle(cost: tuple[float, float, float], *, n_decodes: int = 4, start: int = 128, capacity: int = 512, ticks: int = 300) -> tuple[list[float], list[int]]:
    """Milliseconds and budgets of ticks that are always as full as they may be."""
    a, b, c = cost
    pace, took, budgets = Pace(start), [], []
    for _ in range(ticks):
        n_prompt = min(max(pace.budget - n_decodes, LIMITS.prefill_burst_tokens), capacity - n_decodes)
        took.append(a + b * n_prompt + c * n_decodes)
        pace = pace.after(took[-1], capacity=capacity, limits=LIMITS, n_tokens=n_prompt + n_decodes)
        budgets.append(pace.budget)
    return took, budgets


DEVICES = [(0, 0.1, 0.1), (5, 0.1, 0.5), (5, 0.3, 0.5), (20, 0.05, 0.5), (10, 0.4, 1.5), (0.5, 0.06, 0), (28, 0.01, 0.1)]


@pytest.mark.parametrize("cost", DEVICES)
@pytest.mark.parametrize("start", [1, 32, 128, 512])
def test_pace_settles_near_the_target(cost: tuple[float, float, float], start: int) -> None:
    took, budgets = settle(cost, start=start)
    target = LIMITS.tick_target_ms
    assert all(0.75 * target <= ms <= 1.05 * target for ms in took[50:])
    assert max(budgets[100:]) - min(budgets[100:]) <= 0.1 * max(budgets[100:]), "it swings"


@pytest.mark.parametrize("cost", [(5, 3, 1), (50, 0.1, 0.5), (1000, 10, 10)])
def test_pace_stays_at_the_floor_where_even_that_is_too_slow(cost: tuple[float, float, float]) -> None:
    _, budgets = settle(cost)
    assert set(budgets[20:]) == {LIMITS.min_budget_tokens}


def test_pace_fills_the_batch_where_that_is_quick() -> None:
    _, budgets = settle((1, 0.01, 0.01))
    assert set(budgets[40:]) == {512}


@pytest.mark.parametrize(("before", "after"), [((5, 0.1, 0.5), (5, 0.5, 0.5)), ((5, 0.5, 0.5), (5, 0.1, 0.5))])
def test_pace_follows_a_device_that_changes(before: tuple[float, ...], after: tuple[float, ...]) -> None:
    _, budgets = settle(before)  # type: ignore[arg-type]
    took, _ = settle(after, start=budgets[-1], ticks=60)  # type: ignore[arg-type]
    assert 0.75 * LIMITS.tick_target_ms <= took[-1] <= 1.05 * LIMITS.tick_target_ms


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 600) | st.none()), max_size=60),
    st.integers(1, 8192),
    st.integers(1, 8192),
    st.integers(1, 8192),
)
def test_pace_never_leaves_its_bounds(ticks: list[tuple[float, int | None]], capacity: int, floor: int, start: int) -> None:
    assume(start <= capacity)
    limits = Scheduling(min_budget_tokens=floor)
    pace = Pace(start)
    for took, n_tokens in ticks:
        before, pace = pace, pace.after(took, capacity=capacity, limits=limits, n_tokens=n_tokens)
        assert pace == before or min(floor, capacity) <= pace.budget <= capacity


def test_short_ticks_do_not_raise_the_budget() -> None:
    """Many short prompts are quick; the long one after them must not get a tick of half a second."""
    pace = Pace(64, average_ms=28.0)
    for _ in range(100):
        assert pace.after(9.0, capacity=512, limits=LIMITS, n_tokens=10) == pace
    assert pace.after(90.0, capacity=512, limits=LIMITS, n_tokens=10).budget < 64
