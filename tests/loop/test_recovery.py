"""Clients of an engine that fails, dies or cannot be started, over a fake engine in virtual time."""

from __future__ import annotations

import itertools
import math

import pytest
import structlog
import trio

from tests.support.asking import Log, asking
from tests.support.fake_engine import EOG, FakeEngine, expected_continuation
from tests.support.state_files import MemoryFiles
from uma_trio import errors
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import SamplingParams

POISON = 5000
"""A token that the model never samples."""

FAILURES = [EngineError("no room"), EngineDied("SIGKILL")]


def kill(harness) -> None:
    """Kill the engine process."""
    harness.scheduler._engine.link.kill()


@pytest.mark.parametrize("failure", FAILURES, ids=str)
async def test_a_step_that_fails_once_fails_no_request(autojump_clock, failure):
    async with asking(FakeEngine(n_seq_max=2)) as harness:
        stuck = harness.ask([3], 30)
        await trio.sleep(0.05)
        stuck.has_room = False
        await trio.sleep(0.05)
        running, waiting = harness.ask([1], 30), harness.ask([2], 10)
        harness.engine.fail_next = failure
        await harness.ended(running, waiting)
        assert running.tokens == expected_continuation([1], 30)
        assert waiting.tokens == expected_continuation([2], 10)
        harness.read_on(stuck)
        await harness.ended(stuck)
        assert stuck.tokens == expected_continuation([3], 30), "its KV cells were lost, so they are computed again"
        assert harness.engine.resets >= 1
        assert harness.scheduler._engine.restarts == isinstance(failure, EngineDied)
        await harness.clean()


def delay_next_step(engine: FakeEngine, ms: float) -> None:
    """Let the next step that computes take ``ms``."""
    usual = engine.cost_ms

    def cost_ms(n_prefill: int, n_decode: int) -> float:
        engine.cost_ms = usual
        return ms

    engine.cost_ms = cost_ms


@pytest.mark.parametrize("after_s", [0.001, 0.1], ids=["prefill", "decode"])
async def test_an_engine_that_hangs_within_a_step_is_killed_and_costs_no_request(autojump_clock, after_s):
    async with asking(engine_hang_timeout_s=20.0) as harness:
        clients = [harness.ask([10 + i] * (1 + 90 * i), 40) for i in range(3)]
        await trio.sleep(after_s)
        delay_next_step(harness.engine, math.inf)
        await trio.sleep(19.5)
        n_sent = [len(client.tokens) for client in clients]
        assert harness.scheduler._engine.restarts == 0
        await trio.sleep(1.0)
        assert not harness.scheduler._engine.link.is_usable
        assert [len(client.tokens) for client in clients] == n_sent
        await harness.ended(*clients)
        assert harness.scheduler._engine.restarts == 1
        assert all(client.tokens == expected_continuation(client.prompt, 40) for client in clients)
        await harness.clean()


async def test_a_step_that_is_slow_and_ends_in_time_is_no_hang(autojump_clock):
    async with asking(engine_hang_timeout_s=20.0) as harness:
        client = harness.ask([1], 40)
        await trio.sleep(0.1)
        delay_next_step(harness.engine, 19_000.0)
        await harness.ended(client)
        assert (harness.scheduler._engine.restarts, harness.engine.resets) == (0, 0)
        assert client.tokens == expected_continuation([1], 40)
        await harness.clean()


async def test_a_request_whose_steps_hang_twice_fails(autojump_clock):
    async with asking(engine_hang_timeout_s=20.0) as harness:
        client = harness.ask([1], 40)
        harness.engine.cost_ms = lambda n_prefill, n_decode: math.inf
        await harness.ended(client)
        assert client.reason == "E_RUNTIME_DECODE"
        assert "it was killed, because it gave no answer for 20 s" in client.last.message
        assert harness.scheduler._engine.restarts == 1


@pytest.mark.parametrize("after_s", [0.001, 0.02, 0.05, 0.0551, 0.09, 0.2])
async def test_a_crash_changes_no_text(autojump_clock, after_s):
    """Greedy, sampled and penalised texts, in prefill and decode, with and without a run-ahead step."""
    sampled = SamplingParams(temperature=1.0, seed=5)
    penalised = SamplingParams(repetition_penalty=1.5, repeat_last_n=8)
    adaptive = SamplingParams(temperature=1.0, seed=8, mirostat=2)
    async with asking() as harness:
        clients = [harness.ask([10 + i] * (1 + 90 * i), 40) for i in range(4)]
        clients.append(harness.ask([5], 40, temperature=1.0, seed=5))
        clients.append(harness.ask([6], 40, repetition_penalty=1.5, repeat_last_n=8))
        clients.append(
            harness.ask([7] * 30, 40, dry_multiplier=0.8, dry_penalty_last_n=20)
        )  # the fake checks what it gets
        clients.append(harness.ask([8], 40, temperature=1.0, seed=8, mirostat=2))
        await trio.sleep(after_s)
        kill(harness)
        await harness.ended(*clients)
        for client, params in zip(clients, [None] * 4 + [sampled, penalised, None, adaptive], strict=True):
            assert client.tokens == expected_continuation(client.prompt, 40, params=params)
        await harness.clean()


@pytest.mark.parametrize("exact_rows", [1, 8])
async def test_lost_tokens_of_detached_answers_are_computed_again_in_exact_parts(autojump_clock, exact_rows):
    """Other chunks of them would round differently.  Prompts are computed as they were at first, and others at once."""
    async with asking(FakeEngine(exact_rows=exact_rows)) as harness:
        clients = [harness.ask([10 + i] * (1 + 90 * i), 60, log=Log()) for i in range(3)]
        plain = harness.ask([9], 60)
        await trio.sleep(0.4)
        n_before = len(harness.engine.steps)
        plain_id, n_plain = plain.answer.allocation.seq_id, plain.answer.n_computed
        lost = {client.answer.allocation.seq_id: client.answer for client in clients}
        n_lost = {seq_id: answer.n_computed for seq_id, answer in lost.items()}
        assert all(n_lost[seq_id] > len(answer.prompt.tokens) + 8 for seq_id, answer in lost.items())
        kill(harness)
        await harness.ended(*clients, plain)
        computed = [each for step in harness.engine.steps[n_before:] for call in step.calls for each in call]
        assert max(len(each.tokens) for each in computed if each.seq_id == plain_id) >= n_plain
        again = [each for each in computed if each.position < n_lost.get(each.seq_id, 0)]
        assert {each.seq_id for each in again} == {*lost}
        for each in again:
            n_prompt, end = len(lost[each.seq_id].prompt.tokens), each.position + len(each.tokens)
            assert end <= n_prompt or (each.position >= n_prompt and len(each.tokens) <= exact_rows)
        assert max(len(each.tokens) for each in again if each.position) == exact_rows
        assert all(client.tokens == expected_continuation(client.prompt, 60) for client in [*clients, plain])
        await harness.clean()


async def test_no_chunk_of_a_reproducible_model_has_more_rows_than_are_exact(autojump_clock):
    """Neither of prompts, nor of what was lost, nor with drafts."""
    async with asking(FakeEngine(max_rows=48, repeats=5)) as harness:
        clients = [harness.ask([10 + i] * (1 + 90 * i), 60, speculate=True) for i in range(3)]
        await trio.sleep(0.15)
        kill(harness)
        await harness.ended(*clients)
        rows = [len(each.tokens) for step in harness.engine.steps for call in step.calls for each in call]
        assert max(rows) == 48
        assert all(client.reason == "length" for client in clients)
        await harness.clean()


@pytest.mark.parametrize("after_s", [0.0501, 0.0601, 0.0701, 0.0801])
async def test_a_step_that_ran_ahead_of_a_failed_step_is_ignored(autojump_clock, after_s):
    """The daemon submits it before it knows of the failure."""
    async with asking() as harness:
        clients = [harness.ask([10 + i], 40) for i in range(3)]
        await trio.sleep(after_s)
        assert harness.scheduler.telemetry.run_ahead_steps_total > 0
        harness.engine.fail_next = EngineError("no room")
        await harness.ended(*clients)
        assert all(client.tokens == expected_continuation(client.prompt, 40) for client in clients)
        assert harness.engine.resets == 1
        await harness.clean()


async def test_the_log_says_after_how_long_the_engine_runs_again(autojump_clock):
    with structlog.testing.capture_logs() as logged:
        async with asking() as harness:
            client = harness.ask([1], 40)
            await trio.sleep(0.1)
            harness.engine.fail_restarts = 1
            kill(harness)
            began = trio.current_time()
            await harness.ended(client)
            took_s = trio.current_time() - began
    [line] = [each for each in logged if each["event"] == "the engine runs again"]
    assert (line["log_level"], line["restarts"]) == ("info", 2)
    assert 1.0 <= line["after_s"] <= took_s, "two starts of half a second, and the wait between them"


async def test_many_crashes_lose_nothing(autojump_clock):
    async with asking(FakeEngine(n_seq_max=8)) as harness:
        clients = [harness.ask([20 + i], 150) for i in range(12)]

        async def kill_now_and_then() -> None:
            for n in itertools.count():
                await trio.sleep(0.61 + 0.017 * (n % 7))
                kill(harness)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_now_and_then)
            await harness.ended(*clients)
            nursery.cancel_scope.cancel()
        assert harness.scheduler._engine.restarts > 3
        assert all(client.tokens == expected_continuation(client.prompt, 150) for client in clients)
        await harness.clean()


@pytest.mark.parametrize("n_others", [0, 1, 6])
async def test_a_request_that_kills_the_engine_fails_alone(autojump_clock, n_others):
    engine = FakeEngine(n_seq_max=8)
    engine.poison = POISON
    async with asking(engine) as harness:
        others = [harness.ask([30 + i] * 5, 30) for i in range(n_others)]
        await trio.sleep(0.03)
        poisoned = harness.ask([1, POISON, 2], 5)
        later = harness.ask([99], 5)
        await harness.ended(poisoned, later, *others)
        assert poisoned.reason == "E_RUNTIME_DECODE"
        assert "twice" in poisoned.last.message
        assert all(client.tokens == expected_continuation(client.prompt, 30) for client in others)
        assert later.tokens == expected_continuation([99], 5)
        await harness.clean()


async def test_two_that_kill_the_engine_both_fail(autojump_clock):
    engine = FakeEngine(n_seq_max=8)
    engine.poison = POISON
    async with asking(engine) as harness:
        good = [harness.ask([40 + i], 30) for i in range(5)]
        bad = [harness.ask([POISON, i], 5) for i in range(1, 3)]
        await harness.ended(*good, *bad)
        assert [client.reason for client in bad] == ["E_RUNTIME_DECODE"] * 2
        assert all(client.tokens == expected_continuation(client.prompt, 30) for client in good)
        await harness.clean()


async def test_suspects_whose_client_does_not_read_block_no_other(autojump_clock):
    async with asking() as harness:
        first, second = harness.ask([1], 30), harness.ask([2], 30)
        await trio.sleep(0.05)
        first.has_room = second.has_room = False
        kill(harness)
        await trio.sleep(0.6)
        third = harness.ask([3], 10)
        await harness.ended(third)
        harness.read_on(first)
        harness.read_on(second)
        await harness.ended(first, second)
        assert first.tokens == expected_continuation([1], 30)
        assert second.tokens == expected_continuation([2], 30)
        await harness.clean()


async def test_an_idle_engine_that_dies_is_started_again_at_once(autojump_clock):
    async with asking() as harness:
        await harness.answer([1], 5)
        kill(harness)
        await trio.sleep(1)
        assert harness.scheduler._engine.restarts == 1
        assert (await harness.answer([2], 5)).tokens == expected_continuation([2], 5)
        await harness.clean()


async def test_requests_that_come_during_the_restart_are_served(autojump_clock):
    async with asking() as harness:
        kill(harness)
        await trio.sleep(0.1)
        client = harness.ask([2], 5)
        await harness.ended(client)
        assert client.tokens == expected_continuation([2], 5)
        await harness.clean()


async def test_cancelled_during_the_restart(autojump_clock):
    async with asking() as harness:
        first, second = harness.ask([1], 30), harness.ask([2], 30)
        await trio.sleep(0.05)
        kill(harness)
        await trio.sleep(0.2)
        harness.scheduler.cancel(first.answer)
        assert first.reason == "cancelled"
        await harness.ended(second)
        assert second.tokens == expected_continuation([2], 30)
        await harness.clean()


async def test_requests_fail_while_the_engine_cannot_be_started_and_are_served_later(autojump_clock):
    """One request is in the fatal step, the client of one does not read, one waits, and one comes later."""
    engine = FakeEngine(n_seq_max=2)
    async with asking(engine) as harness:
        stuck = harness.ask([3], 30)
        await trio.sleep(0.05)
        stuck.has_room = False
        running, waiting = harness.ask([1], 30), harness.ask([2], 10)
        await trio.sleep(0.05)
        engine.fail_restarts = 6
        kill(harness)
        await harness.ended(stuck, running, waiting)
        assert [client.reason for client in (stuck, running, waiting)] == ["E_MODEL_UNAVAILABLE"] * 3
        with pytest.raises(errors.ModelUnavailable, match="no memory") as caught:
            harness.ask([4])
        assert caught.value.retry_after_ms > 0
        await trio.sleep(120)
        assert (await harness.answer([5], 5)).tokens == expected_continuation([5], 5), "it came up in the end"
        await harness.clean()


async def test_an_end_token_in_the_step_before_a_crash_still_ends(autojump_clock):
    engine = FakeEngine(eog_after=12)
    async with asking(engine) as harness:
        client = harness.ask([1] * 5, 50)
        await trio.sleep(0.05)
        kill(harness)
        await harness.ended(client)
        assert client.last.reason == "stop"
        assert [*client.answer.tokens][-1] == EOG
        assert client.tokens == expected_continuation([1] * 5, 7)
        await harness.clean()


async def test_a_crash_during_a_copy_of_a_state_loses_no_session(autojump_clock):
    """While a state is saved, and while one is loaded.  The tokens are computed again."""
    files = MemoryFiles()
    engine = FakeEngine(n_ctx=1024, n_seq_max=2, unified=False)
    async with asking(engine, files, offload_after_s=0.0) as harness:
        first = await harness.answer([7] * 200, 5, session_id="s")
        kill(harness)
        await trio.sleep(5)
        again = await harness.answer([7] * 200 + first.tokens + [8], 5, session_id="s")
        assert again.tokens == expected_continuation([7] * 200 + first.tokens + [8], 5)
        await trio.sleep(5)
        assert files.states
        for n in range(3):
            client = harness.ask([50 + n] * 300, 3)
            await trio.sleep(0.01)
            kill(harness)
            await harness.ended(client)
        assert files.open_files == 0
        await harness.clean()
