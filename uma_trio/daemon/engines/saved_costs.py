"""What ticks cost on this machine, kept from one run of the daemon to the next.  See ``tuning_cache``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs

from uma_trio.daemon.policy.cost import MAX_MARGIN, N_FEATURES, N_MARGINS, CostModel, LinearModel
from uma_trio.daemon.policy.decode_split import DecodeCallTimes
from uma_trio.daemon.policy.row_curve import PrefillCurves, RowCurve
from uma_trio.engine_link import tuning_cache

CERTAINTY_KEPT: Final = 0.1
"""Weight of an older run's measurements against new ones."""


def load_costs(name: str, folder: Path | None = None) -> CostModel | None:
    """The cost model saved under ``name``, with reduced certainty; ``None`` without a usable file.

    Args:
        folder: the user's cache folder by default.
    """
    fields = tuning_cache.read(name, folder)
    if fields is None:
        return None
    try:
        return CostModel(
            _linear_model(fields["decode_only"]),
            _linear_model(fields["mixed"]),
            DecodeCallTimes(_numbers(fields["call_times"])),
            knows_stairs=bool(fields["knows_stairs"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        tuning_cache.ignore(name, folder, error)
        return None


def save_costs(name: str, cost: CostModel, folder: Path | None = None) -> bool:
    """Save ``cost`` under ``name``, without the corrections that the present load needs.  Returns whether that succeeded."""
    fields = {
        "decode_only": attrs.asdict(cost.decode_only),
        "mixed": attrs.asdict(attrs.evolve(cost.mixed, corrections={})),
        "call_times": cost.call_times.ms,
        "knows_stairs": cost.knows_stairs,
    }
    return tuning_cache.write(name, fields, folder)


def _linear_model(fields: dict[str, Any]) -> LinearModel:
    """Check every value: the file is as untrusted as a client."""
    rows = [_numbers(row, N_FEATURES) for row in fields["information"]]
    information = tuple(tuple(CERTAINTY_KEPT * value for value in row) for row in rows)
    unconstrained = None if fields["unconstrained"] is None else _numbers(fields["unconstrained"], N_FEATURES)
    coefficients = _numbers(fields["coefficients"], N_FEATURES)
    n_observed, error = int(fields["n_observed"]), float(fields["error"])
    if len(information) != N_FEATURES or min(coefficients) < 0 or not (n_observed >= 0 and 0 <= error < 10):
        raise ValueError("not a linear model")
    if any(information[i][i] <= 0 for i in range(N_FEATURES)):
        raise ValueError("no information about a coefficient")
    margins = _numbers(fields["margins"], N_MARGINS)
    if not 0 <= min(margins) <= max(margins) <= MAX_MARGIN:
        raise ValueError("not the share of a time")
    curves = None if fields["curves"] is None else _curves(fields["curves"])
    return LinearModel(coefficients, information, n_observed, error, unconstrained, margins, curves)


def _curves(fields: dict[str, Any]) -> PrefillCurves:
    mixed = None if fields["mixed"] is None else _curve(fields["mixed"])
    n_decodes = int(fields["n_decodes"])
    if not 0 <= n_decodes < 1 << 16:
        raise ValueError(f"{n_decodes} decodes")
    return PrefillCurves(_curve(fields["prompt"]), mixed, n_decodes)


def _curve(fields: dict[str, Any]) -> RowCurve:
    ms = _numbers(fields["ms"])
    rows = tuple(int(n) for n in _numbers(fields["rows"], len(ms)))
    rising = all(a < b for a, b in itertools.pairwise(rows)) and all(a <= b for a, b in itertools.pairwise(ms))
    if len(ms) < 2 or not rising or rows[0] < 1 or ms[0] < 0:
        raise ValueError("not a curve")
    return RowCurve(rows, ms)


def _numbers(values: Iterable[Any], n: int | None = None) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if (n is not None and len(numbers) != n) or not 1 <= len(numbers) <= 64 or not all(abs(f) < 1e15 for f in numbers):
        raise ValueError(f"{len(numbers)} numbers")
    return numbers
