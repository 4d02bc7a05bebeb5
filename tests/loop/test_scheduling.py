"""The scheduler as clients meet it: classes, targets, tenants, the queue, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualEngine, expected_continuation
from tests.support.serving import settings, token_to_bytes
from uma_trio import errors
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Generate, Slo, Token
from uma_trio.serving.scheduler import Scheduler
from uma_trio.serving.sequence import Sequence as Answer

INTERACTIVE, BACKGROUND = Slo(priority="interactive"), Slo(priority="background")


@attrs.define
class Client:
    """Notes when its tokens came."""

    token_s: list[float] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    has_room: bool = True
    then: Callable[[], None] = lambda: None
    """Called at its end."""

    def send(self, event: Any) -> None:
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
        self, prompt: int, n: int, client: Client | None = None, *, principal: int = 0, slo: Slo | None = None
    ) -> Answer:
        """A prompt of so many tokens; ``n`` to be generated."""
        self.n += 1
        request = Generate(id=str(self.n), prompt="", max_tokens=n, slo=slo or Slo())
        tokens = np.arange(prompt, dtype=np.int32) % 900 + 1
        return self.scheduler.submit(request, Prompt(tokens, ""), client or Client(), principal=principal)


@contextlib.asynccontextmanager
async def running(engine: FakeEngine | None = None, **values: Any):
    engine = engine or FakeEngine(n_ctx=100_000)
    chosen = settings(prefix_reuse=False, **values)  # the prompts begin alike, and each is to be read
    scheduler = Scheduler(VirtualEngine(engine), token_to_bytes, chosen)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        yield Harness(scheduler, engine)
        scheduler.check_integrity()
        nursery.cancel_scope.cancel()


# -- targets ----------------------------------------------------------------------------------------


async def test_targets_are_the_requests_or_its_classs(autojump_clock):
    async with running(target_tbt_ms=70.0, background_tbt_ms=900.0) as harness:
        own = [None, INTERACTIVE, BACKGROUND, Slo(target_tbt_ms=5.0, priority="background")]
        assert [harness.ask(1, 1, slo=slo).target_itl_s for slo in own] == [0.07, 0.07, 0.9, 0.005]


@pytest.mark.parametrize(
    ("slo", "target_ms"), [(None, 100.0), (Slo(target_tbt_ms=20.0), 20.0), (Slo(target_tbt_ms=300.0), 300.0)]
)
async def test_a_stream_beside_long_prompts_is_on_time(autojump_clock, slo, target_ms):
    """On a device that could read 450 tokens in 50 ms, and from a cost model that is a mere guess."""
    engine = FakeEngine(n_ctx=100_000, n_batch=4096, cost_ms=lambda prompt, decodes: 5 + 0.1 * prompt + 0.5 * decodes)
    async with running(engine) as harness:
        stream = Client()
        sequence = harness.ask(1, 120, stream, slo=slo)
        await trio.sleep(0.1)
        for _ in range(6):
            harness.ask(30_000 // 6, 1)
        await sequence.done.wait()
        assert max(stream.gaps_ms) <= 1.1 * target_ms
        assert max(stream.gaps_ms) > min(0.8 * target_ms, 120), "the time up to the target was not used"


async def test_a_prompt_is_read_where_decoding_alone_is_slower_than_any_target(autojump_clock):
    engine = FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 10 + prompt + 200 * decodes)
    async with running(engine, min_chunk_tokens=16) as harness:
        stream, prompt = Client(), Client()
        harness.ask(1, 4000, stream)
        await trio.sleep(1)
        sequence = harness.ask(160, 1, prompt)
        with trio.fail_after(2 * 10 * 0.3):
            await sequence.done.wait()
        assert len(stream.token_s) > 10


async def test_with_no_stream_a_new_request_waits_for_no_whole_batch(autojump_clock):
    """Reading 4,000 tokens takes 40 s in all; a request in the middle gets its token within about two ticks."""
    engine = FakeEngine(n_ctx=100_000, n_batch=4096, cost_ms=lambda prompt, decodes: 5 + 10 * prompt + decodes)
    async with running(engine, prefill_tick_ms=200.0, min_chunk_tokens=4) as harness:
        harness.ask(4000, 1)
        await trio.sleep(10)
        began = trio.current_time()
        await harness.ask(4, 1, client := Client(), slo=INTERACTIVE).done.wait()
        assert client.token_s[0] - began < 0.6


async def test_after_a_hiccup_prompts_and_streams_go_on_as_before(autojump_clock):
    slow_once = iter([10_000.0])
    hiccup = False

    def cost_ms(prompt: int, decodes: int) -> float:
        return next(slow_once, 0.0) * hiccup + 5 + 0.5 * prompt + decodes

    async with running(FakeEngine(n_ctx=100_000, n_seq_max=4, cost_ms=cost_ms)) as harness:
        stream = Client()
        harness.ask(1, 2000, stream)
        harness.ask(60_000, 1)

        async def read_in_five_seconds() -> int:
            before = harness.scheduler.telemetry.prompt_tokens_total
            await trio.sleep(5)
            return harness.scheduler.telemetry.prompt_tokens_total - before

        await trio.sleep(5)
        rate = await read_in_five_seconds()
        hiccup, slow_once = True, iter([10_000.0])
        await trio.sleep(12)
        assert max(stream.gaps_ms) > 9_000
        assert await read_in_five_seconds() > 0.9 * rate


async def test_the_error_of_prediction_is_a_metric(autojump_clock):
    engine = FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 5 + 0.1 * prompt + decodes + (prompt // 16) % 3)
    async with running(engine) as harness:
        assert harness.scheduler.snapshot()["tick_prediction_error"] == 0
        harness.ask(1, 500)
        await harness.ask(90_000, 1).done.wait()
        assert 0 < harness.scheduler.snapshot()["tick_prediction_error"] < 0.05


# -- classes ----------------------------------------------------------------------------------------


async def test_an_interactive_prompt_is_read_before_others(autojump_clock):
    async with running() as harness:
        long = harness.ask(20_000, 1, slo=BACKGROUND)
        await trio.sleep(0.5)
        began = trio.current_time()
        short = harness.ask(2000, 1, slo=INTERACTIVE)
        await short.done.wait()
        assert short.first_token_at - began < 0.5
        assert long.first_token_at is None
        await long.done.wait()


async def test_a_background_prompt_is_read_beside_others_without_end(autojump_clock):
    async with running() as harness:
        over = False

        def again() -> None:
            if not over:
                harness.ask(400, 1, Client(then=again), slo=INTERACTIVE)

        for _ in range(4):
            again()
        with trio.fail_after(10):
            await harness.ask(500, 1, slo=BACKGROUND).done.wait()
        over = True
        harness.scheduler.close()


async def test_text_does_not_depend_on_who_else_is_served(autojump_clock):
    async with running(FakeEngine(n_ctx=100_000, cost_ms=lambda prompt, decodes: 5 + prompt + 60 * decodes)) as harness:
        sizes = [1, 300, 40, 700, 5, 90]
        clients = [Client() for _ in sizes]
        sequences = [
            harness.ask(size, 25, client, principal=i % 2, slo=[INTERACTIVE, None, BACKGROUND][i % 3])
            for i, (size, client) in enumerate(zip(sizes, clients, strict=True))
        ]
        for sequence in sequences:
            await sequence.done.wait()
        for size, client in zip(sizes, clients, strict=True):
            assert client.tokens == expected_continuation([i % 900 + 1 for i in range(size)], 25)


# -- the queue ----------------------------------------------------------------------------------------


async def test_the_queue_goes_by_class_then_tenant_then_arrival(autojump_clock):
    async with running(FakeEngine(n_seq_max=1)) as harness:
        ended: list[str] = []

        def ask(name: str, **who: Any) -> None:
            harness.ask(30, 3, Client(then=lambda: ended.append(name)), **who)

        ask("first", principal="uid:1")
        await trio.sleep(0.001)
        ask("background", principal="uid:2", slo=BACKGROUND)
        ask("principal 1, a", principal="uid:1")
        ask("principal 1, b", principal="uid:1")
        ask("principal 2", principal="uid:2")
        ask("interactive", principal="uid:1", slo=INTERACTIVE)
        while len(ended) < 6:
            await trio.sleep(0.1)
        assert ended == ["first", "interactive", "principal 2", "principal 1, a", "principal 1, b", "background"]


async def test_who_has_waited_long_in_the_queue_rises(autojump_clock):
    """Interactive requests without end, each of them 10 s long, must not keep a background one out for ever."""
    engine = FakeEngine(n_seq_max=1, cost_ms=lambda prompt, decodes: 1000)
    async with running(engine, max_queue=100) as harness:
        harness.ask(5, 10, slo=INTERACTIVE)
        await trio.sleep(0.001)
        background = harness.ask(5, 10, slo=BACKGROUND)
        overtook = 0
        while background.admitted_at is None:
            harness.ask(5, 10, slo=INTERACTIVE)
            overtook += 1
            await trio.sleep(10)
        assert 60 <= background.admitted_at - background.arrived_at <= 90
        assert overtook >= 5


async def test_the_first_in_the_queue_is_waited_for_however_large(autojump_clock):
    async with running(FakeEngine(n_ctx=1000, n_seq_max=8)) as harness:
        harness.ask(300, 200)
        large = harness.ask(800, 100)
        small = [harness.ask(10, 5) for _ in range(3)]
        await large.done.wait()
        assert all(sequence.admitted_at >= large.admitted_at for sequence in small)
        for sequence in small:
            await sequence.done.wait()


async def test_tenants_of_unequal_size_get_equal_service(autojump_clock):
    """Forty short requests always waiting against three long ones; both always have more than they get."""
    service: Counter[int] = Counter()
    async with running(FakeEngine(n_ctx=100_000, n_seq_max=6), max_queue=1000) as harness:

        def again(principal: int, prompt: int, n: int) -> None:
            def done() -> None:
                service[principal] += prompt + 2 * n
                if trio.current_time() < ends:
                    again(principal, prompt, n)

            harness.ask(prompt, n, Client(then=done), principal=principal)

        ends = trio.current_time() + 120
        for _ in range(40):
            again(1, 60, 10)
        for _ in range(3):
            again(2, 1500, 100)
        await trio.sleep_until(ends)
        assert min(service.values()) > 10_000
        assert 0.9 < service[1] / service[2] < 1.1
        harness.scheduler.close()


async def test_a_refusal_says_when_to_try_again(autojump_clock):
    async with running(FakeEngine(n_seq_max=2), max_queue=2) as harness:
        sequences = [harness.ask(100, 20) for _ in range(4)]
        with pytest.raises(errors.QueueFull) as early:
            harness.ask(100, 20)
        assert early.value.retry_after_ms is None, "nothing has ended yet"
        await sequences[0].done.wait()
        took_ms = 1e3 * (sequences[0].ended_at - sequences[0].admitted_at)
        await trio.sleep(0.01)
        while len([*harness.scheduler.sequences()]) < 4:
            harness.ask(100, 20)
        with pytest.raises(errors.QueueFull) as later:
            harness.ask(100, 20)
        assert later.value.retry_after_ms == pytest.approx(2 * took_ms, rel=0.5)
