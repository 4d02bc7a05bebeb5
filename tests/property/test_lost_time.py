"""What background sequences lose to requests that interrupt them, for any times of both."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.daemon.policy.lost_time import MAX_LOST_SHARE, MAX_SAVED_MS, LostTime

STEPS = st.lists(st.tuples(st.floats(0.1, 400), st.floats(0, 1) | st.none()), max_size=200)
"""How long each step takes, and the share of it after which a request comes, if one does."""


@given(STEPS)
def test_at_most_a_share_of_the_time_is_lost_and_none_without_need(steps: list[tuple[float, float | None]]) -> None:
    lost_time, lost_ms, useful_ms = LostTime(), 0.0, 0.0
    for ms, share in steps:
        is_lost = share is not None and lost_time.may_lose(share * ms)
        if is_lost:
            assert share is not None
            lost_time.interrupted(share * ms)
            lost_ms += share * ms
        else:
            lost_time.completed(ms)
            useful_ms += ms
        assert lost_ms <= MAX_SAVED_MS + MAX_LOST_SHARE * useful_ms + 1e-6
        if share is not None and not is_lost:  # it would have been too much, counted over some time
            assert lost_ms + share * ms > MAX_LOST_SHARE * useful_ms


def test_requests_that_come_now_and_then_always_interrupt() -> None:
    """One in six steps of 100 ms is interrupted at a random moment, which loses a tenth of the time in the mean."""
    lost_time = LostTime()
    for n in range(1000):
        if n % 6:
            lost_time.completed(100)
        else:
            ms = 100 * math.modf(n * 0.618)[0]
            assert lost_time.may_lose(ms)
            lost_time.interrupted(ms)
