"""The tick, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine, expected_continuation
from tests.support.profile import sampled
from tests.support.serving import settings, token_to_bytes
from uma_trio import errors
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.in_flight import MAX_DELAY_MS
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos, Token
from uma_trio.protocol.requests import Generate

ANYBODY = Principal("uid:0")


@attrs.define
class Collector:
    """A sink that keeps all events; ``open`` is whether it has room."""

    events: list[Any] = attrs.field(factory=list)
    open: bool = True

    def send(self, *events: Any) -> None:
        self.events += events

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
class Harness:
    scheduler: Scheduler
    engine: FakeEngine

    def ask(self, prompt: list[int], sink: Collector, n: int = 8, **fields: Any) -> Answer:
        request = Generate(id=fields.pop("id", "r"), prompt="", max_tokens=n, **fields)
        tokens = Prompt(np.asarray(prompt, dtype=np.int32), "the prompt")
        return self.scheduler.submit(PreparedRequest(request, tokens, sink, ANYBODY))[0]

    async def clean(self) -> None:
        with trio.fail_after(1000):
            await self.scheduler.wait_idle()
        self.scheduler.check_integrity()
        assert self.engine.used_cells() == self.scheduler.cache.held()
        assert self.scheduler.cache.statistics().cells_reserved == 0


def most_together(harness: Harness) -> int:
    """Answers of one call, at most."""
    return max(len(batch) for step in harness.engine.steps for batch in step.calls)


@contextlib.asynccontextmanager
async def running(engine: FakeEngine | None = None, **values: Any):
    engine = engine or FakeEngine()
    scheduler = Scheduler(VirtualEngine(engine), token_to_bytes, settings(**values))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        yield Harness(scheduler, engine)
        nursery.cancel_scope.cancel()


async def test_a_stream_continues_its_prompt(autojump_clock):
    async with running() as harness:
        sink = Collector()
        answer = harness.ask([5, 6, 7], sink, n=10)
        await answer.done.wait()
        assert sink.tokens == expected_continuation([5, 6, 7], 10)
        assert isinstance(sink.last, Eos)
        assert sink.last.reason == "length"
        assert sink.last.usage.prompt_tokens == 3
        assert sink.last.usage.completion_tokens == 10
        await harness.clean()


async def test_streams_do_not_affect_each_other(autojump_clock):
    prompts = [[10 + i] * (1 + 40 * i) for i in range(8)]
    async with running() as harness:
        sinks = [Collector() for _ in prompts]
        answers = [harness.ask(prompt, sink, n=30) for prompt, sink in zip(prompts, sinks, strict=True)]
        for answer in answers:
            await answer.done.wait()
        for prompt, sink in zip(prompts, sinks, strict=True):
            assert sink.tokens == expected_continuation(prompt, 30)
        assert most_together(harness) == 8
        await harness.clean()


async def test_more_requests_than_sequences_wait_their_turn(autojump_clock):
    async with running(FakeEngine(n_seq_max=2)) as harness:
        sinks = [Collector() for _ in range(7)]
        answers = [harness.ask([i + 1], sink, n=5) for i, sink in enumerate(sinks)]
        for answer in answers:
            await answer.done.wait()
        assert [answer.times.ended_at for answer in answers] == sorted(answer.times.ended_at for answer in answers)
        assert all(sink.tokens == expected_continuation([i + 1], 5) for i, sink in enumerate(sinks))
        assert most_together(harness) == 2
        await harness.clean()


async def test_cells_are_reserved_for_the_whole_answer(autojump_clock):
    async with running(FakeEngine(n_ctx=100, n_seq_max=4), max_queue=10) as harness:
        sinks = [Collector() for _ in range(5)]
        answers = [harness.ask([1] * 20, sink, n=30) for sink in sinks]  # two fit at a time
        for answer in answers:
            await answer.done.wait()
        assert all(sink.last.reason == "length" for sink in sinks)
        assert most_together(harness) == 2
        await harness.clean()


async def test_a_full_queue_refuses(autojump_clock):
    async with running(FakeEngine(n_seq_max=1), max_queue=2) as harness:
        answers = [harness.ask([1], Collector(), n=5) for _ in range(3)]
        with pytest.raises(errors.QueueFull):
            harness.ask([1], Collector(), n=5)
        for answer in answers:
            await answer.done.wait()
        await harness.clean()


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.2, 0.5, 1.0])
async def test_a_request_cancelled_at_any_moment_frees_everything(autojump_clock, after_s):
    async with running() as harness:
        sink, other = Collector(), Collector()
        answer = harness.ask([1] * 2000, sink, n=1000)
        neighbour = harness.ask([2], other, n=100)
        await trio.sleep(after_s)
        harness.scheduler.cancel(answer)
        assert sink.last.reason == "cancelled"
        sent = len(sink.events)
        await neighbour.done.wait()
        assert len(sink.events) == sent, "something was sent after the last event"
        assert sink.tokens == expected_continuation([1] * 2000, 1000)[: len(sink.tokens)]
        assert other.tokens == expected_continuation([2], 100)
        await harness.clean()


async def test_a_cancelled_sequence_is_freed_within_one_step(autojump_clock):
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 100)
    async with running(engine) as harness:
        answer = harness.ask([1] * 2000, Collector(), n=50)
        await trio.sleep(0.05)  # in the middle of a step
        harness.scheduler.cancel(answer)
        began = trio.current_time()
        await harness.scheduler.wait_idle()
        assert trio.current_time() - began <= 0.1
        assert 0 < harness.scheduler.snapshot()["cancel_to_free_max_ms"] <= 100
        await harness.clean()


async def test_a_waiting_request_is_cancelled(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as harness:
        first, second = harness.ask([1], Collector(), n=5), harness.ask([2], sink := Collector(), n=5)
        harness.scheduler.cancel(second)
        assert sink.last.reason == "cancelled"
        await first.done.wait()
        assert all(feed.seq_id == 0 for step in harness.engine.steps for batch in step.calls for feed in batch)
        await harness.clean()


async def test_a_client_that_does_not_read_slows_no_other(autojump_clock):
    async with running() as harness:
        stuck, quick = Collector(), Collector()
        stuck_answer, quick_answer = harness.ask([1], stuck, n=20), harness.ask([2], quick, n=200)
        await trio.sleep(0.05)
        stuck.open = False
        had = len(stuck.tokens)
        await quick_answer.done.wait()
        assert quick.tokens == expected_continuation([2], 200)
        assert len(stuck.tokens) <= had + 2  # one was under way, and one made ready behind it
        stuck.open = True
        harness.scheduler.wake()
        await stuck_answer.done.wait()
        assert stuck.tokens == expected_continuation([1], 20)
        p99 = harness.scheduler.telemetry.inter_token_ms.percentiles(99)[0]
        assert p99 < 20, "the pause of a slow client counts as the server's"
        await harness.clean()


@pytest.mark.parametrize("options", [{}, {"unified": False, "n_ctx": 4000}, {"can_truncate": False}], ids=str)
async def test_a_client_that_does_not_read_loses_its_place_to_one_that_waits(autojump_clock, options):
    """It goes on with the same text when it reads, and there is a place."""
    async with running(FakeEngine(n_seq_max=2, **options)) as harness:
        stuck = [Collector() for _ in range(2)]
        held = [harness.ask([1 + i], sink, n=60, seed=i, id=f"stuck {i}") for i, sink in enumerate(stuck)]
        await trio.sleep(0.05)
        for sink in stuck:
            sink.open = False
        began = trio.current_time()
        clients = [Collector() for _ in range(3)]
        waiting = [harness.ask([7 + i], sink, n=20, id=f"waits {i}") for i, sink in enumerate(clients)]
        for answer in waiting:
            await answer.done.wait()
        assert trio.current_time() - began < 1.5
        for i, sink in enumerate(clients):
            assert sink.tokens == expected_continuation([7 + i], 20)
        assert all(health.ok for health in harness.scheduler.health())
        assert harness.scheduler.telemetry.snapshot()["preemptions_total"] == 2
        for sink in stuck:
            sink.open = True
        harness.scheduler.wake()
        for i, answer in enumerate(held):
            await answer.done.wait()
            assert stuck[i].tokens == expected_continuation([1 + i], 60)
            assert stuck[i].last.usage.cached_tokens == 0
        await harness.clean()


async def test_a_client_that_does_not_read_keeps_its_place_while_nobody_waits(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as harness:
        answer = harness.ask([1], sink := Collector(), n=60)
        await trio.sleep(0.05)
        sink.open = False
        await trio.sleep(60)
        n_steps = len(harness.engine.steps)
        sink.open = True
        harness.scheduler.wake()
        await answer.done.wait()
        later = [each for step in harness.engine.steps[n_steps:] for call in step.calls for each in call]
        assert all(len(each.tokens) == 1 for each in later), "nothing is computed again"
        await harness.clean()


async def test_one_who_lost_its_place_can_be_cancelled(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as harness:
        held = harness.ask([1], stuck := Collector(), n=60)
        await trio.sleep(0.05)
        stuck.open = False
        second = harness.ask([2], sink := Collector(), n=60)
        await second.done.wait()
        assert sink.tokens == expected_continuation([2], 60)
        harness.scheduler.cancel(held)
        assert stuck.last.reason == "cancelled"
        await harness.clean()


async def test_an_end_token_ends_the_answer(autojump_clock):
    async with running(FakeEngine(eog_after=10)) as harness:
        answer = harness.ask([1, 2, 3], sink := Collector(), n=50)
        await answer.done.wait()
        assert sink.last.reason == "stop"
        assert sink.tokens == expected_continuation([1, 2, 3], 7)
        assert sink.last.usage.completion_tokens == 8
        await harness.clean()


async def test_ignore_eos_generates_all(autojump_clock):
    async with running(FakeEngine(eog_after=10)) as harness:
        answer = harness.ask([1, 2, 3], sink := Collector(), n=50, ignore_eos=True)
        await answer.done.wait()
        assert sink.last.reason == "length"
        assert len(sink.tokens) == 50
        await harness.clean()


async def test_a_stop_string_ends_the_answer_and_is_not_sent(autojump_clock):
    expected = expected_continuation([1], 20)
    stop = f"{expected[5]} {expected[6]}"
    async with running() as harness:
        answer = harness.ask([1], sink := Collector(), n=20, stop=[stop])
        await answer.done.wait()
        assert sink.text == "".join(f"{token} " for token in expected[:5])
        assert sink.last.reason == "stop"
        assert sink.last.stop == stop
        await harness.clean()


async def test_without_streaming_the_text_is_the_same(autojump_clock):
    async with running() as harness:
        await harness.ask([1], streamed := Collector(), n=20, echo=True).done.wait()
        await harness.ask([1], whole := Collector(), n=20, echo=True, stream=False).done.wait()
        assert [type(event) for event in whole.events] == [Eos]
        assert whole.last.text == streamed.text
        assert streamed.text.startswith("the prompt")


async def test_a_prompt_that_fills_the_context_and_one_token_more(autojump_clock):
    async with running(FakeEngine(n_ctx=64)) as harness:
        await harness.ask([1] * 64, sink := Collector(), n=1).done.wait()
        assert sink.tokens == expected_continuation([1] * 64, 1)
        with pytest.raises(errors.ContextTooSmall, match="64"):
            harness.ask([1] * 65, Collector(), n=1)
        with pytest.raises(errors.ContextTooSmall, match="at most 1"):
            harness.ask([1] * 64, Collector(), n=2)
        await harness.clean()


async def test_a_closed_scheduler_completes_its_requests_and_accepts_no_more(autojump_clock):
    async with running() as harness:
        answer = harness.ask([1], sink := Collector(), n=5)
        harness.scheduler.close()
        with pytest.raises(errors.ShuttingDown):
            harness.ask([1], Collector())
        await answer.done.wait()
        assert sink.last.reason == "length"
        await harness.clean()


# -- steps that begin by themselves ---------------------------------------------------------------------


async def test_streams_that_go_on_run_ahead(autojump_clock):
    async with running() as harness:
        sinks = [Collector(), Collector()]
        answers = [harness.ask([n + 1], sink, n=60) for n, sink in enumerate(sinks)]
        for answer in answers:
            await answer.done.wait()
        assert [sink.tokens for sink in sinks] == [expected_continuation([n + 1], 60) for n in range(2)]
        assert harness.scheduler.telemetry.run_ahead_steps_total > 50
        assert len(harness.engine.steps) <= 62
        await harness.clean()


@pytest.mark.parametrize(("options", "urgent"), [({}, {0, 19}), ({"stop": ["never"]}, set(range(20)))])
async def test_the_engine_gets_its_next_step_before_clients_get_tokens_that_are_not_urgent(
    autojump_clock, options, urgent
):
    async with running() as harness:
        link, in_flight = harness.scheduler._engine.link, []
        submitted, submit = [], link.submit
        link.submit = lambda step: (submitted.append(step.number), submit(step))

        class Client(Collector):
            def send(self, *events):
                if isinstance(events[0], Token):  # its step is the n-th
                    in_flight.append(len(submitted) - len(in_flight) - 1)
                super().send(*events)

        answer = harness.ask([1], Client(), n=20, **options)
        await answer.done.wait()
        ahead = [n for n, each in enumerate(in_flight[:-2]) if each == 2]
        assert ahead == [n for n in range(18) if n not in urgent]
        assert all(each <= 2 for each in in_flight)
        await harness.clean()


async def test_prefill_runs_ahead_and_so_do_streams_that_begin_and_end(autojump_clock):
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 1 + 0.01 * prompt + 0.1 * decodes)
    async with running(engine, multi_step_ms=0.0) as harness:
        prompts = [[n] * (100 + 50 * n) for n in range(1, 30)]
        sinks = [Collector() for _ in prompts]
        answers = []
        for n, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
            answers.append(harness.ask(prompt, sink, n=10 + n))
            await trio.sleep(0.004)
        for answer in answers:
            await answer.done.wait()
        expected = [expected_continuation(prompt, 10 + n) for n, prompt in enumerate(prompts)]
        assert [sink.tokens for sink in sinks] == expected
        steps = [step for step in harness.engine.steps if step.calls]
        with_prefill = [step for step in steps if any(len(each.tokens) > 1 for call in step.calls for each in call)]
        assert len(with_prefill) > 25
        assert harness.scheduler.telemetry.run_ahead_steps_total > 0.8 * len(steps)
        await harness.clean()


async def test_prefill_next_to_streams_runs_ahead(autojump_clock):
    """The device waits for no plan, with the costs of a GPU: a staircase, and a target of 18 ms."""

    def cost_ms(prompt: int, decodes: int) -> float:
        return 6 + 5 * math.ceil((prompt + decodes) / 64) if prompt else 6 + 0.2 * decodes

    async with running(FakeEngine(n_ctx=20_000, cost_ms=cost_ms), target_itl_ms=18.0) as harness:
        streams, prompts = [Collector() for _ in range(4)], [Collector() for _ in range(3)]
        answers = [harness.ask([n + 1], stream, n=400) for n, stream in enumerate(streams)]
        await trio.sleep(0.1)
        for n, prompt in enumerate(prompts):
            answers.append(harness.ask([n + 10] * 3000, prompt, n=20))
            await trio.sleep(0.2)
        for answer in answers:
            await answer.done.wait()
        assert [stream.tokens for stream in streams] == [expected_continuation([n + 1], 400) for n in range(4)]
        expected = [expected_continuation([n + 10] * 3000, 20) for n in range(3)]
        assert [prompt.tokens for prompt in prompts] == expected
        telemetry = harness.scheduler.telemetry
        assert telemetry.mixed_ticks_total > 60
        assert telemetry.mixed_run_ahead_steps_total >= telemetry.mixed_ticks_total - 5, (
            "but for those after an arrival"
        )
        await harness.clean()


@pytest.mark.parametrize("after_s", sampled([0.2, 0.21, 0.219, 0.22, 0.225, 0.23], 3))
@pytest.mark.parametrize("which", ["stream", "prompt"])
async def test_a_cancel_during_prefill_next_to_streams_revokes_what_runs_ahead(autojump_clock, after_s, which):
    engine = FakeEngine(n_ctx=20_000, cost_ms=lambda prompt, decodes: 5 + 0.2 * prompt + decodes)
    async with running(engine, target_itl_ms=40.0) as harness:
        stream, on = harness.ask([1], Collector(), n=300), Collector()
        other = harness.ask([2], on, n=200)
        await trio.sleep(0.05)
        prompt = harness.ask([7] * 4000, first := Collector(), n=10)
        await trio.sleep(after_s)
        cancelled, left = (stream, prompt) if which == "stream" else (prompt, stream)
        assert cancelled.allocation is not None
        seq_id, begun = cancelled.allocation.seq_id, len(harness.engine.steps)
        harness.scheduler.cancel(cancelled)
        await other.done.wait()
        computed = [{each.seq_id for call in step.calls for each in call} for step in harness.engine.steps[begun:]]
        assert not any(seq_id in seq_ids for seq_ids in computed)
        await left.done.wait()
        assert on.tokens == expected_continuation([2], 200)
        if which == "stream":
            assert first.tokens == expected_continuation([7] * 4000, 10)
        await harness.clean()


@pytest.mark.parametrize("after_s", sampled([0.5, 0.52, 0.549, 0.55, 0.551, 0.56], 3))
@pytest.mark.parametrize("step_ms", [50, 5, 2])
async def test_a_request_that_comes_during_a_step_waits_for_no_long_one(autojump_clock, after_s, step_ms):
    """A long step that runs ahead is revoked, so the request is in the next one.  A short one is let run."""
    async with running(FakeEngine(cost_ms=lambda prompt, decodes: step_ms)) as harness:
        harness.ask([1], on := Collector(), n=400)
        await trio.sleep(after_s)
        assert harness.scheduler.telemetry.run_ahead_steps_total > 5
        begun = len(harness.engine.steps)
        answer = harness.ask([2, 3], sink := Collector(), n=5)
        await answer.done.wait()
        computed = [{each.seq_id for call in step.calls for each in call} for step in harness.engine.steps[begun:]]
        n_waited = next(n for n, seq_ids in enumerate(computed) if 1 in seq_ids)
        assert n_waited <= (2 if step_ms < MAX_DELAY_MS else 1)
        assert (
            answer.times.first_token_at - answer.times.arrived_at
            <= 1e-3 * (2 * step_ms + min(step_ms, MAX_DELAY_MS)) + 1e-4
        )
        assert sink.tokens == expected_continuation([2, 3], 5)
        await trio.sleep(30)
        assert on.tokens == expected_continuation([1], 400)
        await harness.clean()


@pytest.mark.parametrize("after_s", [0.05, 0.052, 0.0549, 0.055, 0.0551, 0.056])
async def test_a_request_cancelled_during_a_step_is_not_in_the_next_one(autojump_clock, after_s):
    async with running(FakeEngine(cost_ms=lambda prompt, decodes: 5)) as harness:
        answer, other = harness.ask([1], Collector(), n=100), harness.ask([2], on := Collector(), n=100)
        await trio.sleep(after_s)
        begun = len(harness.engine.steps)
        harness.scheduler.cancel(answer)
        await other.done.wait()
        computed = [{each.seq_id for call in step.calls for each in call} for step in harness.engine.steps[begun:]]
        assert not any(0 in seq_ids for seq_ids in computed)
        assert on.tokens == expected_continuation([2], 100)
        await harness.clean()


async def test_nothing_of_a_stream_is_computed_behind_its_end_token(autojump_clock):
    async with running(FakeEngine(eog_after=30)) as harness:
        answer, other = harness.ask([1] * 5, ended := Collector(), n=100), harness.ask([2], on := Collector(), n=25)
        await answer.done.wait()
        assert ended.tokens == expected_continuation([1] * 5, 25)
        computed = [each.seq_id for step in harness.engine.steps for call in step.calls for each in call]
        assert computed.count(0) == 26, "the prompt, and every token but the one that ends it"
        await other.done.wait()
        assert on.tokens == expected_continuation([2], 25)
        await harness.clean()


# -- several tokens of a stream in one tick ----------------------------------------------------------------


def quick(**options: Any) -> FakeEngine:
    """An engine that takes half a millisecond for a step, so that a tick decodes six times."""
    return FakeEngine(cost_ms=lambda prompt, decodes: 0.5, **options)


async def test_quick_streams_get_several_tokens_in_a_tick(autojump_clock):
    ticks = {}
    for longest_ms in (0.0, 3.0):
        async with running(quick(), multi_step_ms=longest_ms) as harness:
            sinks = [Collector() for _ in range(3)]
            answers = [harness.ask([n + 1], sink, n=100 + n) for n, sink in enumerate(sinks)]
            for answer in answers:
                await answer.done.wait()
            assert [sink.tokens for sink in sinks] == [expected_continuation([n + 1], 100 + n) for n in range(3)]
            await harness.clean()
            telemetry = harness.scheduler.telemetry
            ticks[longest_ms] = telemetry.ticks_total
            assert telemetry.totals["tokens"] == 303
            assert telemetry.totals["decode_calls"] == len([step for step in harness.engine.steps if step.calls])
    assert ticks[0.0] >= 100
    assert ticks[3.0] < 40


@pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5, 6])
async def test_an_answer_may_end_anywhere_in_a_tick(autojump_clock, n_prompt):
    prompt = [9] * n_prompt
    said = expected_continuation(prompt, 40)
    stop = f"{said[30]} {said[31]}"
    async with running(quick(eog_after=60)) as harness:
        sinks = [Collector() for _ in range(4)]
        answers = [
            harness.ask(prompt, sinks[0], n=25),
            harness.ask(prompt, sinks[1], n=200, stop=[stop]),
            harness.ask(prompt, sinks[2], n=200),
            harness.ask(prompt, sinks[3], n=200, stop_token_ids=[said[20]]),
        ]
        for answer in answers:
            await answer.done.wait()
        assert sinks[0].tokens == said[:25]
        assert sinks[1].text == "".join(f"{token} " for token in said[:30])
        assert sinks[2].tokens == expected_continuation(prompt, 60 - n_prompt)
        assert sinks[3].tokens == said[: said.index(said[20])]
        assert [sink.last.reason for sink in sinks] == ["length", "stop", "stop", "stop"]
        assert harness.scheduler.telemetry.ticks_total < 40
        await harness.clean()


@pytest.mark.parametrize("after_s", sampled([0.02 + 0.0003 * n for n in range(20)], 4))
async def test_a_request_or_a_cancel_waits_for_two_such_ticks_at_most(autojump_clock, after_s):
    async with running(quick(), multi_step_ms=3.0) as harness:
        cancelled, other = harness.ask([1], gone := Collector(), n=1000), harness.ask([2], on := Collector(), n=1000)
        await trio.sleep(after_s)
        harness.scheduler.cancel(cancelled)
        assert gone.last.reason == "cancelled"
        answer = harness.ask([3, 4], sink := Collector(), n=5)
        await answer.done.wait()
        assert answer.times.first_token_at - answer.times.arrived_at <= 2 * 3e-3 + 0.5e-3 + 1e-4
        await other.done.wait()
        assert (sink.tokens, on.tokens) == (expected_continuation([3, 4], 5), expected_continuation([2], 1000))
        await harness.clean()
