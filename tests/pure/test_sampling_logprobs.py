"""Log-probabilities against a log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.sampling import logprobs

NEAR = {"rel": 1e-6, "abs": 2e-6}
"""Weights are float32; their sum is not."""


def noise(rows, n_vocab, scale=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, n_vocab)) * scale).astype(np.float32)


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@given(
    st.integers(0, 99),
    st.sampled_from([1, 2, 19, 300, 5000, 32_000]),
    st.sampled_from([0.0, 1e-3, 3.0, 50.0, 1e4]),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_they_are_the_obvious(seed, n_vocab, scale, wanted):
    raw = noise(len(wanted), n_vocab, scale, seed)
    tokens = np.random.default_rng(seed).integers(0, n_vocab, len(wanted))
    for row, token, n, score in zip(raw, tokens, wanted, logprobs(raw, tokens, wanted), strict=True):
        expected = log_softmax(row)
        assert score.logprob == pytest.approx(expected[token], **NEAR)
        order = np.lexsort((np.arange(n_vocab), -row))[:n]
        assert [token for token, _ in score.best] == order.tolist()
        assert [logprob for _, logprob in score.best] == pytest.approx(expected[order].tolist(), **NEAR)


def test_a_rows_score_does_not_depend_on_the_others():
    raw = noise(8, 4000, 5.0)
    raw[3] *= 100
    tokens, wanted = np.arange(8), [0, 20, 5, 1, 0, 3, 7, 2]
    together = logprobs(raw, tokens, wanted)
    alone = [logprobs(raw[i : i + 1], tokens[i : i + 1], wanted[i : i + 1])[0] for i in range(8)]
    assert together == alone


def test_probabilities_are_not_above_1():
    raw = np.full((1, 1000), -30.0, np.float32)
    raw[0, 5] = 30
    (score,) = logprobs(raw, np.array([5]), [2])
    assert score.logprob == score.best[0][1]
    assert -1e-12 <= score.logprob <= 0
    assert score.best[1] == (0, pytest.approx(-60))


def test_what_is_impossible_is_no_alternative():
    raw = np.full((1, 1000), -np.inf, np.float32)
    raw[0, [7, 900]] = [1.0, 2.0]
    (score,) = logprobs(raw, np.array([7]), [20])
    assert [token for token, _ in score.best] == [900, 7]
    assert score.logprob == pytest.approx(np.log(1 / (1 + np.e)))


def test_rows_without_a_token_or_a_distribution_have_none():
    raw = noise(5, 100)
    raw[1, 3] = np.nan
    raw[2, 3] = np.inf
    scores = logprobs(raw, np.array([4, 4, 4, -1, 4]), [2] * 5)
    assert [score is None for score in scores] == [False, True, True, True, False]
    assert logprobs(raw[1:2], np.array([4]), [2]) == [None]
    assert scores[4] == logprobs(raw[4:], np.array([4]), [2])[0]


def test_logits_are_left_alone():
    raw = noise(2, 100)
    before = raw.copy()
    logprobs(raw, np.array([1, 2]), [5, 5])
    assert (raw == before).all()
