"""Live sequences and the steps that they make: post, pre, fork, mid."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from uma_trio.aici.runtime.calls import CallThreads
from uma_trio.aici.runtime.interface import ALLOWED, BadRequest, Limits, Row
from uma_trio.aici.runtime.live_sequence import (
    ControllerCall,
    ForkCall,
    LiveSequence,
    MidCall,
    PostPreCall,
    worker_error,
)
from uma_trio.aici.runtime.waiting import WaitingControllers
from uma_trio.aici_link.messages import (
    MidAnswer,
    MidOp,
    MidProcess,
    MidResult,
    PostOp,
    PostPreAnswer,
    PostPreProcess,
    PostResult,
    PreOp,
    PreResult,
    SequenceResult,
)
from uma_trio.aici_link.shared_memory import SharedMemory

T = TypeVar("T")

GRACE_S: Final = 0.1
"""How long after its deadline a controller may take to stop; then it is left to itself."""


class Sequences:
    """All live sequences of the daemon.  Used by one thread.

    An operation that is wrong has an error of its own; the other ones go on.

    Args:
        biases: receives the rows of ``mid``.
        skip_slow_s: a controller that has not answered after this time is left out of the step; ``None``: never.
    """

    def __init__(
        self,
        n_vocab: int,
        limits: Limits,
        waiting: WaitingControllers,
        biases: SharedMemory,
        skip_slow_s: float | None = None,
    ) -> None:
        self._n_vocab = n_vocab
        self._limits = limits
        self._waiting = waiting
        self._biases = biases
        self._skip_slow_s = skip_slow_s
        self._live: dict[int, LiveSequence] = {}
        self._threads = CallThreads()

    def post_pre(self, request: PostPreProcess) -> PostPreAnswer:
        """End a step and begin the next one."""
        deadline = self._deadline(self._limits.max_pre_step_ms)
        post_errors = self._post_errors(request.post_ops)
        pre_errors = self._assign(request.pre_ops)
        post_ops = {op.id: op for op in request.post_ops if op.id not in post_errors}
        posts: dict[int, SequenceResult[PostResult]] = {id: worker_error(why) for id, why in post_errors.items()}
        pres: dict[int, SequenceResult[PreResult]] = {id: worker_error(why) for id, why in pre_errors.items()}
        new: list[PostPreCall] = []
        late: list[PostPreCall] = []
        for id, sequence in self._live.items():
            if id in post_errors:
                pres.setdefault(id, worker_error(post_errors[id]))
            elif isinstance(sequence.late, PostPreCall):
                late.append(sequence.late)
            elif sequence.late is not None:  # a mid, so the sequence has had its pre in this step
                pres.setdefault(id, SequenceResult("", PreResult()))
            elif id in post_ops or id not in pre_errors:
                new.append(PostPreCall(sequence, post_ops.get(id), id not in pre_errors, deadline))
        calls = [*new, *late]
        self._threads.start(new)
        self._wait(calls, deadline)
        for call in calls:
            self._take_post_pre(call, posts, pres)
        for id in request.freed:
            self._drop(id)
        return PostPreAnswer(_with_text_ids(posts), _with_text_ids(pres))

    def _take_post_pre(
        self,
        call: PostPreCall,
        posts: dict[int, SequenceResult[PostResult]],
        pres: dict[int, SequenceResult[PreResult]],
    ) -> None:
        """Add the results of ``call``.  A sequence whose controller is late is suspended until it has answered."""
        sequence = call.sequence
        id = sequence.id
        was_late, sequence.late = sequence.late is not None, None
        if self._may_go_on(call):
            sequence.late = call
            if call.op is not None and not was_late:
                posts[id] = SequenceResult("", PostResult(), skipped=True)
            if call.wants_pre or was_late:
                pres[id] = SequenceResult("", PreResult(suspend=True), skipped=True)
            return
        call.give_up()
        if was_late:
            pres[id] = worker_error(call.dead, call.last_logs) if call.dead else call.pre_with_post()
        else:
            if call.op is not None:
                posts[id] = call.post or worker_error(call.dead, call.last_logs)
            if call.wants_pre:
                pres[id] = call.pre if call.pre and not call.dead else worker_error(call.dead, call.last_logs)
        if call.dead:
            self._drop(id, call)

    def _post_errors(self, ops: Sequence[PostOp]) -> dict[int, str]:
        errors = {}
        for id, n in Counter(op.id for op in ops).items():
            if id not in self._live:
                errors[id] = f"invalid id {id}"
            elif n > 1:
                errors[id] = f"duplicate id {id}"
            elif (late := self._live[id].late) is not None:
                errors[id] = _unanswered(id, late)
        return errors

    def _assign(self, ops: Sequence[PreOp]) -> dict[int, str]:
        """Give waiting controllers to new sequences; returns errors by sequence."""
        errors = {}
        for op in ops:
            if op.id in self._live:
                errors[op.id] = f"duplicate id {op.id}"
            elif (controller := self._waiting.take(op.req_id)) is None:
                errors[op.id] = f"invalid req_id {op.req_id}"
            else:
                controller.assign(op.id)
                self._live[op.id] = LiveSequence(op.id, op.req_id, self._n_vocab, controller)
        return errors

    def mid(self, request: MidProcess) -> MidAnswer:
        """Ask which tokens are allowed next.  Their rows are in shared memory when this returns.

        Raises:
            BadRequest, OSError: see ``_open_rows``.
        """
        rows = _open_rows(self._biases, len(request.ops), self._n_vocab)
        rows[:] = ALLOWED
        deadline = self._deadline(self._limits.max_step_ms)
        errors = self._mid_errors(request.ops)
        answers: dict[int, SequenceResult[MidResult]] = {id: worker_error(why) for id, why in errors.items()}
        groups: dict[int, list[int]] = {}
        for op in request.ops:
            if op.id not in errors:
                groups.setdefault(_parent(op), []).append(op.id)
        calls: dict[int, MidCall] = {}
        for parent_id, group in groups.items():
            new = []
            for id in group:
                sequence = self._live[id]
                if sequence.late is None:
                    sequence.late = MidCall(sequence, group, deadline)
                    new.append(sequence.late)
                assert isinstance(sequence.late, MidCall)
                calls[id] = sequence.late
            self._start_group(self._live[parent_id], new)
        self._wait(calls.values(), deadline)
        for n, op in enumerate(request.ops):
            if op.id in calls:
                answers[op.id] = self._mid_answer(calls[op.id], rows[n])
        return MidAnswer(_with_text_ids(answers), len(request.ops))

    def _mid_errors(self, ops: Sequence[MidOp]) -> dict[int, str]:
        """Refuse operations that are wrong, and add a sequence for each fork; returns errors by sequence."""
        errors = {id: f"duplicate id {id}" for id, n in Counter(op.id for op in ops).items() if n > 1}
        for op in ops:
            if op.id not in errors and (why := self._mid_error(op)):
                errors[op.id] = why
        return errors

    def _mid_error(self, op: MidOp) -> str:
        sequence = self._live.get(op.id)
        # a fork that was skipped may be asked for again with the same operation
        if op.clone_id is not None and not (sequence and isinstance(sequence.late, MidCall)):
            return self._add_fork(op.clone_id, op.id)
        if sequence is None:
            return f"invalid id {op.id}"
        return _unanswered(op.id, sequence.late) if isinstance(sequence.late, PostPreCall) else ""

    def _add_fork(self, parent_id: int, id: int) -> str:
        """Add a sequence whose controller is made later; or returns why not."""
        parent = self._live.get(parent_id)
        if parent is None or parent.controller is None:
            return f"invalid clone_id {parent_id}"
        if id in self._live:
            return f"duplicate id {id}"
        if parent.late is not None:
            return _unanswered(parent_id, parent.late)
        if sum(live.req_id == parent.req_id for live in self._live.values()) + 1 > self._limits.max_forks:
            return f"too many forks (max={self._limits.max_forks})"
        self._live[id] = LiveSequence(id, parent.req_id, self._n_vocab)
        return ""

    def _start_group(self, parent: LiveSequence, calls: list[MidCall]) -> None:
        """Start the mids of a sequence and its forks, which have to be made first."""
        if all(call.sequence.controller for call in calls):
            self._threads.start(calls)
            return
        forks = ForkCall(parent, calls, self._threads)
        if any(call.sequence is parent for call in calls):
            self._threads.start([forks])
        else:  # nothing keeps the parent from its next call: fork it now
            forks.function()

    def _mid_answer(self, call: MidCall, row: Row) -> SequenceResult[MidResult]:
        """The answer, with its biases in ``row``."""
        sequence = call.sequence
        if self._may_go_on(call):
            return SequenceResult("", None, skipped=True)
        call.give_up()
        sequence.late = None
        if call.dead or call.answer is None:
            self._drop(sequence.id, call)
            return worker_error(call.dead, call.last_logs)
        row[:] = call.row
        return call.answer

    def drop(self, ids: Iterable[int]) -> None:
        """Forget sequences."""
        for id in ids:
            self._drop(id)

    def _wait(self, calls: Iterable[ControllerCall], deadline: float) -> None:
        """Wait for calls until the last deadline, or as long as a step may wait."""
        calls = [*calls]
        until = max((call.deadline for call in calls), default=deadline) + GRACE_S
        if self._skip_slow_s is not None:
            until = min(until, time.monotonic() + self._skip_slow_s)
        self._threads.wait(calls, until)

    def _may_go_on(self, call: ControllerCall) -> bool:
        """Whether a step goes on without the answer of ``call``.  A later step then takes the answer."""
        return not call.is_finished and self._skip_slow_s is not None and time.monotonic() < call.deadline + GRACE_S

    def _drop(self, id: int, call: ControllerCall | None = None) -> None:
        """Forget a sequence, and close its controller, at once or when ``call`` or the late call ends."""
        sequence = self._live.pop(id, None)
        if sequence is None:
            return
        call = call or sequence.late
        if call is not None:
            self._threads.abandon(call)
        else:
            sequence.close()

    def _deadline(self, limit_ms: int) -> float:
        return time.monotonic() + (limit_ms + self._limits.second_chance_ms) / 1000


def _unanswered(id: int, late: ControllerCall) -> str:
    return f"{id} has not answered {late.phase} yet"


def _parent(op: MidOp) -> int:
    return op.id if op.clone_id is None else op.clone_id


def _with_text_ids(by_id: dict[int, T]) -> dict[str, T]:
    return {str(id): value for id, value in by_id.items()}


def _open_rows(memory: SharedMemory, n_rows: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """The biases of ``n_rows`` sequences, shape ``[n_rows, n_vocab]``: a view of the shared memory.

    The engine adds a row to the logits of a sequence.  The runtime overwrites the rows in the next ``mid_process``.
    The view must be gone before the memory is closed.

    Raises:
        BadRequest: the shared memory is too small for a row for each sequence.
        OSError: no room in shared memory.
    """
    n_bytes = n_rows * n_vocab * 4
    if memory.size <= n_bytes:
        raise BadRequest(f"shm size too small: {memory.size} bytes for {n_rows} rows of {n_vocab} floats")
    memory.reserve(0, n_bytes)
    return np.frombuffer(memory.map, "<f4", n_rows * n_vocab).reshape(n_rows, n_vocab)
