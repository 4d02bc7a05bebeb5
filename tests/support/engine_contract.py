"""The engine contract as tests: one file runs them with the fake engine, another one with llama.cpp.

The importing file has two fixtures:

- ``make(n_ctx, n_seq_max, n_batch)`` opens an engine.  Its ``info`` may promise more cells than ``n_ctx``.  With
  ``adapters=True`` it has two LoRA adapters, and with ``adapters=False`` the same model without them.
- ``prompts`` is a list of distinct lists of token ids.

Source: ``uma_trio.engine_link.messages``.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from tests.support.gpu import tolerance
from tests.support.profile import sampled
from tests.support.state_files import hashes_of, memory_file
from uma_trio.engine.state_check import FRONT_PAGES
from uma_trio.engine_link.kv_ops import CopyPrefix, LoadState, MeasureState, SaveState, Truncate
from uma_trio.engine_link.messages import EmbeddingInput, EngineError, SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams
from uma_trio.engine_link.state_pages import PAGE_BYTES

GREEDY = SamplingParams(0.0, 0, 1.0, 0)


def greedy(n_before=0, banned=None):
    return SampleRequest(GREEDY, n_before, banned)


def prefill_input(seq_id, tokens, position=0, adapters=()):
    return StepInput(seq_id, position, tokens, [greedy()], adapters=adapters)


def step(*inputs, removing=()):
    """A step with one call."""
    return Step([Truncate(seq_id) for seq_id in removing], [inputs] if inputs else ())


def alone(engine, tokens, n, *, chunk=10_000, seq_id=0):
    """The first ``n`` tokens that follow ``tokens``, computed with no other sequence in the call."""
    engine.step(step(removing=(seq_id,)))
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        last = at + len(part) == len(tokens)
        output = engine.step(step(StepInput(seq_id, at, part, [greedy()] if last else ())))
    answer = list(output.tokens)
    while len(answer) < n:
        decode = StepInput(seq_id, len(tokens) + len(answer) - 1, answer[-1:], [greedy(len(answer))])
        answer += engine.step(step(decode)).tokens
    engine.step(step(removing=(seq_id,)))
    return answer


def state_sizes(engine, seq_id, *checkpoints):
    """Bytes of the sequence's state and of each checkpoint."""
    [(measured, sizes)] = engine.step(Step([MeasureState(seq_id, checkpoints)])).state_sizes
    assert measured == seq_id
    return list(sizes)


def assert_refused(output, seq_id):
    """The engine refused to save or load the state of ``seq_id``, and says why."""
    [(refused, reason)] = output.refused
    assert refused == seq_id
    assert reason


@pytest.fixture
def new_file():
    """Makes a file without a name from its content; returns a descriptor, which is closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def new_file(content):
            fd = memory_file(bytes(content))
            stack.callback(os.close, fd)
            return fd

        yield new_file


def content(fd):
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.fixture
def engine(make):
    return make(n_ctx=1024, n_seq_max=4, n_batch=64)


@pytest.fixture
def truncatable(engine):
    if not engine.info.can_truncate:
        pytest.skip("this model's memory cannot be truncated")
    return engine


# -- one sequence ------------------------------------------------------------------------------------


def test_info(engine):
    info = engine.info
    assert info.n_vocab > 10
    assert info.n_ctx >= 1024
    assert (info.n_batch, info.n_seq_max) == (64, 4)
    assert 0 < info.max_request_tokens <= info.n_ctx_seq <= info.n_ctx
    assert info.eog_ids
    assert all(0 <= token < info.n_vocab for token in info.eog_ids)


def test_a_new_engine_has_an_empty_cache(engine):
    assert engine.used_cells() == {}


def test_an_empty_step_is_a_no_op(engine):
    assert engine.step(step()).tokens == ()
    assert engine.used_cells() == {}


def test_a_prompt_yields_one_token_and_occupies_its_cells(engine, prompts):
    output = engine.step(step(prefill_input(0, prompts[0])))
    assert len(output.tokens) == 1
    assert 0 <= output.tokens[0] < engine.info.n_vocab
    assert engine.used_cells() == {0: len(prompts[0])}


def test_an_output_has_the_number_and_the_duration_of_its_step(engine, prompts):
    output = engine.step(Step((), [[prefill_input(0, prompts[0])]], number=7))
    assert output.number == 7
    assert output.decode_ms >= 0
    assert output.sample_ms >= 0
    assert output.ended_s >= output.started_s


def test_the_same_prompt_yields_the_same_tokens_in_any_sequence(engine, prompts):
    first = alone(engine, prompts[0], 8, seq_id=0)
    assert alone(engine, prompts[0], 8, seq_id=3) == first
    assert alone(engine, prompts[0], 8, seq_id=0) == first


def test_tokens_as_a_list_and_as_an_array(engine, prompts):
    as_array = np.asarray(prompts[0], dtype=np.int32)
    assert alone(engine, as_array, 3) == alone(engine, list(prompts[0]), 3)


def test_another_number_of_threads_computes_the_same(engine, prompts):
    first = alone(engine, prompts[0], 8)
    for n_threads in (2, 1):
        engine.set_threads(n_threads)
        assert alone(engine, prompts[0], 8) == first
    engine.reset()
    assert alone(engine, prompts[0], 8) == first


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_prefill_equals_whole_prefill(engine, prompts, chunk):
    assert alone(engine, prompts[1], 8, chunk=chunk) == alone(engine, prompts[1], 8)


def test_inside_a_prompt_nothing_is_sampled(engine, prompts):
    assert engine.step(step(StepInput(0, 0, prompts[0][:3], ()))).tokens == ()
    assert engine.used_cells() == {0: 3}


# -- several sequences -------------------------------------------------------------------------------


def test_sequences_of_one_call_do_not_see_each_other(engine, prompts):
    expected = [alone(engine, prompt, 4) for prompt in prompts[:4]]
    first = engine.step(step(*map(prefill_input, range(4), prompts))).tokens
    answers = [[token] for token in first]
    for n in range(1, 4):
        inputs = tuple(StepInput(seq, len(prompts[seq]) + n - 1, answers[seq][-1:], [greedy(n)]) for seq in range(4))
        for seq, token in enumerate(engine.step(step(*inputs)).tokens):
            answers[seq].append(token)
    assert answers == expected


def test_prefill_and_decode_in_one_call(engine, prompts):
    """Tokens come in the order of the inputs that sample; inputs that do not sample may stand between them."""
    expected = [alone(engine, prompt, 2) for prompt in prompts[:3]]
    (first,) = engine.step(step(prefill_input(2, prompts[2]))).tokens
    inputs = (
        StepInput(1, 0, prompts[1][:2], ()),
        StepInput(2, len(prompts[2]), [first], [greedy(1)]),
        prefill_input(0, prompts[0]),
    )
    output = engine.step(step(*inputs))
    assert output.tokens == (expected[2][1], expected[0][0])
    output = engine.step(
        step(prefill_input(1, prompts[1][2:], 2), StepInput(0, len(prompts[0]), [expected[0][0]], [greedy(1)]))
    )
    assert output.tokens == (expected[1][0], expected[0][1])
    assert engine.used_cells() == {0: len(prompts[0]) + 1, 1: len(prompts[1]), 2: len(prompts[2]) + 1}


def test_sequences_of_a_call_may_have_any_order(engine, prompts):
    expected = [alone(engine, prompt, 1)[0] for prompt in prompts[:4]]
    order = (2, 0, 3, 1)
    output = engine.step(step(*(prefill_input(seq, prompts[seq]) for seq in order)))
    assert list(output.tokens) == [expected[seq] for seq in order]


def test_sequences_between_those_of_a_call_stay_as_they_are(engine, prompts):
    expected = [alone(engine, prompt, 3) for prompt in prompts[:4]]
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1]), prefill_input(3, prompts[3])))
    for n in (1, 2):
        decodes = [StepInput(seq, len(prompts[seq]) + n - 1, [expected[seq][n - 1]], [greedy(n)]) for seq in (0, 3)]
        assert engine.step(step(*decodes)).tokens == (expected[0][n], expected[3][n])
        assert engine.used_cells() == {0: len(prompts[0]) + n, 1: len(prompts[1]), 3: len(prompts[3]) + n}
    decode = StepInput(1, len(prompts[1]), expected[1][:1], [greedy(1)])
    assert engine.step(step(decode, prefill_input(2, prompts[2]))).tokens == (expected[1][1], expected[2][0])


def test_calls_of_one_step_are_computed_in_order(engine, prompts):
    expected = [alone(engine, prompt, 2) for prompt in prompts[:3]]
    output = engine.step(
        Step((), [[prefill_input(0, prompts[0])], [prefill_input(1, prompts[1]), prefill_input(2, prompts[2])]])
    )
    assert output.tokens == tuple(answer[0] for answer in expected)
    inputs = [StepInput(seq, len(prompts[seq]), expected[seq][:1], [greedy(1)]) for seq in range(3)]
    assert engine.step(Step((), [inputs[:2], inputs[2:]])).tokens == tuple(answer[1] for answer in expected)


def test_prompts_advance_in_calls_of_their_own(engine, prompts):
    """Nothing is sampled from the first part of a prompt, next to a decode or in the call before the rest."""
    expected = [alone(engine, prompt, 3) for prompt in prompts[:2]]
    [first, *rest] = prompts[1]
    engine.step(step(prefill_input(0, prompts[0])))
    decodes = [StepInput(0, len(prompts[0]) + n, expected[0][n : n + 1], [greedy(n + 1)]) for n in range(2)]
    output = engine.step(Step((), [decodes[:1], [StepInput(1, 0, [first], ())]]))
    assert output.tokens == (expected[0][1],)
    middle, end = rest[:-1], rest[-1:]
    calls = [[StepInput(1, 1, middle, ())], decodes[1:], [prefill_input(1, end, 1 + len(middle))]]
    assert engine.step(Step((), calls)).tokens == (expected[0][2], expected[1][0])


# -- Truncate and CopyPrefix -------------------------------------------------------------------------


def test_a_step_removes_before_it_computes_so_a_sequence_can_be_reused_at_once(engine, prompts):
    expected = alone(engine, prompts[1], 3)
    engine.step(step(prefill_input(0, prompts[0])))
    output = engine.step(step(prefill_input(0, prompts[1]), removing=(0,)))
    assert output.tokens == (expected[0],)
    assert engine.used_cells() == {0: len(prompts[1])}
    assert engine.step(step(StepInput(0, len(prompts[1]), expected[:1], [greedy(1)]))).tokens == (expected[1],)


def test_removing_a_sequence_does_not_affect_others(engine, prompts):
    expected = alone(engine, prompts[1], 3)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1]), prefill_input(2, prompts[2])))
    engine.step(step(removing=(0, 2)))
    assert engine.used_cells() == {1: len(prompts[1])}
    assert engine.step(step(StepInput(1, len(prompts[1]), expected[:1], [greedy(1)]))).tokens == (expected[1],)


def test_removing_an_empty_sequence_is_a_no_op(engine, prompts):
    engine.step(step(removing=(0, 1, 2, 3)))
    engine.step(step(prefill_input(0, prompts[0])))
    engine.step(step(removing=(3,)))
    assert engine.used_cells() == {0: len(prompts[0])}


def test_removing_frees_cells(engine, prompts):
    """Three times as many tokens as the cache has cells, one sequence after another."""
    long = (prompts[0] * 64)[:64]
    for n in range(3 * engine.info.n_ctx // 64):
        engine.step(step(StepInput((n + 1) % 4, 0, long, ()), removing=(n % 4, (n + 1) % 4)))
    assert list(engine.used_cells().values()) == [64]


def test_a_truncated_sequence_can_be_extended(truncatable, prompts):
    engine = truncatable
    both = [*prompts[0], *prompts[2]]
    expected = alone(engine, both, 3)
    engine.step(step(prefill_input(0, [*prompts[0], *prompts[1]])))
    at = len(prompts[0])
    assert engine.step(Step([Truncate(0, at)], [[prefill_input(0, prompts[2], at)]])).tokens == (expected[0],)
    assert engine.used_cells() == {0: len(both)}
    assert engine.step(step(StepInput(0, len(both), expected[:1], [greedy(1)]))).tokens == (expected[1],)


@pytest.mark.parametrize("behind", [0, 3])
def test_a_copied_prefix_equals_a_computed_one(truncatable, prompts, behind):
    """Source and copy both go on, also when the source holds more than the prefix."""
    engine = truncatable
    prompt, more = prompts[0], prompts[1]
    at = len(prompt)
    expected = [alone(engine, prompt, 3), alone(engine, [*prompt, *more], 3)]
    tail = prompts[2][:behind]
    engine.step(step(StepInput(0, 0, [*prompt, *tail], ()), prefill_input(2, prompts[3])))
    if not tail:
        engine.step(Step([Truncate(0, at - 1)], [[prefill_input(0, prompt[-1:], at - 1)]]))
    output = engine.step(Step([CopyPrefix(0, 1, at)], [[prefill_input(1, more, at)]]))
    assert output.tokens == (expected[1][0],)
    assert engine.used_cells() == {0: at + behind, 1: at + len(more), 2: len(prompts[3])}
    inputs = [StepInput(1, at + len(more), expected[1][:1], [greedy(1)])]
    if not tail:
        inputs.append(StepInput(0, at, expected[0][:1], [greedy(1)]))
    assert engine.step(step(*inputs)).tokens == (expected[1][1], expected[0][1])[: len(inputs)]
    engine.step(step(removing=(0,)))
    last = StepInput(1, at + len(more) + 1, expected[1][1:2], [greedy(2)])
    assert engine.step(step(last)).tokens == (expected[1][2],), "removing the source changed the copy"


def test_two_copies_in_one_step_outlive_their_source(engine, prompts):
    prompt = prompts[0]
    at = len(prompt)
    expected = alone(engine, [*prompt, 5], 2)
    engine.step(step(StepInput(0, 0, prompt, ())))
    ops = [CopyPrefix(0, 1, at), CopyPrefix(0, 2, at), Truncate(0)]
    output = engine.step(Step(ops, [[prefill_input(1, [5], at), prefill_input(2, [5], at)]]))
    assert output.tokens == (expected[0], expected[0])
    assert engine.used_cells() == {1: at + 1, 2: at + 1}


# -- sampling ----------------------------------------------------------------------------------------


def test_draft_tokens_are_verified_in_one_call(truncatable, prompts):
    """The engine samples behind each draft token.  Behind a correct one it samples what plain decoding would sample."""
    engine = truncatable
    expected = alone(engine, prompts[0], 6)
    others = alone(engine, prompts[1], 2)
    wrong = next(token for token in range(5, 50) if token not in expected)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    drafted = StepInput(0, len(prompts[0]), [*expected[:3], wrong], [greedy(n) for n in range(1, 5)])
    output = engine.step(step(drafted, StepInput(1, len(prompts[1]), others[:1], [greedy(1)])))
    assert output.tokens[:3] == tuple(expected[1:4])
    assert output.tokens[4] == others[1]
    n_right = len(prompts[0]) + 3
    again = Step([Truncate(0, n_right)], [[StepInput(0, n_right, [expected[3]], [greedy(4)])]])
    assert engine.step(again).tokens == (expected[4],)


def test_a_banned_token_is_not_sampled(engine, prompts):
    for _ in range(3):
        (likeliest,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
        banned = np.asarray([likeliest, *engine.info.eog_ids], dtype=np.int32)
        (other,) = engine.step(step(StepInput(0, 0, prompts[0], [greedy(banned=banned)]), removing=(0,))).tokens
        assert other not in banned
        (again,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
        assert again == likeliest, "a ban holds for one sample request"


def test_a_ban_holds_for_its_own_row(engine, prompts):
    first, second = (alone(engine, prompt, 1)[0] for prompt in prompts[:2])
    restricted = StepInput(0, 0, prompts[0], [greedy(banned=np.asarray([first, second], dtype=np.int32))])
    output = engine.step(step(restricted, prefill_input(1, prompts[1])))
    assert output.tokens[0] not in (first, second)
    assert output.tokens[1] == second


def test_a_bias_of_100_decides_for_its_own_row(engine, prompts):
    (likeliest,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
    wanted = next(token for token in range(5, 50) if token != likeliest)
    bias = Bias(np.array([wanted, likeliest], np.int32), np.array([100, 1], np.float32))
    biased = StepInput(0, 0, prompts[0], [SampleRequest(GREEDY, 0, bias=bias)])
    output = engine.step(step(biased, prefill_input(1, prompts[0]), removing=(0,)))
    assert output.tokens == (wanted, likeliest)


def test_penalties_use_the_past_of_their_sample_request(engine, prompts):
    strong = SamplingParams(repetition_penalty=10.0, presence_penalty=2.0, frequency_penalty=2.0)
    plain = alone(engine, prompts[0], 2)
    tokens = np.array(prompts[0], np.int32)
    engine.step(step(removing=(0,)))
    empty_past = SampleRequest(strong, 0, past=Past(tokens[len(tokens) :], 0))
    (first,) = engine.step(step(StepInput(0, 0, prompts[0], [empty_past]))).tokens
    assert first == plain[0]
    samples = [SampleRequest(strong, n, past=Past(np.array([first] * n, np.int32), 0)) for n in (1, 2)]
    output = engine.step(step(StepInput(0, len(tokens), [first, first], samples)))
    assert len(output.tokens) == 2
    assert first not in output.tokens


def test_log_probabilities_are_reported_where_they_are_requested(engine, prompts):
    inputs = [
        StepInput(seq, 0, prompts[seq], [SampleRequest(GREEDY, 0, logprobs=n)]) for seq, n in enumerate((None, 3, 0))
    ]
    output = engine.step(step(*inputs))
    not_requested, with_three, with_none = output.scores
    assert not_requested is None
    assert with_none.top_logprobs == ()
    assert with_three.top_logprobs[0] == (output.tokens[1], with_three.logprob), "the greedy choice is the likeliest"
    assert len(with_three.top_logprobs) == 3
    assert [logprob for _, logprob in with_three.top_logprobs] == sorted(
        (logprob for _, logprob in with_three.top_logprobs), reverse=True
    )
    assert all(score.logprob <= 0 for score in (with_three, with_none))
    assert engine.step(step(prefill_input(3, prompts[3]))).scores == ()


def test_log_probabilities_do_not_depend_on_sampling_parameters(engine, prompts):
    """They are the model's own: bans, temperature and filters do not change them."""

    def score(sample):
        output = engine.step(step(StepInput(0, 0, prompts[0], [sample]), removing=(0,)))
        return output.tokens[0], output.scores[0]

    token, plain = score(SampleRequest(GREEDY, 0, logprobs=5))
    banned = np.array([token], np.int32)
    other, restricted = score(SampleRequest(SamplingParams(0.1, 2, 0.5), 0, banned, logprobs=5))
    assert other != token
    if plain.top_logprobs != restricted.top_logprobs:  # the fake model reports the sampled token and those next to it
        assert restricted.top_logprobs[0] == (other, restricted.logprob)
    else:
        assert restricted.logprob < plain.logprob


# -- steps that fail ---------------------------------------------------------------------------------


def assert_works_after_reset(engine, prompt, expected):
    engine.reset()
    assert engine.used_cells() == {}
    assert alone(engine, prompt, len(expected)) == expected


@pytest.mark.parametrize("off", [-1, 1, 10])
def test_an_input_at_another_position_than_the_end_of_its_sequence_fails(engine, prompts, off):
    expected = alone(engine, prompts[0], 2)
    engine.step(step(prefill_input(0, prompts[0])))
    with pytest.raises(EngineError):
        engine.step(step(StepInput(0, len(prompts[0]) + off, [5], [greedy()])))
    assert_works_after_reset(engine, prompts[0], expected)


@pytest.mark.parametrize("seq_id", [-1, 4, 1000])
def test_a_sequence_id_out_of_range_fails(engine, prompts, seq_id):
    expected = alone(engine, prompts[0], 2)
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(seq_id, prompts[0])))
    assert_works_after_reset(engine, prompts[0], expected)


def test_a_call_of_more_than_n_batch_tokens_fails(engine, prompts):
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, (prompts[0] * 65)[:65])))
    engine.reset()
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, (prompts[0] * 60)[:60]), prefill_input(1, (prompts[1] * 5)[:5])))
    engine.reset()
    engine.step(step(prefill_input(0, (prompts[0] * 64)[:64])))


def test_an_input_without_tokens_fails(engine, prompts):
    expected = alone(engine, prompts[0], 2)
    with pytest.raises(EngineError):
        engine.step(step(StepInput(0, 0, [], [greedy()])))
    assert_works_after_reset(engine, prompts[0], expected)


def test_a_step_without_room_in_the_cache_fails(make, prompts):
    engine = make(n_ctx=256, n_seq_max=2, n_batch=64)
    expected = alone(engine, prompts[0], 2)
    engine.step(step(prefill_input(0, prompts[0])))
    filler = (prompts[1] * 64)[:64]
    with pytest.raises(EngineError):
        for at in range(0, 4 * engine.info.n_ctx, 64):
            engine.step(step(StepInput(1, at, filler, ())))
    assert_works_after_reset(engine, prompts[0], expected)


def test_reset_empties_the_cache(engine, prompts):
    expected = alone(engine, prompts[0], 3)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    assert_works_after_reset(engine, prompts[0], expected)
    engine.reset()
    assert_works_after_reset(engine, prompts[0], expected)


def test_an_aborted_engine_fails_every_step_that_computes(engine, prompts):
    engine.abort()
    for _ in range(3):
        with pytest.raises(EngineError):
            engine.step(step(prefill_input(0, prompts[0])))
    engine.reset()
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, prompts[0])))


def test_closing_twice_is_a_no_op(make, prompts):
    engine = make(n_ctx=256, n_seq_max=1, n_batch=64)
    engine.step(step(prefill_input(0, prompts[0])))
    engine.close()
    engine.close()


# -- states ------------------------------------------------------------------------------------------


def test_a_longer_sequence_has_a_larger_state(truncatable, prompts):
    """Each sequence of a step is measured; the cache stays as it is."""
    engine = truncatable
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, [*prompts[0], *prompts[1]])))
    measured = engine.step(Step([MeasureState(0), MeasureState(1, (3,))])).state_sizes
    assert [seq_id for seq_id, _ in measured] == [0, 1]
    [short], [long, checkpoint] = (sizes for _, sizes in measured)
    assert 0 < short < long
    assert checkpoint == 0, "there is no checkpoint 3"
    assert engine.used_cells() == {0: len(prompts[0]), 1: len(prompts[0]) + len(prompts[1])}


def test_a_state_is_measured_as_the_ops_before_left_it(truncatable, prompts):
    engine = truncatable
    at = len(prompts[0])
    engine.step(step(prefill_input(0, prompts[0])))
    expected = state_sizes(engine, 0)
    engine.step(step(StepInput(0, at, prompts[1], ())))
    output = engine.step(Step([Truncate(0, at), MeasureState(0)], [[prefill_input(0, prompts[1], at)]]))
    assert [list(sizes) for _, sizes in output.state_sizes] == [expected]
    assert len(output.tokens) == 1


@pytest.mark.parametrize("offset", [0, 4096, 1000])
def test_a_saved_state_can_be_loaded_into_another_sequence(engine, prompts, new_file, offset):
    """At any offset in its file; bytes in front of it stay as they are."""
    at = len(prompts[0])
    engine.step(step(prefill_input(0, prompts[0])))
    expected = alone(engine, [*prompts[0], *prompts[1]], 8, seq_id=1)
    [n_bytes] = state_sizes(engine, 0)
    fd = new_file(b"x" * offset + bytes(n_bytes))
    saved = engine.step(Step([SaveState(0, fd, offset, n_bytes), Truncate(0)]))
    assert not saved.refused
    assert saved.saved_bytes == n_bytes
    assert content(fd)[:offset] == b"x" * offset
    assert engine.used_cells() == {}
    loaded = engine.step(Step([LoadState(2, at, fd, offset, n_bytes)]))
    assert not loaded.refused
    assert loaded.saved_bytes == 0
    assert engine.used_cells() == {2: at}
    answer = list(engine.step(step(prefill_input(2, prompts[1], at))).tokens)
    while len(answer) < 8:
        position = at + len(prompts[1]) + len(answer) - 1
        answer += engine.step(step(StepInput(2, position, answer[-1:], [greedy(len(answer))]))).tokens
    assert answer == expected


def test_saving_does_not_depend_on_what_the_step_computes(engine, prompts, new_file):
    """``saved_bytes`` counts only the state, even if the file is larger."""
    engine.step(step(prefill_input(0, prompts[0])))
    [n_bytes] = state_sizes(engine, 0)
    first, second = new_file(bytes(n_bytes)), new_file(bytes(n_bytes + 1000))
    engine.step(Step([SaveState(0, first, 0, n_bytes)]))
    output = engine.step(Step([SaveState(0, second, 0, n_bytes + 1000)], [[prefill_input(1, prompts[1])]]))
    assert output.saved_bytes == n_bytes
    assert len(output.tokens) == 1
    assert not output.refused
    assert content(second)[:n_bytes] == content(first)


def test_a_refused_load_leaves_its_sequence_empty_and_the_step_goes_on(engine, prompts, new_file):
    at = len(prompts[0])
    engine.step(step(prefill_input(0, prompts[0])))
    [n_bytes] = state_sizes(engine, 0)
    fd = new_file(bytes(n_bytes))
    engine.step(Step([SaveState(0, fd, 0, n_bytes)]))
    zeros, cut = new_file(bytes(n_bytes)), new_file(content(fd)[: n_bytes // 2])
    for wrong in (
        LoadState(1, at, zeros, 0, n_bytes),
        LoadState(1, at, fd, 0, n_bytes // 2),
        LoadState(1, at, cut, 0, n_bytes),
        LoadState(1, at + 1, fd, 0, n_bytes),
        LoadState(1, at, fd, 8, n_bytes - 8),
    ):
        output = engine.step(Step([wrong], [[prefill_input(2, prompts[1])]]))
        assert_refused(output, 1)
        assert len(output.tokens) == 1, "the other sequences of the step are computed"
        assert engine.used_cells() == {0: at, 2: len(prompts[1])}
        engine.step(step(removing=(2,)))
    assert not engine.step(Step([LoadState(1, at, fd, 0, n_bytes)])).refused
    assert engine.used_cells() == {0: at, 1: at}


@pytest.mark.parametrize("share", sampled([0.001, 0.3, 0.999], 3), ids=["cells", "keys", "values"])
def test_an_altered_state_is_never_used(make, prompts, new_file, share):
    """Altered keys and values may be found when they are in the cache already: then the step fails."""
    engine = make(n_ctx=4096, n_seq_max=3, n_batch=256)
    tokens = (prompts[0] * 1200)[:1200]
    for at in range(0, 1200, 200):
        engine.step(step(prefill_input(0, tokens[at : at + 200], at)))
    [n_bytes] = state_sizes(engine, 0)
    fd = new_file(bytes(n_bytes))
    engine.step(Step([SaveState(0, fd, 0, n_bytes), Truncate(0)]))
    good = content(fd)
    expected, after_all = alone(engine, prompts[1], 6), alone(engine, [*tokens, *prompts[2]], 3, chunk=200)
    at = int(n_bytes * share)
    bad = new_file(good[:at] + bytes([255 - byte for byte in good[at : at + 12]]) + good[at + 12 :])
    load = LoadState(2, 1200, bad, 0, n_bytes, hashes=hashes_of(good))
    try:
        output = engine.step(Step([load], [[prefill_input(1, prompts[1])]]))
    except EngineError:
        assert at >= FRONT_PAGES * PAGE_BYTES
        engine.reset()
    else:
        assert at < FRONT_PAGES * PAGE_BYTES or not engine.info.can_truncate
        assert_refused(output, 2)
        assert output.tokens == (expected[0],)
        engine.step(step(removing=(1,)))
    assert engine.used_cells() == {}
    assert alone(engine, prompts[1], 6, seq_id=1) == expected
    for hashes in (hashes_of(good)[:-1], hashes_of(good) * 2):
        assert_refused(engine.step(Step([LoadState(2, 1200, fd, 0, n_bytes, hashes=hashes)])), 2)
    assert not engine.step(Step([LoadState(2, 1200, fd, 0, n_bytes, hashes=hashes_of(good))])).refused
    assert engine.step(step(prefill_input(2, prompts[2], 1200))).tokens == (after_all[0],)


def test_a_load_replaces_what_its_sequence_holds(engine, prompts, new_file):
    at = len(prompts[0])
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    [n_bytes] = state_sizes(engine, 0)
    fd = new_file(bytes(n_bytes))
    assert not engine.step(Step([SaveState(0, fd, 0, n_bytes), LoadState(1, at, fd, 0, n_bytes)])).refused
    assert engine.used_cells() == {0: at, 1: at}
    assert engine.step(step(prefill_input(1, prompts[2], at))).tokens == tuple(expected)


def test_a_refused_save_changes_nothing_and_the_step_goes_on(engine, prompts, new_file):
    at = len(prompts[0])
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    engine.step(step(prefill_input(0, prompts[0])))
    [n_bytes] = state_sizes(engine, 0)
    for fd, room in ((new_file(bytes(8)), 8), (new_file(bytes(n_bytes // 2)), n_bytes)):
        output = engine.step(Step([SaveState(0, fd, 0, room)], [[prefill_input(2, prompts[1])]]))
        assert_refused(output, 0)
        assert output.saved_bytes == 0
        assert len(output.tokens) == 1
        assert engine.used_cells() == {0: at, 2: len(prompts[1])}
        engine.step(step(removing=(2,)))
    assert engine.step(step(prefill_input(0, prompts[2], at))).tokens == tuple(expected)


def test_a_state_outlives_a_reset(engine, prompts, new_file):
    at = len(prompts[0])
    expected = alone(engine, [*prompts[0], *prompts[1]], 1)
    engine.step(step(prefill_input(0, prompts[0])))
    [n_bytes] = state_sizes(engine, 0)
    fd = new_file(bytes(n_bytes))
    engine.step(Step([SaveState(0, fd, 0, n_bytes)]))
    engine.reset()
    assert not engine.step(Step([LoadState(3, at, fd, 0, n_bytes)])).refused
    assert engine.step(step(prefill_input(3, prompts[1], at))).tokens == tuple(expected)


# -- adapters ----------------------------------------------------------------------------------------

FIRST, HALF, SECOND, BOTH = ((0, 1.0),), ((0, 0.5),), ((1, 1.0),), ((0, 1.0), (1, -1.0))
SETS = [(), FIRST, HALF, SECOND, BOTH]


@pytest.fixture
def adapting(make):
    return make(n_ctx=1024, n_seq_max=4, n_batch=64, adapters=True)


def with_adapters(engine, scales, tokens, n, *, seq_id=0):
    """As ``alone``, with the adapters ``scales``."""
    output = engine.step(Step([Truncate(seq_id)], [[prefill_input(seq_id, tokens, adapters=scales)]]))
    answer = list(output.tokens)
    while len(answer) < n:
        at = len(tokens) + len(answer) - 1
        answer += engine.step(step(StepInput(seq_id, at, answer[-1:], [greedy(len(answer))], adapters=scales))).tokens
    engine.step(step(removing=(seq_id,)))
    return answer


def test_info_has_the_adapters(adapting, engine):
    assert len({each.name for each in adapting.info.adapters}) == 2
    assert len({each.fingerprint for each in adapting.info.adapters}) == 2
    assert engine.info.adapters == ()


def test_adapters_change_what_is_computed_and_nothing_after_it(adapting, prompts):
    """A step without adapters computes the model as it is, whatever the one before had."""
    answers = [with_adapters(adapting, scales, prompts[0], 8) for scales in SETS]
    assert len({tuple(answer) for answer in answers}) > 1
    assert with_adapters(adapting, FIRST, prompts[0], 8) == answers[1]
    assert alone(adapting, prompts[0], 8) == answers[0]
    assert with_adapters(adapting, BOTH, prompts[0], 8) == answers[4]


def test_an_engine_with_adapters_computes_the_model_as_one_without(adapting, make, prompts):
    without = make(n_ctx=1024, n_seq_max=4, n_batch=64, adapters=False)
    for prompt in prompts:
        assert alone(adapting, prompt, 8) == alone(without, prompt, 8)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_sequences_with_different_adapters_in_one_step_equal_steps_of_their_own(adapting, prompts, in_one_call):
    chosen = [FIRST, (), SECOND, HALF]
    expected = [with_adapters(adapting, *each, 6) for each in zip(chosen, prompts, strict=True)]

    def compute(inputs):
        return adapting.step(Step((), [inputs] if in_one_call else [[each] for each in inputs])).tokens

    inputs = [prefill_input(seq_id, prompt, adapters=chosen[seq_id]) for seq_id, prompt in enumerate(prompts)]
    answers = [[token] for token in compute(inputs)]
    for n in range(1, 6):
        positions = [len(prompt) + n - 1 for prompt in prompts]
        inputs = [
            StepInput(seq_id, positions[seq_id], answers[seq_id][-1:], [greedy(n)], adapters=chosen[seq_id])
            for seq_id in ([2, 0, 3, 1] if n % 2 else [0, 1, 2, 3])
        ]
        for each, token in zip(inputs, compute(inputs), strict=True):
            answers[each.seq_id].append(token)
    assert answers == expected


def test_prompts_next_to_decodes_with_other_adapters(adapting, prompts):
    """One call has a decode, the middle of a prompt, a draft that is wrong, and the end of another prompt."""
    long = [*prompts[1], *prompts[2], *prompts[0]]
    expected = [
        with_adapters(adapting, FIRST, prompts[0], 3),
        with_adapters(adapting, SECOND, long, 2),
        with_adapters(adapting, (), prompts[2], 3),
        with_adapters(adapting, BOTH, prompts[3], 1),
    ]
    first = adapting.step(
        step(prefill_input(0, prompts[0], adapters=FIRST), prefill_input(2, prompts[2], adapters=()))
    ).tokens
    assert [*first] == [expected[0][0], expected[2][0]]
    cut, wrong = len(prompts[1]), (expected[2][1] + 1) % 200
    found = adapting.step(
        step(
            StepInput(0, len(prompts[0]), [expected[0][0]], [greedy(1)], adapters=FIRST),
            StepInput(1, 0, long[:cut], (), adapters=SECOND),
            StepInput(2, len(prompts[2]), [expected[2][0], wrong], [greedy(1), greedy(2)]),
            prefill_input(3, prompts[3], adapters=BOTH),
        )
    ).tokens
    assert (found[0], found[1], found[3]) == (expected[0][1], expected[2][1], expected[3][0])
    adapting.step(Step([Truncate(2, len(prompts[2]) + 1)] if adapting.info.can_truncate else [Truncate(2)]))
    found = adapting.step(
        step(
            StepInput(0, len(prompts[0]) + 1, [expected[0][1]], [greedy(2)], adapters=FIRST),
            StepInput(1, cut, long[cut:], [greedy()], adapters=SECOND),
        )
    ).tokens
    assert [*found] == [expected[0][2], expected[1][0]]


def test_sequences_with_the_same_adapters_in_one_call(adapting, prompts):
    expected = [with_adapters(adapting, SECOND, prompt, 1)[0] for prompt in prompts]
    inputs = [prefill_input(seq_id, prompt, adapters=SECOND) for seq_id, prompt in enumerate(prompts)]
    assert list(adapting.step(step(*inputs)).tokens) == expected


def test_gaps_between_sequences_with_different_adapters(adapting, prompts):
    chosen = [FIRST, SECOND, (), BOTH]
    expected = [with_adapters(adapting, *each, 2) for each in zip(chosen, prompts, strict=True)]
    inputs = [prefill_input(seq_id, prompt, adapters=chosen[seq_id]) for seq_id, prompt in enumerate(prompts)]
    assert list(adapting.step(step(*inputs)).tokens) == [each[0] for each in expected]
    inputs = [
        StepInput(seq_id, len(prompts[seq_id]), expected[seq_id][:1], [greedy(1)], adapters=chosen[seq_id])
        for seq_id in (0, 1, 3)
    ]
    assert list(adapting.step(step(*inputs)).tokens) == [expected[seq_id][1] for seq_id in (0, 1, 3)]


def test_a_state_that_was_computed_with_adapters_goes_on(adapting, prompts, new_file):
    both = [*prompts[0], *prompts[1]]
    expected = with_adapters(adapting, FIRST, both, 4)
    at = len(prompts[0])
    adapting.step(step(prefill_input(0, prompts[0], adapters=FIRST)))
    [n_bytes] = state_sizes(adapting, 0)
    fd = new_file(bytes(n_bytes))
    assert not adapting.step(Step([SaveState(0, fd, 0, n_bytes), Truncate(0)])).refused
    assert not adapting.step(Step([LoadState(1, at, fd, 0, n_bytes)])).refused
    [token] = adapting.step(step(prefill_input(1, prompts[1], at, FIRST))).tokens
    assert token == expected[0]


@pytest.mark.parametrize("number", [-1, 2, 1000])
def test_an_adapter_that_the_engine_does_not_have_fails(adapting, prompts, number):
    expected = with_adapters(adapting, FIRST, prompts[0], 3)
    with pytest.raises(EngineError):
        adapting.step(step(prefill_input(0, prompts[0], adapters=((number, 1.0),))))
    adapting.reset()
    assert with_adapters(adapting, FIRST, prompts[0], 3) == expected


def test_adapters_after_a_reset(adapting, prompts):
    expected = [with_adapters(adapting, scales, prompts[0], 3) for scales in SETS]
    adapting.step(step(prefill_input(0, prompts[1], adapters=BOTH)))
    adapting.reset()
    assert [with_adapters(adapting, scales, prompts[0], 3) for scales in SETS] == expected


# -- texts to embed -----------------------------------------------------------------------------------


@pytest.fixture
def embedding(engine):
    if not engine.info.can_embed:
        pytest.skip("this model gives no embeddings")
    return engine


def whole(tokens, seq_id=0):
    return EmbeddingInput(seq_id, 0, tokens, len(tokens))


def embed(engine, *inputs):
    """The embeddings of the texts that end in ``inputs``."""
    output = engine.step(Step(embeddings=inputs))
    assert output.embedding_failure is None
    assert output.embedding_ms >= 0
    assert output.embedding_bytes > 0
    return output.embeddings


def close(one, other):
    """Whether two embeddings are one, up to rounding.  Those of different texts differ by 0.05 at least."""
    return np.allclose(one, other, atol=tolerance(1e-3, on_gpu=5e-3))


def long_text(engine, prompts, n):
    """``n`` tokens."""
    tokens = [token for prompt in prompts for token in prompt]
    return (tokens * n)[:n]


def test_info_about_embeddings(embedding):
    info = embedding.info
    assert info.n_embd_out > 0
    assert 0 < info.embedding_batch <= info.n_batch
    assert info.embedding_ctx > info.embedding_batch


def test_an_embedding_has_length_one_and_depends_on_its_text_alone(embedding, prompts):
    found = [embed(embedding, whole(prompt))[0] for prompt in prompts]
    for vector in found:
        assert vector.shape == (embedding.info.n_embd_out,)
        assert vector.dtype == np.float32
        assert vector @ vector == pytest.approx(1, abs=1e-5)
    assert abs(found[0] @ found[1]) < 0.9999
    assert close(embed(embedding, whole(prompts[0], seq_id=3))[0], found[0])


def test_texts_together_are_embedded_as_alone(embedding, prompts):
    alone = [embed(embedding, whole(prompt))[0] for prompt in prompts]
    together = embed(embedding, *[whole(prompt, seq_id) for seq_id, prompt in enumerate(prompts)])
    assert len(together) == len(prompts)
    for one, other in zip(alone, together, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_text_in_chunks_is_embedded_as_a_whole(embedding, prompts, chunk):
    text = long_text(embedding, prompts, 30)
    [expected] = embed(embedding, whole(text))
    for at in range(0, len(text), chunk):
        part = EmbeddingInput(2, at, text[at : at + chunk], len(text))
        others = [whole(prompts[0], 5)] if part.is_last else []
        found = embed(embedding, part, *others)
        assert len(found) == part.is_last + len(others)
    assert close(found[0], expected)


def test_the_longest_text(embedding, prompts):
    info = embedding.info
    text = long_text(embedding, prompts, info.embedding_ctx)
    for at in range(0, len(text), info.embedding_batch):
        found = embed(embedding, EmbeddingInput(0, at, text[at : at + info.embedding_batch], len(text)))
    assert len(found) == 1
    assert len(embed(embedding, whole(prompts[0]))) == 1, "a short text after it"


def test_a_text_that_does_not_go_on_is_forgotten(embedding, prompts):
    [expected] = embed(embedding, whole(prompts[0]))
    embed(embedding, EmbeddingInput(0, 0, prompts[1], 100))
    assert close(embed(embedding, whole(prompts[0]))[0], expected)
    output = embedding.step(Step(embeddings=[EmbeddingInput(0, len(prompts[1]), prompts[1], 100)]))
    assert not len(output.embeddings)
    assert output.embedding_failure
    assert close(embed(embedding, whole(prompts[0]))[0], expected)


def test_texts_to_embed_next_to_streams_change_neither(embedding, prompts):
    expected = alone(embedding, prompts[0], 6)
    [vector] = embed(embedding, whole(prompts[1]))
    answer = list(embedding.step(step(prefill_input(0, prompts[0]))).tokens)
    while len(answer) < 6:
        decode = StepInput(0, len(prompts[0]) + len(answer) - 1, answer[-1:], [greedy(len(answer))])
        output = embedding.step(Step([], [[decode]], embeddings=[whole(prompts[1])]))
        answer += output.tokens
        assert close(output.embeddings[0], vector)
    assert answer == expected
    assert embedding.used_cells() == {0: len(prompts[0]) + 5}, "texts take no cells of streams"


def test_embeddings_after_a_reset(embedding, prompts):
    [expected] = embed(embedding, whole(prompts[0]))
    embedding.reset()
    assert close(embed(embedding, whole(prompts[0]))[0], expected)


def test_embeddings_with_adapters(make, prompts):
    engine = make(n_ctx=1024, n_seq_max=4, n_batch=64, adapters=True)
    if not engine.info.can_embed:
        pytest.skip("this model gives no embeddings")

    def embedded(scales):
        output = engine.step(Step(embeddings=[whole(prompts[0])], embedding_adapters=scales))
        return output.embeddings[0]

    plain, first, again = embedded(()), embedded(FIRST), embedded(())
    assert close(plain, again)
    assert not close(plain, first)
    text = long_text(engine, prompts, 30)
    [expected] = engine.step(Step(embeddings=[whole(text, 1)], embedding_adapters=SECOND)).embeddings
    for at in range(0, len(text), 16):
        part = EmbeddingInput(2, at, text[at : at + 16], len(text))
        found = engine.step(Step(embeddings=[part], embedding_adapters=SECOND)).embeddings
    assert close(found[0], expected)
    assert alone(engine, prompts[0], 4) == with_adapters(engine, (), prompts[0], 4)
