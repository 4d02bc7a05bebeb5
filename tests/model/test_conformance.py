"""``LlamaEngine`` with the embedded model meets the engine contract."""

from __future__ import annotations

import time

import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.engine_contract import greedy, prefill_input, step
from tests.support.random_adapters import two_adapters
from uma_trio import config
from uma_trio.engine_link.messages import StepInput
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
