"""Says where the time of a recorded run went, by cause.

Each moment from the start of the first tick to the end of the last one belongs to one cause.  What a tick records is
divided among causes; nothing is estimated from outside.  Pure: a run in, plain numbers out.  docs/PERF_LOG.md explains
each cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import attrs
import numpy as np

from uma_trio.telemetry.perf_records import Run, TickRecord
from uma_trio.telemetry.perf_summary import Floats, column
from uma_trio.telemetry.tick_parts import Flags, size_class, tick_parts

MIN_TICKS: Final = 8
"""A best speed is measured over at least this many ticks of one size, if any size has as many."""

MIN_MS: Final = 1e-6
"""No device computes a token in less time; this is an error of the fit."""

Kind = Literal["work", "lost", "none"]


@attrs.frozen
class Cause:
    """Where time goes."""

    kind: Kind
    """Work at the best speed of this run; time above that; or time without work."""
    remedy: str
    """What makes it less."""


BEST: Final = ("prefill_tokens_per_s", "prefill_tokens", "decode_tokens_per_s", "decode_streams")
"""The best speeds of a run: of prefill with how many prompt tokens in a tick, and of decoding with how many streams."""

CAUSES: Final = {
    "prefill": Cause("work", "prompts that begin alike, so that more of them is cached"),
    "decode": Cause("work", "a smaller or more quantised model; a draft model (--draft-model)"),
    "attention": Cause("work", "shorter contexts; on a GPU also --type-k q8_0 --type-v q8_0"),
    "embeddings": Cause("work", "fewer or shorter texts to embed"),
    "short_chunks": Cause("lost", "longer ticks: --target-itl-ms, without streams --prefill-tick-ms"),
    "recomputation": Cause("lost", "more places (--parallel) and cells (--ctx); no crashes of the engine"),
    "narrow_batches": Cause("lost", "prefill that ends sooner (--target-itl-ms); clients that read"),
    "few_streams": Cause("lost", "more requests at a time"),
    "split_calls": Cause("lost", "streams of similar length; one call was predicted to be slower"),
    "draft_tokens": Cause("lost", "--no-speculation, if few draft tokens are accepted"),
    "slow_ticks": Cause("lost", "no other programs on its cores; a device that is cool enough"),
    "sampling": Cause("lost", "fewer logprobs, penalties and biases"),
    "masks": Cause("lost", "simpler schemas and grammars"),
    "kv_copies": Cause("lost", "more cells (--ctx), so that sessions stay in memory"),
    "host": Cause("lost", "a free core for the daemon"),
    "waiting": Cause("lost", "clients that read; faster controllers; no crashes of the engine"),
    "idle": Cause("none", "more requests"),
    "not_recorded": Cause("none", "a faster disk, if records were dropped"),
}
"""All causes, in the order of the report."""


def explain(run: Run) -> dict[str, Any]:
    """Seconds and share of each cause, and the best speeds that losses are measured against.

    ``wall_s`` is the time from the start of the first tick to the end of the last one.  Best speeds are ``None`` without
    such work.
    """
    ticks = run.ticks
    wall_ms = 1e3 * (_end_s(ticks[-1]) - ticks[0].start_s) if ticks else 0.0
    computed = [tick for tick in ticks if tick.decode_calls]
    ms_by_cause = _around_calls(ticks)
    best: dict[str, float | None] = dict.fromkeys(BEST)
    if computed:
        in_calls, best = _calls(computed)
        ms_by_cause |= {name: ms + ms_by_cause.get(name, 0.0) for name, ms in in_calls.items()}
    ms_by_cause["not_recorded"] = max(0.0, wall_ms - sum(ms_by_cause.values()))
    whole = sum(ms_by_cause.values()) or 1.0
    return {
        "ticks": len(ticks),
        "missing_records": run.unreadable_lines + (run.trailer.dropped_records if run.trailer is not None else 0),
        "wall_s": round(wall_ms / 1e3, 6),
        "best": best,
        "causes": [
            {
                "cause": name,
                "kind": cause.kind,
                "seconds": round(ms_by_cause.get(name, 0.0) / 1e3, 6),
                "share": round(ms_by_cause.get(name, 0.0) / whole, 4),
                "remedy": cause.remedy,
            }
            for name, cause in CAUSES.items()
        ],
    }


def _around_calls(ticks: Sequence[TickRecord]) -> dict[str, float]:
    """Milliseconds of everything but ``llama_decode``: in all ticks, and between them."""
    masks = [min(_ms(tick.mask_wait_ms), _ms(tick.sample_ms)) for tick in ticks]
    idle, waiting = 0.0, 0.0
    for before, after in pairwise(ticks):
        if after.host_gap_ms is None:
            pause = max(0.0, 1e3 * (after.start_s - _end_s(before)))
            without_requests = min(pause, _ms(after.idle_ms))
            idle += without_requests
            waiting += pause - without_requests
    return {
        "embeddings": sum(_ms(tick.embedding_ms) for tick in ticks),
        "draft_tokens": sum(_ms(tick.draft_model_ms) for tick in ticks),
        "sampling": sum(_ms(tick.sample_ms) for tick in ticks) - sum(masks),
        "masks": sum(masks),
        "kv_copies": sum(_ms(tick.copy_ms) for tick in ticks),
        "host": sum(_ms(tick.host_gap_ms) for tick in ticks[1:]),
        "waiting": waiting,
        "idle": idle,
    }


def _calls(ticks: Sequence[TickRecord]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Milliseconds of ``llama_decode``, and the best speeds.

    Streams need a call in every tick.  So its fixed cost belongs to the decodes, and prefill in the same call has what the
    call takes longer.  That is why no millisecond counts both as a short chunk and as a narrow batch.
    """
    parts = tick_parts(ticks)
    decodes, tokens, drafts, accepted, recomputed = (
        column(ticks, name)
        for name in ("n_decodes", "prompt_tokens", "draft_tokens", "accepted_draft_tokens", "recomputed_tokens")
    )
    has_decodes = decodes > 0
    prefill = parts.prefill + np.where(has_decodes, 0.0, parts.call)
    prefill_best, chunk = _fastest_prefill(tokens, prefill)
    at_best = np.minimum(prefill, prefill_best * tokens)
    once = 1 - np.clip(recomputed / np.maximum(1.0, tokens), 0.0, 1.0)
    rejected = parts.rows * np.clip((drafts - accepted) / np.maximum(1.0, decodes + drafts), 0.0, 1.0)
    decode = np.where(has_decodes, parts.call, 0.0) + parts.rows - rejected
    rows = decodes + np.minimum(drafts, accepted)
    is_plain = has_decodes & (tokens == 0) & (drafts == 0)
    decode_best, width = _widest_batch(decodes, rows, decode, is_plain if is_plain.any() else has_decodes)
    excess = np.maximum(0.0, decode - decode_best * rows)
    narrow = excess * _narrow_share(ticks, decodes, width)
    ms_by_cause = {
        "prefill": at_best @ once,
        "decode": (decode - excess).sum(),
        "attention": parts.context.sum() + parts.prefill_attention @ once,
        "short_chunks": (prefill - at_best) @ once,
        "recomputation": (prefill + parts.prefill_attention) @ (1 - once),
        "narrow_batches": narrow.sum(),
        "few_streams": (excess - narrow).sum(),
        "split_calls": parts.further_calls.sum(),
        "draft_tokens": rejected.sum(),
        "slow_ticks": parts.slow.sum(),
    }
    best = dict.fromkeys(BEST)
    if prefill_best > MIN_MS:
        best |= {"prefill_tokens_per_s": round(1e3 / prefill_best, 1), "prefill_tokens": round(chunk)}
    if decode_best > MIN_MS:
        best |= {"decode_tokens_per_s": round(1e3 / decode_best, 1), "decode_streams": round(width)}
    return {name: float(ms) for name, ms in ms_by_cause.items()}, best


def _fastest_prefill(tokens: Floats, ms: Floats) -> tuple[float, float]:
    """Milliseconds for a prompt token in the fastest ticks, and how many of them these ticks have; or zeros."""
    classes = [
        (float(ms[in_class].sum() / tokens[in_class].sum()), float(tokens[in_class].mean()))
        for in_class in _classes(tokens, tokens > 0)
    ]
    return min(classes, default=(0.0, 0.0))


def _widest_batch(decodes: Floats, rows: Floats, ms: Floats, selected: Flags) -> tuple[float, float]:
    """Milliseconds for a token in the widest batches among the ticks ``selected``, and their mean width; or zeros."""
    classes = [
        (float(ms[in_class].sum() / rows[in_class].sum()), float(decodes[in_class].mean()))
        for in_class in _classes(decodes, selected)
    ]
    return classes[-1] if classes else (0.0, 0.0)


def _narrow_share(ticks: Sequence[TickRecord], decodes: Floats, width: float) -> Floats:
    """The share of each tick's excess that is due to requests that were there and did not decode.

    In a batch of n streams, each token costs a/n more than in an infinitely wide one.  So the number of requests that were
    there divides the excess over the widest batch.
    """
    present = [max(tick.running, tick.n_decodes + tick.n_prefills) + tick.queue_depth for tick in ticks]
    streams = np.maximum(1.0, decodes)
    over_widest = 1 / streams - 1 / max(1.0, width)
    over_present = 1 / streams - 1 / np.clip(present, streams, np.maximum(streams, width))
    share = np.divide(over_present, over_widest, out=np.zeros_like(streams), where=over_widest > 0)
    return np.clip(share, 0.0, 1.0)


def _classes(sizes: Floats, selected: Flags) -> list[Flags]:
    """The ``selected`` ticks by class of size, small ones first.  Without classes of few ticks, unless all have few."""
    kinds = size_class(sizes)
    classes = [selected & (kinds == kind) for kind in np.unique(kinds[selected])]
    return [in_class for in_class in classes if in_class.sum() >= MIN_TICKS] or classes


def _ms(value: float | None) -> float:
    return max(0.0, value or 0.0)


def _end_s(tick: TickRecord) -> float:
    parts = (tick.draft_model_ms, tick.embedding_ms, tick.copy_ms, tick.decode_ms, tick.sample_ms)
    return tick.start_s + sum(map(_ms, parts)) / 1e3
