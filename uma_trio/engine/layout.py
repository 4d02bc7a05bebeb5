"""How a context's memory is laid out, where the configuration leaves it open.

There is a rule: on a CPU each sequence gets a share of its own and attention is computed without flash attention; on
a GPU all sequences share one pool, with flash attention where llama.cpp has it.  docs/benchmarks/kv-layout.md has the
figures behind it.  In short: llama.cpp's CPU flash attention takes queries in tiles of 64 and computes
smaller batches row by row, which made a decode at 1,600 tokens 2.4 times slower and a chunk of 16 seven times; and a
shared pool makes every row scan all sequences' cells.  A GPU would read the weights once more for every sequence that
a mixed batch cuts apart.

But it was found on two devices, and there are others.  So ``candidates`` says what could be taken, ``layout_trial``
measures it here, and ``choose`` decides: the rule's layout, unless another is clearly quicker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import attrs

from uma_trio import config
from uma_trio.kv.checkpoints import MAX_PER_SEQUENCE

MIB: Final = 1 << 20
DEFAULT_WINDOW: Final = 8192
"""Tokens a request can have, where nobody says otherwise and the model was trained for as many."""
SHARE_OF_MEMORY: Final = 0.25
"""Most of the machine's memory that the KV cache takes, where nobody says how large it is to be."""

CHECKPOINTS_SHARE_OF_MEMORY: Final = 1 / 16
"""Most of the machine's memory that checkpoints of recurrent states take."""

KV_CELL_MULTIPLE: Final = 256
"""The KV cache, or each sequence's share of it, is a multiple of so many (GGML_PAD in llama-context.cpp)."""

CPU_UBATCH: Final = 256
"""A prompt of 512 tokens took 0.90 ms a token at once and 0.79 in two halves: what lies between the layers no longer
fits into the second-level cache."""

MIXED_SHARE: Final = 0.2
"""Of the ticks: those with a part of a prompt in them.  Eight chats whose turns bring some 120 new tokens and are answered
with 100: while each of the eight gets its 100 tokens, a tick each, their next prompts take 8 * 120 / 48 = 20 of the ticks."""

CLEARLY: Final = 0.9
"""Of the rule's cost: what another layout has to stay below.  MeasuredLayout twice, the same thing differs by some percent,
and what is chosen is to be the same at the next start."""


class KvCacheTooSmall(ValueError):
    """The KV cache cannot be as small as it is to be."""


@attrs.frozen(kw_only=True)
class Shape:
    """What of a model decides how large its KV cache is."""

    n_ctx_train: int
    kv_bytes_per_token: float
    """In all layers; 0 of one that has none."""


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

    @property
    def name(self) -> str:
        """Which of the candidates it is; for people too."""
        return f"{'unified KV' if self.unified else 'per-sequence KV'}, flash attention {self.flash_attn}"


@attrs.frozen(kw_only=True)
class MeasuredLayout:
    """What ticks take in a layout."""

    layout: Layout
    decode_ms: float
    """Of one token for each of some streams."""
    mixed_ms: float | None
    """Of the same with a chunk of a prompt, in as many calls as serving takes; ``None`` where streams alone already took so
    long that it was not measured."""

    @property
    def cost_ms(self) -> float:
        """Of the mean tick.  Mostly streams are alone; but a mixed tick is what all of them wait for at once.

        Where that was not measured: the least that it can be, since a mixed tick is never quicker.
        """
        mixed_ms = self.decode_ms if self.mixed_ms is None else self.mixed_ms
        return (1 - MIXED_SHARE) * self.decode_ms + MIXED_SHARE * mixed_ms

    def __str__(self) -> str:
        mixed = "" if self.mixed_ms is None else f", {self.mixed_ms:.2f} ms with a part of a prompt"
        return f"{self.decode_ms:.2f} ms a tick{mixed}"


@attrs.frozen(kw_only=True)
class LayoutChoice:
    """A layout, and why it was taken."""

    layout: Layout
    why: Literal["only one", "by rule", "measured", "measured before", "no time", "no room"]
    """``only one``: the settings leave nothing open.  ``by rule``: measuring was not wanted, or not possible with so little
    context.  ``measured before``: by an earlier run.  ``no time``: it would have taken too long.  ``no room``: there was not
    the memory for what had been chosen.  With the last two it is the rule's layout as well."""
    measured: Sequence[MeasuredLayout] = ()
    """What could be measured, the rule's layout first."""


class LayoutCache(Protocol):
    """What remembers choices from one run to the next."""

    def load(self, environment: tuple[object, ...]) -> str | None:
        """The name of the layout that was chosen under ``environment``."""

    def save(self, environment: tuple[object, ...], choice: LayoutChoice) -> None:
        """For the next run."""


def default_layout(shape: Shape, settings: config.Model, *, on_gpu: bool, memory_bytes: int) -> Layout:
    """Lay the memory out for ``settings.parallel`` sequences, by rule.

    Args:
        on_gpu: layers of the model are on one.
        memory_bytes: of the machine.

    Raises:
        KvCacheTooSmall: ``kv_mem_limit_mb`` is too little.
    """
    unified = on_gpu if settings.kv_unified == "auto" else settings.kv_unified == "on"
    flash_attn = settings.flash_attn
    if flash_attn == "auto" and not on_gpu and not unified and not _quantised(settings):
        flash_attn = "off"
    return _sized(shape, settings, unified, flash_attn, on_gpu=on_gpu, memory_bytes=memory_bytes)


def candidates(
    shape: Shape, settings: config.Model, *, on_gpu: bool, memory_bytes: int, windowed: bool
) -> tuple[Layout, ...]:
    """What ``settings`` leave open: the rule's layout first, and what might be quicker.

    Not among them is a layout in which a client could do less.  So apart from each other, sequences must have the tokens
    that a request has by default; and what can go on from a sliding window's past must not lose that, as it would where
    sequences share cells.

    Args:
        windowed: the model has layers with a sliding window.

    Raises:
        KvCacheTooSmall: as ``layout``, for the rule's.
    """
    rule = default_layout(shape, settings, on_gpu=on_gpu, memory_bytes=memory_bytes)
    found = [rule]
    for unified, flash_attn in ((False, "off"), (False, "auto"), (True, "auto")):
        if settings.kv_unified != "auto" and unified != rule.unified:
            continue
        if settings.flash_attn != "auto":
            flash_attn = settings.flash_attn
        elif flash_attn == "off" and _quantised(settings):
            continue
        try:
            other = _sized(shape, settings, unified, flash_attn, on_gpu=on_gpu, memory_bytes=memory_bytes)
        except KvCacheTooSmall:
            continue
        if unified != rule.unified:
            share = min(shape.n_ctx_train, DEFAULT_WINDOW)
            less = windowed if unified else other.n_ctx < share * settings.parallel
            if less or settings.parallel == 1:  # the same thing, where there is one sequence
                continue
        if other not in found:
            found.append(other)
    return tuple(found)


def choose(measured: Sequence[MeasuredLayout]) -> Layout:
    """The layout to take: that of ``measured[0]``, which is the rule's, unless another is clearly cheaper."""
    rule = measured[0]
    best = min(measured, key=lambda each: each.cost_ms)
    return best.layout if best.cost_ms < CLEARLY * rule.cost_ms else rule.layout


def _quantised(settings: config.Model) -> bool:
    """llama.cpp reads a quantised V with flash attention only."""
    return settings.type_v != "f16"


def _sized(
    shape: Shape, settings: config.Model, unified: bool, flash_attn: str, *, on_gpu: bool, memory_bytes: int
) -> Layout:
    window = min(shape.n_ctx_train, DEFAULT_WINDOW)
    affordable = int(SHARE_OF_MEMORY * memory_bytes / max(1.0, shape.kv_bytes_per_token))
    n_ctx = settings.ctx or max(min(window * settings.parallel, affordable), window)
    if settings.kv_mem_limit_mb:
        n_ctx = min(n_ctx, _cells_within(settings, shape, unified=unified))
    n_ubatch = settings.batch_tokens if on_gpu else min(settings.batch_tokens, CPU_UBATCH)
    return Layout(n_ctx=n_ctx, unified=unified, flash_attn=flash_attn, n_ubatch=n_ubatch)


def _cells_within(settings: config.Model, shape: Shape, *, unified: bool) -> int:
    """As many as ``kv_mem_limit_mb`` has room for; llama.cpp would round any other number up."""
    most = int(settings.kv_mem_limit_mb * 1_000_000 / max(1.0, shape.kv_bytes_per_token))
    block = KV_CELL_MULTIPLE if unified else KV_CELL_MULTIPLE * settings.parallel
    if most < block:
        raise KvCacheTooSmall(
            f"kv_mem_limit_mb {settings.kv_mem_limit_mb} has room for {most} tokens; {settings.parallel} sequences need "
            f"{block} at least: raise it to {1 + int(block * shape.kv_bytes_per_token / 1e6)}, or lower parallel"
        )
    return most - most % block


def max_checkpoints(n_bytes: int, *, n_sequences: int, memory_bytes: int) -> int:
    """How many checkpoints of ``n_bytes`` are kept at most: what all sequences can use, if there is the memory."""
    return min(MAX_PER_SEQUENCE * n_sequences, int(CHECKPOINTS_SHARE_OF_MEMORY * memory_bytes / max(1, n_bytes)))


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
