"""How a context's memory is laid out, where the configuration leaves it open.

On a CPU each sequence gets a share of its own and attention is computed without flash attention; on a GPU
all sequences share one pool, with flash attention where llama.cpp has it.  Measured, not guessed: see
docs/BENCHMARKS.md, "Laying out the KV cache".  In short: llama.cpp's CPU flash attention takes queries in
tiles of 64 and computes smaller batches row by row, which made a decode at 1,600 tokens 2.4 times slower and
a chunk of 16 seven times; and a shared pool makes every row scan all sequences' cells.  A GPU would read the
weights once more for every sequence that a mixed batch cuts apart.
"""

from __future__ import annotations

import os
from typing import Final

import attrs

from uma_trio import config
from uma_trio.kv.checkpoints import EACH

MIB: Final = 1 << 20
DEFAULT_WINDOW: Final = 8192
"""Tokens a request can have, where nobody says otherwise and the model was trained for as many."""
SHARE_OF_MEMORY: Final = 0.25
"""Most of the machine's memory that the KV cache takes, where nobody says how large it is to be."""

CHECKPOINTS_SHARE_OF_MEMORY: Final = 1 / 16
"""Most of the machine's memory that checkpoints of recurrent states take."""

CELLS_AT_A_TIME: Final = 256
"""The KV cache, or each sequence's share of it, is a multiple of so many (GGML_PAD in llama-context.cpp)."""

CPU_UBATCH: Final = 256
"""A prompt of 512 tokens took 0.90 ms a token at once and 0.79 in two halves: what lies between the layers no longer
fits into the second-level cache."""

BYTES_PER_VALUE: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Of ggml's blocks: 32 values with a 16-bit scale."""


class NoRoom(ValueError):
    """The KV cache cannot be as small as it is to be."""


@attrs.frozen(kw_only=True)
class Shape:
    """What of a model decides how large its KV cache is."""

    n_ctx_train: int
    n_layer: int
    n_embd_kv: int
    """Values of K, and as many of V, for each token in each layer."""

    def bytes_per_token(self, settings: config.Model) -> float:
        """Of the KV cache."""
        values = BYTES_PER_VALUE[settings.type_k] + BYTES_PER_VALUE[settings.type_v]
        return values * self.n_layer * self.n_embd_kv


@attrs.frozen(kw_only=True)
class Layout:
    """What was decided."""

    n_ctx: int
    """KV cells in all."""
    unified: bool
    flash_attn: str
    """``on``, ``off``, or ``auto`` for llama.cpp to choose."""
    n_ubatch: int
    """Tokens that are computed at once: a longer batch is cut."""


def layout(shape: Shape, settings: config.Model, *, on_gpu: bool, memory_bytes: int) -> Layout:
    """Lay the memory out for ``settings.parallel`` sequences.

    Args:
        on_gpu: layers of the model are on one.
        memory_bytes: of the machine.
    """
    unified = on_gpu if settings.kv_unified == "auto" else settings.kv_unified == "on"
    quantised = settings.type_v != "f16"  # llama.cpp has no other way to read a quantised V
    flash_attn = settings.flash_attn
    if flash_attn == "auto" and not on_gpu and not unified and not quantised:
        flash_attn = "off"
    window = min(shape.n_ctx_train, DEFAULT_WINDOW)
    affordable = int(SHARE_OF_MEMORY * memory_bytes / max(1.0, shape.bytes_per_token(settings)))
    n_ctx = settings.ctx or max(min(window * settings.parallel, affordable), window)
    if settings.kv_mem_limit_mb:
        n_ctx = min(n_ctx, _cells_within(settings, shape, unified=unified))
    n_ubatch = settings.batch_tokens if on_gpu else min(settings.batch_tokens, CPU_UBATCH)
    return Layout(n_ctx=n_ctx, unified=unified, flash_attn=flash_attn, n_ubatch=n_ubatch)


def _cells_within(settings: config.Model, shape: Shape, *, unified: bool) -> int:
    """As many as ``kv_mem_limit_mb`` has room for; llama.cpp would round any other number up."""
    most = int(settings.kv_mem_limit_mb * 1_000_000 / max(1.0, shape.bytes_per_token(settings)))
    block = CELLS_AT_A_TIME if unified else CELLS_AT_A_TIME * settings.parallel
    if most < block:
        raise NoRoom(
            f"kv_mem_limit_mb {settings.kv_mem_limit_mb} has room for {most} tokens; {settings.parallel} sequences need "
            f"{block} at least: raise it to {1 + int(block * shape.bytes_per_token(settings) / 1e6)}, or lower parallel"
        )
    return most - most % block


def checkpoints(n_bytes: int, *, n_sequences: int, memory_bytes: int) -> int:
    """How many checkpoints of ``n_bytes`` are kept at most: what all sequences can use, if there is the memory."""
    return min(EACH * n_sequences, int(CHECKPOINTS_SHARE_OF_MEMORY * memory_bytes / max(1, n_bytes)))


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
