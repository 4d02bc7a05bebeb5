"""What controllers make of the tick: calls that the scheduler takes."""

from __future__ import annotations

from typing import Protocol

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.new_tokens import NewTokens
from uma_trio.errors import UmaError
from uma_trio.protocol.usage import FinishReason


class Loop(Protocol):
    """What the driver has the scheduler do.  All of it happens at once, before the call returns."""

    def deliver(self, new: NewTokens, at: float) -> None:
        """Send tokens that an answer got at ``at``, and end it if they do."""

    def finish(self, answer: Answer, reason: FinishReason | UmaError) -> None:
        """End an answer, unless it has ended.  Calls ``ControllerDriver.ended``."""

    def end_wait(self) -> None:
        """There is work: end the wait for it."""

    def wake(self) -> None:
        """The next plan should know of a change: also revokes a run-ahead step that would take long."""
