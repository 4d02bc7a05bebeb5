"""Masks of tokens: every form of one restricts logits alike."""

from __future__ import annotations

import numpy as np

from tests.support.cases import all_cases
from uma_trio.engine import token_masks as module
from uma_trio.engine.token_masks import TokenMask, TokenMasks

N_VOCAB = 1000


def bits_of(allowed: set[int]) -> module.Bits:
    bits = np.zeros(32 * -(-N_VOCAB // 32), np.uint8)
    bits[sorted(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def tokens(n: int) -> set[int]:
    return set(np.random.default_rng(n).choice(N_VOCAB, n, replace=False).tolist())


@all_cases("n", [0, 1, 2, 100, 125, 126, 500, 874, 875, 999, 1000])
def test_only_what_is_allowed_keeps_its_logit(n: int) -> None:
    allowed, logits = tokens(n), np.random.default_rng(1).normal(size=(3, N_VOCAB)).astype(np.float32)
    mask = TokenMask.of(bits_of(allowed), N_VOCAB)
    assert sum(form is not None for form in (mask.allowed, mask.forbidden, mask.biases)) == 1
    assert mask.is_single == (n == 1)
    expected = np.where([token in allowed for token in range(N_VOCAB)], logits[1], -np.inf)
    before = logits.copy()
    mask.apply(logits[1])
    np.testing.assert_array_equal(logits[1], expected)
    np.testing.assert_array_equal(logits[[0, 2]], before[[0, 2]])


def test_bits_behind_the_vocabulary_count_for_nothing() -> None:
    bits = bits_of({7})
    bits[-1] |= np.uint32(1 << 31)
    assert TokenMask.of(bits, N_VOCAB).is_single


def test_equal_masks_are_one_and_their_number_is_bounded() -> None:
    masks = TokenMasks(N_VOCAB)
    found = masks.of(bits_of({1, 2}))
    assert masks.of(bits_of({1, 2})) is found
    assert masks.of(bits_of({1, 3})) is not found
    for token in range(3 * module.MAX_MASKS):
        masks.of(bits_of({token}))
        assert len(masks._known) <= module.MAX_MASKS
