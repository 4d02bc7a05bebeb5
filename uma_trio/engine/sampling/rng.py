"""Counter-based random numbers: a function of seed and step, without state.

There is no generator to save or restore.  A request draws the same numbers in any batch, and a session that is restored
from disk continues with the numbers that it would have drawn.  A step needs few of them, so they are plain integers: numpy
takes as long for one as for a hundred.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

_GAMMA: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, rounded to an odd number: its multiples visit every 64-bit number."""
_BITS: Final = 2**64 - 1


def uniforms(seeds: Iterable[int], steps: Iterable[int]) -> list[float]:
    """Return one number in [0, 1), with 53 random bits, for each pair of seed and step.

    Args:
        seeds: (rows,) below 2**64.
        steps: (rows,) how many numbers the row has drawn before.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64,
    whose n-th output can be computed directly.  Seeds are mixed once more, since neighbouring seeds would otherwise
    give shifted copies of one sequence.
    """
    pairs = zip(seeds, steps, strict=True)
    return [(_mix(_start(seed) + (step + 1) * _GAMMA) >> 11) * 2.0**-53 for seed, step in pairs]


@functools.lru_cache(1024)
def _start(seed: int) -> int:
    return _mix(seed + _GAMMA)


def _mix(x: int) -> int:
    """Mix the lowest 64 bits: a bijection in which every output bit depends on every input bit."""
    x &= _BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _BITS
    return x ^ (x >> 31)
