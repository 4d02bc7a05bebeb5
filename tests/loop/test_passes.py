"""Steps of several passes: on a quick device streams get several tokens in a step, and the same ones as always."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from tests.loop.test_scheduler import Collector, Harness, running
from tests.support.fake_engine import FakeEngine, expected_continuation
from uma_trio.engine.worker import _joined
from uma_trio.engine_link import messages
from uma_trio.engine_link.messages import DROPPED, EngineError, StepOutput
from uma_trio.protocol.requests import Slo
from uma_trio.telemetry.perf_records import Header, RequestRecord, TickRecord, decode, encode


def quick(**options: object) -> FakeEngine:
    """An engine that computes a step in less time than the daemon takes for it."""
    return FakeEngine(cost_ms=lambda prompt, decodes: 0.5 + 0.01 * prompt + 0.02 * decodes, **options)


def passes_of(harness: Harness) -> list[int]:
    """How many passes each step had that the engine computed."""
    numbers = [step.number for step in harness.engine.steps]
    return [numbers.count(number) for number in dict.fromkeys(numbers)]


async def test_streams_of_all_lengths_have_their_own_texts(autojump_clock):
    prompts = {n: [10 + n] * (1 + 9 * n) for n in range(8)}
    async with running(quick(n_ctx=8192)) as harness:
        sinks = {n: Collector() for n in prompts}
        answers = [harness.ask(prompt, sinks[n], n=90 + 7 * n) for n, prompt in prompts.items()]
        for answer in answers:
            await answer.done.wait()
        for n, prompt in prompts.items():
            assert sinks[n].tokens == expected_continuation(prompt, 90 + 7 * n)
            assert sinks[n].last.reason == "length"
        assert max(passes_of(harness)) > 2
        await harness.clean()


@pytest.mark.parametrize("unified", [True, False])
async def test_a_stream_that_ends_in_a_pass_leaves_the_others_alone(autojump_clock, unified):
    engine = quick(eog_after=150, unified=unified, n_ctx=8192)
    async with running(engine) as harness:
        sinks = [Collector() for _ in range(5)]
        answers = [harness.ask([n + 1] * (3 + 5 * n), sink, n=300) for n, sink in enumerate(sinks)]
        for answer in answers:
            await answer.done.wait()
        for n, sink in enumerate(sinks):
            assert sink.tokens[: 140 - 5 * n] == expected_continuation([n + 1] * (3 + 5 * n), 140 - 5 * n)
            assert sink.last.reason == "stop"
        assert max(passes_of(harness)) > 2
        await harness.clean()


async def test_a_new_request_ends_the_passes(autojump_clock):
    async with running(quick(n_ctx=8192)) as harness:
        first, second = Collector(), Collector()
        running_one = harness.ask([1, 2], first, n=400)
        while len(first.tokens) < 100:
            await trio.sleep(0.0003)
        numbers = {step.number for step in harness.engine.steps}
        other = harness.ask([3, 4], second, n=40)
        await other.done.wait()
        await running_one.done.wait()
        assert (first.tokens, second.tokens) == (expected_continuation([1, 2], 400), expected_continuation([3, 4], 40))
        begun_later = [step.number for step in harness.engine.steps if step.number not in numbers]
        assert begun_later.count(begun_later[0]) == 1, "the step that ran ahead"
        await harness.clean()


async def test_a_cancelled_stream_ends_and_others_go_on(autojump_clock):
    async with running(quick(n_ctx=8192)) as harness:
        sinks = [Collector(), Collector()]
        answers = [harness.ask([n + 1], sink, n=300) for n, sink in enumerate(sinks)]
        while len(sinks[0].tokens) < 50:
            await trio.sleep(0.0007)
        harness.scheduler.cancel(answers[0])
        assert sinks[0].last.reason == "cancelled"
        await answers[1].done.wait()
        assert sinks[1].tokens == expected_continuation([2], 300)
        await harness.clean()


@pytest.mark.parametrize(
    ("fields", "several"),
    [
        ({"frequency_penalty": 0.5}, True),
        ({"stop": ["no such text"]}, True),
        ({"logprobs": 2}, True),
        ({"slo": Slo(target_itl_ms=0.7)}, False),
        ({"slo": Slo(priority="background")}, False),
    ],
)
async def test_which_streams_have_several_passes(autojump_clock, fields, several):
    async with running(quick(n_ctx=8192)) as harness:
        sink = Collector()
        answer = harness.ask([1, 2, 3], sink, n=100, **fields)
        await answer.done.wait()
        assert len(sink.tokens) == 100
        assert (max(passes_of(harness)) > 1) is several
        await harness.clean()


async def test_a_failing_step_costs_no_token(autojump_clock):
    engine = quick(n_ctx=8192)
    async with running(engine) as harness:
        sink = Collector()
        answer = harness.ask([1, 2, 3], sink, n=200)
        while not any(n > 2 for n in passes_of(harness)):
            await trio.sleep(0.0005)
        engine.fail_next = EngineError("broken")
        await answer.done.wait()
        assert engine.resets == 1
        assert sink.tokens == expected_continuation([1, 2, 3], 200)
        await harness.clean()


class Kept:
    def __init__(self) -> None:
        self.records: list[TickRecord | RequestRecord] = []

    def write(self, record: TickRecord | RequestRecord) -> None:
        self.records.append(record)


async def test_the_metrics_count_all_passes(autojump_clock):
    async with running(quick(n_ctx=8192)) as harness:
        kept, sink = Kept(), Collector()
        harness.scheduler.sinks.append(kept)
        answer = harness.ask([1, 2, 3], sink, n=100)
        await answer.done.wait()
        ticks = [each for each in kept.records if isinstance(each, TickRecord)]
        assert sum(tick.tokens for tick in ticks) == 100
        snapshot = harness.scheduler.snapshot()
        assert snapshot["tokens_total"] == 100
        assert snapshot["ticks_total"] == len(ticks) < 60
        assert snapshot["decode_calls_total"] == sum(tick.n_passes for tick in ticks) == 100
        header = Header(
            uma_trio="0", llama_cpp=None, started="", clock_s=0.0, model="fake", n_ctx=8, n_seq_max=1, n_batch=8
        )
        [run] = decode(encode(header) + b"".join(map(encode, ticks)))
        assert [tick.tokens for tick in run.ticks] == [1] * 100, "readers see a tick for each pass"
        assert all(a.start_s < b.start_s for a, b in pairwise(run.ticks))
        total_ms = sum(tick.duration_ms for tick in ticks)
        assert sum(tick.duration_ms for tick in run.ticks) == pytest.approx(total_ms, abs=0.5)


def test_the_output_of_a_step_has_what_all_passes_computed():
    first = StepOutput((1, 2), 7, 1.0, 2.0, started_s=3.0, ended_s=9.0, copied_logits_rows=4, saved_bytes=5)
    second = StepOutput(
        (3, 4), 7, 10.0, 20.0, started_s=10.0, ended_s=40.0, copied_logits_rows=40, scores=("of 3", "of 4")
    )
    assert _joined([first, second], 3) == StepOutput(
        (1, 3, DROPPED, 2, 4, DROPPED),
        7,
        11.0,
        22.0,
        started_s=3.0,
        ended_s=40.0,
        copied_logits_rows=44,
        scores=(None, "of 3", None, None, "of 4", None),
        saved_bytes=5,
        n_passes=2,
    )
    assert _joined([first, first], 2).scores == ()


def test_each_field_of_an_output_says_how_it_is_joined():
    class Output(StepOutput, tag="other"):
        new_rows: int = 0

    with pytest.raises(TypeError, match="new_rows does not say"):
        messages.joins(Output)
