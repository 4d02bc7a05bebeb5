"""Works on all batches that are kept, from the start of a gateway to its end.

What a batch has computed is in its files of results, so a worker needs no memory: the next one goes on where a gateway
was killed.  A batch that cannot go on, as on a full disk, is begun again after a pause.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import anyio
import anyio.to_thread
import attrs
import msgspec
import structlog

from uma_trio.gateway.batches.results import Busy, RowFile
from uma_trio.gateway.batches.row_caller import RowCaller
from uma_trio.gateway.batches.rows import Row, RowReader, RowResult, RowsError, unanswered_row
from uma_trio.gateway.batches.run import Later, Run
from uma_trio.gateway.batches.store import Batch, Status, Store, StoredFile
from uma_trio.gateway.charging import Account

log = structlog.get_logger("uma_trio.gateway")

POLL_S: Final = 1.0
"""How often to look for batches that another gateway had."""
EXPIRE_S: Final = 60.0
"""How often to delete what has expired."""
PAUSE_S: Final = 10.0
"""Before a batch that could not go on is begun again."""
UNCLASSED: Final = ("/v1/embeddings",)
"""Requests that have no scheduling class in the daemon.  One at a time leaves others their share."""


@attrs.define
class Worker:
    """Answers batches.

    Args:
        account_of: who is charged for the requests of an owner.  ``None``: nobody.

            Raises ``LookupError`` if the owner has no keys any more: then its batches wait.
        socket: of the daemon whose batches these are.
        at_a_time: rows of all batches that are answered at a time.
    """

    store: Store
    caller: RowCaller
    reader: RowReader
    account_of: Callable[[str], Account | None]
    socket: str
    at_a_time: int
    _running: set[str] = attrs.field(factory=set, init=False)
    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _scopes: dict[str, anyio.CancelScope] = attrs.field(factory=dict, init=False)

    async def run(self) -> None:
        """Work until cancelled."""
        slots = anyio.CapacityLimiter(self.at_a_time)
        expired_at = -math.inf
        async with anyio.create_task_group() as tasks:
            while True:
                changed = self._changed
                try:
                    if anyio.current_time() >= expired_at + EXPIRE_S:
                        expired_at = anyio.current_time()
                        await anyio.to_thread.run_sync(self.store.expire, time.time())
                    batches = await anyio.to_thread.run_sync(self.store.open_batches, self.socket)
                    wait_s = POLL_S if batches else EXPIRE_S
                    for batch in batches:
                        if batch.id not in self._running:
                            self._running.add(batch.id)
                            tasks.start_soon(self._work, batch, slots)
                except (OSError, sqlite3.Error) as error:
                    wait_s = PAUSE_S
                    log.error("batches cannot be read", reason=str(error), next_in_s=wait_s)
                with anyio.move_on_after(wait_s):
                    await changed.wait()

    def look(self, cancelled: str | None = None) -> None:
        """Look at once what there is to do.

        Args:
            cancelled: id of a batch whose rows are no longer wanted.
        """
        self._changed.set()
        self._changed = anyio.Event()
        if (scope := self._scopes.get(cancelled or "")) is not None:
            scope.cancel()

    async def _work(self, batch: Batch, slots: anyio.CapacityLimiter) -> None:
        try:
            await self._run(batch, slots)
        except* Busy:
            """Another gateway works on it, or ends just now."""
        except* (OSError, RowsError, sqlite3.Error) as failures:
            reason = "; ".join(map(str, _leaves(failures)))
            log.error("a batch pauses", id=batch.id, reason=reason, next_in_s=PAUSE_S)
            await anyio.sleep(PAUSE_S)
        finally:
            self._running.discard(batch.id)

    async def _run(self, batch: Batch, slots: anyio.CapacityLimiter) -> None:
        """Answer the rows of a batch, until it has ended."""
        left_s = batch.expires_at - time.time()
        try:
            account = self.account_of(batch.owner)
        except LookupError:
            if left_s > 0:
                return
            account = None
        with ExitStack() as stack:
            output, errors, rows = await anyio.to_thread.run_sync(self._open, batch, stack)

            async def answer(row: Row) -> RowResult | Later:
                return await self.caller.answer(row, account, is_local=batch.is_local)

            async def write() -> None:
                if (await self._change(batch.id, count)).status == "cancelling":  # another gateway was asked to
                    unwanted.cancel()

            def count(known: Batch) -> Batch:
                status = "in_progress" if known.status == "validating" else known.status
                known = known if status == known.status else known.with_status(status)
                return msgspec.structs.replace(known, completed=len(output.custom_ids), failed=len(errors.custom_ids))

            status: Status = "completed"
            with anyio.CancelScope() as unwanted:
                self._scopes[batch.id] = unwanted
                try:
                    await write()
                    with anyio.move_on_after(left_s) as window:
                        await Run(rows, output, errors, answer, slots, self._most(batch, account), write).run()
                    if window.cancelled_caught:
                        status = "expired"
                finally:
                    del self._scopes[batch.id]
            if unwanted.cancelled_caught:
                status = "cancelled"
            await anyio.to_thread.run_sync(self._end, batch, status, output, errors)

    def _most(self, batch: Batch, account: Account | None) -> int:
        """Rows of a batch that are answered at a time.  They leave its tenant room for other requests."""
        if batch.url in UNCLASSED:
            return 1
        most = None if account is None else account.tenant.max_requests
        return self.at_a_time if most is None else max(1, min(self.at_a_time, most // 2))

    async def _change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        return await anyio.to_thread.run_sync(self.store.change, batch_id, change)

    def _open(self, batch: Batch, stack: ExitStack) -> tuple[RowFile, RowFile, Iterator[Row]]:
        """The files of a batch.  Blocks."""
        output = stack.enter_context(RowFile(self.store.path(batch.output_file_id)))
        errors = stack.enter_context(RowFile(self.store.path(batch.error_file_id)))
        rows = self.reader.read(self.store.path(batch.input_file_id))
        stack.callback(rows.close)
        return output, errors, (row for _, row in rows)

    def _end(self, batch: Batch, status: Status, output: RowFile, errors: RowFile) -> None:
        """Let the files of results be seen.  Blocks."""
        if status == "expired":
            late = (row.custom_id for _, row in self.reader.read(self.store.path(batch.input_file_id)))
            message = f"no answer within {batch.completion_window}"
            errors.append(
                {
                    custom_id: unanswered_row(custom_id, "batch_expired", message)
                    for custom_id in late
                    if custom_id not in output.custom_ids and custom_id not in errors.custom_ids
                }
            )
        now = int(time.time())
        files = [
            StoredFile(
                id=file_id,
                owner=batch.owner,
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
                bytes=file.n_bytes,
                created_at=now,
                expires_at=now + batch.kept_s,
                url=batch.url,
                rows=len(file.custom_ids),
            )
            for file_id, name, file in (
                (batch.output_file_id, "output", output),
                (batch.error_file_id, "error", errors),
            )
            if file.n_bytes
        ]
        counts = {
            "completed": len(output.custom_ids),
            "failed": len(errors.custom_ids),
            "has_output": output.n_bytes > 0,
            "has_errors": errors.n_bytes > 0,
        }
        self.store.change(batch.id, lambda known: known.with_status(status, **counts), files)
        for file in (output, errors):
            if not file.n_bytes:
                file.path.unlink(missing_ok=True)


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for inner in group.exceptions:
        yield from _leaves(inner) if isinstance(inner, BaseExceptionGroup) else (inner,)
