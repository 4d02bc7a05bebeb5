"""What was asked and when each token came: plain records, and the figures that follow from them.

Times are seconds of one clock; figures are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs
import numpy as np

Gap = tuple[float, float]
"""From one token of an answer to its next."""


@attrs.frozen(kw_only=True)
class Question:
    """One greedy request."""

    text: str
    raw: bool = False
    """``text`` is the prompt as it is, instead of a chat message."""
    max_tokens: int = 1024
    ignore_eos: bool = False
    """Generate exactly ``max_tokens``."""


@attrs.frozen(kw_only=True)
class Stream:
    """One client: its questions, one after another on one connection."""

    name: str
    questions: tuple[Question, ...]
    interactive: bool = True
    """Somebody waits for each token; otherwise it is the long prompt."""


@attrs.define(kw_only=True)
class Answer:
    """One request as the client saw it.  Grows while it streams."""

    question: Question
    sent_s: float
    token_s: list[float] = attrs.field(factory=list)
    """When each token's event was decoded."""
    pieces: list[str] = attrs.field(factory=list)
    """Their texts; some are empty, inside a character."""
    reason: str | None = None
    """Why it ended; ``None`` before."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As the server counts them."""
    cached_tokens: int = 0
    """Of the prompt; not computed for this one."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; ``None`` before it."""
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
        """Within answers; the pause between an answer and the next question is nobody's latency."""
        return [gap for answer in self.answers for gap in answer.gaps]

    @property
    def finished(self) -> bool:
        """Every question has its whole answer."""
        return len(self.answers) == len(self.stream.questions) and all(
            answer.reason in ("stop", "length") for answer in self.answers
        )


def lengths_ms(gaps: Iterable[Gap]) -> list[float]:
    return [1e3 * (end - start) for start, end in gaps]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours, as numpy has it; ``None`` of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


def reading_windows(tracks: Iterable[Track]) -> list[Gap]:
    """When long prompts were being read: from each one's request to its first token."""
    return [
        (answer.sent_s, answer.token_s[0])
        for track in tracks
        if not track.stream.interactive
        for answer in track.answers
        if answer.token_s
    ]


def within(gaps: Iterable[Gap], windows: Sequence[Gap]) -> list[Gap]:
    """Those that overlap one of ``windows``, be it in part."""
    return [gap for gap in gaps if any(gap[1] > start and gap[0] < end for start, end in windows)]


def arrivals(tracks: Sequence[Track]) -> list[int]:
    """The index of the track of each token, in the order in which the tokens came."""
    tokens = [(at, index) for index, track in enumerate(tracks) for answer in track.answers for at in answer.token_s]
    return [index for _, index in sorted(tokens, key=lambda token: token[0])]


def switches(order: Sequence[int]) -> int:
    """How often the next token is another stream's."""
    return sum(a != b for a, b in pairwise(order))


def possible_switches(order: Sequence[int]) -> int:
    """The most that any order of the same tokens has."""
    if not order:
        return 0
    most = max(order.count(index) for index in set(order))
    return min(len(order) - 1, 2 * (len(order) - most))
