"""Forks of controlled answers: which one is next, and whether it waits for room.

Forks reserve cells for all that they may generate, like requests.  The first answer that finds no room gets all that
becomes free, before requests that wait in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.controllers.answers import ControlledAnswers, control_of, is_prefilled, reading
from uma_trio.daemon.serving.controllers.loop import Loop
from uma_trio.daemon.serving.controllers.state import Phase
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.errors import ControllerFailed, KvFull, UmaError
from uma_trio.protocol.controllers import Fork

MAX_ANSWERS: Final = 1024
"""Answers of one request in all, ended ones included: forks that fork again would go on for ever."""


@attrs.define(eq=False)
class Forking:
    """Forks the answers of ``controlled`` that are in phase FORK."""

    _controlled: ControlledAnswers
    _running: RunningSet
    _waiting: WaitingQueue
    _loop: Loop
    _found_no_room: tuple[Answer, int] | None = attrs.field(default=None, init=False)
    """The answer that is next, and changes of the cache when it found no room."""

    def is_possible(self) -> bool:
        """Whether ``next_group`` would try, or refuse, to fork an answer."""
        answer = self._next()
        return answer is not None and (not self._waits(answer) or self._is_deadlocked(answer))

    def next_group(self) -> list[Answer] | None:
        """Fork the answer that is next; end it if there will be no room for its forks.

        Returns:
            The answer and its forks; nothing if there is no such answer, or it waits for room; ``None`` if it has ended.
        """
        answer = self._next()
        if answer is None:
            self._keep_room(None)  # its client does not read
            return []
        n = control_of(answer).n_forks - 1
        error: UmaError | None = self._why_never(answer, n)
        if error is None and not self._waits(answer):
            allocations = self._running.allocate_forks(answer, n)
            if allocations is not None:
                self._keep_room(None)
                forks = self._controlled.fork(answer, n)
                self._running.begin_forks(forks, allocations)
                _announce(answer, forks)
                return [answer, *forks]
            self._keep_room(answer)
        if error is None and self._is_deadlocked(answer):
            error = KvFull(f"no KV cells to fork into {n + 1} answers: every running request waits for cells")
        if error is None:
            return []
        self._loop.finish(answer, error)
        return None

    def _why_never(self, answer: Answer, n: int) -> ControllerFailed | None:
        """Why ``answer`` can never have ``n`` forks; ``None``: it can."""
        impossible = self._running.why_no_fork(answer, n)
        if impossible is not None:
            return ControllerFailed(f"the controller forks an answer into {n + 1}, but {impossible}")
        if self._controlled.n_answers(answer) + n > MAX_ANSWERS:
            return ControllerFailed(f"the controller forks into more than {MAX_ANSWERS} answers, the most of a request")
        return None

    def _next(self) -> Answer | None:
        return next((answer for answer in self._ready() if is_prefilled(answer)), None)

    def _ready(self) -> list[Answer]:
        return reading(self._controlled.in_phase(Phase.FORK))

    def give_up(self, answer: Answer) -> None:
        """``answer`` has ended, or no longer wants to fork."""
        if self._found_no_room is not None and self._found_no_room[0] is answer:
            self._keep_room(None)

    def _keep_room(self, answer: Answer | None) -> None:
        """All room that becomes free is for the forks of ``answer``; ``None``: for requests that wait."""
        self._found_no_room = None if answer is None else (answer, self._running.cache.changes)
        self._waiting.keep_room(answer)

    def _waits(self, answer: Answer) -> bool:
        """Whether ``answer`` has found no room, and nothing has changed in the KV cache."""
        return self._found_no_room == (answer, self._running.cache.changes)

    def _is_deadlocked(self, answer: Answer) -> bool:
        """Whether every other running answer waits for room, or for an answer that does: then no cell becomes free."""
        if self._running.cache.offload.blocks_requests:
            return False
        wanting = self._ready()
        stuck = {control_of(other).request for other in wanting}
        waiting = {*wanting, *[x for x in self._controlled.in_phase(Phase.SUSPENDED) if control_of(x).request in stuck]}
        return all(other in waiting for other in self._running)


def _announce(parent: Answer, forks: Sequence[Answer]) -> None:
    assert parent.index is not None
    for fork in forks:
        assert fork.index is not None
        fork.sink.send(Fork(id=fork.request.id, index=fork.index, parent=parent.index))
