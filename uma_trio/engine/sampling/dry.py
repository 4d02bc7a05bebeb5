"""DRY ("don't repeat yourself"): tokens that would continue a repetition become less likely, the longer it is the more.

A repetition ends where a sequence breaker does, such as a newline.  The arithmetic is that of llama.cpp's sampler
``dry``.  It depends on the tokens before the draw alone, so there is no state to save or restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from uma_trio.engine_link.sampling import SamplingParams

Tail: TypeAlias = tuple[int, ...]

MAX_COUNTED: Final = 512
"""A longer repetition counts as one of this many tokens."""

MAX_TAIL: Final = 20
"""Tokens of a breaker that are compared, as in llama.cpp."""

ENOUGH: Final = 1e6
"""A penalty that no difference of logits makes up for.  Repetitions are counted up to the length that has it."""


class Breakers:
    """Texts that end a repetition, as tokens.  Each token is looked at when it is first met.

    Args:
        texts: none is empty.
        spelled: the bytes of a token.
        encode: the tokens of a text in the middle of other text.
    """

    def __init__(
        self, texts: Sequence[str], spelled: Callable[[int], bytes], encode: Callable[[str], list[int]]
    ) -> None:
        self._texts = texts
        self._spelled = spelled
        self._encode = encode
        self._tails: dict[int, tuple[Tail, ...]] = {}

    def tails(self, token: int) -> tuple[Tail, ...]:
        """What completes a breaker after ``token``, for each breaker that begins in it; an empty tail if it contains one."""
        tails = self._tails.get(token)
        if tails is None:
            tails = self._tails[token] = self._tails_of(self._spelled(token))
        return tails

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` contains a whole breaker."""
        return () in self.tails(token)

    def _tails_of(self, spelled: bytes) -> tuple[Tail, ...]:
        tails: dict[Tail, None] = {}
        for text in self._texts:
            if text.encode() in spelled:
                tails[()] = None
                continue
            for n in range(1, len(text)):
                if spelled.endswith(text[:n].encode()):
                    tails[tuple(self._encode(text[n:])[:MAX_TAIL])] = None
        return tuple(tails)

    def tokens_since(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` come after the last breaker; all of them if there is none."""
        for i in range(len(tokens)):
            at = len(tokens) - 1 - i
            if not (tails := self.tails(tokens[at])):
                continue
            after = tuple(tokens[at + 1 : at + 1 + MAX_TAIL])
            lengths = [len(tail) for tail in tails if after[: len(tail)] == tail]
            if lengths:
                return i - max(lengths)
        return len(tokens)


def apply_dry(
    logits: npt.NDArray[np.float32], params: SamplingParams, tokens: npt.NDArray[np.int32], breakers: Breakers
) -> None:
    """Make the tokens less likely that would continue a repetition.

    Args:
        logits: (n_vocab,).
        tokens: those before the draw.
    """
    tokens = tokens[-params.dry_window :]
    n, least = len(tokens), params.dry_allowed_length
    if n <= least:
        return
    most = breakers.tokens_since(tokens.tolist())
    most = min(most, least if params.dry_base == 1 else _longest(params), MAX_COUNTED)
    lengths = np.zeros(n, np.int64)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the last tokens have occurred before
    for length in range(1, most + 1):
        lengths[ends] = length
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
    ends = np.flatnonzero(lengths >= least)
    longest: dict[int, int] = {}
    for token, length in zip(tokens[ends + 1].tolist(), lengths[ends].tolist(), strict=True):
        if length > longest.get(token, 0) and not breakers.ends_in(token):
            longest[token] = length
    ids = np.array([*longest], np.int64)
    exponents = np.array([*longest.values()], np.float64) - least
    logits[ids] -= (params.dry_multiplier * params.dry_base**exponents).astype(np.float32)


def _longest(params: SamplingParams) -> int:
    """The length of a repetition from which the penalty is at least ``ENOUGH``."""
    steps = math.log(max(1.0, ENOUGH / params.dry_multiplier)) / math.log(params.dry_base)
    return params.dry_allowed_length + math.ceil(steps)
