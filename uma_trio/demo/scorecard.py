"""The Phase 1 go/no-go gate: figures of a mixed load, and a verdict on each.

docs/SCORECARD.md explains the lines.  Pure: recordings and counters in, records out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from uma_trio.demo.recording import (
    Track,
    arrivals,
    lengths_ms,
    percentile,
    possible_switches,
    reading_windows,
    switches,
    within,
)

MIN_AVERAGE_BATCH: Final = 1.5
MIN_SHARE_OF_SWITCHES: Final = 0.5
"""Of the switches that are possible; streams served one after another have hardly any."""


@attrs.frozen(kw_only=True)
class Counters:
    """What the server has counted since its start."""

    ticks: int
    batch_rows: float
    """Sequences served, summed over the ticks."""
    tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, snapshot: dict[str, Any]) -> Counters:
        """From a metrics event; its average is rounded, so ``batch_rows`` is good to a tenth of a percent."""
        ticks = snapshot["ticks_total"]
        return cls(
            ticks=ticks,
            batch_rows=ticks * (snapshot.get("avg_batch") or 0.0),
            tokens=snapshot["tokens_total"],
            prompt_tokens=snapshot["prompt_tokens_total"],
        )

    def since(self, before: Counters) -> Counters:
        return Counters(
            ticks=self.ticks - before.ticks,
            batch_rows=self.batch_rows - before.batch_rows,
            tokens=self.tokens - before.tokens,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
        )

    @property
    def average_batch(self) -> float | None:
        """Sequences in a tick."""
        return self.batch_rows / self.ticks if self.ticks else None

    @property
    def tokens_per_tick(self) -> float | None:
        """Generated tokens that a tick yields."""
        return self.tokens / self.ticks if self.ticks else None


@attrs.frozen(kw_only=True)
class StreamScore:
    """The figures of one stream."""

    name: str
    interactive: bool
    answers: int
    prompt_tokens: int
    tokens: int
    ttft_ms: float | None
    """The worst of its answers."""
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_max_ms: float | None


@attrs.frozen(kw_only=True)
class Check:
    """One line of the gate."""

    name: str
    passed: bool
    detail: str


@attrs.frozen(kw_only=True)
class Scorecard:
    """All of it."""

    streams: tuple[StreamScore, ...]
    average_batch: float | None
    tokens_per_tick: float | None
    ticks: int
    wall_s: float
    tokens_per_s: float
    checks: tuple[Check, ...]

    @property
    def go(self) -> bool:
        return all(check.passed for check in self.checks)


def score_stream(track: Track) -> StreamScore:
    gaps = lengths_ms(track.gaps)
    first = [answer.ttft_ms for answer in track.answers if answer.ttft_ms is not None]
    return StreamScore(
        name=track.stream.name,
        interactive=track.stream.interactive,
        answers=len(track.answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in track.answers),
        tokens=track.n_tokens,
        ttft_ms=max(first, default=None),
        itl_p50_ms=percentile(gaps, 50),
        itl_p95_ms=percentile(gaps, 95),
        itl_max_ms=max(gaps, default=None),
    )


def score(
    together: Sequence[Track],
    alone: Sequence[Track],
    counted: Counters,
    *,
    wall_s: float,
    max_gap_ms: float,
) -> Scorecard:
    """Judge a mixed load.

    Args:
        together: the streams side by side.
        alone: the same streams, one after another.
        counted: by the server, during ``together``.
        wall_s: how long that took.
        max_gap_ms: the longest that a chat may be silent between two tokens while a long prompt is read.
    """
    return Scorecard(
        streams=tuple(score_stream(track) for track in together),
        average_batch=counted.average_batch,
        tokens_per_tick=counted.tokens_per_tick,
        ticks=counted.ticks,
        wall_s=wall_s,
        tokens_per_s=sum(track.n_tokens for track in together) / wall_s if wall_s > 0 else 0.0,
        checks=(
            _all_finished(together),
            _interleaved(together),
            _batched(counted),
            _never_frozen(together, max_gap_ms),
            _same_text(together, alone),
        ),
    )


def _all_finished(tracks: Sequence[Track]) -> Check:
    done = sum(track.finished for track in tracks)
    return Check(name="all streams finished", passed=done == len(tracks) > 0, detail=f"{done} of {len(tracks)}")


def _interleaved(tracks: Sequence[Track]) -> Check:
    order = arrivals(tracks)
    count, most = switches(order), possible_switches(order)
    return Check(
        name="tokens interleaved",
        passed=most > 0 and count >= MIN_SHARE_OF_SWITCHES * most,
        detail=f"{count:,} switches between streams in {len(order):,} tokens; "
        f"{MIN_SHARE_OF_SWITCHES:.0%} of the {most:,} possible are asked for",
    )


def _batched(counted: Counters) -> Check:
    average = counted.average_batch or 0.0
    return Check(
        name="average batch",
        passed=average >= MIN_AVERAGE_BATCH,
        detail=f"{average:.2f} sequences in each of {counted.ticks:,} ticks; "
        f"at least {MIN_AVERAGE_BATCH} are asked for",
    )


def _never_frozen(tracks: Sequence[Track], max_gap_ms: float) -> Check:
    windows = reading_windows(tracks)
    chats = [gap for track in tracks if track.stream.interactive for gap in track.gaps]
    gaps = lengths_ms(within(chats, windows))
    name = "no chat froze"
    if not gaps:
        return Check(name=name, passed=False, detail="no chat was streaming while the long prompt was read")
    reading_s = sum(end - start for start, end in windows)
    return Check(
        name=name,
        passed=max(gaps) <= max_gap_ms,
        detail=f"worst gap {max(gaps):.1f} ms, of {len(gaps):,} while the long prompt was read in "
        f"{reading_s:.1f} s; at most {max_gap_ms:g} ms are allowed",
    )


def _same_text(together: Sequence[Track], alone: Sequence[Track]) -> Check:
    texts = [[answer.text for answer in track.answers] for track in together]
    again = [[answer.text for answer in track.answers] for track in alone]
    different = [track.stream.name for track, one, other in zip(together, texts, again, strict=True) if one != other]
    return Check(
        name="same text as alone",
        passed=not different,
        detail=f"differs: {', '.join(different)}" if different else f"{sum(map(len, texts))} answers, greedy",
    )
