"""A tick's step: made from a plan, and read when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

import attrs

from uma_trio.engine.records import Edit, Feed, Step, StepResult
from uma_trio.engine.thread import Pending
from uma_trio.runner.job import Job
from uma_trio.scheduling.policy import Plan


@attrs.frozen
class Flight:
    """A step under way."""

    plan: Plan
    jobs: Sequence[Job]
    """Those that have tokens in it."""
    drawing: Sequence[tuple[Job, int]]
    """Those for which tokens are sampled, and how many, in the order of the result's."""
    freed: Sequence[Job]
    """Ended from outside; their tokens leave the KV cache."""
    pending: Pending[StepResult]

    def drawn(self, result: StepResult) -> Iterator[tuple[Job, Sequence[int]]]:
        """Who has got which tokens, guesses and all."""
        at = 0
        for job, n in self.drawing:
            yield job, result.tokens[at : at + n]
            at += n


def launch(
    chosen: Plan,
    running: Mapping[int, Job],
    edits: Sequence[Edit],
    freed: Sequence[Job],
    submit: Callable[[Step], Pending[StepResult]],
) -> Flight:
    """Start the step that ``chosen`` asks for, and book what it feeds."""
    jobs: list[Job] = []
    drawing: list[tuple[Job, int]] = []
    batches: list[list[Feed]] = []
    slots = iter(zip(chosen.streams, chosen.drafts or repeat(0)))  # noqa: B905  (the second has no end)
    for width in chosen.widths:
        feeds = []
        for _ in range(width):
            slot, guesses = next(slots)
            job = running[slot.seq_id]
            feeds.append(job.token_feed(guesses))
            jobs.append(job)
            drawing.append((job, 1 + guesses))
        if feeds:
            batches.append(feeds)
    if chosen.prompts_apart or not batches:
        batches.append([])
    for share in chosen.shares:
        job = running[share.seq_id]
        feed = job.prompt_feed(share.n_tokens)
        batches[-1].append(feed)
        jobs.append(job)
        if feed.draws:
            drawing.append((job, 1))
    return Flight(chosen, jobs, drawing, freed, submit(Step(edits, [feeds for feeds in batches if feeds])))
