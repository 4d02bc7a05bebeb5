"""Answers the rows of one file, some at a time, and appends each answer to a file before it counts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import anyio
import anyio.to_thread
import attrs
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from uma_trio.gateway.batches.results import RowFile
from uma_trio.gateway.batches.rows import Row, RowResult

MAX_TRIES: Final = 10
"""How often a row is sent whose answers break off, which may be its own fault."""


@attrs.frozen
class Later:
    """A row could not be answered now."""

    wait_s: float
    result: RowResult
    """The refusal."""
    may_be_its_fault: bool
    """Whether the row may be refused for ever."""


@attrs.define
class Run:
    """The work on one file.

    Args:
        rows: those of the input file; reading the next one may block.
        answer: answers a row.
        slots: shared by all runs: so many rows are answered at a time.
        at_a_time: rows of this file that are answered at a time.
        written: called when rows were written.
    """

    rows: Iterator[Row]
    output: RowFile
    errors: RowFile
    answer: Callable[[Row], Awaitable[RowResult | Later]]
    slots: anyio.CapacityLimiter
    at_a_time: int
    written: Callable[[], Awaitable[None]]
    _paused_until: float = attrs.field(default=-math.inf, init=False)

    async def run(self) -> None:
        """Answer all rows that have no answer yet.  When it is cancelled, rows without an answer have to be run again.

        Raises:
            OSError: answers cannot be written.
            RowsError: the input file has changed.
        """
        send, receive = anyio.create_memory_object_stream[RowResult](self.at_a_time)
        # the stream outlives the tasks: if writing fails, those that send are cancelled, and never find it closed
        async with receive, anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, receive)
            async with send:
                await self._answer_all(send)

    async def _answer_all(self, send: MemoryObjectSendStream[RowResult]) -> None:
        free = anyio.Semaphore(self.at_a_time)
        async with anyio.create_task_group() as tasks:
            while True:
                await free.acquire()
                row = await anyio.to_thread.run_sync(self._next)
                if row is None:
                    return
                tasks.start_soon(self._answer, row, send, free)

    def _next(self) -> Row | None:
        """The next row without an answer; ``None`` after the last one.  Blocks."""
        answered = (self.output.custom_ids, self.errors.custom_ids)
        return next((row for row in self.rows if not any(row.custom_id in ids for ids in answered)), None)

    async def _answer(self, row: Row, send: MemoryObjectSendStream[RowResult], free: anyio.Semaphore) -> None:
        n_broken = 0
        while True:
            await anyio.sleep_until(self._paused_until)
            async with self.slots:
                result = await self.answer(row)
            if isinstance(result, Later):
                n_broken += result.may_be_its_fault
                if n_broken < MAX_TRIES:  # whatever refused this row would refuse the others as well
                    self._paused_until = max(self._paused_until, anyio.current_time() + result.wait_s)
                    continue
                result = result.result
            await send.send(result)
            free.release()
            return

    async def _write(self, receive: MemoryObjectReceiveStream[RowResult]) -> None:
        """Write what has come since the last time, with one wait for the disk."""
        async for first in receive:
            results = [first]
            while receive.statistics().current_buffer_used:
                results.append(receive.receive_nowait())
            await anyio.to_thread.run_sync(self._append, results)
            await self.written()

    def _append(self, results: list[RowResult]) -> None:
        self.output.append({result.custom_id: result.line() for result in results if not result.is_error})
        self.errors.append({result.custom_id: result.line() for result in results if result.is_error})
