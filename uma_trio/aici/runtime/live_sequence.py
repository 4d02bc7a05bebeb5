"""One live sequence: the calls into its controller, and what the engine gets of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import attrs
import numpy as np

from uma_trio.aici.messages import MidResult, PostOp, PostResult, PreResult, SequenceResult
from uma_trio.aici.runtime.calls import Call
from uma_trio.aici.runtime.interface import (
    Controller,
    ControllerError,
    ControllerTimeout,
    Row,
    Splice,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FF_ROUNDS: Final = 10


class WorkerError(Exception):
    """The sequence cannot go on, for a reason outside its controller's program."""


@attrs.define(eq=False)
class LiveSequence:
    """A sequence of the engine, and the controller that steers it."""

    id: int
    req_id: str
    controller: Controller
    n_vocab: int
    row: Row | None = None
    """Biases of its last mid.  Not in shared memory: a controller that is late must not write into the next step."""
    slow_mid: MidCall | None = None
    """A mid that has no answer yet.  Between two steps only if the step ended without it."""


class ControllerCall(Call):
    """A call into the controller of a sequence; the controller is closed if the call is abandoned.

    Args:
        deadline: when the controller is stopped.
    """

    def __init__(self, sequence: LiveSequence, deadline: float) -> None:
        super().__init__(self._run, sequence.controller.close)
        self.sequence = sequence
        self.deadline = deadline
        self.dead = ""
        """Why the sequence cannot go on; empty if it can."""

    def give_up(self) -> None:
        """Say that the call takes too long, unless it has finished."""
        if not self.is_finished:
            self.dead = "timeout"

    def _run(self) -> None:
        try:
            self._call()
        except WorkerError as error:
            self.dead = str(error)

    def _call(self) -> None:
        raise NotImplementedError


class PostPreCall(ControllerCall):
    """Post, if the engine has appended tokens, then pre."""

    def __init__(self, sequence: LiveSequence, op: PostOp | None, wants_pre: bool, deadline: float) -> None:
        super().__init__(sequence, deadline)
        self.op = op
        self.wants_pre = wants_pre
        self.post: SequenceResult[PostResult] | None = None
        self.pre: SequenceResult[PreResult] | None = None

    def _call(self) -> None:
        op = self.op
        if op is not None:
            self.post = _timed("post", self.sequence, PostResult(stop=True), lambda: self._post(op))
        if self.wants_pre:
            self.pre = _timed("pre0", self.sequence, PreResult(), self._pre)

    def _post(self, op: PostOp) -> PostResult:
        # the number in messages counts a token that the controller has never seen
        backtrack = max(0, op.backtrack - 1)
        return PostResult(self.sequence.controller.post_process(op.tokens, backtrack, deadline=self.deadline))

    def _pre(self) -> PreResult:
        """Run pre until the controller appends no more tokens."""
        controller = self.sequence.controller
        appended: list[int] = []
        for _ in range(MAX_FF_ROUNDS + 1):
            found = controller.pre_process(deadline=self.deadline)
            if not found.ff_tokens:
                return PreResult(found.suspend, found.num_forks, appended)
            appended += found.ff_tokens
            if controller.post_process(found.ff_tokens, 0, deadline=self.deadline):
                return PreResult(num_forks=0, ff_tokens=appended)
        controller.close()
        raise ControllerError("too many ff_tokens rounds from pre_process")


class MidCall(ControllerCall):
    """Mid, which makes the biases of ``sequence.row``.

    Args:
        fork_group: the sequence and those that were forked from the same one in this step.
    """

    def __init__(self, sequence: LiveSequence, fork_group: Sequence[int], deadline: float) -> None:
        super().__init__(sequence, deadline)
        self.fork_group = fork_group
        if sequence.row is None:
            sequence.row = np.empty(sequence.n_vocab, np.float32)
        self.row = sequence.row
        self.answer: SequenceResult[MidResult] | None = None

    def _call(self) -> None:
        self.answer = _timed("mid", self.sequence, None, self._mid)

    def _mid(self) -> MidResult | None:
        action = self.sequence.controller.mid_process(self.fork_group, self.row, deadline=self.deadline)
        if not isinstance(action, Splice):
            return None
        # in messages, the number counts the token that would be sampled now
        return MidResult(list(action.ff_tokens), action.backtrack + 1 if action.backtrack else 0)


def worker_error(reason: str) -> SequenceResult[T]:
    """The result of a sequence that cannot go on, or of an operation that is wrong."""
    text = f"Worker: {reason}"
    return SequenceResult(text, None, [], text, 0)


def _timed(
    phase: str, sequence: LiveSequence, after_error: T | None, function: Callable[[], T | None]
) -> SequenceResult[T]:
    """The result of a call into the controller.

    Args:
        after_error: the result if the controller fails.

    Raises:
        WorkerError: the controller was stopped.
    """
    controller = sequence.controller
    started = time.perf_counter_ns()
    try:
        result = function()
    except ControllerError as error:
        found = _controller_error(phase, after_error, str(error), controller.take_logs(), _micros(started))
        found.storage.extend(controller.take_storage())
        return found
    except ControllerTimeout:
        raise WorkerError("timeout") from None
    except Exception as error:
        log.exception("sequence %s", sequence.id)
        raise WorkerError(f"internal error: {error!r}") from None
    return SequenceResult("", result, controller.take_storage(), controller.take_logs(), _micros(started))


def _controller_error(phase: str, result: T | None, message: str, logs: str, micros: int) -> SequenceResult[T]:
    if logs and not logs.endswith("\n"):
        logs += "\n"
    text = f"Error ({phase}): {logs}{message}"
    return SequenceResult(text, result, [], logs + text, micros)


def _micros(started_ns: int) -> int:
    return (time.perf_counter_ns() - started_ns) // 10_000 * 10
