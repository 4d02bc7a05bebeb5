"""The policy: nobody starves, nothing overflows, and streams are on time where the device can do it."""

from __future__ import annotations

import doctest
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.device import CPU, FLAT, GPU, QUICK, SLOW, TOO_SLOW, Device, House
from uma_trio.config import Scheduling
from uma_trio.scheduling import policy
from uma_trio.scheduling.cost import SCALES, CostModel, Line, Widths, Work
from uma_trio.scheduling.fairness import LOWER_CLASS_WAITS, ROUND, Service
from uma_trio.scheduling.policy import (
    BACKGROUND_SITS_OUT,
    EVEN,
    EVEN_FROM,
    WORTH_DRAFTING,
    Memory,
    Plan,
    Priority,
    Share,
    Slot,
    plan,
)

LIMITS = Scheduling()
DEVICES = [CPU, GPU, QUICK, FLAT, SLOW, TOO_SLOW]


def known(device: Device) -> CostModel:
    """The cost model that has learned all there is to learn of ``device``."""
    a, b, c, d, e = SCALES
    alone = Line((device.a * a, device.b * b, device.c * c, device.d * d, device.e * e))
    return CostModel(
        alone, attrs.evolve(alone, coefficients=(alone.coefficients[0] + device.step, *alone.coefficients[1:]))
    )


# -- any tick ---------------------------------------------------------------------------------------


@attrs.frozen
class Case:
    """What one call of ``plan`` is given."""

    streams: list[Slot]
    prompts: list[Slot]
    memory: Memory
    cost: CostModel
    capacity: int
    limits: Scheduling

    def plan(self) -> Plan:
        return plan(
            self.streams,
            self.prompts,
            self.memory,
            now_s=0.0,
            cost=self.cost,
            capacity=self.capacity,
            limits=self.limits,
        )

    @property
    def least(self) -> int:
        """Tokens that a tick with prompts has for them at least."""
        return min(self.limits.min_chunk_tokens, self.capacity - len(self.streams))


@st.composite
def cases(draw: st.DrawFn, *, in_time: bool = False) -> Case:
    """Any slots, history and device; the capacity is as ``config.load`` makes sure of."""
    n, m = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    seq_ids = draw(st.permutations(range(40)))
    dues = st.just(math.inf) if in_time else st.sampled_from([-1000.0, -0.01, 0.0, 0.02, 0.1, 0.5, math.inf])
    who = {
        "priority": st.sampled_from(Priority),
        "tenant": st.integers(0, 3),
        "context": st.sampled_from([0, 50, 20_000]),
    }
    streams = [
        Slot(seq_id, due_s=draw(dues), **{name: draw(values) for name, values in who.items()}) for seq_id in seq_ids[:n]
    ]
    prompts = [
        Slot(seq_id, draw(st.integers(1, 2000)), **{name: draw(values) for name, values in who.items()})
        for seq_id in seq_ids[n : n + m]
    ]
    burst, chunk = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    limits = Scheduling(
        prefill_burst_tokens=burst, min_chunk_tokens=chunk, prefill_tick_ms=draw(st.sampled_from([1.0, 250.0, 1e5]))
    )
    behind = draw(st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 5.0, 1e9])))
    memory = Memory(Service(behind), draw(st.booleans()), draw(st.integers(0, BACKGROUND_SITS_OUT)))
    least = n + max(burst, chunk)
    capacity = draw(st.integers(least, least + 600))
    return Case(streams, prompts, memory, known(draw(st.sampled_from(DEVICES))), capacity, limits)


@given(cases())
def test_a_tick_fits_and_takes_only_what_is_there(case: Case) -> None:
    chosen = case.plan()
    pending = {slot.seq_id: slot.pending for slot in case.prompts}
    assert len(chosen.streams) + sum(share.n_tokens for share in chosen.shares) <= case.capacity
    assert len({share.seq_id for share in chosen.shares}) == len(chosen.shares)
    for share in chosen.shares:
        assert 1 <= share.n_tokens <= pending[share.seq_id]
        assert share.ends == (share.n_tokens == pending[share.seq_id])
    assert {id(slot) for slot in chosen.streams} <= {id(slot) for slot in case.streams}
    assert bool(chosen.streams or chosen.shares) == bool(case.streams or case.prompts)


@given(cases())
def test_the_work_is_what_the_plan_holds(case: Case) -> None:
    chosen = case.plan()
    shares = {share.seq_id: share.n_tokens for share in chosen.shares}
    read = sum(slot.context for slot in chosen.streams)
    before = sum(slot.context * shares.get(slot.seq_id, 0) for slot in case.prompts) / max(1, sum(shares.values()))
    assert chosen.work == Work(sum(shares.values()), len(chosen.streams), read, before)
    assert chosen.predicted_ms == case.cost.predict(chosen.work)


@given(cases())
def test_every_stream_that_is_not_background_is_in_every_tick(case: Case) -> None:
    chosen = case.plan()
    left_out = [slot for slot in case.streams if slot not in chosen.streams]
    assert all(slot.priority is Priority.BACKGROUND for slot in left_out)
    assert chosen.memory.sat_out == (case.memory.sat_out + 1 if left_out else 0)
    assert chosen.memory.sat_out <= BACKGROUND_SITS_OUT


@given(cases())
def test_background_streams_sit_out_only_where_they_would_make_others_late(case: Case) -> None:
    chosen = case.plan()
    if len(chosen.streams) < len(case.streams):
        everybody = Work(0, len(case.streams), sum(slot.context for slot in case.streams))
        due_ms = 1e3 * min(slot.due_s for slot in chosen.streams)
        assert case.cost.predict(everybody) > due_ms


@given(cases())
def test_prompts_are_put_off_by_one_tick_at_most_and_then_get_a_chunk(case: Case) -> None:
    chosen = case.plan()
    assert chosen.memory.had_prompts == bool(chosen.shares)
    pending = sum(slot.pending for slot in case.prompts)
    if not case.memory.had_prompts or not chosen.streams:
        assert chosen.work.prompt_tokens >= min(case.least, pending)


@given(cases())
def test_prompts_make_nobody_late_unless_it_is_their_turn(case: Case) -> None:
    """Within what one more token takes, for tokens are whole; and not before a chunk that pays fits."""
    chosen = case.plan()
    assume(chosen.shares and chosen.streams)
    due_ms = 1e3 * min(slot.due_s for slot in chosen.streams)
    if chosen.predicted_ms > due_ms * (1 + 1e-9):
        assert not case.memory.had_prompts
        assert chosen.work.prompt_tokens <= case.limits.min_chunk_tokens


@given(cases())
def test_without_streams_a_tick_is_no_longer_than_prefill_tick_ms(case: Case) -> None:
    """Unless even four of the smallest chunks take longer: less would not pay."""
    chosen = attrs.evolve(case, streams=[]).plan()
    if chosen.work.prompt_tokens > 4 * case.limits.min_chunk_tokens:
        assert chosen.predicted_ms <= case.limits.prefill_tick_ms * (1 + 1e-9)


@given(cases(in_time=True))
def test_no_room_is_wasted_where_time_allows(case: Case) -> None:
    if not case.streams:
        case = attrs.evolve(case, limits=attrs.evolve(case.limits, prefill_tick_ms=1e12))
    chosen = case.plan()
    assert len(chosen.streams) == len(case.streams)
    pending = sum(slot.pending for slot in case.prompts)
    room = case.capacity - len(case.streams)
    if EVEN_FROM <= room < pending:
        room -= (room + len(case.streams)) % EVEN
    assert chosen.work.prompt_tokens == min(pending, room)


@given(cases(), st.randoms())
def test_the_same_at_any_time_and_nothing_is_changed(case: Case, chance: random.Random) -> None:
    before = [attrs.asdict(slot) for slot in case.streams + case.prompts]
    chosen = case.plan()
    assert case.plan() == chosen
    assert [attrs.asdict(slot) for slot in case.streams + case.prompts] == before
    chance.shuffle(case.streams)
    shuffled = case.plan()
    assert shuffled.work == chosen.work
    assert {slot.seq_id for slot in shuffled.streams} == {slot.seq_id for slot in chosen.streams}


def test_nothing_ready() -> None:
    chosen = plan([], [], Memory(), now_s=0.0, cost=CostModel(), capacity=64, limits=LIMITS)
    assert (chosen.streams, chosen.shares, chosen.work) == ([], (), Work(0, 0, 0))


def test_alone_a_prompt_takes_what_there_is_time_for() -> None:
    for device, expected in ((QUICK, 512), (CPU, 208)):  # 250 = 3 + 1.05 n + 0.00025 n n, and n even
        chosen = plan([], [Slot(3, 5000)], Memory(), now_s=0.0, cost=known(device), capacity=512, limits=LIMITS)
        assert chosen.shares == (Share(3, expected, ends=False),)


def test_what_was_read_of_a_prompt_counts_in_its_chunks_time() -> None:
    """The same stream and the same prompt, once at its beginning and once behind 2,000 tokens."""
    sizes = []
    for context in (0, 2000):
        chosen = plan(
            [Slot(0, due_s=0.1)],
            [Slot(3, 5000, context)],
            Memory(),
            now_s=0.0,
            cost=known(CPU),
            capacity=512,
            limits=LIMITS,
        )
        sizes.append(chosen.work.prompt_tokens)
        assert chosen.predicted_ms <= 100
    assert sizes == [79, 45]


@pytest.mark.parametrize(("pending", "got"), [(87, 87), (88, 79), (5000, 79)])
def test_a_chunk_that_is_not_the_last_makes_the_call_even(pending: int, got: int) -> None:
    """87 fit beside the stream; 79 and it are a multiple of 16."""
    chosen = plan(
        [Slot(0, due_s=0.1)], [Slot(3, pending)], Memory(), now_s=0.0, cost=known(CPU), capacity=512, limits=LIMITS
    )
    assert chosen.work.prompt_tokens == got


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(policy).failed == 0


# -- many ticks: nobody starves ---------------------------------------------------------------------


def bound(parallel: int, groups: int) -> int:
    """Ticks within which every admitted prompt advances, whatever the load and the device.

    Every other tick has prompts; then each class of each tenant is passed over only so often, and within
    it every prompt has its turn in a rotation.
    """
    return 2 * ROUND * parallel * (LOWER_CLASS_WAITS + groups if groups > 1 else 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nobody_starves(device: Device, seed: int) -> None:
    """Arrivals, ends and noise as they come, more work than the device can do."""
    chance = random.Random(seed)
    parallel, tenants = chance.choice([3, 6]), chance.choice([1, 3])
    limits = Scheduling(
        prefill_burst_tokens=chance.choice([8, 32]),
        min_chunk_tokens=chance.choice([4, 16]),
        target_tbt_ms=chance.choice([1.0, 50.0, 1000.0]),
    )
    house = House(
        attrs.evolve(device, noise=0.1, chance=chance), limits, capacity=parallel + limits.prefill_burst_tokens + 100
    )
    within = bound(parallel, min(parallel, 3 * tenants))
    for _ in range(1500):
        for seq_id in range(parallel):
            if seq_id not in house.held and chance.random() < 0.3:
                target = chance.choice([None, 0.001, 20.0, 10_000.0])
                pending, n = chance.choice([(1, 3), (20, 100), (300, 1), (math.inf, 1)]) if seq_id else (20, math.inf)
                house.read(
                    seq_id,
                    pending,
                    n=n,
                    target_ms=target,
                    priority=chance.choice(list(Priority)),
                    tenant=chance.randrange(tenants),
                )
        chosen = house.tick()
        assert len(chosen.streams) + chosen.work.prompt_tokens <= house.capacity
        for held in house.held.values():
            if not held.decoding:
                assert held.waited < within
            elif held.slot.priority is Priority.BACKGROUND:
                assert held.waited <= BACKGROUND_SITS_OUT
            else:
                assert held.waited == 0


@pytest.mark.parametrize("n_streams", [1, 16, 200])
def test_a_prompt_goes_on_where_decoding_alone_is_slower_than_every_target(n_streams: int) -> None:
    house = House(TOO_SLOW, capacity=512)
    for seq_id in range(n_streams):
        house.decode(seq_id)
    prompt = house.read(300, 160)
    for _ in range(2 * 160 // LIMITS.min_chunk_tokens):
        house.tick()
    assert prompt.decoding


def test_every_request_is_served_to_its_end() -> None:
    for device in DEVICES:
        house = House(device)
        for seq_id in range(12):
            house.read(seq_id, 1 + 37 * seq_id, n=10, priority=Priority(seq_id % 3), tenant=seq_id % 2)
        tokens = sum(1 + 37 * seq_id for seq_id in range(12))
        for _ in range(2 * math.ceil(tokens / LIMITS.min_chunk_tokens) + (BACKGROUND_SITS_OUT + 1) * 10):
            if house.held:
                house.tick()
        assert not house.held


def test_background_streams_get_a_token_in_every_fifth_tick_where_others_are_late() -> None:
    house = House(TOO_SLOW)
    house.decode(0)
    background = house.decode(1, priority=Priority.BACKGROUND)
    served = Counter[int]()
    for _ in range(50):
        served.update(slot.seq_id for slot in house.tick().streams)
    assert served == {0: 50, 1: 50 // (BACKGROUND_SITS_OUT + 1)}
    assert background.waited <= BACKGROUND_SITS_OUT


def test_a_request_of_a_higher_class_takes_its_room_in_the_next_tick() -> None:
    house = House(CPU)
    house.read(0, math.inf, priority=Priority.BACKGROUND)
    for _ in range(20):
        house.tick()
    house.read(1, 100, priority=Priority.INTERACTIVE)
    assert house.tick().shares[-1] == Share(1, 100, ends=True)


# -- many ticks: streams are on time ----------------------------------------------------------------


def under_load(device: Device, *, n_streams: int = 4, ticks: int = 800, noise: float = 0.0, **limits: float) -> House:
    """Streams beside two prompts of thousands of tokens at any time; gaps from the first tick on."""
    chance = random.Random(1)
    house = House(attrs.evolve(device, noise=noise, chance=chance), Scheduling(**limits))
    for seq_id in range(n_streams):
        house.decode(seq_id)
    fresh = 100
    for _ in range(ticks):
        while sum(not held.decoding for held in house.held.values()) < 2:
            house.read(fresh := fresh + 1, chance.randint(700, 3000), n=1)
        house.tick()
        for seq_id in range(n_streams):
            house.held[seq_id].slot.context %= 600
    return house


def gaps(house: House, *seq_ids: int) -> list[float]:
    return [gap for seq_id in seq_ids for gap in house.held[seq_id].gaps_ms]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


POSSIBLE = [
    (device, target)
    for device in (CPU, GPU, QUICK, FLAT, SLOW)
    for target in (60.0, 100.0, 250.0)
    if device.exact_ms(Work(LIMITS.min_chunk_tokens, 4, 4000)) <= target
]
"""Devices with targets that leave time for the smallest chunk."""


@pytest.mark.parametrize(("device", "target"), POSSIBLE)
@pytest.mark.parametrize(("noise", "within"), [(0.0, 1.05), (0.03, 1.1)])
def test_gaps_stay_within_the_target(device: Device, target: float, noise: float, within: float) -> None:
    """From calibration alone."""
    house = under_load(device, noise=noise, target_tbt_ms=target)
    assert p99(gaps(house, 0, 1, 2, 3)) <= within * target


@pytest.mark.parametrize("device", [CPU, FLAT, SLOW])
def test_the_time_up_to_the_target_is_used(device: Device) -> None:
    """Where the batch is not the limit."""
    house = under_load(device, target_tbt_ms=70.0)
    assert statistics.median(gaps(house, 0)) > 0.85 * 70 or max(house.ticks_ms) < 70


def test_noise_is_all_that_is_left_over_the_target() -> None:
    house = under_load(CPU, noise=0.1)
    assert p99(gaps(house, 0, 1, 2, 3)) <= 100 * (1 + 2.8 * 0.1)


def test_each_request_has_its_own_target() -> None:
    """The tightest of those present decides, and none that is not."""
    house = House(CPU)
    house.decode(0, target_ms=400.0)
    house.read(9, math.inf)
    medians = []
    for target in (None, 40.0):
        if target:
            house.decode(1, target_ms=target)
        for _ in range(100):
            house.held[9].slot.context = 0
            house.tick()
        medians.append(statistics.median(house.held[0].gaps_ms[-50:]))
    assert medians[0] == pytest.approx(400, rel=0.05)
    assert medians[1] == pytest.approx(40, rel=0.1)
    assert p99(gaps(house, 1)) <= 44


@pytest.mark.parametrize("device", [CPU, GPU, QUICK, SLOW])
def test_without_streams_ticks_are_near_prefill_tick_ms(device: Device) -> None:
    house = House(device, capacity=1 << 20)
    for seq_id in range(3):
        house.read(seq_id, math.inf)
    for _ in range(60):
        house.tick()
        for held in house.held.values():
            held.slot.context = 0
    target, given_up = LIMITS.prefill_tick_ms, EVEN * 1.5 * device.b  # to be even, at most
    assert all(0.95 * (target - given_up) <= ms <= 1.05 * target for ms in house.ticks_ms[10:])


@pytest.mark.parametrize("factor", [0.3, 1.8])
def test_streams_are_on_time_again_after_the_device_has_changed(factor: float) -> None:
    house = under_load(CPU)
    house.device = Device(CPU.a * factor, CPU.b * factor, CPU.c * factor, CPU.d * factor)
    for seq_id in range(4):
        house.held[seq_id].gaps_ms.clear()
    house.read(99, math.inf)
    for _ in range(300):
        house.tick()
        for held in house.held.values():
            held.slot.context %= 600
    assert p99(house.held[0].gaps_ms[-150:]) <= 110
    assert statistics.median(house.held[0].gaps_ms[-150:]) > 80


# -- many ticks: tenants ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, GPU, SLOW])
def test_tenants_of_unequal_size_get_equal_service(device: Device) -> None:
    """Twelve sequences of short requests at a time, against one long prompt after another beside three streams."""
    chance, house, service = random.Random(2), House(device), Counter[int]()
    sizes = dict.fromkeys(range(12), (20, 60)) | {12: (2000, 4000)}
    owner = {seq_id: int(seq_id >= 12) for seq_id in range(16)}

    def watch(chosen: Plan) -> None:
        service.update({0: 0, 1: 2 * len(chosen.streams)})
        for share in chosen.shares:
            service[owner[share.seq_id]] += share.n_tokens

    house.watch = watch
    for seq_id in (13, 14, 15):
        house.decode(seq_id, tenant=1)
    for _ in range(1500):
        for seq_id, size in sizes.items():
            if seq_id not in house.held:
                house.read(seq_id, chance.randint(*size), n=1, tenant=owner[seq_id])
        house.tick()
        for seq_id in (13, 14, 15):
            house.held[seq_id].slot.context %= 500
    assert service[0] > 1000
    assert 0.9 < service[0] / service[1] < 1.1


# -- calls and guesses --------------------------------------------------------------------------------


@st.composite
def decodes(draw: st.DrawFn) -> tuple[list[Slot], CostModel, int]:
    """Streams that may have guesses, what is known of a device, and the batch."""
    seq_ids = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=9)))
    some = draw(st.booleans())
    streams = [
        Slot(
            seq_id,
            context=draw(st.sampled_from([0, 100, 5000])),
            due_s=draw(st.sampled_from([-1.0, 0.02, 0.05, 0.5, math.inf])),
            drafts=draw(st.integers(0, 16)) if some else 0,
            hits=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        )
        for seq_id in seq_ids
    ]
    widths = Widths((0.0, *draw(st.lists(st.floats(0.5, 40), max_size=8))))
    cost = attrs.evolve(known(draw(st.sampled_from(DEVICES))), widths=widths)
    return streams, cost, len(streams) + draw(st.sampled_from([64, 70, 100, 512]))


@given(decodes(), st.sampled_from([(True, False), (False, False), (False, True)]), st.integers(0, 300))
def test_calls_together_hold_every_stream_once(
    case: tuple[list[Slot], CostModel, int], kind: tuple[bool, bool], pending: int
) -> None:
    streams, cost, capacity = case
    mixes, pads = kind
    prompts = [Slot(20, pending)] if pending else []
    chosen = plan(
        streams, prompts, Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS, mixes=mixes, pads=pads
    )
    assert sum(chosen.widths) == len(chosen.streams) == len(streams)
    assert all(chosen.widths)
    assert chosen.prompts_apart == (bool(chosen.shares) and not mixes)
    assert chosen.work.calls == len(chosen.widths) + chosen.prompts_apart
    assert chosen.predicted_ms == cost.predict(chosen.work)
    if mixes and chosen.shares:
        assert len(chosen.widths) == 1, "cut up, the weights would be read several times beside a prompt"


@given(decodes())
def test_where_each_sequence_has_cells_of_its_own_a_call_is_of_ids_that_follow_each_other(
    case: tuple[list[Slot], CostModel, int],
) -> None:
    streams, cost, capacity = case
    streams = [attrs.evolve(slot, drafts=0) for slot in streams]
    chosen = plan(streams, [], Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS, mixes=False)
    ids = iter([slot.seq_id for slot in chosen.streams])
    for width in chosen.widths:
        first = next(ids)
        assert [next(ids) for _ in range(width - 1)] == list(range(first + 1, first + width))


def test_calls_are_cut_as_takes_least() -> None:
    cost = attrs.evolve(known(CPU), widths=Widths((0.0, 3.0, 8.0, 8.5, 12.0)))

    def widths(*seq_ids: int, mixes: bool = True, prompts: int = 0) -> tuple[int, ...]:
        streams = [Slot(seq_id) for seq_id in seq_ids]
        waiting = [Slot(99, prompts)] if prompts else []
        return plan(
            streams, waiting, Memory(), now_s=0.0, cost=cost, capacity=512, limits=LIMITS, mixes=mixes
        ).widths  # fmt: skip

    assert widths(0, 1) == (1, 1)
    assert widths(0, 1, 2) == (3,)
    assert widths(0, 1, 2, 3) == (4,), "11.5 ms instead of 12 are not worth it"
    assert widths(0, 5, 6, 7) == (4,)
    assert widths(0, 5, 6, 7, mixes=False) == (1, 3)
    assert widths(0, 1, 5, 6, 7, mixes=False) == (1, 1, 3)
    assert widths(0, 1, 5, 6, 7, mixes=False, prompts=10) == (1, 1, 3)
    assert widths(0, 1, prompts=10) == (2,)


@pytest.mark.parametrize("prompts", [0, 10])
def test_a_long_stream_has_a_call_of_its_own_where_others_would_take_as_long(prompts: int) -> None:
    streams = [Slot(0, context=100), Slot(1, context=120), Slot(2, context=5000), Slot(3, context=80)]
    waiting = [Slot(9, prompts)] if prompts else []
    cost = attrs.evolve(known(CPU), widths=Widths((0.0, 3.0, 3.5, 4.0, 4.5)))

    def chosen(**how: bool) -> Plan:
        return plan(streams, waiting, Memory(), now_s=0.0, cost=cost, capacity=512, limits=LIMITS, **how)

    padded = chosen(mixes=False, pads=True)
    assert padded.widths == (2, 1, 1)
    assert padded.work.context_tokens == 2 * 120 + 5000 + 80
    whole = chosen(mixes=False)
    assert whole.widths == (4,)
    assert whole.work.context_tokens == 100 + 120 + 5000 + 80
    assert chosen().widths == (4,)


@given(decodes(), st.booleans())
def test_guesses_are_checked_within_the_batch_in_time_and_only_where_there_are_some(
    case: tuple[list[Slot], CostModel, int], mixes: bool
) -> None:
    streams, cost, capacity = case
    chosen = plan(streams, [], Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS, mixes=mixes)
    if not chosen.drafts:
        return
    assert len(chosen.drafts) == len(chosen.streams)
    assert all(0 <= n <= slot.drafts for n, slot in zip(chosen.drafts, chosen.streams, strict=True))
    rows = len(chosen.streams) + sum(chosen.drafts)
    read = sum((1 + n) * slot.context for n, slot in zip(chosen.drafts, chosen.streams, strict=True))
    assert chosen.work == Work(0, rows, read)
    assert len(streams) < rows <= capacity
    assert cost.of_rows(rows, read) <= 1e3 * min(slot.due_s for slot in streams)


@given(decodes(), st.booleans(), st.integers(1, 300))
def test_beside_prompts_nobody_guesses(case: tuple[list[Slot], CostModel, int], mixes: bool, pending: int) -> None:
    streams, cost, capacity = case
    streams = [attrs.evolve(slot, due_s=math.inf) for slot in streams]
    chosen = plan(
        streams, [Slot(20, pending)], Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS, mixes=mixes
    )
    assert chosen.shares
    assert not chosen.drafts


@given(decodes())
def test_as_many_guesses_as_give_most_tokens_a_millisecond(case: tuple[list[Slot], CostModel, int]) -> None:
    streams, cost, capacity = case
    streams = [attrs.evolve(slot, due_s=math.inf) for slot in streams]
    chosen = plan(streams, [], Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS)

    def rate(drafts: Sequence[int]) -> float:
        tokens = sum(sum(slot.hits**k for k in range(n + 1)) for slot, n in zip(streams, drafts, strict=True))
        read = sum((1 + n) * slot.context for slot, n in zip(streams, drafts, strict=True))
        return tokens / cost.of_rows(len(streams) + sum(drafts), read)

    plain = cost.of_rows(0, sum(slot.context for slot in streams))
    plain += sum(cost.of_rows(width, 0) for width in cost.widths.cut(len(streams)))
    tried = [[min(slot.drafts, most) for slot in streams] for most in (1, 2, 4, 8, 16)]
    tried = [drafts for drafts in tried if len(streams) + sum(drafts) <= capacity]
    best = max(map(rate, tried), default=0.0)
    if chosen.drafts:
        assert rate(chosen.drafts) == pytest.approx(best)
        assert best > WORTH_DRAFTING * len(streams) / plain * (1 - 1e-9)
    else:
        assert best <= WORTH_DRAFTING * len(streams) / plain * (1 + 1e-9)


@pytest.mark.parametrize(
    ("hits", "n", "tokens"),
    [(0.5, 0, 1), (0.5, 1, 1.5), (0.5, 2, 1.75), (0.9, 2, 1 + 0.9 + 0.81), (0.0, 16, 1), (1.0, 16, 17)],
)
def test_tokens_to_be_expected_of_guesses(hits: float, n: int, tokens: float) -> None:
    """Its own, and each guess's if it and all before it are true."""
    assert policy._expected(hits, n) == pytest.approx(tokens)


def test_when_guesses_pay() -> None:
    """10 ms a call and 1 ms a row: 11 ms for a token; with one guess 12 ms, with two 13."""
    cost = CostModel(Line((10.0, 0.0, 10.0, 0.0, 0.0)))

    def guesses(hits: float, n: int = 16, due_ms: float = math.inf, capacity: int = 512) -> Sequence[int]:
        slot = Slot(0, due_s=due_ms / 1e3, drafts=n, hits=hits)
        return plan([slot], [], Memory(), now_s=0.0, cost=cost, capacity=capacity, limits=LIMITS).drafts

    assert guesses(0.1) == (), "1.1 tokens in 12 ms are fewer a millisecond than 1 in 11"
    assert guesses(0.14) == (), "a little more, which is noise"
    assert guesses(0.16) == (1,)
    assert guesses(0.5) == (2,), "1.75 in 13 ms; 1.94 in 15 are fewer a millisecond"
    assert guesses(1.0) == (16,)
    assert guesses(1.0, n=5) == (5,)
    assert guesses(1.0, due_ms=19.0) == (8,), "with 16 it would take 27 ms"
    assert guesses(1.0, due_ms=5.0) == (), "late already"
    assert guesses(1.0, capacity=16) == (8,)
    assert guesses(1.0, n=0) == ()


def test_streams_without_guesses_are_beside_those_with() -> None:
    cost = CostModel(Line((10.0, 0.0, 10.0, 0.0, 0.0)))
    streams = [Slot(0), Slot(1, drafts=3, hits=1.0), Slot(2, drafts=16, hits=1.0)]
    chosen = plan(streams, [], Memory(), now_s=0.0, cost=cost, capacity=512, limits=LIMITS)
    assert chosen.drafts == (0, 3, 16)
    assert chosen.widths == (3,)
