"""The tick, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualThread, expected_continuation
from tests.support.serving import piece, settings
from uma_trio import errors
from uma_trio.engine.records import EngineError
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Eos, Failure, Generate, Token
from uma_trio.runner import Job, Runner


@attrs.define
class Collector:
    """A sink that keeps everything; ``open`` says whether it has room."""

    events: list[Any] = attrs.field(factory=list)
    open: bool = True

    def send(self, event: Any) -> None:
        self.events.append(event)

    @property
    def has_room(self) -> bool:
        return self.open

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token) and not event.echo]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def last(self) -> Any:
        return self.events[-1]


@attrs.frozen
class House:
    runner: Runner
    engine: FakeEngine

    def ask(self, prompt: list[int], sink: Collector, n: int = 8, **fields: Any) -> Job:
        request = Generate(id=fields.pop("id", "r"), prompt="", max_tokens=n, **fields)
        return self.runner.submit(request, Prompt(np.asarray(prompt, dtype=np.int32), "the prompt"), sink)

    async def clean(self) -> None:
        with trio.fail_after(1000):
            await self.runner.wait_idle()
        self.runner.check_integrity()
        assert self.engine.used_cells() == self.runner.cache.held()
        assert self.runner.cache.statistics().cells_reserved == 0


def most_together(house: House) -> int:
    """Sequences of one call, at most."""
    return max(len(batch) for step in house.engine.steps for batch in step.batches)


@contextlib.asynccontextmanager
async def running(engine: FakeEngine | None = None, **values: Any):
    engine = engine or FakeEngine()
    runner = Runner(engine, VirtualThread(engine), piece, settings(**values))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        yield House(runner, engine)
        nursery.cancel_scope.cancel()


async def test_a_stream_is_what_the_model_says_after_its_prompt(autojump_clock):
    async with running() as house:
        sink = Collector()
        job = house.ask([5, 6, 7], sink, n=10)
        await job.done.wait()
        assert sink.tokens == expected_continuation([5, 6, 7], 10)
        assert isinstance(sink.last, Eos)
        assert sink.last.reason == "length"
        assert sink.last.usage.prompt_tokens == 3
        assert sink.last.usage.completion_tokens == 10
        await house.clean()


async def test_streams_together_are_what_they_are_alone(autojump_clock):
    prompts = [[10 + i] * (1 + 40 * i) for i in range(8)]
    async with running() as house:
        sinks = [Collector() for _ in prompts]
        jobs = [house.ask(prompt, sink, n=30) for prompt, sink in zip(prompts, sinks, strict=True)]
        for job in jobs:
            await job.done.wait()
        for prompt, sink in zip(prompts, sinks, strict=True):
            assert sink.tokens == expected_continuation(prompt, 30)
        assert most_together(house) == 8
        await house.clean()


async def test_more_requests_than_sequences_wait_their_turn(autojump_clock):
    async with running(FakeEngine(n_seq_max=2)) as house:
        sinks = [Collector() for _ in range(7)]
        jobs = [house.ask([i + 1], sink, n=5) for i, sink in enumerate(sinks)]
        for job in jobs:
            await job.done.wait()
        assert [job.ended_at for job in jobs] == sorted(job.ended_at for job in jobs)
        assert all(sink.tokens == expected_continuation([i + 1], 5) for i, sink in enumerate(sinks))
        assert most_together(house) == 2
        await house.clean()


async def test_room_is_reserved_for_the_whole_answer(autojump_clock):
    async with running(FakeEngine(n_ctx=100, n_seq_max=4), max_queue=10) as house:
        sinks = [Collector() for _ in range(5)]
        jobs = [house.ask([1] * 20, sink, n=30) for sink in sinks]  # two fit at a time
        for job in jobs:
            await job.done.wait()
        assert all(sink.last.reason == "length" for sink in sinks)
        assert most_together(house) == 2
        await house.clean()


async def test_a_full_queue_refuses(autojump_clock):
    async with running(FakeEngine(n_seq_max=1), max_queue=2) as house:
        jobs = [house.ask([1], Collector(), n=5) for _ in range(3)]
        with pytest.raises(errors.QueueFull):
            house.ask([1], Collector(), n=5)
        for job in jobs:
            await job.done.wait()
        await house.clean()


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.2, 0.5, 1.0])
async def test_cancelled_at_any_moment_everything_is_given_back(autojump_clock, after_s):
    async with running() as house:
        sink, other = Collector(), Collector()
        job = house.ask([1] * 2000, sink, n=1000)
        neighbour = house.ask([2], other, n=100)
        await trio.sleep(after_s)
        house.runner.cancel(job)
        assert sink.last.reason == "cancelled"
        sent = len(sink.events)
        await neighbour.done.wait()
        assert len(sink.events) == sent, "something was sent after the last event"
        assert sink.tokens == expected_continuation([1] * 2000, 1000)[: len(sink.tokens)]
        assert other.tokens == expected_continuation([2], 100)
        await house.clean()


async def test_from_cancel_to_freed_is_at_most_one_step(autojump_clock):
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 100)
    async with running(engine) as house:
        job = house.ask([1] * 2000, Collector(), n=50)
        await trio.sleep(0.05)  # in the middle of a step
        house.runner.cancel(job)
        began = trio.current_time()
        await house.runner.wait_idle()
        assert trio.current_time() - began <= 0.1
        await house.clean()


async def test_cancelled_while_it_waits(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as house:
        first, second = house.ask([1], Collector(), n=5), house.ask([2], sink := Collector(), n=5)
        house.runner.cancel(second)
        assert sink.last.reason == "cancelled"
        await first.done.wait()
        assert all(feed.seq_id == 0 for step in house.engine.steps for batch in step.batches for feed in batch)
        await house.clean()


async def test_who_does_not_read_slows_only_itself(autojump_clock):
    async with running() as house:
        stuck, quick = Collector(), Collector()
        slow_job, quick_job = house.ask([1], stuck, n=20), house.ask([2], quick, n=200)
        await trio.sleep(0.05)
        stuck.open = False
        had = len(stuck.tokens)
        await quick_job.done.wait()
        assert quick.tokens == expected_continuation([2], 200)
        assert len(stuck.tokens) <= had + 2  # one was under way, and one made ready behind it
        stuck.open = True
        house.runner.wake()
        await slow_job.done.wait()
        assert stuck.tokens == expected_continuation([1], 20)
        p99 = house.runner.telemetry.inter_token_ms.percentiles(99)[0]
        assert p99 < 20, "the pause of a slow client counts as the server's"
        await house.clean()


async def test_the_end_of_generation_token_ends(autojump_clock):
    async with running(FakeEngine(eog_after=10)) as house:
        job = house.ask([1, 2, 3], sink := Collector(), n=50)
        await job.done.wait()
        assert sink.last.reason == "stop"
        assert sink.tokens == expected_continuation([1, 2, 3], 7)
        assert sink.last.usage.completion_tokens == 8
        await house.clean()


async def test_ignore_eos_generates_all(autojump_clock):
    async with running(FakeEngine(eog_after=10)) as house:
        job = house.ask([1, 2, 3], sink := Collector(), n=50, ignore_eos=True)
        await job.done.wait()
        assert sink.last.reason == "length"
        assert len(sink.tokens) == 50
        await house.clean()


async def test_a_stop_string_ends_and_is_not_shown(autojump_clock):
    expected = expected_continuation([1], 20)
    stop = f"{expected[5]} {expected[6]}"
    async with running() as house:
        job = house.ask([1], sink := Collector(), n=20, stop=[stop])
        await job.done.wait()
        assert sink.text == "".join(f"{token} " for token in expected[:5])
        assert sink.last.reason == "stop"
        assert sink.last.stop == stop
        await house.clean()


async def test_not_streamed_is_the_streamed_text(autojump_clock):
    async with running() as house:
        await house.ask([1], streamed := Collector(), n=20, echo=True).done.wait()
        await house.ask([1], whole := Collector(), n=20, echo=True, stream=False).done.wait()
        assert [type(event) for event in whole.events] == [Eos]
        assert whole.last.text == streamed.text
        assert streamed.text.startswith("the prompt")


async def test_a_failed_step_ends_its_requests_and_no_others(autojump_clock):
    async with running(FakeEngine(n_seq_max=2)) as house:
        stuck = Collector()
        paused = house.ask([3], stuck, n=30)
        await trio.sleep(0.05)
        stuck.open = False
        await trio.sleep(0.05)
        failing = house.ask([1], failed := Collector(), n=30)
        waiting = house.ask([2], waited := Collector(), n=10)
        house.engine.fail_next = EngineError("the device has gone", fatal=True)
        await failing.done.wait()
        assert isinstance(failed.last, Failure)
        assert failed.last.code == "E_RUNTIME_DECODE"
        await waiting.done.wait()
        assert waited.tokens == expected_continuation([2], 10)
        stuck.open = True
        house.runner.wake()
        await paused.done.wait()
        assert stuck.tokens == expected_continuation([3], 30), "its KV was lost and must be computed again"
        assert house.engine.resets == 1
        await house.clean()


async def test_where_the_model_cannot_go_on_everybody_is_told(autojump_clock):
    """Those in the step that it failed in; one whose client does not read; one that waits; and one that comes now."""
    engine = FakeEngine(n_seq_max=2)
    stuck, failed, waited = sinks = Collector(), Collector(), Collector()
    with pytest.raises(ExceptionGroup) as caught:
        async with running(engine) as house:
            house.ask([3], stuck, n=30)
            await trio.sleep(0.05)
            stuck.open = False
            await trio.sleep(0.05)
            engine.fail_next, engine.fail_reset = EngineError("gone", fatal=True), EngineError("no memory", fatal=True)
            house.ask([1], failed, n=30)
            house.ask([2], waited, n=10)
            await trio.sleep_forever()
    assert caught.value.subgroup(lambda error: error is engine.fail_reset)
    assert [type(sink.last) for sink in sinks] == [Failure] * 3
    assert [sink.last.code for sink in sinks] == ["E_MODEL_UNAVAILABLE", "E_RUNTIME_DECODE", "E_MODEL_UNAVAILABLE"]
    assert not house.runner.jobs()
    with pytest.raises(errors.ModelUnavailable):
        house.ask([4], Collector())


async def test_a_failure_that_is_not_fatal_keeps_the_context(autojump_clock):
    async with running() as house:
        job = house.ask([1], failed := Collector(), n=30)
        house.engine.fail_next = EngineError("no room", fatal=False)
        await job.done.wait()
        assert failed.last.code == "E_RUNTIME_DECODE"
        await house.ask([1], fine := Collector(), n=5).done.wait()
        assert fine.tokens == expected_continuation([1], 5)
        assert house.engine.resets == 0
        await house.clean()


async def test_a_prompt_of_the_whole_window_and_one_token_more(autojump_clock):
    async with running(FakeEngine(n_ctx=64)) as house:
        await house.ask([1] * 64, sink := Collector(), n=1).done.wait()
        assert sink.tokens == expected_continuation([1] * 64, 1)
        with pytest.raises(errors.ContextTooSmall, match="64"):
            house.ask([1] * 65, Collector(), n=1)
        with pytest.raises(errors.ContextTooSmall, match="at most 1"):
            house.ask([1] * 64, Collector(), n=2)
        await house.clean()


async def test_closed_it_takes_no_more_and_finishes_the_rest(autojump_clock):
    async with running() as house:
        job = house.ask([1], sink := Collector(), n=5)
        house.runner.close()
        with pytest.raises(errors.ShuttingDown):
            house.ask([1], Collector())
        await job.done.wait()
        assert sink.last.reason == "length"
        await house.clean()


# -- steps that begin by themselves ---------------------------------------------------------------------


async def test_streams_that_go_on_need_no_plan_in_between(autojump_clock):
    async with running() as house:
        sinks = [Collector(), Collector()]
        jobs = [house.ask([n + 1], sink, n=60) for n, sink in enumerate(sinks)]
        for job in jobs:
            await job.done.wait()
        assert [sink.tokens for sink in sinks] == [expected_continuation([n + 1], 60) for n in range(2)]
        assert house.runner.telemetry.run_ahead_steps_total > 50
        assert len(house.engine.steps) <= 62
        await house.clean()


@pytest.mark.parametrize("after_s", [0.05, 0.052, 0.0549, 0.055, 0.0551, 0.056])
async def test_who_comes_in_the_middle_is_in_the_next_step(autojump_clock, after_s):
    """The step that was made ready does not begin."""
    async with running(FakeEngine(cost_ms=lambda prompt, decodes: 5)) as house:
        house.ask([1], on := Collector(), n=100)
        await trio.sleep(after_s)
        assert house.runner.telemetry.run_ahead_steps_total > 5
        begun = len(house.engine.steps)
        job = house.ask([2, 3], sink := Collector(), n=5)
        await job.done.wait()
        fed = [{feed.seq_id for batch in step.batches for feed in batch} for step in house.engine.steps[begun:]]
        assert any(job.seq_id in sequences for sequences in fed[:2])
        assert job.first_token_at - job.arrived_at <= 0.0101
        assert sink.tokens == expected_continuation([2, 3], 5)
        await trio.sleep(1)
        assert on.tokens == expected_continuation([1], 100)
        await house.clean()


@pytest.mark.parametrize("after_s", [0.05, 0.052, 0.0549, 0.055, 0.0551, 0.056])
async def test_who_is_cancelled_in_the_middle_is_not_in_the_next_step(autojump_clock, after_s):
    async with running(FakeEngine(cost_ms=lambda prompt, decodes: 5)) as house:
        job, other = house.ask([1], Collector(), n=100), house.ask([2], on := Collector(), n=100)
        await trio.sleep(after_s)
        begun = len(house.engine.steps)
        house.runner.cancel(job)
        await other.done.wait()
        fed = [{feed.seq_id for batch in step.batches for feed in batch} for step in house.engine.steps[begun:]]
        assert not any(job.seq_id in sequences for sequences in fed)
        assert on.tokens == expected_continuation([2], 100)
        await house.clean()


async def test_a_token_that_ends_a_stream_is_followed_by_nothing_of_it(autojump_clock):
    async with running(FakeEngine(eog_after=30)) as house:
        job, other = house.ask([1] * 5, ended := Collector(), n=100), house.ask([2], on := Collector(), n=25)
        await job.done.wait()
        assert ended.tokens == expected_continuation([1] * 5, 25)
        assert (
            sum(feed.seq_id == job.seq_id for step in house.engine.steps for batch in step.batches for feed in batch)
            == 26
        )
        await other.done.wait()
        assert on.tokens == expected_continuation([2], 25)
        await house.clean()


async def test_a_step_that_fails_ends_what_was_made_ready_behind_it(autojump_clock):
    async with running() as house:
        job = house.ask([1], failed := Collector(), n=50)
        await trio.sleep(0.06)
        assert house.runner.telemetry.run_ahead_steps_total > 3
        house.engine.fail_next = EngineError("no room", fatal=False)
        await job.done.wait()
        assert failed.last.code == "E_RUNTIME_DECODE"
        await house.ask([2], fine := Collector(), n=20).done.wait()
        assert fine.tokens == expected_continuation([2], 20)
        await house.clean()
