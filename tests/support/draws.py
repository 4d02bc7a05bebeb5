"""Tokens that the sampler draws, asked with plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from uma_trio.engine.sampling import sampler
from uma_trio.engine.sampling.plan import Rows
from uma_trio.engine_link.sampling import SamplingParams


def sample(
    logits: np.ndarray,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    *more: Any,
    mus: Any = None,
    **given: Any,
) -> np.ndarray:
    """A token for each row; ``more`` and ``given`` are further lists of ``Rows``."""
    return sampler.sample(logits, Rows(params, steps, *more, **given), mus)
