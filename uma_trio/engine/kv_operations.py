"""KV operations on a llama.cpp context: truncate, copy, checkpoints, and states into files and back.

``engine_link.kv_ops`` says what each operation means.  ``state_check`` verifies a state while it is loaded.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, assert_never

import attrs

import llama_abi
from uma_trio.engine.positions import Positions
from uma_trio.engine.state_check import DamagedState, StateCheck
from uma_trio.engine_link.kv_ops import (
    CopyPrefix,
    DropCheckpoint,
    KvOp,
    LoadState,
    MeasureState,
    SaveCheckpoint,
    SaveState,
    Truncate,
)
from uma_trio.engine_link.messages import EngineError

MAX_THREADS: Final = 4
"""Most threads that verify a state next to its copy."""


@attrs.define
class KvOutcome:
    """What the KV operations of a step took and found; the fields mean the same as in ``StepOutput``."""

    copied_ms: float = 0.0
    checkpoints_ms: float = 0.0
    """Time to save checkpoints."""
    verify_ms: float = 0.0
    saved_bytes: int = 0
    refused: list[tuple[int, str]] = attrs.field(factory=list)
    state_sizes: list[tuple[int, list[int]]] = attrs.field(factory=list)


NO_OUTCOME: Final = KvOutcome()


class KvOperations:
    """Carries out KV operations, and keeps the checkpoints of sequences.

    Args:
        unified: the contexts have a unified KV cache.
        n_threads: cores that are free for verifying states; no more than ``MAX_THREADS`` are used.
        positions: of the tokens of all sequences.
    """

    def __init__(self, *, unified: bool, n_threads: int, positions: Positions) -> None:
        self._unified = unified
        self._positions = positions
        self._checkpoints: dict[int, bytearray] = {}
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, n_threads), "uma-state")

    @property
    def n_checkpoints(self) -> int:
        return len(self._checkpoints)

    def apply(self, ops: Sequence[KvOp], context: llama_abi.Context) -> KvOutcome:
        """Carry out ``ops`` in their order.  Blocks while states are copied.

        A state that cannot be saved or loaded is in ``refused``, and the other operations go on.

        Raises:
            EngineError: the memory cannot remove the end of a sequence, or damaged keys and values were copied.
        """
        outcome = KvOutcome()
        for op in ops:
            began = time.perf_counter()
            match op:
                case Truncate():
                    self._truncate(context, op.seq_id, op.length, op.checkpoint)
                case CopyPrefix() if self._unified and op.checkpoint is None:
                    context.seq_copy(op.source, op.target, 0, self._positions.of(op.source, op.length))
                    self._positions.copy(op.source, op.target, op.length)
                case CopyPrefix():  # between streams llama.cpp copies all, and a recurrent state is that of the whole
                    context.seq_copy(op.source, op.target)
                    self._positions.copy(op.source, op.target, op.length)
                    self._truncate(context, op.target, op.length, op.checkpoint)
                case SaveCheckpoint():
                    state = bytearray(context.state_size(op.seq_id, flags=llama_abi.PARTIAL_ONLY))
                    context.save_state_into(op.seq_id, state, flags=llama_abi.PARTIAL_ONLY)
                    self._checkpoints[op.checkpoint] = state
                    outcome.checkpoints_ms += 1e3 * (time.perf_counter() - began)
                case DropCheckpoint():
                    self._checkpoints.pop(op.checkpoint, None)
                case MeasureState():
                    sizes = [len(self._checkpoints.get(number, b"")) for number in op.checkpoints]
                    outcome.state_sizes.append((op.seq_id, [context.state_size(op.seq_id), *sizes]))
                case SaveState() | LoadState():
                    try:
                        if isinstance(op, SaveState):
                            outcome.saved_bytes += self._save_state(context, op)
                        else:
                            outcome.verify_ms += self._load_state(context, op)
                    except (llama_abi.LlamaError, DamagedState, OSError, ValueError) as error:
                        outcome.refused.append((op.seq_id, str(error)))
                    outcome.copied_ms += 1e3 * (time.perf_counter() - began)
                case _:  # without this, an operation without a case would be skipped in silence
                    assert_never(op)
        return outcome

    def reset(self) -> None:
        """Forget all sequences: the context that they belong to is closed."""
        self._checkpoints.clear()
        self._positions.clear()

    def close(self) -> None:
        """Wait for the threads, which let go of the files then."""
        self._threads.shutdown()

    def _truncate(self, context: llama_abi.Context, seq_id: int, length: int, checkpoint: int | None) -> None:
        """Load the checkpoint first, then remove the tail: before that a recurrent memory refuses."""
        if checkpoint is not None:
            context.load_state_from(seq_id, self._checkpoints[checkpoint], flags=llama_abi.PARTIAL_ONLY)
        if not context.seq_remove(seq_id, self._positions.of(seq_id, length) or -1):
            raise EngineError(f"the model's memory cannot remove the end of sequence {seq_id}")
        self._positions.cut(seq_id, length)

    def _save_state(self, context: llama_abi.Context, op: SaveState) -> int:
        """Write a state into a file; returns the number of bytes.

        Raises:
            llama_abi.LlamaError, OSError, ValueError: the state was not saved.
        """
        total = op.n_bytes + sum([size for _, size in op.checkpoints])
        with mapped(op.fd, op.offset, total, self._threads, write=True) as view:
            written: int = context.save_state_into(op.seq_id, view[: op.n_bytes])
            if op.checkpoints and written != op.n_bytes:
                raise ValueError(f"the state has {written} bytes, so its checkpoints would not follow it")
            at = op.n_bytes
            for number, size in op.checkpoints:
                state = self._checkpoints.get(number, b"")
                if not state or len(state) != size:
                    raise ValueError(f"checkpoint {number} has {len(state)} bytes, its place in the file {size}")
                view[at : at + size] = state
                at += size
        return total if op.checkpoints else written

    def _load_state(self, context: llama_abi.Context, op: LoadState) -> float:
        """Load a state; returns the milliseconds in which only verifying it was left to do.

        Raises:
            llama_abi.LlamaError, DamagedState, OSError, ValueError: the state was not loaded, and the sequence is empty.
            EngineError: damaged keys and values were copied.
        """
        total = op.n_bytes + sum([size for _, size in op.checkpoints])
        with (
            mapped(op.fd, op.offset, total, self._threads, populate=not op.hashes) as view,
            StateCheck(view, op.hashes, self._threads) as check,
        ):
            began = time.perf_counter()
            try:
                check.begin(op.n_bytes)
                waited_s = time.perf_counter() - began
                context.load_state_from(op.seq_id, view[: op.n_bytes])
                began = time.perf_counter()
                _wait_for_rest(check)
                waited_s += time.perf_counter() - began
                self._positions.set(op.seq_id, op.standing)
                end, expected = context.seq_pos_max(op.seq_id) + 1, self._positions.of(op.seq_id, op.length)
                if end != expected:
                    raise ValueError(f"the state ends at position {end} instead of {expected}")
            except (llama_abi.LlamaError, DamagedState, ValueError):
                context.seq_remove(op.seq_id)
                self._positions.cut(op.seq_id, 0)
                raise
            at = op.n_bytes
            for number, size in op.checkpoints:
                if number is not None:
                    self._checkpoints[number] = bytearray(view[at : at + size])
                at += size
        return 1e3 * waited_s


def _wait_for_rest(check: StateCheck) -> None:
    """Wait until the whole state is verified.

    Damaged keys and values stay in cells that are free again.  Attention reads free cells, and one NaN in them is
    enough to spoil other sequences.  Only a new context clears such cells.

    Raises:
        EngineError: the state was damaged, and had been copied.
    """
    try:
        check.wait()
    except DamagedState as error:
        raise EngineError(f"a saved state was damaged and had been copied: {error}") from error


@contextlib.contextmanager
def mapped(
    fd: int, offset: int, n_bytes: int, threads: Executor, *, write: bool = False, populate: bool = False
) -> Iterator[memoryview]:
    """``n_bytes`` of an open file from ``offset`` on, as memory.

    Args:
        threads: one of them unmaps it, which takes some 30 ms for each GB.
        populate: one system call instead of a page fault every 4 KiB.  For writing it would fault every page in twice.

    Raises:
        OSError, ValueError: the file cannot be mapped, or is shorter.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    mapping = mmap.mmap(fd, offset - start + n_bytes, flags, protection, offset=start)
    view = memoryview(mapping)[offset - start :]
    try:
        yield view
    finally:
        view.release()
        threads.submit(_unmap, mapping)


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an error's traceback refers to a part of it, and unmaps it when it goes
        mapping.close()
