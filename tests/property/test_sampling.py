"""The sampler, compared with a slow reference; rows are independent of each other."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.draws import distribution, sample
from tests.support.profile import sampled
from uma_trio.engine.sampling import filters, plan
from uma_trio.engine.sampling.dry import Breakers
from uma_trio.engine.sampling.plan import MAX_SORTED_TOP_K, Rows, SamplingPlan
from uma_trio.engine.sampling_threads import SamplingThreads
from uma_trio.engine.token_masks import TokenMask
from uma_trio.engine_link.sampling import NO_TOKEN, Bias, Past, SamplingParams, TokenLogprobs
from uma_trio.protocol.parameters import PARAMETERS


def reference(logits, params):
    """Return ids and probabilities, computed in float64 by sorting everything."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[np.isfinite(logits[order])]
    log_weights = logits[order].astype(np.float64) - logits[order[0]]
    if params.top_k:
        order, log_weights = order[: params.top_k], log_weights[: params.top_k]
    p = np.exp(log_weights) / np.exp(log_weights).sum()
    if params.top_p < 1:
        kept = int(np.searchsorted(p.cumsum(), params.top_p)) + 1
        order, log_weights, p = order[:kept], log_weights[:kept], p[:kept]
    if params.min_p:
        # with tolerance: exp(log(x)) is not always x in float64
        likely = p >= params.min_p * p[0] * (1 - 1e-12)
        order, log_weights = order[likely], log_weights[likely]
    p = np.exp(log_weights / params.temperature)
    return order[p > 0], p[p > 0] / p.sum()


def noise(rows, n_vocab, scale=2.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, n_vocab)) * scale).astype(np.float32)


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 20),
    top_k=st.sampled_from([0, 2, 5, 40, 300, MAX_SORTED_TOP_K, MAX_SORTED_TOP_K + 1, 900, 5000]),
    top_p=st.sampled_from([0.001, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from([0.0, 1e-30, 1e-4, 0.05, 0.3, 1.0]),
)


@given(params, st.sampled_from([1, 7, 64, 100, 1000, 3001]), st.integers(0, 99), st.sampled_from([0.01, 1, 5]))
def test_the_distribution_matches_the_reference(params, n_vocab, seed, scale):
    (logits,) = noise(1, n_vocab, scale, seed)
    if params.greedy:
        return
    expected_ids, expected = reference(logits, params)
    ids, p = distribution(logits, params)
    assert p.sum() == pytest.approx(1)
    assert (np.diff(p) <= 1e-6 * p[:-1] + 1e-15).all()  # differences of running sums near 1 are exact to 1e-16
    # Weights in float32 can move the limit of top-p by one token with a tiny probability.
    n = min(len(ids), len(expected))
    assert abs(len(ids) - len(expected)) <= max(1, 2e-6 / expected[-1])
    assert (ids[: n - 1] == expected_ids[: n - 1]).all()
    np.testing.assert_allclose(p[: n - 1], expected[: n - 1], rtol=1e-3, atol=1e-9)


@given(st.lists(params | st.just(SamplingParams()), min_size=1, max_size=12), st.data())
def test_rows_are_independent(rows, data):
    n_vocab = data.draw(st.sampled_from([50, 1024, 4000]))
    scales = np.array([data.draw(st.sampled_from([0.1, 3, 10])) for _ in rows], np.float32)
    logits = noise(len(rows), n_vocab, 1.0, seed=len(rows)) * scales[:, np.newaxis]
    steps = list(range(5, 5 + len(rows)))
    together = sample(logits.copy(), rows, steps)
    alone = [int(sample(logits[i : i + 1].copy(), [p], [steps[i]])[0]) for i, p in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], [rows[i] for i in order], [steps[i] for i in order])
    assert together.tolist() == alone
    assert shuffled.tolist() == [alone[i] for i in order]


def test_threads_sample_the_same_tokens():
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, mirostat=2),
    ]
    rows = [kinds[row % 4].with_seed(row) for row in range(22)]
    logits, steps, nothing = noise(len(rows), 60_000, 3.0, seed=1), list(range(len(rows))), [None] * len(rows)
    logits[5] = np.nan
    grammars = [TokenMask(False, allowed=np.array([row, 7 * row])) if row % 3 else None for row in range(len(rows))]
    masked = logits.copy()
    for mask, row in zip(grammars, masked, strict=True):
        if mask is not None:
            mask.apply(row)
    states, threads = [{}, {}], SamplingThreads(4)
    expected = sample(masked, rows, steps, mus=states[0])
    with contextlib.closing(threads):
        found = threads.sample(logits, Rows(rows, steps, nothing, nothing, nothing, nothing, grammars), states[1])
    assert found.tolist() == expected.tolist()
    assert all(token in (row, 7 * row, NO_TOKEN) for row, token in enumerate(found.tolist()) if row % 3)
    assert states[0] == states[1] != {}
    assert not any(each.name.startswith("sampling") for each in threading.enumerate())


@given(params, st.integers(0, 9))
def test_only_tokens_that_the_filters_keep_are_drawn(params, seed):
    (logits,) = noise(1, 2000, 1.0, seed)
    if params.greedy:
        return
    allowed = set(distribution(logits, params)[0].tolist())
    drawn = sample(np.tile(logits, (30, 1)), [params] * 30, range(30))
    assert set(drawn.tolist()) <= allowed


@pytest.mark.parametrize(
    "params",
    sampled(
        [
            SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_p=0.9),
            SamplingParams(temperature=4.0, top_p=0.9),  # more candidates than are sorted
            SamplingParams(temperature=1.0, top_k=700),
            SamplingParams(temperature=1.0, min_p=0.02),
            SamplingParams(temperature=4.0, min_p=0.01),  # more candidates than are sorted
            SamplingParams(temperature=4.0, top_k=600, top_p=0.95, min_p=0.1),
        ],
        2,
    ),
)
def test_frequencies_follow_the_probabilities(params):
    draws = 4_000
    (logits,) = noise(1, 1000, 2.0, seed=4)
    ids, p = distribution(logits, params)
    counts = np.zeros(1000)
    for start in range(0, draws, 500):
        rows = np.broadcast_to(logits, (500, 1000))
        tokens = sample(rows, [params] * 500, range(start, start + 500))
        counts += np.bincount(tokens, minlength=1000)
    often = p * draws >= 5
    expected = np.append(p[often], p[~often].sum()) * draws
    observed = np.append(counts[ids[often]], draws - counts[ids[often]].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_fixed_seeds_give_fixed_tokens():
    logits = (np.arange(4 * 500) * 37 % 1009 / 128).astype(np.float32).reshape(4, 500)  # exact, no ties
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2),
        SamplingParams(temperature=1.5, seed=2**64 - 1),
    ]
    drawn = [sample(logits.copy(), kinds, [step] * 4).tolist() for step in range(3)]
    assert drawn == FIXED


FIXED = [[409, 263, 62, 434], [409, 398, 445, 461], [409, 318, 195, 483]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("min_p", [1e-9, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("rest", [{}, {"top_k": 20}, {"top_k": 600}, {"top_p": 0.9}, {"top_k": 900, "top_p": 0.99}])
def test_min_p_is_relative_to_the_best_token_and_comes_after_the_other_filters(temperature, min_p, rest):
    (logits,) = noise(1, 2000, 3.0, seed=1)
    ids, p = distribution(logits.copy(), SamplingParams(temperature, min_p=min_p, **rest))
    every, plain = distribution(logits.copy(), SamplingParams(temperature, **rest))
    n = int((logits[every] - logits[every[0]] >= np.log(min_p)).sum())
    assert ids.tolist() == every[:n].tolist()
    np.testing.assert_allclose(p, plain[:n] / plain[:n].sum(), rtol=1e-6)


def test_min_p_of_1_keeps_the_best_token_and_ties():
    logits = np.array([1.0, 3.0, -2.0, 3.0, 2.999], np.float32)
    assert distribution(logits, SamplingParams(0.7, min_p=1.0))[0].tolist() == [1, 3]


def test_xtc_excludes_as_often_as_it_shall():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(1.0, xtc_probability=0.3, xtc_threshold=0.15, seed=3)
    left = [distribution(logits.copy(), params, step=step)[0].tolist() for step in range(2000)]
    assert {len(ids) for ids in left} == {2, 4}
    assert left.count([2, 3]) == pytest.approx(600, abs=100)
    drawn = np.bincount(sample(np.tile(logits, (2000, 1)), [params] * 2000, range(2000)), minlength=4) / 2000
    excluded, rest = 0.3 * np.array([0, 0, 2 / 3, 1 / 3]), 0.7 * np.array([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(drawn, excluded + rest, atol=0.04)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.zeros((3, 100), np.float32)
    logits[1, [7, 9]] = 1
    assert sample(logits, [SamplingParams()] * 3, [0] * 3).tolist() == [0, 7, 0]


def test_filters_keep_the_lowest_ids_of_a_tie():
    ids, p = distribution(np.zeros(5000, np.float32), SamplingParams(temperature=1, top_k=3))
    assert ids.tolist() == [0, 1, 2]
    assert p == pytest.approx([1 / 3] * 3)
    ids, _ = distribution(np.zeros(5000, np.float32), SamplingParams(temperature=1, top_k=1000))
    assert ids.tolist() == list(range(1000))
    ids, _ = distribution(np.zeros(5000, np.float32), SamplingParams(temperature=1, top_p=0.5))
    assert ids.tolist() == list(range(2500))


def test_negative_zero_equals_zero():
    ids, _ = distribution(np.array([-0.0, 0.0, -1.0], np.float32), SamplingParams(temperature=1, top_k=2))
    assert ids.tolist() == [0, 1]


def test_a_row_without_a_distribution_does_not_affect_others():
    logits = noise(6, 300)
    every = [SamplingParams(temperature=1, top_k=20), SamplingParams(temperature=1), SamplingParams()] * 2
    expected = sample(logits.copy(), every, range(6)).tolist()
    logits[0, 17] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    tokens = sample(logits, every, range(6)).tolist()
    assert tokens == [NO_TOKEN] * 3 + expected[3:]
    assert len(distribution(logits[0], every[0])[0]) == 0


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize("rest", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 600}, {"min_p": 0.1}, {"min_p": 1e-300}])
def test_a_tiny_temperature_is_greedy(temperature, rest):
    logits = noise(4, 1000)
    chosen = sample(logits, [SamplingParams(temperature=temperature, **rest)] * 4, range(4))
    assert (chosen == logits.argmax(axis=1)).all()


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(1.0), SamplingParams(5.0, 50), SamplingParams(5.0, 0, 0.9)]
)
def test_masked_tokens_are_never_drawn(params):
    logits = noise(20, 100)
    mask = np.arange(95)
    chosen = sample(logits, [params] * 20, range(20), [mask, None] * 10)
    assert (chosen[::2] >= 95).all()


def test_read_only_logits_are_not_changed():
    logits = noise(1, 50)
    logits.flags.writeable = False
    best = int(logits.argmax())
    assert sample(logits, [SamplingParams()], [0], [np.array([best])])[0] != best
    assert int(logits.argmax()) == best


def test_masking_all_tokens_gives_no_token():
    assert sample(noise(1, 50), [SamplingParams()], [0], [np.arange(50)]).tolist() == [NO_TOKEN]


def test_minus_infinity_is_never_drawn():
    logits = np.full((50, 200), -np.inf, np.float32)
    logits[:, [3, 150]] = 1.0
    for params in (
        SamplingParams(1.0),
        SamplingParams(1.0, 10),
        SamplingParams(1.0, 0, 0.99),
        SamplingParams(1.0, 150),
        SamplingParams(1.0, min_p=1e-9),
    ):
        assert set(sample(logits, [params] * 50, range(50)).tolist()) == {3, 150}


def test_no_rows():
    assert sample(np.empty((0, 100), np.float32), [], []).tolist() == []


def enc_hook(value):
    return [str(value.dtype), value.tobytes()]


def dec_hook(_, encoded):
    return np.frombuffer(encoded[1], encoded[0])


def test_structs_survive_msgpack():
    params = SamplingParams(0.7, 40, seed=2**64 - 1, presence_penalty=-0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    logprobs = TokenLogprobs(-0.5, ((3, -0.5), (7, -1.25)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(logprobs), type=TokenLogprobs) == logprobs
    for struct in (Past(np.array([1, 2, 3], np.int32), 2), Bias(np.array([4], np.int32), np.array([0.5], np.float32))):
        encoded = msgspec.msgpack.encode(struct, enc_hook=enc_hook)
        decoded = msgspec.msgpack.decode(encoded, type=type(struct), dec_hook=dec_hook)
        for name in struct.__struct_fields__:
            np.testing.assert_array_equal(getattr(decoded, name), getattr(struct, name), strict=True)


@pytest.mark.parametrize(
    ("rows", "copied"),
    [
        ([(0.0, 0, 1.0)] * 3, 0),
        ([(1.0, 40, 0.9)] * 3, 0),
        ([(1.0, 0, 0.9)] * 3, 0),
        ([(1.0, 40, 0.9), (0.0, 0, 1.0)], 1),
        ([(1.0, 0, 1.0)] * 3, 0),
        ([(1.0, 0, 1.0), (1.0, 40, 0.9)], 2),
        ([(1.0, 0, 1.0, 0.1), (1.0, 40, 0.9)], 0),
        ([], 0),
    ],
)
def test_copied_rows(rows, copied):
    assert SamplingPlan([SamplingParams(*row) for row in rows], 1000).copied_logits_rows == copied


OTHER_VALUES = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0, "repeat_last_n": 1,
    "frequency_penalty": 1.0, "presence_penalty": 1.0, "top_n_sigma": 0.5, "typical_p": 0.5, "xtc_probability": 1.0,
    "xtc_threshold": 0.3, "dynatemp_range": 0.9, "dynatemp_exponent": 3.0, "dry_multiplier": 2.0, "dry_base": 4.0,
    "dry_allowed_length": 5, "dry_penalty_last_n": 3, "mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.9,
}  # fmt: skip
NEEDED = {
    "repeat_last_n": {"repetition_penalty": 2.0},
    "xtc_threshold": {"xtc_probability": 1.0},
    "dynatemp_exponent": {"dynatemp_range": 0.9},
    **{name: {"dry_multiplier": 0.2} for name in ("dry_base", "dry_allowed_length", "dry_penalty_last_n")},
    **{name: {"mirostat": 2} for name in ("mirostat_tau", "mirostat_eta")},
}
"""What has to be on for a parameter to count."""


def drawn_with(**fields):
    """All that a step says of a row: the distribution in which a token is drawn, and the state of mirostat."""
    params = SamplingParams(**{"temperature": 1.0, **fields})
    (logits,) = noise(1, 12)
    tokens = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], np.int32)
    past = Past(tokens, 4)
    breakers = Breakers([], lambda token: b"", lambda text: []) if params.dry_window else None
    ids, p = distribution(logits.copy(), params, past=past, breakers=breakers)
    mus = {}
    sample(logits[np.newaxis].copy(), [params], [0], None, None, [past], [breakers], mus=mus)
    return [*zip(ids.tolist(), np.round(p, 9).tolist(), strict=True)], mus


@all_cases("name", [row.name for row in PARAMETERS])
def test_every_parameter_counts(name):
    needed = NEEDED.get(name, {})
    assert drawn_with(**needed) != drawn_with(**needed, **{name: OTHER_VALUES[name]})


@all_cases("others", [{}, {"top_k": 40}, {"top_k": 900}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.9}])
def test_a_new_filter_is_a_row_of_the_table(others):
    def keep_best(logits, distances, kept, params):
        return distances == 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (filters, plan):
            patch.setattr(module, "FILTERS", (*filters.FILTERS, filters.Filter(lambda params, n: True, keep_best)))
        ids, _ = distribution(*noise(1, 1000), SamplingParams(temperature=1.0, **others))
    assert ids.tolist() == [noise(1, 1000).argmax()]


def test_a_failure_in_a_thread_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    n_done = []

    def broken(logits: np.ndarray, rows: Rows, mus: object, plan: object) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError
        n_done.append(len(logits))
        return np.zeros(len(logits), np.int32)

    monkeypatch.setattr("uma_trio.engine.sampling.sampler.sample", broken)
    with contextlib.closing(SamplingThreads(3)) as threads:
        rows = Rows([SamplingParams(temperature=0.0)] * 64, [0] * 64)
        for _ in range(2):  # and the threads can go on
            with pytest.raises(ZeroDivisionError):
                threads.sample(noise(64, 60_000, 1.0, seed=1), rows)
    assert n_done == [21, 21]
