"""One live sequence: the calls into its controller, and what the daemon gets of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import attrs
import numpy as np

from uma_trio.aici.runtime.calls import Call, CallThreads
from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.interface import (
    ControllerError,
    ControllerTimeout,
    Row,
    Splice,
)
from uma_trio.aici_link.messages import ENDED, MidResult, PostOp, PostResult, PreResult, SequenceResult

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FF_ROUNDS: Final = 10


class WorkerError(Exception):
    """The sequence cannot go on, for a reason outside its controller's program."""

    def __init__(self, reason: str, logs: str = "") -> None:
        super().__init__(reason)
        self.logs = logs
        """What the controller printed before."""


@attrs.define(eq=False)
class LiveSequence:
    """A sequence of the daemon, and its controller."""

    id: int
    req_id: str
    n_vocab: int
    controller: Controller | None = None
    """``None`` while a fork is being made."""
    row: Row | None = None
    """Biases of its last mid.  Not in shared memory: a controller that is late must not write into the next step."""
    held: list[int] = attrs.field(factory=list)
    """Tokens that pre appended before it suspended.  The daemon gets them when the sequence goes on."""
    late: ControllerCall | None = None
    """The call in flight.  Between two steps there is one only if the last step did not wait for it."""

    def require_controller(self) -> Controller:
        """The controller of a sequence that is not a fork in the making."""
        assert self.controller is not None
        return self.controller

    def close(self) -> None:
        """Free the controller."""
        if self.controller is not None:
            self.controller.close()


class ControllerCall(Call):
    """A call into the controller of a sequence; the controller is closed if the call is abandoned.

    Args:
        deadline: when the controller is stopped.
    """

    phase: str
    """The callback, in messages."""

    def __init__(self, sequence: LiveSequence, deadline: float) -> None:
        super().__init__(self._run, sequence.close)
        self.sequence = sequence
        self.deadline = deadline
        self.dead = ""
        """Why the sequence cannot go on; empty if it can."""
        self.last_logs = ""
        """What its controller printed in this call, if it cannot go on."""

    def give_up(self) -> None:
        """Say that the call takes too long, unless it has finished."""
        if not self.is_finished:
            self.dead = f"timeout: aici_{self.phase} took too long"

    def _run(self) -> None:
        try:
            self._call()
        except WorkerError as error:
            self.dead, self.last_logs = str(error), error.logs

    def _call(self) -> None:
        raise NotImplementedError


class PostPreCall(ControllerCall):
    """Post, if the daemon has appended tokens, then pre."""

    phase = "pre_process"

    def __init__(self, sequence: LiveSequence, op: PostOp | None, wants_pre: bool, deadline: float) -> None:
        super().__init__(sequence, deadline)
        self.op = op
        self.wants_pre = wants_pre
        self.post: SequenceResult[PostResult] | None = None
        self.pre: SequenceResult[PreResult] | None = None

    def pre_with_post(self) -> SequenceResult[PreResult]:
        """One result for both calls, for a daemon that got no result of post because it was late."""
        post, pre = self.post, self.pre or SequenceResult("", PreResult())
        if post is None:
            return pre
        result = PreResult(num_forks=ENDED) if post.result and post.result.stop and not post.error else pre.result
        return SequenceResult(
            post.error or pre.error, result, post.storage + pre.storage, post.logs + pre.logs, post.micros + pre.micros
        )

    def _call(self) -> None:
        op = self.op
        if op is not None:
            self.phase = "post_process"
            self.post = _timed("post", self.sequence, PostResult(stop=True), lambda: self._post(op))
            self.phase = "pre_process"
        if self.wants_pre:
            self.pre = _timed("pre0", self.sequence, PreResult(), self._pre)

    def _post(self, op: PostOp) -> PostResult:
        # the number in messages counts a token that the controller has never seen
        backtrack = max(0, op.backtrack - 1)
        return PostResult(self.sequence.require_controller().post_process(op.tokens, backtrack, deadline=self.deadline))

    def _pre(self) -> PreResult:
        """Run pre until the controller appends no more tokens."""
        controller = self.sequence.require_controller()
        appended, self.sequence.held = self.sequence.held, []
        for _ in range(MAX_FF_ROUNDS + 1):
            result = controller.pre_process(deadline=self.deadline)
            if not result.ff_tokens:
                if result.suspend:
                    self.sequence.held, appended = appended, []
                return PreResult(result.suspend, result.num_forks, appended, result.waits_for)
            appended += result.ff_tokens
            if controller.post_process(result.ff_tokens, 0, deadline=self.deadline):
                return PreResult(num_forks=ENDED, ff_tokens=appended)
        controller.close()
        raise ControllerError("too many ff_tokens rounds from pre_process")


class MidCall(ControllerCall):
    """Mid, which makes the biases of ``sequence.row``.

    Args:
        fork_group: the sequence and those that were forked from the same one in this step.
    """

    phase = "mid_process"

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
        action = self.sequence.require_controller().mid_process(self.fork_group, self.row, deadline=self.deadline)
        if not isinstance(action, Splice):
            return None
        # in messages, the number counts the token that would be sampled now
        return MidResult(list(action.ff_tokens), action.n_removed + 1 if action.n_removed else 0)


class ForkCall(Call):
    """Makes the forks of a sequence, then starts their mids, and its own.

    Args:
        parent: nothing else may use its controller meanwhile.
        calls: mids of the group.  Their sequences have no controller yet, except for the parent.
    """

    def __init__(self, parent: LiveSequence, calls: Sequence[MidCall], threads: CallThreads) -> None:
        super().__init__(self._run, lambda: None)
        self._parent = parent
        self._calls = calls
        self._threads = threads

    def _run(self) -> None:
        ready = []
        for call in self._calls:
            if call.sequence is self._parent or call.is_abandoned or self._fork(call):
                ready.append(call)
            else:
                self._threads.skip(call)
        self._threads.start(ready)

    def _fork(self, call: MidCall) -> bool:
        parent, sequence = self._parent, call.sequence
        try:
            if time.monotonic() > call.deadline:
                raise WorkerError("timeout: it takes too long")
            sequence.controller = parent.require_controller().fork(sequence.id)
        except (ControllerError, WorkerError) as error:
            call.dead = f"cannot fork {parent.id}: {error}"
        except Exception as error:
            log.exception("sequence %s", parent.id)
            call.dead = f"internal error: {error!r}"
        return not call.dead


def worker_error(reason: str, logs: str = "") -> SequenceResult[T]:
    """The result of a sequence that cannot go on, or of an operation that is wrong."""
    text = f"Worker: {reason}"
    return SequenceResult(text, None, logs=_line(logs) + text)


def controller_error(phase: str, message: str, logs: str) -> str:
    """What a controller's failure is called."""
    return f"Error ({phase}): {_line(logs)}{message}"


def _timed(
    phase: str, sequence: LiveSequence, after_error: T | None, function: Callable[[], T | None]
) -> SequenceResult[T]:
    """The result of a call into the controller.

    Args:
        phase: what errors call the callback: ``post``, ``pre0`` or ``mid``, the words of other runtimes.
        after_error: the result if the controller fails.

    Raises:
        WorkerError: the controller was stopped.
    """
    controller = sequence.require_controller()
    started = time.perf_counter_ns()
    try:
        result = function()
    except ControllerError as error:
        logs = controller.take_logs()
        text = controller_error(phase, str(error), logs)
        storage = controller.take_storage()
        return SequenceResult(text, after_error, storage, _line(logs) + text, _micros(started))
    except ControllerTimeout as error:
        raise WorkerError(f"timeout: {error}", controller.take_logs()) from None
    except Exception as error:
        log.exception("sequence %s", sequence.id)
        raise WorkerError(f"internal error: {error!r}") from None
    return SequenceResult("", result, controller.take_storage(), controller.take_logs(), _micros(started))


def _line(logs: str) -> str:
    return logs if not logs or logs.endswith("\n") else logs + "\n"


def _micros(started_ns: int) -> int:
    """Microseconds since ``started_ns``, in steps of 10."""
    return (time.perf_counter_ns() - started_ns) // 10_000 * 10
