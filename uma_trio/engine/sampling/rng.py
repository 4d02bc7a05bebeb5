"""Counter-based random numbers: a function of seed and step, without state.

There is no generator to save or restore.  A request draws the same numbers in any batch, and a session that is restored
from disk continues with the numbers that it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, rounded to an odd number: its multiples visit every 64-bit number."""


def uniforms(seeds: Sequence[int], steps: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1), with 53 random bits, for each pair of seed and step.

    Args:
        seeds: (rows,) below 2**64.
        steps: (rows,) how many numbers the row has drawn before.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64,
    whose n-th output can be computed directly.  Seeds are mixed once more, since neighbouring seeds would otherwise
    give shifted copies of one sequence.
    """
    start = _mix(np.array(seeds, dtype=np.uint64) + _GAMMA)
    bits = _mix(start + (np.asarray(steps).astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits: a bijection in which every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
