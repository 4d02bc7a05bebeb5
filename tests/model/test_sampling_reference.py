"""What our sampler draws from is what llama.cpp's own chain leaves, in the same order of filters."""

from __future__ import annotations

import numpy as np
import pytest

llama_abi = pytest.importorskip("llama_abi")

from uma_trio.sampling import SamplingParams, distribution  # noqa: E402


@pytest.fixture(scope="module")
def library():
    try:
        return llama_abi.load()
    except llama_abi.LibraryError as error:
        pytest.skip(f"{error}: ./build_llama.sh builds it")


NEVER = 1e-12
"""Running sums in float64 do not tell smaller probabilities from 0."""


def chain_of(library, params):
    chain = llama_abi.SamplerChain(library)
    chain.add_temp(params.temperature)
    if params.top_k:
        chain.add_top_k(params.top_k)
    if params.top_p < 1:
        chain.add_top_p(params.top_p)
    return chain


@pytest.mark.parametrize("n_vocab", [300, 32_000])
@pytest.mark.parametrize("deviation", [0.5, 3.0, 8.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.8, 40, 0.95),
        SamplingParams(0.8, 40),
        SamplingParams(0.8, 0, 0.95),
        SamplingParams(0.8, 0, 0.5),
        SamplingParams(1.0),
        SamplingParams(1.0, 100_000),
        SamplingParams(2.5, 5000, 0.9),
        SamplingParams(0.1, 7, 0.01),
    ],
    ids=str,
)
def test_ids_and_probabilities(library, params, deviation, n_vocab):
    # Distinct logits: llama.cpp leaves open which of two equal tokens a limit takes.
    noise = np.random.default_rng(n_vocab).standard_normal(n_vocab) * deviation
    logits = (noise + np.arange(n_vocab) * 1e-6).astype(np.float32)
    with chain_of(library, params) as chain:
        expected_ids, expected = chain.apply(logits)
    ids, p = distribution(logits.copy(), params)
    expected_ids, expected = expected_ids[expected > NEVER], expected[expected > NEVER]
    ids, p = ids[p > NEVER], p[p > NEVER]

    # llama.cpp sums probabilities in float32: near its limit top-p may take another token more or less.
    doubtful = 1e-5 / expected[-1] if params.top_p < 1 else 0
    assert abs(len(ids) - len(expected_ids)) <= doubtful
    n = min(len(ids), len(expected_ids))
    theirs = np.zeros(n_vocab)
    theirs[expected_ids] = expected
    ours = np.zeros(n_vocab)
    ours[ids] = p
    sure = ids[: n - int(doubtful)]
    np.testing.assert_allclose(ours[sure], theirs[sure], rtol=2e-4)
    assert np.abs(ours - theirs).sum() < 1e-4
