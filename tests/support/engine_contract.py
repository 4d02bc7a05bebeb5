"""What every engine must do, as tests: imported by one file that runs them on the fake and one for the real one.

Each importing file has a fixture ``make``: (n_ctx, n_seq_max, n_batch) -> an engine with such a cache, of which
``facts`` may give more room than was asked for, and a fixture ``prompts`` of distinct lists of token ids.

Source: ``uma_trio.engine.messages``.
"""

from __future__ import annotations

import numpy as np
import pytest

from uma_trio.engine.messages import CopyPrefix, EngineError, Load, SampleRequest, Save, Step, StepInput, Truncate
from uma_trio.sampling import Bias, Past, SamplingParams

GREEDY = SamplingParams(0.0, 0, 1.0, 0)


def greedy(step=0, mask=None):
    return SampleRequest(GREEDY, step, mask)


def prefill_input(seq_id, tokens, pos=0):
    return StepInput(seq_id, pos, tokens, [greedy()])


def step(*inputs, removing=()):
    """One tick of one batch."""
    return Step([Truncate(seq_id) for seq_id in removing], [inputs] if inputs else ())


def alone(engine, tokens, n, *, chunk=10_000, seq_id=0):
    """The first ``n`` tokens that follow ``tokens``, computed with nobody else in the batch."""
    engine.step(step(removing=(seq_id,)))
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        last = at + len(part) == len(tokens)
        result = engine.step(step(StepInput(seq_id, at, part, [greedy()] if last else ())))
    said = list(result.tokens)
    while len(said) < n:
        feed = StepInput(seq_id, len(tokens) + len(said) - 1, said[-1:], [greedy(len(said))])
        said += engine.step(step(feed)).tokens
    engine.step(step(removing=(seq_id,)))
    return said


@pytest.fixture
def engine(make):
    return make(n_ctx=1024, n_seq_max=4, n_batch=64)


@pytest.fixture
def cuttable(engine):
    if not engine.info.can_truncate:
        pytest.skip("this model's memory cannot be cut")
    return engine


def test_facts(engine):
    info = engine.info
    assert info.n_vocab > 10
    assert info.n_ctx >= 1024
    assert (info.n_batch, info.n_seq_max) == (64, 4)
    assert 0 < info.max_request_tokens <= info.n_ctx_seq <= info.n_ctx
    assert info.eog_ids
    assert all(0 <= token < info.n_vocab for token in info.eog_ids)


def test_a_new_engine_holds_nothing(engine):
    assert engine.used_cells() == {}


def test_an_empty_step_does_nothing(engine):
    assert engine.step(step()).tokens == ()
    assert engine.used_cells() == {}


def test_a_prompt_gives_one_token_and_takes_its_cells(engine, prompts):
    result = engine.step(step(prefill_input(0, prompts[0])))
    assert len(result.tokens) == 1
    assert 0 <= result.tokens[0] < engine.info.n_vocab
    assert engine.used_cells() == {0: len(prompts[0])}


def test_a_step_tells_how_long_it_took(engine, prompts):
    result = engine.step(step(prefill_input(0, prompts[0])))
    assert result.decode_ms >= 0
    assert result.sample_ms >= 0
    assert result.ended_s >= result.started_s


def test_the_same_prompt_gives_the_same_tokens_in_any_sequence(engine, prompts):
    first = alone(engine, prompts[0], 8, seq_id=0)
    assert alone(engine, prompts[0], 8, seq_id=3) == first
    assert alone(engine, prompts[0], 8, seq_id=0) == first


def test_tokens_as_a_list_and_as_an_array(engine, prompts):
    as_array = np.asarray(prompts[0], dtype=np.int32)
    assert alone(engine, as_array, 3) == alone(engine, list(prompts[0]), 3)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_prompt_in_chunks_is_the_prompt_as_a_whole(engine, prompts, chunk):
    assert alone(engine, prompts[1], 8, chunk=chunk) == alone(engine, prompts[1], 8)


def test_inside_a_prompt_nothing_is_drawn(engine, prompts):
    assert engine.step(step(StepInput(0, 0, prompts[0][:3], ()))).tokens == ()
    assert engine.used_cells() == {0: 3}


def test_sequences_of_one_batch_do_not_see_each_other(engine, prompts):
    expected = [alone(engine, prompt, 4) for prompt in prompts[:4]]
    said = [list(part) for part in zip(engine.step(step(*map(prefill_input, range(4), prompts))).tokens, strict=True)]
    for n in range(1, 4):
        inputs = tuple(StepInput(seq, len(prompts[seq]) + n - 1, said[seq][-1:], [greedy(n)]) for seq in range(4))
        for seq, token in enumerate(engine.step(step(*inputs)).tokens):
            said[seq].append(token)
    assert said == expected


def test_a_batch_of_prompts_and_decodes(engine, prompts):
    """Tokens come in the order of the inputs that draw, whatever lies between them."""
    expected = [alone(engine, prompt, 2) for prompt in prompts[:3]]
    (first,) = engine.step(step(prefill_input(2, prompts[2]))).tokens
    inputs = (
        StepInput(1, 0, prompts[1][:2], ()),
        StepInput(2, len(prompts[2]), [first], [greedy(1)]),
        prefill_input(0, prompts[0]),
    )
    result = engine.step(step(*inputs))
    assert result.tokens == (expected[2][1], expected[0][0])
    result = engine.step(
        step(prefill_input(1, prompts[1][2:], pos=2), StepInput(0, len(prompts[0]), [expected[0][0]], [greedy(1)]))
    )
    assert result.tokens == (expected[1][0], expected[0][1])
    assert engine.used_cells() == {0: len(prompts[0]) + 1, 1: len(prompts[1]), 2: len(prompts[2]) + 1}


def test_the_order_of_sequences_in_a_batch_is_free(engine, prompts):
    expected = [alone(engine, prompt, 1)[0] for prompt in prompts[:4]]
    order = (2, 0, 3, 1)
    result = engine.step(step(*(prefill_input(seq, prompts[seq]) for seq in order)))
    assert list(result.tokens) == [expected[seq] for seq in order]


def test_removals_come_before_feeds_so_a_sequence_can_be_reused_at_once(engine, prompts):
    expected = alone(engine, prompts[1], 3)
    engine.step(step(prefill_input(0, prompts[0])))
    result = engine.step(step(prefill_input(0, prompts[1]), removing=(0,)))
    assert result.tokens == (expected[0],)
    assert engine.used_cells() == {0: len(prompts[1])}
    assert engine.step(step(StepInput(0, len(prompts[1]), expected[:1], [greedy(1)]))).tokens == (expected[1],)


def test_removing_leaves_the_others_alone(engine, prompts):
    expected = alone(engine, prompts[1], 3)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1]), prefill_input(2, prompts[2])))
    engine.step(step(removing=(0, 2)))
    assert engine.used_cells() == {1: len(prompts[1])}
    assert engine.step(step(StepInput(1, len(prompts[1]), expected[:1], [greedy(1)]))).tokens == (expected[1],)


def test_removing_what_is_not_there_is_nothing(engine, prompts):
    engine.step(step(removing=(0, 1, 2, 3)))
    engine.step(step(prefill_input(0, prompts[0])))
    engine.step(step(removing=(3,)))
    assert engine.used_cells() == {0: len(prompts[0])}


def test_removing_gives_the_room_back(engine, prompts):
    """Many times the cache, one sequence after another."""
    long = (prompts[0] * 64)[:64]
    for n in range(3 * engine.info.n_ctx // 64):
        engine.step(step(StepInput((n + 1) % 4, 0, long, ()), removing=(n % 4, (n + 1) % 4)))
    assert list(engine.used_cells().values()) == [64]


def test_the_end_of_a_sequence_can_be_removed_and_grown_again(cuttable, prompts):
    engine = cuttable
    both = [*prompts[0], *prompts[2]]
    expected = alone(engine, both, 3)
    engine.step(step(prefill_input(0, [*prompts[0], *prompts[1]])))
    again = Step([Truncate(0, len(prompts[0]))], [[prefill_input(0, prompts[2], pos=len(prompts[0]))]])
    assert engine.step(again).tokens == (expected[0],)
    assert engine.used_cells() == {0: len(both)}
    assert engine.step(step(StepInput(0, len(both), expected[:1], [greedy(1)]))).tokens == (expected[1],)


@pytest.mark.parametrize("behind", [0, 3])
def test_a_copy_of_a_beginning_goes_on_like_one_that_was_fed(cuttable, prompts, behind):
    """Also of a sequence that is still growing, and both go on."""
    engine = cuttable
    prompt, more = prompts[0], prompts[1]
    expected = [alone(engine, prompt, 3), alone(engine, [*prompt, *more], 3)]
    tail = prompts[2][:behind]
    engine.step(step(StepInput(0, 0, [*prompt, *tail], ()), prefill_input(2, prompts[3])))
    if not tail:
        engine.step(Step([Truncate(0, len(prompt) - 1)], [[prefill_input(0, prompt[-1:], pos=len(prompt) - 1)]]))
    result = engine.step(Step([CopyPrefix(0, 1, len(prompt))], [[prefill_input(1, more, pos=len(prompt))]]))
    assert result.tokens == (expected[1][0],)
    assert engine.used_cells() == {0: len(prompt) + behind, 1: len(prompt) + len(more), 2: len(prompts[3])}
    inputs = [StepInput(1, len(prompt) + len(more), expected[1][:1], [greedy(1)])]
    if not tail:
        inputs.append(StepInput(0, len(prompt), expected[0][:1], [greedy(1)]))
    assert engine.step(step(*inputs)).tokens == (expected[1][1], expected[0][1])[: len(inputs)]
    engine.step(step(removing=(0,)))
    feed = StepInput(1, len(prompt) + len(more) + 1, expected[1][1:2], [greedy(2)])
    assert engine.step(step(feed)).tokens == (expected[1][2],), "the copy lived on what it was copied from"


def test_copies_of_copies_in_one_step(engine, prompts):
    prompt = prompts[0]
    expected = alone(engine, [*prompt, 5], 2)
    engine.step(step(StepInput(0, 0, prompt, ())))
    edits = [CopyPrefix(0, 1, len(prompt)), CopyPrefix(0, 2, len(prompt)), Truncate(0)]
    result = engine.step(
        Step(edits, [[prefill_input(1, [5], pos=len(prompt)), prefill_input(2, [5], pos=len(prompt))]])
    )
    assert result.tokens == (expected[0], expected[0])
    assert engine.used_cells() == {1: len(prompt) + 1, 2: len(prompt) + 1}


def test_guesses_are_checked_in_one_batch(cuttable, prompts):
    """A draw after each token: what follows a right guess is what would have come; a wrong one is taken back."""
    engine = cuttable
    expected = alone(engine, prompts[0], 6)
    others = alone(engine, prompts[1], 2)
    wrong = next(token for token in range(5, 50) if token not in expected)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    guessed = StepInput(0, len(prompts[0]), [*expected[:3], wrong], [greedy(n) for n in range(1, 5)])
    result = engine.step(step(guessed, StepInput(1, len(prompts[1]), others[:1], [greedy(1)])))
    assert result.tokens[:3] == tuple(expected[1:4])
    assert result.tokens[4] == others[1]
    held = len(prompts[0]) + 3
    again = Step([Truncate(0, held)], [[StepInput(0, held, [expected[3]], [greedy(4)])]])
    assert engine.step(again).tokens == (expected[4],)


def test_batches_of_one_step_are_computed_one_after_another(engine, prompts):
    expected = [alone(engine, prompt, 2) for prompt in prompts[:3]]
    result = engine.step(
        Step((), [[prefill_input(0, prompts[0])], [prefill_input(1, prompts[1]), prefill_input(2, prompts[2])]])
    )
    assert result.tokens == tuple(said[0] for said in expected)
    inputs = [StepInput(seq, len(prompts[seq]), expected[seq][:1], [greedy(1)]) for seq in range(3)]
    assert engine.step(Step((), [inputs[:2], inputs[2:]])).tokens == tuple(said[1] for said in expected)


def test_a_masked_token_is_not_chosen(engine, prompts):
    for _ in range(3):
        (likeliest,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
        mask = np.asarray([likeliest, *engine.info.eog_ids], dtype=np.int32)
        (other,) = engine.step(step(StepInput(0, 0, prompts[0], [greedy(mask=mask)]), removing=(0,))).tokens
        assert other not in mask
        (again,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
        assert again == likeliest, "a mask holds for one draw"


def test_a_mask_holds_for_its_own_row(engine, prompts):
    first, second = (alone(engine, prompt, 1)[0] for prompt in prompts[:2])
    masked = StepInput(0, 0, prompts[0], [greedy(mask=np.asarray([first, second], dtype=np.int32))])
    result = engine.step(step(masked, prefill_input(1, prompts[1])))
    assert result.tokens[0] not in (first, second)
    assert result.tokens[1] == second


@pytest.mark.parametrize("off", [-1, 1, 10])
def test_a_feed_that_does_not_follow_what_is_held_is_refused(engine, prompts, off):
    engine.step(step(prefill_input(0, prompts[0])))
    with pytest.raises(EngineError):
        engine.step(step(StepInput(0, len(prompts[0]) + off, [5], [greedy()])))


@pytest.mark.parametrize("seq_id", [-1, 4, 1000])
def test_a_sequence_that_there_is_not_is_refused(engine, prompts, seq_id):
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(seq_id, prompts[0])))


def test_a_batch_of_more_than_n_batch_is_refused(engine, prompts):
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, (prompts[0] * 65)[:65])))
    engine.reset()
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, (prompts[0] * 60)[:60]), prefill_input(1, (prompts[1] * 5)[:5])))
    engine.reset()
    engine.step(step(prefill_input(0, (prompts[0] * 64)[:64])))


def test_a_feed_of_nothing_is_refused(engine):
    with pytest.raises(EngineError):
        engine.step(step(StepInput(0, 0, [], [greedy()])))


def test_a_full_cache_is_no_catastrophe(make, prompts):
    """Not fatal: with the sequence removed it goes on, and the others have lost nothing."""
    engine = make(n_ctx=256, n_seq_max=2, n_batch=64)
    expected = alone(engine, prompts[0], 2)
    engine.step(step(prefill_input(0, prompts[0])))
    filler = (prompts[1] * 64)[:64]
    with pytest.raises(EngineError) as failed:
        for at in range(0, 4 * engine.info.n_ctx, 64):
            engine.step(step(StepInput(1, at, filler, ())))
    assert not failed.value.fatal
    engine.step(step(removing=(1,)))
    assert engine.used_cells() == {0: len(prompts[0])}
    assert engine.step(step(StepInput(0, len(prompts[0]), expected[:1], [greedy(1)]))).tokens == (expected[1],)


def test_reset_empties_the_cache_and_it_works_again(engine, prompts):
    expected = alone(engine, prompts[0], 3)
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    engine.reset()
    assert engine.used_cells() == {}
    assert alone(engine, prompts[0], 3) == expected
    engine.reset()
    engine.reset()
    assert alone(engine, prompts[0], 3) == expected


def test_after_a_refusal_and_a_reset_it_works_again(engine, prompts):
    expected = alone(engine, prompts[0], 3)
    engine.step(step(prefill_input(0, prompts[0])))
    with pytest.raises(EngineError):
        engine.step(step(prefill_input(0, prompts[0])))
    engine.reset()
    assert alone(engine, prompts[0], 3) == expected


def test_aborted_every_step_that_computes_fails_and_is_not_fatal(engine, prompts):
    engine.abort()
    for _ in range(3):
        with pytest.raises(EngineError) as failed:
            engine.step(step(prefill_input(0, prompts[0])))
        assert not failed.value.fatal


def test_closed_twice(make, prompts):
    engine = make(n_ctx=256, n_seq_max=1, n_batch=64)
    engine.step(step(prefill_input(0, prompts[0])))
    engine.close()
    engine.close()


def test_a_state_is_saved_and_loaded_into_another_sequence(engine, prompts):
    engine.step(step(prefill_input(0, prompts[0])))
    expected = alone(engine, [*prompts[0], *prompts[1]], 8, seq_id=1)
    state = bytearray(engine.state_bytes(0))
    saved = engine.step(Step([Save(0, state), Truncate(0)]))
    assert saved.refused == [] or saved.refused == ()
    assert engine.used_cells() == {}
    loaded = engine.step(Step([Load(2, len(prompts[0]), bytes(state))]))
    assert not loaded.refused
    assert engine.used_cells() == {2: len(prompts[0])}
    said = list(engine.step(step(prefill_input(2, prompts[1], pos=len(prompts[0])))).tokens)
    while len(said) < 8:
        at = len(prompts[0]) + len(prompts[1]) + len(said) - 1
        said += engine.step(step(StepInput(2, at, said[-1:], [greedy(len(said))]))).tokens
    assert said == expected


def test_what_is_saved_while_others_decode_is_the_same(engine, prompts):
    engine.step(step(prefill_input(0, prompts[0])))
    quiet = bytearray(engine.state_bytes(0))
    engine.step(Step([Save(0, quiet)]))
    busy = bytearray(engine.state_bytes(0) + 1000)
    result = engine.step(Step([Save(0, busy)], [[prefill_input(1, prompts[1])]]))
    assert result.saved_bytes == len(quiet), "of a buffer that is too large not all counts"
    del busy[result.saved_bytes :]
    assert len(result.tokens) == 1
    assert not result.refused
    assert quiet == busy


def test_a_state_that_is_none_is_refused_and_leaves_the_sequence_empty(engine, prompts):
    engine.step(step(prefill_input(0, prompts[0])))
    state = bytearray(engine.state_bytes(0))
    engine.step(Step([Save(0, state)]))
    for wrong, length in (
        (bytes(len(state)), len(prompts[0])),
        (bytes(state[: len(state) // 2]), len(prompts[0])),
        (bytes(state), len(prompts[0]) + 1),
    ):
        result = engine.step(Step([Load(1, length, wrong)], [[prefill_input(2, prompts[1])]]))
        assert [seq_id for seq_id, _ in result.refused] == [1]
        assert len(result.tokens) == 1, "the others of the step are computed"
        assert 1 not in engine.used_cells()
        engine.step(step(removing=(2,)))
    small = bytearray(8)
    assert [seq_id for seq_id, _ in engine.step(Step([Save(0, small)])).refused] == [0]
    assert engine.used_cells() == {0: len(prompts[0])}


def test_a_bias_of_100_decides(engine, prompts):
    (likeliest,) = engine.step(step(prefill_input(0, prompts[0]), removing=(0,))).tokens
    wanted = next(token for token in range(5, 50) if token != likeliest)
    bias = Bias(np.array([wanted, likeliest], np.int32), np.array([100, 1], np.float32))
    biased = StepInput(0, 0, prompts[0], [SampleRequest(GREEDY, 0, bias=bias)])
    result = engine.step(step(biased, prefill_input(1, prompts[0]), removing=(0,)))
    assert result.tokens == (wanted, likeliest), "and for its own row alone"


def test_penalties_look_at_the_past_of_their_draw(engine, prompts):
    strong = SamplingParams(repetition_penalty=10.0, presence_penalty=2.0, frequency_penalty=2.0)
    plain = alone(engine, prompts[0], 2)
    tokens = np.array(prompts[0], np.int32)
    engine.step(step(removing=(0,)))
    nothing = SampleRequest(strong, 0, past=Past(tokens[len(tokens) :], 0))
    (first,) = engine.step(step(StepInput(0, 0, prompts[0], [nothing]))).tokens
    assert first == plain[0]
    samples = [SampleRequest(strong, n, past=Past(np.array([first] * n, np.int32), 0)) for n in (1, 2)]
    result = engine.step(step(StepInput(0, len(tokens), [first, first], samples)))
    assert len(result.tokens) == 2
    assert first not in result.tokens


def test_logprobs_are_told_to_who_asks(engine, prompts):
    inputs = [
        StepInput(seq, 0, prompts[seq], [SampleRequest(GREEDY, 0, logprobs=n)]) for seq, n in enumerate((None, 3, 0))
    ]
    result = engine.step(step(*inputs))
    nobody, three, none = result.scores
    assert nobody is None
    assert none.top_logprobs == ()
    assert three.top_logprobs[0] == (result.tokens[1], three.logprob), "the greedy choice is the likeliest"
    assert len(three.top_logprobs) == 3
    assert [logprob for _, logprob in three.top_logprobs] == sorted(
        (logprob for _, logprob in three.top_logprobs), reverse=True
    )
    assert all(score.logprob <= 0 for score in (three, none))
    assert engine.step(step(prefill_input(3, prompts[3]))).scores == ()


def test_logprobs_are_of_the_model_and_not_of_what_was_asked(engine, prompts):
    """Neither mask nor temperature nor filters change them."""

    def score(draw):
        result = engine.step(step(StepInput(0, 0, prompts[0], [draw]), removing=(0,)))
        return result.tokens[0], result.scores[0]

    token, plain = score(SampleRequest(GREEDY, 0, logprobs=5))
    mask = np.array([token], np.int32)
    other, masked = score(SampleRequest(SamplingParams(0.1, 2, 0.5), 0, mask, logprobs=5))
    assert other != token
    if plain.top_logprobs != masked.top_logprobs:  # a model that tells of the chosen token's neighbours
        assert masked.top_logprobs[0] == (other, masked.logprob)
    else:
        assert masked.logprob < plain.logprob
