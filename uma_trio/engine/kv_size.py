"""Bytes of KV cache per token, over all layers of a model.

For most models this follows from the metadata, because all layers are alike.  If some layers have no attention, or the
number of heads varies by layer, only llama.cpp knows the size, by a rule of each architecture.  Then it is measured: a
saved state of two tokens is larger than a saved state of one token by the size of a token.
"""

from __future__ import annotations

from typing import Final

import llama_abi
from uma_trio import config
from uma_trio.models.sizes import BYTES_PER_VALUE

CELL_BYTES: Final = 12
"""Metadata of a saved cell: position, number of sequences, sequence id.

Positions with several parts take 12 bytes more, which are counted as keys.  Source: llama-kv-cache.cpp,
``state_write_meta``.
"""


def kv_bytes_per_token(model: llama_abi.Model, settings: config.Model, probe: llama_abi.ContextOptions) -> float:
    """Bytes of keys and values per token, in the types of ``settings``.  0 for a model without attention.

    Blocks for two tokens of the model if it has to measure.

    Args:
        probe: options of the context that measures.

    Raises:
        LlamaError: there is not enough memory to measure.
    """
    if model.is_recurrent:
        return 0.0
    computed = _from_metadata(model, settings)
    return _measured(model, probe) if computed is None else computed


def _from_metadata(model: llama_abi.Model, settings: config.Model) -> float | None:
    """``None`` if the metadata do not determine the size."""
    architecture = f"{model.meta('general.architecture')}.attention"
    heads = model.meta(f"{architecture}.head_count_kv")  # None for an array: layers differ
    latent = model.meta(f"{architecture}.kv_lora_rank")  # the cache holds something other than what the heads see
    if model.is_hybrid or heads is None or latent is not None:
        return None
    width = model.n_embd // max(1, model.n_head)
    k_width = int(model.meta(f"{architecture}.key_length") or width)
    v_width = int(model.meta(f"{architecture}.value_length") or width)
    of_head = k_width * BYTES_PER_VALUE[settings.type_k] + v_width * BYTES_PER_VALUE[settings.type_v]
    return model.n_layer * model.n_head_kv * of_head


def _measured(model: llama_abi.Model, probe: llama_abi.ContextOptions) -> float:
    n_caches = 2 if model.n_swa else 1  # layers with a sliding window have their own
    sizes = []
    with llama_abi.Context(model, probe) as context:
        batch = llama_abi.Batch(1)
        for pos in range(2):
            batch.clear()
            batch.add([0], pos=pos, seq=0)
            if context.decode(batch):
                raise llama_abi.LlamaError("cannot measure the size of the KV cache: no room for two tokens")
            sizes.append(context.state_size(0))
    return float(max(0, sizes[1] - sizes[0] - n_caches * CELL_BYTES))
