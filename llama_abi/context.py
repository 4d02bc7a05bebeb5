"""A context: sequences of tokens that a model has seen, and the decoding of more."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llama_abi.abort import AbortFlag
from llama_abi.batch import Batch
from llama_abi.errors import LlamaError
from llama_abi.handles import Owned
from llama_abi.logits import LogitsView
from llama_abi.model import Model
from llama_abi.options import ContextOptions
from llama_abi.types import MACROS, ggml_abort_callback

INT32_MAX = 2**31 - 1

PARTIAL_ONLY = MACROS["LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY"]
"""State flag: only what cannot be rolled back (sliding windows, recurrent states).  A model with
neither saves all it has."""

OK, NO_ROOM, ABORTED = 0, 1, 2
"""What ``Context.decode`` returns."""

MEANINGS = {-1: "the batch is invalid; the context is as it was"}
FATAL = "the backend failed; what had been computed before stays, so ask seq_pos_max for every sequence"


class Context(Owned):
    """The working memory of a model: up to ``n_seq_max`` sequences, and their decoding.

    Not thread-safe, and better used from one thread always: llama.cpp keeps a team of compute
    threads for each thread that calls it.

    Raises:
        LlamaError: the model has no weights, options contradict each other, or memory is short.
            The message has llama.cpp's own words.

    Source: llama.h, ``llama_context_params``.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        self.model = model
        self.options = options
        self.n_decodes = 0
        """Decodes so far; what tells an old view of logits from the present one."""
        self._c = model.library.c
        if model.vocab_only:
            raise LlamaError("this model was loaded without its weights")
        if not model.has_decoder:
            raise LlamaError("this model only encodes; it cannot generate")
        if options.n_seq_max > model.library.max_sequences:
            raise LlamaError(
                f"n_seq_max is {options.n_seq_max}; a context has at most {model.library.max_sequences} sequences"
            )
        with model.library.logs.complaints() as complaints:
            try:
                pointer = self._c.llama_init_from_model(model._pointer, options.c_params(self._c))
            except LlamaError:
                raise LlamaError(f"cannot make a context: {str(complaints) or 'no reason given'}") from None
        super().__init__(pointer, self._c.llama_free, parent=model)
        self._memory = self._c.llama_get_memory(pointer)
        self._outputs = np.zeros(0, np.int8)
        self._rows = 0
        self._abort: AbortFlag | None = None
        self._copied_into: set[int] = set()
        self._copied_from: set[int] = set()
        self.n_ctx = int(self._c.llama_n_ctx(pointer))
        """KV cells in all."""
        self.n_ctx_seq = int(self._c.llama_n_ctx_seq(pointer))
        """KV cells that one sequence can have."""
        self.n_batch = int(self._c.llama_n_batch(pointer))
        self.n_ubatch = int(self._c.llama_n_ubatch(pointer))
        self.n_seq_max = int(self._c.llama_n_seq_max(pointer))
        self._most = self.n_batch if self._c.llama_get_causal_attn(pointer) else self.n_ubatch

    # ── decoding ────────────────────────────────────────────────────────────────────────────

    def decode(self, batch: Batch) -> int:
        """Run the model over ``batch``; all earlier logits pass.

        Blocks without the GIL; on a device it may return before the end, see ``synchronize``.

        Returns:
            ``OK``; ``NO_ROOM``: no KV cells for this batch, the context is as it was; ``ABORTED``:
            an ``AbortFlag`` was set, and the passes that had ended stay in the KV cache: ask
            ``seq_pos_max`` what was kept.  Logits are there after ``OK`` only.

        Raises:
            LlamaError: the batch is empty, longer than ``n_batch``, or names a sequence that there
                is not: refused here, for llama.cpp would end the process.  With ``code`` -1: a
                token id out of range, or positions that do not follow those in the KV cache; the
                context is as it was.  With ``code`` below -1: the backend failed, and an unknown
                part of the batch is in the KV cache; drop every sequence in it.

        Source: llama.h, above ``llama_decode``.
        """
        pointer = self._pointer
        if not 1 <= batch.n_tokens <= self._most:
            raise LlamaError(f"a decode takes 1 to {self._most} tokens, not {batch.n_tokens}")
        if batch.max_seq >= self.n_seq_max:
            raise LlamaError(f"sequence {batch.max_seq} is not in [0, {self.n_seq_max})")
        most_outputs = self.options.n_outputs_max
        if most_outputs and batch.n_outputs > most_outputs:
            raise LlamaError(f"{batch.n_outputs} tokens want logits, and n_outputs_max is {most_outputs}")
        self.n_decodes += 1
        self._rows = 0
        self._held.busy = True
        with self.model.library.logs.complaints() as complaints:
            try:
                code = int(self._c.llama_decode(pointer, batch._filled()))
            finally:
                self._held.busy = False
            if code == ABORTED:
                complaints.expected = True
            elif code < 0:
                said = f" ({complaints})" if str(complaints) else ""
                raise LlamaError(f"llama_decode returned {code}: {MEANINGS.get(code, FATAL)}{said}", code=code)
        if code == OK:
            self._rows = batch.n_outputs
            self._outputs = batch._wants[: batch.n_tokens].copy()
            self._copied_into.clear()
            self._copied_from.clear()
        return code

    def synchronize(self) -> None:
        """Wait until the last decode has been computed; without the GIL."""
        self._held.busy = True
        try:
            self._c.llama_synchronize(self._pointer)
        finally:
            self._held.busy = False

    def logits(self, rows: int | None = None) -> LogitsView:
        """The first ``rows`` rows of the last decode's logits, or all; waits for them.

        A row for each token that wanted logits, in batch order, whatever order they were computed in.

        Raises:
            LlamaError: the last decode gave fewer rows, or did not end with ``OK``.
        """
        pointer = self._pointer
        wanted = self._rows if rows is None else rows
        if not 0 <= wanted <= self._rows:
            raise LlamaError(f"the last decode gave {self._rows} rows of logits, not {wanted}")
        width = self.model.vocab.n_tokens
        if wanted == 0:
            return LogitsView(self, np.empty((0, width), np.float32))
        address = ctypes.cast(self._c.llama_get_logits(pointer), ctypes.c_void_p).value
        memory = (ctypes.c_float * (wanted * width)).from_address(address or 0)
        return LogitsView(self, np.frombuffer(memoryview(memory), np.float32).reshape(wanted, width))

    def _has_logits(self, index: int) -> bool:
        return self._rows > 0 and 0 <= index < len(self._outputs) and bool(self._outputs[index])

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """From the next decode on; as in ``ContextOptions``."""
        if not (1 <= n_threads <= 512 and 1 <= n_threads_batch <= 512):
            raise LlamaError(f"{n_threads} and {n_threads_batch} threads: 1 to 512 are possible")
        self._c.llama_set_n_threads(self._pointer, n_threads, n_threads_batch)

    @property
    def n_threads(self) -> int:
        return int(self._c.llama_n_threads(self._pointer))

    @property
    def n_threads_batch(self) -> int:
        return int(self._c.llama_n_threads_batch(self._pointer))

    def set_abort(self, flag: AbortFlag | None) -> None:
        """Let ``flag`` cut decodes short; ``None`` for never.  Between decodes only."""
        if flag is None:
            self._c.llama_set_abort_callback(self._pointer, ggml_abort_callback(), None)
        else:
            self._c.llama_set_abort_callback(self._pointer, *flag.callback)
        self._abort = flag

    # ── sequences ───────────────────────────────────────────────────────────────────────────

    def seq_remove(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget the tokens of ``seq`` at positions ``[p0, p1)``; a negative bound is open.

        Returns:
            ``False`` when the model's memory is recurrent and ``p0`` is not behind its end: nothing has
            changed then, unless ``n_rs_seq`` snapshots reach so far.  A whole sequence always goes.

        A sliding window never refuses: the answer is ``True`` also where the tokens before ``p0`` are no
        longer there, and what is decoded next is wrong.  Sound is a ``p0`` of ``seq_pos_min(seq) + n_swa - 1``
        or more, or any where ``seq_pos_min`` is 0.
        """
        return bool(self._c.llama_memory_seq_rm(self._mem(), self._seq(seq), _pos(p0), _pos(p1)))

    def seq_copy(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``target`` have the tokens of ``source`` at ``[p0, p1)`` too; a negative bound is open.

        In a unified cache the cells are shared, any range is possible, and ``target`` keeps what it
        had.  Otherwise the whole of ``source`` replaces ``target``, computed with the next decode.
        A recurrent state is copied as it is, whatever the range: that of the end of ``source``.

        Raises:
            LlamaError: a part is to be copied between streams, where llama.cpp would end the process.
        """
        memory, source, target = self._mem(), self._seq(source), self._seq(target)
        if source == target:
            return
        last = int(self._c.llama_memory_seq_pos_max(memory, source))
        if not self.options.kv_unified:
            if p0 > max(0, int(self._c.llama_memory_seq_pos_min(memory, source))) or 0 <= p1 <= last:
                raise LlamaError(
                    "a part of a sequence cannot be copied between streams; copy it whole and remove "
                    "from the copy, or use kv_unified"
                )
            p0 = p1 = -1
            self._copied_from.add(source)
            self._copied_into.add(target)
        self._c.llama_memory_seq_cp(memory, source, target, _pos(p0), _pos(p1))

    def seq_keep(self, seq: int) -> None:
        """Forget every sequence but ``seq``."""
        memory, seq = self._mem(), self._seq(seq)
        if self.options.kv_unified:
            self._c.llama_memory_seq_keep(memory, seq)
        else:  # llama.cpp looks at that sequence's stream only
            for other in range(self.n_seq_max):
                if other != seq:
                    self._c.llama_memory_seq_rm(memory, other, -1, -1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move the tokens of ``seq`` at ``[p0, p1)`` by ``delta`` positions.

        Raises:
            LlamaError: this model's memory cannot shift, or a position would become negative.
        """
        memory = self._mem()
        if not self._c.llama_memory_can_shift(memory):
            raise LlamaError("this model's memory cannot shift positions")
        if abs(delta) > INT32_MAX or (delta < 0 and max(p0, 0) + delta < 0):
            raise LlamaError(f"moving positions from {p0} by {delta} is out of bounds")
        self._c.llama_memory_seq_add(memory, self._seq(seq), _pos(p0), _pos(p1), delta)

    @property
    def can_shift(self) -> bool:
        """Whether ``seq_add`` is possible."""
        return bool(self._c.llama_memory_can_shift(self._mem()))

    def seq_pos_min(self, seq: int) -> int:
        """Lowest position of ``seq`` in memory; -1 when empty."""
        return int(self._c.llama_memory_seq_pos_min(self._mem(), self._seq(seq)))

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of ``seq`` in memory; -1 when empty."""
        return int(self._c.llama_memory_seq_pos_max(self._mem(), self._seq(seq)))

    def clear(self, *, data: bool = False) -> None:
        """Forget every sequence; with ``data`` also overwrite what was stored.

        Copies that the next decode completes are still made, into what is empty then.
        """
        self._c.llama_memory_clear(self._mem(), data)

    # ── the state of one sequence ───────────────────────────────────────────────────────────

    def state_size(self, seq: int, *, flags: int = 0) -> int:
        """Bytes that ``save_state_into`` needs for ``seq`` as it is now."""
        return int(self._c.llama_state_seq_get_size_ext(self._pointer, self._seq(seq), _flags(flags)))

    def save_state_into(self, seq: int, buffer: Any, *, flags: int = 0) -> int:
        """Write the KV of ``seq`` into a writable buffer (bytearray, mmap, numpy); without the GIL.

        Of layers with a sliding window the last window: what is loaded from it can go on, and back by
        one token.

        Returns:
            Bytes written.

        Raises:
            LlamaError: the buffer is too small or not writable, or ``seq`` was copied from another
                stream and not decoded since: its data are not there yet.
        """
        pointer = self._pointer
        if self._seq(seq) in self._copied_into and not self._without_kv(flags):
            raise LlamaError(f"sequence {seq} is a copy that the next decode completes; save it after that")
        try:
            view = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise LlamaError(f"not a buffer for a state: {error}") from None
        if view.readonly:
            raise LlamaError("the buffer for a state is not writable")
        needed = self.state_size(seq, flags=flags)
        if view.nbytes < needed:
            raise LlamaError(f"the state of sequence {seq} needs {needed} bytes, the buffer has {view.nbytes}")
        target = (ctypes.c_uint8 * view.nbytes).from_buffer(view)
        return self._state(self._c.llama_state_seq_get_data_ext, pointer, target, view.nbytes, seq, _flags(flags))

    def load_state_from(self, seq: int, buffer: Any, *, flags: int = 0) -> int:
        """Replace ``seq`` by a state that this kind of context has saved; without the GIL.

        The bytes are trusted: keep a checksum, the model's hash and the options beside them.

        With ``PARTIAL_ONLY`` a recurrent state or a window goes back to where it was saved, and what can
        be rolled back stays as it is: ``seq_remove`` the positions behind *after* that, for before it
        a recurrent memory refuses.

        Returns:
            Bytes read.

        Raises:
            LlamaError: not a state, of another shape, or no room.  ``seq`` is empty then; with
                ``PARTIAL_ONLY`` it is of no use, and has to be removed.  Or ``seq`` takes part in a copy
                between streams that the next decode completes, and would overwrite what was loaded:
                nothing has changed then.  A part without KV is no part of such a copy.
        """
        pointer = self._pointer
        if self._seq(seq) in self._copied_from and not self._without_kv(flags):
            raise LlamaError(f"sequence {seq} is being copied; load into it after the next decode")
        if seq in self._copied_into and not self._without_kv(flags):
            raise LlamaError(f"sequence {seq} is a copy that the next decode completes; load into it after that")
        try:
            view = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError) as error:
            raise LlamaError(f"not a buffer with a state: {error}") from None
        source = ctypes.cast(view.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        if not flags & PARTIAL_ONLY:  # of a state without tokens llama.cpp would keep those that are there
            self._c.llama_memory_seq_rm(self._mem(), seq, -1, -1)
        return self._state(self._c.llama_state_seq_set_data_ext, pointer, source, view.nbytes, seq, _flags(flags))

    def _without_kv(self, flags: int) -> bool:
        """The state that is meant has no KV, which copies between streams are made of."""
        return (
            bool(flags & PARTIAL_ONLY) and (self.model.is_recurrent or self.model.is_hybrid) and self.model.n_swa == 0
        )

    def _state(self, function: Any, *arguments: Any) -> int:
        self._held.busy = True
        try:
            with self.model.library.logs.complaints() as complaints:
                try:
                    return int(function(*arguments))
                except LlamaError as error:
                    raise LlamaError(f"a state was refused: {str(complaints) or error}", code=0) from None
        finally:
            self._held.busy = False

    # ── bounds ──────────────────────────────────────────────────────────────────────────────

    def _mem(self) -> Any:
        self._pointer  # noqa: B018  raises Closed
        if not self._memory:
            raise LlamaError("this model keeps no memory of a sequence")
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
