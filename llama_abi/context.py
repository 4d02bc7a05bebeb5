"""A context: the KV cache and recurrent states of some sequences, and the decodes that extend them."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_abi.abort import AbortFlag
from llama_abi.batch import Batch
from llama_abi.errors import LlamaError, StaleLogits
from llama_abi.handles import Handle
from llama_abi.lora import LoraAdapter, StackedAdapters
from llama_abi.model import Model
from llama_abi.options import ContextOptions
from llama_abi.row_scales import RowScales
from llama_abi.types import MACROS, POOLING_TYPE, ggml_abort_callback

INT32_MAX = 2**31 - 1

PARTIAL_ONLY = MACROS["LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY"]
"""State flag: only the parts that cannot be truncated (sliding windows, recurrent states). For a model with neither it
means the whole state."""

OK, NO_KV_SLOT, ABORTED = 0, 1, 2
"""Return values of ``Context.decode``."""
FAILED = -2

ERRORS = {-1: "the batch is invalid; the context is unchanged"}
FATAL = "the backend failed; some of the batch may be in the KV cache, so ask seq_pos_max for every sequence"


class LogitsView:
    """Rows of logits in llama.cpp's memory, valid until the next ``decode()`` or ``close()``.

    Read ``array`` where it is used, not earlier: the view knows when it is stale, but an array taken from it does not.
    Copy what you keep.
    """

    def __init__(self, context: Context, array: npt.NDArray[np.float32]) -> None:
        self._context = context
        self._decode = context.n_decodes
        self._array = array

    @property
    def rows(self) -> int:
        """Number of tokens that needed logits."""
        return len(self._array)

    @property
    def stale(self) -> bool:
        """Whether their memory has been reused."""
        return self._context.closed or self._context.n_decodes != self._decode

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """float32 ``[rows, n_vocab]``, unnormalised, in batch order, without a copy.

        It may be written to: llama.cpp reads it again only in its own samplers.

        Raises:
            StaleLogits: the context has decoded again, or is closed.
        """
        if self.stale:
            cause = "was closed" if self._context.closed else "has decoded again"
            raise StaleLogits(f"these logits belong to an earlier decode; the context {cause} since")
        return self._array

    def __len__(self) -> int:
        return self.rows


class Context(Handle):
    """The state of up to ``n_seq_max`` sequences, and the decodes that extend them.

    Not thread-safe. Use it from one thread only: llama.cpp keeps a team of compute threads for each calling thread.

    Args:
        adapters: for ``set_adapter_scales``. With them llama.cpp calls back into Python for each node of a graph, which
            takes some 0.3 microseconds each, and on a device ``decode`` returns only when the computation has ended.

    Raises:
        LlamaError: the model has no weights or has an encoder, options contradict each other, or memory is short. The
            message includes llama.cpp's errors.

    Source: llama.h, ``llama_context_params``.
    """

    def __init__(self, model: Model, options: ContextOptions, adapters: StackedAdapters | None = None) -> None:
        self.model = model
        self.options = options
        self.n_decodes = 0
        """Number of decodes so far. It identifies the decode that a ``LogitsView`` belongs to."""
        self._c = model.library.c
        if model.vocab_only:
            raise LlamaError("this model was loaded without its weights")
        if model.has_encoder or not model.has_decoder:
            raise LlamaError("this model has an encoder; only decoder-only models can generate here")
        if options.n_seq_max > model.library.max_sequences:
            raise LlamaError(
                f"n_seq_max is {options.n_seq_max}; a context has at most {model.library.max_sequences} sequences"
            )
        if adapters is not None and adapters.model is not model:
            raise LlamaError("an adapter belongs to another model")
        params = options.c_params(self._c)
        self._stacked = adapters
        self._row_scales: RowScales | None = None
        if adapters is not None:
            self._row_scales = RowScales(self._c, adapters.rank_owners, adapters.n_parts, options.n_batch)
            params.cb_eval = self._row_scales.callback
        with model.library.logs.capture_warnings() as captured:
            captured.expected = model.no_alloc
            try:
                pointer = self._c.llama_init_from_model(model._pointer, params)
            except LlamaError:
                raise LlamaError(f"cannot create a context: {str(captured) or 'no reason given'}") from None
        super().__init__(pointer, self._c.llama_free, parent=model)
        self.buffers = tuple(captured.buffers)
        """What was allocated; with a model that allocates nothing, only the compute buffers, as large as they would be."""
        self._memory = self._c.llama_get_memory(pointer)
        self._outputs = b""
        self._rows = 0
        self._logits: tuple[tuple[int, int], npt.NDArray[np.float32]] = (0, 0), np.empty((0, 0), np.float32)
        """Address and rows of the latest logits, and the array of them: llama.cpp seldom moves its memory."""
        self._abort: AbortFlag | None = None
        self._adapters: tuple[tuple[LoraAdapter, float], ...] = ()
        self._copied_into: set[int] = set()
        self._copied_from: set[int] = set()
        self.n_ctx = int(self._c.llama_n_ctx(pointer))
        """KV cells for all sequences together."""
        self.n_ctx_seq = int(self._c.llama_n_ctx_seq(pointer))
        """Most KV cells of one sequence."""
        self.n_batch = int(self._c.llama_n_batch(pointer))
        self.n_ubatch = int(self._c.llama_n_ubatch(pointer))
        self.n_seq_max = int(self._c.llama_n_seq_max(pointer))
        self.is_causal = bool(self._c.llama_get_causal_attn(pointer))
        """Whether tokens attend to earlier ones only, so that a sequence can be computed in parts."""
        pooling = self._c.llama_pooling_type(pointer)
        self.ranks = pooling == POOLING_TYPE["LLAMA_POOLING_TYPE_RANK"]
        """Whether llama.cpp makes a score of the embeddings of a sequence's tokens."""
        self.pools = pooling != POOLING_TYPE["LLAMA_POOLING_TYPE_NONE"]
        """Whether llama.cpp makes one embedding of those of a sequence's tokens, or a score."""
        self.has_memory = bool(self._memory)
        """Whether it keeps what it computed of a sequence. Encoders do not, and compute each text anew."""
        self._max_batch_tokens = self.n_batch if self.is_causal else self.n_ubatch

    # ── decoding ────────────────────────────────────────────────────────────────────────────

    def decode(self, batch: Batch) -> int:
        """Run the model over ``batch``. Earlier logits become stale.

        Blocks without the GIL. On a device it may return before the computation ends; see ``synchronize``.

        Returns:
            One of these codes. Logits exist after ``OK`` only.

            - ``OK``: the whole batch was computed.
            - ``NO_KV_SLOT``: there are not enough free KV cells, and the context is unchanged.
            - ``ABORTED``: an ``AbortFlag`` was set. Passes that had finished stay in the KV cache; ``seq_pos_max``
              tells how far each sequence got.

        Raises:
            LlamaError: one of these. llama.cpp would abort the process in the first case.

                - ``code`` is ``None``: the batch is empty, too long, or has a sequence out of range.
                - ``code`` is -1: a token id is out of range, or positions do not follow those in the KV cache. The
                  context is unchanged.
                - ``code`` is below -1: the backend failed, and an unknown part of the batch is in the KV cache. Remove
                  all sequences of the batch.

        Source: llama.h, above ``llama_decode``.
        """
        pointer = self._pointer
        if self.model.no_alloc:
            raise LlamaError("this context has no memory: its model was loaded to learn sizes")
        if not 1 <= batch.n_tokens <= self._max_batch_tokens:
            raise LlamaError(f"a decode takes 1 to {self._max_batch_tokens} tokens, not {batch.n_tokens}")
        if batch.max_seq >= self.n_seq_max:
            raise LlamaError(f"sequence {batch.max_seq} is not in [0, {self.n_seq_max})")
        if batch.n_embd and batch.n_embd != self.model.n_embd_inp:
            raise LlamaError(f"rows of this model have {self.model.n_embd_inp} numbers, not {batch.n_embd}")
        max_outputs = self.options.n_outputs_max
        if max_outputs and batch.n_outputs > max_outputs:
            raise LlamaError(f"{batch.n_outputs} tokens need logits, and n_outputs_max is {max_outputs}")
        if self._row_scales is not None:
            self._row_scales.begin(batch.n_tokens, batch._needs_logits[: batch.n_tokens] != 0)
        self.n_decodes += 1
        self._rows = 0
        self._resource.busy = True
        code = FAILED
        # with other adapters llama.cpp reports in a dozen lines how it plans its graphs, in every such decode
        with self.model.library.logs.capture_warnings(is_quiet=True) as captured:
            try:
                code = int(self._c.llama_decode(pointer, batch._filled()))
            finally:
                self._resource.busy = False
                if self._row_scales is not None:
                    self._row_scales.end(computed=code == OK)
            if code == ABORTED:
                captured.expected = True
            elif code < 0:
                details = f" ({captured})" if str(captured) else ""
                raise LlamaError(f"llama_decode returned {code}: {ERRORS.get(code, FATAL)}{details}", code=code)
        if code == OK:
            self._rows = batch.n_outputs
            self._outputs = batch._flags[: batch.n_tokens].tobytes()
            self._copied_into.clear()
            self._copied_from.clear()
        return code

    @contextlib.contextmanager
    def attending_to_all(self) -> Iterator[None]:
        """Until the end of the context, each token of a decode attends to all tokens of the decode, in one pass.

        What is decoded then has at most ``n_ubatch`` tokens.
        """
        most, self._max_batch_tokens = self._max_batch_tokens, self.n_ubatch
        self._c.llama_set_causal_attn(self._pointer, False)
        try:
            yield
        finally:
            self._c.llama_set_causal_attn(self._pointer, self.is_causal)
            self._max_batch_tokens = most

    def synchronize(self) -> None:
        """Block until the last decode is computed, without the GIL."""
        self._resource.busy = True
        try:
            self._c.llama_synchronize(self._pointer)
        finally:
            self._resource.busy = False

    def logits(self, rows: int | None = None) -> LogitsView:
        """The first ``rows`` rows of the last decode's logits; ``None`` for all rows. Blocks until they are computed.

        There is one row for each token that needed logits, in batch order.

        Raises:
            LlamaError: the last decode returned fewer rows, or did not return ``OK``.
        """
        pointer = self._pointer
        wanted = self._rows if rows is None else rows
        if not 0 <= wanted <= self._rows:
            raise LlamaError(f"the last decode returned {self._rows} rows of logits, not {wanted}")
        width = self.model.vocab.n_tokens
        if wanted == 0:
            return LogitsView(self, np.empty((0, width), np.float32))
        place = ctypes.addressof(self._c.llama_get_logits(pointer).contents), wanted
        if self._logits[0] != place:
            memory = (ctypes.c_float * (wanted * width)).from_address(place[0])
            self._logits = place, np.frombuffer(memoryview(memory), np.float32).reshape(wanted, width)
        return LogitsView(self, self._logits[1])

    def embeddings(self) -> npt.NDArray[np.float32]:
        """A copy of the last decode's embeddings, ``[n, n_embd_out]``: one row for each token, in batch order.

        Blocks until they are computed. The context needs the option ``embeddings`` and must not pool, and the batch
        needs logits of all tokens.

        Raises:
            LlamaError: the context has other options, or the last decode did not return ``OK``.
        """
        if not self.options.embeddings or self.pools or not self._rows:
            raise LlamaError(
                "there are no embeddings of tokens: the context was not made for them, or nothing is decoded"
            )
        return self._copied(self._c.llama_get_embeddings(self._pointer), self._rows)

    def pooled_embedding(self, seq: int) -> npt.NDArray[np.float32]:
        """A copy of the pooled embedding of ``seq``, ``[n_embd_out]``, over its tokens in the last pass.

        Raises:
            LlamaError: the context does not pool or gives scores, or ``seq`` was not in the last decode.
        """
        if self.ranks:
            raise LlamaError("the context gives scores, and no embeddings")
        [vector] = self._copied(self._c.llama_get_embeddings_seq(self._pointer, self._seq(seq)), 1)
        return np.asarray(vector, np.float32)

    def score(self, seq: int) -> float:
        """The score of ``seq``, from its tokens in the last pass; the first one, if the model gives several.

        Raises:
            LlamaError: the context gives no scores, or ``seq`` was not in the last decode.
        """
        if not self.ranks:
            raise LlamaError("the context gives no scores: its pooling is not rank")
        return float(self._c.llama_get_embeddings_seq(self._pointer, self._seq(seq))[0])

    def _copied(self, pointer: Any, rows: int) -> npt.NDArray[np.float32]:
        """A copy of rows of embeddings."""
        width = self.model.n_embd_out
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        memory = (ctypes.c_float * (rows * width)).from_address(address or 0)
        return np.array(memory, np.float32).reshape(rows, width)

    def set_adapters(self, adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        """Apply ``adapters``, each with its scale, from the next decode on, in place of those before.

        Other adapters make llama.cpp plan its graphs again in the next decode, which takes milliseconds. Keys and values
        in the cache stay as they were computed, so a sequence keeps its adapters.

        Raises:
            LlamaError: an adapter is given twice or belongs to another model, or a scale is not finite. Nothing has
                changed.

        Source: llama.h, ``llama_set_adapters_lora``.
        """
        pointer, wanted = self._pointer, tuple(adapters)
        if wanted == self._adapters:
            return
        if len({id(adapter) for adapter, _ in wanted}) < len(wanted):
            raise LlamaError("an adapter is given twice")
        if any(adapter.model is not self.model for adapter, _ in wanted):
            raise LlamaError("an adapter belongs to another model")
        if not all(math.isfinite(scale) for _, scale in wanted):
            raise LlamaError("the scale of an adapter must be finite")
        pointers = [adapter._pointer for adapter, _ in wanted]
        if wanted:
            array = (type(pointers[0]) * len(wanted))(*pointers)
            scales = (ctypes.c_float * len(wanted))(*[scale for _, scale in wanted])
            self._c.llama_set_adapters_lora(pointer, array, len(wanted), scales)
        else:
            self._c.llama_set_adapters_lora(pointer, None, 0, None)
        self._adapters = wanted

    def set_adapter_scales(self, scales: npt.NDArray[np.float32] | None) -> None:
        """Apply the parts of the stacked adapters with these scales, from the next decode on.

        The rows of a batch can have different scales only if llama.cpp computes them together and in their order. It does so
        with up to ``n_ubatch`` rows of a unified KV cache without recurrent layers, and with one token each of sequences
        whose ids are consecutive. In other batches give all rows the same scales.

        ``None`` makes llama.cpp plan its graphs again without adapters, and again when there are scales: see
        ``set_adapters``. So keep scales of 0 for a while before.

        Args:
            scales: float32 ``[rows, adapters]`` for batches of as many tokens, or ``[adapters]`` for any batch; ``None``:
                no adapters.

        Raises:
            LlamaError: the context was created without adapters, or the scales have another shape or are not finite.
                Nothing has changed.
        """
        if self._row_scales is None or self._stacked is None:
            if scales is None:
                return
            raise LlamaError("this context was created without adapters")
        self._row_scales.set(scales)
        self.set_adapters([] if scales is None else [(self._stacked, 1.0)])

    def close(self) -> None:
        super().close()
        if self._row_scales is not None:
            self._row_scales.close()

    def _has_logits(self, index: int) -> bool:
        return self._rows > 0 and 0 <= index < len(self._outputs) and bool(self._outputs[index])

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the numbers of compute threads from the next decode on. See ``ContextOptions``."""
        if not (1 <= n_threads <= 512 and 1 <= n_threads_batch <= 512):
            raise LlamaError(f"numbers of threads must be from 1 to 512, not {n_threads} and {n_threads_batch}")
        self._c.llama_set_n_threads(self._pointer, n_threads, n_threads_batch)

    @property
    def n_threads(self) -> int:
        return int(self._c.llama_n_threads(self._pointer))

    @property
    def n_threads_batch(self) -> int:
        return int(self._c.llama_n_threads_batch(self._pointer))

    def set_abort_flag(self, flag: AbortFlag | None) -> None:
        """Let ``flag`` interrupt decodes; ``None`` for no flag. Call it between decodes only."""
        if flag is None:
            self._c.llama_set_abort_callback(self._pointer, ggml_abort_callback(), None)
        else:
            self._c.llama_set_abort_callback(self._pointer, *flag.callback)
        self._abort = flag

    # ── sequences ───────────────────────────────────────────────────────────────────────────

    def seq_remove(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens of ``seq`` at positions ``[p0, p1)``. A negative bound is open.

        A whole sequence can always be removed. A recurrent state cannot be truncated, except by ``n_rs_seq`` tokens.
        A sliding window can be truncated at ``seq_pos_min(seq) + n_swa - 1`` or later, or anywhere while
        ``seq_pos_min`` is 0. llama.cpp does not check that: it returns true, and later decodes are wrong.

        Returns:
            Whether the tokens were removed. ``False`` means that the state is recurrent, and nothing has changed.
        """
        return bool(self._c.llama_memory_seq_rm(self._mem(), self._seq(seq), _pos(p0), _pos(p1)))

    def seq_copy(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Copy the tokens of ``source`` at positions ``[p0, p1)`` to ``target``. A negative bound is open.

        With a unified KV cache the two sequences share the cells, any range is possible, and ``target`` keeps its other
        tokens. With per-sequence KV the whole of ``source`` replaces ``target``; the next decode makes the copy.
        A recurrent state is copied from the end of ``source``, whatever the range.

        Raises:
            LlamaError: the range is a part of ``source``, and the KV cache is per sequence. llama.cpp would abort.
        """
        memory, source, target = self._mem(), self._seq(source), self._seq(target)
        if source == target:
            return
        last = int(self._c.llama_memory_seq_pos_max(memory, source))
        if not self.options.kv_unified:
            if p0 > max(0, int(self._c.llama_memory_seq_pos_min(memory, source))) or 0 <= p1 <= last:
                raise LlamaError(
                    "with per-sequence KV a sequence can only be copied whole; remove tokens from the copy afterwards, "
                    "or use kv_unified"
                )
            p0 = p1 = -1
            self._copied_from.add(source)
            self._copied_into.add(target)
        self._c.llama_memory_seq_cp(memory, source, target, _pos(p0), _pos(p1))

    def seq_keep(self, seq: int) -> None:
        """Remove all sequences except ``seq``."""
        memory, seq = self._mem(), self._seq(seq)
        if self.options.kv_unified:
            self._c.llama_memory_seq_keep(memory, seq)
        else:  # llama.cpp would look at the cells of that sequence only
            for other in range(self.n_seq_max):
                if other != seq:
                    self._c.llama_memory_seq_rm(memory, other, -1, -1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Shift the positions of the tokens of ``seq`` at ``[p0, p1)`` by ``delta``.

        Raises:
            LlamaError: this model's positions cannot be shifted, or a position would become negative.
        """
        memory = self._mem()
        if not self._c.llama_memory_can_shift(memory):
            raise LlamaError("this model's positions cannot be shifted")
        if abs(delta) > INT32_MAX or (delta < 0 and max(p0, 0) + delta < 0):
            raise LlamaError(f"shifting positions from {p0} by {delta} is out of bounds")
        self._c.llama_memory_seq_add(memory, self._seq(seq), _pos(p0), _pos(p1), delta)

    @property
    def can_shift(self) -> bool:
        """Whether ``seq_add`` works for this model."""
        return bool(self._c.llama_memory_can_shift(self._mem()))

    def seq_pos_min(self, seq: int) -> int:
        """Lowest position of ``seq`` in the cache; -1 if it is empty."""
        return int(self._c.llama_memory_seq_pos_min(self._mem(), self._seq(seq)))

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of ``seq`` in the cache; -1 if it is empty."""
        return int(self._c.llama_memory_seq_pos_max(self._mem(), self._seq(seq)))

    def clear(self, *, data: bool = False) -> None:
        """Remove all sequences. With ``data`` also overwrite their cells with zeros.

        The next decode still makes the copies that ``seq_copy`` has queued, but their targets stay empty.
        """
        self._c.llama_memory_clear(self._mem(), data)

    # ── the state of one sequence ───────────────────────────────────────────────────────────

    def state_size(self, seq: int, *, flags: int = 0) -> int:
        """Bytes that ``save_state_into`` needs for ``seq`` now."""
        return int(self._c.llama_state_seq_get_size_ext(self._pointer, self._seq(seq), _flags(flags)))

    def save_state_into(self, seq: int, buffer: Any, *, flags: int = 0) -> int:
        """Write the state of ``seq`` into a writable buffer (bytearray, mmap, numpy array), without the GIL.

        Sliding-window layers save their last window. A sequence that is loaded from it can be extended, and truncated
        by one token.

        Returns:
            Bytes written.

        Raises:
            LlamaError: the buffer is too small or not writable, or ``seq`` is the target of a copy that the next decode
                makes.
        """
        pointer = self._pointer
        if self._seq(seq) in self._copied_into and not self._without_kv(flags):
            raise LlamaError(f"sequence {seq} is the target of a copy that the next decode makes; save it after that")
        try:
            view = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise LlamaError(f"a state needs a writable buffer: {error}") from None
        if view.readonly:
            raise LlamaError("the buffer for a state is not writable")
        needed = self.state_size(seq, flags=flags)
        if view.nbytes < needed:
            raise LlamaError(f"the state of sequence {seq} needs {needed} bytes, the buffer has {view.nbytes}")
        target = (ctypes.c_uint8 * view.nbytes).from_buffer(view)
        return self._state(self._c.llama_state_seq_get_data_ext, pointer, target, view.nbytes, seq, _flags(flags))

    def load_state_from(self, seq: int, buffer: Any, *, flags: int = 0) -> int:
        """Replace ``seq`` with a state that a context of the same model and options has saved, without the GIL.

        The bytes are trusted, so verify them first: store a checksum and the identity of model and options with them.

        With ``PARTIAL_ONLY`` recurrent states and windows return to the position where they were saved, and the other
        layers keep their cells. Call ``seq_remove`` for the positions behind it *afterwards*: before it, a recurrent
        state refuses.

        Returns:
            Bytes read.

        Raises:
            LlamaError: the buffer is no state or one of another shape, or there are not enough free cells. ``seq`` is
                then empty; with ``PARTIAL_ONLY`` it is unusable and must be removed. Or the next decode makes a copy
                from or to ``seq``, which would overwrite the loaded state. Nothing has changed in that case.
        """
        pointer = self._pointer
        if self._seq(seq) in self._copied_from and not self._without_kv(flags):
            raise LlamaError(
                f"sequence {seq} is the source of a copy that the next decode makes; load into it after that"
            )
        if seq in self._copied_into and not self._without_kv(flags):
            raise LlamaError(
                f"sequence {seq} is the target of a copy that the next decode makes; load into it after that"
            )
        try:
            view = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError) as error:
            raise LlamaError(f"a state needs a buffer: {error}") from None
        source = ctypes.cast(view.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        if not flags & PARTIAL_ONLY:  # a state without tokens would leave the old ones in place
            self._c.llama_memory_seq_rm(self._mem(), seq, -1, -1)
        return self._state(self._c.llama_state_seq_set_data_ext, pointer, source, view.nbytes, seq, _flags(flags))

    def _without_kv(self, flags: int) -> bool:
        """Whether these flags mean a state without KV, which queued copies do not touch."""
        return (
            bool(flags & PARTIAL_ONLY) and (self.model.is_recurrent or self.model.is_hybrid) and self.model.n_swa == 0
        )

    def _state(self, function: Any, *arguments: Any) -> int:
        self._resource.busy = True
        try:
            with self.model.library.logs.capture_warnings() as captured:
                try:
                    return int(function(*arguments))
                except LlamaError as error:
                    raise LlamaError(f"llama.cpp refused a state: {str(captured) or error}", code=0) from None
        finally:
            self._resource.busy = False

    # ── bounds ──────────────────────────────────────────────────────────────────────────────

    def _mem(self) -> Any:
        self._pointer  # noqa: B018  raises HandleClosed
        if not self._memory:
            raise LlamaError("this model keeps no state of a sequence")
        return self._memory

    def _seq(self, seq: int) -> int:
        if not 0 <= seq < self.n_seq_max:
            raise LlamaError(f"sequence {seq} is not in [0, {self.n_seq_max})")
        return seq

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Context n_ctx={self.n_ctx} n_seq_max={self.n_seq_max} of {self.model.path}{state}>"


def _pos(position: int) -> int:
    if position > INT32_MAX:
        raise LlamaError(f"position {position} is out of bounds")
    return max(position, -1)


def _flags(flags: int) -> int:
    if flags & ~PARTIAL_ONLY:
        raise LlamaError(f"unknown state flags {flags}")
    return flags
