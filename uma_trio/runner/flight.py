"""A tick's step: made from a plan, and read when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final

import attrs

from uma_trio.engine.records import Edit, Feed, Score, Step, StepResult
from uma_trio.engine.thread import Pending
from uma_trio.errors import DecodeFailed, UmaError
from uma_trio.protocol.messages import FinishReason
from uma_trio.runner.job import Job
from uma_trio.runner.transfers import Transfer
from uma_trio.scheduling.policy import Plan

NO_DISTRIBUTION: Final = -1
"""In place of a token, where the logits gave none."""

SURPRISING: Final = 0.5
"""Share by which a step took more or less than was predicted."""


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
    transfer: Transfer | None = None
    """The state that it saves or loads."""

    def drawn(self, result: StepResult) -> Iterator[tuple[Job, Sequence[int], Sequence[Score | None]]]:
        """Who has got which tokens, guesses and all, and their scores, if any."""
        at = 0
        for job, n in self.drawing:
            yield job, result.tokens[at : at + n], result.scores[at : at + n]
            at += n


@attrs.define(eq=False)
class Delivery:
    """Sampled tokens on their way to a client."""

    job: Job
    tokens: Sequence[int]
    n_before: int
    """Tokens that the job had."""
    reason: FinishReason | UmaError | None
    """Why the job ends after these, if it does."""
    paused: bool
    """Its client had not read: the time since its last token is not the server's."""
    scores: Sequence[Score | None]
    """Of the tokens, and perhaps of guesses behind them; empty where nobody asked."""


def gained(job: Job, tokens: Sequence[int], scores: Sequence[Score | None]) -> Delivery:
    """``job`` has got new tokens, up to one that ends it."""
    before, paused = len(job.tokens), job.paused
    job.paused = False
    reason: FinishReason | UmaError | None = None
    for n, token in enumerate(tokens):
        if token == NO_DISTRIBUTION:
            reason, tokens = DecodeFailed("the model gave no usable logits"), tokens[:n]
            break
        job.gained(token)
        if token in job.ending:
            reason = "stop"
        elif len(job.tokens) >= job.max_tokens:
            reason = "length"
        if reason is not None:
            tokens = tokens[: n + 1]
            break
    return Delivery(job, tokens, before, reason, paused, scores)


@attrs.frozen
class Landed:
    """A step that is done."""

    flight: Flight
    result: StepResult
    deliveries: Sequence[Delivery]
    at: float

    @property
    def took_ms(self) -> float:
        return self.result.decode_ms + self.result.sample_ms

    @property
    def is_surprising(self) -> bool:
        """The next plan should know."""
        predicted = self.flight.plan.predicted_ms
        return abs(self.took_ms - predicted) > SURPRISING * predicted


def launch(
    chosen: Plan,
    running: Mapping[int, Job],
    edits: Sequence[Edit],
    freed: Sequence[Job],
    submit: Callable[[Step], Pending[StepResult]],
    transfer: Transfer | None = None,
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
    return Flight(chosen, jobs, drawing, freed, submit(Step(edits, [feeds for feeds in batches if feeds])), transfer)
