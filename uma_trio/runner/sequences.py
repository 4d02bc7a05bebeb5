"""Which request has which sequence of the KV cache, and how much of its prompt it finds there."""

from __future__ import annotations

import trio

from uma_trio.engine.records import ModelFacts
from uma_trio.kv.cache import KvCache
from uma_trio.runner.job import Job, State
from uma_trio.runner.pace import Pace
from uma_trio.runner.spiller import Spiller
from uma_trio.scheduling.policy import Slot
from uma_trio.telemetry import Telemetry


def cache_for(facts: ModelFacts, pace: Pace, *, reuse: bool) -> KvCache:
    """The books of the KV cache that an engine has.

    Args:
        reuse: whether tokens are shared and kept at all.
    """
    return KvCache(
        n_sequences=facts.n_seq_max,
        n_cells=facts.n_ctx,
        cells_per_sequence=facts.n_ctx_seq,
        unified=facts.unified,
        rewinds=facts.rewinds,
        checkpoints=facts.checkpoints,
        states_rewind=facts.states_rewind,
        reuse=reuse,
        worth_loading=pace.worth_loading,
    )


class Sequences:
    """The jobs of one runner that have a sequence.

    Args:
        spiller: told what has to be saved to make room, and what is to be loaded.
    """

    def __init__(self, cache: KvCache, spiller: Spiller, telemetry: Telemetry) -> None:
        self._cache = cache
        self._spiller = spiller
        self._telemetry = telemetry
        self.jobs: dict[int, Job] = {}
        """By sequence."""

    def place(self, job: Job) -> bool:
        """Give ``job`` a sequence with all the room that it may need, if there is one."""
        placement = self._cache.place(
            job.prompt.tokens,
            job.cells,
            tenant=job.slot.tenant,
            rank=job.slot.priority,
            private=not job.request.cache_prompt,
            durable=job.durable,
        )
        if placement is None:
            self._spiller.look()  # something may have to be saved to make room
            return False
        job.seq_id = job.slot.seq_id = placement.seq_id
        job.state, job.admitted_at, job.waits = State.PREFILL, trio.current_time(), placement.waits
        if not job.waits:
            self._reuse(job, placement.held)
        self.jobs[job.seq_id] = job
        if placement.saved is not None:
            assert placement.entry is not None
            self._spiller.fetch(placement.entry, placement.saved)
        return True

    def settle(self, job: Job) -> None:
        """``job`` is about to be read: give it the sequence that suits best now, if it holds nothing."""
        if job.n_fed == 0:
            seq_id = self._cache.settle(job.seq_id)
            if seq_id != job.seq_id:
                del self.jobs[job.seq_id]
                job.seq_id = job.slot.seq_id = seq_id
                self.jobs[seq_id] = job

    def ready(self) -> tuple[list[Slot], list[Slot]]:
        """Streams and prompts that the next step can go on with; those whose clients do not read are not among them.

        To be called before each step, when what the step before feeds is booked.
        """
        for entry, state in self._spiller.take_fetched():
            held = self._cache.restored(entry, state)
            if held is not None:
                self._goes_on(entry.seq_id, held)
        streams, prompts, stalled = [], [], []
        for seq_id in sorted(self.jobs):  # what follows each other can be computed together
            job = self.jobs[seq_id]
            if not job.sink.has_room:
                job.paused = True
                stalled.append(seq_id)
            elif job.state is State.DECODE:
                streams.append(job.slot)
            elif not job.waits:
                self._pause(job)  # others that came since may be waiting for a part of it
                prompts.append(job.slot)
        if self._cache.has_followers:
            ready = [self._goes_on(seq_id, held) for seq_id, held in self._cache.followed(stalled)]
            prompts += [job.slot for job in ready if job.sink.has_room]
        return streams, prompts

    def _goes_on(self, seq_id: int, held: int) -> Job:
        """The job of ``seq_id`` need not wait any longer."""
        job = self.jobs[seq_id]
        job.waits = False
        self._reuse(job, held)
        return job

    def _reuse(self, job: Job, n: int) -> None:
        """``job`` need not compute the first ``n`` tokens of its prompt."""
        job.n_fed = job.n_cached = job.slot.context = n
        self._pause(job)
        self._telemetry.record_prefix_reuse(n)

    def _pause(self, job: Job) -> None:
        """Tell ``job`` where the step that reads it next is to end at the latest."""
        job.pause = self._cache.pause(job.seq_id)
        job.slot.pending = job.pending

    def leave(self, job: Job, *, keep: bool) -> bool:
        """``job`` has ended; False if it had left before.

        Args:
            keep: others may use what it has computed; else that leaves the cache with the next step.
        """
        if self.jobs.get(job.seq_id) is not job:
            return False
        del self.jobs[job.seq_id]
        self._cache.end(job.seq_id, job.known_tokens() if keep else None, at=trio.current_time())
        self._spiller.look()
        return True

    def clear(self, *, lost: bool) -> None:
        """A step failed, and who was in it has left.  The others may hold copies of what was: they begin again.

        Args:
            lost: the engine's cache is empty.
        """
        self._cache.clear(lost=lost)
        for job in self.jobs.values():
            job.n_fed = job.n_cached = job.slot.context = 0
            job.slot.pending, job.state = job.pending, State.PREFILL

    def check_integrity(self) -> None:
        """Jobs and cache say the same, or AssertionError."""
        self._cache.check_integrity()
        assert len(self.jobs) == self._cache.statistics().sequences
        assert all(job.seq_id == seq_id for seq_id, job in self.jobs.items())
        assert all(job.state in (State.PREFILL, State.DECODE) for job in self.jobs.values())
        held = self._cache.held()
        assert all(job.n_fed == held.get(seq_id, 0) for seq_id, job in self.jobs.items())
