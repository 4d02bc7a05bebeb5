"""Far more clients than there is room for, in virtual time: a client that waits as long as its refusal says is served."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import count

import pytest
import trio

from tests.loop.test_scheduling import running
from tests.support.fake_engine import FakeEngine
from tests.support.profile import amount, thorough
from uma_trio import errors

CLIENTS, ROOM, TOKENS = amount(quick=250, thorough=500), 32, 20


def exactly(ms: float) -> float:
    return ms / 1e3


def whole_seconds(ms: float) -> float:
    """As in the header ``Retry-After``."""
    return max(1, math.ceil(ms / 1e3))


@pytest.mark.parametrize(("waits_s", "max_queue"), [(exactly, 0), thorough(exactly, ROOM), (whole_seconds, ROOM)])
async def test_a_client_that_waits_is_served(autojump_clock, waits_s: Callable[[float], float], max_queue: int) -> None:
    """The first request was alone and therefore quick, so the first waits are too short for most."""
    tries: list[int] = []
    async with running(FakeEngine(n_seq_max=ROOM, n_ctx=100_000), max_queue=max_queue) as harness:

        async def client() -> None:
            for attempt in count(1):
                try:
                    answer = harness.ask(100, TOKENS)
                except errors.QueueFull as full:
                    wait_ms = full.retry_after_ms
                else:
                    await answer.done.wait()
                    tries.append(attempt)
                    return
                assert wait_ms is not None
                assert wait_ms <= 60_000
                await trio.sleep(waits_s(wait_ms))

        await harness.ask(100, TOKENS).done.wait()
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(client)
    print(f"{statistics.mean(tries):.2f} tries on average, at most {max(tries)}, in {trio.current_time():.1f} s")
    assert len(tries) == CLIENTS
    assert statistics.mean(tries) < 4, "if all came back together it would be 7 to 18"
