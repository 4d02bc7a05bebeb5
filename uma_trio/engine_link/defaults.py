"""What the settings of a model stand for where they leave something open, and what a start may try."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio import config

DEFAULT_WINDOW: Final = 8192
"""Tokens of a request for which ``ctx=0`` makes room, if the model was trained for as many."""

FLOOR_TOKENS: Final = 2048
"""Context of a request that is worth a smaller KV type, and layers off the GPU."""

SMALL_BATCH: Final = 128
"""Tokens of a batch where memory is short."""

LARGE_BATCH: Final = 2048
"""Tokens of a batch where a GPU that computes masked cells (CUDA, ROCm, Vulkan) holds the whole model, and nothing else has to
be smaller for it.  More prompts are computed by one reading of the weights."""

KV_CELL_MULTIPLE: Final = 256
"""llama.cpp rounds the cells of the KV cache, or of each sequence's share, up to a multiple of this (GGML_PAD in
llama-context.cpp)."""

SHARES: Final = (1.0, 0.85, 0.7)
"""How much of the free memory each attempt to load a model may take.  The next one follows if there was not enough."""


def with_defaults(settings: config.Model) -> config.Model:
    """``settings`` with llama.cpp's usual values where they say ``auto``."""
    return attrs.evolve(
        settings,
        type_k="f16" if settings.type_k == "auto" else settings.type_k,
        type_v="f16" if settings.type_v == "auto" else settings.type_v,
        flash_attn="on" if settings.split_mode == "tensor" or settings.reproducible else settings.flash_attn,
        kv_unified="off" if settings.reproducible else settings.kv_unified,
        batch_tokens=settings.batch_tokens or config.DEFAULT_BATCH,
    )
