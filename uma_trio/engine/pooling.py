"""The engine of a model that embeds or ranks whole texts, and generates nothing.

llama.cpp pools the tokens of a text that is computed in one pass.  So each text is in one call, and the context is as
large as the longest one needs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio import config
from uma_trio.engine.embedding import MAX_BATCH, MIN_BATCH, MIN_CALL, NOTHING_EMBEDDED, Embedded, normalized
from uma_trio.engine.inspect import devices_of_model
from uma_trio.engine.llama import described
from uma_trio.engine.loaded_adapters import LoadedAdapters
from uma_trio.engine.placement import library_environment, open_library, place
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.defaults import with_defaults
from uma_trio.engine_link.devices import Devices
from uma_trio.engine_link.interrupts import Interrupts
from uma_trio.engine_link.masks import Masks
from uma_trio.engine_link.messages import (
    MAX_EMBEDDING_SEQUENCES,
    AdapterFile,
    DefineGrammar,
    Draft,
    Drafted,
    DraftInput,
    EmbeddingInput,
    EngineError,
    FitReport,
    LayoutReport,
    ModelInfo,
    Ready,
    Step,
    StepCallbacks,
    StepInput,
    StepOutput,
)
from uma_trio.models.purpose import POOLING, Purpose
from uma_trio.processes.machine import default_threads, free_memory_bytes, spare_cores

MAX_OUTPUT_BYTES: Final = 64 << 20
"""llama.cpp has room for the logits of all tokens of a call, though it computes none.  This bounds that memory where no
text needs more."""


class PoolingEngine:
    """A loaded model that embeds or ranks texts.  See ``messages.Engine`` for the contract.

    Contexts are created when they are needed, and again when a text needs a larger one.

    Args:
        path: a checked GGUF file.
        settings: memory and compute.
        purpose: ``embed`` or ``rank``.
        on_progress: called with the loaded share in [0, 1]; answering False gives loading up.
        adapters: checked GGUF files.

    Raises:
        EngineError: the file of an adapter has changed.
        PlacementError: the settings and the devices do not go together.
        llama_abi.LlamaError: the file cannot be loaded, or there is not the memory for it.
        llama_abi.LibraryError: no libllama to load it with.
    """

    def __init__(
        self,
        path: Path,
        settings: config.Model,
        purpose: Purpose,
        on_progress: Callable[[float], bool] | None = None,
        adapters: Sequence[AdapterFile] = (),
    ) -> None:
        self._settings = settings = with_defaults(settings)
        library = open_library(settings)
        self._place = place(settings, library)
        self._model = model = llama_abi.Model(
            library,
            path,
            n_gpu_layers=settings.gpu_layers,
            placement=self._place.options,
            use_mmap=settings.mmap,
            on_progress=on_progress,
        )
        self._contexts: dict[str, llama_abi.Context] = {}
        """By their flash attention."""
        self.fit: FitReport | None = None
        """How the settings were chosen; set by who chose them."""
        with contextlib.ExitStack() as stack:
            stack.callback(model.close)
            self._adapters = LoadedAdapters(model, adapters, on_gpu=self._place.on_gpu)
            stack.pop_all()
        self.controller_masks: Masks | None = None
        self.interrupts: Interrupts | None = None
        self.is_async = False
        self._on_gpu = self._place.on_gpu
        self._abort = llama_abi.AbortFlag()
        self._ranks = purpose == "rank"
        of_model = POOLING.get(int(model.meta(f"{model.meta('general.architecture')}.pooling_type") or 0), "none")
        self.pooling = "mean" if of_model == "none" else of_model
        """How the tokens of a text become one vector, or one score: a value of ``purpose.POOLING``."""
        self._n_threads = settings.threads or default_threads()
        max_tokens = min(settings.embedding_ctx, model.n_ctx_train)
        self._row_bytes = 4 * (model.vocab.n_tokens + model.n_embd_out)
        rows = min(MAX_BATCH, MAX_OUTPUT_BYTES // self._row_bytes)
        self._info = ModelInfo(
            name=settings.alias or path.name,
            description=described(model.description, model.n_params),
            purpose=purpose,
            pooling=self.pooling,
            n_vocab=model.vocab.n_tokens,
            n_ctx=max_tokens,
            n_ctx_seq=max_tokens,
            n_ctx_train=model.n_ctx_train,
            n_batch=max_tokens,
            n_seq_max=1,
            eog_ids=tuple(model.vocab.eog_ids),
            size_bytes=model.size_bytes,
            n_params=model.n_params,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            n_embd_out=model.n_embd_out,
            can_embed=purpose == "embed",
            embedding_ctx=max_tokens,
            embedding_batch=max(MIN_BATCH, rows - rows % 16),
            n_threads=self._n_threads,
            spare_cores=spare_cores(self._n_threads, on_gpu=self._on_gpu),
            adapters=self._adapters.files,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def describe(self) -> Ready:
        """Return the report to the daemon that the model is loaded."""
        library, settings = self._model.library, self._settings
        environment = repr((*library_environment(library), settings.gpu_layers, self._n_threads, self._place.options))
        return Ready(
            info=self._info,
            layout=LayoutReport(name="", reason="it has no KV cache"),
            devices=self.devices(),
            settings=self._settings,
            fit=self.fit,
            environment=environment,
            state_format="",
        )

    def devices(self) -> Devices:
        """What the model computes on, with the memory that is free now."""
        buffers = [*self._model.buffers, *[buffer for context in self._contexts.values() for buffer in context.buffers]]
        return devices_of_model(self._place, self._model, self._settings, buffers)

    def step(self, step: Step[StepInput], callbacks: StepCallbacks | None = None) -> StepOutput:
        """See ``messages.Engine``.  The step has nothing but texts.

        Raises:
            EngineError: it has something else.
        """
        if step.calls or step.ops:
            raise EngineError(f"the model {self._info.name} generates no text")
        started = time.perf_counter()
        done = self._compute(step.embeddings, step.embedding_adapters) if step.embeddings else NOTHING_EMBEDDED
        if callbacks is not None:
            callbacks.computing(0.0)
        return StepOutput(
            number=step.number,
            started_s=started,
            ended_s=time.perf_counter(),
            embeddings=done.vectors,
            embedding_ms=done.ms,
            embedding_bytes=done.n_bytes,
            embedding_failure=done.failure,
        )

    def _compute(self, texts: Sequence[EmbeddingInput], adapters: Scales) -> Embedded:
        began = time.perf_counter()
        by_number: dict[int, npt.NDArray[np.float32]] = {}
        failure = None
        try:
            if any(text.position or not text.is_last for text in texts):
                raise llama_abi.LlamaError("this model computes whole texts, and was given a part of one")
            for call in self._calls([text.length for text in texts]):
                by_number |= zip(call, self._call([texts[number] for number in call], adapters), strict=True)
        except (llama_abi.LlamaError, MemoryError) as error:
            by_number, failure = {}, str(error)
            self._close_contexts()
        vectors = [vector for _, vector in sorted(by_number.items(), key=lambda item: item[0])]
        return Embedded(vectors, 1e3 * (time.perf_counter() - began), self._n_bytes, failure)

    def _calls(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which texts are computed together, by their numbers.

        On a CPU a call costs attention between all of its texts, and a wider one is no faster.  There a text of
        ``MIN_CALL`` tokens or more is alone.
        """
        room = self._info.embedding_batch if self._on_gpu else MIN_CALL
        calls: list[list[int]] = []
        left = 0
        for number, length in enumerate(lengths):
            if length >= room:
                calls.insert(0, [number])
                continue
            if length > left:
                calls.append([])
                left = room
            calls[-1].append(number)
            left -= length
        return calls

    def _call(self, texts: Sequence[EmbeddingInput], adapters: Scales) -> list[npt.NDArray[np.float32]]:
        """Compute one ``llama_decode`` call; returns a vector of length 1 for each text, or its score."""
        n_tokens = sum([text.length for text in texts])
        context = self._context_for(n_tokens, is_narrow=not self._on_gpu and texts[0].length < MIN_CALL)
        self._adapters.apply(context, adapters)
        batch = llama_abi.Batch(n_tokens)
        for seq_id, text in enumerate(texts):
            batch.add(text.tokens, pos=0, seq=seq_id, logits="all")
        if code := context.decode(batch):
            raise llama_abi.LlamaError({1: "no room in the context", 2: "aborted"}.get(code, f"code {code}"))
        context.synchronize()
        if context.has_memory:
            context.clear()
        if self._ranks:
            return [np.array([context.score(seq_id)], np.float32) for seq_id in range(len(texts))]
        return [normalized(context.pooled_embedding(seq_id).astype(np.float64)) for seq_id in range(len(texts))]

    def _context_for(self, n_tokens: int, *, is_narrow: bool) -> llama_abi.Context:
        """A context with room for a call of ``n_tokens``.

        Args:
            is_narrow: all calls have few tokens, and are on a CPU.  Flash attention is slower and less exact there.

        Raises:
            LlamaError: there is not the memory for it.
        """
        wanted = self._settings.flash_attn
        flash_attn = "off" if wanted == "auto" and is_narrow else wanted
        known = self._contexts.pop(flash_attn, None)
        if known is not None and known.n_batch >= n_tokens:
            self._contexts[flash_attn] = known
            return known
        if known is not None:
            known.close()
        rows = MIN_CALL if is_narrow else self._info.embedding_batch
        while rows < n_tokens:
            rows *= 2
        rows = max(n_tokens, min(rows, self._info.embedding_ctx))
        n_bytes = rows * self._row_bytes + (8 * rows * rows * self._model.n_head if flash_attn == "off" else 0)
        if not self._on_gpu and n_bytes > free_memory_bytes():
            raise llama_abi.LlamaError(
                f"texts of {n_tokens} tokens take about {n_bytes / 1e6:.0f} MB, and "
                f"{free_memory_bytes() / 1e6:.0f} MB are free"
            )
        options = llama_abi.ContextOptions(
            n_ctx=rows,
            n_batch=rows,
            n_ubatch=rows,
            n_seq_max=min(MAX_EMBEDDING_SEQUENCES, self._model.library.max_sequences),
            n_threads=self._n_threads,
            n_threads_batch=self._n_threads,
            kv_unified=True,
            flash_attn=flash_attn,
            embeddings=True,
            pooling=self.pooling,
        )
        self._contexts[flash_attn] = context = self._adapters.open_context(options)
        context.set_abort_flag(self._abort)
        return context

    @property
    def _n_bytes(self) -> int:
        """What the contexts take."""
        buffers = sum([buffer.n_bytes for context in self._contexts.values() for buffer in context.buffers])
        return buffers + sum([context.n_batch * self._row_bytes for context in self._contexts.values()])

    def _close_contexts(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()

    # -- what generation needs ------------------------------------------------------------------

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        return Drafted(
            [Draft(draft_input.seq_id, 0, ()) for draft_input in inputs], failure="the model generates no text"
        )

    def define_grammar(self, grammar: DefineGrammar) -> None:
        """Does nothing: no step samples."""

    def used_cells(self) -> dict[int, int]:
        return {}

    def set_threads(self, n_threads: int) -> None:
        self._n_threads = n_threads
        for context in self._contexts.values():
            context.set_threads(n_threads, n_threads)

    def reset(self) -> None:
        self._close_contexts()

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        self._close_contexts()
        self._adapters.close()
        self._model.close()
