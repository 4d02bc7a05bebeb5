"""Requests that wait for a sequence: whose turn it is, and who is turned away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from uma_trio.errors import KvFull, QueueFull
from uma_trio.kv.cache import KvCache
from uma_trio.runner.job import Job, State
from uma_trio.runner.sequences import Sequences
from uma_trio.scheduling import fairness
from uma_trio.scheduling.fairness import Service
from uma_trio.telemetry import Telemetry


class Queue:
    """In the order of arrival; who is next is decided when there is room.

    Args:
        n_sequences: that can run at a time.
        most: that can wait.
        telemetry: knows how long requests took.
    """

    def __init__(
        self, cache: KvCache, sequences: Sequences, telemetry: Telemetry, *, n_sequences: int, most: int
    ) -> None:
        self._cache = cache
        self._sequences = sequences
        self._telemetry = telemetry
        self._n_sequences = n_sequences
        self._most = most
        self._jobs: list[Job] = []
        self._blocked: tuple[Job, int] | None = None
        """The first one found no room, when the cache was as it is."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def enter(self, jobs: Sequence[Job]) -> None:
        """Give each of ``jobs`` a sequence, or have it wait; all of them or none.

        Raises:
            QueueFull: too many wait already.
            KvFull: the same, for cells.
        """
        for n, job in enumerate(jobs):
            if self._jobs or not self._sequences.place(job):
                if len(self._jobs) >= self._most:
                    refusal = self._full()
                    for entered in jobs[:n]:
                        if entered in self._jobs:
                            self.leave(entered)
                        else:
                            self._sequences.leave(entered, keep=False)
                    raise refusal
                self._jobs.append(job)

    def leave(self, job: Job) -> None:
        """``job``, which waits, no longer does."""
        self._jobs.remove(job)

    def admit(self, service: Service) -> None:
        """Give sequences to those that wait: by class, by least-served tenant, in the order of arrival.

        The first in that order is waited for, however large it is, and who waits rises with time: none is
        overtaken for ever.
        """
        while self._jobs:
            now = trio.current_time()
            job = min(self._jobs, key=lambda job: fairness.rank(job.slot.view(), now - job.arrived_at, service))
            if self._blocked == (job, self._cache.changes):
                return
            if not self._sequences.place(job):
                self._blocked = (job, self._cache.changes)
                return
            self._jobs.remove(job)

    def _full(self) -> QueueFull | KvFull:
        """With an estimate of the wait: what requests take on average, for each turn that must come first."""
        waiting = f"{len(self._jobs)} requests wait already"
        kv = self._cache.statistics()
        if kv.sequences < self._n_sequences:  # not for a sequence, so for cells
            error: QueueFull | KvFull = KvFull(f"{kv.cells_reserved} of {kv.cells} KV cells are in use, and {waiting}")
        else:
            error = QueueFull(waiting)
        if self._telemetry.served_ms.value is not None:
            turns = 1 + len(self._jobs) // self._n_sequences
            error.retry_after_ms = round(turns * self._telemetry.served_ms.value)
        return error

    def check_integrity(self) -> None:
        """All of them wait, or AssertionError."""
        assert all(job.state is State.QUEUED for job in self._jobs)
