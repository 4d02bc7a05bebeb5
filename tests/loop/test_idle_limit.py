"""Idle sequences where attention scans the whole cache, through the scheduler."""

from __future__ import annotations

import random

import pytest

from tests.support.asking import asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from uma_trio.daemon.kv.idle_limit import MIN_IDLE_CELLS
from uma_trio.engine_link.attention import AttentionScan

pytestmark = pytest.mark.trio


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 800), k=n)


@pytest.mark.parametrize("scan", [AttentionScan.CACHE, AttentionScan.SEQUENCE])
async def test_a_conversation_that_comes_back_stays_and_single_prompts_do_not(autojump_clock, scan):
    engine = FakeEngine(n_ctx=32_768, n_seq_max=8, unified=True, attention_scan=scan)
    async with asking(engine) as harness:
        stream = harness.ask([1, 2, 3], 3000)
        said, cached, idle = prompt(0, 3000), [], []
        for turn in range(4):
            client = await harness.answer(said, 8)
            assert client.tokens == expected_continuation(client.prompt, 8)
            cached.append(client.cached)
            said = [*said, *client.tokens, *prompt(100 + turn, 50)]
            for n in range(4):
                await harness.answer(prompt(10 + 10 * turn + n, 1500), 4)
            idle.append(harness.scheduler.cache.statistics().cached_cells)
        assert not stream.answer.done.is_set(), "something ran all the time"
        if scan is AttentionScan.CACHE:
            assert cached[:2] == [0, 0]
            assert min(cached[2:]) > 3000
            assert max(idle) <= MIN_IDLE_CELLS + len(said)
        else:
            assert idle[-1] > 2 * MIN_IDLE_CELLS
        await harness.ended(stream)
        assert stream.tokens == expected_continuation(stream.prompt, 3000)
        await harness.clean()
