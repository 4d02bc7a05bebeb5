"""Embeddings of texts: a context of its own over the weights of the model that generates.

llama.cpp pools the embeddings of a text only if the text is computed in one pass.  Here a long text is computed in
chunks between the steps of streams, so the embeddings of its tokens are pooled in Python, as the model says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine.loaded_adapters import LoadedAdapters
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.messages import MAX_EMBEDDING_SEQUENCES, EmbeddingInput
from uma_trio.models.purpose import POOLING

Pooling: TypeAlias = Literal["mean", "cls", "last"]

MAX_BATCH: Final = 512
MIN_BATCH: Final = 32
MAX_LOGITS_BYTES: Final = 64 << 20
"""llama.cpp computes logits of all tokens together with their embeddings.  This bounds their memory."""

MIN_CALL: Final = 64
"""Tokens from which on a call is wide enough: more of them take as long for each."""

MIN_CELLS: Final = 1024


@attrs.frozen
class Embedded:
    """The result of one call."""

    vectors: Sequence[npt.NDArray[np.float32]] = ()
    """One for each text that ended, in order."""
    ms: float = 0.0
    n_bytes: int = 0
    failure: str | None = None


NOTHING_EMBEDDED: Final = Embedded()


@attrs.define
class _OpenText:
    """A text whose first tokens are computed."""

    total: npt.NDArray[np.float64]
    """What is pooled: the sum of the embeddings for the mean, otherwise one of them."""


class Embedder:
    """Computes embeddings.  The context is created when it is needed, and again when a text needs a larger one.

    Args:
        adapters: that texts may name.
        options: of the context that generates.
        abort: cuts calls short.
        kv_bytes_per_token: size of a cell.
        max_tokens: of a text.
        free_bytes: free memory where the cells go; ``None`` if only llama.cpp knows.
    """

    def __init__(
        self,
        model: llama_abi.Model,
        adapters: LoadedAdapters,
        options: llama_abi.ContextOptions,
        abort: llama_abi.AbortFlag,
        *,
        kv_bytes_per_token: float,
        max_tokens: int,
        free_bytes: Callable[[], int] | None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._options = options
        self._abort = abort
        self._cell_bytes = kv_bytes_per_token
        self._free_bytes = free_bytes
        of_model = model.meta(f"{model.meta('general.architecture')}.pooling_type")
        self.pooling = pooling_of(of_model)
        """``None`` if the model gives no embeddings."""
        self._context_pooling = "unspecified" if of_model is None else "none"  # llama.cpp warns where both differ
        self.max_tokens = min(max_tokens, model.n_ctx_train)
        self._row_bytes = 4 * (model.vocab.n_tokens + model.n_embd_out)
        rows = min(MAX_BATCH, options.n_batch, MAX_LOGITS_BYTES // self._row_bytes)
        self.n_batch = max(MIN_BATCH, rows - rows % 16)
        """Tokens of one call, at most."""
        self._batch = llama_abi.Batch(self.n_batch)
        self._context: llama_abi.Context | None = None
        self._open: dict[int, _OpenText] = {}

    def embed(self, inputs: Sequence[EmbeddingInput], adapters: Scales = ()) -> Embedded:
        """Compute one call.  Blocks.  What fails costs the texts of the call, and nothing else.

        Raises:
            EngineError: there is no such adapter.
        """
        began = time.perf_counter()
        vectors: list[npt.NDArray[np.float32]] = []
        failure = None
        try:
            vectors = self._compute(inputs, adapters)
        except (llama_abi.LlamaError, MemoryError) as error:
            failure = str(error)
            self.close()
        return Embedded(vectors, 1e3 * (time.perf_counter() - began), self._n_bytes, failure)

    def set_threads(self, n_threads: int) -> None:
        """Compute with this many threads from the next call on."""
        self._options = attrs.evolve(self._options, n_threads=n_threads, n_threads_batch=n_threads)
        if self._context is not None:
            self._context.set_threads(n_threads, n_threads)

    def close(self) -> None:
        """Free the context and what it holds; the next call creates a new one."""
        self._open.clear()
        if self._context is not None:
            self._context.close()
            self._context = None

    @property
    def _n_bytes(self) -> int:
        if self._context is None:
            return 0
        return round(self._context.n_ctx * self._cell_bytes) + self.n_batch * self._row_bytes

    def _compute(self, inputs: Sequence[EmbeddingInput], adapters: Scales) -> list[npt.NDArray[np.float32]]:
        going_on = {text.seq_id for text in inputs if text.position}
        if not going_on <= self._open.keys():
            raise llama_abi.LlamaError("the beginning of a text is lost")
        context = self._context_for(max(text.length for text in inputs), keep=bool(going_on))
        for seq_id in [seq_id for seq_id in self._open if seq_id not in going_on]:  # its client has gone
            self._drop(context, seq_id)
        self._adapters.apply(context, adapters)
        vectors = []
        for part in _calls(inputs) if self._options.flash_attn == "off" else [inputs]:
            vectors += self._call(context, part)
        return vectors

    def _call(self, context: llama_abi.Context, inputs: Sequence[EmbeddingInput]) -> list[npt.NDArray[np.float32]]:
        """Compute one ``llama_decode`` call; returns the vectors of the texts that end."""
        self._batch.clear()
        for text in inputs:
            self._batch.add(text.tokens, pos=text.position, seq=text.seq_id, logits="all")
        if code := context.decode(self._batch):
            raise llama_abi.LlamaError({1: "no room in the context", 2: "aborted"}.get(code, f"code {code}"))
        rows = context.embeddings()
        vectors, at = [], 0
        for text in inputs:
            pooled = self._pool(text, rows[at : at + len(text.tokens)])
            at += len(text.tokens)
            if text.is_last:
                vectors.append(normalized(pooled / text.length if self.pooling == "mean" else pooled))
                self._drop(context, text.seq_id)
        return vectors

    def _pool(self, text: EmbeddingInput, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """What is pooled of the text up to here."""
        known = self._open.get(text.seq_id)
        total: npt.NDArray[np.float64]
        match self.pooling:
            case "last":
                total = rows[-1].astype(np.float64)
            case "cls":
                total = rows[0].astype(np.float64) if known is None else known.total
            case _:
                total = rows.sum(axis=0, dtype=np.float64)
                if known is not None:
                    total += known.total
        self._open[text.seq_id] = _OpenText(total)
        return total

    def _drop(self, context: llama_abi.Context, seq_id: int) -> None:
        del self._open[seq_id]
        context.seq_remove(seq_id)

    def _context_for(self, length: int, *, keep: bool) -> llama_abi.Context:
        """A context with room for a text of ``length`` tokens and for the others of a call.

        Args:
            keep: a text goes on; the context has room for it since its first call.

        Raises:
            LlamaError: there is not the memory for it.
        """
        needed = length + self.n_batch
        if self._context is not None and (keep or self._context.n_ctx >= needed):
            return self._context
        self.close()
        cells = MIN_CELLS
        while cells < needed:
            cells *= 2
        n_bytes = round(cells * self._cell_bytes) + self.n_batch * self._row_bytes
        if self._free_bytes is not None and n_bytes > self._free_bytes():
            raise llama_abi.LlamaError(
                f"a context for embeddings of {cells} tokens takes {n_bytes / 1e6:.0f} MB, and "
                f"{self._free_bytes() / 1e6:.0f} MB are free"
            )
        options = attrs.evolve(
            self._options,
            n_ctx=cells,
            n_batch=self.n_batch,
            n_ubatch=self.n_batch,
            n_seq_max=min(MAX_EMBEDDING_SEQUENCES, self._model.library.max_sequences),
            kv_unified=True,
            embeddings=True,
            pooling=self._context_pooling,
        )
        self._context = context = self._adapters.open_context(options)
        context.set_abort_flag(self._abort)
        return context


def pooling_of(pooling_type: str | None) -> Pooling | None:
    """How to pool the tokens of a text.

    Args:
        pooling_type: of the metadata; ``None`` where they have none.

    Returns:
        ``mean`` where the metadata name no pooling, and ``None`` for a model that ranks texts.
    """
    pooling = POOLING.get(int(pooling_type or 0), "none")
    return None if pooling == "rank" else cast(Pooling, "mean" if pooling == "none" else pooling)


def _calls(inputs: Sequence[EmbeddingInput]) -> list[list[EmbeddingInput]]:
    """Divide ``inputs`` into calls.  Without flash attention each token costs attention over all texts of its call."""
    calls: list[list[EmbeddingInput]] = []
    n_tokens = MIN_CALL
    for text in inputs:
        if n_tokens >= MIN_CALL:
            calls.append([])
            n_tokens = 0
        calls[-1].append(text)
        n_tokens += len(text.tokens)
    return calls


def normalized(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """``vector`` with length 1; zeros stay zeros."""
    length = float(np.sqrt(vector @ vector))
    unit: npt.NDArray[np.float32] = (vector / (length or 1.0)).astype(np.float32)
    return unit
