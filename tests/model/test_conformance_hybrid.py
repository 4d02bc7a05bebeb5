"""``LlamaEngine`` with a hybrid model meets the engine contract; sequences of one batch do not influence each other.

On processors with AMX this needs the patch that ``build_llama.sh`` applies.  Without it only the first sequence of a batch
is computed correctly.
"""

from __future__ import annotations

import random

import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.random_adapters import two_adapters
from tests.support.random_models import random_model
from uma_trio import config

pytestmark = pytest.mark.thorough
"""The quick profile has ``test_conformance.py``, and ``test_checkpoints.py`` for what is special about such memory."""


@pytest.fixture
def make(library):
    from uma_trio.engine.llama import LlamaEngine

    made = []

    def make(*, n_ctx, n_seq_max, n_batch, adapters=None):
        # rows with different adapters share calls; quantized, their last bits would depend on who is in the call
        path = random_model("tiny-hybrid", "q8_0" if adapters is None else "f32")
        settings = config.Model(
            ctx=n_ctx, parallel=n_seq_max, batch_tokens=n_batch, threads=1, flash_attn="off", embedding_ctx=256
        )
        made.append(LlamaEngine(path, settings, adapters=two_adapters(path) if adapters else ()))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def prompts():
    return [random.Random(seed).choices(range(100, 30_000), k=5 + seed) for seed in range(4)]
