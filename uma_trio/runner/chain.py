"""The next step of streams that simply go on: begun by the engine's thread itself.

Between two steps lies the way from the engine's thread to the loop and back, which takes longer than what is decided
there: mostly nothing, for the same streams go on with the tokens that were just sampled.  So while a step is under way
the one after it is made ready behind it.  The thread begins it at once, unless a sampled token ends a stream, or
something has happened in the meantime (a request, a cancel, room in an outbox): then it is revoked, and the next step
is planned as always.  Nothing is decided later than it would be otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

from uma_trio.engine.records import Feed, Step, StepResult
from uma_trio.engine.thread import Pending
from uma_trio.runner.flight import Flight
from uma_trio.runner.job import Job, State
from uma_trio.scheduling.policy import Plan


def goes_on(flight: Flight) -> bool:
    """Whether the next step can be of the same streams, with one token each, as far as can be said now."""
    jobs, chosen = flight.jobs, flight.plan
    if chosen.chunks or chosen.drafts or not jobs:
        return False
    if any(job.state is State.DONE or len(job.tokens) + 1 >= job.max_tokens for job in jobs):
        return False  # the last of these tokens is under way
    return all(job.sink.has_room for job in jobs)


class Chained:
    """A step made ready behind the one that is under way.

    Args:
        chosen: of one token for each of ``jobs``, and no more.
        jobs: in the order of the step under way, which samples one token for each of them.
        before: that step.
        step: of the engine.
        submit: has a call run in the engine's thread.
    """

    def __init__(
        self,
        chosen: Plan,
        jobs: Sequence[Job],
        before: Pending[StepResult],
        step: Callable[[Step], StepResult],
        submit: Callable[[Callable[[], StepResult | None]], Pending[StepResult | None]],
    ) -> None:
        self._plan = chosen
        self._jobs = jobs
        self._before = before
        self._step = step
        self._decided = threading.Lock()
        """Whoever takes it decides: the thread that it begins, the loop that it does not."""
        self._begins = False
        self._feeds = [Feed(job.seq_id, job.n_fed, [], (job.draw(len(job.tokens) + 1),)) for job in jobs]
        before.before_told = self._begin  # or the loop, which is woken then, would always be first
        self.pending = submit(self._run)

    def _begin(self) -> None:
        """Decide to begin, if that can still be decided and the tokens before let it.  In the engine's thread."""
        before = self._before.result
        if before is None or min(before.tokens) < 0:
            return
        if any(token in job.ending for job, token in zip(self._jobs, before.tokens, strict=True)):
            return
        self._begins = self._begins or self._decided.acquire(blocking=False)

    def _run(self) -> StepResult | None:
        """In the engine's thread, after the step before; ``None`` if it was not begun."""
        self._begin()
        before = self._before.result
        if not self._begins or before is None:
            return None
        for feed, token in zip(self._feeds, before.tokens, strict=True):
            feed.tokens = [token]
            past = feed.draws[0].past
            if past is not None:  # it ends with what has just been sampled
                past.tokens[-1] = token
        feeds = iter(self._feeds)
        return self._step(Step((), [[next(feeds) for _ in range(width)] for width in self._plan.call_widths]))

    @property
    def is_decided(self) -> bool:
        """It has begun, or was revoked."""
        return self._decided.locked()

    def revoke(self) -> bool:
        """See that it does not begin; False if it has."""
        return self._decided.acquire(blocking=False)

    def feeds(self, job: Job) -> bool:
        """Whether it has a token of ``job``."""
        return job in self._jobs

    def begun(self) -> Flight:
        """The step under way that this has become, booked.  After the step before has been."""
        for job in self._jobs:
            job.n_fed += 1
            job.slot.context = job.n_fed
            job.slot.pending = 0
        pending = cast("Pending[StepResult]", self.pending)  # it has begun, so there will be one
        return Flight(self._plan, self._jobs, [(job, 1) for job in self._jobs], (), pending)
