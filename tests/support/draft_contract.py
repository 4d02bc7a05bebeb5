"""The draft model's part of the engine contract, as tests: for the fake engine and for llama.cpp.

The importing file has two fixtures:

- ``drafting()`` opens an engine with a draft model that proposes what the model itself says greedily.
- ``prompts`` is a list of distinct lists of token ids.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine_contract import GREEDY, alone, prefill_input, step
from uma_trio.engine.worker import StepRunner
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import DraftInput, SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import SamplingParams

SAMPLED = SamplingParams(1.0, seed=7)


@pytest.fixture
def engine(drafting):
    return drafting()


def drafts_after(engine, tokens, n, *, seq_id=0, position=0):
    """The draft after ``tokens``, of which the draft model holds the first ``position`` ones."""
    [draft] = engine.draft([DraftInput(seq_id, position, tokens[position:], n)], 0.0).drafts
    return draft


def test_info(engine):
    info = engine.info
    assert info.draft_model
    assert info.draft_ctx > 100
    assert info.draft_batch > 0
    assert info.draft_call_ms > 0
    assert info.draft_token_ms >= 0


def test_a_draft_is_what_the_draft_model_says(engine, prompts):
    expected = alone(engine, prompts[0], 5)
    for n in (1, 5, 3):
        draft = drafts_after(engine, prompts[0], n)
        assert list(draft.tokens) == expected[:n]
        assert (draft.seq_id, draft.n_held) == (0, len(prompts[0]) + n - 1)


def test_it_goes_on_from_what_it_holds(engine, prompts):
    expected = alone(engine, prompts[0], 6)
    draft = drafts_after(engine, prompts[0], 3)
    known = [*prompts[0], *expected[:3]]
    assert list(drafts_after(engine, known, 3, position=draft.n_held).tokens) == expected[3:]


def test_tokens_behind_the_position_are_removed(engine, prompts):
    expected = alone(engine, prompts[0], 6)
    drafts_after(engine, [*prompts[0], *prompts[1]], 4)
    known = [*prompts[0], *expected[:1]]
    draft = drafts_after(engine, known, 2, position=len(prompts[0]) - 1)
    assert list(draft.tokens) == expected[1:3]
    assert draft.n_held == len(known) + 1


def test_a_sequence_that_it_does_not_hold_is_lost(engine, prompts):
    draft = drafts_after(engine, [*prompts[0], *prompts[1]], 3, position=len(prompts[0]))
    assert (draft.n_held, list(draft.tokens)) == (0, [])
    assert drafts_after(engine, prompts[0], 1).n_held == len(prompts[0])


def test_computing_without_drafts(engine, prompts):
    expected = alone(engine, prompts[0], 2)
    drafted = engine.draft([DraftInput(2, 0, prompts[0][:-1])], 0.0)
    assert [(d.n_held, list(d.tokens)) for d in drafted.drafts] == [(len(prompts[0]) - 1, [])]
    assert (drafted.calls, drafted.n_tokens) == (1, len(prompts[0]) - 1)
    assert list(drafts_after(engine, prompts[0], 2, seq_id=2, position=len(prompts[0]) - 1).tokens) == expected


def test_it_computes_only_what_it_lacks(engine, prompts):
    """The position may lag behind what it holds."""
    expected = alone(engine, prompts[0], 4)
    drafts_after(engine, prompts[0], 3)
    drafted = engine.draft([DraftInput(0, 1, [*prompts[0][1:], *expected[:2]], 2)], 0.0)
    assert [list(each.tokens) for each in drafted.drafts] == [expected[2:]]
    assert drafted.n_tokens == 1


def test_what_does_not_fit_a_batch_is_left_for_later(engine, prompts):
    long = (prompts[0] * engine.info.draft_batch)[: engine.info.draft_batch - 1]
    drafted = engine.draft([DraftInput(0, 0, long), DraftInput(1, 0, prompts[1], 2)], 0.0)
    assert [(each.n_held, list(each.tokens)) for each in drafted.drafts] == [(len(long), []), (0, [])]
    assert list(drafts_after(engine, prompts[1], 2, seq_id=1).tokens) == alone(engine, prompts[1], 2)


def test_several_sequences(engine, prompts):
    expected = [alone(engine, prompt, 4) for prompt in prompts[:3]]
    inputs = [DraftInput(0, 0, prompts[0], 4), DraftInput(1, 0, prompts[1][:2], 0), DraftInput(2, 0, prompts[2], 2)]
    drafted = engine.draft(inputs, 0.0)
    assert [list(each.tokens) for each in drafted.drafts] == [expected[0], [], expected[2][:2]]
    assert [each.n_held for each in drafted.drafts] == [len(prompts[0]) + 3, 2, len(prompts[2]) + 1]
    assert drafted.calls == 4
    assert drafted.failure is None
    assert drafted.ms > 0


def test_after_a_reset_it_holds_nothing(engine, prompts):
    expected = alone(engine, prompts[0], 2)
    drafts_after(engine, prompts[0], 2)
    engine.reset()
    assert drafts_after(engine, [*prompts[0], *expected], 2, position=len(prompts[0])).n_held == 0
    assert list(drafts_after(engine, prompts[0], 2).tokens) == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_step_with_drafts_gives_the_tokens_of_steps_without(engine, prompts, params):
    """Each step verifies some drafts; what it accepts is what one step after another samples."""
    prompt, n_tokens = prompts[0], 24

    def sample(n_before):
        return SampleRequest(params, n_before)

    def first():
        return engine.step(Step([Truncate(0)], [[StepInput(0, 0, prompt, [sample(0)])]])).tokens[0]

    plain = [first()]
    while len(plain) < n_tokens:
        decode = StepInput(0, len(prompt) + len(plain) - 1, plain[-1:], [sample(len(plain))])
        plain += engine.step(step(decode)).tokens
    runner, tokens, held, n_steps, ops = StepRunner(engine), [first()], 0, 0, []
    while len(tokens) < n_tokens:
        known = [*prompt, *tokens]
        decode = StepInput(0, len(known) - 1, tokens[-1:], [sample(len(tokens))])
        drafts = [DraftInput(0, held, known[held:], 3)]
        output = runner.run(Step(ops, [[decode]], n_steps + 1, drafts=drafts))
        [draft] = output.drafted.drafts
        assert len(output.tokens) == 1 + len(draft.tokens) <= 4
        wrong = (n for n, token in enumerate(draft.tokens) if output.tokens[n] != token)
        accepted = next(wrong, len(draft.tokens))
        tokens += output.tokens[: accepted + 1]
        held = min(draft.n_held, len(known) + accepted)
        ops = [Truncate(0, len(known) + accepted)]
        n_steps += 1
    assert tokens[:n_tokens] == plain
    assert n_steps < n_tokens - 1


def test_other_sequences_of_the_step_are_as_without(engine, prompts):
    expected = [alone(engine, prompt, 4) for prompt in prompts[:2]]
    engine.step(step(prefill_input(0, prompts[0]), prefill_input(1, prompts[1])))
    inputs = [
        StepInput(seq, len(prompts[seq]), expected[seq][:1], [SampleRequest(GREEDY, 1)], stop_ids=()) for seq in (0, 1)
    ]
    drafts = [DraftInput(0, 0, [*prompts[0], expected[0][0]], 2)]
    output = StepRunner(engine).run(Step((), [inputs], 1, drafts=drafts))
    assert list(output.tokens) == [*expected[0][1:4], expected[1][1]]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_steps_with_drafts_that_run_ahead(engine, prompts, params):
    """Two sequences go on from step to step; the engine finds itself which drafts it has accepted."""
    n_tokens = 24
    banned = np.array(engine.info.eog_ids, np.int32)

    def run(n_drafts):
        runner, tokens, number = StepRunner(engine), [[], []], 1
        starts = [StepInput(at, 0, prompts[at], [SampleRequest(params, 0, banned)]) for at in (0, 1)]
        output = runner.run(Step([Truncate(0), Truncate(1)], [starts], number))
        for each, token in zip(tokens, output.tokens, strict=True):
            each.append(token)
        while min(map(len, tokens)) < n_tokens:
            drafts = [DraftInput(at, 0, [*prompts[at], *tokens[at][:-1]], n_drafts) for at in (0, 1) if n_drafts]
            # what the daemon knows is one step behind: here it does not know the last token
            output = runner.run(Step((), [[0, 1]], number + 1, number, drafts=drafts))
            number += 1
            at = 0
            proposed = {each.seq_id: each.tokens for each in output.drafted.drafts} if n_drafts else {}
            for seq_id, known in enumerate(tokens):
                draft = proposed.get(seq_id, ())
                sampled = output.tokens[at : at + 1 + len(draft)]
                at += len(sampled)
                wrong = (n for n, token in enumerate(draft) if sampled[n] != token)
                known += sampled[: next(wrong, len(draft)) + 1]
        return [each[:n_tokens] for each in tokens], number

    plain, n_plain = run(0)
    quick, n_quick = run(4)
    assert quick == plain
    assert n_quick < n_plain
