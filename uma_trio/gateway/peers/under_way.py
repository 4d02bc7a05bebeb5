"""Session moves that are under way, for which a daemon that stops waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Final

import anyio
import attrs
import structlog

from uma_trio.gateway.peers.messages import PeerQuestion

log = structlog.get_logger("uma_trio.gateway")

QUIET_S: Final = 5.0
"""A peer that has got a session and asks nothing about it for this time does not come for it any more."""


@attrs.define(eq=False)
class Moves:
    """Moves from and to this daemon."""

    _n_running: int = attrs.field(default=0, init=False)
    """Sessions that are brought here, and questions about sessions that are being answered."""
    _given: dict[tuple[str | None, str | None, str], float] = attrs.field(factory=dict, init=False)
    """When a peer last asked for a session that it has been given."""
    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A part of a move, which ends with the context."""
        self._n_running += 1
        try:
            yield
        finally:
            self._n_running -= 1
            self._changed.set()

    @contextlib.contextmanager
    def answering(self, question: PeerQuestion) -> Iterator[None]:
        """A peer's question is answered.  From ``give`` to ``confirm`` its session is under way."""
        with self.running():
            yield
            session = (question.model, question.principal, question.session_id)
            if question.action in ("give", "read"):
                self._forget_quiet()
                self._given[session] = anyio.current_time()
            elif question.action == "confirm":
                self._given.pop(session, None)

    async def wait_ended(self) -> bool:
        """Wait until no move is under way; returns whether there was one."""
        if (quiet_in_s := self._quiet_in_s()) is None:
            return False
        log.info("sessions are moving: the daemon waits before it stops", running=self._n_running, given=[*self._given])
        while quiet_in_s is not None:
            self._changed = anyio.Event()
            with anyio.move_on_after(quiet_in_s):
                await self._changed.wait()
            quiet_in_s = self._quiet_in_s()
        return True

    def _quiet_in_s(self) -> float | None:
        """For how long a move may be under way if nothing changes; ``None``: there is none."""
        if self._n_running:
            return math.inf
        self._forget_quiet()
        return max(self._given.values()) + QUIET_S - anyio.current_time() if self._given else None

    def _forget_quiet(self) -> None:
        since = anyio.current_time() - QUIET_S
        self._given = {session: asked_at for session, asked_at in self._given.items() if asked_at > since}
