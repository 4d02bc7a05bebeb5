"""Masks, biases and penalties, compared with a slow reference; rows are independent of each other."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.draws import distribution, sample
from uma_trio.daemon.serving.token_history import TokenHistory
from uma_trio.engine_link.sampling import NO_TOKEN, Bias, Past, SamplingParams

F32 = np.float32


def noise(rows, n_vocab, scale=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, n_vocab)) * scale).astype(F32)


def bias_of(values):
    return Bias(np.array([*values], np.int32), np.array([*values.values()], F32))


def past_of(prompt, answer):
    return Past(np.array([*prompt, *answer], np.int32), len(prompt))


def reference(logits, params, mask=(), bias=None, prompt=(), answer=()):
    """Compute the logits before temperature and filters, in float32 like llama.cpp."""
    logits = logits.copy()
    for token, value in (bias or {}).items():
        logits[token] += F32(value)
    if params.repetition_penalty != 1 and params.repeat_last_n:
        penalty = F32(params.repetition_penalty)
        for token in {*[*prompt, *answer][-params.repeat_last_n :]}:
            logits[token] = logits[token] * penalty if logits[token] <= 0 else logits[token] / penalty
    for token, count in Counter(answer).items():
        logits[token] -= F32(count) * F32(params.frequency_penalty) + F32(params.presence_penalty)
    for token in mask:
        logits[token] = -math.inf
    return logits


N_VOCAB = 300
tokens = st.integers(0, N_VOCAB - 1)
few = st.lists(st.integers(0, 9), max_size=30)  # so that tokens repeat
token_lists = st.lists(tokens, max_size=200) | few
biases = st.dictionaries(tokens, st.floats(-99, 100, width=32), min_size=1, max_size=20)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 5, 100]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    seed=st.integers(0, 99),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([0.1, 0.9, 1.0, 1.1, 2.0, 10.0]),
    repeat_last_n=st.sampled_from([0, 1, 5, 64, 4096]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7, 2.0]),
)
rows = st.tuples(
    params, st.none() | st.sets(tokens, min_size=1, max_size=9), st.none() | biases, token_lists, token_lists
)


def given_to(row):
    """Return the mask, bias and past of a row, as arguments of ``sample``."""
    params, mask, bias, prompt, answer = row
    past = past_of(prompt, answer) if params.has_penalties else None
    return None if mask is None else np.array([*mask], np.int32), None if bias is None else bias_of(bias), past


def plain(params):
    """Return the same filters without penalties."""
    return msgspec.structs.replace(params, repetition_penalty=1, frequency_penalty=0, presence_penalty=0)


@given(rows, st.integers(0, 9))
def test_the_distribution_matches_the_reference(row, seed):
    params, mask, bias, prompt, answer = row
    (logits,) = noise(1, N_VOCAB, seed=seed)
    edited = reference(logits, params, mask or (), bias, prompt, answer)
    if params.greedy:
        assert sample(logits[np.newaxis].copy(), [params], [0], *([one] for one in given_to(row))) == edited.argmax()
        return
    ids, p = distribution(logits.copy(), params, *given_to(row))
    expected_ids, expected = distribution(edited, plain(params))
    assert ids.tolist() == expected_ids.tolist()
    assert p.tolist() == expected.tolist()
    assert p.sum() == pytest.approx(1)
    assert not {*ids.tolist()} & (mask or set())


@given(st.lists(rows, min_size=32, max_size=32), st.data())
def test_rows_are_independent(many, data):
    logits = noise(len(many), N_VOCAB, seed=3)
    asked = [row[0] for row in many]
    lists = [list(one) for one in zip(*map(given_to, many), strict=True)]
    together = sample(logits.copy(), asked, range(32), *lists).tolist()
    alone = [
        int(sample(logits[i : i + 1].copy(), [p], [i], *([one[i]] for one in lists))[0]) for i, p in enumerate(asked)
    ]
    order = data.draw(st.permutations(range(32)))
    shuffled = sample(logits[order], [asked[i] for i in order], order, *([one[i] for i in order] for one in lists))
    assert together == alone
    assert shuffled.tolist() == [alone[i] for i in order]


def test_rows_without_penalties_are_not_changed():
    logits = noise(3, 100)
    before = logits.copy()
    strong = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    past = past_of([1, 2], [3])
    sample(logits, [SamplingParams(), strong, SamplingParams()], [0] * 3, None, [None] * 3, [None, past, None])
    assert (logits[[0, 2]] == before[[0, 2]]).all()
    assert np.flatnonzero(logits[1] != before[1]).tolist() == [1, 2, 3]


def test_penalties_apply_to_greedy_sampling():
    """Each token comes once, the most likely first."""
    (logits,) = noise(1, 50)
    params = SamplingParams(repetition_penalty=10.0, presence_penalty=2.0, repeat_last_n=50)
    logits += 100  # penalties are strong on positive logits
    said = []
    for step in range(50):
        said += sample(logits[np.newaxis].copy(), [params], [step], pasts=[past_of([], said)]).tolist()
    assert said == np.argsort(-logits, kind="stable").tolist()


def test_the_repetition_penalty_does_not_count_and_the_frequency_penalty_does():
    logits = np.full((1, 4), 5.0, F32)
    answer = [1, 1, 1, 2]
    sample(logits, [SamplingParams(repetition_penalty=2.0)], [0], pasts=[past_of([3], answer)])
    assert logits.tolist() == [[5.0, 2.5, 2.5, 2.5]]
    logits[:] = 5
    sample(logits, [SamplingParams(frequency_penalty=0.5)], [0], pasts=[past_of([3], answer)])
    assert logits.tolist() == [[5.0, 3.5, 4.5, 5.0]]
    logits[:] = 5
    sample(logits, [SamplingParams(presence_penalty=0.5)], [0], pasts=[past_of([3], answer)])
    assert logits.tolist() == [[5.0, 4.5, 4.5, 5.0]]


@pytest.mark.parametrize(
    ("window", "penalised"), [(0, []), (1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_repetition_window_spans_prompt_and_answer(window, penalised):
    logits = np.full((1, 8), 1.0, F32)
    params = SamplingParams(repetition_penalty=2.0, repeat_last_n=window)
    sample(logits, [params], [0], pasts=[past_of([1, 2, 3], [4, 5])])
    assert np.flatnonzero(logits[0] != 1).tolist() == penalised


def test_a_mask_wins_over_a_bias():
    logits = noise(3, 100)
    bias = bias_of({7: 100.0})
    mask = np.array([7], np.int32)
    hot = SamplingParams(1.0, seed=4)
    assert sample(logits.copy(), [hot] * 3, range(3), [None] * 3, [bias] * 3).tolist() == [7] * 3
    assert 7 not in sample(logits.copy(), [hot] * 3, range(3), [mask] * 3, [bias] * 3)


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_rows_without_a_distribution_give_no_token(worst):
    logits = noise(2, 60)
    logits[0] = worst
    params = SamplingParams(1.0, repetition_penalty=2.0, frequency_penalty=1.0)
    past = past_of([], [1, 2])
    assert sample(logits, [params] * 2, [0, 0], None, [bias_of({3: 5.0})] * 2, [past] * 2)[0] == NO_TOKEN


def test_huge_logits_do_not_warn():
    logits = np.array([[3e38, -3e38, 1.0, 2.0]], F32)
    params = SamplingParams(1.0, repetition_penalty=10.0)
    assert sample(logits.copy(), [params], [0], pasts=[past_of([], [1])])[0] == 0
    up = msgspec.structs.replace(params, repetition_penalty=0.1)
    assert sample(logits.copy(), [up], [0], pasts=[past_of([], [0])])[0] == NO_TOKEN


def test_token_history_views():
    params = SamplingParams(repetition_penalty=2.0, repeat_last_n=3, frequency_penalty=1.0)
    prompt = np.array([9, 8, 7, 6, 5], np.int32)
    history = TokenHistory(prompt, params, 4)
    assert history.past(0).tokens.tolist() == [7, 6, 5]
    history.write(0, [1])
    history.write(1, [2, 3])  # draft tokens
    pasts = [history.past(n) for n in (1, 2, 3)]
    assert [past.tokens.tolist() for past in pasts] == [[7, 6, 5, 1], [7, 6, 5, 1, 2], [7, 6, 5, 1, 2, 3]]
    assert {past.n_prompt for past in pasts} == {3}
    history.write(1, [4])  # the first draft token was rejected
    assert history.past(2).tokens.tolist() == [7, 6, 5, 1, 4]


def test_token_history_keeps_only_the_part_of_the_prompt_that_penalties_need():
    prompt = np.arange(5000, dtype=np.int32)
    assert TokenHistory(prompt, SamplingParams(presence_penalty=1.0), 9).past(0).tokens.tolist() == []
    assert (
        len(TokenHistory(prompt, SamplingParams(repetition_penalty=1.1, repeat_last_n=4096), 9).past(2).tokens) == 4098
    )


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ({}, False),
        ({"repeat_last_n": 10}, False),
        ({"repetition_penalty": 1.1, "repeat_last_n": 0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
    ],
)
def test_has_penalties(wanted, changes):
    assert SamplingParams(**wanted).has_penalties is changes


def test_frequencies_follow_the_penalised_probabilities():
    draws = 4000
    params = SamplingParams(
        1.0, 30, 0.98, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, min_p=0.001
    )
    past = past_of([1, 2, 3], [4, 5, 5, 6])
    bias = bias_of({6: 2.0, 9: 3.0})
    (logits,) = noise(1, 200, 2.0, seed=8)
    ids, p = distribution(logits.copy(), params, None, bias, past)
    counts = np.zeros(200)
    for start in range(0, draws, 500):
        many = np.tile(logits, (500, 1))
        drawn = sample(many, [params] * 500, range(start, start + 500), None, [bias] * 500, [past] * 500)
        counts += np.bincount(drawn, minlength=200)
    assert counts.sum() == counts[ids].sum()
    often = p * draws >= 5
    expected = p[often] * draws
    chi_square = ((counts[ids[often]] - expected) ** 2 / expected).sum()
    freedom = len(expected)
    assert freedom > 5
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
