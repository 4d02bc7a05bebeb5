"""How requests end: they leave the plans, their clients are told, and it is booked."""

from __future__ import annotations

from itertools import chain

import trio

from uma_trio.errors import UmaError
from uma_trio.protocol.messages import Failure, FinishReason
from uma_trio.runner.book import Book
from uma_trio.runner.job import Job, State
from uma_trio.runner.planning import Planner
from uma_trio.runner.sequences import Sequences
from uma_trio.runner.waiting import Queue


class Endings:
    """Ends the jobs of one runner."""

    def __init__(self, queue: Queue, sequences: Sequences, planner: Planner, book: Book) -> None:
        self._queue = queue
        self._sequences = sequences
        self._planner = planner
        self._book = book
        self._freed: list[Job] = []

    def retire(self, job: Job, *, keep: bool) -> None:
        """Take ``job`` out of the plans, if it still is in them.

        Args:
            keep: others may use what it has computed; else that leaves the cache with the next step.
        """
        if job.state is State.QUEUED:
            self._queue.leave(job)
        elif self._sequences.leave(job, keep=keep) and job.cancelled_at is not None and not keep:
            self._freed.append(job)

    def end(self, job: Job, reason: FinishReason | UmaError) -> None:
        """Take ``job`` out, and tell its client how it ended."""
        kept = job.cancelled_at is None or (job.durable and job.tokens)  # a session goes on from what was told
        self.retire(job, keep=bool(kept) and not isinstance(reason, UmaError))
        tenant = job.slot.tenant
        if not any(other.slot.tenant == tenant for other in chain(self._sequences.jobs.values(), self._queue)):
            self._planner.left(tenant)
        now = trio.current_time()
        job.state, job.ended_at = State.DONE, now
        if isinstance(reason, UmaError):
            reason.request_id = job.request.id
            job.sink.send(Failure.of(reason, metadata=job.request.metadata, index=job.index))
        else:
            job.sink.send(job.eos(reason, now))
        self._book.ended(job, reason, now)
        job.done.set()

    def take_freed(self) -> list[Job]:
        """Those ended from outside whose tokens leave the cache with the next step, once."""
        freed, self._freed = self._freed, []
        return freed
