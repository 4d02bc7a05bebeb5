"""After the engine has failed: which answers go on, which request is to blame, and when requests are refused.

Source: docs/design/engine-process.md, "Recovery".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import structlog

from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.policy.bisection import CrashBisection
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.embedding import EmbeddingQueue
from uma_trio.daemon.serving.in_flight import InFlightSteps
from uma_trio.daemon.serving.offload import Offloader
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.daemon.serving.step import InFlightStep
from uma_trio.engine_link.messages import LoadError
from uma_trio.errors import DecodeFailed, ModelUnavailable, UmaError
from uma_trio.protocol.usage import FinishReason

log = structlog.get_logger("uma_trio.serving")


class RecoveryCallbacks(Protocol):
    """What recovery has the scheduler do."""

    on_step: Callable[[], None] | None

    def answers(self) -> Iterator[Answer]: ...

    def finish(self, answer: Answer, reason: FinishReason | UmaError) -> None: ...

    def free_finished(self, step: InFlightStep, *, failed: bool = False) -> None: ...


@attrs.define(eq=False, kw_only=True)
class Recovery:
    """Brings the engine of a scheduler back, and knows whether requests are accepted."""

    _callbacks: RecoveryCallbacks
    _engine: SupervisedEngine
    _steps: InFlightSteps
    _running: RunningSet
    _offloader: Offloader
    _embeddings: EmbeddingQueue
    _bisection: CrashBisection[Answer]
    refusal: UmaError | None = attrs.field(default=None, init=False)
    """The error that new requests get; ``None``: they are accepted."""
    is_stopping: bool = attrs.field(default=False, init=False)
    """The engine was ended on purpose, and does not come back."""

    def take_back(self, reason: str) -> None:
        """The KV cache is lost: take back the steps in flight, and send every answer back to its prefill.

        The answers of the fatal step are retried in halves, until the one that kills the engine is alone.
        """
        suspects: dict[Answer, int] = {}
        steps = self._steps.lost()
        for step in steps:
            if step.planned.transfer is not None:
                self._offloader.complete(step.planned.transfer, None)
            suspects |= {answer: row.end for answer, row in step.rows.items() if answer.state is not State.FINISHED}
        chunks = [step.planned.embedding for step in steps if step.planned.embedding is not None]
        self._embeddings.lost(chunks[0] if chunks else None)
        if not self.is_stopping:
            log.error("the engine failed", reason=reason, answers=len(suspects), restarts=self._engine.restarts)
        for step in steps:
            self._callbacks.free_finished(step, failed=True)
        self._running.restart()
        if self._callbacks.on_step is not None:
            self._callbacks.on_step()
        culprit = self._bisection.crashed(suspects)
        if culprit is not None:
            self._callbacks.finish(culprit, DecodeFailed(f"this request made the engine fail twice: {reason}"))

    async def restart_engine(self) -> None:
        """Restart the engine if it has died; where that fails for too long, tell the clients, and go on trying."""
        await self._engine.restart_until_ready(self._bisection.n_crashes, self._on_engine_unavailable)
        if isinstance(self.refusal, ModelUnavailable):
            self.refusal = None

    def _on_engine_unavailable(self, error: LoadError, retry_s: float) -> None:
        """Fail all requests, and refuse new ones until the engine runs."""
        message = f"the model's engine cannot be started: {error}"
        self.fail_everything(ModelUnavailable(message, retry_after_ms=round(1e3 * retry_s)))

    def fail_everything(self, error: UmaError) -> None:
        """End all requests with ``error``, and refuse new ones."""
        if self.refusal is None or isinstance(self.refusal, ModelUnavailable):
            self.refusal = error
        for answer in [*self._callbacks.answers()]:
            self._callbacks.finish(answer, type(error)(str(error)))
        for pending in [*self._embeddings]:
            self._embeddings.end(pending, type(error)(str(error)))
