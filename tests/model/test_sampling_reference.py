"""The sampler draws from the same distribution as llama.cpp's sampler chain in the same order."""

from __future__ import annotations

import numpy as np
import pytest

import llama_abi
from tests.support.draws import distribution, sample
from tests.support.samplers import SamplerChain
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams


@pytest.fixture(scope="module")
def library():
    try:
        return llama_abi.load()
    except llama_abi.LibraryError as error:
        pytest.skip(f"{error}: ./build_llama.sh builds it")


NEGLIGIBLE = 1e-12
"""Smaller probabilities are lost in running sums in float64."""


def chain_of(library, params, n_vocab=0, counted=(), window=()):
    """Build llama.cpp's chain in its default order: penalties, filters, temperature.

    Args:
        counted: the tokens that the frequency and presence penalties count.
        window: the tokens of the repetition penalty.
    """
    chain = SamplerChain(library)
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
    return add_filters(chain, params)


def add_filters(chain, params):
    chain.add_top_n_sigma(params.top_n_sigma)
    if params.top_k:
        chain.add_top_k(params.top_k)
    if params.typical_p < 1:
        chain.add_typical_p(params.typical_p)
    if params.top_p < 1:
        chain.add_top_p(params.top_p)
    if params.min_p:
        chain.add_min_p(params.min_p)
    chain.add_xtc(params.xtc_probability, params.xtc_threshold)
    return chain.add_temp(params.temperature, range=params.dynatemp_range, exponent=params.dynatemp_exponent)


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
        SamplingParams(1.0, top_n_sigma=1.0),
        SamplingParams(1.0, dynatemp_range=0.5),
        SamplingParams(0.8, 40, 0.95, dynatemp_range=0.7, dynatemp_exponent=2.0),
        SamplingParams(0.3, min_p=0.01, dynatemp_range=0.6, dynatemp_exponent=0.5),
        SamplingParams(1.2, 600, xtc_probability=1.0, xtc_threshold=0.01, dynatemp_range=0.4),
        SamplingParams(1.0, xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(0.7, 40, xtc_probability=1.0),
        SamplingParams(1.5, min_p=0.02, xtc_probability=1.0, xtc_threshold=0.01),
        SamplingParams(1.0, 900, 0.9, typical_p=0.9, xtc_probability=1.0, xtc_threshold=0.02),
        SamplingParams(1.0, 50, xtc_probability=1.0, xtc_threshold=0.6),
        SamplingParams(1.0, typical_p=0.7),
        SamplingParams(0.8, 40, typical_p=0.5),
        SamplingParams(1.3, 900, 0.9, typical_p=0.9),
        SamplingParams(1.3, 200, 0.9, min_p=0.001, typical_p=0.9),
        SamplingParams(2.0, 40, 0.9, top_n_sigma=2.5),
    ],
    ids=str,
)
def test_ids_and_probabilities(library, params, deviation, n_vocab):
    logits = noise(n_vocab, deviation)
    with chain_of(library, params) as chain:
        expected = chain.apply(logits)
    assert_same(distribution(logits.copy(), params), expected, params, n_vocab)


def noise(n_vocab, deviation):
    """Return distinct logits: llama.cpp does not define which token of a tie a limit keeps."""
    found = np.random.default_rng(n_vocab).standard_normal(n_vocab) * deviation
    return (found + np.arange(n_vocab) * 1e-6).astype(np.float32)


def assert_same(found, reference, params, n_vocab):
    """Assert that tokens and probabilities are equal up to rounding."""
    (ids, p), (expected_ids, expected) = found, reference
    expected_ids, expected = expected_ids[expected > NEGLIGIBLE], expected[expected > NEGLIGIBLE]
    ids, p = ids[p > NEGLIGIBLE], p[p > NEGLIGIBLE]

    # llama.cpp sums probabilities in float32, so top-p may keep one token more or fewer.
    doubtful = 1e-5 / expected[-1] if params.top_p < 1 else 0
    doubtful = max(doubtful, 1) if params.min_p else doubtful  # a token close to the limit of min-p
    if params.typical_p < 1:  # the limit is among likely and unlikely tokens, and its sums are in float32 as well
        shared = np.isin(ids, expected_ids)
        assert len(np.setxor1d(ids, expected_ids)) <= 3
        ids, expected = ids[shared], expected[np.isin(expected_ids, ids)]
        expected_ids, p = expected_ids[np.isin(expected_ids, ids)], p[shared] / p[shared].sum()
        expected = expected / expected.sum()
    assert abs(len(ids) - len(expected_ids)) <= doubtful
    n = min(len(ids), len(expected_ids))
    theirs = np.zeros(n_vocab)
    theirs[expected_ids] = expected
    ours = np.zeros(n_vocab)
    ours[ids] = p
    sure = ids[: n - int(doubtful)]
    # llama.cpp sums the entropy in float32 too, and unlikely tokens feel the temperature most.
    np.testing.assert_allclose(ours[sure], theirs[sure], rtol=1e-3 if params.dynatemp_range else 2e-4)
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


def random_tokens(n_vocab, n, seed=0):
    """Return random tokens, 70 % of them from the twenty most likely ones."""
    chance = np.random.default_rng(seed)
    often = np.argsort(-noise(n_vocab, 3.0))[:20]
    return np.where(chance.random(n) < 0.7, chance.choice(often, n), chance.integers(0, n_vocab, n)).tolist()


@pytest.mark.parametrize("n_vocab", [300, 32_000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties(library, penalties, filters, n_vocab):
    """With an answer within the window and no prompt, llama.cpp's single window equals our two."""
    params = SamplingParams(**penalties, **filters)
    answer = random_tokens(n_vocab, 50)
    logits = noise(n_vocab, 3.0)
    with chain_of(library, params, n_vocab, counted=answer, window=answer) as chain:
        expected = chain.apply(logits)
    found = distribution(logits.copy(), params, past=Past(np.array(answer, np.int32), 0))
    assert_same(found, expected, params, n_vocab)


@pytest.mark.parametrize("n_vocab", [300, 32_000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("window", [1, 10, 64, 300])
def test_all_operations_together(library, window, filters, n_vocab):
    """A mask, a bias, a repetition window that begins in the prompt or in the answer, and counts of the answer alone.

    llama.cpp has one window for all penalties, so two chains are used, that of the repetition penalty first.  The second chain
    depends on differences of logits only, so the logarithms of the first chain's probabilities can stand in for logits.
    """
    values = {"repetition_penalty": 1.2, "repeat_last_n": window, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    params = SamplingParams(**values, **filters)
    prompt, answer = random_tokens(n_vocab, 100, seed=1), random_tokens(n_vocab, 40, seed=2)
    logits = noise(n_vocab, 3.0)
    best = np.argsort(-logits)
    bias = Bias(best[[3, 50, 200]].astype(np.int32), np.array([-1.5, 6.0, 3.0], np.float32))
    mask = best[[0, 7]].astype(np.int32)

    edited = logits.copy()  # llama.cpp's logit-bias sampler adds as well
    edited[bias.ids] += bias.values
    edited[mask] = -np.inf
    with SamplerChain(library) as first:
        first.add_penalties(n_vocab, last_n=window, repeat=params.repetition_penalty)
        for token in (*prompt, *answer):
            first.accept(token)
        ids, p = first.apply(edited)
    between = np.full(n_vocab, -np.inf, np.float32)
    between[ids] = np.log(p)
    with chain_of(library, params, n_vocab, counted=answer) as second:
        expected = second.apply(between)

    past = Past(np.array([*prompt, *answer], np.int32), len(prompt))
    assert_same(distribution(logits.copy(), params, mask, bias, past), expected, params, n_vocab)


@pytest.mark.parametrize("deviation", [0.5, 3.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, mirostat=2),
        SamplingParams(0.7, mirostat=2, mirostat_tau=2.0, mirostat_eta=1.0),
        SamplingParams(1.5, mirostat=2, mirostat_tau=1.0, mirostat_eta=1.0),  # often nothing but the best is left
        SamplingParams(1.0, 1, 0.1, min_p=0.5, typical_p=0.2, top_n_sigma=0.1, xtc_probability=1.0, mirostat=2),
    ],
    ids=str,
)
def test_mirostat_keeps_the_same_tokens_draw_after_draw(library, params, deviation):
    """Each draw is llama.cpp's, so that both go on from the same token."""
    n_vocab = 32_000
    with SamplerChain(library) as chain:
        chain.add_temp(params.temperature)
        chain.add_mirostat_v2(seed=1, tau=params.mirostat_tau, eta=params.mirostat_eta)
        kept = set()
        for step in range(30):
            logits = np.roll(noise(n_vocab, deviation), 777 * step)
            expected_ids, expected = chain.apply(logits)
            ids, p = distribution(logits.copy(), params, step=step)
            assert abs(len(ids) - len(expected_ids)) <= len(expected_ids) // 1000 + 1, "rounding at the limit"
            ours, theirs = np.zeros(n_vocab), np.zeros(n_vocab)
            ours[ids], theirs[expected_ids] = p, expected
            assert np.abs(ours - theirs).sum() < 1e-3
            kept.add(len(ids))
            params = params.with_mu(params.next_mu(ours[chain.chosen]))
    assert len(kept) > 1, "the limit moves"


def test_sample_reports_the_state_after_its_own_draw():
    logits = noise(1000, 3.0)
    asked = [SamplingParams(1.0, seed=seed, mirostat=2 * (seed % 2), mu=4.0 + seed) for seed in range(8)]
    mus: dict[int, float] = {}
    tokens = sample(np.tile(logits, (8, 1)), asked, range(8), mus=mus)
    assert sorted(mus) == [1, 3, 5, 7]
    for row, mu in mus.items():
        ids, p = distribution(logits.copy(), asked[row])
        assert mu == pytest.approx(asked[row].next_mu(p[ids == tokens[row]][0]))
        alone: dict[int, float] = {}
        assert sample(logits[np.newaxis], asked[row : row + 1], [row], mus=alone) == tokens[row]
        assert alone == {0: mu}
