"""Choose the layout of a context's memory: unified or per-sequence KV cache, with or without flash attention.

The default by rule: per-sequence KV without flash attention on a CPU; on a GPU flash attention, and the KV cache that
``Environment.prefers_unified`` names.

- llama.cpp's CPU flash attention processes queries in tiles of 64 and smaller batches row by row.  That made a decode
  at 1,600 tokens 2.4 times slower and a prefill chunk of 16 tokens seven times slower.
- With unified KV, every row scans the cells of all sequences without flash attention, and with that of CUDA, ROCm, MUSA
  and SYCL.
- With per-sequence KV, a mixed batch is split by sequence, and each split reads the weights again.

docs/design/kv-cache.md has the reasons and docs/benchmarks/speed.md the figures.  They come from a few devices, so the
rule is only the default: ``candidates`` lists the layouts that the settings allow, ``layout_trial`` measures them on this
machine, and ``choose`` takes the fastest if it is clearly faster than the default.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import attrs

from uma_trio import config
from uma_trio.engine_link.defaults import DEFAULT_WINDOW, KV_CELL_MULTIPLE
from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS
from uma_trio.errors import ErrorWithRemedy

KV_MEMORY_SHARE: Final = 0.25
"""Upper limit of the KV cache with ``ctx=0``, as a share of the machine's memory; of the free memory of its GPUs where ``fit``
chooses a longer context than ``DEFAULT_WINDOW``."""

CHECKPOINTS_MEMORY_SHARE: Final = 1 / 16
"""Upper limit of the checkpoints of recurrent states, as a share of the machine's memory."""

CPU_UBATCH: Final = 256
"""Prefill of 512 tokens took 0.90 ms per token in one micro-batch and 0.79 ms in two.  With more rows the activations
do not fit into the second-level cache."""

MIXED_SHARE: Final = 0.2
"""Assumed share of ticks with prefill.  Example: eight chats, turns of 120 new tokens, answers of 100 tokens.  Per 100
ticks, the next prompts take 8 * 120 / 48 = 20 ticks."""

TIGHT_TARGET_MS: Final = 50.0
"""With a shorter target for the time between tokens, a tick has no time for two calls: on an H200 with a 7B model and a
target of 30 ms, a mixed load took 7.3 s with per-sequence KV and 6.3 s with unified KV.  At 50 ms both took as long."""

MANY_SEQUENCES: Final = 16
MANY_SEQUENCES_WINDOW: Final = 1024
"""Tokens for each sequence from which on per-sequence KV may replace unified KV, if ``ctx`` is set, by the user
or by ``fit``, and ``parallel`` is at least ``MANY_SEQUENCES``.  With fewer sequences each must have ``DEFAULT_WINDOW``.

Where all cells are scanned, the price of unified KV grows with the number of sequences.  On an H200 with a 7B model, 32
clients with prompts of 4,000 tokens and answers of 400 took 105 s in a unified cache of 147,456 cells.  llama-server,
which divides its cells whenever the number of its sequences is set, took 43 s."""

CLEARLY_FASTER: Final = 0.9
"""Another layout replaces the default only below this share of the default's cost.  Two measurements of one layout
differ by some percent, and each start should choose the same."""


class KvCacheTooSmall(ErrorWithRemedy):
    """``kv_mem_limit_mb`` is below the smallest possible KV cache."""


class ContextTooLarge(ErrorWithRemedy):
    """The KV cache does not fit into the free memory."""

    def __init__(self, n_ctx: int, kv_bytes_per_token: float, free_bytes: int) -> None:
        fitting = int(free_bytes / max(1.0, kv_bytes_per_token))
        fitting -= fitting % KV_CELL_MULTIPLE
        super().__init__(
            f"a KV cache of {n_ctx} tokens takes {n_ctx * kv_bytes_per_token / 1e9:.1f} GB, and "
            f"{free_bytes / 1e9:.1f} GB of memory are free",
            f"lower --ctx to {fitting} or less, or set --type-k and --type-v to q8_0, which takes half",
        )


@attrs.frozen(kw_only=True)
class Shape:
    """The properties of a model that determine the size of its KV cache."""

    n_ctx_train: int
    kv_bytes_per_token: float
    """Over all layers.  0 for a model without a KV cache."""


@attrs.frozen(kw_only=True)
class Environment:
    """What the layout by rule depends on, besides the model and the settings."""

    on_gpu: bool
    """Layers of the model are on a GPU."""
    computes_masked_cells: bool = False
    """With unified KV, attention on this device computes each row of a call with the cells of all sequences of the call, or of
    the cache (``layout_choice.COMPUTES_MASKED_CELLS``)."""
    target_itl_ms: float = config.DEFAULT_TARGET_ITL_MS
    """Target for the inter-token latency of a stream, in milliseconds."""

    @property
    def prefers_unified(self) -> bool:
        """Whether unified KV is the rule, if sequences would have enough tokens either way (``default_layout``)."""
        return self.on_gpu and (not self.computes_masked_cells or self.target_itl_ms < TIGHT_TARGET_MS)

    @property
    def rule_decides_kv(self) -> bool:
        """Whether the rule alone decides between unified and per-sequence KV, without a trial.

        The price of computing all cells grows with the cells in use, and a trial has only a few thousand.
        """
        return self.on_gpu and self.computes_masked_cells


@attrs.frozen(kw_only=True)
class Layout:
    """The memory layout of a context."""

    n_ctx: int
    """KV cells of all sequences together."""
    unified: bool
    """All sequences share all cells (llama.cpp's ``kv_unified``)."""
    flash_attn: str
    """``on``, ``off``, or ``auto`` for llama.cpp to choose."""
    n_ubatch: int
    """Tokens computed at once.  llama.cpp splits longer batches."""
    is_kv_mem_limited: bool = False
    """``kv_mem_limit_mb`` made ``n_ctx`` smaller."""

    @property
    def name(self) -> str:
        """Identifies the layout among the candidates, in caches and logs."""
        return f"{'unified KV' if self.unified else 'per-sequence KV'}, flash attention {self.flash_attn}"

    def n_cells(self, parallel: int) -> int:
        """Cells of the KV cache for ``parallel`` sequences: ``n_ctx``, rounded up as llama.cpp does."""
        n_streams = 1 if self.unified else parallel
        of_stream = -(-self.n_ctx // n_streams)
        return n_streams * (of_stream + -of_stream % KV_CELL_MULTIPLE)


@attrs.frozen(kw_only=True)
class MeasuredLayout:
    """Measured tick times of a layout."""

    layout: Layout
    decode_ms: float
    """One token for each stream."""
    mixed_ms: float | None
    """One token for each stream and a prefill chunk, in as many calls as serving makes.  ``None`` if ``decode_ms``
    alone already ruled the layout out."""

    @property
    def cost_ms(self) -> float:
        """Duration of the mean tick.  A lower bound without ``mixed_ms``, because a mixed tick is never faster."""
        mixed_ms = self.decode_ms if self.mixed_ms is None else self.mixed_ms
        return (1 - MIXED_SHARE) * self.decode_ms + MIXED_SHARE * mixed_ms

    def __str__(self) -> str:
        if self.mixed_ms is None:
            return f"more than {self.decode_ms:.2f} ms"
        return f"{self.cost_ms:.2f} ms ({self.decode_ms:.2f} ms without prefill, {self.mixed_ms:.2f} ms with it)"


@attrs.frozen(kw_only=True)
class LayoutChoice:
    """The chosen layout and the reason."""

    layout: Layout
    why: Literal["only one", "rule", "default", "measured", "measured before", "no time", "no room"]
    """Why this layout:

    - ``only one``: the settings allow no other.
    - ``rule``: the rule allows no other; see ``rule``.
    - ``default``: measuring is disabled, or impossible with so little context.
    - ``measured``, ``measured before``: the result of this run or of an earlier one.
    - ``no time``: the default; measuring would have taken too long, in this run or in an earlier one.
    - ``no room``: the default; there was not enough memory for the chosen layout.
    """
    measured: Sequence[MeasuredLayout] = ()
    """The layouts that could be measured, the default first."""
    is_saved: bool = False
    """A new measurement was saved for later starts."""
    rule: str = ""
    """Where the rule decides between unified and per-sequence KV: why, and what the other would give; see ``rule_in_words``."""


@attrs.frozen
class KeptLayout:
    """What an earlier run has chosen."""

    name: str
    was_measured: bool
    """If false, there was no time, and the default was taken."""


class LayoutCache(Protocol):
    """Keeps choices from one run to the next."""

    def load(self, environment: tuple[object, ...], trial_s: float) -> KeptLayout | None:
        """The layout chosen in ``environment``; ``None`` if unknown, or if a trial of ``trial_s`` is worth its time."""

    def save(self, environment: tuple[object, ...], choice: LayoutChoice, trial_s: float) -> bool:
        """Keep a choice for the next run.  Returns whether that succeeded."""


def default_layout(shape: Shape, settings: config.Model, environment: Environment, *, memory_bytes: int) -> Layout:
    """The layout by rule, for ``settings.parallel`` sequences.

    With ``kv_unified`` ``auto`` it is unified KV on a GPU where sequences would have fewer tokens than a request has by
    default (``_has_room_for_requests``).

    Args:
        memory_bytes: the machine's memory.

    Raises:
        KvCacheTooSmall: ``kv_mem_limit_mb`` is too small.
    """
    unified = environment.prefers_unified if settings.kv_unified == "auto" else settings.kv_unified == "on"
    flash_attn = settings.flash_attn
    if flash_attn == "auto" and not environment.on_gpu and not unified and not _quantised(settings):
        flash_attn = "off"
    sized = functools.partial(
        _sized, shape, settings, flash_attn=flash_attn, on_gpu=environment.on_gpu, memory_bytes=memory_bytes
    )
    if settings.kv_unified == "auto" and environment.on_gpu and not unified:
        with contextlib.suppress(KvCacheTooSmall):
            separate = sized(unified=False)
            if _has_room_for_requests(separate, shape, settings):
                return separate
        unified = True
    return sized(unified=unified)


def rule_in_words(layout: Layout, shape: Shape, settings: config.Model, environment: Environment) -> str:
    """Why the rule has chosen unified or per-sequence KV for ``layout``, and what the other would give, for people.

    Empty where the rule does not decide.
    """
    if settings.kv_unified != "auto" or not environment.rule_decides_kv or settings.parallel == 1:
        return ""
    share, most = (min(n, shape.n_ctx_train) for n in (layout.n_ctx // settings.parallel, layout.n_ctx))
    if not layout.unified:
        more = f"; with kv_unified on, one could have {most}" if most > share else ""
        return f"attention on this device computes each row with the cells of all others in a unified cache, and {share} tokens suffice for most requests{more}"
    why = f"requests would have only {share} tokens each"
    if environment.prefers_unified:
        why = f"a target_itl_ms below {TIGHT_TARGET_MS:g} leaves no time to read the weights twice in a tick"
    return f"{why}; with kv_unified off, streams would decode faster while no prompt is computed"


def candidates(
    shape: Shape, settings: config.Model, environment: Environment, *, memory_bytes: int, windowed: bool
) -> tuple[Layout, ...]:
    """The layouts that ``settings`` allow, the default first.

    Omits layouts in which a client could do less than in the default.  Per-sequence KV must leave each sequence the
    tokens that a request has by default, or ``MANY_SEQUENCES_WINDOW``.  Unified KV must not replace per-sequence KV for a
    model with a sliding window, because in unified KV the sequences of such a model cannot be truncated.

    Args:
        windowed: the model has layers with a sliding window.

    Raises:
        KvCacheTooSmall: as ``default_layout``.
    """
    default = default_layout(shape, settings, environment, memory_bytes=memory_bytes)
    layouts = [default]
    for unified, flash_attn in ((False, "off"), (False, "auto"), (True, "auto")):
        if unified != default.unified and (settings.kv_unified != "auto" or environment.rule_decides_kv):
            continue
        if settings.flash_attn != "auto":
            flash_attn = settings.flash_attn
        elif flash_attn == "off" and _quantised(settings):
            continue
        try:
            other = _sized(
                shape,
                settings,
                unified=unified,
                flash_attn=flash_attn,
                on_gpu=environment.on_gpu,
                memory_bytes=memory_bytes,
            )
        except KvCacheTooSmall:
            continue
        if unified != default.unified:
            less = windowed if unified else not _has_room_for_requests(other, shape, settings)
            if less or settings.parallel == 1:  # with one sequence both are the same
                continue
        if other not in layouts:
            layouts.append(other)
    return tuple(layouts)


def choose(measured: Sequence[MeasuredLayout]) -> Layout:
    """The layout of ``measured[0]``, the default, unless another one is clearly faster."""
    default = measured[0]
    best = min(measured, key=lambda layout: layout.cost_ms)
    return best.layout if best.cost_ms < CLEARLY_FASTER * default.cost_ms else default.layout


def _quantised(settings: config.Model) -> bool:
    """llama.cpp needs flash attention for a quantized V."""
    return settings.type_v not in ("auto", "f16")


def _has_room_for_requests(layout: Layout, shape: Shape, settings: config.Model) -> bool:
    """Whether each sequence has the tokens that a request has by default, or what suffices where many were asked for."""
    many = settings.ctx and settings.parallel >= MANY_SEQUENCES
    window = MANY_SEQUENCES_WINDOW if many else DEFAULT_WINDOW
    return layout.n_ctx >= min(shape.n_ctx_train, window) * settings.parallel


def _sized(
    shape: Shape, settings: config.Model, *, unified: bool, flash_attn: str, on_gpu: bool, memory_bytes: int
) -> Layout:
    window = min(shape.n_ctx_train, DEFAULT_WINDOW)
    affordable = int(KV_MEMORY_SHARE * memory_bytes / max(1.0, shape.kv_bytes_per_token))
    n_ctx = settings.ctx or max(min(window * settings.parallel, affordable), window)
    batch_tokens = settings.batch_tokens or config.DEFAULT_BATCH
    most = _cells_within(settings, shape, unified=unified) if settings.kv_mem_limit_mb else n_ctx
    return Layout(
        n_ctx=min(n_ctx, most),
        unified=unified,
        flash_attn=flash_attn,
        n_ubatch=batch_tokens if on_gpu else min(batch_tokens, CPU_UBATCH),
        is_kv_mem_limited=most < n_ctx,
    )


def _cells_within(settings: config.Model, shape: Shape, *, unified: bool) -> int:
    """The cells that fit into ``kv_mem_limit_mb``, rounded down as llama.cpp would round up."""
    most = int(settings.kv_mem_limit_mb * config.MB / max(1.0, shape.kv_bytes_per_token))
    block = KV_CELL_MULTIPLE if unified else KV_CELL_MULTIPLE * settings.parallel
    if most < block:
        raise KvCacheTooSmall(
            f"kv_mem_limit_mb {settings.kv_mem_limit_mb} has room for {most} tokens; {settings.parallel} sequences "
            f"need at least {block}",
            f"raise it to {1 + int(block * shape.kv_bytes_per_token / config.MB)}, or lower parallel",
        )
    return most - most % block


def max_checkpoints(n_bytes: int, *, n_sequences: int, memory_bytes: int) -> int:
    """The number of checkpoints to keep, of ``n_bytes`` each: as many as all sequences can use and memory can hold."""
    return min(MAX_CHECKPOINTS * n_sequences, int(CHECKPOINTS_MEMORY_SHARE * memory_bytes / max(1, n_bytes)))
