"""What every link to an engine must do, as tests: imported by files that run them on a thread and on a process.

Each importing file has an async fixture ``link`` (a loaded ``EngineLink`` of 4 sequences) and a fixture ``prompts`` of
distinct lists of token ids.
"""

from __future__ import annotations

import os
import tempfile

import attrs
import numpy as np
import pytest
import trio

from tests.support.masks import SharedMasks
from uma_trio.daemon.engines.link import EngineLink
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.kv_ops import LoadState, MeasureState, SaveState, Truncate
from uma_trio.engine_link.messages import (
    DROPPED,
    MASK_LATE,
    EngineDied,
    EngineError,
    Revoked,
    SampleRequest,
    Step,
    StepFailed,
    StepInput,
    StepOutput,
)
from uma_trio.engine_link.sampling import NO_TOKEN, Past, SamplingParams

GREEDY = SamplingParams()


DRAWN = SamplingParams(temperature=1.0, seed=7)


def prefill(
    seq_id: int, tokens: list[int], stop_ids: list[int] | None = None, params: SamplingParams = GREEDY
) -> StepInput:
    return StepInput(seq_id, 0, tokens, [SampleRequest(params)], stop_ids or [])


async def answers(link: EngineLink, n: int) -> list[object]:
    """The next ``n`` answers."""
    found: list[object] = []
    with trio.fail_after(60):
        while len(found) < n:
            found += await link.receive()
    assert len(found) == n
    return found


async def alone(link: EngineLink, tokens: list[int], n: int, params: SamplingParams = GREEDY) -> list[int]:
    """The first ``n`` tokens after ``tokens``, one step at a time."""
    output = await link.compute(Step([Truncate(0)], [[prefill(0, tokens, params=params)]]))
    said = list(output.tokens)
    while len(said) < n:
        position = len(tokens) + len(said) - 1
        step = Step((), [[StepInput(0, position, said[-1:], [SampleRequest(params, len(said))])]])
        said += (await link.compute(step)).tokens
    await link.compute(Step([Truncate(0)]))
    return said


async def test_the_model_is_described(link):
    assert link.info.n_vocab > 10
    assert link.info.n_seq_max == 4
    assert str(link.ready.devices)
    assert link.ready.environment
    assert link.ready.state_format


async def test_a_step_that_runs_ahead_gets_the_sampled_tokens(link, prompts):
    params = [GREEDY, DRAWN, GREEDY]
    expected = [await alone(link, prompts[seq], 8, params[seq]) for seq in range(3)]
    link.submit(Step((), [[prefill(seq, prompts[seq], params=params[seq]) for seq in range(3)]], 1))
    outputs: list[object] = []
    for n in range(1, 9):
        link.submit(Step((), [[0, 1, 2]], n + 1, n))
        while len(outputs) < n:
            outputs += await link.receive()
    outputs = [output for output in outputs if isinstance(output, StepOutput)][:8]
    assert [output.number for output in outputs] == list(range(1, 9))
    assert [[output.tokens[seq] for output in outputs] for seq in range(3)] == expected


async def test_a_prompt_goes_on_in_steps_that_run_ahead(link, prompts):
    long = (prompts[0] * 8)[:24]
    expected = await alone(link, long, 3)
    other = await alone(link, prompts[1], 4)
    link.submit(Step((), [[StepInput(0, 0, long[:8]), prefill(1, prompts[1])]], 1))
    link.submit(Step((), [[1, StepInput(0, 8, long[8:16])]], 2, 1))
    link.submit(Step((), [[1, StepInput(0, 16, long[16:], [SampleRequest(GREEDY)])]], 3, 2))
    link.submit(Step((), [[0, 1]], 4, 3))
    link.submit(Step((), [[0]], 5, 4))
    found = await answers(link, 5)
    assert [each.tokens for each in found] == [
        (other[0],),
        (other[1],),
        (other[2], expected[0]),
        (expected[1], other[3]),
        (expected[2],),
    ]


async def test_a_step_that_runs_ahead_of_another_than_the_last_is_revoked(link, prompts):
    [expected] = await alone(link, prompts[0], 1)
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    link.submit(Step((), [[prefill(1, prompts[1])]], 2))
    link.submit(Step((), [[0]], 3, 1))
    first, _, third = await answers(link, 3)
    assert first.tokens == (expected,)
    assert third == Revoked(3)


async def test_a_sequence_that_has_ended_is_dropped_and_the_others_go_on(link, prompts):
    expected = [await alone(link, prompt, 6) for prompt in prompts[:2]]
    stop = [expected[0][0]]
    link.submit(Step((), [[prefill(0, prompts[0], stop), prefill(1, prompts[1])]], 1))
    for n in (2, 3):
        link.submit(Step((), [[0, 1]], n, n - 1))
    for n in (4, 5, 6):
        link.submit(Step((), [[1]], n, n - 1))
    found = await answers(link, 6)
    assert found[0].tokens == (expected[0][0], expected[1][0])
    assert [each.tokens for each in found[1:3]] == [(DROPPED, token) for token in expected[1][1:3]]
    assert [each.tokens for each in found[3:]] == [(token,) for token in expected[1][3:]]


def several(calls: list[list[int | StepInput]], n_passes: int, number: int, follows: int = 0) -> Step:
    """A step of ``n_passes``."""
    step = Step((), calls, number, follows)
    step.n_passes = n_passes
    return step


async def test_a_step_of_several_passes_gives_the_tokens_of_as_many_steps(link, prompts):
    params = [GREEDY, DRAWN, GREEDY]
    expected = [await alone(link, prompts[seq], 10, params[seq]) for seq in range(3)]
    link.submit(Step((), [[prefill(seq, prompts[seq], params=params[seq]) for seq in range(3)]], 1))
    link.submit(several([[0, 1, 2]], 4, 2, 1))
    link.submit(several([[0, 1], [2]], 4, 3, 2))
    first, second, third = await answers(link, 3)
    given = [
        [*first.tokens[n : n + 1], *second.tokens[4 * n : 4 * n + 4], *third.tokens[4 * n : 4 * n + 4]]
        for n in range(3)
    ]
    assert given == [tokens[:9] for tokens in expected]
    known = [
        StepInput(n, len(prompts[n]) + 8, [tokens[8]], [SampleRequest(params[n], 9)])
        for n, tokens in enumerate(expected)
    ]
    last = await link.compute(several([known], 1, 4))
    assert [*last.tokens] == [tokens[9] for tokens in expected], "the KV cache has what one step after another leaves"


async def test_a_sequence_that_ends_in_a_step_of_several_passes_is_dropped(link, prompts):
    expected = [await alone(link, prompt, 9) for prompt in prompts[:2]]
    n = next(n for n in range(1, 4) if expected[0].index(expected[0][n]) == n)
    link.submit(Step((), [[prefill(0, prompts[0], [expected[0][n]]), prefill(1, prompts[1])]], 1))
    link.submit(several([[0, 1]], 4, 2, 1))
    link.submit(several([[0, 1]], 4, 3, 2))
    first, second, third = await answers(link, 3)
    assert first.tokens == (expected[0][0], expected[1][0])
    ended = [*expected[0][1 : n + 1], *[DROPPED] * (4 - n)]
    assert second.tokens == (*ended, *expected[1][1:5])
    assert third.tokens == (*[DROPPED] * 4, *expected[1][5:9])


async def test_passes_end_when_nobody_wants_them_any_more(link, prompts):
    said = await alone(link, prompts[0], 60)
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    link.submit(several([[0]], 50, 2, 1))
    link.end_passes(2)
    link.submit(Step((), [[0]], 3, 2))
    _, output, after = await answers(link, 3)
    n = output.n_passes
    assert output.tokens == (*said[1 : 1 + n], *[DROPPED] * (50 - n))
    assert after.tokens == (said[1 + n],)


async def test_a_step_of_which_all_inputs_are_dropped_computes_nothing(link, prompts):
    expected = await alone(link, prompts[0], 1)
    link.submit(Step((), [[prefill(0, prompts[0], expected)]], 1))
    link.submit(Step((), [[0]], 2, 1))
    _, second = await answers(link, 2)
    assert second.tokens == (DROPPED,)


async def test_penalties_of_a_step_that_runs_ahead_see_the_sampled_token(link, prompts):
    params = SamplingParams(repetition_penalty=10.0, repeat_last_n=4)
    prompt = prompts[0]
    history = np.array(prompt, np.int32)

    def sample(n_before: int, past: list[int]) -> SampleRequest:
        tokens = np.array([*history[-4:], *past], np.int32)
        return SampleRequest(params, n_before, past=Past(tokens, min(4, len(history))))

    first = await link.compute(Step((), [[StepInput(0, 0, prompt, [sample(0, [])])]]))
    plain = Step((), [[StepInput(0, len(prompt), list(first.tokens), [sample(1, list(first.tokens))])]])
    second = await link.compute(plain)
    link.submit(Step([Truncate(0)], [[StepInput(0, 0, prompt, [sample(0, [])])]], 1))
    link.submit(Step((), [[0]], 2, 1))
    assert [output.tokens for output in await answers(link, 2)] == [first.tokens, second.tokens]


async def test_a_step_can_be_revoked_until_it_begins(link, prompts):
    many = [StepInput(seq, 0, (prompts[seq] * 64)[:64], ()) for seq in range(4)]
    expected = await alone(link, prompts[0], 1)
    link.submit(Step((), [[each] for each in many], 1))
    link.submit(Step((), [[StepInput(0, 64, [5], ())]], 2))
    link.revoke(2)
    link.submit(Step([Truncate(seq) for seq in range(4)], [[prefill(0, prompts[0])]], 3))
    found = await answers(link, 3)
    assert [type(answer) for answer in found] == [StepOutput, Revoked, StepOutput], found
    assert found[1].number == 2
    assert found[2].tokens == tuple(expected)


async def test_a_revocation_that_comes_too_late_is_ignored(link, prompts):
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    [output] = await answers(link, 1)
    link.revoke(1)
    link.submit(Step([Truncate(0)], [[prefill(0, prompts[0])]], 2))
    assert [answer.tokens for answer in await answers(link, 1)] == [output.tokens]


async def test_a_step_that_fails_revokes_what_is_behind_it_and_empties_the_cache(link, prompts):
    expected = await alone(link, prompts[0], 2)
    await link.compute(Step((), [[prefill(0, prompts[0])]]))
    link.submit(Step((), [[StepInput(0, 500, [5], [SampleRequest(GREEDY)])]], 7))
    link.submit(Step((), [[0]], 8, 7))
    found = await answers(link, 2)
    assert isinstance(found[0], StepFailed)
    assert found[0].number == 7
    assert found[0].reason
    assert found[1] == Revoked(8)
    assert await alone(link, prompts[0], 2) == expected


async def test_a_failure_is_an_error_of_compute(link):
    with pytest.raises(EngineError):
        await link.compute(Step((), [[StepInput(99, 0, [5], ())]]))


async def test_a_state_goes_to_a_file_and_comes_back(link, prompts):
    expected = await alone(link, [*prompts[0], *prompts[1]], 3)
    await link.compute(Step((), [[StepInput(0, 0, prompts[0], ())]]))
    measured = await link.compute(Step([MeasureState(0)]))
    [(seq_id, [n_bytes])] = measured.state_sizes
    assert seq_id == 0
    offset = 16_384 + 100
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), offset + n_bytes)
        saved = await link.compute(Step([SaveState(0, file.fileno(), offset, n_bytes), Truncate(0)]))
        assert not saved.refused
        assert saved.saved_bytes <= n_bytes
        load = LoadState(2, len(prompts[0]), file.fileno(), offset, n_bytes)
        assert not (await link.compute(Step([load]))).refused
        wrong = LoadState(3, len(prompts[0]) + 1, file.fileno(), offset, n_bytes)
        refused = (await link.compute(Step([wrong]))).refused
        assert [seq_id for seq_id, _ in refused] == [3]
    more = StepInput(2, len(prompts[0]), prompts[1], [SampleRequest(GREEDY)])
    assert (await link.compute(Step((), [[more]]))).tokens == (expected[0],)


@pytest.fixture
def masks(link):
    """Three rows of biases that allow nothing, of all tokens but the last 5."""
    masks = SharedMasks(n_rows=3, n_vocab=link.info.n_vocab - 5)
    yield masks
    masks.close()


ROWS = {0: 0, 1: 1, 2: 2}
"""Each mask is in the row of its key."""


def masked(seq_id: int, tokens: list[int], row: int) -> StepInput:
    return StepInput(seq_id, 0, tokens, [SampleRequest(GREEDY, controller_mask=row)])


async def test_controller_masks_decide_what_is_sampled(link, prompts, masks):
    [likeliest] = await alone(link, prompts[0], 1)
    wanted = [token for token in range(5, 50) if token != likeliest][:2]
    link.attach_masks(masks.file)
    inputs = [masked(0, prompts[0], 2), prefill(1, prompts[0]), masked(2, prompts[0], 0)]
    link.submit(Step((), [inputs], 1, mask_timeout_ms=10_000))
    await trio.sleep(0.05)  # the engine waits, or still computes
    masks.allow_only(2, wanted[0])
    masks.allow_only(0, wanted[1])
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (wanted[0], likeliest, wanted[1]), "each by its own row, and one without a row freely"


async def test_controller_masks_are_written_anew_for_each_step(link, prompts, masks):
    link.attach_masks(masks.file)
    tokens, position = prompts[0], 0
    for number, wanted in enumerate((7, 8, 9), 1):
        link.submit(
            Step(
                (),
                [[StepInput(0, position, tokens, [SampleRequest(GREEDY, controller_mask=1)])]],
                number,
                mask_timeout_ms=10_000,
            )
        )
        masks.allow_only(1, wanted)
        link.attach_masks(masks.file)
        link.masks_ready(number, ROWS)
        [output] = await answers(link, 1)
        assert output.tokens == (wanted,)
        position += len(tokens)
        tokens = [wanted]


async def test_a_bias_is_added_and_does_not_replace_the_logits(link, prompts, masks):
    [likeliest] = await alone(link, prompts[0], 1)
    link.attach_masks(masks.file)
    masks.rows[0] = -100.0  # all alike
    link.submit(Step((), [[masked(0, prompts[0], 0)]], 1, mask_timeout_ms=10_000))
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (likeliest,)


async def test_tokens_that_the_writer_of_masks_does_not_know_are_forbidden(link, prompts, masks):
    [likeliest] = await alone(link, prompts[0], 1)
    few = SharedMasks(n_rows=1, n_vocab=likeliest)
    link.attach_masks(few.file)
    few.rows[:] = 0.0
    link.submit(Step((), [[masked(0, prompts[0], 0)]], 1, mask_timeout_ms=10_000))
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert 0 <= output.tokens[0] < likeliest
    few.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_row_that_is_no_mask_costs_its_own_sample_alone(link, prompts, masks, value):
    [likeliest] = await alone(link, prompts[0], 1)
    link.attach_masks(masks.file)
    masks.rows[0] = value
    link.submit(Step((), [[masked(0, prompts[0], 0), prefill(1, prompts[0])]], 1, mask_timeout_ms=10_000))
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (NO_TOKEN, likeliest)


async def test_masks_that_do_not_come_in_time_cost_their_own_rows_alone(link, prompts, masks):
    [likeliest] = await alone(link, prompts[0], 1)
    link.attach_masks(masks.file)
    link.submit(Step((), [[masked(0, prompts[0], 0), prefill(1, prompts[0])]], 1, mask_timeout_ms=20))
    link.submit(Step((), [[0, 1]], 2, 1))
    first, second = await answers(link, 2)
    assert first.tokens == (MASK_LATE, likeliest)
    assert second.tokens[0] == DROPPED
    assert second.tokens[1] >= 0


async def test_masks_are_found_by_their_keys(link, prompts, masks):
    """Also in a step that ran ahead, and after an end token: the controller that writes the masks ends the sequence."""
    link.attach_masks(masks.file)
    end = link.info.eog_ids[0]
    link.submit(Step((), [[masked(0, prompts[0], 70), masked(1, prompts[1], 80)]], 1, mask_timeout_ms=10_000))
    link.submit(Step((), [[0, 1]], 2, 1, mask_timeout_ms=10_000))
    masks.allow_only(0, 7)
    masks.allow_only(2, end)
    link.masks_ready(1, {70: 0, 80: 2})
    [output] = await answers(link, 1)
    assert output.tokens == (7, end)
    masks.allow_only(0, 8)
    link.masks_ready(2, {80: 0, 90: 1})
    [output] = await answers(link, 1)
    assert output.tokens == (MASK_LATE, 8)


async def test_a_row_that_is_missing_costs_its_own_sample_alone(link, prompts, masks):
    link.attach_masks(masks.file)
    link.submit(Step((), [[masked(0, prompts[0], 0), masked(1, prompts[0], 1)]], 1, mask_timeout_ms=10_000))
    masks.allow_only(1, 7)
    link.masks_ready(1, {1: 1})
    [output] = await answers(link, 1)
    assert output.tokens == (MASK_LATE, 7)


async def test_masks_that_are_not_attached_or_too_short_never_come(link, prompts, masks):
    step = Step((), [[masked(0, prompts[0], 0)]], 1, mask_timeout_ms=10_000)
    link.submit(step)
    link.masks_ready(1, ROWS)
    short = attrs.evolve(masks.file, n_rows=1_000_000)
    [output] = await answers(link, 1)
    assert output.tokens == (MASK_LATE,)
    link.attach_masks(short)
    link.submit(Step([Truncate(0)], step.calls, 2, mask_timeout_ms=10_000))
    link.masks_ready(2, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (MASK_LATE,)


async def test_other_masks_take_the_place_of_the_first(link, prompts, masks):
    link.attach_masks(masks.file)
    others = SharedMasks(n_rows=1, n_vocab=masks.file.n_vocab)
    link.attach_masks(others.file)
    others.allow_only(0, 7)
    link.submit(Step((), [[masked(0, prompts[0], 0)]], 1, mask_timeout_ms=10_000))
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (7,)
    others.close()


async def test_controller_masks_and_grammars_in_one_step(link, prompts, masks, grammar):
    key, source, expected = grammar
    link.define_grammar(key, source)
    link.attach_masks(masks.file)
    state = GrammarState(key, np.empty(0, np.int32))
    follows = StepInput(0, 0, prompts[0], [SampleRequest(GREEDY)], (), state)
    both = StepInput(1, 0, prompts[0], [SampleRequest(GREEDY, controller_mask=1)], (), state)
    link.submit(Step((), [[follows, masked(2, prompts[0], 0), both]], 1, mask_timeout_ms=20_000))
    masks.allow_only(0, 7)
    masks.allow_only(1, expected[0])
    link.masks_ready(1, ROWS)
    [output] = await answers(link, 1)
    assert output.tokens == (expected[0], 7, expected[0])


async def test_a_message_larger_than_the_socket_takes_at_once(link, prompts):
    past = Past(np.zeros(500_000, np.int32), 0)
    params = SamplingParams(presence_penalty=0.1)
    prompt = prompts[0][:8]
    plain = await alone(link, prompt, 1)
    inputs = [StepInput(seq, 0, prompt, [SampleRequest(params, past=past if seq else None)]) for seq in range(4)]
    if link.info.name == "fake":  # it checks the past
        for each in inputs:
            each.samples[0].past = None
            each.stop_ids = list(range(200_000))
    output = await link.compute(Step((), [inputs]))
    assert output.tokens[0] == plain[0]


async def test_a_killed_engine_is_noticed(link, prompts):
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    link.kill()
    with trio.fail_after(60), pytest.raises(EngineDied) as caught:
        while True:
            await link.receive()
    assert str(caught.value)
    assert not link.is_usable
    link.submit(Step((), [[prefill(0, prompts[0])]], 2))  # no error: who receives learns of the death


async def test_it_ends_when_it_is_closed(link):
    with trio.fail_after(60):
        await link.aclose()
    assert link.ended.is_set()


async def test_a_grammar_is_followed_by_steps_that_run_ahead(link, prompts, grammar):
    """``grammar`` is its key, its source and the tokens that it leaves, without an end token."""
    key, source, expected = grammar
    link.define_grammar(key, source)
    link.define_grammar(key, source)
    state = GrammarState(key, np.empty(0, np.int32))
    first = StepInput(0, 0, prompts[0], [SampleRequest(GREEDY)], (), state)
    link.submit(Step((), [[first, prefill(1, prompts[1])]], 1, mask_timeout_ms=20_000))
    for number in range(2, len(expected) + 1):
        link.submit(Step((), [[0, 1]], number, number - 1, mask_timeout_ms=20_000))
    found = await answers(link, len(expected))
    assert [each.tokens[0] for each in found] == expected
    plain = await alone(link, prompts[1], len(expected))
    assert [each.tokens[1] for each in found] == plain
