"""What clients hear about when their requests start and end; in virtual time."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import trio

from tests.loop.test_scheduling import Harness, running
from tests.support.fake_engine import FakeEngine
from tests.support.profile import amount, thorough
from uma_trio import errors
from uma_trio.daemon.serving.forecasting import Forecaster
from uma_trio.protocol.events import Failure, Forecast


class Client:
    """Keeps the forecasts that it gets, each with its time."""

    has_room = True

    def __init__(self) -> None:
        self.found: list[tuple[float, Forecast]] = []
        self.failures: list[Failure] = []

    def send(self, *events: Any) -> None:
        self.found += [(trio.current_time(), event) for event in events if isinstance(event, Forecast)]
        self.failures += [event for event in events if isinstance(event, Failure)]


def cost_ms(prompt: int, decodes: int) -> float:
    return 5 + 0.1 * prompt + 0.5 * decodes


def engine(**values: Any) -> FakeEngine:
    return FakeEngine(**{"n_ctx": 100_000, "n_seq_max": 4, "cost_ms": cost_ms, **values})


async def learn(harness: Harness) -> None:
    """Let the cost model see what the engine takes."""
    for _ in range(3):
        done = [harness.ask(400, 60).done for _ in range(4)]
        for each in done:
            await each.wait()


async def test_predictions_come_true(autojump_clock):
    """16 requests of mixed sizes, all of which wait; answers are as long as they may be."""
    async with running(engine(), max_queue=100) as harness:
        await learn(harness)
        held = [harness.ask(300, 100) for _ in range(4)]
        clients = [Client() for _ in range(16)]
        began = trio.current_time()
        asked = [
            harness.ask(100 + 150 * (n % 5), 40 + 20 * (n % 3), client, forecast=True, ignore_eos=True)
            for n, client in enumerate(clients)
        ]
        for each in (*held, *asked):
            await each.done.wait()
        for client, sequence in zip(clients, asked, strict=True):
            at, first = client.found[0]
            assert at == began
            assert at + first.start_ms / 1e3 == pytest.approx(
                sequence.times.first_token_at, abs=0.2 * (sequence.times.ended_at - at)
            )
            assert first.end_ms == pytest.approx(1e3 * (sequence.times.ended_at - at), rel=0.2)
            positions = [event.queue_position for _, event in client.found]
            assert positions == sorted(positions, reverse=True)
        assert any(len(client.found) > 1 for client in clients), "they learn that they come nearer"
        assert [client.found[0][1].queue_position for client in clients] == [*range(1, 17)]


@pytest.mark.parametrize(("drift", "least"), [(0.0, 0.9), thorough(0.4, 0.75)], ids=["steady", "drifting"])
async def test_most_predictions_are_off_by_a_fifth_and_few_deadlines_are_misjudged(
    autojump_clock, drift: float, least: float
) -> None:
    """Requests of mixed sizes come at random, faster than they are served; the speed of the machine may drift.

    Each has a deadline, from one that nobody can meet to one that is far away.  One that is refused comes again at once
    without it, which tells whether it would have met it.
    """

    def drifting_ms(prompt: int, decodes: int) -> float:
        return cost_ms(prompt, decodes) * (1 + drift * math.sin(trio.current_time() / 20))

    rng, asked = random.Random(1), []
    async with running(engine(cost_ms=drifting_ms), max_queue=1000) as harness:
        for _ in range(amount(quick=100, thorough=1000)):
            client = Client()
            prompt, n = rng.choice((30, 300, 1000)), rng.choice((20, 60, 200))
            deadline_at = trio.current_time() + math.exp(rng.uniform(0, math.log(60)))
            sequence = harness.ask(prompt, n, client, forecast=True, ignore_eos=True, deadline_at=deadline_at)
            is_refused = sequence.times.ended_at is not None
            if is_refused:
                sequence = harness.ask(prompt, n, client, forecast=True, ignore_eos=True)
            asked.append((client, sequence, deadline_at, is_refused))
            await trio.sleep(rng.expovariate(5.0 if len([*harness.scheduler.answers()]) < 50 else 1.5))
        good = would_have_been_met = missed = 0
        for client, sequence, deadline_at, is_refused in asked:
            await sequence.done.wait()
            at, first = client.found[0]
            assert sequence.times.ended_at is not None
            good += abs(first.end_ms / (1e3 * (sequence.times.ended_at - at)) - 1) <= 0.2
            would_have_been_met += is_refused and sequence.times.ended_at <= deadline_at
            missed += not is_refused and sequence.times.ended_at > deadline_at
    assert good >= least * len(asked)
    n_refused = sum([is_refused for *_, is_refused in asked])
    print(f"{len(asked)}: {good} good, {n_refused} refused, {would_have_been_met} wrongly, {missed} missed")
    assert 0.2 * len(asked) < n_refused < 0.8 * len(asked)
    assert would_have_been_met <= 0.02 * len(asked)
    assert missed <= 0.02 * len(asked)


@pytest.mark.thorough
async def test_a_queue_that_comes_and_goes_is_predicted_too(autojump_clock) -> None:
    """As many requests come as are served.  If nobody were expected, a quarter would be good."""

    def slow_ms(prompt: int, decodes: int) -> float:
        return 5 + prompt + 2.5 * decodes

    rng, asked = random.Random(1), []
    async with running(engine(cost_ms=slow_ms), max_queue=1000) as harness:
        for _ in range(150):
            client = Client()
            prompt, n = rng.choice((30, 300, 1000)), rng.choice((20, 60, 200))
            asked.append((client, harness.ask(prompt, n, client, forecast=True, ignore_eos=True)))
            await trio.sleep(rng.expovariate(0.9))
        good = 0
        for client, sequence in asked:
            await sequence.done.wait()
            at, first = client.found[0]
            good += abs(first.end_ms / (1e3 * (sequence.times.ended_at - at)) - 1) <= 0.2
    print(f"{good} of {len(asked)} good")
    assert good >= 0.45 * len(asked)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(autojump_clock) -> None:
    """The error says when the answer would have been complete, and when to come back if that would help."""
    async with running(engine(n_seq_max=1)) as harness:
        await learn(harness)
        held = harness.ask(100, 200, ignore_eos=True)
        alone, behind = Client(), Client()
        now = trio.current_time()
        assert harness.ask(100, 200, alone, ignore_eos=True, deadline_at=now + 0.3).done.is_set()
        assert harness.ask(100, 10, behind, ignore_eos=True, deadline_at=now + 0.3).done.is_set()
        in_time = harness.ask(100, 10, ignore_eos=True, deadline_at=now + 2)
        await held.done.wait()
        waited_ms = 1e3 * (trio.current_time() - now)
        await in_time.done.wait()
        assert in_time.times.ended_at < now + 2
    [error] = alone.failures
    assert (error.code, error.field, error.retry_after_ms) == ("E_LIMIT_DEADLINE", "deadline_ms", None)
    assert error.eta_ms == pytest.approx(2 * waited_ms, rel=0.2)
    [error] = behind.failures
    assert error.eta_ms == pytest.approx(1e3 * (in_time.times.ended_at - now), rel=0.2)
    assert error.retry_after_ms == pytest.approx(error.eta_ms - 300, abs=1)


async def test_a_deadline_counts_with_what_is_in_the_kv_cache(autojump_clock) -> None:
    """Its prompt of 20,000 tokens would take 2 s, and is computed already."""
    async with running(engine(n_seq_max=2), prefix_reuse=True) as harness:
        held = [harness.ask(20_000, 300, ignore_eos=True), harness.ask(40, 300, ignore_eos=True, principal="other")]
        while not held[0].tokens:
            await trio.sleep(0.1)
        sequence = harness.ask(20_000, 5, ignore_eos=True, deadline_at=trio.current_time() + 2.5)
        assert not sequence.done.is_set()
        for each in (*held, sequence):
            await each.done.wait()
        assert sequence.n_cached > 19_000


async def test_only_who_asks_gets_forecasts(autojump_clock):
    async with running(engine(n_seq_max=1)) as harness:
        clients = [Client() for _ in range(3)]
        asked = [harness.ask(10, 20, client, forecast=n == 1) for n, client in enumerate(clients)]
        for each in asked:
            await each.done.wait()
        assert [bool(client.found) for client in clients] == [False, True, False]


async def test_one_that_runs_at_once_hears_when_it_ends(autojump_clock):
    async with running(engine()) as harness:
        await learn(harness)
        client, began = Client(), trio.current_time()
        sequence = harness.ask(1000, 50, client, forecast=True, ignore_eos=True)
        await sequence.done.wait()
        [(_, event)] = client.found
        assert event.queue_position == 0
        assert event.end_ms == pytest.approx(1e3 * (sequence.times.ended_at - began), rel=0.2)


async def test_a_refused_request_comes_back_when_there_is_room(autojump_clock):
    async with running(engine(n_seq_max=2), max_queue=2) as harness:
        await learn(harness)
        sequences = [harness.ask(100, 50, ignore_eos=True) for _ in range(4)]
        with pytest.raises(errors.QueueFull) as refused:
            harness.ask(100, 50)
        began = trio.current_time()
        for each in sequences:
            await each.done.wait()
        assert refused.value.retry_after_ms == pytest.approx(1e3 * (trio.current_time() - began), rel=0.2)


async def test_a_flood_of_refused_requests_has_no_forecast_computed_for_each(autojump_clock, monkeypatch):
    computed = []

    def slow(self, *loads, forecast=Forecaster._forecast):
        computed.append(trio.current_time())
        autojump_clock.jump(0.01)
        return forecast(self, *loads)

    async with running(engine(n_seq_max=1), max_queue=1) as harness:
        held = [harness.ask(300, 200), harness.ask(300, 10)]
        monkeypatch.setattr(Forecaster, "_forecast", slow)
        waits = []
        for _ in range(50):
            with pytest.raises(errors.QueueFull) as refused:
                harness.ask(10, 1)
            waits.append(refused.value.retry_after_ms)
        assert len(computed) == 1
        assert waits == sorted(waits), "each has a moment of its own"
        await trio.sleep(0.3)
        with pytest.raises(errors.QueueFull):
            harness.ask(10, 1)
        assert len(computed) == 2
        for each in held:
            await each.done.wait()


async def test_requests_in_a_row_all_get_forecasts_and_a_flood_takes_its_share(autojump_clock, monkeypatch):
    computed = []

    def slow(self, *loads, forecast=Forecaster._forecast):
        computed.append(trio.current_time())
        autojump_clock.jump(0.002)
        return forecast(self, *loads)

    monkeypatch.setattr(Forecaster, "_forecast", slow)
    async with running(engine(), max_queue=1000) as harness:
        for _ in range(3):
            client = Client()
            await harness.ask(1, 1, client, forecast=True).done.wait()
            assert client.found, "2 ms took 5 % of the second before"
        computed.clear()
        began = trio.current_time()
        for each in [harness.ask(1, 1, Client(), forecast=True) for _ in range(200)]:
            await each.done.wait()
        seconds = trio.current_time() - began
        assert 0 < 0.002 * len(computed) <= 0.05 * (seconds + 1.0) + 0.002


async def test_a_long_queue_gets_forecasts_at_most_twice_a_second(autojump_clock):
    async with running(engine(n_seq_max=1), max_queue=1000) as harness:
        clients = [Client() for _ in range(amount(quick=60, thorough=200))]
        asked = [harness.ask(20, 5, client, forecast=True) for client in clients]
        for each in asked:
            await each.done.wait()
        for client in clients:
            seconds = client.found[-1][0] - client.found[0][0]
            assert len(client.found) <= 2 + 2 * seconds + 1


async def test_a_deadline_counts_the_length_of_answers_only_if_that_is_known(autojump_clock) -> None:
    """Answers of an unknown length are predicted to be as long as they may; that is no reason to refuse them."""
    async with running(engine(eog_after=120)) as harness:
        for _ in range(3):
            await harness.ask(40, 60, ignore_eos=True).done.wait()
        now, client = trio.current_time(), Client()
        asked = harness.ask(100, 5000, client, deadline_at=now + 2)
        await asked.done.wait()
        assert (client.failures, len(asked.tokens)) == ([], 21)
        assert asked.times.ended_at < now + 2
        refused = Client()
        harness.ask(100, 5000, refused, ignore_eos=True, deadline_at=trio.current_time() + 2)
        assert [each.code for each in refused.failures] == ["E_LIMIT_DEADLINE"], "that length is known"
        harness.ask(50_000, 5000, refused, deadline_at=trio.current_time() + 2)
        assert len(refused.failures) == 2, "it would not even start"


async def test_a_long_prompt_has_forecasts_while_it_is_computed(autojump_clock) -> None:
    slower = 1.0

    def cost(prompt: int, decodes: int) -> float:
        return slower * cost_ms(prompt, decodes)

    async with running(engine(cost_ms=cost)) as harness:
        await learn(harness)
        client = Client()
        asked = harness.ask(50_000, 5, client, forecast=True)
        await trio.sleep(0.1)
        slower = 5.0
        await asked.done.wait()
    starts = [1e3 * (at - asked.times.arrived_at) + event.start_ms for at, event in client.found]
    true_ms = 1e3 * (asked.times.first_token_at - asked.times.arrived_at)
    assert len(starts) > 3
    assert abs(starts[-1] - true_ms) < 0.2 * true_ms < abs(starts[0] - true_ms)
