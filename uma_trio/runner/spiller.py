"""States of idle sequences go to files, and come back: what takes time happens beside the ticks.

A file is made, filled with zeros and mapped in a worker thread; then the engine writes the state straight into it,
between two computations; checksums, syncing and renaming follow in a worker thread again.  A state that is loaded is
read and verified before, likewise.  So all that the streams can notice is the copy itself, at most one in a step, and
only in one that has the time for it.

Source: docs/ARCHITECTURE.md, "What outlives its cells".
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import attrs
import structlog
import trio

from uma_trio.engine.records import Load, Save, StepResult
from uma_trio.kv.cache import Entry, KvCache
from uma_trio.kv.checkpoints import Checkpoint, Checkpoints
from uma_trio.kv.prefix import Tokens
from uma_trio.kv.shelf import Saved
from uma_trio.store.spill import SpillError
from uma_trio.telemetry.meters import SpillMeters

log = structlog.get_logger("uma_trio.runner")

InThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a blocking call with its arguments, as ``trio.to_thread.run_sync`` does."""

PATIENCE_S: Final = 0.25
"""After so long a copy no longer waits for a step that has time for it: it may make one take twice as long."""

GIVE_UP_S: Final = 3.0
"""After so long what somebody waits for is not saved, or not loaded."""

FILES_AT_A_TIME: Final = 4
"""That are being written: one is synced while the next one is copied into."""

LEARN_FROM_BYTES: Final = 4_000_000
"""Of a smaller state most of the time is not that of its bytes."""

LOOK_S: Final = 1.0
"""How often it is looked for sequences that have been idle for long enough."""

FIRST_BYTES_A_MS: Final = {"save": 2e6, "load": 1e7, "read": 1e6}
"""What copying is believed to do before any was seen, and what each reader."""

WEIGHT: Final = 0.3
"""Of the latest copy in the average."""

OVERHEAD_MS: Final = 3.0
"""Of loading a state, whatever its size."""


class Written(Protocol):
    """A file that is complete."""

    @property
    def name(self) -> str: ...


class Draft(Protocol):
    """A file that is being written."""

    @property
    def view(self) -> Any:
        """A writable buffer of as many bytes as were asked for."""

    def finish(
        self, tokens: Tokens, *, tenant: int, n_bytes: int, extra: dict[str, Any]
    ) -> Written: ...
    def abandon(self) -> None: ...


class Reading(Protocol):
    """A file that has been read and verified."""

    @property
    def view(self) -> Any: ...
    def close(self) -> None: ...


class StateFiles(Protocol):
    """Where states are kept; all calls block, and raise ``SpillError`` with the reason."""

    @property
    def readers(self) -> int:
        """Threads that read one state together."""

    @property
    def used_bytes(self) -> int:
        """Of all files that count to the most that there may be; does not block for long."""

    def begin(self, n_bytes: int) -> Draft: ...
    def open(self, name: str) -> Reading: ...
    def remove(self, name: str) -> None: ...

    def __contains__(self, name: str) -> bool:
        """Whether the state is still there; does not block."""


def saved_state(name: str, tenant: int, tokens: Tokens, n_bytes: int, extra: Mapping[str, Any]) -> Saved:
    """What a file holds, of which ``extra`` says which checkpoints follow the state.

    Raises:
        ValueError: it says what cannot be.
    """
    told = extra.get("checkpoints", [])
    match told:
        case [*pairs] if all(_is_pair(pair) for pair in pairs):
            found = tuple([(length, size) for length, size in pairs])
        case _:
            raise ValueError(f"its checkpoints are {str(told)[:100]}")
    lengths = [0, *(length for length, _ in found), len(tokens) + 1]
    if sorted(set(lengths)) != lengths or min([1, *(n for _, n in found)]) < 1 or sum(n for _, n in found) >= n_bytes:
        raise ValueError(f"its checkpoints are {str(told)[:100]}, of {len(tokens)} tokens in {n_bytes} bytes")
    return Saved(name, tenant, tokens, n_bytes, found)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(number, int) for number in value)


def _parts(view: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """``view`` cut into parts of ``sizes``, one behind the other; they let go of it when they go."""
    at = 0
    for size in sizes:
        yield memoryview(view)[at : at + size]
        at += size


@attrs.define(eq=False)
class Transfer:
    """One state on its way between the engine and a file."""

    entry: Entry
    edit: Save | Load
    n_bytes: int
    asked_at: float
    points: Checkpoints = ()
    """Of the sequence that is saved."""
    done: trio.Event = attrs.field(factory=trio.Event)
    refused: str | None = "the sequence was needed before"
    """Why it did not take place; ``None`` if it did."""

    @property
    def kind(self) -> str:
        return "save" if isinstance(self.edit, Save) else "load"


class Spiller:
    """Does for one runner what its cache says is to be saved or loaded.

    Args:
        files: where to.
        state_bytes: asks the engine how large a sequence's state is, and each of its checkpoints.
        wake: there is something for the next step.
        after_s: a sequence that has been idle for so long is saved, also if its room is not needed.
        in_thread: runs a blocking call.
    """

    def __init__(
        self,
        cache: KvCache,
        files: StateFiles,
        state_bytes: Callable[[int, Checkpoints], Awaitable[list[int]]],
        wake: Callable[[], None],
        worth_loading: Callable[[int, int], bool],
        *,
        after_s: float,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self._cache = cache
        self._files = files
        self._state_bytes = state_bytes
        self._wake = wake
        self._worth_loading = worth_loading
        self._after_s = after_s
        self._in_thread = in_thread
        self._loads: list[Transfer] = []
        self._save: Transfer | None = None
        self._writing = trio.Semaphore(FILES_AT_A_TIME)
        self._look = trio.Event()
        self._everything_saved = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._bytes_a_ms = {**FIRST_BYTES_A_MS, "read": files.readers * FIRST_BYTES_A_MS["read"]}
        self.meters = SpillMeters()

    def snapshot(self) -> dict[str, Any]:
        return {**self.meters.snapshot(), "disk_bytes": self._files.used_bytes}

    # -- asked by the runner, between ticks -----------------------------------------------------

    def look(self) -> None:
        """There may be something to save."""
        self._look.set()

    def fetch(self, entry: Entry, state: Saved, then: Callable[[Entry, Saved | None], None]) -> None:
        """Have ``state`` loaded into ``entry``; ``then`` is called between two ticks, with ``None`` if that failed."""
        assert self._nursery is not None
        self._nursery.start_soon(self._fetch, entry, state, then)

    def next(self, spare_ms: float, tick_ms: float, now: float) -> Transfer | None:
        """The copy that the next step is to make.

        Args:
            spare_ms: what the step can take longer, and no stream's token is late.
            tick_ms: what it is predicted to take without.
        """
        for transfer in (*self._loads, *([self._save] if self._save is not None else [])):
            loads = transfer.kind == "load"
            if loads:
                there = self._cache.may_restore(transfer.entry)
            else:
                there = self._may_save(transfer.entry, transfer.points)
            if not there:
                self._settle(transfer)
                continue
            ms, waited = self.predicted_ms(transfer), now - transfer.asked_at
            if ms <= spare_ms or (waited > PATIENCE_S and ms <= tick_ms):
                self._take(transfer)
                return transfer
            if waited > GIVE_UP_S and (loads or self._cache.somebody_waits):
                transfer.refused = "no step had time for it"
                self._settle(transfer)
        return None

    def predicted_ms(self, transfer: Transfer) -> float:
        """What the step will take longer by it."""
        return transfer.n_bytes / self._bytes_a_ms[transfer.kind]

    def landed(self, transfer: Transfer, result: StepResult | None) -> None:
        """The step with ``transfer`` is done; ``None``: it failed."""
        refused = {} if result is None else dict(result.refused)
        if result is None:
            transfer.refused = "the step failed"
        else:
            transfer.refused = refused.get(transfer.entry.seq_id)
            if transfer.kind == "save":  # less than was asked for, if some of it was removed just before
                transfer.n_bytes = result.saved_bytes
            self._learn(transfer.kind, transfer.n_bytes, result.copied_ms)
            self.meters.stalled(result.copied_ms)
        transfer.done.set()

    @property
    def waits(self) -> bool:
        """A copy is ready to be made."""
        return self._save is not None or bool(self._loads)

    def load_ms(self, n_bytes: int) -> float:
        """What reading, verifying and loading a state of this size takes."""
        return OVERHEAD_MS + n_bytes / self._bytes_a_ms["read"] + n_bytes / self._bytes_a_ms["load"]

    def _take(self, transfer: Transfer) -> None:
        if transfer is self._save:
            self._save = None
        else:
            self._loads.remove(transfer)

    def _settle(self, transfer: Transfer) -> None:
        self._take(transfer)
        transfer.done.set()

    def _learn(self, kind: str, n_bytes: int, ms: float) -> None:
        if n_bytes >= LEARN_FROM_BYTES:
            rate = n_bytes / max(ms, 1e-3)
            self._bytes_a_ms[kind] += WEIGHT * (rate - self._bytes_a_ms[kind])

    # -- beside the ticks -----------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Save what is to be saved, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self._look = trio.Event()
                before = trio.current_time() - self._after_s
                entry = self._cache.to_save(before)
                if entry is not None:
                    await self._save_one(entry)
                    continue
                if self._after_s < 0 and not self._cache.is_saving:
                    self._everything_saved.set()
                with trio.move_on_after(LOOK_S if self._cache.has_unsaved else math.inf):
                    await self._look.wait()

    async def save_everything(self) -> None:
        """Until all that is idle and should be saved is."""
        self._after_s = -math.inf
        self._look.set()
        await self._everything_saved.wait()

    def _may_save(self, entry: Entry, points: Checkpoints) -> bool:
        """Nothing has changed, not even which checkpoints there are."""
        return self._cache.may_save(entry) and entry.points == points

    async def _save_one(self, entry: Entry) -> None:
        """Have ``entry`` copied; what follows is done beside, while the next one is."""
        self._cache.save(entry)
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
        sizes = await self._state_bytes(entry.seq_id, points)
        if not self._may_save(entry, points):
            self._cache.not_saved(entry)
            return None
        n_bytes = sum(sizes)
        if not self._worth_loading(len(entry.tokens), n_bytes):
            self.meters.skipped_total += 1
            self._cache.give_up(entry)
            self._wake()
            return None
        try:
            draft: Draft = await self._in_thread(self._files.begin, n_bytes)
        except SpillError as error:
            self._failed(entry, error)
            return None
        there = [(point, size) for point, size in zip(points, sizes[1:], strict=True) if size]  # or not made yet
        into, *marked = _parts(draft.view, [sizes[0], *(size for _, size in there)])
        marks = [(point.mark, part) for (point, _), part in zip(there, marked, strict=True)]
        edit = Save(entry.seq_id, into, marks)
        transfer = self._save = Transfer(entry, edit, n_bytes, trio.current_time(), points)
        try:
            self._wake()
            await transfer.done.wait()
        finally:
            self._save = None
        if transfer.refused is not None:
            await self._in_thread(draft.abandon)
            if self._may_save(entry, points):
                self._failed(entry, transfer.refused)
            else:
                self._cache.not_saved(entry)
            return None
        assert self._nursery is not None
        self._nursery.start_soon(self._finish, transfer, draft, there)
        return draft

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
        self.meters.saved(n_bytes)
        state = saved_state(written.name, entry.tenant, entry.tokens, n_bytes, extra)
        self._cache.shelf.keep(lambda name: name in self._files)
        for name in self._cache.saved(entry, state):
            await self._remove(name)
        self._wake()

    def _failed(self, entry: Entry, reason: object) -> None:
        """It goes unsaved: its tokens are to be computed again."""
        log.warning("a sequence could not be saved", reason=str(reason), tokens=len(entry.tokens))
        self.meters.failed_total += 1
        self._cache.give_up(entry)
        self._wake()

    async def _remove(self, name: str) -> None:
        try:
            await self._in_thread(self._files.remove, name)
        except SpillError as error:
            log.warning("a saved state could not be removed", reason=str(error))

    def remove(self, names: list[str]) -> None:
        """The files of these states are needed no longer."""
        assert self._nursery is not None
        for name in names:
            self._nursery.start_soon(self._remove, name)

    async def _fetch(self, entry: Entry, state: Saved, then: Callable[[Entry, Saved | None], None]) -> None:
        began = time.perf_counter()
        try:
            reading: Reading = await self._in_thread(self._files.open, state.name)
        except SpillError as error:
            log.warning("a saved state cannot be used; its tokens are computed", reason=str(error))
            self.meters.unusable_total += 1
            self._cache.shelf.discard(state.name)
            then(entry, None)
            return
        self._learn("read", state.n_bytes, 1e3 * (time.perf_counter() - began))
        try:
            points = {point.length: point.mark for point in self._cache.restoring(entry, state)}
            sizes = [size for _, size in state.checkpoints]
            whole, *marked = _parts(reading.view, [state.n_bytes - sum(sizes), *sizes])
            told = zip([length for length, _ in state.checkpoints], marked, strict=True)
            marks = [(points[length], part) for length, part in told if length in points]
            edit = Load(entry.seq_id, len(state.tokens), whole, marks)
            transfer = Transfer(entry, edit, state.n_bytes, trio.current_time())
            self._loads.append(transfer)
            self._wake()
            await transfer.done.wait()
        finally:
            await self._in_thread(reading.close)
        if transfer.refused is None:
            self.meters.loaded(state.n_bytes, len(state.tokens))
            then(entry, state)
            return
        if self._cache.may_restore(entry):
            log.warning("a saved state was refused; its tokens are computed", reason=transfer.refused)
            self.meters.unusable_total += 1
        then(entry, None)
