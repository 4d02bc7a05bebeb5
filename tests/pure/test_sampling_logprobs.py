"""Log probabilities, compared with a log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.sampling.logprobs import compute_logprobs
from uma_trio.engine_link.sampling import NO_TOKEN

NEAR = {"rel": 1e-6, "abs": 2e-6}
"""Weights are float32, their sum is float64."""


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
def test_logprobs_match_the_reference(seed, n_vocab, scale, n_top):
    logits = noise(len(n_top), n_vocab, scale, seed)
    tokens = np.random.default_rng(seed).integers(0, n_vocab, len(n_top))
    for row, token, n, score in zip(logits, tokens, n_top, compute_logprobs(logits, tokens, n_top), strict=True):
        expected = log_softmax(row)
        assert score.logprob == pytest.approx(expected[token], **NEAR)
        order = np.lexsort((np.arange(n_vocab), -row))[:n]
        assert [token for token, _ in score.top_logprobs] == order.tolist()
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(expected[order].tolist(), **NEAR)


def test_rows_are_independent():
    logits = noise(8, 4000, 5.0)
    logits[3] *= 100
    tokens, n_top = np.arange(8), [0, 20, 5, 1, 0, 3, 7, 2]
    together = compute_logprobs(logits, tokens, n_top)
    alone = [compute_logprobs(logits[i : i + 1], tokens[i : i + 1], n_top[i : i + 1])[0] for i in range(8)]
    assert together == alone


def test_probabilities_are_not_above_1():
    logits = np.full((1, 1000), -30.0, np.float32)
    logits[0, 5] = 30
    (score,) = compute_logprobs(logits, np.array([5]), [2])
    assert score.logprob == score.top_logprobs[0][1]
    assert -1e-12 <= score.logprob <= 0
    assert score.top_logprobs[1] == (0, pytest.approx(-60))


def test_tokens_with_probability_0_are_not_listed():
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, [7, 900]] = [1.0, 2.0]
    (score,) = compute_logprobs(logits, np.array([7]), [20])
    assert [token for token, _ in score.top_logprobs] == [900, 7]
    assert score.logprob == pytest.approx(np.log(1 / (1 + np.e)))


def test_rows_without_a_token_or_a_distribution_get_none():
    logits = noise(5, 100)
    logits[1, 3] = np.nan
    logits[2, 3] = np.inf
    scores = compute_logprobs(logits, np.array([4, 4, 4, NO_TOKEN, 4]), [2] * 5)
    assert [score is None for score in scores] == [False, True, True, True, False]
    assert compute_logprobs(logits[1:2], np.array([4]), [2]) == [None]
    assert scores[4] == compute_logprobs(logits[4:], np.array([4]), [2])[0]


def test_logits_are_not_changed():
    logits = noise(2, 100)
    before = logits.copy()
    compute_logprobs(logits, np.array([1, 2]), [5, 5])
    assert (logits == before).all()
