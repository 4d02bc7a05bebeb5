"""Recordings of streams, and statistics of them.

Timestamps are in seconds, on one clock; durations are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

Gap = tuple[float, float]
"""Timestamps of two consecutive tokens of an answer."""


@attrs.frozen(kw_only=True)
class Question:
    """One request; greedy unless it has a temperature."""

    text: str
    raw: bool = False
    """Send ``text`` as a prompt instead of a chat message."""
    max_tokens: int = 1024
    ignore_eos: bool = False
    """Generate exactly ``max_tokens``."""
    temperature: float = 0.0
    seed: int = 0
    json_schema: dict[str, Any] | None = attrs.field(default=None, hash=False)
    """Constrain the answer."""


@attrs.frozen(kw_only=True)
class Stream:
    """One client, which asks its questions one after another on one connection."""

    name: str
    questions: tuple[Question, ...]
    interactive: bool = True
    """Whether this is a chat, whose latency is judged, or a long prompt."""


@attrs.define(kw_only=True)
class Answer:
    """One request as its client saw it.  Grows while the answer streams."""

    question: Question
    sent_s: float
    token_s: list[float] = attrs.field(factory=list)
    """When the event of each token was decoded."""
    texts: list[str] = attrs.field(factory=list)
    """Text of each token; empty inside a character."""
    reason: str | None = None
    """Why it ended; ``None`` while it runs."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As the server counts them, like ``prompt_tokens``."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; ``None`` without one."""
        return 1e3 * (self.token_s[0] - self.sent_s) if self.token_s else None

    @property
    def gaps(self) -> list[Gap]:
        return list(pairwise(self.token_s))


@attrs.define(kw_only=True)
class Track:
    """All answers of one stream, in order."""

    stream: Stream
    answers: list[Answer] = attrs.field(factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(len(answer.token_s) for answer in self.answers)

    @property
    def gaps(self) -> list[Gap]:
        """Gaps within answers.  The pause between an answer and the next question does not count."""
        return [gap for answer in self.answers for gap in answer.gaps]

    @property
    def finished(self) -> bool:
        """Whether every question has a complete answer."""
        return len(self.answers) == len(self.stream.questions) and all(
            answer.reason in ("stop", "length") for answer in self.answers
        )


def durations_ms(gaps: Iterable[Gap]) -> list[float]:
    return [1e3 * (end - start) for start, end in gaps]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile with linear interpolation; ``None`` without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def prefill_windows(tracks: Iterable[Track]) -> list[Gap]:
    """Return when long prompts were in prefill: from each request to its first token."""
    return [
        (answer.sent_s, answer.token_s[0])
        for track in tracks
        if not track.stream.interactive
        for answer in track.answers
        if answer.token_s
    ]


def overlapping(gaps: Iterable[Gap], windows: Sequence[Gap]) -> list[Gap]:
    """Return the gaps that overlap at least one of ``windows``, in full or in part."""
    return [gap for gap in gaps if any(gap[1] > start and gap[0] < end for start, end in windows)]


def arrivals(tracks: Sequence[Track]) -> list[int]:
    """Return the track index of each token, in order of arrival."""
    tokens = [(at, index) for index, track in enumerate(tracks) for answer in track.answers for at in answer.token_s]
    return [index for _, index in sorted(tokens, key=lambda token: token[0])]


def switches(order: Sequence[int]) -> int:
    """Count how often consecutive tokens belong to different streams."""
    return sum(a != b for a, b in pairwise(order))


def possible_switches(order: Sequence[int]) -> int:
    """Return the maximum of ``switches`` over all orders of the same tokens."""
    if not order:
        return 0
    most = max(order.count(index) for index in set(order))
    return min(len(order) - 1, 2 * (len(order) - most))
