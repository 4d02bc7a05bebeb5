"""The computed size of the KV cache equals llama.cpp's, also if not all layers have attention."""

from __future__ import annotations

import pytest

from tests.support.profile import sampled
from tests.support.random_models import random_model
from uma_trio import config

F16, Q8, Q4 = 2.0, 34 / 32, 18 / 32

LAYERS_HEADS_WIDTH = {"2x64": (2, 1, 64), "tiny-swa": (4, 1, 32), "tiny-hybrid": (2, 1, 32)}
"""Attention layers, KV heads, width of a head.  The first layer of tiny-hybrid has no attention."""


def measured(shape, **options):
    """Bytes per token, measured on the states of sequences."""
    import llama_abi
    from uma_trio.engine.kv_size import _measured

    with llama_abi.Model(llama_abi.load(), random_model(shape)) as model:
        return _measured(model, llama_abi.ContextOptions(n_ctx=256, n_batch=32, n_seq_max=1, **options))


@pytest.mark.parametrize(("type_k", "type_v", "of_values"), [("f16", "f16", 2 * F16), ("q8_0", "q4_0", Q8 + Q4)])
@pytest.mark.parametrize("shape", sampled(LAYERS_HEADS_WIDTH, 2))
def test_only_attention_layers_count(library, shape, type_k, type_v, of_values):
    from uma_trio.engine.llama import LlamaEngine

    layers, heads, width = LAYERS_HEADS_WIDTH[shape]
    settings = config.Model(ctx=512, parallel=2, threads=1, type_k=type_k, type_v=type_v)
    engine = LlamaEngine(random_model(shape), settings)
    assert engine.info.kv_bytes_per_token == layers * heads * width * of_values
    assert measured(shape, type_k=type_k, type_v=type_v) == engine.info.kv_bytes_per_token
    engine.close()


@pytest.mark.parametrize("shape", ["2x64", "tiny-hybrid"])
@pytest.mark.parametrize("unified", ["on", "off"])
def test_the_limit_in_bytes(library, shape, unified):
    from uma_trio.engine.llama import LlamaEngine

    settings = config.Model(parallel=2, threads=1, kv_unified=unified, kv_mem_limit_mb=1)
    engine = LlamaEngine(random_model(shape, ctx=8192), settings)
    n_bytes = engine.info.n_ctx * engine.info.kv_bytes_per_token
    block = 256 * (1 if unified == "on" else 2)
    assert 1e6 - block * engine.info.kv_bytes_per_token < n_bytes <= 1e6
    engine.close()
