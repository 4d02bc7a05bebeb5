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
from uma_trio.engine.adapters import Adapters
from uma_trio.engine.cores import default_threads, spare_cores
from uma_trio.engine.devices import Devices
from uma_trio.engine.embedding import MAX_BATCH, MIN_BATCH, NOTHING_EMBEDDED, Embedded, calls_of, normalized
from uma_trio.engine.fit import FitReport, with_defaults
from uma_trio.engine.inspect import devices_of_model
from uma_trio.engine.llama import described, library_environment
from uma_trio.engine.masks import Masks
from uma_trio.engine.memory import free_memory_bytes
from uma_trio.engine.messages import (
    MAX_EMBEDDING_SEQUENCES,
    AdapterFile,
    DefineGrammar,
    Draft,
    Drafted,
    DraftInput,
    EmbeddingInput,
    EngineError,
    LayoutReport,
    ModelInfo,
    Ready,
    Step,
    StepCallbacks,
    StepInput,
    StepOutput,
)
from uma_trio.engine.placement import open_library, place
from uma_trio.engine.purpose import POOLING, Purpose
from uma_trio.scheduling.view import Scales

MAX_OUTPUT_BYTES: Final = 64 << 20
"""llama.cpp has room for the logits of all tokens of a call, though it computes none.  This bounds that memory where no
text needs more."""

MAX_PLAIN_TOKENS: Final = 1024
"""With flash attention off, attention takes memory for each pair of tokens of a call.  Longer contexts use it on a CPU."""


class PoolingEngine:
    """A loaded model that embeds or ranks texts.  See ``messages.Engine`` for the contract.

    The context is created when it is needed, and again when a text needs a larger one.

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
        self._context: llama_abi.Context | None = None
        self._n_bytes = 0
        self.fit: FitReport | None = None
        """How the settings were chosen; set by who chose them."""
        with contextlib.ExitStack() as stack:
            stack.callback(model.close)
            self._adapters = Adapters(model, adapters)
            stack.pop_all()
        self.masks: Masks | None = None
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
        context = () if self._context is None else self._context.buffers
        return devices_of_model(self._place, self._model, self._settings, (*self._model.buffers, *context))

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
        vectors: list[npt.NDArray[np.float32]] = []
        failure = None
        try:
            if any(each.position or not each.is_last for each in texts):
                raise llama_abi.LlamaError("this model computes whole texts, and was given a part of one")
            plain = self._flash_attn(MAX_PLAIN_TOKENS) == "off"
            for call in calls_of(texts) if plain else _filled(texts, self._info.embedding_batch):
                vectors += self._call(call, adapters)
        except (llama_abi.LlamaError, MemoryError) as error:
            vectors, failure = [], str(error)
            self._close_context()
        return Embedded(vectors, 1e3 * (time.perf_counter() - began), self._n_bytes, failure)

    def _call(self, texts: Sequence[EmbeddingInput], adapters: Scales) -> list[npt.NDArray[np.float32]]:
        """Compute one ``llama_decode`` call; returns a vector of length 1 for each text, or its score."""
        n_tokens = sum([each.length for each in texts])
        context = self._context_for(n_tokens)
        self._adapters.choose(context, adapters)
        batch = llama_abi.Batch(n_tokens)
        for seq_id, each in enumerate(texts):
            batch.add(each.tokens, pos=0, seq=seq_id, logits="all")
        if code := context.decode(batch):
            raise llama_abi.LlamaError({1: "no room in the context", 2: "aborted"}.get(code, f"code {code}"))
        context.synchronize()
        if context.has_memory:
            context.clear()
        if self._ranks:
            return [np.array([context.score(seq_id)], np.float32) for seq_id in range(len(texts))]
        return [normalized(context.pooled_embedding(seq_id).astype(np.float64)) for seq_id in range(len(texts))]

    def _context_for(self, n_tokens: int) -> llama_abi.Context:
        """A context with room for a call of ``n_tokens``.

        Raises:
            LlamaError: there is not the memory for it.
        """
        if self._context is not None and self._context.n_batch >= n_tokens:
            return self._context
        self._close_context()
        rows = self._info.embedding_batch
        while rows < n_tokens:
            rows *= 2
        rows = min(rows, max(self._info.embedding_batch, self._info.embedding_ctx))
        flash_attn = self._flash_attn(rows)
        pairs = rows * rows if flash_attn == "off" else 0
        n_bytes = rows * self._row_bytes + 8 * pairs * self._model.n_head
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
        self._context = context = llama_abi.Context(self._model, options)
        context.set_abort_flag(self._abort)
        self._n_bytes = sum([each.n_bytes for each in context.buffers]) + rows * self._row_bytes
        return context

    def _flash_attn(self, rows: int) -> str:
        """Flash attention of a context with ``rows`` tokens: off for short texts on a CPU, where it is slower."""
        wanted = self._settings.flash_attn
        if wanted == "auto" and not self._on_gpu and rows <= MAX_PLAIN_TOKENS:
            return "off"
        return wanted

    def _close_context(self) -> None:
        self._n_bytes = 0
        if self._context is not None:
            self._context.close()
            self._context = None

    # -- what generation needs ------------------------------------------------------------------

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        return Drafted([Draft(each.seq_id, 0, ()) for each in inputs], failure="the model generates no text")

    def define_grammar(self, grammar: DefineGrammar) -> None:
        """Does nothing: no step samples."""

    def used_cells(self) -> dict[int, int]:
        return {}

    def set_threads(self, n_threads: int) -> None:
        self._n_threads = n_threads
        if self._context is not None:
            self._context.set_threads(n_threads, n_threads)

    def reset(self) -> None:
        self._close_context()

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        self._close_context()
        self._adapters.close()
        self._model.close()


def _filled(texts: Sequence[EmbeddingInput], room: int) -> list[list[EmbeddingInput]]:
    """Divide ``texts`` into calls of up to ``room`` tokens; a longer text has a call of its own."""
    calls: list[list[EmbeddingInput]] = []
    left = 0
    for each in texts:
        if not calls or each.length > left:
            calls.append([])
            left = room
        calls[-1].append(each)
        left -= each.length
    return calls
