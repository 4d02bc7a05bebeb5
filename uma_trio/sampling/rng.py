"""Random numbers without a state: a function of seed and step.

Nothing has to be kept, saved or put back: a request draws the same numbers whoever shares its batch,
and a session restored from disk goes on as if it had never left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: its multiples visit every 64-bit number."""


def uniforms(seeds: Sequence[int], steps: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and step, with 53 random bits.

    Args:
        seeds: below 2**64, one a row.
        steps: how many numbers this row has drawn before, one a row.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64,
    whose n-th output can be computed without those before it.  Seeds are mixed once more, so that
    neighbouring seeds do not walk along the same sequence.
    """
    start = _mix(np.array(seeds, dtype=np.uint64) + _GAMMA)
    bits = _mix(start + (np.asarray(steps).astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit of ``x``; one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
