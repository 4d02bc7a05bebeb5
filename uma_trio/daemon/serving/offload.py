"""KV offload: states of sequences go to files and come back, next to the ticks.

Swapping out: a worker thread makes a file and takes its room on disk; a step has the engine write the state into it,
between two computations; a worker thread hashes, syncs and renames the file.  Swapping in is the same in reverse order.
So a stream can only notice the copy itself.  A step makes one copy at most, and only where there is time for it before
the first token is due.

Idle sequences of sessions go to a folder.  A sequence that loses its place to a request that waits goes to memory (it is
*parked*), and comes back when it has a place again.  Such copies do not wait for long.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import attrs
import structlog
import trio

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.checkpoints import Checkpoints
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.daemon.store.memory_states import MemoryStates
from uma_trio.daemon.store.state_folder import StateFileError
from uma_trio.engine_link.kv_ops import LoadState, MeasureState, SaveState
from uma_trio.engine_link.media import standing_runs
from uma_trio.engine_link.messages import StepOutput
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds
from uma_trio.telemetry.measures import snapshot_of
from uma_trio.telemetry.metrics import OffloadMetrics

log = structlog.get_logger("uma_trio.serving")

InThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a blocking call with its arguments, as ``trio.to_thread.run_sync`` does."""

MAX_OPEN_FILES: Final = 4
"""Files that are being written: one is synced while the next one is copied into."""

SCAN_INTERVAL_S: Final = 1.0
"""How often to look for sequences that have been idle for long enough."""

HARDLY_LONGER: Final = 0.1
"""A step may take this share longer for a copy, although streams are late."""

OVERRUN_AFTER_S: Final = 0.25
"""After this long a copy may make a step take twice as long; a copy that parks a sequence, as long as it needs."""

TRANSFER_TIMEOUT_S: Final = 3.0
"""After this long a copy that a request waits for does not take place."""

SAVE_TIMEOUT_S: Final = 20.0
"""How long a session that another daemon wants waits for its KV cache to be saved."""

MIN_PARKED_MS: Final = 250.0
"""A sequence is not parked if its tokens can be computed again in this time."""


class StateDraft(Protocol):
    """A file that is being written."""

    @property
    def fd(self) -> int: ...
    @property
    def offset(self) -> int:
        """Byte of the file at which the state begins."""

    def finish(
        self,
        tokens: TokenIds,
        *,
        principal: str,
        n_bytes: int,
        checkpoints: tuple[tuple[int, int], ...],
        adapters: str,
    ) -> SavedState:
        """Make it durable."""

    def abandon(self) -> None: ...


class StateReader(Protocol):
    """A file whose description has been verified."""

    @property
    def fd(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def hashes(self) -> bytes:
        """For the engine, which verifies the state; empty if it has been verified."""

    def close(self) -> None: ...


class StateFiles(Protocol):
    """Where states are kept.  All methods block, and raise ``StateFileError`` with the reason."""

    @property
    def used_bytes(self) -> int:
        """Size of all files that count towards the limit; does not block for long."""

    def begin(self, n_bytes: int) -> StateDraft: ...
    def open(self, name: str, *, verify: bool = True) -> StateReader: ...
    def remove(self, name: str) -> None: ...
    def path_of(self, name: str) -> Path:
        """Where a state is.  Does not block."""

    def adopt(self, path: Path, principal: str) -> SavedState:
        """Copy a file that another daemon has saved, for ``principal``."""

    def __contains__(self, name: str) -> bool:
        """Whether the state is still there; does not block."""


@attrs.define(eq=False)
class Transfer:
    """One request to the engine about a state: measure it, save it, or load it."""

    allocation: Allocation
    op: MeasureState | SaveState | LoadState
    n_bytes: int = 0
    checkpoints: Checkpoints = ()
    """The allocation's, when the transfer was asked for; none of one that is parked."""
    state: SavedState | None = None
    """The one that is loaded."""
    parks: bool = False
    """Whether the copy parks a sequence or brings it back: others wait, and computing it again would take longer."""
    n_tokens: int = 0
    """Number of tokens of a sequence that is parked."""
    asked_at: float = attrs.field(factory=trio.current_time)
    done: trio.Event = attrs.field(factory=trio.Event)
    refused: str | None = "the cells were needed before"
    """Why it did not take place; ``None`` if it did."""
    sizes: Sequence[int] = ()
    """What was measured: bytes of the state, and of each checkpoint."""


class Offloader:
    """Swaps states out and in for one scheduler.

    Args:
        cache: says what is to be saved, and what may be loaded.
        timings: predicts what a copy takes.
        wake: called when there is something for the next step.
        after_s: an idle sequence is saved after this long, even if its cells are not needed.
        in_thread: runs a blocking call.
        memory: where sequences are parked; ``None``: they are not.
    """

    def __init__(
        self,
        cache: KvCache,
        timings: StepTimings,
        wake: Callable[[], None],
        *,
        after_s: float,
        in_thread: InThread = trio.to_thread.run_sync,
        memory: MemoryStates | None = None,
    ) -> None:
        self._cache = cache
        self._planner = cache.offload
        self._files: StateFiles | None = None
        self._memory = memory
        self._timings = timings
        self._wake = wake
        self._after_s = after_s
        self._in_thread = in_thread
        self.metrics = OffloadMetrics()
        self._waiting: list[Transfer] = []
        self._suspects: set[str] = set()
        """States that the engine did not load; they are verified before they are loaded again."""
        self._swapped_in: list[tuple[Allocation, SavedState | None]] = []
        self._parked: list[tuple[Allocation, SavedState | None]] = []
        self._measured = 0, 0
        """Tokens and bytes of the last parked state that was measured."""
        self._writing = trio.Semaphore(MAX_OPEN_FILES)
        self._look = trio.Event()
        self._saved = trio.Event()
        """The saving of a sequence has ended."""
        self._everything_saved = trio.Event()
        self._nursery: trio.Nursery | None = None

    @property
    def saves(self) -> bool:
        """Whether a sequence can outlive its cells."""
        return self._files is not None

    # -- called by the tick; none of it blocks ----------------------------------------------------

    @property
    def has_transfers(self) -> bool:
        """Whether a copy waits for a step."""
        return bool(self._waiting)

    def check_for_work(self) -> None:
        """There may be something to save."""
        self._look.set()

    def swap_in(self, allocation: Allocation, state: SavedState) -> None:
        """Load ``state`` into ``allocation``; ``take_swapped_in`` reports the end."""
        assert self._nursery is not None
        self._nursery.start_soon(self._swap_in, allocation, state)

    def take_swapped_in(self) -> Iterator[tuple[Allocation, SavedState | None]]:
        """Allocations that need not wait for a state any longer: it is loaded, or (``None``) it cannot be had."""
        swapped_in, self._swapped_in = self._swapped_in, []
        yield from swapped_in

    @property
    def parked_bytes(self) -> int:
        """Memory that parked sequences take."""
        return 0 if self._memory is None else self._memory.used_bytes

    def worth_parking(self, n_tokens: int) -> bool:
        """Whether to park a sequence that holds ``n_tokens``, rather than to compute them again."""
        if self._memory is None or n_tokens < MIN_SHARED_TOKENS:
            return False
        return self._timings.prefill_ms(n_tokens) > MIN_PARKED_MS

    def park(self, allocation: Allocation, tokens: TokenIds) -> None:
        """Copy ``tokens``, which are all that ``allocation`` holds, into memory; ``take_parked`` reports the end.

        No step may compute the sequence meanwhile.
        """
        assert self._nursery is not None
        self._nursery.start_soon(self._park, allocation, tokens)

    def take_parked(self) -> list[tuple[Allocation, SavedState | None]]:
        """Allocations whose copies have ended, with the state, or ``None`` if there is no copy."""
        parked, self._parked = self._parked, []
        return parked

    def unpark(self, state: SavedState) -> None:
        """Give back the memory of a parked state that is not needed any longer."""
        self._remove_soon([state.name])

    def next_transfer(self, decodes: Sequence[SequenceView]) -> Transfer | None:
        """The copy that the next step should make, if it has the time for one.

        Args:
            decodes: sequences whose tokens come after the copy.
        """
        if not self._waiting:
            return None
        now = trio.current_time()
        step_ms = self._timings.decode_ms(decodes)
        spare_ms = 1e3 * (min([view.due_s for view in decodes]) - now) - step_ms if decodes else math.inf
        for transfer in sorted(self._waiting, key=lambda transfer: isinstance(transfer.op, SaveState)):  # loads first
            if not self._makes_sense(transfer):
                self._end(transfer)
                continue
            ms, waited = self.predicted_ms(transfer), now - transfer.asked_at
            if ms <= max(spare_ms, HARDLY_LONGER * step_ms) or (
                waited > OVERRUN_AFTER_S and (transfer.parks or ms <= step_ms)
            ):
                self._waiting.remove(transfer)
                return transfer
            is_load = isinstance(transfer.op, LoadState)
            if waited > TRANSFER_TIMEOUT_S and (is_load or self._planner.blocks_requests):
                transfer.refused = "no step had time for it"
                self._end(transfer)
        return None

    def predicted_ms(self, transfer: Transfer) -> float:
        """How much longer the step takes."""
        match transfer.op:
            case SaveState():
                return self._timings.copy_ms("save", transfer.n_bytes)
            case LoadState():
                return self._timings.copy_ms("load", transfer.n_bytes)
        return 0.0

    def complete(self, transfer: Transfer, output: StepOutput | None) -> None:
        """The step with ``transfer`` is complete; ``None``: it failed."""
        seq_id = transfer.op.seq_id
        if output is None:
            transfer.refused = "the step failed"
        elif isinstance(transfer.op, MeasureState):
            transfer.refused = None
            transfer.sizes = dict(output.state_sizes)[seq_id]
        else:
            transfer.refused = dict(output.refused).get(seq_id)
            if isinstance(transfer.op, SaveState):  # less than there was room for, if some was removed meanwhile
                transfer.n_bytes = output.saved_bytes
            way: Literal["save", "load"] = "save" if isinstance(transfer.op, SaveState) else "load"
            self._timings.record_copy(way, transfer.n_bytes, output.copied_ms)
            self.metrics.record_stall(output.copied_ms)
            if way == "load" and transfer.refused is None:
                self.metrics.record_restore(output.copied_ms - output.verify_ms, output.verify_ms)
        if transfer.state is not None and transfer.refused is not None and not transfer.parks:
            self._suspects.add(transfer.state.name)
        self._end(transfer)

    def _makes_sense(self, transfer: Transfer) -> bool:
        """The allocation still waits for its state, or still has the one that is to be saved."""
        if isinstance(transfer.op, LoadState):
            return self._planner.may_restore(transfer.allocation)
        if transfer.parks:
            return self._cache.holds(transfer.allocation, transfer.n_tokens)
        return self._is_unchanged(transfer.allocation, transfer.checkpoints)

    def _is_unchanged(self, allocation: Allocation, checkpoints: Checkpoints) -> bool:
        return self._planner.may_save(allocation) and allocation.checkpoints == checkpoints

    def _end(self, transfer: Transfer) -> None:
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        if not transfer.done.is_set():
            transfer.done.set()
            if isinstance(transfer.op, LoadState):  # at once, for the plan that follows
                self._swapped_in.append((transfer.allocation, self._loaded(transfer)))

    def _loaded(self, transfer: Transfer) -> SavedState | None:
        """The state that ``transfer`` loaded, if it did."""
        state = transfer.state
        assert state is not None
        if transfer.refused is None:
            if not transfer.parks:
                self.metrics.record_loaded(state.n_bytes, len(state.tokens))
            return state
        if self._planner.may_restore(transfer.allocation):
            log.warning("a saved state was refused; its tokens are computed again", reason=transfer.refused)
            self.metrics.load_failed_total += 1
        return None

    # -- called from outside ----------------------------------------------------------------------

    def open(self, files: StateFiles, states: Iterable[SavedState]) -> None:
        """Save states to ``files`` from now on, and load those that are there.  Before this, no sequence is durable."""
        self._files = files
        self._planner.index.add_all(states)

    async def save_everything(self) -> None:
        """Wait until every idle sequence that should be saved is.  ``run`` must be running."""
        self._after_s = -math.inf
        self._look.set()
        await self._everything_saved.wait()

    def forget(self, tokens: TokenIds, *, principal: str, needed: Callable[[TokenIds], bool]) -> None:
        """Drop what was kept of a session, in the KV cache and on disk.  ``run`` must be running.

        Args:
            needed: whether a list of tokens is the beginning of something that goes on.
        """
        self._remove_soon(self._planner.forget(tokens, principal=principal, needed=needed))
        self._wake()

    async def file_of(self, tokens: TokenIds, principal: str) -> Path | None:
        """The file with the KV cache of a session, which is saved first if that is worth it; ``None`` if there is none.

        Waits ``SAVE_TIMEOUT_S`` at most.  ``run`` must be running.
        """
        if self._files is None:
            return None
        with trio.move_on_after(SAVE_TIMEOUT_S):
            for allocation in self._planner.unsaved_of(tokens, principal=principal):
                await self._swap_out(allocation)
            while self._planner.is_saving:
                await self._saved.wait()
        state, _ = self._planner.index.find(tokens, principal=principal, max_tokens=len(tokens))
        return None if state is None or state.name not in self._files else self._files.path_of(state.name)

    async def adopt(self, path: Path, principal: str) -> None:
        """Take over the KV cache of a session from another daemon's file.  Best effort: otherwise it is prefilled."""
        if self._files is None:
            return
        try:
            state: SavedState = await self._in_thread(self._files.adopt, path, principal)
        except StateFileError as error:
            log.info("the KV cache of a session from another daemon is not used", reason=str(error))
            return
        for name in self._planner.index.add(state):
            await self._remove(name)

    def keep(self, needed: Callable[[SavedState], bool]) -> None:
        """Drop saved states that are not needed.  ``run`` must be running."""
        names = self._planner.index.unneeded(needed)
        for name in names:
            self._planner.index.discard(name)
        self._remove_soon(names)

    def snapshot(self) -> dict[str, Any] | None:
        """Numbers for the metrics; ``None`` where nothing is ever saved."""
        return None if self._files is None else {**snapshot_of(self.metrics), "disk_bytes": self._files.used_bytes}

    # -- next to the ticks ------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Save what is to be saved, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await self._save_idle()
        finally:
            if self._memory is not None:
                self._memory.close()

    async def _save_idle(self) -> None:
        while True:
            self._look = trio.Event()
            allocation = self._planner.to_save(trio.current_time() - self._after_s)
            if allocation is not None:
                await self._swap_out(allocation)
                continue
            if self._after_s < 0 and not self._planner.is_saving:
                self._everything_saved.set()
            with trio.move_on_after(SCAN_INTERVAL_S if self._planner.has_unsaved else math.inf):
                await self._look.wait()

    async def _swap_out(self, allocation: Allocation) -> None:
        """Have a state copied; the file is finished in the background while the next one is copied."""
        assert self._files is not None
        self._planner.begin_save(allocation)
        await self._writing.acquire()
        finishing = False
        try:
            checkpoints = allocation.checkpoints
            measure = MeasureState(allocation.seq_id, tuple([checkpoint.id for checkpoint in checkpoints]))
            measured = await self._run_transfer(Transfer(allocation, measure, checkpoints=checkpoints))
            if measured.refused is not None:
                self._planner.cancel_save(allocation)
                return
            n_bytes = sum(measured.sizes)
            if not self._timings.worth_loading(len(allocation.tokens), n_bytes):
                self.metrics.skipped_total += 1
                self._give_up(allocation)
                return
            try:
                draft: StateDraft = await self._in_thread(self._files.begin, n_bytes)
            except StateFileError as error:
                self._fail(allocation, error)
                return
            sized = zip(checkpoints, measured.sizes[1:], strict=True)
            kept = [(checkpoint, size) for checkpoint, size in sized if size]  # the others are not made yet
            op = SaveState(
                allocation.seq_id,
                draft.fd,
                draft.offset,
                measured.sizes[0],
                tuple([(checkpoint.id, size) for checkpoint, size in kept]),
            )
            saved = await self._run_transfer(Transfer(allocation, op, n_bytes, checkpoints))
            if saved.refused is not None:
                await self._in_thread(draft.abandon)
                if self._is_unchanged(allocation, checkpoints):
                    self._fail(allocation, saved.refused)
                else:
                    self._planner.cancel_save(allocation)
                return
            assert self._nursery is not None
            lengths = tuple([(checkpoint.length, size) for checkpoint, size in kept])
            self._nursery.start_soon(self._finish, saved, draft, lengths)
            finishing = True
        finally:
            if not finishing:
                self._end_save()

    async def _run_transfer(self, transfer: Transfer) -> Transfer:
        """Have a step make ``transfer``, and wait for it."""
        self._waiting.append(transfer)
        try:
            self._wake()
            await transfer.done.wait()
        finally:
            self._end(transfer)
        return transfer

    async def _finish(self, transfer: Transfer, draft: StateDraft, checkpoints: tuple[tuple[int, int], ...]) -> None:
        """Turn what was copied into a file that lasts."""
        assert self._files is not None
        allocation, n_bytes = transfer.allocation, transfer.n_bytes
        finish = functools.partial(
            draft.finish,
            allocation.tokens,
            principal=allocation.principal,
            n_bytes=n_bytes,
            checkpoints=checkpoints,
            adapters=allocation.adapters.key,
        )
        try:
            state: SavedState = await self._in_thread(finish)
        except StateFileError as error:
            self._fail(allocation, error)
        else:
            self.metrics.record_saved(n_bytes)
            files, index = self._files, self._planner.index
            index.retain(lambda name: name in files)
            for name in self._planner.saved(allocation, state):
                await self._remove(name)
            self._wake()
        finally:
            self._end_save()
            self.check_for_work()

    def _end_save(self) -> None:
        self._writing.release()
        self._saved.set()
        self._saved = trio.Event()

    async def _park(self, allocation: Allocation, tokens: TokenIds) -> None:
        state = None
        try:
            state = await self._copy_to_memory(allocation, tokens)
        except StateFileError as error:
            log.info("a stream that loses its place will be computed again", reason=str(error))
        finally:
            self._parked.append((allocation, state))
            self._wake()

    async def _copy_to_memory(self, allocation: Allocation, tokens: TokenIds) -> SavedState | None:
        """A copy of what ``allocation`` holds; ``None`` if that changes meanwhile.

        Raises:
            StateFileError: there is no memory for it.
        """
        assert self._memory is not None
        n, (known, n_bytes) = len(tokens), self._measured
        if not known / 2 <= n <= known:  # fewer tokens never take more bytes, and a request waits
            measure = MeasureState(allocation.seq_id)
            measured = await self._run_transfer(Transfer(allocation, measure, n_tokens=n, parks=True))
            if measured.refused is not None:
                return None
            [n_bytes] = measured.sizes
            self._measured = n, n_bytes
        draft = await self._in_thread(self._memory.begin, n_bytes)
        op = SaveState(allocation.seq_id, draft.fd, 0, n_bytes)
        saved = Transfer(allocation, op, n_bytes, n_tokens=n, parks=True)
        await self._run_transfer(saved)
        if saved.refused is not None or not self._makes_sense(saved):
            await self._remove(draft.name)
            return None
        return SavedState(draft.name, allocation.principal, tokens, saved.n_bytes, adapters=allocation.adapters.key)

    async def _swap_in(self, allocation: Allocation, state: SavedState) -> None:
        is_parked = self._is_parked(state)
        began = time.perf_counter()
        try:
            reader = await self._open(state)
        except StateFileError as error:
            log.warning("a saved state cannot be used; its tokens are computed again", reason=str(error))
            self.metrics.load_failed_total += 1
            self._swapped_in.append((allocation, None))
            self._wake()
            return
        prepared_ms = 1e3 * (time.perf_counter() - began)
        self.metrics.prepare_ms.add(prepared_ms)
        if not reader.hashes and not is_parked:
            self._timings.record_copy("read", state.n_bytes, prepared_ms)
        try:
            ids = {checkpoint.length: checkpoint.id for checkpoint in self._planner.begin_restore(allocation, state)}
            checkpoints = tuple([(ids.get(length), size) for length, size in state.checkpoints])
            n_bytes = state.n_bytes - sum([size for _, size in checkpoints])
            op = LoadState(
                allocation.seq_id,
                len(state.tokens),
                reader.fd,
                reader.offset,
                n_bytes,
                checkpoints,
                standing=tuple(standing_runs(state.tokens)),
                hashes=reader.hashes,
            )
            await self._run_transfer(Transfer(allocation, op, state.n_bytes, allocation.checkpoints, state, is_parked))
            self._wake()
        finally:
            await self._in_thread(reader.close)
        if is_parked:
            await self._remove(state.name)
        elif state.name in self._suspects:
            await self._verify(state)

    def _is_parked(self, state: SavedState) -> bool:
        return self._memory is not None and state.name in self._memory

    async def _open(self, state: SavedState) -> StateReader:
        """Open a file, for the engine to verify unless it has failed to load it; one that cannot be used is forgotten."""
        files, verify = self._memory if self._is_parked(state) else self._files, state.name in self._suspects
        assert files is not None
        try:
            reader: StateReader = await self._in_thread(lambda: files.open(state.name, verify=verify))
        except StateFileError:
            self._planner.index.discard(state.name)
            raise
        return reader

    async def _verify(self, state: SavedState) -> None:
        """Forget a state that the engine did not load, if its file is damaged."""
        try:
            reader = await self._open(state)
        except StateFileError as error:
            log.warning("a saved state cannot be used", reason=str(error))
        else:
            await self._in_thread(reader.close)

    def _give_up(self, allocation: Allocation) -> None:
        self._planner.give_up(allocation)
        self._wake()

    def _fail(self, allocation: Allocation, reason: object) -> None:
        """Do not save ``allocation``; its tokens will be computed again."""
        log.warning("a sequence could not be saved", reason=str(reason), tokens=len(allocation.tokens))
        self.metrics.save_failed_total += 1
        self._give_up(allocation)

    async def _remove(self, name: str) -> None:
        files = self._memory if self._memory is not None and name in self._memory else self._files
        if files is None:
            return
        try:
            await self._in_thread(files.remove, name)
        except StateFileError as error:
            log.warning("a saved state could not be removed", reason=str(error))

    def _remove_soon(self, names: Sequence[str]) -> None:
        for name in names:
            assert self._nursery is not None
            self._nursery.start_soon(self._remove, name)
