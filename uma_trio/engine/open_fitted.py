"""Open an engine whose model fits: measure the memory, choose (``engine.fit``), load, and remember what it took."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec

import llama_abi
from llama_abi.backends import OnOpen
from uma_trio import config
from uma_trio.engine import saved_layouts
from uma_trio.engine.fit import (
    Arrangement,
    Companions,
    Compute,
    DoesNotFit,
    Fit,
    Memory,
    Unsupported,
    estimate_compute,
    fit,
)
from uma_trio.engine.layout import (
    ContextTooLarge,
    Environment,
    KvCacheTooSmall,
    Layout,
    Shape,
    candidates,
)
from uma_trio.engine.layout_choice import context_options, environment_of
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.placement import ModelDevices, PlacementError, library_environment, open_library, place
from uma_trio.engine.pooling import PoolingEngine
from uma_trio.engine_link.defaults import SHARES
from uma_trio.engine_link.messages import NO_MEMORY, EngineError, FitReport, LoadError, Start
from uma_trio.models.fingerprint import model_fingerprint
from uma_trio.models.packaged import starts_with_first_picture
from uma_trio.models.projector import encoding_bytes
from uma_trio.models.sizes import ModelSizes
from uma_trio.processes.machine import anonymous_bytes, free_memory_bytes

CLEARLY: Final = 0.5
"""A model that takes less than this share of the free memory by a cautious estimate fits without a closer look."""

MAX_CORRECTION: Final = 1.5
"""What was taken beyond this multiple of what was predicted is another program's."""
WEIGHT_OF_NEW: Final = 0.5
"""Weight of the latest load, against what was learned before."""

LOAD_ERRORS: Final = (llama_abi.LlamaError, llama_abi.LibraryError, KvCacheTooSmall, ContextTooLarge, PlacementError)
"""What opening an engine raises: about the model, or about the library."""

RAM: Final = "RAM"


def is_about_memory(error: Exception) -> bool:
    """Whether a model could not be loaded because memory was short."""
    return isinstance(error, MemoryError | ContextTooLarge) or NO_MEMORY.search(str(error)) is not None


def open_fitted(start: Start, on_progress: Callable[[float], bool] | None = None) -> LlamaEngine:
    """Load the model that ``start`` names with settings with which it fits.  Blocks until it is loaded.

    Without sizes of the model, or with ``fit`` off, the settings are taken as they are.

    Raises:
        DoesNotFit: the model cannot fit; nothing was loaded.
        PlacementError: the settings and the devices do not go together; nothing was loaded.
        KvCacheTooSmall, llama_abi.LlamaError, llama_abi.LibraryError: see ``LlamaEngine``.
    """
    settings, sizes = start.settings, start.sizes
    load = functools.partial(
        LlamaEngine,
        start.path,
        on_progress=on_progress,
        layout_cache=saved_layouts.FileLayoutCache(start.path, start.cache_dir),
        adapters=start.adapters,
        target_itl_ms=start.target_itl_ms,
    )
    if settings.fit == "off" or sizes is None:
        return load(settings, layouts=start.layouts or None)
    library = open_library(settings)
    where = place(settings, library)
    name = model_fingerprint(start.path, "memory", *library_environment(library))
    learned = saved_layouts.load_corrections(name, start.cache_dir)
    memories = [
        msgspec.structs.replace(
            memory,
            free_bytes=int(SHARES[start.attempt] * memory.free_bytes),
            correction=min(max(learned.get(memory.name, 1.0), 1.0), MAX_CORRECTION),
        )
        for memory in measure(library, where)
    ]
    fitted, fitting = choose(library, start, sizes, memories, where)
    before, anonymous = measure(library, where), anonymous_bytes()
    engine = load(fitted.settings, layouts=fitting)
    after = measure(library, where)
    taken = {old.name: max(0, old.free_bytes - new.free_bytes) for old, new in zip(before, after, strict=True)}
    taken[RAM] = max(0, anonymous_bytes() - anonymous)
    corrections = {
        memory.name: corrected(memory, need, taken[memory.name])
        for memory, need in zip(fitted.memories, fitted.needs, strict=True)
        if need
    }
    if any(abs(value - learned.get(name_of_memory, 1.0)) > 0.01 for name_of_memory, value in corrections.items()):
        saved_layouts.save_corrections(name, learned | corrections, start.cache_dir)
    predicted = {memory.name: need for memory, need in zip(fitted.memories, fitted.needs, strict=True)}
    free = {memory.name: memory.free_bytes for memory in fitted.memories}
    engine.fit = FitReport(fitted.choice, fitted.why, free, predicted, taken, fitted.encoder_waits)
    return engine


def corrected(memory: Memory, predicted: int, taken: int) -> float:
    """The correction of ``memory`` after a load.

    It never falls below 1: on a CPU, what is taken at once is less than what computing takes later.
    """
    plain = predicted / memory.correction
    ratio = taken / plain if plain else 1.0
    if ratio > MAX_CORRECTION:
        return memory.correction
    return memory.correction + WEIGHT_OF_NEW * (max(1.0, ratio) - memory.correction)


def measure(library: llama_abi.Library, where: ModelDevices | None = None) -> list[Memory]:
    """The memory that is free now: this machine's, and that of the devices of ``where``; ``None`` for all GPUs.

    Devices that divide each layer between them have one memory together: what the model may take in all, so that the
    part of each device fits there.
    """
    where = place(config.Model(), library) if where is None else where
    now = {device.name: device for device in library.devices()}
    memories = [
        Memory(
            device.name,
            now[device.name].memory_free,
            shares_ram=device.type is llama_abi.DeviceType.IGPU or sys.platform == "darwin",
        )
        for device in _with_memory(where)
    ]
    if where.is_divided and len(memories) > 1:
        shares = _shares(where) or [1.0] * len(memories)
        parts = [
            memory.free_bytes * sum(shares) / share for memory, share in zip(memories, shares, strict=True) if share
        ]
        memories = [Memory("+".join([memory.name for memory in memories]), int(min(parts)), memories[0].shares_ram)]
    return [Memory(RAM, free_memory_bytes(swap=False)), *memories]


def _with_memory(where: ModelDevices) -> list[llama_abi.Device]:
    """The devices that say how much memory they have."""
    return [device for device in where.devices if device.memory_total]


def _shares(where: ModelDevices) -> list[float]:
    """The shares of those devices; empty where llama.cpp chooses."""
    shares = where.options.tensor_split
    return [share for device, share in zip(where.devices, shares, strict=bool(shares)) if device.memory_total]


def index_of(memories: Sequence[Memory]) -> dict[str, int]:
    """The index of each device's memory, by the device's name; devices that divide each layer share one."""
    return {name: n for n, memory in enumerate(memories) for name in memory.name.split("+") if n}


def arrangement_of(where: ModelDevices, memories: Sequence[Memory]) -> Arrangement:
    """What ``where`` fixes, for ``memories`` as ``measure`` returns them."""
    index = index_of(memories)
    return Arrangement(
        shares=() if where.is_divided else tuple(_shares(where)),
        moved=tuple([(pattern, index.get(name, 0)) for pattern, name in where.options.overrides]),
    )


def choose(
    library: llama_abi.Library, start: Start, sizes: ModelSizes, memories: Sequence[Memory], where: ModelDevices
) -> tuple[Fit, frozenset[str] | None]:
    """Choose settings with which the model fits, and the names of the layouts that fit; ``None`` for all of them.

    Raises:
        DoesNotFit, KvCacheTooSmall: see ``fit``.
        llama_abi.LlamaError: llama.cpp refuses the file.
    """
    settings, environment = start.settings, environment_of(where, start.target_itl_ms)
    projector = None if starts_with_first_picture(start.projector) else start.projector
    companions = Companions(
        draft=start.draft_sizes,
        adapter_bytes=sum([file.size_bytes for file in start.adapters]),
        projector_bytes=0 if projector is None else encoding_bytes(projector),
    )
    fitted = functools.partial(
        fit,
        sizes,
        settings,
        min_batch=start.min_batch,
        arrangement=arrangement_of(where, memories),
        environment=environment,
    )
    try:
        fitted(memories, lambda settings, layout: (0,) * len(memories), companions=companions)
    except DoesNotFit:  # without compute buffers either, for which llama.cpp takes seconds where a context is huge
        return fitted(memories, estimate_compute(sizes), companions=companions), None
    with contextlib.suppress(DoesNotFit):
        estimated = fitted(memories, estimate_compute(sizes), companions=companions)
        room = [CLEARLY * memory.free_bytes for memory in memories]
        if not estimated.gave_up and all(need <= most for need, most in zip(estimated.needs, room, strict=True)):
            return estimated, None
    with contextlib.ExitStack() as stack:
        compute = stack.enter_context(ComputeSizes(library, start.path, memories, where))
        if companions.draft is not None and settings.draft_model is not None:
            of_draft = stack.enter_context(
                ComputeSizes(library, Path(settings.draft_model), memories, where.without_overrides)
            )
            companions = attrs.evolve(companions, draft_compute=of_draft)
        chosen = fitted(memories, compute, companions=companions)
        return chosen, frozenset(_fitting_layouts(chosen, sizes, compute, environment))


def _fitting_layouts(fitted: Fit, sizes: ModelSizes, compute: Compute, environment: Environment) -> Iterator[str]:
    """The layouts that may replace the one by rule, because their compute buffers fit as well."""
    shape = Shape(n_ctx_train=sizes.n_ctx_train, kv_bytes_per_token=sizes.kv_bytes_per_token(fitted.settings))
    room = [
        memory.usable_bytes(fitted.settings) - need for memory, need in zip(fitted.memories, fitted.needs, strict=True)
    ]
    own = compute(fitted.settings, fitted.layout)
    # whether a layout suits a model with a sliding window is decided when the model is loaded
    environment = attrs.evolve(environment, on_gpu=fitted.on_gpu > 0)
    layouts = candidates(shape, fitted.settings, environment, memory_bytes=0, windowed=False)
    for layout in layouts:
        with contextlib.suppress(Unsupported):
            others = compute(fitted.settings, layout)
            if layout == fitted.layout or all(b - a <= r for a, b, r in zip(own, others, room, strict=True)):
                yield layout.name


class ComputeSizes:
    """Asks llama.cpp how large its compute buffers would be: a context that allocates nothing tells.

    A size is a convex function of the context, as it is the maximum of what single operations need.  So between two
    known contexts the line through them is an upper bound.

    Implements ``fit.Compute``.
    """

    def __init__(
        self, library: llama_abi.Library, path: Path, memories: Sequence[Memory], where: ModelDevices | None = None
    ) -> None:
        self._library = library
        self._path = path
        self._place = place(config.Model(), library) if where is None else where
        self._index = index_of(memories)
        self._n_memories = len(memories)
        self._model: llama_abi.Model | None = None
        self._gpu_layers: int | None = None
        self._known: dict[object, dict[int, tuple[int, ...]]] = {}
        self._refused: dict[object, str] = {}

    def __enter__(self) -> ComputeSizes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            self._model.close()

    def __call__(self, settings: config.Model, layout: Layout) -> tuple[int, ...]:
        """See ``fit.Compute``.  Blocks for some milliseconds for a context, and for loading the vocabulary.

        Raises:
            Unsupported: llama.cpp refuses the settings.
            llama_abi.LlamaError: it refuses the file.
        """
        # with some layers on the GPU the buffers hardly depend on how many
        where = settings.gpu_layers if settings.gpu_layers in (-1, 0) else 1
        options = context_options(settings, layout)
        key = where, attrs.evolve(options, n_ctx=0)
        if key in self._refused:
            raise Unsupported(self._refused[key])
        known = self._known.setdefault(key, {})
        if layout.n_ctx not in known:
            lower = max((n for n in known if n < layout.n_ctx), default=None)
            upper = min((n for n in known if n > layout.n_ctx), default=None)
            if lower is not None and upper is not None:
                share = (layout.n_ctx - lower) / (upper - lower)
                return tuple(math.ceil(a + share * (b - a)) for a, b in zip(known[lower], known[upper], strict=True))
            try:
                known[layout.n_ctx] = self._ask(settings.gpu_layers, where, options)
            except Unsupported as error:
                self._refused[key] = str(error)
                raise
        return known[layout.n_ctx]

    def _ask(self, gpu_layers: int, where: int, options: llama_abi.ContextOptions) -> tuple[int, ...]:
        if self._model is None or self._gpu_layers != where:
            if self._model is not None:
                self._model.close()
            placement = self._place.options if where else llama_abi.Placement(devices=())
            self._model = llama_abi.Model(
                self._library, self._path, n_gpu_layers=gpu_layers, placement=placement, no_alloc=True
            )
            self._gpu_layers = where
        try:
            with llama_abi.Context(self._model, options) as context:
                n_bytes_on = [0] * self._n_memories
                for buffer in context.buffers:
                    if buffer.kind == "compute":
                        for name in self._place.devices_of(buffer.place):
                            n_bytes_on[self._index.get(name, 0)] += buffer.n_bytes
        except llama_abi.LlamaError as error:
            raise Unsupported(str(error)) from error
        return tuple(n_bytes_on)


def open_pooling(start: Start, on_progress: Callable[[float], bool]) -> PoolingEngine:
    """Load a model that embeds or ranks texts, with as many layers on a GPU as fit.  Blocks until it is loaded.

    Raises:
        DoesNotFit, PlacementError: the model cannot fit, or the settings and the devices do not go together.
        EngineError, llama_abi.LlamaError, llama_abi.LibraryError: see ``PoolingEngine``.
    """
    settings, report = start.settings, None
    if settings.fit == "on" and start.sizes is not None:
        library = open_library(settings)
        where = place(settings, library)
        memories = measure(library, where)
        shared = [
            msgspec.structs.replace(memory, free_bytes=int(SHARES[start.attempt] * memory.free_bytes))
            for memory in memories
        ]
        one = attrs.evolve(settings, parallel=1, ctx=0, kv_mem_limit_mb=0)
        companions = Companions(adapter_bytes=sum([file.size_bytes for file in start.adapters]))
        fitted = fit(
            start.sizes,
            one,
            shared,
            estimate_compute(start.sizes),
            companions=companions,
            arrangement=arrangement_of(where, memories),
        )
        settings = attrs.evolve(settings, gpu_layers=fitted.settings.gpu_layers)
        layers = f"{fitted.on_gpu} of {fitted.n_layers} layers on GPU: " if len(memories) > 1 else ""
        report = FitReport(f"whole texts: {layers}{fitted.room}", fitted.why)
    engine = PoolingEngine(start.path, settings, start.purpose, on_progress, start.adapters)
    engine.fit = report
    return engine


def open_engine(
    start: Start, on_progress: Callable[[float], bool], on_open: OnOpen = lambda path: None
) -> LlamaEngine | PoolingEngine:
    """Load the model that ``start`` names; see ``worker.OpenEngine``.

    Args:
        on_open: see ``llama_abi.load``.

    Raises:
        LoadError: it cannot be loaded.
    """
    try:
        llama_abi.load(start.settings.llama_dir, on_open=on_open)
        on_progress(0.0)
        if start.purpose != "generate":
            return open_pooling(start, on_progress)
        engine = open_fitted(start, on_progress)
    except (OSError, MemoryError, EngineError, DoesNotFit, *LOAD_ERRORS) as error:
        reason, remedy = getattr(error, "reason", str(error)), getattr(error, "remedy", "")
        raise LoadError(reason, remedy, is_about_memory=is_about_memory(error)) from error
    engine.measure_memory()
    return engine
