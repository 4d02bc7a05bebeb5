"""What the next step contains, without an engine and without a tick: answers are moved by hand."""

from __future__ import annotations

from itertools import chain
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine
from tests.support.serving import token_to_bytes
from uma_trio.config import Config
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.policy.bisection import CrashBisection
from uma_trio.daemon.policy.cost import CostModel, LinearModel
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.controllers.driver import ControllerDriver
from uma_trio.daemon.serving.embedding import EmbeddingQueue, PendingEmbeddings
from uma_trio.daemon.serving.in_flight import InFlightSteps
from uma_trio.daemon.serving.offload import Offloader
from uma_trio.daemon.serving.planning import NoStep, StepPlanner
from uma_trio.daemon.serving.principals import Principals
from uma_trio.daemon.serving.prompt_lookup import PromptLookup
from uma_trio.daemon.serving.request import PreparedRequest, make_answers
from uma_trio.daemon.serving.running import RunningSet, cache_for
from uma_trio.daemon.serving.speculation import MAX_DECODES_WITH_DRAFTS, Speculator
from uma_trio.daemon.serving.step import InFlightStep, PlannedStep, build_step, complete_step
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.messages import StepInput, StepOutput
from uma_trio.grammar.compiler import Grammar
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Embed, Generate, Slo
from uma_trio.telemetry.metrics import Telemetry

CONFIG = Config()
SOMEONE = Principal("uid:0")
MS_PER_TOKEN = 0.1


class Sink:
    """A client that reads everything."""

    has_room = True

    def send(self, *events: Any) -> None:
        pass


class Planning:
    """A planner and all that it looks at."""

    def __init__(self, **engine: Any) -> None:
        self.info = FakeEngine(**engine).info
        model = LinearModel((1.0, MS_PER_TOKEN, MS_PER_TOKEN, 0.0, 0.0))
        self.timings = StepTimings(CostModel(model, model), self.info.n_batch)
        self.cache: KvCache = cache_for(self.info, self.timings, reuse=True)
        offloader = Offloader(self.cache, self.timings, lambda: None, after_s=1.0)
        telemetry = Telemetry()
        self.running = RunningSet(self.cache, offloader, telemetry)
        self.principals = Principals(lambda: chain(self.running, self.waiting), lambda: self.embeddings)
        self.waiting = WaitingQueue(self.running, self.principals, max_length=100)
        self.embeddings = EmbeddingQueue(self.info, 100, lambda principal: None)
        self.bisection = CrashBisection()
        self.planner = StepPlanner(
            info=self.info,
            settings=CONFIG.scheduling,
            timings=self.timings,
            running=self.running,
            waiting=self.waiting,
            embeddings=self.embeddings,
            controllers=ControllerDriver(None, None, InFlightSteps(None), self.running, self.waiting, None),
            principals=self.principals,
            bisection=self.bisection,
            speculator=Speculator(self.info, CONFIG.scheduling, self.timings, self.bisection),
        )
        self.n_steps = 0

    def ask(self, n_prompt: int, max_tokens: int = 50, principal: Principal = SOMEONE) -> Answer:
        """A request has come."""
        first = 1 + 1000 * self.n_steps + sum(len(each.prompt.tokens) for each in self.running)  # nothing is shared
        prompt = Prompt(np.arange(first, first + n_prompt, dtype=np.int32) % 900, "")
        request = Generate(id="1", prompt="", max_tokens=max_tokens)
        [answer] = make_answers(PreparedRequest(request, prompt, Sink(), principal), self.info, CONFIG)
        self.principals.arrived(principal)
        self.waiting.enter([answer])
        return answer

    def embed(self, n_tokens: int, principal: Principal = SOMEONE) -> PendingEmbeddings:
        pending = PendingEmbeddings(Embed(id="1", input=[]), [np.ones(n_tokens, np.int32)], Sink(), principal)
        self.embeddings.add(pending)
        return pending

    def step_ahead(self, step: InFlightStep) -> PlannedStep | NoStep:
        if (obstacle := self.planner.obstacle(step)) is not None:
            return obstacle
        self.waiting.admit(may_preempt=False)
        return self.planner.step_ahead(step)

    def next_step(self) -> PlannedStep:
        self.waiting.admit(may_preempt=True)
        planned = self.planner.next_step()
        assert isinstance(planned, PlannedStep), planned
        return planned

    def submitted(self, planned: PlannedStep, behind: InFlightStep | None = None) -> InFlightStep:
        self.n_steps += 1
        step, _ = build_step(planned, self.n_steps, in_flight=behind)
        return step

    def complete(self, step: InFlightStep) -> None:
        """The engine has sampled token 7 wherever it had to."""
        n = sum(row.n_samples for row in step.rows.values())
        output = StepOutput(tokens=(7,) * n, scores=(None,) * n)
        now, can_truncate = trio.current_time(), self.info.can_truncate
        complete_step(step, output, self.cache, now, can_truncate=can_truncate, token_to_bytes=token_to_bytes)

    def streams(self, n: int) -> list[Answer]:
        """``n`` answers that decode; the last step was predicted well."""
        answers = [self.ask(5) for _ in range(n)]
        while any(answer.state is not State.DECODE for answer in answers):
            self.complete(self.submitted(self.next_step()))
        self.planner.last_was_outlier = False
        return answers


@pytest.fixture
def planning(autojump_clock: object) -> type[Planning]:
    """The clock is virtual and stands still."""
    return Planning


async def test_without_work_there_is_no_step(planning):
    assert planning().planner.next_step() is NoStep.NOTHING_READY


async def test_a_prompt_is_prefilled_by_a_step_and_by_one_that_runs_ahead(planning):
    found = planning(n_batch=64)
    answer = found.ask(100)
    planned = found.next_step()
    assert [(planned.answers[chunk.seq_id], chunk.n_tokens) for chunk in planned.plan.chunks] == [(answer, 64)]
    step = found.submitted(planned)

    assert found.step_ahead(step) is NoStep.OUTLIER, "nothing is known of durations"
    found.planner.last_was_outlier = False
    ahead = found.step_ahead(step)
    assert [(chunk.n_tokens, chunk.is_last) for chunk in ahead.plan.chunks] == [(36, True)]
    assert ahead.policy_before == planned.plan.state


async def test_streams_go_on_in_a_step_that_runs_ahead(planning):
    found = planning()
    streams = found.streams(3)
    step = found.submitted(found.next_step())
    assert [*step.rows] == streams
    ahead = found.step_ahead(step)
    assert [ahead.answers[view.seq_id] for view in ahead.plan.decodes] == streams
    n_passes = step.planned.plan.n_passes
    assert [view.n_context for view in ahead.plan.decodes] == [5 + n_passes] * 3, "what the step in flight computes"
    [call] = build_step(ahead, 99, in_flight=step)[1].calls
    assert not any(isinstance(each, StepInput) for each in call), "their tokens are not known yet"


def cost_of(call_ms: float) -> CostModel:
    return CostModel(LinearModel((call_ms, 0.0, 0.0, 0.0, 0.0)))


@pytest.mark.parametrize(("call_ms", "n_passes"), [(0.5, 6), (0.9, 3), (1.5, 2), (1.6, 1), (5.0, 1)])
async def test_a_quick_step_has_several_passes(planning, call_ms, n_passes):
    found = planning()
    found.streams(3)
    found.timings.cost = cost_of(call_ms)
    step = found.submitted(found.next_step())
    assert step.planned.plan.n_passes == n_passes
    assert step.planned.plan.predicted_ms == pytest.approx(n_passes * call_ms)
    assert {row.n_samples for row in step.rows.values()} == {n_passes}
    assert found.step_ahead(step).plan.n_passes == n_passes


async def test_no_stream_gets_more_tokens_than_it_may_have_or_later_than_it_should(planning):
    found = planning()
    streams = found.streams(3)
    found.timings.cost = cost_of(0.5)
    streams[1].bounds.token_limit = len(streams[1].tokens) + 4
    step = found.submitted(found.next_step())
    assert step.planned.plan.n_passes == 4
    ahead = found.step_ahead(step)
    assert [ahead.answers[view.seq_id] for view in ahead.plan.decodes] == [streams[0], streams[2]]
    found.planner.undo(ahead)
    streams[1].bounds.token_limit += 2
    assert found.step_ahead(step).plan.n_passes == 2
    found.complete(step)
    streams[2].due_at = trio.current_time() + 0.0016
    assert found.next_step().plan.n_passes == 2, "one is left, and 1.6 ms have room for three"


async def test_where_something_may_come_between_two_tokens_there_is_one_pass(planning):
    def two_streams(**engine: Any) -> tuple[Planning, Answer]:
        found = planning(**engine)
        first, *_ = found.streams(2)
        found.timings.cost = cost_of(0.5)
        return found, first

    found, _ = two_streams(can_truncate=False)
    assert found.next_step().plan.n_passes == 1, "what is behind a stop string could not be removed"
    found, first = two_streams()
    first.sampling = attrs.evolve(first.sampling, grammar=Grammar("a key", ""))
    assert found.next_step().plan.n_passes == 1
    found, first = two_streams()
    first.bounds.steering = object()
    assert found.next_step().plan.n_passes == 1, "its client changes it"
    found, first = two_streams()
    first.speculation.forced = (5,)
    assert found.next_step().plan.n_passes == 1
    found, first = two_streams()
    found.ask(2000)
    found.timings.cost = CostModel(LinearModel((0.5, 60.0, 0.0, 0.0, 0.0)))
    assert found.next_step().plan.n_passes == 1, "a prompt waits"


async def test_a_stream_that_has_ended_leaves_the_others_in_one_call(planning):
    found = planning(n_seq_max=4, unified=False, fills_gaps=True)
    found.timings.cost = CostModel(LinearModel((5.0, 0.0, 0.1, 0.1, 0.0)))
    streams = [found.ask(n) for n in (5, 40, 5, 5)]
    while any(stream.state is not State.DECODE for stream in streams):
        found.complete(found.submitted(found.next_step()))
    streams[1].state = State.FINISHED
    found.running.release(streams[1], keep=True)
    planned = found.next_step()
    assert [view.seq_id for view in planned.plan.decodes] == [0, 2, 3]
    assert planned.plan.call_widths == (3,)
    assert planned.plan.work.decode_rows == 4, "one row is not a stream's"
    held = [view.n_context for view in planned.plan.decodes]
    assert planned.plan.work.context_tokens == sum(held) + 40, "what the ended one has left"
    ahead = found.step_ahead(found.submitted(planned))
    assert ahead.plan.call_widths == (3,)


async def test_where_attention_scans_the_whole_cache_its_cells_count(planning):
    """Those of streams and of ended ones, and what the step in flight adds."""
    found = planning(attention_scan=AttentionScan.CACHE)
    streams = [found.ask(n) for n in (5, 40, 5)]
    while any(stream.state is not State.DECODE for stream in streams):
        found.complete(found.submitted(found.next_step()))
    streams[1].state = State.FINISHED
    found.running.release(streams[1], keep=True)
    [idle] = found.cache.idle
    planned = found.next_step()
    held = [view.n_context for view in planned.plan.decodes]
    cells = sum(held) + idle.n_tokens
    assert planned.plan.work.context_tokens == 2 * cells
    found.ask(30)
    step = found.submitted(planned)
    found.planner.last_was_outlier = False
    ahead = found.step_ahead(step)
    n_new = step.planned.plan.n_rows
    assert n_new == 2 * step.planned.plan.n_passes
    assert ahead.plan.work.context_tokens == 2 * (cells + n_new)
    assert ahead.plan.work.mean_prefill_context == cells + n_new


async def test_a_prompt_goes_on_next_to_streams_in_a_step_that_runs_ahead(planning):
    found = planning(n_batch=64)
    streams = found.streams(2)
    prompt = found.ask(150)
    step = found.submitted(found.next_step())
    found.planner.last_was_outlier = False
    ends = []
    while prompt.state is State.PREFILL and step.rows[prompt].end < 150:
        assert [*step.rows] == [*streams, prompt]
        ends.append(step.rows[prompt].end)
        ahead = found.step_ahead(step)
        assert [ahead.answers[view.seq_id] for view in ahead.plan.decodes] == streams
        [chunk] = ahead.plan.chunks
        behind, message = build_step(ahead, 100 + len(ends), in_flight=step)
        [*continued, prefill] = [each for call in message.calls for each in call]
        assert not any(isinstance(each, StepInput) for each in continued), "their tokens are not known yet"
        assert prefill.position == ends[-1], "behind what is being computed"
        assert prefill.tokens == prompt.prompt.tokens[ends[-1] : ends[-1] + chunk.n_tokens].tolist()
        assert message.follows == step.number
        found.complete(step)
        step = behind
    assert len(ends) >= 2
    ahead = found.step_ahead(step)
    assert not ahead.plan.chunks
    assert {ahead.answers[view.seq_id] for view in ahead.plan.decodes} == {*streams, prompt}, (
        "its first token is sampled"
    )


async def test_a_step_with_streams_and_a_prompt_that_was_not_begun_is_planned_again(planning):
    found = planning(n_batch=64)
    found.streams(2)
    found.ask(150)
    step = found.submitted(found.next_step())
    found.planner.last_was_outlier = False
    ahead = found.step_ahead(step)
    found.planner.undo(ahead)
    found.complete(step)
    again = found.planner.next_step()
    assert (again.plan.chunks, again.plan.work) == (ahead.plan.chunks, ahead.plan.work)
    service, before = again.plan.state.service, ahead.plan.state.service
    assert service.counter("uid:0") == before.counter("uid:0")


async def test_nothing_is_left_to_do_after_the_last_token_in_flight(planning):
    found = planning()
    answer = found.ask(5, max_tokens=1)
    step = found.submitted(found.next_step())
    assert found.step_ahead(step) is NoStep.NOTHING_READY
    found.complete(step)
    assert len(answer.tokens) == 1


async def test_no_step_runs_ahead_of_one_that_was_revoked(planning):
    found = planning()
    found.streams(1)
    step = found.submitted(found.next_step())
    step.revoked = True
    assert found.step_ahead(step) is NoStep.NO_ANSWER


async def test_draft_tokens_continue_a_known_token(planning):
    found = planning()
    [stream] = found.streams(1)
    stream.speculation.lookup = PromptLookup([1, 2, 7, 8, 9] * 4 + [1, 2, 7], acceptance_rate=0.95)
    step = found.submitted(found.next_step())
    assert step.planned.plan.drafts
    assert found.step_ahead(step) is NoStep.DRAFTS, "how many are accepted is not known"

    stream.speculation.lookup = None
    plain = found.submitted(found.next_step())
    stream.speculation.lookup = PromptLookup([1, 2, 7, 8, 9] * 4 + [1, 2, 7], acceptance_rate=0.95)
    assert found.step_ahead(plain) is NoStep.DRAFTS, "the next step could have some"


@pytest.mark.parametrize(("n", "allowed"), [(MAX_DECODES_WITH_DRAFTS, True), (MAX_DECODES_WITH_DRAFTS + 1, False)])
async def test_wide_batches_have_no_draft_tokens(planning, n, allowed):
    found = planning(n_seq_max=16)
    for stream in found.streams(n):
        stream.speculation.lookup = PromptLookup([1, 2, 7, 8, 9] * 4 + [1, 2, 7], acceptance_rate=0.95)
    assert any(view.n_drafts for view in found.next_step().plan.decodes) == allowed


async def test_texts_to_embed_are_in_the_next_step_and_in_none_that_runs_ahead(planning):
    found = planning()
    found.streams(1)
    step = found.submitted(found.next_step())
    found.embed(40)
    assert found.step_ahead(step) is NoStep.UNKNOWN_DURATION
    found.complete(step)
    planned = found.next_step()
    assert planned.embedding is not None
    assert planned.plan.decodes
    service = found.principals.policy.service
    before = planned.policy_before.service.decoded(planned.plan.decodes)
    assert service.counter("uid:0") == before.counter("uid:0") + planned.embedding.n_tokens, "they are charged"


@pytest.mark.parametrize("target_ttft_ms", [None, 5.0, 60_000.0])
async def test_a_prompt_is_overdue_by_its_own_target_and_the_daemons(planning, target_ttft_ms):
    request = Generate(id="r", prompt="p", max_tokens=5, slo=Slo(target_ttft_ms=target_ttft_ms))
    world = planning()
    [answer] = make_answers(
        PreparedRequest(request, Prompt(np.ones(9, np.int32), ""), Sink(), SOMEONE), world.info, CONFIG
    )
    default_ms = CONFIG.scheduling.target_ttft_ms
    own_ms = default_ms if target_ttft_ms is None else target_ttft_ms
    now = trio.current_time()
    assert answer.due_at == pytest.approx(now + own_ms / 1e3), "for the order of prompts"
    overdue_at = answer.view().due_s + answer.view().grace_s
    assert overdue_at == pytest.approx(now + max(own_ms, default_ms) / 1e3)


async def test_after_a_crash_one_half_of_the_sequences_runs_and_nothing_ahead(planning):
    found = planning()
    streams = found.streams(4)
    step = found.submitted(found.next_step())
    found.bisection.crashed({answer: row.end for answer, row in step.rows.items()})
    found.embed(40)
    half = found.next_step()
    assert [half.answers[view.seq_id] for view in half.plan.decodes] == streams[:2]
    assert half.embedding is None, "a crash must be one's fault"
    [pending] = found.embeddings
    found.embeddings.end(pending, None)
    assert found.step_ahead(found.submitted(half)) is NoStep.SUSPECTS


async def test_what_cannot_be_truncated_must_be_known_before_a_prompt_begins(planning):
    found = planning(can_truncate=False)
    found.streams(1)
    step = found.submitted(found.next_step())
    assert isinstance(found.step_ahead(step), PlannedStep)
    found.complete(step)
    found.ask(30)
    assert found.step_ahead(step) is NoStep.CANNOT_TRUNCATE


async def test_a_step_that_was_not_begun_leaves_nothing_behind(planning):
    found = planning()
    found.streams(2)
    step = found.submitted(found.next_step())
    found.cache._pool.ops.append("an operation")
    before = found.principals.policy
    ahead = found.step_ahead(step)
    assert ahead.ops == ("an operation",)
    assert not found.cache.has_ops
    assert found.principals.policy.service.counter("uid:0") > before.service.counter("uid:0")
    found.planner.undo(ahead)
    assert found.cache.take_ops() == ("an operation",)
    assert found.principals.policy.service.counter("uid:0") == before.service.counter("uid:0")
    assert attrs.evolve(found.principals.policy, service=before.service) == before


def test_a_copy_between_sequences_has_to_be_clearly_faster_than_prefill() -> None:
    timings = Planning().timings
    prefill_ms = timings.prefill_ms(33) - timings.prefill_ms(1)
    assert timings.worth_copying(32, copy_ms=0.6 * prefill_ms)
    assert not timings.worth_copying(32, copy_ms=0.8 * prefill_ms), "all streams would wait for it"
