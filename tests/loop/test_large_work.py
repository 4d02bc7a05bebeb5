"""Large work on an event loop: one piece at a time, with a turn of others before each, and a pause after a long one."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import pytest
import trio

from uma_trio.processes.large_work import LargeWork


class Clock:
    """Seconds that pieces take; records the pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr("uma_trio.processes.large_work.time.perf_counter", lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await trio.lowlevel.checkpoint()


async def test_others_have_a_turn_between_two_pieces_of_any_work() -> None:
    work = LargeWork(trio.Lock(), trio.sleep)
    seen: list[str] = []

    def parts() -> Generator[None, None, None]:
        for _ in range(3):
            seen.append("piece")
            yield

    async def other() -> None:
        while True:
            seen.append("other")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        async with trio.open_nursery() as large:
            for _ in range(8):
                large.start_soon(work.run, parts())
        nursery.cancel_scope.cancel()
    assert seen.count("piece") == 24
    assert ("piece", "piece") not in set(itertools.pairwise(seen))


async def test_the_loop_is_free_after_a_piece_for_as_long_as_the_piece_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    work = LargeWork(trio.Lock(), clock.sleep)
    for seconds in (0.02, 0.001, 0.5):
        async with work.part():
            clock.now += seconds
    assert clock.pauses == pytest.approx([0.02, 0, 0.5]), "after a short one, others have a turn"


async def test_a_piece_that_fails_has_its_pause_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    work = LargeWork(trio.Lock(), clock.sleep)
    with pytest.raises(ValueError, match="refused"):
        async with work.part():
            clock.now += 0.02
            raise ValueError("refused")
    assert clock.pauses == pytest.approx([0.02])
    async with work.part():
        """The lock is free."""


async def test_the_result_of_the_work_is_returned() -> None:
    def work() -> Generator[None, None, str]:
        yield
        return "done"

    assert await LargeWork(trio.Lock(), trio.sleep).run(work()) == "done"
