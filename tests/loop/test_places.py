"""Principals that hold many places, and those that wait for one: over a fake engine in virtual time."""

from __future__ import annotations

import pytest
import trio

from tests.support.asking import Client, asking
from tests.support.controlling import Client as ControlledClient
from tests.support.controlling import controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.fake_runtime import FakeRuntime
from tests.support.profile import amount, sampled, thorough
from tests.support.programs import Back, Fork, Gen, Insert, Program, Set, Wait
from uma_trio import errors
from uma_trio.daemon.policy import fairness
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Slo

LAYOUTS = [{}, {"unified": False, "n_ctx": 8000}, {"can_truncate": False}]


def right(client: Client) -> bool:
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("waiting", sampled([0, 12], 2))
async def test_one_that_holds_nothing_gets_a_place_at_once(autojump_clock, options, waiting) -> None:
    async with asking(FakeEngine(n_seq_max=4, **options)) as harness:
        alone = await harness.ask([5], 3, principal="b").reached()
        greedy = [harness.ask([n % 7], 150, principal="a") for n in range(4 + waiting)]
        await trio.sleep(0.5)
        client = harness.ask([9], 3, principal="b")
        assert await client.reached() < 2 * alone + 1
        await harness.ended(client)
        assert client.tokens == expected_continuation([9], 3)
        assert harness.scheduler.telemetry.preemptions_total == 1
        await harness.ended(*greedy)
        assert all(each.reason == "length" and right(each) for each in greedy)
        await harness.clean()


async def test_two_principals_that_want_all_places_have_half_of_them_each(autojump_clock) -> None:
    async with asking(FakeEngine(n_seq_max=8, n_ctx=100_000)) as harness:
        everybody = [harness.ask([n], 300 + 25 * n, principal="a") for n in range(14)]
        await trio.sleep(0.5)
        everybody += [harness.ask([n], 300 + 25 * n, principal="b") for n in range(14)]
        await trio.sleep(1)
        held = []
        for _ in range(50):
            running = [each.principal for each in harness.scheduler.describe_sequences() if each.state != "cached"]
            held.append(running.count("a"))
            await trio.sleep(0.1)
        assert held[0] == 4
        assert 3.5 < sum(held) / len(held) < 4.5
        await harness.ended(*everybody)
        assert harness.scheduler.telemetry.preemptions_total < 20, "they take places from each other"
        assert all(right(each) for each in everybody)
        await harness.clean()


async def test_more_principals_than_places_take_turns(autojump_clock) -> None:
    """Each goes on within a few turns, and the time for computing tokens again stays below half."""
    async with asking(FakeEngine(n_seq_max=2, n_ctx=100_000)) as harness:
        clients = [harness.ask([n], 500, principal=f"tenant {n}") for n in range(5)]
        for client in clients:
            assert await client.reached() < 3
        await harness.ended(*clients)
        assert all(right(each) for each in clients)
        assert harness.scheduler.telemetry.preemptions_total > 5
        await harness.clean()


async def test_the_state_of_mirostat_survives_the_loss_of_a_place(autojump_clock) -> None:
    fields = {"temperature": 1.0, "seed": 3, "mirostat": 2}
    async with asking(FakeEngine(n_seq_max=2, n_ctx=100_000)) as harness:
        clients = [harness.ask([n], 800, principal=f"tenant {n}", **fields) for n in range(3)]
        await harness.ended(*clients)
        assert harness.scheduler.telemetry.preemptions_total > 1
        for client in clients:
            assert client.tokens == expected_continuation(client.prompt, 800, params=SamplingParams(**fields))
        await harness.clean()


async def test_a_class_does_not_keep_others_out(autojump_clock) -> None:
    async with asking(FakeEngine(n_seq_max=2)) as harness:
        for n in range(30):
            harness.ask([n % 7], 400, principal="a", slo=Slo(priority="interactive"))
        await trio.sleep(0.5)
        client = harness.ask([9], 3, principal="b")
        assert await client.reached() < 1
        harness.scheduler.stop()


BACKGROUND = Slo(priority="background")


@pytest.mark.parametrize("principal", sampled(["a", "b"], 2))
async def test_background_gives_way_within_a_tick_also_when_it_has_waited_long(
    autojump_clock, monkeypatch, principal
) -> None:
    """The first request of class ``background`` in line has waited so long that it goes before others, and still they take
    the places of those that run."""
    async with asking(FakeEngine(n_seq_max=4, n_ctx=100_000)) as harness:
        alone = await harness.ask([5], 3, principal=principal).reached()
        rows = [harness.ask([n], 1000, principal="a", slo=BACKGROUND) for n in range(6)]
        monkeypatch.setattr(fairness, "AGING_INTERVAL_S", 0.1)
        for waited_s in (0.05, 1):
            await trio.sleep(waited_s)
            assert max(len(row.tokens) for row in rows) < 1000
            clients = [harness.ask([9 + n], 3, principal=principal) for n in range(4)]
            for client in clients:
                assert await client.reached() < 3 * alone + 0.2
            await harness.ended(*clients)
        await harness.ended(*rows)
        assert all(row.reason == "length" and right(row) for row in rows)
        await harness.clean()


async def test_background_that_computes_is_interrupted_by_others(autojump_clock) -> None:
    """A step of rows takes 100 ms, and the first token of a request as long as alone: it waits for no step."""
    engine = FakeEngine(n_seq_max=8, n_ctx=100_000, cost_ms=lambda prompt, decodes: 1 + 2 * prompt + 20 * decodes)
    async with asking(engine) as harness:
        alone = await harness.ask([5], 3).reached()
        rows = [harness.ask([n, *range(60)], 200, principal="a", slo=BACKGROUND) for n in range(4)]
        waits = []
        for n in range(12):
            await trio.sleep(0.7 + 0.013 * n)
            assert max(len(row.tokens) for row in rows) < 200
            visitor = harness.ask([9, n], 3)
            waits.append(await visitor.reached())
            await harness.ended(visitor)
            assert right(visitor)
        assert max(waits) < alone + 0.005
        assert harness.scheduler.telemetry.interrupted_steps_total >= 10
        await harness.ended(*rows)
        assert all(row.reason == "length" and right(row) for row in rows)
        await harness.clean()


async def test_background_comes_to_an_end_although_others_interrupt_it_all_the_time(autojump_clock) -> None:
    """Requests come every 40 ms, and a chunk of a row takes 100 ms: without a bound, none would ever be complete."""
    engine = FakeEngine(n_seq_max=4, n_ctx=100_000, cost_ms=lambda prompt, decodes: 1 + prompt + decodes)
    async with asking(engine) as harness:
        row = harness.ask([*range(100)] * 10, 3, principal="a", slo=BACKGROUND)
        began = trio.current_time()
        n = 0
        while not row.answer.done.is_set():
            n += 1
            await harness.answer([9, n], 1)
            await trio.sleep(0.04)
        assert n > 20
        assert trio.current_time() - began < 2.5, "its prompt alone takes a second"
        assert right(row)
        await harness.clean()


async def test_background_waits_for_others(autojump_clock) -> None:
    async with asking(FakeEngine(n_seq_max=2)) as harness:
        others = [harness.ask([n], 200, principal="a") for n in range(2)]
        await trio.sleep(0.1)
        client = harness.ask([9], 3, principal="b", slo=Slo(priority="background"))
        await harness.ended(*others)
        assert not client.tokens
        assert harness.scheduler.telemetry.preemptions_total == 0
        await harness.ended(client)
        await harness.clean()


async def test_a_queue_that_another_principal_has_filled_has_room(autojump_clock) -> None:
    async with asking(FakeEngine(n_seq_max=2), max_queue=10) as harness:
        for n in range(12):
            harness.ask([n % 7], 100, principal="a")
        with pytest.raises(errors.QueueFull):
            harness.ask([1], 100, principal="a")
        clients = [harness.ask([9], 100, principal="b") for _ in range(5)]
        with pytest.raises(errors.QueueFull):
            harness.ask([9], 100, principal="b")
        await harness.ended(*clients)
        harness.scheduler.stop()


async def test_a_prompt_that_is_prefilled_again_and_again_is_finished(autojump_clock) -> None:
    """Others with short requests keep coming, and there is one place."""
    engine = FakeEngine(n_seq_max=1, n_ctx=100_000, cost_ms=lambda prompt, decodes: 1 + 0.5 * prompt + decodes)
    async with asking(engine) as harness:
        long = harness.ask([n % 7 for n in range(5000)], 40, principal="a")
        while not long.answer.done.is_set():
            await harness.answer([9], 3, principal="b")
            assert harness.scheduler.telemetry.preemptions_total < 20
        assert right(long)
        await harness.clean()


async def test_sessions_that_lose_their_places_are_saved_as_ever(autojump_clock) -> None:
    from tests.support.state_files import MemoryFiles

    files = MemoryFiles()
    async with asking(FakeEngine(n_seq_max=2, n_ctx=4000), files) as harness:
        held = [harness.ask([n] * 300, 300, principal="a", session_id="s") for n in range(2)]
        await trio.sleep(0.6)
        client = harness.ask([9], 3, principal="b")
        assert await client.reached() < 2
        await harness.ended(*held)
        assert all(right(each) for each in held)
        await harness.clean()


LOOP = [step for _ in range(amount(quick=15, thorough=30)) for step in (Gen(2), Insert([5, 6]), Back(1, [4]))]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("exchange_ms", [0.7, thorough(13.0)])
@pytest.mark.parametrize(
    "script",
    sampled(
        [LOOP, [Gen(2), Fork([LOOP, LOOP, LOOP])], [Gen(2), Fork([[Gen(3), Wait("x"), Gen(1)], [*LOOP, Set("x")]])]], 3
    ),
)
async def test_controllers_lose_places_too(autojump_clock, script, exchange_ms, options) -> None:
    runtime = FakeRuntime({"program": Program}, exchange_ms=lambda name: exchange_ms)
    other = Principal("b")

    async def texts(*, crowded: bool) -> list[dict[int, list[int]]]:
        async with controlling({}, FakeEngine(n_seq_max=4, **options), runtime) as harness:
            clients = [ControlledClient() for _ in range(4 if crowded else 1)]
            answers = []
            for n, client in enumerate(clients):
                answers.append(await harness.control("program", client, 150, argument=script, id=f"{crowded}{n}"))
            if crowded:
                await trio.sleep(0.1)
                plain = await harness.control(
                    "program", visitor := ControlledClient(), 9, [Gen(3)], other, id="visitor"
                )
                with trio.fail_after(2):
                    await plain[0].done.wait()
                assert visitor.reasons == {0: "stop"}
                assert harness.scheduler.telemetry.preemptions_total >= 1
            await harness.done(*answers)
            reasons = {reason for client in clients for reason in client.reasons.values()}
            assert "stop" in reasons <= {"stop", "E_LIMIT_KV"}, "forks of all wait for places of each other"
            await harness.clean()
            return [client.tokens for client in clients if {*client.reasons.values()} == {"stop"}]

    runtime_alone = await texts(crowded=False)
    runtime = FakeRuntime({"program": Program}, exchange_ms=lambda name: exchange_ms)
    assert all(sorted(each.values()) == sorted(runtime_alone[0].values()) for each in await texts(crowded=True))
