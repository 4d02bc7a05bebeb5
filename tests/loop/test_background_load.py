"""Requests at random times next to a batch, on a device as fast as a small model on one core."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest
import trio

from tests.support.asking import Harness, asking
from tests.support.fake_engine import FakeEngine
from uma_trio.protocol.requests import Slo

SECONDS = 400.0
CLIENTS, ROWS, TOKENS = 2, 4, 60


@attrs.define
class Seen:
    """What the requests have seen, and how many rows were answered meanwhile."""

    first_token_s: list[float] = attrs.field(factory=list)
    rows: int = 0
    idle_s: float = 0.0
    """Time in which there was no request."""


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def serve(*, requests: bool, batch: bool) -> Seen:
    """Requests of 100 tokens at fixed times, rows of 200 that follow each other, or both."""
    seen, running, idle_since = Seen(), set[object](), 0.0

    async def client(harness: Harness, rng: random.Random, began: float) -> None:
        nonlocal idle_since
        at = began
        while True:
            at += 2 + rng.expovariate(1 / 4)
            await trio.sleep_until(at)
            if not running:
                seen.idle_s += trio.current_time() - idle_since
            sent = trio.current_time()
            asked = harness.ask(rng.choices(range(7), k=100), TOKENS, cache_prompt=False)
            running.add(asked)
            await asked.answer.done.wait()
            assert asked.answer.times.first_token_at is not None
            seen.first_token_s.append(asked.answer.times.first_token_at - sent)
            running.remove(asked)
            idle_since = trio.current_time()

    async def row(harness: Harness, rng: random.Random) -> None:
        while True:
            background = Slo(priority="background")
            asked = harness.ask(rng.choices(range(7), k=200), TOKENS, slo=background, cache_prompt=False)
            await asked.answer.done.wait()
            seen.rows += 1

    engine = FakeEngine(n_seq_max=ROWS, n_ctx=4096, cost_ms=lambda prompt, decodes: 14 + 2.6 * prompt + 7 * decodes)
    async with asking(engine) as harness:
        began = idle_since = trio.current_time()
        with trio.move_on_after(SECONDS):
            async with trio.open_nursery() as nursery:
                for n in range(ROWS if batch else 0):
                    nursery.start_soon(row, harness, random.Random(100 + n))
                for n in range(CLIENTS if requests else 0):
                    nursery.start_soon(client, harness, random.Random(n), began)
        harness.scheduler.stop()
    return seen


@pytest.mark.thorough
async def test_first_tokens_hardly_notice_a_batch_and_the_batch_gets_what_is_left(autojump_clock) -> None:
    """Without interruptions the median was 1.19 times as long, without a spare place the p75 1.34."""
    alone = await serve(requests=True, batch=False)
    both = await serve(requests=True, batch=True)
    rows_alone = (await serve(requests=False, batch=True)).rows
    assert len(both.first_token_s) > 100
    ratios = {
        share: percentile(both.first_token_s, share) / percentile(alone.first_token_s, share)
        for share in (0.5, 0.75, 0.9, 0.99)
    }
    left = both.rows / (rows_alone * alone.idle_s / SECONDS)
    print(
        f"{len(both.first_token_s)} requests, TTFT next to the batch and alone by percentile: {ratios}, rows {left:.3f}"
    )
    assert max(ratios[0.5], ratios[0.75], ratios[0.99]) < 1.03
    assert ratios[0.9] < 1.15, "requests that come in the moment in which another one has taken the spare place"
    assert left > 0.85
