"""Fit a model to memory: which layers on the GPU, how much context, which KV type and which batch.

``fit`` is a function of sizes and free memory.  It asks no device and no clock: ``engine.open_fitted`` measures, and a caller
with several models passes the part of the memory that this one may have.

What the user has set is kept.  What is left to choose is given up in this order, as little as possible:

1. context of a request, down to ``FLOOR_TOKENS``
2. KV cache in Q8_0 in place of F16, where flash attention is allowed
3. tokens of a batch
4. layers on the GPU; without any layer there, the GPU is not used at all
5. the encoder of pictures next to the model: it starts with the first picture, if there is memory then
6. context of a request, down to ``LEAST_TOKENS``
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import attrs
import msgspec

from uma_trio import config
from uma_trio.engine.layout import KV_MEMORY_SHARE, Environment, KvCacheTooSmall, Layout, Shape, default_layout
from uma_trio.engine_link.defaults import (
    DEFAULT_WINDOW,
    FLOOR_TOKENS,
    KV_CELL_MULTIPLE,
    LARGE_BATCH,
    SMALL_BATCH,
    with_defaults,
)
from uma_trio.engine_link.devices import CPU_ALONE, MIB, size
from uma_trio.errors import ErrorWithRemedy
from uma_trio.models.sizes import ModelSizes

GPU_WINDOW: Final = 32_768
"""Longest context of a request that is chosen, with per-sequence KV and all layers on GPUs.  Otherwise, and where
``KV_MEMORY_SHARE`` of their free memory has no room for more, it is ``DEFAULT_WINDOW``."""
LEAST_TOKENS: Final = 512
"""Context of a request below which a model is of no use."""
RESERVE_SHARE: Final = 0.06
MIN_RESERVE: Final = 64 * MIB
MAX_RESERVE: Final = 1024 * MIB
"""What stays free on each device without ``fit_reserve_mb``: a share of what is free, within these bounds."""

SCORE_BYTES: Final = 2
"""A score of attention that ggml's CPU backend copies, besides the compute buffers."""
PROCESS_BYTES: Final = 24 * MIB
"""Memory of the engine's process, besides what it has before the model is loaded."""
TOKEN_BYTES: Final = 512
"""Memory for one token of the vocabulary: its entries in the tokenizers of the engine and of the daemon."""
ROW_BYTES: Final = 24
"""Memory for one token of the vocabulary for each sequence: logits, and their copies while sampling."""
GPU_BYTES: Final = 128 * MIB
"""What a backend takes on a GPU besides buffers: kernels, workspaces of its libraries."""

BLOCK_VALUES: Final = 32

DRAFT_BATCH: Final = 512
"""Most tokens in a batch of a draft model."""

CAUTION: Final = 2.0
"""Factor on our own estimates of compute buffers; llama.cpp's own figures need none."""


class DoesNotFit(ErrorWithRemedy):
    """The model needs more memory than is free, whatever the settings leave to choose."""


class Memory(msgspec.Struct, frozen=True):
    """The memory of a device, or the machine's own."""

    name: str
    free_bytes: int
    shares_ram: bool = False
    """It is a part of the machine's memory, as that of an integrated GPU."""
    correction: float = 1.0
    """What earlier loads of the model took here, as a multiple of the prediction."""

    def usable_bytes(self, settings: config.Model) -> int:
        """What the model may take."""
        reserve = settings.fit_reserve_mb * config.MB
        if not reserve:
            reserve = int(min(max(RESERVE_SHARE * self.free_bytes, MIN_RESERVE), MAX_RESERVE))
        most = settings.memory_limit_mb * config.MB or self.free_bytes
        return max(0, min(self.free_bytes - reserve, most))


Compute = Callable[[config.Model, Layout], Sequence[int]]
"""Bytes of the compute buffers on each memory, the machine's own first.  Raises ``Unsupported``."""


@attrs.frozen(kw_only=True)
class Companions:
    """What is loaded with a model."""

    draft: ModelSizes | None = None
    """Sizes of the draft model."""
    draft_compute: Compute | None = None
    """Its compute buffers."""
    adapter_bytes: int = 0
    """Weights of all adapters, which go where the model's layers are."""
    projector_bytes: int = 0
    """What encoding pictures takes, in a process of its own: on the first GPU if the model has layers on one, unless
    ``mmproj_offload`` is off."""
    encoder_waits: bool = False
    """The encoder of pictures has no room next to the model."""

    @property
    def without_encoder(self) -> Companions:
        """What is loaded if the encoder of pictures waits for the first of them."""
        return attrs.evolve(self, projector_bytes=0, encoder_waits=self.encoder_waits or self.projector_bytes > 0)


NO_COMPANIONS: Final = Companions()


@attrs.frozen(kw_only=True)
class Arrangement:
    """What the settings fix of where the weights go."""

    shares: tuple[float, ...] = ()
    """Share of the layers for each GPU; empty: in proportion to their free memory."""
    moved: tuple[tuple[str, int], ...] = ()
    """Patterns for names of tensors, each with the index of the memory that these go to.  The first match counts."""


PLAIN: Final = Arrangement()
ANY_GPU: Final = Environment(on_gpu=True)


class Unsupported(Exception):
    """llama.cpp refuses these settings for this model."""


@attrs.frozen(kw_only=True)
class Fit:
    """What was chosen, and what it takes."""

    settings: config.Model
    """With nothing left to choose."""
    layout: Layout
    n_layers: int
    """Layers of the model, with the output."""
    on_gpu: int
    """How many of them are on GPUs."""
    needs: tuple[int, ...]
    """Predicted bytes on each memory, the machine's own first."""
    memories: tuple[Memory, ...]
    gave_up: tuple[str, ...] = ()
    """What there was no room for, in words."""
    encoder_waits: bool = False
    """The encoder of pictures starts with the first of them."""

    @property
    def choice(self) -> str:
        """The choice in words, such as "ctx 8192 x 8 requests, KV q8_0, 24 of 32 layers on GPU: 3.1 of 3.6 GiB free"."""
        chosen = self.settings
        kv = chosen.type_k if chosen.type_k == chosen.type_v else f"{chosen.type_k}/{chosen.type_v}"
        layers = f", {self.on_gpu} of {self.n_layers} layers on GPU" if len(self.memories) > 1 else ""
        if self.layout.unified and chosen.parallel > 1:
            ctx = f"ctx {self.layout.n_cells(chosen.parallel)} for {chosen.parallel} requests together"
        else:
            requests = "request" if chosen.parallel == 1 else "requests"
            ctx = f"ctx {self.layout.n_cells(chosen.parallel) // chosen.parallel} x {chosen.parallel} {requests}"
        return f"{ctx}, KV {kv}{layers}: {self.room}"

    @property
    def room(self) -> str:
        """What the model takes of what is free, where it takes most."""
        gpus = [(n, memory) for n, memory in zip(self.needs[1:], self.memories[1:], strict=True) if n]
        used = gpus or [(self.needs[0], self.memories[0])]
        limit = self.settings.memory_limit_mb * config.MB
        n_bytes, free_bytes = sum(n for n, _ in used), sum(memory.free_bytes for _, memory in used)
        if limit and limit < min(memory.free_bytes for _, memory in used):
            return f"{_of(n_bytes, limit * len(used))} allowed"
        return f"{_of(n_bytes, free_bytes)} free"

    @property
    def why(self) -> str:
        """The reason of the choice."""
        return f"no room for {', '.join(self.gave_up)}" if self.gave_up else "everything fits"


def fit(
    sizes: ModelSizes,
    settings: config.Model,
    memories: Sequence[Memory],
    compute: Compute,
    *,
    min_batch: int = SMALL_BATCH,
    companions: Companions = NO_COMPANIONS,
    arrangement: Arrangement = PLAIN,
    environment: Environment = ANY_GPU,
) -> Fit:
    """Choose what ``settings`` leave open, so that the model fits.

    Args:
        memories: the machine's own, then those of the GPUs that llama.cpp would use.
        min_batch: tokens that a batch must have at least.
        companions: what must fit with the model.
        arrangement: where weights go, whatever else is chosen.
        environment: decide the layout of the KV cache, if the model goes to GPUs.

    Raises:
        DoesNotFit: nothing fits.  The error has numbers, and names a setting that would help if there is one.
        KvCacheTooSmall: ``kv_mem_limit_mb`` is too small.
    """
    search = _Search(sizes, settings, tuple(memories), compute, min_batch, companions, arrangement, environment)
    best = search.best()
    if best is not None:
        return best
    raise _refusal(search.without_encoder)


def place_layers(n_layers: int, gpu_layers: int, shares: Sequence[float]) -> list[int]:
    """The GPU of each layer, the output last; -1 for the CPU.

    Args:
        n_layers: with the output.
        gpu_layers: -1 for all.
        shares: of each GPU, which are its free bytes where nobody has set them.

    Source: llama-model.cpp, ``load_tensors``.
    """
    wanted = n_layers if gpu_layers < 0 else min(gpu_layers, n_layers)
    total = sum(shares)
    if not wanted or not total:
        return [-1] * n_layers
    ends = [sum(shares[: n + 1]) / total for n in range(len(shares))]
    placed = [-1] * (n_layers - wanted)
    for layer in range(wanted):
        placed.append(next((gpu for gpu, end in enumerate(ends) if layer / wanted < end), len(ends) - 1))
    return placed


def layer_of(tensor: str, n_layers: int) -> int | None:
    """The layer of a tensor by its name: ``n_layers`` for the output, ``None`` for the input, which stays on the CPU."""
    if tensor.startswith("blk."):
        layer = tensor.split(".")[1]
        return int(layer) if layer.isdecimal() and int(layer) < n_layers else None
    return n_layers if tensor.startswith("output") else None


def estimate_compute(sizes: ModelSizes) -> Compute:
    """Compute buffers by rule: more than llama.cpp takes."""

    def estimated(settings: config.Model, layout: Layout) -> tuple[int, ...]:
        rows = layout.n_ubatch
        cells = layout.n_cells(settings.parallel) // (1 if layout.unified else settings.parallel)
        of_row = 3 * sizes.widest + 8 * sizes.n_embd + sizes.n_vocab
        attention = cells * (2 if layout.flash_attn == "on" else 1 + 2 * sizes.n_head)
        n_bytes = int(CAUTION * 4 * rows * (of_row + attention))
        return (n_bytes,) * 16  # on each device

    return estimated


@attrs.frozen
class _Stage:
    """Settings of one attempt to fit.  Each attempt gives up more than the one before."""

    type_k: Literal["auto", "f16", "q8_0", "q4_0"]
    type_v: Literal["auto", "f16", "q8_0", "q4_0"]
    batch_tokens: int
    floor_tokens: int
    """Least context of a request."""


@attrs.frozen(slots=False)
class _Search:
    """Looks for settings that fit: for each number of layers on GPUs, each stage, the most context."""

    sizes: ModelSizes
    wanted: config.Model
    memories: tuple[Memory, ...]
    compute: Compute
    min_batch: int
    companions: Companions
    arrangement: Arrangement
    environment: Environment

    def best(self) -> Fit | None:
        """The first choice that fits, in the order of giving up; with ``LARGE_BATCH`` if that takes nothing from it."""
        first = self._first()
        if first is None or first.gave_up or self.wanted.batch_tokens or not self.environment.computes_masked_cells:
            return first
        if first.on_gpu < first.n_layers:
            return first
        chosen = first.settings
        large = _Stage(chosen.type_k, chosen.type_v, LARGE_BATCH, LEAST_TOKENS)
        return self._fit(large, first.on_gpu, chosen.ctx) or first

    def _first(self) -> Fit | None:
        """The first choice that fits, in the order of giving up."""
        *stages, last = self._stages()
        attempts = [(self, stages), (self.without_encoder, [last])]
        if self.companions.projector_bytes:
            attempts.insert(1, (self.without_encoder, stages))
        for search, search_stages in attempts:
            for n_gpu in self._gpu_layers():
                for stage in search_stages:
                    if (fitting := search._fitting(stage, n_gpu)) is not None:
                        return fitting
        return None

    @property
    def without_encoder(self) -> _Search:
        """The same search without the encoder of pictures next to the model."""
        return attrs.evolve(self, companions=self.companions.without_encoder)

    def _stages(self) -> Iterator[_Stage]:
        wanted, plain = self.wanted, with_defaults(self.wanted)
        type_k, type_v, batch = plain.type_k, plain.type_v, plain.batch_tokens
        yield _Stage(type_k, type_v, batch, FLOOR_TOKENS)
        can_quantize = wanted.flash_attn != "off" and not any(width % BLOCK_VALUES for width in self.sizes.head_widths)
        if can_quantize and "auto" in (wanted.type_k, wanted.type_v):
            type_k = "q8_0" if wanted.type_k == "auto" else type_k
            type_v = "q8_0" if wanted.type_v == "auto" else type_v
            yield _Stage(type_k, type_v, batch, FLOOR_TOKENS)
        small = max(SMALL_BATCH, self.min_batch)
        if not wanted.batch_tokens and small < batch:
            batch = small
            yield _Stage(type_k, type_v, batch, FLOOR_TOKENS)
        yield _Stage(type_k, type_v, batch, LEAST_TOKENS)

    def _gpu_layers(self) -> Iterator[int]:
        """How many layers to have on GPUs, the most first."""
        n_layers = self.sizes.n_layers
        if len(self.memories) == 1 or self.wanted.gpu_layers == 0:
            yield 0
        elif self.wanted.gpu_layers > 0:
            yield min(self.wanted.gpu_layers, n_layers)
        else:
            yield from range(n_layers, -1, -1)

    def _fitting(self, stage: _Stage, n_gpu: int) -> Fit | None:
        """The most context that fits."""
        least = self._fit(stage, n_gpu, lower := self._ctx(stage.floor_tokens))
        if least is None:
            return None
        upper = self._ctx(self._most_tokens(stage, n_gpu))
        step = KV_CELL_MULTIPLE * (1 if least.layout.unified else self.wanted.parallel)
        if upper == lower or (most := self._fit(stage, n_gpu, upper)) is not None:
            return least if upper == lower else most
        longest = least
        low, high = lower // step, upper // step
        while high > low:  # low fits, and what is above high does not
            middle = (low + high + 1) // 2
            tried = self._fit(stage, n_gpu, middle * step)
            if tried is None:
                high = middle - 1
            else:
                low, longest = middle, tried
        return longest

    def _most_tokens(self, stage: _Stage, n_gpu: int) -> int:
        """The longest context of a request that is chosen where nobody has set it.

        With per-sequence KV no request can have more than its share.  So with all layers on GPUs that may be more than
        ``DEFAULT_WINDOW``.
        """
        plain = attrs.evolve(self.wanted, type_k=stage.type_k, type_v=stage.type_v)
        ctx = self._ctx(DEFAULT_WINDOW)
        if n_gpu < self.sizes.n_layers or self.layout(attrs.evolve(plain, ctx=ctx), n_gpu).unified:
            return DEFAULT_WINDOW
        affordable = KV_MEMORY_SHARE * sum([memory.free_bytes for memory in self.memories[1:]])
        tokens = int(affordable / max(1.0, self.sizes.kv_bytes_per_token(plain)) / self.wanted.parallel)
        return min(max(DEFAULT_WINDOW, tokens - tokens % KV_CELL_MULTIPLE), GPU_WINDOW)

    def _ctx(self, tokens: int) -> int:
        """The setting ``ctx`` for this many tokens of each request."""
        return self.wanted.ctx or min(tokens, self.sizes.n_ctx_train or tokens) * self.wanted.parallel

    def _fit(self, stage: _Stage, n_gpu: int, ctx: int) -> Fit | None:
        settings = attrs.evolve(
            self.wanted,
            fit="off",
            ctx=ctx,
            type_k=stage.type_k,
            type_v=stage.type_v,
            batch_tokens=stage.batch_tokens,
            gpu_layers=self._gpu_setting(n_gpu),
        )
        if n_gpu == 0 and self.wanted.gpu_layers != 0 and len(self.memories) > 1:
            settings = _without_gpus(settings)
        try:
            layout = self.layout(settings, n_gpu)
            needs = self.needs(settings, layout, n_gpu)
        except Unsupported:
            return None
        room = [memory.usable_bytes(self.wanted) for memory in self.memories]
        if any(need > most for need, most in zip(needs, room, strict=True)):
            return None
        return Fit(
            settings=settings,
            layout=layout,
            n_layers=self.sizes.n_layers,
            on_gpu=n_gpu,
            needs=needs,
            memories=self.memories,
            gave_up=tuple(self._gave_up(settings, n_gpu)),
            encoder_waits=self.companions.encoder_waits,
        )

    def _gpu_setting(self, n_gpu: int) -> int:
        if len(self.memories) == 1:
            return self.wanted.gpu_layers
        return -1 if n_gpu == self.sizes.n_layers else n_gpu

    def layout(self, settings: config.Model, n_gpu: int) -> Layout:
        """The layout by rule, with which the model is fitted."""
        n_bytes = self.sizes.kv_bytes_per_token(settings)
        shape = Shape(n_ctx_train=self.sizes.n_ctx_train, kv_bytes_per_token=n_bytes)
        return default_layout(shape, settings, attrs.evolve(self.environment, on_gpu=n_gpu > 0), memory_bytes=0)

    def needs(self, settings: config.Model, layout: Layout, n_gpu: int) -> tuple[int, ...]:
        """Bytes that the model takes on each memory."""
        sizes, n_cells = self.sizes, layout.n_cells(settings.parallel)
        placed = place_layers(sizes.n_layers, n_gpu, self._shares)
        n_bytes_on = [0] * len(self.memories)
        weights = (*sizes.layers, sizes.output_bytes if placed[-1] >= 0 else sizes.output_cpu_bytes)
        for layer, gpu in enumerate(placed):
            n_bytes_on[gpu + 1] += weights[layer]
            if layer < len(sizes.layers):
                n_bytes_on[gpu + 1] += sizes.cache_bytes(settings, layer, n_cells)
        for n_bytes, of_layer, memory in self._moved:
            n_bytes_on[0 if of_layer is None else placed[of_layer] + 1] -= n_bytes
            n_bytes_on[memory] += n_bytes
        buffers = self._with_companions(settings, layout, placed, n_bytes_on)
        for at in range(1, len(n_bytes_on)):
            if n_bytes_on[at]:
                n_bytes_on[at] += buffers[at] + GPU_BYTES
        if -1 in placed[:-1] and layout.flash_attn == "off":  # ggml copies the scores as F16 to multiply them with V
            of_stream = n_cells // (1 if layout.unified else settings.parallel)
            n_bytes_on[0] += layout.n_ubatch * of_stream * sizes.n_head * SCORE_BYTES
        n_bytes_on[0] += sizes.input_bytes + buffers[0] + PROCESS_BYTES
        n_bytes_on[0] += sizes.n_vocab * (TOKEN_BYTES + ROW_BYTES * settings.parallel)
        n_bytes_on = [math.ceil(n * memory.correction) for n, memory in zip(n_bytes_on, self.memories, strict=True)]
        n_bytes_on[0] += sum(n for n, memory in zip(n_bytes_on, self.memories, strict=True) if memory.shares_ram)
        return tuple(n_bytes_on)

    @property
    def _shares(self) -> Sequence[float]:
        return self.arrangement.shares or [memory.free_bytes for memory in self.memories[1:]]

    @functools.cached_property
    def _moved(self) -> list[tuple[int, int | None, int]]:
        """Tensors that do not go where their layer goes: bytes, layer (``None`` for the input), index of the memory."""
        moved = []
        patterns = [(re.compile(pattern), memory) for pattern, memory in self.arrangement.moved]
        for name, n_bytes in self.sizes.tensors.items() if patterns else ():
            for pattern, memory in patterns:
                if pattern.search(name):
                    moved.append((n_bytes, layer_of(name, len(self.sizes.layers)), memory))
                    break
        return moved

    def _with_companions(
        self, settings: config.Model, layout: Layout, placed: Sequence[int], n_bytes_on: list[int]
    ) -> Sequence[int]:
        """Add the weights and caches of what is loaded with the model to ``n_bytes_on``; return all compute buffers."""
        buffers = [*self.compute(settings, layout)]
        for gpu in placed[:-1]:
            n_bytes_on[gpu + 1] += math.ceil(self.companions.adapter_bytes / max(1, len(placed) - 1))
        n_bytes_on[1 if settings.mmproj_offload and max(placed) >= 0 else 0] += self.companions.projector_bytes
        draft = self.companions.draft
        if draft is None:
            return buffers
        own = attrs.evolve(settings, type_k="f16", type_v="f16")
        own_layout = attrs.evolve(layout, n_ubatch=min(DRAFT_BATCH, settings.batch_tokens))
        weights = (*draft.layers, draft.output_bytes if placed[-1] >= 0 else draft.output_cpu_bytes)
        for layer, gpu in enumerate(place_layers(draft.n_layers, settings.gpu_layers, self._shares)):
            n_bytes_on[gpu + 1] += weights[layer]
            if layer < len(draft.layers):
                n_bytes_on[gpu + 1] += draft.cache_bytes(own, layer, own_layout.n_cells(settings.parallel))
        n_bytes_on[0] += draft.input_bytes + draft.n_vocab * TOKEN_BYTES
        compute = self.companions.draft_compute or estimate_compute(draft)
        return [a + b for a, b in zip(buffers, compute(own, own_layout), strict=False)]

    def _gave_up(self, settings: config.Model, n_gpu: int) -> Iterator[str]:
        plain = with_defaults(self.wanted)
        whole = self._ctx(DEFAULT_WINDOW)
        if settings.ctx < whole:
            yield f"ctx {whole // settings.parallel} for each request"
        if (settings.type_k, settings.type_v) != (plain.type_k, plain.type_v):
            yield "KV f16"
        if settings.batch_tokens < plain.batch_tokens:
            yield f"batches of {plain.batch_tokens} tokens"
        if n_gpu < max(self._gpu_layers()):
            yield "all layers on the GPU"
        if self.companions.encoder_waits:
            yield "the encoder of pictures, which starts with the first one"


def _without_gpus(settings: config.Model) -> config.Model:
    """``settings`` without any GPU, for a model whose layers are all on the CPU.

    On a GPU without layers llama.cpp would still allocate buffers, to compute large products there.  A GPU that has no
    room for a single layer has none for these buffers either, and the load would fail.
    """
    plain = config.Model()
    return attrs.evolve(
        settings,
        devices=CPU_ALONE,
        split_mode=plain.split_mode,
        tensor_split=plain.tensor_split,
        main_gpu=plain.main_gpu,
        n_cpu_moe=plain.n_cpu_moe,
        override_tensor=plain.override_tensor,
    )


# -- what does not fit ------------------------------------------------------------------------------


def _refusal(search: _Search) -> DoesNotFit:
    """Say what is missing where, and which setting would help."""
    wanted, sizes = search.wanted, search.sizes
    *_, last = search._stages()
    n_gpu = min(search._gpu_layers())
    settings = attrs.evolve(
        wanted,
        ctx=search._ctx(last.floor_tokens),
        type_k=last.type_k,
        type_v=last.type_v,
        batch_tokens=last.batch_tokens,
    )
    layout = search.layout(settings, n_gpu)
    free = search.memories[0]
    kv_bytes = layout.n_cells(settings.parallel) * sizes.kv_bytes_per_token(settings)
    help_ = _remedy(search)
    if n_gpu and (short := _short_gpu(search, settings, layout, n_gpu)) is not None:
        reason = (
            f"{n_gpu} of {sizes.n_layers} layers take {_gib(short[0])}, and "
            f"{_free(short[1], wanted, f' on {short[1].name}')}"
        )
    elif wanted.ctx and kv_bytes > free.usable_bytes(wanted):
        reason = (
            f"a KV cache of {layout.n_ctx} tokens takes {kv_bytes / 1e9:.1f} GB in {last.type_k}, and {free.free_bytes / 1e9:.1f} GB of "
            "memory are free"
        )
    elif sizes.weight_bytes > free.usable_bytes(wanted) and not n_gpu:
        reason = f"the weights take {_gib(sizes.weight_bytes)}, and {_free(free, wanted)}"
    else:
        try:
            need = search.needs(settings, layout, n_gpu)[0]
        except Unsupported as error:
            return DoesNotFit(f"llama.cpp refuses these settings ({error})", "change those of the section model")
        tokens = f"{layout.n_ctx // wanted.parallel} tokens of context for each of {wanted.parallel} requests"
        reason = f"the model with {tokens} takes {_gib(need)}, and {_free(free, wanted)}"
    return DoesNotFit(reason, help_)


def _short_gpu(search: _Search, settings: config.Model, layout: Layout, n_gpu: int) -> tuple[int, Memory] | None:
    """A GPU with too little memory, and what it would need."""
    try:
        needs = search.needs(settings, layout, n_gpu)
    except Unsupported:
        return None
    both = [*zip(needs, search.memories, strict=True)][1:]
    return next(((need, memory) for need, memory in both if need > memory.usable_bytes(search.wanted)), None)


def _remedy(search: _Search) -> str:
    """A setting that helps alone; verified by fitting again without it."""
    wanted = search.wanted

    def without(**changes: Any) -> Fit | None:
        try:
            return attrs.evolve(search, wanted=attrs.evolve(wanted, **changes)).best()
        except KvCacheTooSmall:
            return None

    help_: list[str] = []
    if (
        search.arrangement.shares
        and attrs.evolve(search, arrangement=attrs.evolve(search.arrangement, shares=())).best() is not None
    ):
        help_.append("leave out --tensor-split, so that each device gets what fits there")
    if wanted.ctx and (alternative := without(ctx=0)) is not None:
        help_.append(f"lower --ctx to {alternative.layout.n_ctx} or less")
    quantized = "auto" not in (wanted.type_k, wanted.type_v) and (wanted.type_k, wanted.type_v) != ("q8_0", "q8_0")
    if quantized and without(type_k="q8_0", type_v="q8_0") is not None:
        help_.append("set --type-k and --type-v to q8_0")
    if wanted.gpu_layers > 0 and (alternative := without(gpu_layers=-1)) is not None:
        help_.append(f"lower --gpu-layers to {alternative.on_gpu}, or leave it out")
    if wanted.gpu_layers == 0 and len(search.memories) > 1 and without(gpu_layers=-1) is not None:
        help_.append("leave out --gpu-layers, so that layers go to the GPU")
    if wanted.batch_tokens > SMALL_BATCH and without(batch_tokens=0) is not None:
        help_.append("leave out --batch-tokens")
    if wanted.memory_limit_mb and without(memory_limit_mb=0) is not None:
        help_.append("raise --memory-limit-mb")
    if wanted.fit_reserve_mb and without(fit_reserve_mb=0) is not None:
        help_.append("lower --fit-reserve-mb")
    parallel = wanted.parallel
    while not help_ and parallel > 1:
        parallel //= 2
        if without(parallel=parallel) is not None:
            help_.append(f"lower --parallel to {parallel}")
    if help_:
        return ", or ".join(help_)
    slow = ", or --fit off, which reads the weights from disk while it computes" if wanted.mmap else ""
    return f"take a smaller model or a stronger quantization{slow}"


def _of(n_bytes: int, free_bytes: int) -> str:
    if free_bytes < 1024 * MIB:
        return f"{n_bytes / MIB:.0f} of {free_bytes / MIB:.0f} MiB"
    return f"{n_bytes / MIB / 1024:.1f} of {free_bytes / MIB / 1024:.1f} GiB"


def _free(memory: Memory, settings: config.Model, where: str = "") -> str:
    usable = memory.usable_bytes(settings)
    limit = settings.memory_limit_mb * config.MB
    if limit and usable == limit:
        return f"{_gib(usable)} are allowed{where} (memory_limit_mb)"
    return f"{_gib(memory.free_bytes)} are free{where}, {_gib(memory.free_bytes - usable)} of it a reserve"


def _gib(n_bytes: int) -> str:
    return size(n_bytes)
