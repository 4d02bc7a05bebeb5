"""Predicts when requests start and end, from what runs, what waits and the cost model.

A small simulation of the scheduler.  It advances by phases, not by ticks: a phase is a number of ticks that compute
alike, and ends when a prompt is complete or an answer ends.  In each tick every decoding answer gets a token, and the
prompts that go first get a chunk, as large as the policy would choose for streams that are in time.

The predictions assume today's order of the queue, and that others come as often as lately, behind those that wait.  A
request that comes later may go earlier: then those behind it start later than predicted.

Source: docs/design/scheduler.md, "When a request starts and ends".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.fairness import WAIT_PER_WORK
from uma_trio.daemon.policy.prefill import PrefillBudget
from uma_trio.engine_link.attention import Attention

MAX_PHASES: Final = 256
"""Phases that are simulated.  What happens later is extrapolated, so a forecast takes some milliseconds at most."""


@attrs.frozen(kw_only=True)
class Load:
    """What is left to compute of one answer."""

    prefill_tokens: int
    """Tokens to prefill; 0: it decodes."""
    answer_tokens: float
    """Tokens that it is expected to generate still, at least 1."""
    context_tokens: int
    """Tokens that it has in the KV cache."""
    cells: int
    """KV cells that it reserves, or needs to start."""
    due_ms: float
    """During prefill: milliseconds until its first token is due."""
    target_itl_ms: float
    """Inter-token latency that it is promised."""


def mean_load(loads: Sequence[Load]) -> Load:
    """The mean of ``loads``, at least one; its latency is the shortest one that is promised."""
    n = len(loads)
    return Load(
        prefill_tokens=max(1, sum([load.prefill_tokens for load in loads]) // n),
        answer_tokens=sum([load.answer_tokens for load in loads]) / n,
        context_tokens=sum([load.context_tokens for load in loads]) // n,
        cells=sum([load.cells for load in loads]) // n,
        due_ms=sum([load.due_ms for load in loads]) / n,
        target_itl_ms=min([load.target_itl_ms for load in loads]),
    )


@attrs.frozen(kw_only=True)
class Speed:
    """What decides how long a tick takes and what is in it."""

    cost: CostModel
    settings: Scheduling
    max_tokens: int
    """Rows of the largest batch."""
    attention: Attention = attrs.field(factory=Attention)
    mixes_prefill: bool = True
    """One call computes decodes and prefill together; as in ``Tick``."""
    gap_ms: float = 0.0
    """Milliseconds for which the device waits before a tick."""

    def chunk_tokens(self, work: Work, target_itl_ms: float, n_prompts: int, overdue: Sequence[int] = ()) -> int:
        """Prefill tokens of a tick next to the decodes of ``work``, at least 1.

        Where the policy has prefill in every other tick, this is half of that in each.

        Args:
            target_itl_ms: of the decodes; ignored if there are none.
            n_prompts: how many requests wait for their first token.
            overdue: tokens of each prompt whose first token is overdue.
        """

        budget = PrefillBudget(
            cost=self.cost,
            settings=self.settings,
            alone=attrs.evolve(work, n_calls=1),
            due_ms=target_itl_ms if work.decode_rows else math.inf,
            max_tokens=self.max_tokens,
            n_prompts=n_prompts,
            overdue=overdue,
            follows_prefill=False,
        )
        n = budget.tokens(work)
        if work.decode_rows and n <= self.settings.min_chunk_tokens:
            after_prefill = msgspec.structs.replace(budget, follows_prefill=True)
            if after_prefill.tokens(work) <= 0:
                n //= 2
        return max(1, n)


@attrs.frozen(kw_only=True)
class Prediction:
    """When an answer starts and ends, in milliseconds from now."""

    queue_position: int
    """1: the next one that gets a place in the KV cache; 0: it has one."""
    place_ms: float
    """When it gets its place."""
    start_ms: float
    """When its first token comes, not before ``place_ms``; 0 if it decodes."""
    end_ms: float
    """When it ends, not before ``start_ms``."""


@attrs.frozen(kw_only=True)
class Arrivals:
    """The requests that are expected to come meanwhile."""

    every_ms: float
    """Time between two of them."""
    load: Load
    """The mean one.  ``due_ms`` counts from when it comes."""


def forecast(
    running: Sequence[Load],
    waiting: Sequence[Load],
    *,
    free_sequences: int,
    cells: int,
    speed: Speed,
    arrivals: Arrivals | None = None,
) -> list[Prediction]:
    """Predict start and end of each answer: first those of ``running``, then those of ``waiting``.

    Takes at most ``MAX_PHASES`` phases, each of which looks at all answers that have places.

    Args:
        waiting: in the order in which they get places.  The first one blocks the others until it fits.
        free_sequences: sequence ids that are free.
        cells: KV cells that are free.
        arrivals: requests that come later, behind all that wait.
    """
    simulation = _Simulation(running, waiting, free_sequences, cells, speed, arrivals)
    simulation.run()
    return simulation.predictions()


@attrs.define(eq=False, kw_only=True)
class _Course:
    """How one answer gets on in the simulation."""

    load: Load
    order: float
    """Lower values are prefilled first."""
    prefill: float
    answer: float
    context: float
    place_ms: float = math.inf
    start_ms: float = math.inf
    end_ms: float = math.inf
    is_expected: bool = False
    """It has not come yet."""


class _Simulation:
    def __init__(
        self,
        running: Sequence[Load],
        waiting: Sequence[Load],
        free_sequences: int,
        cells: int,
        speed: Speed,
        arrivals: Arrivals | None,
    ) -> None:
        self._token_ms = speed.cost.prefill_token_ms
        self._arrivals = arrivals
        self._next_ms = math.inf if arrivals is None else arrivals.every_ms
        """When the next request is expected."""
        self._all = [self._course(load) for load in (*running, *waiting)]
        self._n_left = len(self._all)
        """Those that have not ended; others are of no interest."""
        self._n_running = len(running)
        self._waiting = self._all[self._n_running :][::-1]
        """The next one is the last."""
        self._prefills: list[_Course] = []
        self._decodes: list[_Course] = []
        self._free_sequences, self._cells, self._speed = free_sequences, cells, speed
        self._now_ms = 0.0
        for course in self._all[: self._n_running]:
            self._place(course)

    def run(self) -> None:
        for _ in range(MAX_PHASES):
            self._arrive()
            self._admit()
            if not self._n_left or not (self._prefills or self._decodes):
                return
            self._advance()

    def _course(self, load: Load, came_ms: float = 0.0) -> _Course:
        return _Course(
            load=load,
            order=came_ms + load.due_ms + WAIT_PER_WORK * self._token_ms * load.prefill_tokens,
            prefill=load.prefill_tokens,
            answer=max(1.0, load.answer_tokens),
            context=load.context_tokens,
            is_expected=came_ms > 0,
        )

    def _arrive(self) -> None:
        while self._arrivals is not None and self._next_ms <= self._now_ms:
            self._waiting.insert(0, self._course(self._arrivals.load, self._next_ms))
            self._next_ms += self._arrivals.every_ms

    def _place(self, course: _Course) -> None:
        course.place_ms = self._now_ms
        if course.prefill:
            self._prefills.append(course)
            self._prefills.sort(key=lambda waiting: waiting.order)
        else:
            course.start_ms = self._now_ms
            self._decodes.append(course)

    def _admit(self) -> None:
        while self._waiting:
            is_alone = not (self._prefills or self._decodes)  # then it fits, or it would have been refused
            course = self._waiting[-1]
            if not is_alone and (self._free_sequences < 1 or self._cells < course.load.cells):
                return
            self._free_sequences -= 1
            self._cells -= course.load.cells
            self._place(self._waiting.pop())

    def _advance(self) -> None:
        """Simulate one phase."""
        decodes, speed = self._decodes, self._speed
        n_ticks = min([course.answer for course in decodes], default=math.inf)
        chunk = total = 0
        if self._prefills:
            target_ms = min([course.load.target_itl_ms for course in decodes], default=math.inf)
            chunk = speed.chunk_tokens(self._work(0.0), target_ms, len(self._prefills), self._overdue())
            total = math.ceil(sum([course.prefill for course in self._prefills]))
            n_ticks = max(1.0, min(self._prefills[0].prefill // chunk, n_ticks))
        if self._free_sequences > 0 and self._next_ms < math.inf:  # the next one runs at once
            tick_ms = speed.cost.predict(attrs.evolve(self._work(0.0), prefill_tokens=min(chunk, total)))
            n_ticks = min(n_ticks, max(1.0, (self._next_ms - self._now_ms) / max(tick_ms, 1e-6)))
        n_ticks = math.ceil(n_ticks)
        work = attrs.evolve(self._work(n_ticks / 2), prefill_tokens=min(chunk, total))
        self._now_ms += n_ticks * (speed.cost.predict(work) + speed.gap_ms)
        for course in decodes:
            course.answer -= n_ticks
            course.context += n_ticks
            if course.answer <= 0:
                self._end(course)
        self._decodes = [course for course in decodes if course.answer > 0]
        if chunk:
            self._prefill(n_ticks * chunk)

    def _work(self, ticks: float) -> Work:
        """The decodes of a tick, ``ticks`` later, and what a chunk next to them is."""
        n, attention = len(self._decodes), self._speed.attention
        contexts = [course.context for course in self._decodes]
        context = attention.decode_context(n, int(sum(contexts) + n * ticks), int(max(contexts, default=0) + ticks))
        n_calls, before = 1, 0.0
        if self._prefills:
            n_calls += bool(n) and not self._speed.mixes_prefill
            before = attention.prefill_context(self._prefills[0].context)
        return Work(0, n, context, mean_prefill_context=before, n_calls=n_calls)

    def _overdue(self) -> list[int]:
        """Tokens of each prompt whose first token is overdue, as in the policy: not of one longer than a batch."""
        return [
            math.ceil(course.prefill)
            for course in self._prefills
            if course.prefill <= self._speed.max_tokens and course.load.due_ms < self._now_ms
        ]

    def _prefill(self, tokens: float) -> None:
        while tokens > 0 and self._prefills:
            course = self._prefills[0]
            n = min(tokens, course.prefill)
            tokens -= n
            course.prefill -= n
            course.context += n
            if course.prefill <= 0:  # this tick samples its first token
                del self._prefills[0]
                course.start_ms = self._now_ms
                course.answer -= 1
                if course.answer > 0:
                    self._decodes.append(course)
                else:
                    self._end(course)

    def _end(self, course: _Course) -> None:
        course.end_ms = self._now_ms
        self._n_left -= not course.is_expected
        self._free_sequences += 1
        self._cells += course.load.cells

    def predictions(self) -> list[Prediction]:
        """What was simulated; the rest, beyond the last phase, in proportion to it."""
        ended = [course.end_ms - course.place_ms for course in self._all if course.end_ms < math.inf]
        mean_ms = sum(ended) / len(ended) if ended else self._now_ms
        n_placed = sum([course.place_ms < math.inf for course in self._all[self._n_running :]])
        predictions = []
        for index, course in enumerate(self._all):
            position = max(0, index - self._n_running + 1)
            place_ms = course.place_ms
            if place_ms == math.inf:
                place_ms = self._now_ms * (position + (not n_placed)) / max(1, n_placed)
            start_ms = course.start_ms if course.start_ms < math.inf else max(place_ms, self._now_ms)
            end_ms = course.end_ms if course.end_ms < math.inf else max(start_ms, self._now_ms) + mean_ms
            predictions.append(Prediction(queue_position=position, place_ms=place_ms, start_ms=start_ms, end_ms=end_ms))
        return predictions
