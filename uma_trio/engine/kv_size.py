"""How many bytes of KV cache a token takes, in all layers of a model together.

Mostly the file's metadata say it: so many layers, all alike.  Where some layers do not attend, or each has a number of heads
of its own, llama.cpp alone knows which, since each architecture has a rule for it.  So there it is measured: a saved
sequence of two tokens is larger than one of one token by what a token takes.
"""

from __future__ import annotations

from typing import Final

import llama_abi
from uma_trio import config

BYTES_PER_VALUE: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Of ggml's blocks: 32 values with a 16-bit scale."""

CELL_BYTES: Final = 12
"""Of what a saved cell has beside keys and values: its position, the number of its sequences, and the one that is saved.
Where positions have several parts there are 12 more, and they are counted as if they were keys.
Source: llama-kv-cache.cpp, ``state_write_meta``."""


def kv_bytes_per_token(model: llama_abi.Model, settings: config.Model, probe: llama_abi.ContextOptions) -> float:
    """Of keys and values, in the types of ``settings``; 0 of a model that does not attend.

    Blocks for two tokens of the model, where they have to be computed.

    Args:
        probe: a context for them.

    Raises:
        LlamaError: there is not the memory for it.
    """
    if model.is_recurrent:
        return 0.0
    told = _told(model, settings)
    return _measured(model, probe) if told is None else told


def _told(model: llama_abi.Model, settings: config.Model) -> float | None:
    """By the metadata; ``None`` if they do not tell."""
    architecture = f"{model.meta('general.architecture')}.attention"
    heads = model.meta(f"{architecture}.head_count_kv")  # arrays are not given: then layers differ
    latent = model.meta(f"{architecture}.kv_lora_rank")  # what is kept is not what heads see
    if model.is_hybrid or heads is None or latent is not None:
        return None
    width = model.n_embd // max(1, model.n_head)
    k_width = int(model.meta(f"{architecture}.key_length") or width)
    v_width = int(model.meta(f"{architecture}.value_length") or width)
    of_head = k_width * BYTES_PER_VALUE[settings.type_k] + v_width * BYTES_PER_VALUE[settings.type_v]
    return model.n_layer * model.n_head_kv * of_head


def _measured(model: llama_abi.Model, probe: llama_abi.ContextOptions) -> float:
    n_caches = 2 if model.n_swa else 1  # one for the layers with a window
    sizes = []
    with llama_abi.Context(model, probe) as context:
        batch = llama_abi.Batch(1)
        for pos in range(2):
            batch.clear()
            batch.add([0], pos=pos, seq=0)
            if context.decode(batch):
                raise llama_abi.LlamaError("the size of the KV cache cannot be measured: no room for two tokens")
            sizes.append(context.state_size(0))
    return float(max(0, sizes[1] - sizes[0] - n_caches * CELL_BYTES))
