"""``LlamaEngine`` with the embedded model meets the engine contract."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.engine_contract import GREEDY, greedy, prefill_input, step
from tests.support.random_adapters import two_adapters
from tests.support.random_models import random_model
from uma_trio import config
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.messages import DefineGrammar, EngineError, SampleRequest, Step, StepInput
from uma_trio.models.packaged import EMBEDDED


@pytest.fixture
def make(library):
    from uma_trio.engine.llama import LlamaEngine

    made = []

    def make(*, n_ctx, n_seq_max, n_batch, adapters=False):
        settings = config.Model(ctx=n_ctx, parallel=n_seq_max, batch_tokens=n_batch, threads=1, embedding_ctx=256)
        found = two_adapters(EMBEDDED) if adapters else ()
        made.append(LlamaEngine(EMBEDDED, settings, adapters=found))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def prompts(library):
    from uma_trio.tokenizer.tokenizer import open_vocabulary

    texts = ("The capital of France", "Once upon a time a fox", "Monday, Tuesday, Wednesday,", "1 2 3 4 5 6")
    with open_vocabulary(EMBEDDED) as vocabulary:
        found = [vocabulary.tokenizer.encode(text).tolist()[:15] for text in texts]
    assert all(len(tokens) > 2 for tokens in found)
    return found


def test_a_device_waits_once_for_a_prompt_and_the_decodes_next_to_it(make, prompts, monkeypatch):
    engine = make(n_ctx=1024, n_seq_max=4, n_batch=64)
    engine.is_async = True
    [token] = engine.step(step(prefill_input(0, prompts[0]))).tokens
    waits = []
    monkeypatch.setattr(engine._context, "synchronize", lambda: waits.append(1))
    decode = StepInput(0, len(prompts[0]), [token], [greedy(1)])
    output = engine.step(Step((), [[decode], [StepInput(1, 0, prompts[1][:-1], ())]]))
    assert len(output.tokens) == len(waits) == 1
    engine.step(
        Step((), [[StepInput(1, len(prompts[1]) - 1, prompts[1][-1:], [greedy()])], [prefill_input(2, prompts[2])]])
    )
    assert len(waits) == 3  # each is sampled from


def test_masks_begin_before_a_device_gets_a_prompt_and_after_it_got_decodes(make, prompts, monkeypatch):
    engine = make(n_ctx=1024, n_seq_max=4, n_batch=64)
    engine.define_grammar(DefineGrammar("key", "start: /[ab]+/"))
    engine._matchers._compiled["key"].result()
    calls = []

    def noted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (calls.append(name), function(*given))[1])

    noted(engine, "_launch")
    noted(engine._matchers, "begin")

    def order(inputs, answer, *, is_async):
        engine.is_async = is_async
        inputs.grammar = GrammarState("key", np.array(answer, np.int32))
        calls.clear()
        [token] = engine.step(Step((), [[inputs]], mask_timeout_ms=60e3)).tokens
        assert token >= 0
        return token, calls[:]

    token, before = order(prefill_input(0, prompts[0]), [], is_async=True)
    assert before == ["begin", "_launch"]
    answer, at = [token], len(prompts[0])
    token, after = order(StepInput(0, at, answer, [greedy(1)]), answer, is_async=True)
    assert after == ["_launch", "begin"]
    answer = [*answer, token]
    assert order(StepInput(0, at + 1, answer[-1:], [greedy(2)]), answer, is_async=False)[1] == ["begin", "_launch"]


def test_a_decode_after_a_long_prompt_does_not_wait_for_the_daemon_for_long(make, prompts, monkeypatch):
    """A device that computes after the launch: 1 ms for a call, and 1 ms for each row."""
    engine = make(n_ctx=1024, n_seq_max=4, n_batch=64)
    engine.is_async = True
    rows, waits = [0], []

    def launch(inputs, launch=engine._launch):
        rows[0] = sum(len(each.tokens) for each in inputs)
        return launch(inputs)

    monkeypatch.setattr(engine, "_launch", launch)
    monkeypatch.setattr(engine._context, "synchronize", lambda: time.sleep(1e-3 * (1 + rows[0])))

    class Daemon:
        def computing(self, wait_s):
            waits.append(wait_s)
            time.sleep(wait_s)  # it sends nothing before it has the answer

    def compute(*inputs):
        engine.step(step(*inputs), callbacks=Daemon())
        return waits[-1]

    long = (prompts[0] * 32)[:60]
    assert compute(prefill_input(0, long)) == 0  # nothing is known yet
    assert compute(StepInput(0, 60, [5], [greedy()])) == 0
    prompt = compute(prefill_input(1, long))
    assert prompt > 0.02
    assert 0 < compute(StepInput(0, 61, [5], [greedy()])) < prompt / 2  # of a decode, not of the prompt before it
    assert compute(prefill_input(2, long[:3])) < prompt / 2


@pytest.mark.cpu("a GPU has no rows that round equally in every call")
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_tokens_of_an_answer_that_are_computed_again_round_as_they_did(library, prompts, flash_attn):
    from uma_trio.engine.llama import LlamaEngine

    options = {"ctx": 512, "parallel": 2, "batch_tokens": 256, "threads": 1, "kv_unified": "off"}
    engine = LlamaEngine(EMBEDDED, config.Model(flash_attn=flash_attn, **options))
    scored = SampleRequest(GREEDY, logprobs=20)
    prompt, answer, reports = prompts[1], [], []

    def compute(seq_id, position, tokens):
        return engine.step(step(StepInput(seq_id, position, tokens, [scored])))

    output = compute(0, 0, prompt)
    for at in range(len(prompt), len(prompt) + 100):
        answer += output.tokens
        output = compute(0, at, answer[-1:])
        reports.append(output.scores)
    rows = engine.info.exact_rows
    assert rows == (48 if flash_attn == "on" else 1)
    compute(1, 0, prompt)
    for at in range(0, len(answer), rows):
        part = answer[at : at + rows]
        assert compute(1, len(prompt) + at, part).scores == reports[at + len(part) - 1]
    engine.close()


@pytest.mark.thorough
def test_rows_of_a_reproducible_engine_do_not_depend_on_what_is_computed_with_them(library, prompts):
    """Alone, in chunks, next to others in other chunks; and with so many cells that two threads would divide them."""
    from uma_trio.engine.llama import LlamaEngine

    options = {"ctx": 3 * 512, "parallel": 3, "batch_tokens": 256, "threads": 1}
    engine = LlamaEngine(EMBEDDED, config.Model(reproducible=True, devices=("none",), **options))
    assert engine.info.max_rows == 48
    tokens, others = (prompts[0] * 320)[:320], [*range(300, 400)]

    def compute(rows, end, *, n_last=24, n_others=0, threads=1):
        """Log-probabilities after the last of the tokens up to ``end``; the last ones in chunks of so many rows."""
        begun = end - n_last
        engine.step(step(removing=(0, 1)))
        engine.set_threads(1)
        for at in range(0, begun, 48):
            engine.step(step(StepInput(0, at, tokens[at : min(at + 48, begun)])))
        engine.set_threads(threads)
        for n, at in enumerate(range(begun, end, rows)):
            inputs = [StepInput(0, at, tokens[at : min(at + rows, end)], [SampleRequest(GREEDY, logprobs=20)])]
            if n_others:
                start = n * n_others % 96
                engine.step(step(removing=() if start else (1,)))
                inputs.append(StepInput(1, start, others[start : start + n_others]))
            [found] = engine.step(step(*inputs)).scores
        return found

    for end in (100, 320):
        expected = compute(24, end)
        for rows, n_others in ((1, 0), (7, 0), (1, 1), (1, 48), (24, 3)):
            assert compute(rows, end, n_others=n_others) == expected, (end, rows, n_others)
        for n_others in (0, 1, 2):  # two rows of the other one: the second is in a pass of its own
            assert compute(1, end, n_last=2, n_others=n_others, threads=2) == expected, (end, n_others)
    engine.close()


def test_the_start_refuses_to_be_reproducible_with_weights_whose_rows_depend_on_others(library):
    from uma_trio.engine.llama import LlamaEngine

    settings = config.Model(reproducible=True, devices=("none",), ctx=512, parallel=2, batch_tokens=128, threads=1)
    LlamaEngine(random_model("4x128x4x2x256", "q4_0"), settings).close()
    with pytest.raises(EngineError, match="computes a row of it otherwise next to others"):
        LlamaEngine(random_model("4x128x4x2x256", "f16"), settings)
