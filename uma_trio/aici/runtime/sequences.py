"""Live sequences and the steps that they make: post, pre, fork, mid."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from uma_trio.aici.biases import open_rows
from uma_trio.aici.messages import (
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
from uma_trio.aici.runtime.calls import Call, CallThreads
from uma_trio.aici.runtime.interface import ALLOWED, ControllerError, Limits, Row
from uma_trio.aici.runtime.live_sequence import LiveSequence, MidCall, PostPreCall, WorkerError, worker_error
from uma_trio.aici.runtime.waiting import WaitingControllers
from uma_trio.aici.shared_memory import SharedMemory

T = TypeVar("T")

GRACE_S: Final = 0.1
"""How long after its deadline a controller may take to stop; then it is left to itself."""


class Sequences:
    """All live sequences of the engine.  Used by one thread.

    An operation that is wrong has an error of its own; the other ones go on.

    Args:
        biases: receives the rows of ``mid``.
        skip_slow_s: a controller that has not answered its mid after this time is left out of the step; ``None``: never.
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
        calls = []
        for id, sequence in self._live.items():
            if id in post_errors:
                pres.setdefault(id, worker_error(post_errors[id]))
            elif sequence.slow_mid is not None:  # it has begun this step already
                pres.setdefault(id, SequenceResult("", PreResult(), [], "", 0))
            elif id in post_ops or id not in pre_errors:
                calls.append(PostPreCall(sequence, post_ops.get(id), id not in pre_errors, deadline))
        self._run(calls, calls, deadline + GRACE_S)
        for call in calls:
            call.give_up()
            id = call.sequence.id
            if call.op is not None:
                posts[id] = call.post or worker_error(call.dead)
            if call.wants_pre:
                pres[id] = call.pre if call.pre and not call.dead else worker_error(call.dead)
            if call.dead:
                self._drop(id, call)
        for id in request.freed:
            self._drop(id)
        return PostPreAnswer(_by_text(posts), _by_text(pres))

    def _post_errors(self, ops: Sequence[PostOp]) -> dict[int, str]:
        errors = {}
        for id, n in Counter(op.id for op in ops).items():
            if id not in self._live:
                errors[id] = f"invalid id {id}"
            elif n > 1:
                errors[id] = f"duplicate id {id}"
            elif self._live[id].slow_mid is not None:
                errors[id] = _unanswered(id)
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
                self._live[op.id] = LiveSequence(op.id, op.req_id, controller, self._n_vocab)
        return errors

    def mid(self, request: MidProcess) -> MidAnswer:
        """Ask which tokens are allowed next.  Their rows are in shared memory when this returns.

        Raises:
            TooManyRows, OSError: see ``open_rows``.
        """
        rows = open_rows(self._biases, len(request.ops), self._n_vocab)
        rows[:] = ALLOWED
        deadline = self._deadline(self._limits.max_step_ms)
        errors = self._fork_all(request.ops)
        answers: dict[int, SequenceResult[MidResult]] = {id: worker_error(why) for id, why in errors.items()}
        groups: dict[int, list[int]] = {}
        for op in request.ops:
            if op.id not in errors:
                groups.setdefault(_parent(op), []).append(op.id)
        new: list[MidCall] = []
        calls: dict[int, MidCall] = {}
        for op in request.ops:
            if op.id in errors:
                continue
            sequence = self._live[op.id]
            if sequence.slow_mid is None:
                sequence.slow_mid = MidCall(sequence, groups[_parent(op)], deadline)
                new.append(sequence.slow_mid)
            calls[op.id] = sequence.slow_mid
        until = max((call.deadline for call in calls.values()), default=deadline) + GRACE_S
        if self._skip_slow_s is not None:
            until = min(until, time.monotonic() + self._skip_slow_s)
        self._run(new, calls.values(), until)
        for n, op in enumerate(request.ops):
            if op.id in calls:
                answers[op.id] = self._mid_answer(calls[op.id], rows[n])
        return MidAnswer(_by_text(answers), len(request.ops))

    def _fork_all(self, ops: Sequence[MidOp]) -> dict[int, str]:
        """Make all forks of a step; returns errors by sequence."""
        errors = {id: f"duplicate id {id}" for id, n in Counter(op.id for op in ops).items() if n > 1}
        for op in ops:
            if op.id in errors:
                continue
            sequence = self._live.get(op.id)
            # a fork that was skipped may be asked for again with the same operation
            if op.clone_id is not None and not (sequence and sequence.slow_mid):
                try:
                    self._fork(op.clone_id, op.id)
                except WorkerError as error:
                    errors[op.id] = str(error)
            elif sequence is None:
                errors[op.id] = f"invalid id {op.id}"
        return errors

    def _fork(self, parent_id: int, id: int) -> None:
        parent = self._live.get(parent_id)
        if parent is None:
            raise WorkerError(f"invalid clone_id {parent_id}")
        if id in self._live:
            raise WorkerError(f"duplicate id {id}")
        if parent.slow_mid is not None:
            raise WorkerError(_unanswered(parent_id))
        if sum(each.req_id == parent.req_id for each in self._live.values()) + 1 > self._limits.max_forks:
            raise WorkerError(f"too many forks (max={self._limits.max_forks})")
        try:
            controller = parent.controller.fork(id)
        except ControllerError as error:
            raise WorkerError(f"cannot fork {parent_id}: {error}") from None
        self._live[id] = LiveSequence(id, parent.req_id, controller, self._n_vocab)

    def _mid_answer(self, call: MidCall, row: Row) -> SequenceResult[MidResult]:
        """The answer, with its biases in ``row``."""
        sequence = call.sequence
        if not call.is_finished and time.monotonic() < call.deadline + GRACE_S:
            return SequenceResult("", None, [], "", 0, skipped=True)
        call.give_up()
        sequence.slow_mid = None
        if call.dead or call.answer is None:
            self._drop(sequence.id, call)
            return worker_error(call.dead)
        row[:] = call.row
        return call.answer

    def close(self) -> None:
        """Drop all sequences."""
        for id in list(self._live):
            self._drop(id)

    def _run(self, new: Sequence[Call], awaited: Iterable[Call], until: float) -> None:
        self._threads.start(new)
        self._threads.wait(awaited, until)

    def _drop(self, id: int, call: Call | None = None) -> None:
        """Forget a sequence, and close its controller as soon as ``call``, or its mid, does not use it."""
        sequence = self._live.pop(id, None)
        if sequence is None:
            return
        call = call or sequence.slow_mid
        if call is not None:
            self._threads.abandon(call)
        else:
            sequence.controller.close()

    def _deadline(self, limit_ms: int) -> float:
        return time.monotonic() + (limit_ms + self._limits.second_chance_ms) / 1000


def _unanswered(id: int) -> str:
    return f"{id} has not answered mid_process yet"


def _parent(op: MidOp) -> int:
    return op.id if op.clone_id is None else op.clone_id


def _by_text(found: dict[int, T]) -> dict[str, T]:
    return {str(id): each for id, each in found.items()}
