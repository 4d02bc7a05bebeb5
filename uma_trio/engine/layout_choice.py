"""The layout of a model's context on this machine: what is known of the device, and the choice, or a measurement.

``layout`` has the rule, ``layout_trial`` measures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Literal

import attrs

import llama_abi
from uma_trio import config
from uma_trio.engine.kv_size import kv_bytes_per_token
from uma_trio.engine.layout import (
    ContextTooLarge,
    Environment,
    Layout,
    LayoutCache,
    LayoutChoice,
    Shape,
    candidates,
    rule_in_words,
)
from uma_trio.engine.layout_trial import try_layouts
from uma_trio.engine.placement import ModelDevices, compute_environment
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.defaults import KV_CELL_MULTIPLE
from uma_trio.processes.machine import default_threads, free_memory_bytes, machine_memory_bytes

SCANS_MASKED_CELLS: Final = ("CUDA", "ROCm", "MUSA", "SYCL")
"""How the names of devices begin whose flash attention does not skip masked cells of a unified cache."""

COMPUTES_MASKED_CELLS: Final = (*SCANS_MASKED_CELLS, "Vulkan")
"""The same, and those that compute a cell for all rows of a tile, which skip what none of them needs.  With a row of each
sequence in a tile that is nothing."""

COMPILES_SHADERS: Final = ("Vulkan", "Metal", "MTL")
"""How the names of devices begin that compile a kernel when it is first used."""

SHARE_OF_LOADING: Final = 0.1
"""Layout measurements may always take this fraction of the time that loading the weights took."""

EXACT_ROWS: Final = 48
"""Rows of one sequence, fewer than the tile of the CPU's flash attention, and a multiple of the tile of matrix kernels."""

FLOAT_BITS: Final = 12.0
"""Bits of a weight, on the average of a model, from which on its matrices are floating-point numbers."""

PROBE_TOKENS: Final = 32
"""In one batch of the context that measures how large a token's keys and values are; as few as may be configured."""


def shape_of(model: llama_abi.Model, settings: config.Model) -> Shape:
    """The properties of ``model`` that determine the size of its KV cache.  Creates a small context to measure them."""
    alone = attrs.evolve(settings, parallel=1, batch_tokens=PROBE_TOKENS)
    layout = Layout(n_ctx=KV_CELL_MULTIPLE, unified=True, flash_attn=settings.flash_attn, n_ubatch=PROBE_TOKENS)
    n_bytes = kv_bytes_per_token(model, settings, context_options(alone, layout))
    return Shape(n_ctx_train=model.n_ctx_train, kv_bytes_per_token=n_bytes)


def layout_candidates(
    model: llama_abi.Model, where: ModelDevices, shape: Shape, settings: config.Model, target_itl_ms: float
) -> tuple[Layout, ...]:
    """The layouts in which ``model`` may serve, the default first."""
    return candidates(
        shape,
        settings,
        environment_of(where, target_itl_ms),
        memory_bytes=machine_memory_bytes(),
        windowed=model.n_swa > 0,
    )


def check_memory(
    model: llama_abi.Model, where: ModelDevices, shape: Shape, n_ctx: int, *, failed: bool = False
) -> None:
    """Compare the KV cache with the free memory, before the kernel ends a process to make room for it.

    Args:
        failed: llama.cpp could not create the context.  Before that, only the machine's own memory is compared: how
            much of a GPU's is free depends on what the backend counts.

    Raises:
        ContextTooLarge: the KV cache does not fit.
    """
    if where.on_gpu and not failed:
        return
    gpus = [
        device.memory_free
        for device in model.library.devices()
        if device.name in where.names and device.type is llama_abi.DeviceType.GPU
    ]
    free = sum(gpus) if where.on_gpu and gpus else free_memory_bytes()
    if n_ctx * shape.kv_bytes_per_token > free:
        raise ContextTooLarge(n_ctx, shape.kv_bytes_per_token, free)


def attention_scan(options: llama_abi.ContextOptions, devices: Iterable[str]) -> AttentionScan:
    """Which KV cells the attention of a row scans.

    | | unified KV | per-sequence KV |
    |---|---|---|
    | without flash attention | all in use: scores of masked cells are computed, too | the longest sequence of the call |
    | flash attention of CUDA, also as ROCm or MUSA, and SYCL | all in use | those of the row's sequence |
    | flash attention of others | those of the row's sequence | those of the row's sequence |

    In a unified cache a call has the cells up to the last one in use, of whichever sequence, rounded up to 256
    (``llama_kv_cache::get_n_kv``).  llama.cpp puts tokens into free cells before that, so these are little more than
    those in use.  The kernels of the CPU, Metal and Vulkan skip blocks that are masked for all of their rows.  CUDA
    looks for the last block that is not masked (``flash_attn_mask_to_KV_max``), but only with several KV streams, or
    from 1,024 rows on, where it skips little.
    """
    if options.flash_attn == "off":
        return AttentionScan.CACHE if options.kv_unified else AttentionScan.LONGEST
    return AttentionScan.CACHE if options.kv_unified and _scans_masked_cells(devices) else AttentionScan.SEQUENCE


def exact_rows(options: llama_abi.ContextOptions, *, on_gpu: bool, bits_per_weight: float) -> int:
    """So many rows of one sequence in one call give the very logits that they give in a call each; 0: no number does.

    On a CPU, a row is multiplied with quantised weights in the same way whatever is next to it; but not with K and IQ quants,
    whose rows depend on how many streams were decoded together: there only ``reproducible`` is exact.  Flash attention
    computes rows one by one as long as they are fewer than its tile (``GGML_FA_TILE_Q``).  Without it, and with weights that are
    floating-point numbers, another kernel computes several rows than one.  In a unified cache the order of sums depends
    on the cells that a sequence has.
    """
    if on_gpu or options.kv_unified:
        return 0
    return EXACT_ROWS if options.flash_attn != "off" and bits_per_weight < FLOAT_BITS else 1


def threads_of_one_row(settings: config.Model, threads: int) -> int:
    """Threads for a pass of one row.

    Flash attention of a CPU divides the cells of a row that is alone between its threads, and so sums up otherwise.
    """
    return 1 if settings.reproducible else threads


def _scans_masked_cells(devices: Iterable[str]) -> bool:
    return any(name.startswith(SCANS_MASKED_CELLS) for name in devices)


def compiles_shaders(where: ModelDevices) -> bool:
    """Whether a device of the model compiles a kernel when it is first used."""
    return where.on_gpu and any(name.startswith(COMPILES_SHADERS) for name in where.names)


def environment_of(where: ModelDevices, target_itl_ms: float) -> Environment:
    """What the layout by rule depends on, for a model that goes to ``where``."""
    return Environment(
        on_gpu=where.on_gpu,
        computes_masked_cells=any(name.startswith(COMPUTES_MASKED_CELLS) for name in where.names),
        target_itl_ms=target_itl_ms,
    )


def choose_layout(
    model: llama_abi.Model,
    where: ModelDevices,
    shape: Shape,
    settings: config.Model,
    layout_cache: LayoutCache | None,
    layouts: tuple[Layout, ...],
    names: Collection[str] | None,
    *,
    target_itl_ms: float,
    loaded_s: float,
) -> LayoutChoice:
    """Choose the layout of the KV cache: the cached choice for this environment, or a new measurement.

    Args:
        layouts: the candidates, the default first.
        names: of those that there is memory for; ``None`` for all of them.
        target_itl_ms: see ``Environment``.
        loaded_s: what loading the weights took; a tenth of it may always go to measuring.
    """
    if names is not None:
        layouts = tuple(layout for layout in layouts if layout.name in names) or layouts[:1]
    check_memory(model, where, shape, layouts[0].n_ctx)
    rule = rule_in_words(layouts[0], shape, settings, environment_of(where, target_itl_ms))
    if len(layouts) == 1:
        return LayoutChoice(layout=layouts[0], why="rule" if rule else "only one", rule=rule)
    if layout_cache is None or settings.layout_trial_s == 0:
        return LayoutChoice(layout=layouts[0], why="default", rule=rule)
    # what a tick costs depends on the cells in use, not on the size of the KV cache, which varies with the free memory
    options = (attrs.evolve(context_options(settings, layout), n_ctx=0) for layout in layouts)
    facts = (*compute_environment(model.library, where, settings), *options)
    known = layout_cache.load(facts, settings.layout_trial_s)
    for layout in layouts:
        if known is not None and layout.name == known.name:
            why: Literal["measured before", "no time"] = "measured before" if known.was_measured else "no time"
            return LayoutChoice(layout=layout, why=why, rule=rule)
    budget_s = max(settings.layout_trial_s, SHARE_OF_LOADING * loaded_s)
    choice = try_layouts(
        model,
        layouts,
        lambda layout: context_options(settings, layout),
        budget_s=budget_s,
        compiles=compiles_shaders(where),
    )
    is_saved = choice.why in ("measured", "no time") and layout_cache.save(facts, choice, settings.layout_trial_s)
    return attrs.evolve(choice, is_saved=is_saved, rule=rule)


def context_options(settings: config.Model, layout: Layout) -> llama_abi.ContextOptions:
    """The options of a context that serves in ``layout``.

    Args:
        settings: without ``auto``.
    """
    threads = settings.threads or default_threads()
    return llama_abi.ContextOptions(
        n_ctx=layout.n_cells(settings.parallel),
        n_batch=settings.batch_tokens,
        n_ubatch=layout.n_ubatch,
        n_seq_max=settings.parallel,
        n_threads=threads_of_one_row(settings, threads),
        n_threads_batch=threads,
        kv_unified=layout.unified,
        flash_attn=layout.flash_attn,
        type_k=settings.type_k,
        type_v=settings.type_v,
    )
