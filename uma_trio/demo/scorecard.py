"""The go/no-go scorecard of a mixed load.  docs/BENCHMARKS.md explains its lines.

Pure: recordings and counters in, records out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from uma_trio.demo.recording import (
    Track,
    arrivals,
    durations_ms,
    overlapping,
    percentile,
    possible_switches,
    prefill_windows,
    switches,
)

MIN_AVERAGE_BATCH: Final = 1.5
MIN_SHARE_OF_SWITCHES: Final = 0.5
"""Fraction of the possible switches.  Streams that are served one after another have hardly any."""

MIN_CONTENTION: Final = 0.15
"""Share of the machine's cores that other programs must use to be named as a cause of late tokens."""


@attrs.frozen(kw_only=True)
class Counters:
    """Counters of the server since its start, or a difference of two such readings."""

    ticks: int
    batch_rows: float
    """Sum over the ticks of the sequences in each."""
    tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, snapshot: dict[str, Any]) -> Counters:
        """Read the counters from a metrics snapshot.

        The snapshot rounds the average batch, so ``batch_rows`` is exact to a tenth of a percent.
        """
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
        """Average number of sequences in a tick; ``None`` without ticks."""
        return self.batch_rows / self.ticks if self.ticks else None

    @property
    def tokens_per_tick(self) -> float | None:
        """Average number of generated tokens of a tick; ``None`` without ticks."""
        return self.tokens / self.ticks if self.ticks else None


@attrs.frozen(kw_only=True)
class StreamScore:
    """Statistics of one stream."""

    name: str
    interactive: bool
    answers: int
    prompt_tokens: int
    tokens: int
    ttft_ms: float | None
    """Maximum over its answers."""
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_max_ms: float | None


@attrs.frozen(kw_only=True)
class Check:
    """One line of the verdict."""

    name: str
    passed: bool
    detail: str
    depends_on_speed: bool = False


@attrs.frozen(kw_only=True)
class CpuUse:
    """How many cores were busy during the run, on average."""

    cores: int
    """Cores of the machine."""
    by_others: float
    """Cores that other programs used."""

    @property
    def is_contended(self) -> bool:
        return self.by_others >= MIN_CONTENTION * self.cores


@attrs.frozen(kw_only=True)
class Scorecard:
    """Statistics of all streams, and the verdict."""

    streams: tuple[StreamScore, ...]
    average_batch: float | None
    tokens_per_tick: float | None
    ticks: int
    wall_s: float
    tokens_per_s: float
    cpu: CpuUse | None
    """``None`` if it could not be measured."""
    checks: tuple[Check, ...]

    @property
    def go(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def advice(self) -> str | None:
        """What to do about tokens that came too late; ``None`` if there were none."""
        if all(check.passed for check in self.checks if check.depends_on_speed):
            return None
        if self.cpu is None:
            return "If other programs were busy, run the demo again when the machine is idle."
        used = f"Other programs used {self.cpu.by_others:.1f} of {self.cpu.cores} cores during the run"
        if self.cpu.is_contended:
            return f"{used}, which may be the reason. Run the demo again when the machine is idle."
        return f"{used}, so they are not the reason. If this machine is too slow, allow more with --max-gap-ms."


def score_stream(track: Track) -> StreamScore:
    gaps = durations_ms(track.gaps)
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
    cpu: CpuUse | None = None,
) -> Scorecard:
    """Judge a mixed load.

    Args:
        together: tracks of the streams, run at the same time.
        alone: tracks of the same streams, run one after another.
        counted: the server's counters, for the time of ``together``.
        wall_s: duration of ``together``.
        max_gap_ms: maximum time between two tokens of a chat during prefill of a long prompt.
        cpu: use of the processor during ``together``.
    """
    return Scorecard(
        streams=tuple(score_stream(track) for track in together),
        average_batch=counted.average_batch,
        tokens_per_tick=counted.tokens_per_tick,
        ticks=counted.ticks,
        wall_s=wall_s,
        tokens_per_s=sum(track.n_tokens for track in together) / wall_s if wall_s > 0 else 0.0,
        cpu=cpu,
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
        f"{MIN_SHARE_OF_SWITCHES:.0%} of the {most:,} possible are required",
    )


def _batched(counted: Counters) -> Check:
    average = counted.average_batch or 0.0
    return Check(
        name="average batch",
        passed=average >= MIN_AVERAGE_BATCH,
        detail=f"{average:.2f} sequences in each of {counted.ticks:,} ticks; at least {MIN_AVERAGE_BATCH} are required",
    )


def _never_frozen(tracks: Sequence[Track], max_gap_ms: float) -> Check:
    windows = prefill_windows(tracks)
    chats = [gap for track in tracks if track.stream.interactive for gap in track.gaps]
    gaps = durations_ms(overlapping(chats, windows))
    name = "no chat froze"
    if not gaps:
        return Check(name=name, passed=False, detail="no chat was streaming during prefill of the long prompt")
    prefill_s = sum(end - start for start, end in windows)
    return Check(
        name=name,
        depends_on_speed=True,
        passed=max(gaps) <= max_gap_ms,
        detail=f"worst gap {max(gaps):.1f} ms, of {len(gaps):,} during the {prefill_s:.1f} s of prefill; "
        f"at most {max_gap_ms:g} ms are allowed",
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
