"""Divides the time of recorded ticks between what they computed, by a fit over all of them.

The time of the ``llama_decode`` calls of a tick is close to linear in what they compute, as in ``daemon/policy/cost.py``::

    t = a * calls + b * decode rows + c * context + d * (has prefill) + e * prefill tokens + f * prefill attention

A line fits no device exactly.  So ticks that compute about as much form a group, and the parts of its ticks are scaled to
what the group took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.telemetry.perf_records import TickRecord
from uma_trio.telemetry.perf_summary import Floats, column

Flags = npt.NDArray[np.bool_]

SLOW: Final = 1.5
"""Time beyond this multiple of what is usual in the tick's group is not due to its work."""

ROUNDS: Final = 3
"""How often the coefficients are fitted.  Each round leaves out what made ticks slow in the round before."""

MIN_MS: Final = 0.01
"""Errors of the fit are relative to the duration of a tick, or to this if it is shorter."""


@attrs.frozen
class TickParts:
    """Milliseconds of each tick.  None is negative.  The parts of all ticks together add up to their ``decode_ms``."""

    call: Floats
    """Fixed cost of the call that computes the decodes, or of the first call if there are none."""
    further_calls: Floats
    """Fixed cost of all other calls, but not of a call that computes the prefill next to decodes."""
    rows: Floats
    """Rows of decodes."""
    context: Floats
    """Attention of decodes."""
    prefill: Floats
    """Prefill without attention, with the fixed cost of its own call next to decodes."""
    prefill_attention: Floats
    slow: Floats
    """What the tick took longer than usual."""


def tick_parts(ticks: Sequence[TickRecord]) -> TickParts:
    """Divide ``decode_ms`` of ``ticks``, which called ``llama_decode``."""
    decodes, tokens, calls = (column(ticks, name) for name in ("n_decodes", "prompt_tokens", "decode_calls"))
    decode_ms = np.maximum(0.0, column(ticks, "decode_ms"))
    is_mixed = (tokens > 0) & (decodes > 0)
    own_calls = is_mixed & (bool(is_mixed.any()) and calls[is_mixed].min() > 1)
    further = np.maximum(0.0, calls - 1 - own_calls)
    squares = np.array([sum(n * n for _, n in tick.prefill_chunks) for tick in ticks])
    work = np.column_stack([
        1 + further,
        decodes + column(ticks, "draft_tokens"),
        column(ticks, "context_tokens"),
        tokens > 0,
        tokens,
        tokens * column(ticks, "prefill_context") + squares / 2,
    ])  # fmt: skip
    groups = _groups(decodes, tokens)
    usual = decode_ms.copy()
    for _ in range(ROUNDS):
        parts = work * _non_negative_fit(work, usual)
        total = parts.sum(axis=1)
        ratios = np.divide(decode_ms, total, out=np.zeros_like(total), where=total > 0)
        for group in groups:
            usual[group] = np.minimum(decode_ms[group], SLOW * np.median(ratios[group]) * total[group])
    for group in groups:
        parts[group] *= usual[group].sum() / (total[group].sum() or 1.0)
    calls_ms, rows, context, has_prefill, prefill, prefill_attention = parts.T
    call = calls_ms / (1 + further)
    return TickParts(call, calls_ms - call, rows, context, has_prefill + prefill, prefill_attention, decode_ms - usual)


def size_class(n: Floats) -> npt.NDArray[np.int64]:
    """The number of binary digits of each of ``n``."""
    return np.frexp(n)[1]


def _groups(decodes: Floats, tokens: Floats) -> list[Flags]:
    """Ticks with about as many streams and prompt tokens."""
    keys = size_class(decodes) * 64 + size_class(tokens)
    return [keys == key for key in np.unique(keys)]


def _non_negative_fit(work: Floats, ms: Floats) -> Floats:
    """The coefficients with the smallest relative errors, of which none is negative.

    The most negative coefficient is fixed at 0, and the others are fitted again, until none is negative.
    """
    weighted = work / np.maximum(ms, MIN_MS)[:, np.newaxis]
    scales = np.linalg.norm(weighted, axis=0)
    scales[scales == 0] = 1.0
    scaled, free = np.zeros(work.shape[1]), np.arange(work.shape[1])
    while len(free):
        fitted = np.linalg.lstsq((weighted / scales)[:, free], np.minimum(1.0, ms / MIN_MS), rcond=None)[0]
        if fitted.min() >= 0:
            scaled[free] = fitted
            break
        free = np.delete(free, fitted.argmin())
    coefficients: Floats = scaled / scales
    return coefficients
