"""The engine's thread: one call after another, and when each of them began."""

from __future__ import annotations

import trio
from uma_trio.engine.thread import EngineThread


async def test_calls_run_in_their_order_and_are_timed_on_trios_clock():
    thread = EngineThread("tested")
    asked = trio.current_time()
    calls = [thread.submit(lambda n=n: n) for n in range(3)]
    assert [await call.wait() for call in calls] == [0, 1, 2]
    thread.close()
    moments = [asked, *(call.began_s for call in calls), trio.current_time()]
    assert moments == sorted(moments)
