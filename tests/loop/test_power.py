"""Requests with a power limit, and what they take of the energy; in virtual time."""

from __future__ import annotations

import attrs
import pytest
import trio

from tests.loop.test_scheduling import Client, running
from tests.support.fake_engine import FakeEngine
from uma_trio.processes.energy import EnergyMeter, NvidiaCard


def engine() -> FakeEngine:
    return FakeEngine(n_ctx=100_000, n_seq_max=4, cost_ms=lambda prompt, decodes: 5 + 0.1 * prompt + 0.5 * decodes)


class VirtualMeter(EnergyMeter):
    """Reads without a thread, which would take no virtual time."""

    async def read(self) -> float:
        await trio.lowlevel.checkpoint()
        return self.joules()


def meter(watts: float = 50.0) -> EnergyMeter:
    """Counts a constant power."""
    return VirtualMeter(
        [NvidiaCard(lambda: round(1e3 * watts * trio.current_time()), round(1e3 * watts * trio.current_time()))]
    )


async def shares(**values: object) -> tuple[float, list[float], list[list[int]]]:
    """Run four streams of two principals; the time, when each has ended, their tokens."""
    async with running(engine(), **values) as harness:
        began = trio.current_time()
        clients = [Client() for _ in range(4)]
        asked = [
            harness.ask(50 + n, 200, client, principal=f"uid:{n % 2}", ignore_eos=True)
            for n, client in enumerate(clients)
        ]
        for each in asked:
            await each.done.wait()
        ends = [each.times.ended_at - began for each in asked]
        return max(ends), ends, [client.tokens for client in clients]


async def test_a_limit_slows_all_streams_alike_and_changes_no_text(autojump_clock):
    whole_s, ends, texts = await shares()
    limited_s, limited_ends, limited_texts = await shares(power_limit="50%")
    assert limited_s == pytest.approx(2 * whole_s, rel=0.1)
    assert limited_texts == texts
    ratios = [limited / end for limited, end in zip(limited_ends, ends, strict=True)]
    assert max(ratios) - min(ratios) < 0.15


async def test_cancelled_and_new_requests_do_not_wait_for_a_rest_to_end_badly(autojump_clock):
    async with running(engine(), power_limit="10%") as harness:
        first = harness.ask(50, 500, ignore_eos=True)
        while len(first.tokens) < 3:
            await trio.sleep(0.01)
        harness.scheduler.cancel(first)
        assert first.done.is_set()
        second = harness.ask(50, 5, ignore_eos=True)
        await second.done.wait()
        assert len(second.tokens) == 5


async def test_usage_has_the_energy_of_each_request_and_metrics_the_sum(autojump_clock):
    async with running(engine(), meter=meter()) as harness:
        await trio.sleep(100)  # a time without work is nobody's
        began = trio.current_time()
        asked = [harness.ask(100, 100, ignore_eos=True) for _ in range(2)]
        for each in asked:
            await each.done.wait()
        taken_j = 50 * (trio.current_time() - began)
        used = [each.usage.energy_j for each in asked]
        assert sum(filter(None, used)) == pytest.approx(taken_j, rel=0.05)
        assert used[0] == pytest.approx(used[1], rel=0.2)
        figures = harness.scheduler.snapshot()
        assert figures["energy_joules_total"] == pytest.approx(taken_j, rel=0.05)
        assert figures["joules_per_token"] == pytest.approx(taken_j / 400, rel=0.05)


async def test_without_counters_nothing_is_said(autojump_clock):
    async with running(engine(), power_limit="40W") as harness:
        asked = harness.ask(100, 10, ignore_eos=True)
        await asked.done.wait()
        assert asked.usage.energy_j is None
        assert harness.scheduler.snapshot()["joules_per_token"] is None
        assert trio.current_time() < 1


async def test_a_counter_that_goes_away_ends_nothing(autojump_clock):
    def broken() -> int:
        raise OSError("gone")

    found = attrs.evolve(meter(), counters=[NvidiaCard(broken, 0)])
    async with running(engine(), meter=found, power_limit="40W") as harness:
        asked = harness.ask(100, 10, ignore_eos=True)
        await asked.done.wait()
        assert asked.usage.energy_j is None


async def test_no_step_waits_for_a_slow_counter(autojump_clock):
    class SlowMeter(VirtualMeter):
        async def read(self) -> float:
            await trio.sleep(10)
            return self.joules()

    async def seconds(found: EnergyMeter | None) -> float:
        async with running(engine(), meter=found) as harness:
            began = trio.current_time()
            asked = harness.ask(100, 100, ignore_eos=True)
            await asked.done.wait()
            return trio.current_time() - began

    with_counter = await seconds(SlowMeter(meter().counters))
    assert with_counter == pytest.approx(await seconds(None), rel=0.001)


async def test_the_power_is_measured_only_while_there_is_work(autojump_clock):
    reads = 0

    class CountingMeter(VirtualMeter):
        async def read(self) -> float:
            nonlocal reads
            reads += 1
            return self.joules()

    async with running(engine(), meter=CountingMeter(meter().counters)) as harness:
        await trio.sleep(100)
        before = reads
        asked = harness.ask(100, 1000, ignore_eos=True)
        await asked.done.wait()
        during = reads
        await trio.sleep(100)
    assert before == 2, "a power is known from the start"
    assert during > 20
    assert reads - during <= 2
