"""What our sampler draws from is what llama.cpp's own chain leaves, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

llama_abi = pytest.importorskip("llama_abi")

from uma_trio.sampling import Bias, Past, SamplingParams, distribution  # noqa: E402


@pytest.fixture(scope="module")
def library():
    try:
        return llama_abi.load()
    except llama_abi.LibraryError as error:
        pytest.skip(f"{error}: ./build_llama.sh builds it")


NEVER = 1e-12
"""Running sums in float64 do not tell smaller probabilities from 0."""


def chain_of(library, params, n_vocab=0, counted=(), window=()):
    """Penalties, temperature, filters.

    Args:
        counted: tokens that frequency and presence penalties look at.
        window: those of the repetition penalty.
    """
    chain = llama_abi.SamplerChain(library)
    if window or counted:
        assert not (window and counted) or window == counted, "llama.cpp has one window for all"
        past = window or counted
        chain.add_penalties(
            n_vocab,
            last_n=len(past),
            repeat=params.repetition_penalty if window else 1.0,
            frequency=params.frequency_penalty if counted else 0.0,
            presence=params.presence_penalty if counted else 0.0,
        )
        for token in past:
            chain.accept(token)
    return filtering(chain, params)


def filtering(chain, params):
    chain.add_temp(params.temperature)
    if params.top_k:
        chain.add_top_k(params.top_k)
    if params.top_p < 1:
        chain.add_top_p(params.top_p)
    if params.min_p:
        chain.add_min_p(params.min_p)
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
        SamplingParams(1.0, min_p=0.05),
        SamplingParams(2.5, min_p=0.001),
        SamplingParams(0.8, 40, 0.95, min_p=0.1),
        SamplingParams(1.5, 5000, 0.98, min_p=0.02),
    ],
    ids=str,
)
def test_ids_and_probabilities(library, params, deviation, n_vocab):
    logits = noise(n_vocab, deviation)
    with chain_of(library, params) as chain:
        expected = chain.apply(logits)
    same(distribution(logits.copy(), params), expected, params, n_vocab)


def noise(n_vocab, deviation):
    """Distinct logits: llama.cpp leaves open which of two equal tokens a limit takes."""
    found = np.random.default_rng(n_vocab).standard_normal(n_vocab) * deviation
    return (found + np.arange(n_vocab) * 1e-6).astype(np.float32)


def same(found, reference, params, n_vocab):
    """The same tokens with the same probabilities, but for what is rounded."""
    (ids, p), (expected_ids, expected) = found, reference
    expected_ids, expected = expected_ids[expected > NEVER], expected[expected > NEVER]
    ids, p = ids[p > NEVER], p[p > NEVER]

    # llama.cpp sums probabilities in float32: near its limit top-p may take another token more or less.
    doubtful = 1e-5 / expected[-1] if params.top_p < 1 else 0
    doubtful = max(doubtful, 1) if params.min_p else doubtful  # whose weight is just about the least one
    assert abs(len(ids) - len(expected_ids)) <= doubtful
    n = min(len(ids), len(expected_ids))
    theirs = np.zeros(n_vocab)
    theirs[expected_ids] = expected
    ours = np.zeros(n_vocab)
    ours[ids] = p
    sure = ids[: n - int(doubtful)]
    np.testing.assert_allclose(ours[sure], theirs[sure], rtol=2e-4)
    assert np.abs(ours - theirs).sum() < 1e-4


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.9},
    {"frequency_penalty": -0.4, "presence_penalty": -2.0},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]
FILTERS = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}]


def story(n_vocab, n, seed=0):
    """Tokens of which some come often, the likeliest ones among them."""
    chance = np.random.default_rng(seed)
    often = np.argsort(-noise(n_vocab, 3.0))[:20]
    return np.where(chance.random(n) < 0.7, chance.choice(often, n), chance.integers(0, n_vocab, n)).tolist()


@pytest.mark.parametrize("n_vocab", [300, 32_000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties(library, penalties, filters, n_vocab):
    """An answer within the window, and no prompt: there llama.cpp's one window and our two are the same."""
    params = SamplingParams(**penalties, **filters)
    answer = story(n_vocab, 50)
    logits = noise(n_vocab, 3.0)
    with chain_of(library, params, n_vocab, counted=answer, window=answer) as chain:
        expected = chain.apply(logits)
    found = distribution(logits.copy(), params, past=Past(np.array(answer, np.int32), 0))
    same(found, expected, params, n_vocab)


@pytest.mark.parametrize("n_vocab", [300, 32_000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("window", [1, 10, 64, 300])
def test_all_at_once(library, window, filters, n_vocab):
    """Mask, bias, a window that ends in the prompt or in the answer, counts of the answer alone.

    Two chains: the repetition penalty's first.  What the second one does depends on differences of logits only,
    so the logarithms of the first one's probabilities do as well.
    """
    wishes = {"repetition_penalty": 1.2, "repeat_last_n": window, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    params = SamplingParams(**wishes, **filters)
    prompt, answer = story(n_vocab, 100, seed=1), story(n_vocab, 40, seed=2)
    logits = noise(n_vocab, 3.0)
    best = np.argsort(-logits)
    bias = Bias(best[[3, 50, 200]].astype(np.int32), np.array([-1.5, 6.0, 3.0], np.float32))
    mask = best[[0, 7]].astype(np.int32)

    edited = logits.copy()  # llama.cpp's logit-bias sampler adds as well
    edited[bias.ids] += bias.values
    edited[mask] = -np.inf
    with llama_abi.SamplerChain(library) as first:
        first.add_penalties(n_vocab, last_n=window, repeat=params.repetition_penalty)
        for token in (*prompt, *answer):
            first.accept(token)
        ids, p = first.apply(edited)
    between = np.full(n_vocab, -np.inf, np.float32)
    between[ids] = np.log(p)
    with chain_of(library, params, n_vocab, counted=answer) as second:
        expected = second.apply(between)

    past = Past(np.array([*prompt, *answer], np.int32), len(prompt))
    same(distribution(logits.copy(), params, mask, bias, past), expected, params, n_vocab)
