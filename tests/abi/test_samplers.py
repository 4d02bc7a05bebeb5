"""Tests for llama.cpp's sampler chain: every filter does what its definition says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from llama_abi import Batch, Context, HandleClosed, Library, LlamaError
from tests.support.samplers import SamplerChain

LOGITS = np.array([1.0, 3.0, 2.0, -4.0, 0.5], np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def test_nothing_filtered(library: Library) -> None:
    with SamplerChain(library) as chain:
        ids, probabilities = chain.apply(LOGITS)
    assert ids.tolist() == [1, 2, 0, 4, 3]
    np.testing.assert_allclose(probabilities, softmax(LOGITS)[ids], rtol=1e-6)


def test_filters(library: Library) -> None:
    with SamplerChain(library).add_top_k(3) as chain:
        assert chain.apply(LOGITS)[0].tolist() == [1, 2, 0]
    with SamplerChain(library).add_top_p(0.8) as chain:
        assert chain.apply(LOGITS)[0].tolist() == [1, 2]
    with SamplerChain(library).add_min_p(0.1) as chain:
        assert chain.apply(LOGITS)[0].tolist() == [1, 2, 0]
    with SamplerChain(library).add_temp(0.0) as chain:
        assert chain.apply(LOGITS)[0].tolist() == [1]
    with SamplerChain(library).add_temp(2.0) as chain:
        ids, probabilities = chain.apply(LOGITS)
        np.testing.assert_allclose(probabilities, softmax(LOGITS / 2)[ids], rtol=1e-6)


def test_penalties_and_reset(library: Library) -> None:
    with SamplerChain(library).add_penalties(len(LOGITS), last_n=8, presence=5.0) as chain:
        chain.accept(1)
        assert chain.apply(LOGITS)[0][0] == 2
        chain.reset()
        assert chain.apply(LOGITS)[0][0] == 1
        with pytest.raises(LlamaError, match="repeat must be above 0"):
            chain.add_penalties(5, last_n=1, repeat=0.0)


def test_logits_are_not_changed(library: Library) -> None:
    before = LOGITS.copy()
    with SamplerChain(library).add_temp(0.3).add_dist(seed=1) as chain:
        chain.apply(LOGITS)
    assert (before == LOGITS).all()


def test_sample(library: Library, context: Context) -> None:
    batch = Batch(8)
    batch.add([464, 3290, 318], pos=0, seq=0)
    context.decode(batch)
    row = context.logits(1).array[0]
    with SamplerChain(library).add_greedy() as chain:
        assert chain.sample(context, 2) == row.argmax()
    with SamplerChain(library).add_top_k(4).add_dist(seed=5) as chain:
        ids, probabilities = chain.apply(row)
        counts = Counter(chain.sample(context, 2) for _ in range(2000))
    assert set(counts) <= set(ids.tolist())
    for token, probability in zip(ids.tolist(), probabilities, strict=True):
        assert abs(counts[token] / 2000 - probability) < 0.06
    with SamplerChain(library).add_dist(seed=5) as one, SamplerChain(library).add_dist(seed=5) as other:
        assert [one.sample(context, 2) for _ in range(9)] == [other.sample(context, 2) for _ in range(9)]


def test_refused(library: Library, context: Context) -> None:
    batch = Batch(8)
    batch.add([464, 3290, 318], pos=0, seq=0)
    with SamplerChain(library).add_greedy() as chain:
        with pytest.raises(LlamaError, match="returned no logits for batch position 2"):
            chain.sample(context, 2)
        context.decode(batch)
        for index in (-1, 0, 3):
            with pytest.raises(LlamaError, match=f"returned no logits for batch position {index}"):
                chain.sample(context, index)
        with pytest.raises(LlamaError, match="one row"):
            chain.apply(np.zeros((2, 5), np.float32))
    with (
        SamplerChain(library).add_top_k(4) as chain,
        pytest.raises(LlamaError, match="no sampler of the chain chooses"),
    ):
        chain.sample(context, 2)
    with pytest.raises(HandleClosed):
        chain.apply(LOGITS)
