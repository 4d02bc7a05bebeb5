"""Which tokens may follow: masks as sequences share them, each in the form that is quickest to apply."""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.uint32]
"""A bit for each token, the lowest one of the first word for token 0."""
Row: TypeAlias = npt.NDArray[np.float32]
"""The logits of one sample, ``[n_vocab]``."""

MAX_LISTED: Final = 1 / 8
"""Up to this share of the vocabulary, a mask lists the tokens that it allows or forbids; lists take longer for more."""

MAX_MASKS: Final = 64
"""Masks that are kept.  One of 150,000 tokens takes up to 600 KB."""


@attrs.frozen(eq=False)
class TokenMask:
    """The tokens that a grammar allows in one place.  Its forms exclude each other."""

    is_single: bool
    """It allows one token only."""
    allowed: npt.NDArray[np.intp] | None = None
    """All of them."""
    forbidden: npt.NDArray[np.intp] | None = None
    """All others."""
    biases: Row | None = None
    """0 for a token that is allowed, -inf otherwise."""

    @classmethod
    def of(cls, bits: Bits, n_vocab: int) -> TokenMask:
        """Make it of ``bits``, which have at least ``n_vocab``."""
        is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:n_vocab].view(np.bool_)
        n = int(np.count_nonzero(is_allowed))
        if n <= MAX_LISTED * n_vocab:
            return cls(n == 1, allowed=np.flatnonzero(is_allowed))
        if n_vocab - n <= MAX_LISTED * n_vocab:
            return cls(n == 1, forbidden=np.flatnonzero(~is_allowed))
        return cls(n == 1, biases=np.where(is_allowed, np.float32(0), np.float32(-np.inf)))

    def apply(self, row: Row) -> None:
        """Set the logits of tokens that are not allowed to -inf."""
        if self.allowed is not None:
            kept = row[self.allowed]
            row.fill(-np.inf)
            row[self.allowed] = kept
        elif self.forbidden is not None:
            row[self.forbidden] = -np.inf
        elif self.biases is not None:
            np.add(row, self.biases, out=row)


NOTHING: Final = TokenMask(False, allowed=np.empty(0, np.intp))
"""No token may follow."""


class TokenMasks:
    """The masks of late.  A grammar returns to the same few places, and so do all sequences with that grammar.

    Several threads may ask at the same time.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._known: dict[bytes, TokenMask] = {}

    def of(self, bits: Bits) -> TokenMask:
        """The mask that ``bits`` stand for."""
        key = bits.tobytes()
        mask = self._known.get(key)
        if mask is None:
            if len(self._known) >= MAX_MASKS:
                self._known = {}
            self._known[key] = mask = TokenMask.of(bits, self._n_vocab)
        return mask
