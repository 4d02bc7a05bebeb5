"""Nobody starves, no batch overflows, and streams meet their deadlines where the device can do it."""

from __future__ import annotations

import doctest
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.device import CPU, FLAT, GPU, QUICK, SLOW, STAIRS, TOO_SLOW, Device, SimulatedServer, measured_curves
from tests.support.profile import sampled, thorough
from uma_trio.config import Scheduling
from uma_trio.daemon.policy import cost as cost_module
from uma_trio.daemon.policy import plan as plan_module
from uma_trio.daemon.policy.cost import FEATURE_SCALES, PREFILL_SPEED, STAIR_TOLERANCE, CostModel, LinearModel, Work
from uma_trio.daemon.policy.decode_split import DecodeCallTimes
from uma_trio.daemon.policy.fairness import MAX_SKIPPED_TICKS, ROTATION_PERIOD, Service
from uma_trio.daemon.policy.plan import (
    BACKGROUND_TICK,
    DRAFT_LENGTHS,
    MAX_BACKGROUND_STRETCH,
    MIN_DRAFT_SPEEDUP,
    Plan,
    PrefillChunk,
    plan,
)
from uma_trio.daemon.policy.prefill import (
    LATE_PREFILL_SHARE,
    MAX_OVERDUE_SHARE,
    MIN_ALIGNED_TOKENS,
    ROW_ALIGNMENT,
    SMOOTH_ROWS,
)
from uma_trio.daemon.policy.tick import OWN_CONTEXTS, PolicyState, Tick, estimated_work
from uma_trio.daemon.policy.view import Priority, SequenceView
from uma_trio.engine_link.attention import Attention, AttentionScan

SETTINGS = Scheduling()
PADDED = Attention(AttentionScan.LONGEST)
KV_LAYOUTS = [
    (True, AttentionScan.SEQUENCE),
    (True, AttentionScan.CACHE),
    (False, AttentionScan.SEQUENCE),
    (False, AttentionScan.LONGEST),
]
"""Whether decodes and prompts are in one call, and what attention scans."""
DEVICES = [CPU, GPU, QUICK, FLAT, SLOW, STAIRS, TOO_SLOW]


def known(device: Device) -> CostModel:
    """The cost model with the true coefficients of ``device``."""
    a, b, c, d, e = FEATURE_SCALES
    decode_only = LinearModel((device.a * a, device.b * b, device.c * c, device.d * d, device.e * e))
    call_ms, *others = decode_only.coefficients
    if device.tile_rows:
        return CostModel(decode_only).with_curves(measured_curves(device))
    return CostModel(decode_only, LinearModel((call_ms + device.step, *others)))


# -- one tick ---------------------------------------------------------------------------------------


@attrs.frozen
class Case:
    """The arguments of one call of ``plan``."""

    decodes: list[SequenceView]
    prefills: list[SequenceView]
    state: PolicyState
    cost: CostModel
    max_tokens: int
    settings: Scheduling
    records_calls: bool = False

    def plan(self, attention: Attention = Attention()) -> Plan:  # noqa: B008  (immutable)
        return plan(
            Tick(
                self.decodes,
                self.prefills,
                self.state,
                now_s=0.0,
                cost=self.cost,
                max_tokens=self.max_tokens,
                settings=self.settings,
                records_calls=self.records_calls,
                attention=attention,
            )
        )

    @property
    def least(self) -> int:
        """Prefill tokens of a tick with prefill, at least."""
        return min(self.settings.min_chunk_tokens, self.max_tokens - len(self.decodes))


FOREGROUND = (Priority.INTERACTIVE, Priority.NORMAL)


@st.composite
def cases(draw: st.DrawFn, *, in_time: bool = False, priorities: Sequence[Priority] = FOREGROUND) -> Case:
    """Any views, state and device; ``max_tokens`` is as large as ``config.load`` ensures."""
    n, m = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    seq_ids = draw(st.permutations(range(40)))
    dues = st.just(math.inf) if in_time else st.sampled_from([-1000.0, -0.01, 0.0, 0.02, 0.1, 0.5, math.inf])
    fields = {
        "priority": st.sampled_from(priorities),
        "principal": st.sampled_from("abcd"),
        "n_context": st.sampled_from([0, 50, 20_000]),
    }
    decodes = [
        SequenceView(seq_id, due_s=draw(dues), **{name: draw(values) for name, values in fields.items()})
        for seq_id in seq_ids[:n]
    ]
    first_dues = st.sampled_from([-5.0, 1.0])
    prefills = [
        SequenceView(
            seq_id,
            draw(st.integers(1, 2000)),
            due_s=draw(first_dues),
            **{name: draw(values) for name, values in fields.items()},
        )
        for seq_id in seq_ids[n : n + m]
    ]
    burst, chunk = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    settings = Scheduling(
        prefill_burst_tokens=burst,
        min_chunk_tokens=chunk,
        prefill_tick_ms=draw(st.sampled_from([1.0, 250.0, 1e5])),
        background_share=draw(st.sampled_from([0.01, 0.5, 1.0])),
    )
    counters = draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 5.0, 1e9])))
    state = PolicyState(
        Service(counters),
        draw(st.sampled_from([0, 0, 1, 16, n + 16, n + 64])),
        draw(st.sampled_from([0, 3, 4, 399, 400, 10_000])),
    )
    least = n + max(burst, chunk)
    max_tokens = draw(st.integers(least, least + 600))
    device = draw(st.sampled_from(DEVICES))
    return Case(decodes, prefills, state, known(device), max_tokens, settings, not in_time and draw(st.booleans()))


@given(cases())
def test_a_plan_fits_the_batch_and_takes_only_what_is_ready(case: Case) -> None:
    chosen = case.plan()
    pending = {view.seq_id: view.n_pending for view in case.prefills}
    assert len(chosen.decodes) + sum(chunk.n_tokens for chunk in chosen.chunks) <= case.max_tokens
    assert len({chunk.seq_id for chunk in chosen.chunks}) == len(chosen.chunks)
    for chunk in chosen.chunks:
        assert 1 <= chunk.n_tokens <= pending[chunk.seq_id]
        assert chunk.is_last == (chunk.n_tokens == pending[chunk.seq_id])
    assert {id(view) for view in chosen.decodes} <= {id(view) for view in case.decodes}
    assert bool(chosen.decodes or chosen.chunks) == bool(case.decodes or case.prefills)


@given(cases(), st.sets(st.integers(0, 19)))
def test_a_picture_is_whole_in_a_tick_or_not_in_it_and_one_at_a_time(case: Case, whole: set[int]) -> None:
    views = [msgspec.structs.replace(view, is_whole=n in whole) for n, view in enumerate(case.prefills)]
    chosen = attrs.evolve(case, prefills=views).plan()
    pending = {view.seq_id: view.n_pending for view in views if view.is_whole}
    pictures = [chunk for chunk in chosen.chunks if chunk.seq_id in pending]
    assert [chunk.n_tokens for chunk in pictures] == [pending[chunk.seq_id] for chunk in pictures]
    assert len(pictures) <= 1
    others = sum(chunk.n_tokens for chunk in chosen.chunks) - sum(chunk.n_tokens for chunk in pictures)
    assert len(chosen.decodes) + others <= case.max_tokens
    assert chosen.work.prefill_tokens == sum(chunk.n_tokens for chunk in chosen.chunks)
    if views and (not case.state.prefill_rows or not chosen.decodes):
        assert chosen.chunks
    charged = sum(chosen.state.service.counters.values()) - sum(case.state.service.counters.values())
    assert (
        charged >= chosen.work.prefill_tokens * (1 - 1e-9) or max(case.state.service.counters.values(), default=0) > 1e8
    )


@given(cases())
def test_the_work_is_that_of_the_plan(case: Case) -> None:
    chosen = case.plan()
    n_tokens = {chunk.seq_id: chunk.n_tokens for chunk in chosen.chunks}
    total = sum(n_tokens.values())
    context = sum(view.n_context for view in chosen.decodes)
    before = sum(view.n_context * n_tokens.get(view.seq_id, 0) for view in case.prefills) / max(1, total)
    assert chosen.work == Work(total, len(chosen.decodes), context, before, 1)
    assert chosen.predicted_ms == case.cost.predict(chosen.work)


@given(cases())
def test_every_tick_has_all_decodes(case: Case) -> None:
    chosen = case.plan()
    assert list(chosen.decodes) == case.decodes
    assert chosen.state.background_skips == 0


def of_class(case: Case, *, background: bool) -> Case:
    """``case`` with the sequences of class ``background``, or with the others."""

    def chosen(views: Sequence[SequenceView]) -> list[SequenceView]:
        return [view for view in views if (view.priority is Priority.BACKGROUND) is background]

    return attrs.evolve(case, decodes=chosen(case.decodes), prefills=chosen(case.prefills))


@given(cases(priorities=list(Priority)))
def test_background_waits_for_others_until_its_turn(case: Case) -> None:
    """Next to others its decodes come along if they take no more than its share, and its prompts do not."""
    others, background = of_class(case, background=False), of_class(case, background=True)
    chosen, skips = case.plan(), case.state.background_skips
    assert [view for view in chosen.decodes if view.priority is not Priority.BACKGROUND] == others.decodes
    if not (others.decodes or others.prefills):
        assert list(chosen.decodes) == case.decodes
        assert chosen.state.background_skips == 0
        return
    ms = case.cost.predict(estimated_work(case.decodes))
    stretch = ms / case.cost.predict(estimated_work(others.decodes)) - 1 if others.decodes else 0.0
    is_turn = skips * case.settings.background_share >= max(stretch, MAX_BACKGROUND_STRETCH)
    come_along = is_turn or (bool(others.decodes) and stretch <= case.settings.background_share)
    assert list(chosen.decodes) == (case.decodes if come_along else others.decodes)
    prompts = background.prefills if is_turn and background.prefills else others.prefills
    assert {chunk.seq_id for chunk in chosen.chunks} <= {view.seq_id for view in prompts}
    waits = not is_turn and (bool(background.prefills) or (bool(background.decodes) and not come_along))
    assert chosen.state.background_skips == (skips + 1 if waits else 0)


@given(cases(priorities=[Priority.BACKGROUND]))
def test_a_tick_of_background_alone_soon_makes_room_for_others(case: Case) -> None:
    chosen = case.plan()
    assume(chosen.chunks and chosen.work.prefill_tokens > case.settings.min_chunk_tokens)
    decode_ms = case.cost.predict(estimated_work(chosen.decodes)) if chosen.decodes else 0.0
    longest_ms = max(BACKGROUND_TICK * case.settings.target_itl_ms, (1 + LATE_PREFILL_SHARE) * decode_ms)
    late_ms = (1 + MAX_OVERDUE_SHARE) * decode_ms  # of its own prompts that are overdue
    assert chosen.predicted_ms <= max(longest_ms, late_ms) * (1 + STAIR_TOLERANCE)


@given(cases())
def test_prefill_pauses_for_one_tick_at_most(case: Case) -> None:
    chosen = case.plan()
    assert bool(chosen.state.prefill_rows) == bool(chosen.chunks)
    pending = sum(view.n_pending for view in case.prefills)
    if not case.state.prefill_rows or not chosen.decodes:
        assert chosen.work.prefill_tokens >= min(case.least, pending)


def first_due(case: Case, due_s: float) -> Case:
    """``case`` with the first token of every prompt due at ``due_s``."""
    return attrs.evolve(case, prefills=[msgspec.structs.replace(view, due_s=due_s) for view in case.prefills])


def overdue(case: Case, decodes: Sequence[SequenceView]) -> list[SequenceView]:
    """The prompts whose first token is overdue and at most a batch away, unless a stream of their principal has a higher
    class.  Those of class ``background`` wait for all others."""
    short = [view for view in case.prefills if view.n_pending <= case.max_tokens and view.due_s < 0]

    def goes_after(prompt: SequenceView, stream: SequenceView) -> bool:
        same = prompt.principal == stream.principal
        return prompt.priority > stream.priority and (same or prompt.priority is Priority.BACKGROUND)

    return [prompt for prompt in short if not any(goes_after(prompt, stream) for stream in decodes)]


@given(cases())
def test_prefill_makes_no_decode_late_unless_it_paused_in_the_tick_before(case: Case) -> None:
    """Such a tick has the smallest chunk and no more.  Where decoding alone is late, prompts get a share of its time."""
    chosen = first_due(case, 1.0).plan()
    assume(chosen.chunks and chosen.decodes)
    due_ms = 1e3 * min(view.due_s for view in chosen.decodes)
    decode_ms = case.cost.predict(estimated_work(chosen.decodes))
    if decode_ms > due_ms and chosen.work.prefill_tokens > case.settings.min_chunk_tokens:
        assert chosen.predicted_ms <= (1 + LATE_PREFILL_SHARE) * decode_ms * (
            1 + STAIR_TOLERANCE
        )  # between stairs the curves are interpolated
    elif chosen.predicted_ms > due_ms * (1 + 1e-9):
        assert decode_ms > due_ms or not case.state.prefill_rows
        assert chosen.work.prefill_tokens <= case.settings.min_chunk_tokens


@given(cases())
def test_overdue_prompts_make_a_tick_longer_by_what_two_streams_for_each_take(case: Case) -> None:
    """Between a half and two times what decoding alone takes, the latter up to ``prefill_tick_ms``, and by no more
    tokens than they have."""
    late = first_due(case, -5.0)
    chosen, usual = late.plan(), first_due(case, 1.0).plan()
    if chosen.work.prefill_tokens <= max(usual.work.prefill_tokens, case.settings.min_chunk_tokens):
        return
    waiting = overdue(late, chosen.decodes)
    assert waiting
    assert chosen.work.prefill_tokens <= sum(view.n_pending for view in waiting)
    due_ms = 1e3 * min(view.due_s for view in chosen.decodes)
    decode_ms = case.cost.predict(estimated_work(chosen.decodes))
    share = min(2.0, 2 * len(waiting) / len(chosen.decodes))
    late_ms = max(1.5 * decode_ms, min((1 + share) * decode_ms, case.settings.prefill_tick_ms))
    assert chosen.predicted_ms <= max(due_ms, late_ms) * (1 + STAIR_TOLERANCE)


def next_to_16_streams(prefills: list[SequenceView], priority: Priority = Priority.NORMAL) -> Plan:
    """The streams take 44 ms of their 50, so not even the smallest chunk is in time.  A prompt token takes 1 ms."""
    decodes = [SequenceView(seq_id, due_s=0.05, priority=priority) for seq_id in range(16)]
    cost = known(Device(4.0, 1.0, 2.5))
    return plan(Tick(decodes, prefills, PolicyState(), now_s=0.0, cost=cost, max_tokens=512, settings=SETTINGS))


@pytest.mark.parametrize(("n_waiting", "tokens"), [(1, 22), (8, 44), (12, 64), (16, 80), (30, 80)])
def test_the_more_prompts_are_overdue_the_longer_is_the_tick(n_waiting: int, tokens: int) -> None:
    """It may take 44 ms and between a half and two times that for the chunks, in multiples of 16 tokens from 48 on."""
    chosen = next_to_16_streams([SequenceView(20 + n, 100, due_s=-1.0) for n in range(n_waiting)])
    assert chosen.work.prefill_tokens == tokens


@pytest.mark.parametrize(("due_s", "priority"), [(0.0, Priority.NORMAL), (-1.0, Priority.INTERACTIVE)])
def test_prompts_in_time_or_of_a_lower_class_get_the_smallest_chunk(due_s: float, priority: Priority) -> None:
    chosen = next_to_16_streams([SequenceView(20 + n, 100, due_s=due_s) for n in range(16)], priority)
    assert chosen.work.prefill_tokens == SETTINGS.min_chunk_tokens


def test_an_overdue_prompt_of_many_batches_slows_nobody_down() -> None:
    """It would be late for many seconds more."""
    assert next_to_16_streams([SequenceView(20, 4000, due_s=-1.0)]).work.prefill_tokens == SETTINGS.min_chunk_tokens


def test_a_short_target_of_a_request_slows_nobody_down() -> None:
    """Its first token is due early, and it is overdue when those of others would be."""
    waiting = [SequenceView(20 + n, 100, due_s=-1.0, grace_s=2.0) for n in range(16)]
    assert next_to_16_streams(waiting).work.prefill_tokens == SETTINGS.min_chunk_tokens
    late = [msgspec.structs.replace(view, due_s=-2.1) for view in waiting]
    assert next_to_16_streams(late).work.prefill_tokens > SETTINGS.min_chunk_tokens


def test_prompts_in_time_gain_nothing_from_an_overdue_one() -> None:
    chosen = next_to_16_streams([SequenceView(20, 18, due_s=-1.0), SequenceView(21, 100, due_s=1.0)])
    assert chosen.work.prefill_tokens == 18


@given(cases())
def test_without_decodes_a_tick_is_no_longer_than_prefill_tick_ms(case: Case) -> None:
    """Unless four of the smallest chunks take longer."""
    chosen = attrs.evolve(case, decodes=[]).plan()
    if chosen.work.prefill_tokens > 4 * case.settings.min_chunk_tokens:
        assert chosen.predicted_ms <= case.settings.prefill_tick_ms * (1 + 1e-9)


@given(cases(in_time=True))
def test_the_batch_is_filled_if_there_is_time_and_it_pays(case: Case) -> None:
    if not case.decodes:
        case = attrs.evolve(case, settings=attrs.evolve(case.settings, prefill_tick_ms=1e12))
    for n, view in enumerate(case.prefills):  # what pays depends on which ones are chosen, if they differ
        case.prefills[n] = msgspec.structs.replace(view, n_context=case.prefills[0].n_context)
    chosen = case.plan()
    assert len(chosen.decodes) == len(case.decodes)
    pending = sum(view.n_pending for view in case.prefills)
    room = case.max_tokens - len(case.decodes)
    if len(case.decodes) >= len(case.prefills):
        least = max(case.settings.prefill_burst_tokens, case.settings.min_chunk_tokens)
        room = min(room, max(SMOOTH_ROWS - len(case.decodes), least))
        worthwhile = case.cost.worthwhile_prefill_tokens(chosen.work, room)
        room = min(room, max(worthwhile, least))
    if MIN_ALIGNED_TOKENS <= room < pending:
        aligned = room - (room + len(case.decodes)) % ROW_ALIGNMENT
        room = aligned if aligned >= case.settings.min_chunk_tokens else room
    assert chosen.work.prefill_tokens == min(pending, room)


@given(cases(), st.randoms())
def test_a_plan_is_pure_and_ignores_the_order_of_its_input(case: Case, rng: random.Random) -> None:
    chosen = case.plan()
    assert case.plan() == chosen
    rng.shuffle(case.decodes)
    shuffled = case.plan()
    assert shuffled.work == chosen.work
    assert {view.seq_id for view in shuffled.decodes} == {view.seq_id for view in chosen.decodes}


def test_nothing_is_ready() -> None:
    chosen = plan(Tick([], [], PolicyState(), now_s=0.0, cost=CostModel(), max_tokens=64, settings=SETTINGS))
    assert (chosen.decodes, chosen.chunks, chosen.work) == ([], (), Work(0, 0, 0))


def test_a_single_prompt_gets_the_tokens_of_prefill_tick_ms() -> None:
    for device, expected in ((QUICK, 512), (CPU, 208)):  # 250 = 3 + 1.05 n + 0.00025 n n, and n aligned
        chosen = plan(
            Tick(
                [],
                [SequenceView(3, 5000)],
                PolicyState(),
                now_s=0.0,
                cost=known(device),
                max_tokens=512,
                settings=SETTINGS,
            )
        )
        assert chosen.chunks == (PrefillChunk(3, expected, is_last=False),)


@pytest.fixture
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are as long as time allows, however little the last tokens gain."""
    monkeypatch.setattr(cost_module, "PREFILL_SPEED", 1.0)


@pytest.mark.usefixtures("long_chunks")
def test_context_before_a_chunk_makes_the_chunk_smaller() -> None:
    """The same decode and the same prompt, once at its beginning and once after 2,000 tokens."""
    sizes = []
    for context in (0, 2000):
        chosen = plan(
            Tick(
                [SequenceView(0, due_s=0.1)],
                [SequenceView(3, 5000, context)],
                PolicyState(),
                now_s=0.0,
                cost=known(CPU),
                max_tokens=512,
                settings=SETTINGS,
            )
        )
        sizes.append(chosen.work.prefill_tokens)
        assert chosen.predicted_ms <= 100
    assert sizes == [79, 45]


@pytest.mark.usefixtures("long_chunks")
@pytest.mark.parametrize(("pending", "got"), [(87, 87), (88, 79), (5000, 79)])
def test_a_chunk_that_is_not_the_last_aligns_the_rows_of_the_call(pending: int, got: int) -> None:
    """87 tokens fit next to the decode; 79 and the decode are a multiple of 16 rows."""
    chosen = plan(
        Tick(
            [SequenceView(0, due_s=0.1)],
            [SequenceView(3, pending)],
            PolicyState(),
            now_s=0.0,
            cost=known(CPU),
            max_tokens=512,
            settings=SETTINGS,
        )
    )
    assert chosen.work.prefill_tokens == got


def test_a_chunk_is_no_longer_than_it_pays() -> None:
    """On a device whose ticks with prefill take 50 ms and 1 ms a token: chunks of 383 tokens are nearly as fast as of 511."""
    cost = CostModel(LinearModel((2.0, 0.0, 0.0, 0.0, 0.0)), LinearModel((50.0, 100.0, 0.0, 0.0, 0.0)))
    sizes = []
    for due_s in (0.150, 0.6, math.inf):
        chosen = plan(
            Tick(
                [SequenceView(0, due_s=due_s)],
                [SequenceView(3, 5000)],
                PolicyState(),
                now_s=0.0,
                cost=cost,
                max_tokens=512,
                settings=SETTINGS,
            )
        )
        sizes.append(chosen.work.prefill_tokens)
    speeds = [n / (50 + n) for n in (sizes[2] + ROW_ALIGNMENT, 511)]
    assert sizes[0] == 95, "as much as there is time for"
    assert sizes[1] == sizes[2] < 400, "not as much as that"
    assert speeds[0] >= PREFILL_SPEED * speeds[1]
    alone = plan(
        Tick([], [SequenceView(3, 5000)], PolicyState(), now_s=0.0, cost=cost, max_tokens=512, settings=SETTINGS)
    )
    assert alone.work.prefill_tokens == 200 - 200 % ROW_ALIGNMENT, "nobody waits"


@pytest.mark.parametrize("records", [True, False])
def test_no_chunk_makes_a_call_like_the_one_before_on_a_device_that_records_them(records: bool) -> None:
    decodes, state, rows = [SequenceView(seq_id, due_s=0.1) for seq_id in range(8)], PolicyState(), []
    for _ in range(4):
        chosen = plan(
            Tick(
                decodes,
                [SequenceView(9, 5000)],
                state,
                now_s=0.0,
                cost=known(CPU),
                max_tokens=512,
                settings=SETTINGS,
                records_calls=records,
            )
        )
        state = chosen.state
        rows.append(len(chosen.decodes) + chosen.work.prefill_tokens)
    n = rows[0]
    assert n % ROW_ALIGNMENT == 0
    assert rows == ([n, n - 1, n, n - 1] if records else [n] * 4)
    last = plan(
        Tick(
            decodes,
            [SequenceView(9, rows[-1] - 8)],
            state,
            now_s=0.0,
            cost=known(CPU),
            max_tokens=512,
            settings=SETTINGS,
            records_calls=records,
        )
    )
    assert last.chunks == (PrefillChunk(9, rows[-1] - 8, is_last=True),), "no token is left for a tick of its own"


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(plan_module).failed == 0


# -- many ticks: nobody starves ---------------------------------------------------------------------


def bound(parallel: int, groups: int) -> int:
    """Ticks within which every admitted prompt advances, whatever the load and the device.

    Every other tick has prefill, each group is skipped only so often, and each prompt of a group has its turn in a
    rotation.
    """
    return 2 * ROTATION_PERIOD * parallel * (MAX_SKIPPED_TICKS + groups if groups > 1 else 1)


@pytest.mark.parametrize("device", sampled(DEVICES, 3))
@pytest.mark.parametrize("seed", [1, thorough(2), thorough(3)])
def test_nobody_starves(device: Device, seed: int) -> None:
    """Random arrivals, ends and noise, with more work than the device can do."""
    rng = random.Random(seed)
    parallel, n_principals = rng.choice([3, 6]), rng.choice([1, 3])
    settings = Scheduling(
        prefill_burst_tokens=rng.choice([8, 32]),
        min_chunk_tokens=rng.choice([4, 16]),
        target_itl_ms=rng.choice([1.0, 50.0, 1000.0]),
        background_share=1.0,
    )
    server = SimulatedServer(
        attrs.evolve(device, noise=0.1, rng=rng), settings, max_tokens=parallel + settings.prefill_burst_tokens + 100
    )
    within = bound(parallel, min(parallel, 3 * n_principals))
    for _ in range(1500):
        for seq_id in range(parallel):
            if seq_id not in server.running and rng.random() < 0.3:
                target = rng.choice([None, 0.001, 20.0, 10_000.0])
                pending, n = rng.choice([(1, 3), (20, 100), (300, 1), (math.inf, 1)]) if seq_id else (20, math.inf)
                server.prefill(
                    seq_id,
                    pending,
                    n_to_generate=n,
                    target_ms=target,
                    priority=rng.choice(list(Priority)),
                    principal=str(rng.randrange(n_principals)),
                )
        chosen = server.tick()
        assert len(chosen.decodes) + chosen.work.prefill_tokens <= server.max_tokens
        for sequence in server.running.values():
            if (
                sequence.priority is Priority.BACKGROUND
            ):  # it is its turn after four ticks, or some more for long contexts
                assert sequence.waited < 5 * within
            elif not sequence.is_decoding:
                assert sequence.waited < within
            else:
                assert sequence.waited == 0


@pytest.mark.parametrize("n_streams", [1, 16, 200])
def test_prefill_advances_even_if_decoding_alone_misses_every_target(n_streams: int) -> None:
    server = SimulatedServer(TOO_SLOW, max_tokens=512)
    for seq_id in range(n_streams):
        server.decode(seq_id)
    prompt = server.prefill(300, 160)
    for _ in range(2 * 160 // SETTINGS.min_chunk_tokens):
        server.tick()
    assert prompt.is_decoding


def test_every_request_finishes() -> None:
    for device in DEVICES:
        server = SimulatedServer(device)
        for seq_id in range(12):
            server.prefill(
                seq_id, 1 + 37 * seq_id, n_to_generate=10, priority=Priority(seq_id % 3), principal="ab"[seq_id % 2]
            )
        tokens = sum(1 + 37 * seq_id for seq_id in range(12))
        for _ in range(2 * math.ceil(tokens / SETTINGS.min_chunk_tokens) + 10 * math.ceil(TURN)):
            if server.running:
                server.tick()
        assert not server.running


@pytest.mark.parametrize("device", [CPU, SLOW])
def test_of_a_burst_of_prompts_the_last_one_starts_earlier_with_a_deadline(device: Device) -> None:
    """32 prompts at once.  Without one, streams are late less often, but the last prompts wait far longer."""

    def served(due_s: float) -> tuple[float, float]:
        """The time when the last prompt is complete, in seconds, and the longest tick with streams, in ms."""
        server = SimulatedServer(device)
        prompts = [server.prefill(seq_id, 40 + 5 * seq_id, target_ms=100.0) for seq_id in range(32)]
        for prompt in prompts:
            prompt.due_s = due_s
        server.tick()
        while not all(prompt.is_decoding for prompt in prompts):
            server.tick()
        return server.now_s, max(server.ticks_ms[1:])

    (without_s, _), (with_s, longest_ms) = served(math.inf), served(2.0)
    assert with_s < 0.8 * without_s
    decode_ms = device.exact_ms(Work(0, 32, sum(40 + 5 * n for n in range(32)) + 32 * 100))
    assert longest_ms < 1.1 * max(1.5 * decode_ms, SETTINGS.prefill_tick_ms)


TURN = MAX_BACKGROUND_STRETCH / SETTINGS.background_share
"""Ticks in a row that others have before it is the turn of background sequences, unless these take very long."""


@pytest.mark.parametrize("device", sampled(DEVICES, 8))
def test_background_costs_others_its_share_and_comes_to_an_end(device: Device) -> None:
    """Streams and prompts of others, with and without four background requests: tokens and gaps are nearly the same."""

    def served(n_background: int) -> tuple[float, float]:
        """The mean and the p99 of the gaps of the streams in ms."""
        server = SimulatedServer(device)
        streams = [server.decode(seq_id) for seq_id in range(2)]
        rows = [server.prefill(10 + n, 40, n_to_generate=3, priority=Priority.BACKGROUND) for n in range(n_background)]
        for n in range(math.ceil(40 * TURN)):
            if n % 300 == 0:
                server.prefill(100 + n, 700, n_to_generate=1)
            server.tick()
        assert not any(row.seq_id in server.running for row in rows)
        found = gaps(server, *[stream.seq_id for stream in streams])
        return statistics.fmean(found), p99(found)

    (mean_ms, p99_ms), (alone_ms, alone_p99_ms) = served(4), served(0)
    assert mean_ms <= 1.03 * alone_ms
    assert p99_ms <= 1.05 * alone_p99_ms


def test_a_request_of_a_higher_class_takes_over_in_the_next_tick() -> None:
    server = SimulatedServer(CPU)
    server.prefill(0, math.inf, priority=Priority.BACKGROUND)
    for _ in range(20):
        server.tick()
    server.prefill(1, 100, priority=Priority.INTERACTIVE)
    assert server.tick().chunks[-1] == PrefillChunk(1, 100, is_last=True)


# -- many ticks: streams are on time ----------------------------------------------------------------


def under_load(
    device: Device, *, n_streams: int = 4, ticks: int = 800, noise: float = 0.0, **settings: float
) -> SimulatedServer:
    """Run streams next to two prompts of thousands of tokens at any time."""
    rng = random.Random(1)
    server = SimulatedServer(attrs.evolve(device, noise=noise, rng=rng), Scheduling(**settings))
    for seq_id in range(n_streams):
        server.decode(seq_id)
    fresh = 100
    for _ in range(ticks):
        while sum(not sequence.is_decoding for sequence in server.running.values()) < 2:
            server.prefill(fresh := fresh + 1, rng.randint(700, 3000), n_to_generate=1)
        server.tick()
        for seq_id in range(n_streams):
            server.running[seq_id].n_context %= 600
    return server


def gaps(server: SimulatedServer, *seq_ids: int) -> list[float]:
    return [gap for seq_id in seq_ids for gap in server.running[seq_id].gaps_ms]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


POSSIBLE = [
    (device, target)
    for device in (CPU, GPU, QUICK, FLAT, SLOW)
    for target in (60.0, 100.0, 250.0)
    if device.exact_ms(Work(SETTINGS.min_chunk_tokens, 4, 4000)) <= target
]
"""Devices, with the targets that leave time for the smallest chunk."""


@pytest.mark.parametrize(("device", "target"), sampled(POSSIBLE, 3))
@pytest.mark.parametrize(("noise", "within"), [(0.0, 1.05), thorough(0.03, 1.1)])
def test_gaps_stay_within_the_target(device: Device, target: float, noise: float, within: float) -> None:
    """With no more than calibration before the first tick."""
    server = under_load(device, noise=noise, target_itl_ms=target)
    assert p99(gaps(server, 0, 1, 2, 3)) <= within * target


@pytest.mark.parametrize("device", [CPU, FLAT, SLOW])
def test_the_time_up_to_the_target_is_used(device: Device) -> None:
    """Unless the batch is the limit."""
    server = under_load(device, target_itl_ms=70.0)
    assert statistics.median(gaps(server, 0)) > 0.85 * 70 or max(server.ticks_ms) < 70


def test_gaps_exceed_the_target_only_by_the_noise() -> None:
    server = under_load(CPU, noise=0.1, target_itl_ms=100.0)
    assert p99(gaps(server, 0, 1, 2, 3)) <= 100 * (1 + 2.8 * 0.1)


@pytest.mark.usefixtures("long_chunks")
def test_each_request_has_its_own_target() -> None:
    """The tightest target of the present streams decides."""
    server = SimulatedServer(CPU)
    server.decode(0, target_ms=400.0)
    server.prefill(9, math.inf)
    medians = []
    for target in (None, 40.0):
        if target:
            server.decode(1, target_ms=target)
        for _ in range(100):
            server.running[9].n_context = 0
            server.tick()
        medians.append(statistics.median(server.running[0].gaps_ms[-50:]))
    assert medians[0] == pytest.approx(400, rel=0.05)
    assert medians[1] == pytest.approx(40, rel=0.1)
    assert p99(gaps(server, 1)) <= 44


@pytest.mark.parametrize("device", [CPU, GPU, QUICK, SLOW])
def test_without_decodes_ticks_take_about_prefill_tick_ms(device: Device) -> None:
    server = SimulatedServer(device, max_tokens=1 << 20)
    for seq_id in range(3):
        server.prefill(seq_id, math.inf)
    for _ in range(60):
        server.tick()
        for sequence in server.running.values():
            sequence.n_context = 0
    target, aligned_ms = SETTINGS.prefill_tick_ms, ROW_ALIGNMENT * 1.5 * device.b  # lost by alignment, at most
    assert all(0.95 * (target - aligned_ms) <= ms <= 1.05 * target for ms in server.ticks_ms[10:])


@pytest.mark.usefixtures("long_chunks")
@pytest.mark.parametrize("factor", [0.3, 1.8])
def test_streams_meet_their_targets_again_after_the_device_has_changed(factor: float) -> None:
    server = under_load(CPU, target_itl_ms=100.0)
    server.device = Device(CPU.a * factor, CPU.b * factor, CPU.c * factor, CPU.d * factor)
    for seq_id in range(4):
        server.running[seq_id].gaps_ms.clear()
    server.prefill(99, math.inf)
    for _ in range(300):
        server.tick()
        for sequence in server.running.values():
            sequence.n_context %= 600
    assert p99(server.running[0].gaps_ms[-150:]) <= 110
    assert statistics.median(server.running[0].gaps_ms[-150:]) > 80


# -- many ticks: principals ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, GPU, SLOW])
def test_principals_with_requests_of_different_size_get_equal_service(device: Device) -> None:
    """Twelve short requests at a time, against three streams and one long prompt after another."""
    rng, server, service = random.Random(2), SimulatedServer(device), Counter[str]()
    sizes = dict.fromkeys(range(12), (20, 60)) | {12: (2000, 4000)}
    owner = {seq_id: "b" if seq_id >= 12 else "a" for seq_id in range(16)}

    def count(chosen: Plan) -> None:
        service.update({"a": 0, "b": 2 * len(chosen.decodes)})
        for chunk in chosen.chunks:
            service[owner[chunk.seq_id]] += chunk.n_tokens

    server.on_plan = count
    for seq_id in (13, 14, 15):
        server.decode(seq_id, principal="b")
    for _ in range(1500):
        for seq_id, size in sizes.items():
            if seq_id not in server.running:
                server.prefill(seq_id, rng.randint(*size), n_to_generate=1, principal=owner[seq_id])
        server.tick()
        for seq_id in (13, 14, 15):
            server.running[seq_id].n_context %= 500
    assert service["a"] > 1000
    assert 0.9 < service["a"] / service["b"] < 1.1


# -- calls and drafts ---------------------------------------------------------------------------------


@st.composite
def decode_cases(draw: st.DrawFn) -> tuple[list[SequenceView], CostModel, int]:
    """Decodes that can have drafts, the cost model of a device, and the size of the batch."""
    seq_ids = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=9)))
    has_drafts = draw(st.booleans())
    decodes = [
        SequenceView(
            seq_id,
            n_context=draw(st.sampled_from([0, 100, 5000])),
            due_s=draw(st.sampled_from([-1.0, 0.02, 0.05, 0.5, math.inf])),
            n_drafts=draw(st.integers(0, 16)) if has_drafts else 0,
            acceptance_rate=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        )
        for seq_id in seq_ids
    ]
    call_times = DecodeCallTimes((0.0, *draw(st.lists(st.floats(0.5, 40), max_size=8))))
    cost = attrs.evolve(known(draw(st.sampled_from(DEVICES))), call_times=call_times)
    return decodes, cost, len(decodes) + draw(st.sampled_from([64, 70, 100, 512]))


@given(decode_cases(), st.sampled_from(KV_LAYOUTS), st.integers(0, 300))
def test_calls_together_have_every_decode_once(
    case: tuple[list[SequenceView], CostModel, int], kv_layout: tuple[bool, AttentionScan], pending: int
) -> None:
    decodes, cost, max_tokens = case
    mixes_prefill, scan = kv_layout
    prompts = [SequenceView(20, pending), SequenceView(21, pending + 7)] if pending else []
    chosen = plan(
        Tick(
            decodes,
            prompts,
            PolicyState(),
            now_s=0.0,
            cost=cost,
            max_tokens=max_tokens,
            settings=SETTINGS,
            mixes_prefill=mixes_prefill,
            attention=Attention(scan, 30_000),
        )
    )
    assert sum(chosen.call_widths) == len(chosen.decodes) == len(decodes)
    assert all(chosen.call_widths)
    assert chosen.prefill_separately == (bool(chosen.chunks) and not mixes_prefill)
    lengths = {chunk.n_tokens for chunk in chosen.chunks}
    n_chunk_calls = 0 if mixes_prefill else len(lengths) - (bool(chosen.chunks) and not decodes)
    assert chosen.work.n_calls == len(chosen.call_widths) + n_chunk_calls
    assert chosen.predicted_ms == cost.predict(chosen.work)
    if mixes_prefill and chosen.chunks:
        assert len(chosen.call_widths) == 1, (
            "with prefill in the same call, a split would only read the weights more often"
        )


@given(decode_cases())
def test_with_per_sequence_kv_the_ids_of_a_call_are_consecutive(
    case: tuple[list[SequenceView], CostModel, int],
) -> None:
    decodes, cost, max_tokens = case
    decodes = [msgspec.structs.replace(view, n_drafts=0) for view in decodes]
    chosen = plan(
        Tick(
            decodes,
            [],
            PolicyState(),
            now_s=0.0,
            cost=cost,
            max_tokens=max_tokens,
            settings=SETTINGS,
            mixes_prefill=False,
        )
    )
    ids = iter([view.seq_id for view in chosen.decodes])
    for width in chosen.call_widths:
        first = next(ids)
        assert [next(ids) for _ in range(width - 1)] == list(range(first + 1, first + width))


@given(
    decode_cases(), st.booleans(), st.sampled_from([0, 300]), st.dictionaries(st.integers(0, 12), st.integers(0, 5000))
)
def test_filled_gaps_never_cost_more_than_calls_of_their_own(
    case: tuple[list[SequenceView], CostModel, int], pads: bool, pending: int, fillers: dict[int, int]
) -> None:
    """By prediction; and only gaps are filled whose sequences have room."""
    decodes, cost, max_tokens = case
    decodes = [msgspec.structs.replace(view, n_drafts=0) for view in decodes]

    def chosen(fillers: dict[int, int]) -> Plan:
        return plan(
            Tick(
                decodes,
                [SequenceView(20, pending)] if pending else [],
                PolicyState(),
                now_s=0.0,
                cost=cost,
                max_tokens=max_tokens,
                settings=SETTINGS,
                mixes_prefill=False,
                attention=PADDED if pads else Attention(),
                fillers=fillers,
            )
        )

    price = cost.call_price(decodes[-1].seq_id - decodes[0].seq_id + 1)
    ms = {}
    for name, plan_ in (("split", chosen({})), ("filled", chosen(fillers))):
        views = iter(plan_.decodes)
        n_rows, n_context, ms[name] = 0, 0, 0.0
        for width in plan_.call_widths:
            held = {view.seq_id: view.n_context for view in itertools.islice(views, width)}
            gaps = {*range(min(held), max(held))} - held.keys()
            assert name == "filled" or not gaps
            assert gaps <= fillers.keys()
            lengths = [*held.values(), *[fillers[seq_id] for seq_id in gaps]]
            context = len(lengths) * max(lengths) if pads else sum(lengths)
            ms[name] += price(len(lengths), context)
            n_rows += len(lengths)
            n_context += context
        assert next(views, None) is None
        assert (plan_.work.decode_rows, plan_.work.context_tokens) == (n_rows, n_context)
        assert plan_.work.n_calls == len(plan_.call_widths) + plan_.prefill_separately
    assert ms["filled"] <= ms["split"] * (1 + 1e-9)


def test_gaps_are_filled_where_a_row_costs_less_than_a_call() -> None:
    """A call takes 8 ms; a row takes 0.05 ms on the GPU and 3 ms on the CPU."""
    gpu = attrs.evolve(known(CPU), decode_only=LinearModel((8.0, 0.0, 0.5, 1.0, 0.0)))
    cpu = attrs.evolve(known(CPU), decode_only=LinearModel((8.0, 0.0, 30.0, 1.0, 0.0)))
    empty = dict.fromkeys(range(40), 0)

    def chosen(
        cost: CostModel,
        seq_ids: Iterable[int],
        fillers: dict[int, int],
        prompts: int = 0,
        attention: Attention = OWN_CONTEXTS,
    ) -> Plan:
        decodes = [SequenceView(seq_id, n_context=100) for seq_id in seq_ids]
        waiting = [SequenceView(39, prompts)] if prompts else []
        return plan(
            Tick(
                *(decodes, waiting, PolicyState()),
                now_s=0.0,
                cost=cost,
                max_tokens=512,
                settings=SETTINGS,
                mixes_prefill=False,
                fillers=fillers,
                attention=attention,
            )
        )

    streams = [*range(8), *range(9, 14)]
    filled = chosen(gpu, streams, empty)
    assert filled.call_widths == (13,)
    assert filled.work == Work(0, 14, 1300)
    assert filled.predicted_ms == pytest.approx(8 + 14 * 0.05 + 0.13)
    assert chosen(gpu, streams, {}).call_widths == (8, 5)
    assert chosen(gpu, streams, empty, prompts=100).call_widths == (13,)
    assert chosen(gpu, range(0, 32, 3), empty).call_widths == (11,)
    assert chosen(gpu, range(0, 32, 3), empty).work.decode_rows == 31

    assert chosen(cpu, streams, empty).call_widths == (13,), "one row more"
    assert chosen(cpu, [0, 1, 2, 6, 7, 8], empty).call_widths == (3, 3), "three more"
    assert chosen(cpu, [0, 2, 6, 8], empty).call_widths == (2, 2), "what is near is joined"
    assert chosen(cpu, [0, 2, 6, 8], empty).work == Work(0, 6, 400, n_calls=2)

    assert chosen(gpu, [0, 2, 4], {1: 0}).call_widths == (2, 1), "there is no room in sequence 3"
    assert chosen(gpu, [0, 2], {1: 90_000}).call_widths == (1, 1), "attending to what sequence 1 holds takes 9 ms"
    padded = chosen(gpu, [0, 2, 4], {1: 200, 3: 30_000}, attention=PADDED)
    assert padded.call_widths == (2, 1), "each of five rows would attend as if it were the longest"
    assert padded.work.context_tokens == 3 * 200 + 100


def test_decodes_are_split_in_the_fastest_way() -> None:
    cost = attrs.evolve(known(CPU), call_times=DecodeCallTimes((0.0, 3.0, 8.0, 8.5, 12.0)))

    def widths(*seq_ids: int, mixes_prefill: bool = True, prompts: int = 0) -> tuple[int, ...]:
        decodes = [SequenceView(seq_id) for seq_id in seq_ids]
        waiting = [SequenceView(99, prompts)] if prompts else []
        chosen = plan(
            Tick(
                decodes,
                waiting,
                PolicyState(),
                now_s=0.0,
                cost=cost,
                max_tokens=512,
                settings=SETTINGS,
                mixes_prefill=mixes_prefill,
            )
        )
        return chosen.call_widths

    assert widths(0, 1) == (1, 1)
    assert widths(0, 1, 2) == (3,)
    assert widths(0, 1, 2, 3) == (4,), "11.5 ms instead of 12 saves too little"
    assert widths(0, 5, 6, 7) == (4,)
    assert widths(0, 5, 6, 7, mixes_prefill=False) == (1, 3)
    assert widths(0, 1, 5, 6, 7, mixes_prefill=False) == (1, 1, 3)
    assert widths(0, 1, 5, 6, 7, mixes_prefill=False, prompts=10) == (1, 1, 3)
    assert widths(0, 1, prompts=10) == (2,)


@pytest.mark.parametrize("prompts", [0, 10])
def test_with_padded_attention_a_long_context_has_its_own_call(prompts: int) -> None:
    decodes = [
        SequenceView(0, n_context=100),
        SequenceView(1, n_context=120),
        SequenceView(2, n_context=5000),
        SequenceView(3, n_context=80),
    ]
    waiting = [SequenceView(9, prompts)] if prompts else []
    cost = attrs.evolve(known(CPU), call_times=DecodeCallTimes((0.0, 3.0, 3.5, 4.0, 4.5)))

    def chosen(attention: Attention, *, mixes_prefill: bool = False) -> Plan:
        return plan(
            Tick(
                *(decodes, waiting, PolicyState()),
                now_s=0.0,
                cost=cost,
                max_tokens=512,
                settings=SETTINGS,
                mixes_prefill=mixes_prefill,
                attention=attention,
            )
        )

    padded = chosen(PADDED)
    assert padded.call_widths == (2, 1, 1)
    assert padded.work.context_tokens == 2 * 120 + 5000 + 80
    whole = chosen(Attention())
    assert whole.call_widths == (4,)
    assert whole.work.context_tokens == 100 + 120 + 5000 + 80
    assert chosen(Attention(), mixes_prefill=True).call_widths == (4,)


@given(cases(), st.integers(0, 100_000))
def test_where_all_cells_are_scanned_the_contexts_of_the_sequences_do_not_matter(case: Case, cells: int) -> None:
    def chosen(contexts: int) -> Plan:
        decodes = [msgspec.structs.replace(view, n_context=contexts) for view in case.decodes]
        return attrs.evolve(case, decodes=decodes).plan(Attention(AttentionScan.CACHE, cells))

    work = chosen(0).work
    assert work == chosen(5000).work
    assert work.context_tokens == work.decode_rows * cells
    assert work.mean_prefill_context == (cells if work.prefill_tokens else 0)


@given(decode_cases(), st.booleans())
def test_drafts_fit_the_batch_and_the_deadline(
    case: tuple[list[SequenceView], CostModel, int], mixes_prefill: bool
) -> None:
    decodes, cost, max_tokens = case
    chosen = plan(
        Tick(
            decodes,
            [],
            PolicyState(),
            now_s=0.0,
            cost=cost,
            max_tokens=max_tokens,
            settings=SETTINGS,
            mixes_prefill=mixes_prefill,
        )
    )
    if not chosen.drafts:
        return
    assert len(chosen.drafts) == len(chosen.decodes)
    assert all(0 <= n <= view.n_drafts for n, view in zip(chosen.drafts, chosen.decodes, strict=True))
    rows = len(chosen.decodes) + sum(chosen.drafts)
    context = sum((1 + n) * view.n_context for n, view in zip(chosen.drafts, chosen.decodes, strict=True))
    assert chosen.work == Work(0, rows, context)
    assert len(decodes) < rows <= max_tokens
    assert cost.predict(Work(0, rows, context)) <= 1e3 * min(view.due_s for view in decodes)


@given(decode_cases(), st.booleans(), st.integers(1, 300))
def test_a_tick_with_prefill_has_no_drafts(
    case: tuple[list[SequenceView], CostModel, int], mixes_prefill: bool, pending: int
) -> None:
    decodes, cost, max_tokens = case
    decodes = [msgspec.structs.replace(view, due_s=math.inf) for view in decodes]
    chosen = plan(
        Tick(
            decodes,
            [SequenceView(20, pending)],
            PolicyState(),
            now_s=0.0,
            cost=cost,
            max_tokens=max_tokens,
            settings=SETTINGS,
            mixes_prefill=mixes_prefill,
        )
    )
    assert chosen.chunks
    assert not chosen.drafts


@given(decode_cases())
def test_the_draft_length_gives_most_tokens_a_millisecond(case: tuple[list[SequenceView], CostModel, int]) -> None:
    decodes, cost, max_tokens = case
    decodes = [msgspec.structs.replace(view, due_s=math.inf) for view in decodes]
    chosen = plan(Tick(decodes, [], PolicyState(), now_s=0.0, cost=cost, max_tokens=max_tokens, settings=SETTINGS))

    def rate(drafts: Sequence[int]) -> float:
        tokens = sum(
            sum(view.acceptance_rate**k for k in range(n + 1)) for view, n in zip(decodes, drafts, strict=True)
        )
        context = sum((1 + n) * view.n_context for view, n in zip(decodes, drafts, strict=True))
        return tokens / cost.predict(Work(0, len(decodes) + sum(drafts), context))

    plain_ms = cost.predict(Work(0, len(decodes), sum(view.n_context for view in decodes)))
    candidates = [[min(view.n_drafts, most) for view in decodes] for most in DRAFT_LENGTHS]
    candidates = [drafts for drafts in candidates if len(decodes) + sum(drafts) <= max_tokens]
    best = max(map(rate, candidates), default=0.0)
    if chosen.drafts:
        assert rate(chosen.drafts) == pytest.approx(best)
        assert best > MIN_DRAFT_SPEEDUP * len(decodes) / plain_ms * (1 - 1e-9)
    else:
        assert best <= MIN_DRAFT_SPEEDUP * len(decodes) / plain_ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("acceptance_rate", "n", "tokens"),
    [(0.5, 0, 1), (0.5, 1, 1.5), (0.5, 2, 1.75), (0.9, 2, 1 + 0.9 + 0.81), (0.0, 16, 1), (1.0, 16, 17)],
)
def test_expected_tokens(acceptance_rate: float, n: int, tokens: float) -> None:
    """One token, and each draft token if it and all before it are accepted."""
    assert plan_module._expected_tokens(acceptance_rate, n) == pytest.approx(tokens)


def test_when_drafts_pay() -> None:
    """10 ms a call and 1 ms a row: 11 ms for a token, 12 ms with one draft token, 13 ms with two."""
    cost = CostModel(LinearModel((10.0, 0.0, 10.0, 0.0, 0.0)))

    def drafts(acceptance_rate: float, n: int = 16, due_ms: float = math.inf, max_tokens: int = 512) -> Sequence[int]:
        view = SequenceView(0, due_s=due_ms / 1e3, n_drafts=n, acceptance_rate=acceptance_rate)
        return plan(
            Tick([view], [], PolicyState(), now_s=0.0, cost=cost, max_tokens=max_tokens, settings=SETTINGS)
        ).drafts

    assert drafts(0.1) == (), "1.1 tokens in 12 ms is slower than 1 in 11 ms"
    assert drafts(0.14) == (), "a gain of less than MIN_DRAFT_SPEEDUP is noise"
    assert drafts(0.16) == (1,)
    assert drafts(0.5) == (2,), "1.75 tokens in 13 ms is faster than 1.94 in 15 ms"
    assert drafts(1.0) == (16,)
    assert drafts(1.0, n=5) == (5,)
    assert drafts(1.0, due_ms=19.0) == (8,), "16 would take 27 ms"
    assert drafts(1.0, due_ms=5.0) == (), "already late"
    assert drafts(1.0, max_tokens=16) == (8,)
    assert drafts(1.0, n=0) == ()


def test_sequences_with_and_without_drafts_share_a_call() -> None:
    cost = CostModel(LinearModel((10.0, 0.0, 10.0, 0.0, 0.0)))
    decodes = [
        SequenceView(0),
        SequenceView(1, n_drafts=3, acceptance_rate=1.0),
        SequenceView(2, n_drafts=16, acceptance_rate=1.0),
    ]
    chosen = plan(Tick(decodes, [], PolicyState(), now_s=0.0, cost=cost, max_tokens=512, settings=SETTINGS))
    assert chosen.drafts == (0, 3, 16)
    assert chosen.call_widths == (3,)


# -- plans that are not carried out -----------------------------------------------------------------


@given(cases(), st.data())
def test_an_undone_plan_charges_nobody_and_forgets_nobody(case: Case, data: st.DataObject) -> None:
    before = case.state
    after = case.plan().state
    assert attrs.evolve(after.undo(before, after).service, counters={}) == attrs.evolve(before.service, counters={})
    arrived = attrs.evolve(after, service=after.service.arrived("late", [view.principal for view in case.decodes]))
    undone = arrived.undo(before, after)
    assert (undone.prefill_rows, undone.background_skips) == (before.prefill_rows, before.background_skips)
    for principal in before.service.counters:
        assert undone.service.counter(principal) == pytest.approx(before.service.counter(principal))
    assert undone.service.counters["late"] == arrived.service.counters["late"]
