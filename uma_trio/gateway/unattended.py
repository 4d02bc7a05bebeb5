"""Charges answers that go on without their clients: when they have ended, what they took."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import anyio
import attrs

from uma_trio.client import Client, Event, ServerError
from uma_trio.gateway.charging import Charge
from uma_trio.gateway.errors import HttpError
from uma_trio.protocol.answers import AnswerInfo

LOOK_S: Final = 2.0


class Connects(Protocol):
    """Makes connections on behalf of the client that is charged."""

    def connect(self) -> AbstractAsyncContextManager[Client]:
        """A connection; raises ``HttpError`` if what is done with it fails."""


@attrs.frozen(eq=False)
class _Left:
    """An answer that nobody reads."""

    daemon: Connects
    answer: AnswerInfo
    charge: Charge


@attrs.define(eq=False)
class Unattended:
    """Looks at such answers from time to time.  What is not charged when the gateway ends stays charged by its estimate."""

    _left: list[_Left] = attrs.field(factory=list, init=False)

    def keep(self, daemon: Connects, answer: AnswerInfo, charge: Charge) -> None:
        """Take over ``charge``, which has not ended."""
        kept = charge.hand_over()
        if kept is not None:
            self._left.append(_Left(daemon, answer, kept))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at the answers until the context ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._look_forever)
            yield
            tasks.cancel_scope.cancel()

    async def _look_forever(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            for left in [*self._left]:
                if await _settle(left):
                    self._left.remove(left)


async def _settle(left: _Left) -> bool:
    """Charge the answer if it has ended; returns whether that is done."""
    name = left.answer.answer_id
    refusal: ServerError | None = None
    events: list[Event] = []
    try:
        async with left.daemon.connect() as client:
            answers = [answer for answer in await client.answers(keep_alive=True) if answer.answer_id == name]
            if answers and answers[0].created_at == left.answer.created_at:
                if answers[0].ended_at is None:
                    return False
                try:
                    events = [event async for event in client.attach(name, after=answers[0].events - 1)]
                except ServerError as error:
                    refusal = error
    except HttpError:  # the daemon is being started again
        return False
    with contextlib.suppress(ServerError), left.charge as charge:
        charge.count(events)
        if refusal is not None:
            raise refusal
        if not events:  # it was deleted, perhaps for another one
            charge.count_estimate()
    return True
