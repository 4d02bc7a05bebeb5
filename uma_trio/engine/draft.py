"""A draft model: a small model with the same vocabulary proposes the tokens that the model then verifies.

It has a context of its own in the engine's process.  The daemon says what it computes, and the engine answers how much
of each sequence it holds.  So after a restart, or when its cells were taken, the daemon sends the tokens again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

import llama_abi
from uma_trio.engine.fit import DRAFT_BATCH
from uma_trio.engine_link.messages import Draft, Drafted, DraftInput
from uma_trio.engine_link.row_counts import row_counts
from uma_trio.engine_link.tokens import common_list_prefix

TRIAL_CALLS: Final = 8
"""Calls of one token that are measured at the start, for each number of threads.  The fastest counts."""

TRIAL_PROMPT: Final = 64
"""Tokens of the measured prefill."""


class Drafter:
    """Proposes tokens, greedily.  Blocking; from the engine's thread only.

    Args:
        target: the model that verifies.
        path: the GGUF of the draft model.
        options: of the context of ``target``.
        abort: cuts calls short.
        gpu_layers, placement, use_mmap: as for ``target``.
        compiles: the device compiles a kernel when it is first used; all are used before the model serves.

    Raises:
        llama_abi.LlamaError: it cannot be loaded, or has another vocabulary.
    """

    def __init__(
        self,
        target: llama_abi.Model,
        path: Path,
        options: llama_abi.ContextOptions,
        abort: llama_abi.AbortFlag,
        *,
        gpu_layers: int,
        placement: llama_abi.Placement,
        use_mmap: bool,
        compiles: bool = False,
    ) -> None:
        self.name = path.name
        with contextlib.ExitStack() as stack:
            self._model = stack.enter_context(
                llama_abi.Model(target.library, path, n_gpu_layers=gpu_layers, placement=placement, use_mmap=use_mmap)
            )
            check_vocabulary(target.vocab, self._model.vocab, self.name)
            if self._model.is_recurrent or self._model.is_hybrid or self._model.n_swa:
                raise llama_abi.LlamaError(f"the draft model {self.name} cannot take tokens back; use another one")
            self._end_ids = frozenset(target.vocab.eog_ids)
            self._abort = abort
            self._options = attrs.evolve(
                options,
                n_batch=min(DRAFT_BATCH, options.n_batch),
                n_ubatch=min(DRAFT_BATCH, options.n_batch),
                n_outputs_max=options.n_seq_max,
                type_k="f16",
                type_v="f16",
            )
            self._batch = llama_abi.Batch(self._options.n_batch)
            self._held: dict[int, list[int]] = {}
            """The tokens in its KV cache, by sequence."""
            self._open()
            stack.callback(lambda: self._context.close())  # ``reset`` replaces it
            if compiles:
                self._use_all_kernels()
            self.call_ms, self.token_ms = self._measure()
            self._owned = stack.pop_all()

    def _open(self) -> None:
        self._context = llama_abi.Context(self._model, self._options)
        self.max_tokens = min(self._model.n_ctx_train, self._context.n_ctx_seq)
        self._context.set_abort_flag(self._abort)

    def reset(self) -> None:
        """Start again with an empty KV cache, on a new context."""
        self._held.clear()
        self._context.close()
        self._open()

    def info(self) -> dict[str, Any]:
        """The fields of ``ModelInfo`` about it."""
        return {
            "draft_model": self.name,
            "draft_ctx": self.max_tokens,
            "draft_batch": self._options.n_batch,
            "draft_call_ms": self.call_ms,
            "draft_token_ms": self.token_ms,
        }

    @property
    def buffers(self) -> tuple[llama_abi.Buffer, ...]:
        """What it has allocated."""
        return (*self._model.buffers, *self._context.buffers)

    def set_threads(self, n_threads: int) -> None:
        """Compute with at most this many threads from the next call on."""
        self._context.set_threads(min(self._n_threads, n_threads), n_threads)

    def close(self) -> None:
        self._owned.close()

    # -- proposing ------------------------------------------------------------------------------

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        """Compute the tokens of ``inputs``, and propose what follows, up to the end of the answer.

        What fails costs drafts, and nothing else.

        Args:
            min_probability: a draft ends where all of it is right with less than this.
        """
        began = time.perf_counter()
        calls = n_tokens = 0
        failure = None
        drafts: dict[int, list[int]] = {draft_input.seq_id: [] for draft_input in inputs}
        try:
            rows = self._prepare(inputs)
            n_tokens = sum([len(row.tokens) for row in rows])
            probability = dict.fromkeys(drafts, 1.0)
            waiting = self._begin(rows) if rows else []
            calls = int(bool(rows))
            while waiting:
                likeliest, probabilities = self._likeliest([row.temperature for row in waiting])
                going_on: list[DraftInput] = []
                for row, token, share in zip(waiting, likeliest, probabilities, strict=True):
                    probability[row.seq_id] *= share
                    if probability[row.seq_id] < min_probability:
                        continue
                    drafts[row.seq_id].append(token)
                    if len(drafts[row.seq_id]) < row.n_drafts and token not in self._end_ids:
                        going_on.append(row)
                waiting = going_on
                if waiting:
                    self._go_on([(row.seq_id, drafts[row.seq_id][-1]) for row in waiting])
                    calls += 1
        except (llama_abi.LlamaError, MemoryError) as error:
            failure = str(error)
            self.reset()
        drafted = [
            Draft(draft_input.seq_id, len(self._held.get(draft_input.seq_id, ())), drafts[draft_input.seq_id])
            for draft_input in inputs
        ]
        if failure is not None:
            drafted = [Draft(draft_input.seq_id, 0, ()) for draft_input in inputs]
        return Drafted(drafted, 1e3 * (time.perf_counter() - began), calls, n_tokens, failure)

    def _prepare(self, inputs: Sequence[DraftInput]) -> list[DraftInput]:
        """Remove what does not belong to the sequences; returns what is computed of each, as far as it fits a batch."""
        rows, room = [], self._options.n_batch
        for draft_input in inputs:
            held = self._held.setdefault(draft_input.seq_id, [])
            if len(held) < draft_input.position:
                self._cut(draft_input.seq_id, 0)
                continue
            most = len(draft_input.tokens) - bool(draft_input.n_drafts)  # drafts follow the logits of the last token
            n = common_list_prefix(held[draft_input.position :], draft_input.tokens[:most])
            self._cut(draft_input.seq_id, draft_input.position + n)
            if 0 < len(draft_input.tokens) - n <= room:
                room -= len(draft_input.tokens) - n
                rest = draft_input.tokens[n:]
                rows.append(
                    DraftInput(
                        draft_input.seq_id,
                        draft_input.position + n,
                        rest,
                        draft_input.n_drafts,
                        draft_input.temperature,
                    )
                )
        return rows

    def _cut(self, seq_id: int, length: int) -> None:
        if len(self._held[seq_id]) > length:
            self._context.seq_remove(seq_id, length or -1)
            del self._held[seq_id][length:]

    def _begin(self, rows: Sequence[DraftInput]) -> list[DraftInput]:
        """Compute the tokens of ``rows``; returns those that have a row of logits now, in order."""
        batch = self._batch
        batch.clear()
        waiting = []
        for row in rows:
            batch.add(
                row.tokens,
                pos=row.position,
                seq=row.seq_id,
                logits="last" if row.n_drafts else "none",
            )
            if row.n_drafts:
                waiting.append(row)
        self._decode([row.seq_id for row in rows])
        for row in rows:
            self._held[row.seq_id] += row.tokens
        return waiting

    def _go_on(self, rows: Sequence[tuple[int, int]]) -> None:
        """Compute one more token for each of these sequences."""
        seq_ids, tokens = zip(*rows, strict=True)
        self._batch.clear()
        self._batch.add_decodes(tokens, positions=[len(self._held[seq_id]) for seq_id in seq_ids], seqs=seq_ids)
        self._decode(seq_ids)
        for seq_id, token in rows:
            self._held[seq_id].append(token)

    def _decode(self, seq_ids: Sequence[int]) -> None:
        code = self._context.decode(self._batch)
        if code == 1:  # sequences that have ended still hold their tokens
            for other in [other for other in self._held if other not in seq_ids]:
                self._cut(other, 0)
            code = self._context.decode(self._batch)
        if code:
            raise llama_abi.LlamaError({1: "no room in the KV cache", 2: "aborted"}.get(code, f"code {code}"))

    def _likeliest(self, temperatures: Sequence[float]) -> tuple[list[int], list[float]]:
        """The most likely token of each row of logits, and its probability at the row's temperature.

        At a low temperature it is that of the logits as they are: the draft model is not that sure of itself.
        """
        logits = self._context.logits(len(temperatures)).array
        tokens = logits.argmax(axis=1)
        logits -= logits[np.arange(len(tokens)), tokens][:, None]
        if max(temperatures) > 1.0:
            logits /= np.maximum(1.0, temperatures)[:, None]
        np.exp(logits, out=logits)
        return tokens.tolist(), (1.0 / logits.sum(axis=1)).tolist()

    # -- its speed ------------------------------------------------------------------------------

    def _measure(self) -> tuple[float, float]:
        """Milliseconds of a call of one token, and of one more token of a prefill.  Chooses the number of threads."""
        chosen = self._options.n_threads
        best = float("inf")
        for threads in sorted({1, 2, chosen} & {*range(1, chosen + 1)}):
            self._context.set_threads(threads, self._options.n_threads_batch)
            ms = min([self._call_ms(1) for _ in range(TRIAL_CALLS)])
            if ms < best:
                best, self._n_threads = ms, threads
        self._context.set_threads(self._n_threads, self._options.n_threads_batch)
        prompt = min(TRIAL_PROMPT, self._options.n_batch)
        token_ms = max(0.0, min(self._call_ms(prompt) for _ in range(2)) - best) / prompt
        return best, token_ms

    def _use_all_kernels(self) -> None:
        """Compute chunks and decodes of each number of rows that has kernels of its own."""
        for rows in row_counts(self._options.n_batch):
            self._call_ms(rows)
            if rows <= self._options.n_seq_max:
                self._batch.clear()
                self._batch.add_decodes([0] * rows, positions=[0] * rows, seqs=range(rows))
                self._decode(range(rows))
                for seq_id in range(rows):
                    self._context.seq_remove(seq_id)

    def _call_ms(self, n: int) -> float:
        began = time.perf_counter()
        self._batch.clear()
        self._batch.add([0] * n, pos=0, seq=0)
        if self._context.decode(self._batch):
            raise llama_abi.LlamaError(f"the draft model {self.name} cannot compute {n} tokens")
        self._likeliest([0.0])
        self._context.seq_remove(0)
        return 1e3 * (time.perf_counter() - began)


def check_vocabulary(target: llama_abi.Vocab, draft: llama_abi.Vocab, name: str) -> None:
    """
    Raises:
        LlamaError: a token of the draft model ``name`` is another one than in ``target``.
    """
    problem = f"the draft model {name} has another vocabulary"
    if target.n_tokens != draft.n_tokens:
        raise llama_abi.LlamaError(f"{problem}: {draft.n_tokens} tokens, and the model has {target.n_tokens}")
    if not (target.has_tokenizer and draft.has_tokenizer):
        raise llama_abi.LlamaError("a draft model needs tokenizers in both files, to compare them")
    pairs = zip(target.tokens_to_bytes(special=True), draft.tokens_to_bytes(special=True), strict=True)
    for token, (one, other) in enumerate(pairs):
        if one != other:
            raise llama_abi.LlamaError(
                f"{problem}: token {token} is {_token_text(other)}, and {_token_text(one)} in the model"
            )
    if target.eog_ids != draft.eog_ids:
        raise llama_abi.LlamaError(f"{problem}: other tokens end an answer")


def _token_text(token: bytes) -> str:
    return repr(token.decode(errors="backslashreplace"))
