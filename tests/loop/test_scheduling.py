"""Latency targets, priorities, fairness and the queue, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine, expected_continuation
from tests.support.profile import amount
from tests.support.serving import settings, token_to_bytes
from uma_trio import errors
from uma_trio.daemon.policy.prefill import LATE_PREFILL_SHARE
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.principal import Principal
from uma_trio.processes.energy import EnergyMeter
from uma_trio.protocol.events import Token
from uma_trio.protocol.requests import Generate, Slo

INTERACTIVE, BACKGROUND = Slo(priority="interactive"), Slo(priority="background")


@attrs.define
class Client:
    """A sink that keeps the tokens and the times at which they came."""

    token_s: list[float] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    has_room: bool = True
    then: Callable[[], None] = lambda: None
    """Called with the last event."""

    def send(self, *events: Any) -> None:
        for event in events:
            if isinstance(event, Token):
                self.token_s.append(trio.current_time())
                self.tokens.append(event.token_id or 0)
            else:
                self.then()

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (after - before) for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


@attrs.define
class Harness:
    scheduler: Scheduler
    engine: FakeEngine
    n: int = 0

    def ask(
        self,
        prompt: int,
        n: int,
        client: Client | None = None,
        *,
        principal: str = "uid:0",
        slo: Slo | None = None,
        stream: bool = True,
        deadline_at: float = math.inf,
        **fields: Any,
    ) -> Answer:
        """Submit a request with ``prompt`` prompt tokens for ``n`` tokens."""
        self.n += 1
        request = Generate(id=str(self.n), prompt="", max_tokens=n, slo=slo or Slo(), stream=stream, **fields)
        tokens = np.arange(prompt, dtype=np.int32) % 900 + 1
        [answer] = self.scheduler.submit(
            PreparedRequest(
                request, Prompt(tokens, ""), client or Client(), Principal(principal), deadline_at=deadline_at
            )
        )
        return answer


@contextlib.asynccontextmanager
async def running(engine: FakeEngine | None = None, *, meter: EnergyMeter | None = None, **values: Any):
    engine = engine or FakeEngine(n_ctx=100_000)
    # the prompts have a common prefix, and each one has to be computed
    chosen = settings(**{"prefix_reuse": False, **values})
    scheduler = Scheduler(VirtualEngine(engine), token_to_bytes, chosen, meter=meter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        yield Harness(scheduler, engine)
        scheduler.check_integrity()
        nursery.cancel_scope.cancel()


# -- targets ----------------------------------------------------------------------------------------


async def test_targets_come_from_the_request_or_from_its_priority(autojump_clock):
    async with running(target_itl_ms=70.0, background_itl_ms=900.0) as harness:
        own = [None, INTERACTIVE, BACKGROUND, Slo(target_itl_ms=5.0, priority="background")]
        assert [harness.ask(1, 1, slo=slo).target_itl_ms for slo in own] == [70.0, 70.0, 900.0, 5.0]


async def test_an_answer_that_is_not_streamed_is_in_no_hurry(autojump_clock):
    async with running(target_itl_ms=70.0, background_itl_ms=900.0) as harness:
        own = [None, INTERACTIVE, Slo(target_itl_ms=5.0)]
        assert [harness.ask(1, 1, slo=slo, stream=False).target_itl_ms for slo in own] == [900.0, 900.0, 5.0]


@pytest.mark.parametrize(
    ("slo", "target_ms"), [(None, 200.0), (Slo(target_itl_ms=20.0), 20.0), (Slo(target_itl_ms=300.0), 300.0)]
)
async def test_a_stream_is_on_time_during_the_prefill_of_others(autojump_clock, slo, target_ms):
    """The device computes 1,500 prompt tokens in 155 ms, nearly as fast as 4,000.  The cost model starts with its defaults."""
    engine = FakeEngine(n_ctx=100_000, n_batch=4096, cost_ms=lambda prompt, decodes: 5 + 0.1 * prompt + 0.5 * decodes)
    async with running(engine) as harness:
        stream = Client()
        answer = harness.ask(1, 120, stream, slo=slo)
        await trio.sleep(0.1)
        for _ in range(6):
            harness.ask(30_000 // 6, 1)
        await answer.done.wait()
        assert max(stream.gaps_ms) <= 1.1 * target_ms
        assert max(stream.gaps_ms) > min(0.8 * target_ms, 120), (
            "prefill did not use the time until the next token was due, as far as it pays"
        )


async def test_prefill_goes_on_where_decoding_alone_misses_every_target(autojump_clock):
    engine = FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 10 + prompt + 200 * decodes)
    async with running(engine, min_chunk_tokens=16) as harness:
        stream = Client()
        harness.ask(1, 4000, stream)
        await trio.sleep(1)
        await harness.ask(800, 1).done.wait()  # now the costs are known
        n_before = len(stream.token_s)
        with trio.fail_after(60):
            await harness.ask(800, 1).done.wait()
        gaps_ms = stream.gaps_ms[n_before:]
        assert len(gaps_ms) <= 1 + 800 // 90, (
            "every tick has a part of the prompt, in half of the time that decoding takes"
        )
        assert max(gaps_ms) <= 1.02 * (1 + LATE_PREFILL_SHARE) * (10 + 200)


async def test_without_streams_a_prefill_chunk_is_limited_by_prefill_tick_ms(autojump_clock):
    """The prefill of 4,000 tokens takes 40 s.  A request in the middle gets its token within about two ticks."""
    engine = FakeEngine(n_ctx=100_000, n_batch=4096, cost_ms=lambda prompt, decodes: 5 + 10 * prompt + decodes)
    async with running(engine, prefill_tick_ms=200.0, min_chunk_tokens=4) as harness:
        harness.ask(4000, 1)
        await trio.sleep(10)
        began = trio.current_time()
        await harness.ask(4, 1, client := Client(), slo=INTERACTIVE).done.wait()
        assert client.token_s[0] - began < 0.6


async def test_one_slow_step_does_not_slow_the_following_ones(autojump_clock):
    slow_once = iter([10_000.0])
    is_slow = False

    def cost_ms(prompt: int, decodes: int) -> float:
        return next(slow_once, 0.0) * is_slow + 5 + 0.5 * prompt + decodes

    async with running(FakeEngine(n_ctx=100_000, n_seq_max=4, cost_ms=cost_ms)) as harness:
        stream = Client()
        harness.ask(1, 2000, stream)
        harness.ask(60_000, 1)

        async def prefilled_in_five_seconds() -> int:
            before = harness.scheduler.telemetry.prompt_tokens_total
            await trio.sleep(5)
            return harness.scheduler.telemetry.prompt_tokens_total - before

        await trio.sleep(5)
        rate = await prefilled_in_five_seconds()
        is_slow, slow_once = True, iter([10_000.0])
        await trio.sleep(12)
        assert max(stream.gaps_ms) > 9_000
        assert await prefilled_in_five_seconds() > 0.9 * rate


async def test_the_prediction_error_is_a_metric(autojump_clock):
    engine = FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 5 + 0.1 * prompt + decodes + (prompt // 16) % 3)
    async with running(engine) as harness:
        assert harness.scheduler.snapshot()["tick_prediction_error"] == 0
        harness.ask(1, 500)
        await harness.ask(90_000, 1).done.wait()
        assert 0 < harness.scheduler.snapshot()["tick_prediction_error"] < 0.05


# -- priorities ----------------------------------------------------------------------------------------


async def test_an_interactive_prompt_is_prefilled_first(autojump_clock):
    async with running() as harness:
        long = harness.ask(20_000, 1, slo=BACKGROUND)
        await trio.sleep(0.5)
        began = trio.current_time()
        short = harness.ask(2000, 1, slo=INTERACTIVE)
        await short.done.wait()
        assert short.times.first_token_at - began < 0.5
        assert long.times.first_token_at is None
        await long.done.wait()


async def test_a_background_prompt_is_prefilled_although_others_keep_coming(autojump_clock):
    async with running() as harness:
        over = False

        def again() -> None:
            if not over:
                harness.ask(400, 1, Client(then=again), slo=INTERACTIVE)

        for _ in range(4):
            again()
        with trio.fail_after(100):
            await harness.ask(500, 1, slo=BACKGROUND).done.wait()
        over = True
        harness.scheduler.close()


async def test_text_does_not_depend_on_other_requests(autojump_clock):
    async with running(FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 5 + prompt + 60 * decodes)) as harness:
        sizes = [1, 300, 40, 700, 5, 90]
        clients = [Client() for _ in sizes]
        answers = [
            harness.ask(size, 25, client, principal=f"uid:{i % 2}", slo=[INTERACTIVE, None, BACKGROUND][i % 3])
            for i, (size, client) in enumerate(zip(sizes, clients, strict=True))
        ]
        for answer in answers:
            await answer.done.wait()
        for size, client in zip(sizes, clients, strict=True):
            assert client.tokens == expected_continuation([i % 900 + 1 for i in range(size)], 25)


# -- the queue ----------------------------------------------------------------------------------------


async def test_the_queue_is_ordered_by_principal_then_priority_then_arrival(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as harness:
        ended: list[str] = []

        def ask(name: str, **options: Any) -> None:
            harness.ask(30, 3, Client(then=lambda: ended.append(name)), **options)

        ask("first", principal="uid:1")
        await trio.sleep(0.001)
        ask("background", principal="uid:2", slo=BACKGROUND)
        ask("principal 1, a", principal="uid:1")
        ask("principal 1, b", principal="uid:1")
        ask("principal 2", principal="uid:2")
        ask("interactive", principal="uid:1", slo=INTERACTIVE)
        while len(ended) < 6:
            await trio.sleep(0.1)
        assert ended == ["first", "principal 2", "interactive", "principal 1, a", "principal 1, b", "background"]


async def test_a_request_rises_in_priority_while_it_waits(autojump_clock):
    """Interactive requests of 10 s each keep coming, and a background request still gets its turn."""
    engine = FakeEngine(n_seq_max=1, cost_ms=lambda prompt, decodes: 1000)
    async with running(engine, max_queue=100) as harness:
        harness.ask(5, 10, slo=INTERACTIVE)
        await trio.sleep(0.001)
        background = harness.ask(5, 10, slo=BACKGROUND)
        overtook = 0
        while background.times.admitted_at is None:
            harness.ask(5, 10, slo=INTERACTIVE)
            overtook += 1
            await trio.sleep(10)
        assert 60 <= background.times.admitted_at - background.times.arrived_at <= 90
        assert overtook >= 5


async def test_smaller_requests_do_not_overtake_the_first_in_the_queue(autojump_clock):
    async with running(FakeEngine(n_ctx=1000, n_seq_max=8)) as harness:
        harness.ask(300, 200)
        large = harness.ask(800, 100)
        small = [harness.ask(10, 5) for _ in range(3)]
        await large.done.wait()
        assert all(answer.times.admitted_at >= large.times.admitted_at for answer in small)
        for answer in small:
            await answer.done.wait()


async def test_principals_get_equal_service_whatever_their_requests(autojump_clock):
    """One principal has forty short requests at any time, the other one three long requests."""
    service: Counter[str] = Counter()
    async with running(FakeEngine(n_ctx=100_000, n_seq_max=6), max_queue=1000) as harness:

        def again(principal: str, prompt: int, n: int) -> None:
            def done() -> None:
                service[principal] += prompt + 2 * n
                if trio.current_time() < ends:
                    again(principal, prompt, n)

            harness.ask(prompt, n, Client(then=done), principal=principal)

        ends = trio.current_time() + amount(quick=10, thorough=30)
        for _ in range(40):
            again("uid:1", 60, 10)
        for _ in range(3):
            again("uid:2", 1500, 100)
        await trio.sleep_until(ends)
        assert min(service.values()) > amount(quick=2_000, thorough=2_500)
        assert 0.9 < service["uid:1"] / service["uid:2"] < 1.1
        harness.scheduler.close()


async def test_a_refusal_has_an_estimate_of_the_wait(autojump_clock):
    async with running(FakeEngine(n_seq_max=2), max_queue=2) as harness:
        answers = [harness.ask(100, 20) for _ in range(4)]
        await answers[0].done.wait()
        duration_ms = 1e3 * (answers[0].times.ended_at - answers[0].times.admitted_at)
        await trio.sleep(0.01)
        while len(list(harness.scheduler.answers())) < 4:
            harness.ask(100, 20)
        with pytest.raises(errors.QueueFull) as later:
            harness.ask(100, 20)
        assert later.value.retry_after_ms == pytest.approx(2 * duration_ms, rel=0.5)
