"""Sends a client the events of a detached answer: those that there are, and those to come."""

from __future__ import annotations

import trio

from uma_trio.daemon.detached.answer import event_of
from uma_trio.daemon.detached.answers import DetachedAnswers
from uma_trio.daemon.doors.outbox import Outbox
from uma_trio.principal import Principal
from uma_trio.protocol.queries import AttachQuery


class Attachment:
    """Reads an answer at the pace of one client.  Its end changes nothing of the answer.

    Args:
        max_waiting_bytes: that may wait for the client before more events are made.
    """

    def __init__(
        self,
        query: AttachQuery,
        answers: DetachedAnswers,
        principal: Principal,
        outbox: Outbox,
        *,
        max_waiting_bytes: int,
    ) -> None:
        self.request = query
        self._answers = answers
        self._principal = principal
        self._outbox = outbox
        self._max_waiting_bytes = max_waiting_bytes
        self._scope = trio.CancelScope()
        self._is_done = False

    @property
    def is_answered(self) -> bool:
        """Whether its last event has been sent, or it was cancelled, although ``run`` has perhaps not returned yet."""
        return self._is_done or self._scope.cancel_called

    def cancel(self) -> None:
        """Send no more events."""
        self._scope.cancel()

    async def run(self) -> None:
        """Send events until the answer has ended, or until cancelled.

        Raises:
            AnswerNotFound: the principal has no such answer.
            ShuttingDown: the daemon ends.
        """
        answer = self._answers.find(self._principal.name, self.request.id)
        after = min(self.request.after, answer.n_events)
        if answer.is_complete(after):
            after -= 1  # the last event always comes, because it says that it is the last one
        n_passing = 0
        with self._scope, answer.reading():
            while not answer.is_complete(after):
                first, events = await self._answers.events(answer, after, n_passing)
                if answer.n_passing != n_passing and (passing := answer.passing) is not None:
                    self._outbox.send(passing)
                n_passing = answer.n_passing
                for after, data in enumerate(events, first):
                    await self._outbox.shrink_to(self._max_waiting_bytes)
                    await trio.lowlevel.checkpoint()
                    self._outbox.send(event_of(data, after))
        self._is_done = True
