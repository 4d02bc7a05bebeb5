"""``LlamaEngine`` with the embedded model meets the engine contract."""

from __future__ import annotations

import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.random_adapters import two_adapters
from uma_trio import config
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
