"""Reports to clients when their requests start and end, and refused ones when to come back."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain
from typing import Final

import attrs
import trio

from uma_trio.config import Scheduling
from uma_trio.daemon.policy import places
from uma_trio.daemon.policy.answer_lengths import AnswerLengths
from uma_trio.daemon.policy.forecast import Arrivals, Load, Prediction, Speed, forecast, mean_load
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.running import RunningSet
from uma_trio.daemon.serving.waiting import WaitingQueue
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.errors import DeadlineMissed, UmaError
from uma_trio.protocol.events import Forecast
from uma_trio.protocol.usage import FinishReason

UPDATE_S: Final = 0.5
"""A client that waits gets another forecast after this time at the earliest."""

MUCH: Final = 0.2
"""It gets one if its place has changed, or if its start has moved by this share of the time until then."""

LEAST_MS: Final = 250.0
"""A start that moves by less than this has not changed."""

PACE_DECAY: Final = 0.9
"""Weight of all earlier outcomes after one more in the pace."""

FIRST_MS: Final = 500.0
"""How much a perfect prediction counts that is assumed at the start."""

MAX_PACE: Final = 4.0
"""Bound of the pace, which is at least 1 / ``MAX_PACE``."""

MAX_SHARE: Final = 0.05
"""Share of the time that computing forecasts may take."""

SAVED_S: Final = 1.0
"""This much of the time before may have been saved for it, so requests that come one by one get theirs at once."""

SMALLEST: Final = Load(prefill_tokens=1, answer_tokens=1, context_tokens=0, cells=1, due_ms=0.0, target_itl_ms=math.inf)
"""Stands for a request that has been refused: when it gets a place, there is room."""


MAX_ARRIVALS: Final = 32
"""The next requests are expected to come as the last ones did, and to be as large."""

MIN_SPAN_S: Final = 20.0
"""Fewer requests than that came at least within this time: a single burst says little of what comes next."""


@attrs.define
class _Known:
    """What was predicted for one answer."""

    n_reusable: int | None = None
    """Prompt tokens that it would have found in the KV cache when its forecast needed them first; ``None`` before."""
    predicted: Prediction | None = None
    """The last prediction, before the pace has corrected it."""
    predicted_at: float = 0.0
    """When that was."""
    sent: Forecast | None = None
    """The last forecast that its client got."""


@attrs.define(eq=False, kw_only=True)
class Forecaster:
    """Predicts when the answers of one scheduler start and end."""

    _running: RunningSet
    _waiting: WaitingQueue
    _timings: StepTimings
    _info: ModelInfo
    _settings: Scheduling
    _lengths: AnswerLengths = attrs.field(factory=AnswerLengths, init=False)
    _retries: places.RetrySchedule = attrs.field(factory=places.RetrySchedule, init=False)
    _known: defaultdict[Answer, _Known] = attrs.field(factory=lambda: defaultdict(_Known), init=False)
    """What was predicted for answers that have not ended."""
    _arrived: deque[tuple[float, Load]] = attrs.field(factory=lambda: deque(maxlen=MAX_ARRIVALS), init=False)
    """When the last requests came, and what they were."""
    _mean: Load = attrs.field(default=SMALLEST, init=False)
    """The mean of these requests."""
    _true_ms: float = attrs.field(default=FIRST_MS, init=False)
    _predicted_ms: float = attrs.field(default=FIRST_MS, init=False)
    """Sums over the last outcomes, of which the latest count most."""
    _may_at: float = attrs.field(default=-math.inf, init=False)
    """When the next forecast may be computed."""
    _reported_at: float = attrs.field(default=-math.inf, init=False)
    _room: tuple[float, float] = attrs.field(default=(0.0, 0.0), init=False)
    """For refused requests: milliseconds until there is room for one, and between two, before the pace."""
    _room_until: float = attrs.field(default=-math.inf, init=False)
    """How long ``_room`` holds: a flood of refused requests does not have it computed for each."""

    def arrived(self, answer: Answer) -> None:
        """Learn from a request that has come, and was not refused."""
        self._arrived.append((answer.times.arrived_at, self._load(answer)))
        self._mean = mean_load([load for _, load in self._arrived])

    def _arrivals(self) -> Arrivals | None:
        """The requests that are expected to come."""
        if not self._arrived:
            return None
        span_s = max(MIN_SPAN_S, trio.current_time() - self._arrived[0][0])
        return Arrivals(every_ms=1e3 * span_s / len(self._arrived) / self._pace, load=self._mean)

    def ended(self, answer: Answer, reason: FinishReason | UmaError) -> None:
        """Learn from an answer that has ended: how long answers are, and how accurate predictions are."""
        ended_itself = not isinstance(reason, UmaError) and reason not in ("length", "cancelled")
        if not answer.request.ignore_eos:  # the length of others is what their clients chose
            self._lengths.record(len(answer.tokens), ended_itself=ended_itself)
        known = self._known.pop(answer, _Known())
        predicted, at = known.predicted, known.predicted_at
        if predicted is None or answer.times.first_token_at is None or answer.times.ended_at is None:
            return
        if predicted.queue_position:
            self._learn(answer.times.first_token_at - at, predicted.start_ms)
        elif (ended_itself or reason == "length") and not self._is_disturbed(at, predicted.end_ms):
            self._learn(answer.times.ended_at - at, predicted.end_ms)

    def _is_disturbed(self, at: float, end_ms: float) -> bool:
        """Whether requests came after ``at``, or were expected: then the end tells less of the pace than of these."""
        arrivals = self._arrivals()
        return arrivals is not None and (self._arrived[-1][0] > at or arrivals.every_ms < end_ms)

    def _learn(self, true_s: float, predicted_ms: float) -> None:
        self._true_ms = PACE_DECAY * self._true_ms + 1e3 * true_s
        self._predicted_ms = PACE_DECAY * self._predicted_ms + predicted_ms

    @property
    def _pace(self) -> float:
        """Factor on predictions, learned from the results of the last ones.

        It covers other work of the machine, draft tokens and clients that read slowly.
        """
        return min(MAX_PACE, max(1 / MAX_PACE, self._true_ms / max(1.0, self._predicted_ms)))

    def report(self) -> list[tuple[Answer, DeadlineMissed]]:
        """Send forecasts to those who asked for them and have none yet, or one that has changed much.

        Call it in every tick, and when a request has come that waits or has a deadline.  Most calls do nothing.

        Returns:
            New answers that will miss their deadlines, each with the error that says so.
        """
        asking = {
            answer: known for answer in chain(self._running, self._waiting) if (known := self._asks(answer)) is not None
        }
        if not asking:
            return []
        now = trio.current_time()
        is_update = now >= self._reported_at + UPDATE_S
        if now < self._may_at or not (is_update or any(known.predicted is None for known in asking.values())):
            return []
        if is_update:
            self._reported_at = now
        predictions, late = self._predict(), []
        for answer, known in asking.items():
            if known.predicted is not None and not is_update:
                continue
            prediction = predictions[answer]
            error = self._missed(answer, prediction, now) if known.predicted is None else None
            if error is not None:
                late.append((answer, error))
            elif answer.request.forecast:
                _send(answer, known, prediction, self._pace, now)
            else:
                known.predicted, known.predicted_at = prediction, now
        took_s = trio.current_time() - now
        self._may_at = max(self._may_at, now - SAVED_S) + took_s / MAX_SHARE
        return late

    def retry_after_ms(self) -> int:
        """When the next refused request may come back: after those that wait, and those that were refused before."""
        if not len(self._running) and not len(self._waiting):
            self._retries.clear()
        now = trio.current_time()
        if now >= self._room_until:
            waiting = [*map(self._load, self._waiting.in_order()), SMALLEST]
            predictions = self._forecast([*map(self._load, self._running)], waiting)
            self._room = (
                predictions[-1].place_ms,
                max(prediction.end_ms for prediction in predictions) / len(predictions),
            )
            self._room_until = trio.current_time() + (trio.current_time() - now) / MAX_SHARE
        room_s, interval_s = (1e-3 * self._pace * ms for ms in self._room)
        return round(1e3 * self._retries.wait_s(now, room_s, interval_s))

    def _asks(self, answer: Answer) -> _Known | None:
        """What is known of ``answer`` if it needs a forecast and has not started, otherwise ``None``.

        A deadline needs only one forecast, as does one that has a place and starts soon.
        """
        if answer.tokens or answer.state is State.FINISHED:
            return None
        known, wants = self._known[answer], answer.request.forecast
        if known.predicted is None:
            needs = wants or answer.deadline_at < math.inf
        else:
            needs = wants and (known.predicted.queue_position > 0 or known.predicted.start_ms > 1e3 * UPDATE_S)
        return known if needs else None

    def _missed(self, answer: Answer, prediction: Prediction, now: float) -> DeadlineMissed | None:
        """The error for ``answer`` if it is predicted to end after its deadline; where nobody knows how long answers are, if
        it is predicted to start after that.

        It says when to come back, if the wait for others is what makes it late.
        """
        ends = answer.request.ignore_eos or self._lengths.is_known
        at_ms, left_ms = prediction.end_ms if ends else prediction.start_ms, 1e3 * (answer.deadline_at - now)
        late_ms = self._pace * at_ms - left_ms
        if late_ms <= 0:
            return None
        waits = self._pace * (at_ms - prediction.place_ms) <= left_ms
        error = DeadlineMissed(
            f"the answer would {'be complete' if ends else 'begin'} in {math.ceil(self._pace * at_ms)} ms, and deadline_ms leaves "
            f"{max(0, math.floor(left_ms))} ms: give it more, or ask for fewer tokens",
            field="deadline_ms",
            retry_after_ms=math.ceil(late_ms) if waits else None,
        )
        error.eta_ms = math.ceil(self._pace * prediction.end_ms)
        return error

    def _reusable(self, answer: Answer) -> int:
        """Tokens of ``answer``, which waits, that are expected to be in the KV cache when it gets a place."""
        known = self._known[answer]
        if known.n_reusable is None:
            known.n_reusable = self._running.reusable(answer)
        return known.n_reusable

    def _predict(self) -> dict[Answer, Prediction]:
        running, waiting = [*self._running], self._waiting.in_order()
        predictions = self._forecast([*map(self._load, running)], [*map(self._load, waiting)], self._arrivals())
        return dict(zip([*running, *waiting], predictions, strict=True))

    def _forecast(
        self, running: Sequence[Load], waiting: Sequence[Load], arrivals: Arrivals | None = None
    ) -> list[Prediction]:
        kv = self._running.capacity()
        speed = Speed(
            cost=self._timings.cost,
            settings=self._settings,
            max_tokens=self._info.n_batch,
            attention=self._timings.attention,
            mixes_prefill=self._info.unified,
            gap_ms=self._timings.gap_ms,
        )
        return forecast(
            running, waiting, free_sequences=kv.free_sequences, cells=kv.free_cells, speed=speed, arrivals=arrivals
        )

    def _load(self, answer: Answer) -> Load:
        n_tokens, allocation = len(answer.tokens), answer.allocation
        decodes = answer.state in (State.DECODE, State.FINISHED)
        is_over = answer.state is State.FINISHED
        n_left = max(1, answer.max_tokens - n_tokens)
        n_expected = n_left if answer.request.ignore_eos else self._lengths.expected(n_tokens, n_left)
        n_there = self._reusable(answer) if allocation is None else allocation.n_tokens
        return Load(
            prefill_tokens=0 if decodes else max(1, answer.n_known - n_there),
            answer_tokens=1 if is_over else n_expected,
            context_tokens=n_there,
            cells=answer.max_cells if allocation is None else allocation.own_cells,
            due_ms=1e3 * (answer.due_at - trio.current_time()),
            target_itl_ms=answer.target_itl_ms,
        )


def _send(answer: Answer, known: _Known, prediction: Prediction, pace: float, now: float) -> None:
    last, start_ms = known.sent, pace * prediction.start_ms
    if last is not None and last.queue_position == prediction.queue_position:
        moved_ms = abs(start_ms - last.start_ms + 1e3 * (now - known.predicted_at))
        if moved_ms < max(LEAST_MS, MUCH * start_ms):
            return
    known.predicted, known.predicted_at = prediction, now
    known.sent = Forecast(
        id=answer.request.id,
        queue_position=prediction.queue_position,
        start_ms=round(start_ms, 1),
        end_ms=round(pace * prediction.end_ms, 1),
        index=answer.index,
    )
    answer.sink.send(known.sent)
