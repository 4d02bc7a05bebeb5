"""States of idle sequences go to files, and come back: what takes time happens beside the ticks.

A file is made, filled with zeros and mapped in a worker thread; then the engine writes the state straight into it,
between two computations; checksums, syncing and renaming follow in a worker thread again.  A state that is loaded is
read and verified before, likewise.  So all that the streams can notice is the copy itself, at most one in a step, and
only in one that has the time for it: see ``transfers``.

Source: docs/ARCHITECTURE.md, "What outlives its cells".
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import structlog
import trio

from uma_trio.engine.records import Engine, Load, Save, TokenIds
from uma_trio.engine.thread import EngineThread
from uma_trio.kv.checkpoints import Checkpoint, Checkpoints
from uma_trio.kv.entry import Entry
from uma_trio.kv.saving import Saving
from uma_trio.kv.shelf import Saved
from uma_trio.runner.pace import Pace
from uma_trio.runner.state_files import Draft, Nowhere, Reading, StateFiles, parts, saved_state
from uma_trio.runner.transfers import Transfer, Transfers, is_unchanged
from uma_trio.store.spill import SpillError
from uma_trio.telemetry.metrics import OffloadMetrics

log = structlog.get_logger("uma_trio.runner")

InThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a blocking call with its arguments, as ``trio.to_thread.run_sync`` does."""

FILES_AT_A_TIME: Final = 4
"""That are being written: one is synced while the next one is copied into."""

LOOK_S: Final = 1.0
"""How often it is looked for sequences that have been idle for long enough."""


class Spiller:
    """Does for one runner what its cache says is to be saved or loaded.

    Args:
        kv: says it.
        files: where to; ``None``: nowhere, and then no sequence may be durable.
        engine: says how large states are, in ``thread``.
        wake: there is something for the next step.
        after_s: a sequence that has been idle for so long is saved, also if its room is not needed.
        in_thread: runs a blocking call.
    """

    def __init__(
        self,
        kv: Saving,
        files: StateFiles | None,
        engine: Engine,
        thread: EngineThread,
        pace: Pace,
        wake: Callable[[], None],
        *,
        after_s: float,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self._kv = kv
        self.saves = files is not None
        """Whether a sequence can outlive its cells."""
        self._files = Nowhere() if files is None else files
        self._engine = engine
        self._thread = thread
        self._pace = pace
        self._wake = wake
        self._after_s = after_s
        self._in_thread = in_thread
        self.meters = OffloadMetrics()
        self.transfers = Transfers(kv, pace, self.meters)
        """For the steps to make."""
        self._unreadable: list[Entry] = []
        self._writing = trio.Semaphore(FILES_AT_A_TIME)
        self._look = trio.Event()
        self._everything_saved = trio.Event()
        self._nursery: trio.Nursery | None = None

    # -- asked by the tick, which none of it holds up --------------------------------------------

    def look(self) -> None:
        """There may be something to save."""
        self._look.set()

    def fetch(self, entry: Entry, state: Saved) -> None:
        """Have ``state`` loaded into ``entry``, which ``take_fetched`` tells the end of."""
        assert self._nursery is not None
        self._nursery.start_soon(self._fetch, entry, state)

    def take_fetched(self) -> Iterator[tuple[Entry, Saved | None]]:
        """Who need not wait for a state any longer, since the last call: it is there, or (``None``) not to be had.

        To be called before each step: what is there counts from then on.
        """
        unreadable, self._unreadable = self._unreadable, []
        for entry in unreadable:
            yield entry, None
        for transfer in self.transfers.take_ended_loads():
            entry, state = transfer.entry, transfer.state
            assert state is not None
            if transfer.refused is None:
                self.meters.record_loaded(state.n_bytes, len(state.tokens))
                yield entry, state
                continue
            if self._kv.may_restore(entry):
                log.warning("a saved state was refused; its tokens are computed", reason=transfer.refused)
                self.meters.load_failed_total += 1
            yield entry, None

    # -- asked from outside ---------------------------------------------------------------------

    async def save_everything(self) -> None:
        """Until all that is idle and should be saved is.  ``run`` must be running."""
        self._after_s = -math.inf
        self._look.set()
        await self._everything_saved.wait()

    def forget(self, tokens: TokenIds, *, tenant: int, needed: Callable[[TokenIds], bool]) -> None:
        """What was kept of a conversation goes, in the cache and on disk.  ``run`` must be running.

        Args:
            needed: whether a list of tokens is the beginning of something that goes on.
        """
        self._remove_soon(self._kv.forget(tokens, tenant=tenant, needed=needed))
        self._wake()

    def keep(self, needed: Callable[[Saved], bool]) -> None:
        """Saved states that are not needed go.  ``run`` must be running."""
        names = self._kv.shelf.orphans(needed)
        for name in names:
            self._kv.shelf.discard(name)
        self._remove_soon(names)

    def snapshot(self) -> dict[str, Any] | None:
        """What was saved and loaded; ``None`` where nothing ever is."""
        return {**self.meters.snapshot(), "disk_bytes": self._files.used_bytes} if self.saves else None

    # -- beside the ticks -----------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Save what is to be saved, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self._look = trio.Event()
                before = trio.current_time() - self._after_s
                entry = self._kv.to_save(before)
                if entry is not None:
                    await self._save_one(entry)
                    continue
                if self._after_s < 0 and not self._kv.is_saving:
                    self._everything_saved.set()
                with trio.move_on_after(LOOK_S if self._kv.has_unsaved else math.inf):
                    await self._look.wait()

    async def _save_one(self, entry: Entry) -> None:
        """Have ``entry`` copied; what follows is done beside, while the next one is."""
        self._kv.save(entry)
        await self._writing.acquire()
        draft = None
        try:
            draft = await self._copy(entry)
        finally:
            if draft is None:
                self._writing.release()

    async def _copy(self, entry: Entry) -> Draft | None:
        """A file with its state, which is being finished; ``None`` if it will not be saved."""
        points = entry.points
        sizes = await self._thread.run(lambda: self._state_bytes(entry.seq_id, points))
        if not is_unchanged(self._kv, entry, points):
            self._kv.not_saved(entry)
            return None
        n_bytes = sum(sizes)
        if not self._pace.worth_loading(len(entry.tokens), n_bytes):
            self.meters.skipped_total += 1
            self._kv.give_up(entry)
            self._wake()
            return None
        try:
            draft: Draft = await self._in_thread(self._files.begin, n_bytes)
        except SpillError as error:
            self._failed(entry, error)
            return None
        there = [(point, size) for point, size in zip(points, sizes[1:], strict=True) if size]  # or not made yet
        into, *marked = parts(draft.view, [sizes[0], *(size for _, size in there)])
        marks = [(point.mark, part) for (point, _), part in zip(there, marked, strict=True)]
        edit = Save(entry.seq_id, into, marks)
        transfer = Transfer(entry, edit, n_bytes, trio.current_time(), points)
        await self._made(transfer)
        if transfer.refused is not None:
            await self._in_thread(draft.abandon)
            if is_unchanged(self._kv, entry, points):
                self._failed(entry, transfer.refused)
            else:
                self._kv.not_saved(entry)
            return None
        assert self._nursery is not None
        self._nursery.start_soon(self._finish, transfer, draft, there)
        return draft

    def _state_bytes(self, seq_id: int, points: Checkpoints) -> list[int]:
        """How large the state is, and each of its checkpoints.  In the engine's thread."""
        return [self._engine.state_bytes(seq_id), *(self._engine.mark_bytes(point.mark) for point in points)]

    async def _made(self, transfer: Transfer) -> None:
        """Have a step make ``transfer``, and wait for it."""
        self.transfers.add(transfer)
        try:
            self._wake()
            await transfer.done.wait()
        finally:
            self.transfers.withdraw(transfer)

    async def _finish(self, transfer: Transfer, draft: Draft, there: Sequence[tuple[Checkpoint, int]]) -> None:
        """What was copied becomes a file that lasts."""
        try:
            await self._make_durable(transfer.entry, draft, transfer.n_bytes, there)
        finally:
            self._writing.release()
            self.look()

    async def _make_durable(
        self, entry: Entry, draft: Draft, n_bytes: int, there: Sequence[tuple[Checkpoint, int]]
    ) -> None:
        try:
            kept = [[point.length, size] for point, size in there]
            extra: dict[str, Any] = {"checkpoints": kept} if kept else {}
            written = await self._in_thread(
                lambda: draft.finish(entry.tokens, tenant=entry.tenant, n_bytes=n_bytes, extra=extra)
            )
        except SpillError as error:
            self._failed(entry, error)
            return
        self.meters.record_saved(n_bytes)
        state = saved_state(written.name, entry.tenant, entry.tokens, n_bytes, extra)
        self._kv.shelf.keep(lambda name: name in self._files)
        for name in self._kv.saved(entry, state):
            await self._remove(name)
        self._wake()

    def _failed(self, entry: Entry, reason: object) -> None:
        """It goes unsaved: its tokens are to be computed again."""
        log.warning("a sequence could not be saved", reason=str(reason), tokens=len(entry.tokens))
        self.meters.save_failed_total += 1
        self._kv.give_up(entry)
        self._wake()

    async def _remove(self, name: str) -> None:
        try:
            await self._in_thread(self._files.remove, name)
        except SpillError as error:
            log.warning("a saved state could not be removed", reason=str(error))

    def _remove_soon(self, names: Sequence[str]) -> None:
        for name in names:
            assert self._nursery is not None
            self._nursery.start_soon(self._remove, name)

    async def _fetch(self, entry: Entry, state: Saved) -> None:
        began = time.perf_counter()
        try:
            reading: Reading = await self._in_thread(self._files.open, state.name)
        except SpillError as error:
            log.warning("a saved state cannot be used; its tokens are computed", reason=str(error))
            self.meters.load_failed_total += 1
            self._kv.shelf.discard(state.name)
            self._unreadable.append(entry)
            self._wake()
            return
        self._pace.copied("read", state.n_bytes, 1e3 * (time.perf_counter() - began))
        try:
            points = {point.length: point.mark for point in self._kv.restoring(entry, state)}
            sizes = [size for _, size in state.checkpoints]
            whole, *marked = parts(reading.view, [state.n_bytes - sum(sizes), *sizes])
            told = zip([length for length, _ in state.checkpoints], marked, strict=True)
            marks = [(points[length], part) for length, part in told if length in points]
            edit = Load(entry.seq_id, len(state.tokens), whole, marks)
            await self._made(Transfer(entry, edit, state.n_bytes, trio.current_time(), state=state))
            self._wake()  # what ended it may have been no step
        finally:
            await self._in_thread(reading.close)
