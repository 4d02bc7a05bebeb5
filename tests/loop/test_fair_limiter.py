"""Work in threads and processes, in which principals take turns."""

from __future__ import annotations

import trio
import trio.testing

from uma_trio.daemon.prompts.fair_limiter import FairLimiter


class Work:
    """Work that takes a second each, and the order in which they began."""

    def __init__(self, n: int) -> None:
        self.limiter = FairLimiter(n)
        self.began: list[str] = []
        self.running = self.most = 0

    async def run(self, principal: str) -> None:
        async with self.limiter.of(principal):
            self.began.append(principal)
            self.running += 1
            self.most = max(self.most, self.running)
            await trio.sleep(1)
            self.running -= 1


async def test_principals_take_turns(autojump_clock) -> None:
    work = Work(1)
    async with trio.open_nursery() as nursery:
        for principal in "aaaa":
            nursery.start_soon(work.run, principal)
        await trio.sleep(0.5)
        for principal in "bbc":
            nursery.start_soon(work.run, principal)
    assert sorted(work.began[2:4]) == ["b", "c"], "the work that runs and the one that was next go first"
    assert work.began[:2] == ["a", "a"]
    assert work.most == 1
    assert trio.current_time() == 7


async def test_so_many_run_at_a_time(autojump_clock) -> None:
    work = Work(3)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(work.run, "a")
    assert work.most == 3
    assert trio.current_time() - began == 4


async def test_work_that_is_cancelled_while_it_waits_takes_no_turn(autojump_clock) -> None:
    work = Work(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run, "a")
        await trio.sleep(0.1)
        with trio.move_on_after(0.1):
            await work.run("b")
        nursery.start_soon(work.run, "c")
    assert work.began == ["a", "c"]
    async with trio.open_nursery() as nursery:  # cancelled in the moment in which its turn comes
        nursery.start_soon(work.run, "a")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await work.run("b")
        nursery.start_soon(work.run, "c")
    assert work.running == 0
    with trio.fail_after(2):
        await work.run("d")


async def test_a_thread_counts_until_it_ends() -> None:
    limiter, order = FairLimiter(1), []

    async def run(principal: str) -> None:
        await trio.to_thread.run_sync(order.append, principal, limiter=limiter.of(principal))

    async with trio.open_nursery() as nursery:
        for principal in "ab" * 20:
            nursery.start_soon(run, principal)
    assert sorted(order) == ["a"] * 20 + ["b"] * 20
    async with limiter.of("c"):
        pass
